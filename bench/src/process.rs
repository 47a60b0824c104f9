//! Server processes: this binary again, and `tensord`.
//!
//! Each process announces its address in one line on stdout that starts with
//! [`ANNOUNCEMENT`]. It is killed by its process id when its handle is dropped.

use std::{
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde::{Serialize, de::DeserializeOwned};
use tempfile::TempDir;
use tensord_testkit::{
    cluster::Process,
    resource_usage::{children, stat_fields},
};

/// The start of the line that announces how to reach a server; JSON follows.
const ANNOUNCEMENT: &str = "serving ";

/// Announces to the parent process how to reach this one.
///
/// # Errors
///
/// If `how` cannot be serialised.
pub(crate) fn announce(how: &impl Serialize) -> Result<()> {
    println!("{ANNOUNCEMENT}{}", serde_json::to_string(how)?);
    Ok(())
}

/// Starts this binary with `args` and waits for its announcement. Its log goes to `dir`.
///
/// # Errors
///
/// If the announcement cannot be parsed.
pub(crate) fn start_server<T: DeserializeOwned>(
    args: &[&str],
    dir: &TempDir,
) -> Result<(Process, T)> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let own = std::env::current_exe().context("cannot find the path of this binary")?;
    let mut command = Command::new(own);
    command.args(args);
    let name = format!("{}-{}.log", args[0], COUNT.fetch_add(1, Ordering::Relaxed));
    let process = Process::spawn(command, dir.path().join(name));
    let announced = read_announcement(&process)?;
    Ok((process, announced))
}

/// Returns the next announcement of `process`.
///
/// # Errors
///
/// If the announcement cannot be parsed.
pub(crate) fn read_announcement<T: DeserializeOwned>(process: &Process) -> Result<T> {
    let announced = process.wait_for("announcement", |line| {
        line.strip_prefix(ANNOUNCEMENT).map(str::to_owned)
    });
    serde_json::from_str(&announced).context("a process printed a malformed announcement")
}

/// Returns the next announcement of `process`, waiting at most `deadline`.
///
/// # Errors
///
/// If none arrives in time, or it cannot be parsed.
pub(crate) fn read_announcement_within<T: DeserializeOwned>(
    process: &Process,
    deadline: Duration,
) -> Result<T> {
    let announced = process.try_wait_for("announcement", deadline, |line| {
        line.strip_prefix(ANNOUNCEMENT).map(str::to_owned)
    });
    let announced = announced.map_err(anyhow::Error::msg)?;
    serde_json::from_str(&announced).context("a process printed a malformed announcement")
}

/// Removes all `TENSORD_…` variables from the environment of `command`, so that only the
/// bench's settings apply.
pub(crate) fn remove_settings(command: &mut Command) {
    let inherited = std::env::vars_os().map(|(name, _)| name);
    for name in inherited.filter(|name| name.to_string_lossy().starts_with("TENSORD_")) {
        command.env_remove(name);
    }
}

/// Returns whether this system has the files of `/proc` from which memory is read.
pub(crate) fn has_proc() -> bool {
    resident_bytes(std::process::id()).is_some()
}

/// Returns a process's resident memory in bytes, now and at its peak, or `None` where
/// `/proc` is not available.
pub(crate) fn resident_bytes(id: u32) -> Option<(u64, u64)> {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib << 10)
    };
    Some((field("VmRSS:")?, field("VmHWM:")?))
}

/// Returns the CPU time that a process and the processes that it has started have used so far
/// with all their threads, in steps of 10 ms, or `None` where `/proc` is not available.
/// Processes that have ended count as far as their parent has waited for them.
pub(crate) fn cpu_time(id: u32) -> Option<Duration> {
    let own = cpu_time_of_one(id)?;
    let started = children(id).into_iter().filter_map(cpu_time);
    Some(own + started.sum::<Duration>())
}

fn cpu_time_of_one(id: u32) -> Option<Duration> {
    // utime is the 12th, then stime, and both of the children that have ended.
    let fields = stat_fields(id)?;
    let times = fields.iter().skip(11).take(4);
    let ticks: Option<u64> = times.map(|field| field.parse::<u64>().ok()).sum();
    Some(Duration::from_millis(ticks? * 10))
}

/// Returns the path of the `tensord` that was built along with this binary.
///
/// # Errors
///
/// If it does not exist.
pub(crate) fn tensord_path() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the path of this binary")?;
    let name = format!("tensord{}", std::env::consts::EXE_SUFFIX);
    let found = own.ancestors().skip(1).take(2).map(|dir| dir.join(&name));
    match found.into_iter().find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!(
            "{name} does not exist beside {}; build both: \
             cargo build --release --bin tensord --bin tensord-bench",
            own.display()
        ),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_of_a_busy_process_grows() {
        let own = std::process::id();
        let before = cpu_time(own).unwrap();
        let mut work = 0u64;
        while cpu_time(own).unwrap() < before + Duration::from_millis(30) {
            work = std::hint::black_box(work + 1);
        }
        assert!(work > 0);
        assert_eq!(cpu_time(u32::MAX), None);
    }
}
