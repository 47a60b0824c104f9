//! The processes on the other side: this binary again, and `tensord`.
//!
//! Each tells its address in one line on stdout, which begins with
//! [`ANNOUNCEMENT`], and is ended by its own id when its handle drops.

use std::{
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde::{Serialize, de::DeserializeOwned};
use tempfile::TempDir;
use tensord_tests::cluster::Process;

/// What a line begins with that tells how to reach a server; JSON follows.
const ANNOUNCEMENT: &str = "serving ";

/// Tells the parent process how to reach this one.
///
/// # Errors
///
/// When `how` is not JSON.
pub(crate) fn announce(how: &impl Serialize) -> Result<()> {
    println!("{ANNOUNCEMENT}{}", serde_json::to_string(how)?);
    Ok(())
}

/// Starts this binary with `args`, and waits for its announcement. Its log goes
/// to `dir`.
///
/// # Errors
///
/// When it announces nothing that makes sense.
pub(crate) fn serve<T: DeserializeOwned>(args: &[&str], dir: &TempDir) -> Result<(Process, T)> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let own = std::env::current_exe().context("cannot find this binary")?;
    let mut command = Command::new(own);
    command.args(args);
    let name = format!("{}-{}.log", args[0], COUNT.fetch_add(1, Ordering::Relaxed));
    let process = Process::spawn(command, dir.path().join(name));
    let announced = announced(&process)?;
    Ok((process, announced))
}

/// The next announcement of `process`.
///
/// # Errors
///
/// When it makes no sense.
pub(crate) fn announced<T: DeserializeOwned>(process: &Process) -> Result<T> {
    let announced = process.wait_for("announcement", |line| {
        line.strip_prefix(ANNOUNCEMENT).map(str::to_owned)
    });
    serde_json::from_str(&announced).context("a process announced nonsense")
}

/// The next announcement of `process`, which may fail or take up to `deadline`.
///
/// # Errors
///
/// When there is none in time, or it makes no sense.
pub(crate) fn announced_within<T: DeserializeOwned>(
    process: &Process,
    deadline: Duration,
) -> Result<T> {
    let announced = process.try_wait_for("announcement", deadline, |line| {
        line.strip_prefix(ANNOUNCEMENT).map(str::to_owned)
    });
    let announced = announced.map_err(anyhow::Error::msg)?;
    serde_json::from_str(&announced).context("a process announced nonsense")
}

/// Takes `TENSORD_…` out of what `command` inherits: only what the bench sets
/// counts.
pub(crate) fn without_settings(command: &mut Command) {
    let inherited = std::env::vars_os().map(|(name, _)| name);
    for name in inherited.filter(|name| name.to_string_lossy().starts_with("TENSORD_")) {
        command.env_remove(name);
    }
}

/// Bytes of memory that a process has resident, now and at most; `None` where
/// the system does not tell.
pub(crate) fn resident_bytes(id: u32) -> Option<(u64, u64)> {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib << 10)
    };
    Some((field("VmRSS:")?, field("VmHWM:")?))
}

/// How long processes have run so far, all threads, to a hundredth of a second; `None`
/// where the system does not tell.
pub(crate) fn cpu_time(id: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // After the name, which may have anything in it: utime is the 12th, stime the next.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some(Duration::from_millis((ticks()? + ticks()?) * 10))
}

/// The `tensord` that was built along with this binary.
///
/// # Errors
///
/// When it was not.
pub(crate) fn tensord() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this binary")?;
    let name = format!("tensord{}", std::env::consts::EXE_SUFFIX);
    let found = own.ancestors().skip(1).take(2).map(|dir| dir.join(&name));
    match found.into_iter().find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!(
            "there is no {name} beside {}; build both: \
             cargo build --release --bin tensord --bin tensord-bench",
            own.display()
        ),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_works_is_seen_to() {
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
