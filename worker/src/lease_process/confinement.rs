//! What the process of a lease gives up before it runs the lease.
//!
//! The process runs ops of a program that may be hostile. Checks keep harmful ops out; what
//! gets past a check, or finds a bug in a driver, shall reach nothing but its own lease. So
//! the process confines itself for good, before it starts its second thread. A spare gives up
//! at once what no lease needs, as that takes some milliseconds. Which files it needs depends on
//! the lease's devices.
//!
//! - It gives up all capabilities, gets no further privileges (`no_new_privs`), and leaves no
//!   core dump.
//! - [`syscalls`] lists the system calls that it may make: not `execve`, `fork`, `ptrace`,
//!   `accept`, nor any that it has no use for.
//! - Landlock restricts its files. Without a driver, the process reads libraries, `/proc`, `/sys`
//!   and the configuration of names and time zones. With a driver, it reads everything except
//!   the worker's state and other secrets, and writes to [`DRIVER_WRITABLE`], [`OWN_THREADS`] and
//!   compiled kernels. Landlock also keeps the process from reading other processes and from sending
//!   signals to them.
//!
//! A kernel may lack Landlock or filters of system calls. The rest still applies, and the
//! worker's log names at the start what is missing. A kernel with an older Landlock enforces the
//! rights that it knows.

mod syscalls;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use landlock::{
    ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
    Scope, path_beneath_rules,
};
use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs},
};

/// The latest version of Landlock whose rights are handled here. An older kernel enforces
/// those that it knows.
const LANDLOCK: ABI = ABI::V6;

/// What every process may read: shared libraries, `/proc`, `/sys`, time zones, and what the
/// resolver of host names needs.
const READABLE: [&str; 19] = [
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/lib",
    "/lib32",
    "/lib64",
    "/proc",
    "/sys",
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/resolv.conf",
    "/etc/services",
    "/run/systemd/resolve",
];

/// Devices that every process may use.
const DEVICES: [&str; 4] = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"];

/// What drivers may write to: devices, and scratch space.
const DRIVER_WRITABLE: [&str; 3] = ["/dev", "/tmp", "/var/tmp"];

/// The directory in which NVIDIA's driver names its threads, and without which it does not work. Landlock
/// cannot allow the names alone: the process may also change its other settings there, such as how soon
/// the kernel kills it for memory.
const OWN_THREADS: &str = "/proc/self/task";

/// A process may open this part of the files that the worker may open.
const FILES_DIVISOR: u64 = 4;

/// Fewest files that a process may open, unless the worker may open fewer.
const MIN_FILES: u64 = 256;

/// Most files that a process may open.
const MAX_FILES: u64 = 16 << 10;

/// What a process needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Needs {
    /// Whether a driver is loaded. The process may then read all files that are not hidden.
    pub(super) has_drivers: bool,
    /// Directory of compiled kernels.
    pub(super) kernel_cache: Option<PathBuf>,
    /// Files and directories that the process must not open, though a driver is loaded.
    pub(super) hidden: Vec<PathBuf>,
}

/// A protection that the kernel does not have, for people.
pub(super) type Lacking = Option<&'static str>;

/// Restricts the system calls of the calling thread, and of all threads that it starts later.
/// Returns what the kernel does not support.
///
/// # Errors
///
/// When the kernel supports a protection and refuses it.
pub(super) fn restrict_calls() -> Result<Lacking, String> {
    let no_core = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, no_core).map_err(|e| format!("cannot forbid core dumps: {e}"))?;
    limit_files().map_err(|e| format!("cannot limit open files: {e}"))?;
    // A process of a worker that runs as root has root's capabilities, with which it could bypass
    // the restrictions below.
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, none).map_err(|e| format!("cannot give up capabilities: {e}"))?;
    set_no_new_privs(true).map_err(|e| format!("cannot give up new privileges: {e}"))?;
    let has_filters = syscalls::restrict();
    let has_filters = has_filters.map_err(|e| format!("cannot restrict system calls: {e}"))?;
    Ok((!has_filters).then_some("a filter of system calls"))
}

/// Limits the number of open files to a part of the worker's. The kernel counts descriptors that
/// are on their way through sockets by user, and lets a process send more while they are fewer
/// than its own limit. So a process cannot use up what the worker needs to pass connections on.
fn limit_files() -> rustix::io::Result<()> {
    let worker = getrlimit(Resource::Nofile).current.unwrap_or(MAX_FILES);
    let own = (worker / FILES_DIVISOR).clamp(MIN_FILES.min(worker), MAX_FILES);
    let limit = Rlimit {
        current: Some(own),
        maximum: Some(own),
    };
    setrlimit(Resource::Nofile, limit)
}

/// Restricts files, TCP ports, access to other processes, and, if the process needs no driver, the system
/// calls that only drivers need, for the calling thread and all threads that it starts later. Returns
/// what the kernel does not support. `has_filters` is whether [`restrict_calls`] has found filters of
/// system calls.
///
/// # Errors
///
/// When the kernel supports a protection and refuses it.
pub(super) fn restrict_to(needs: &Needs, has_filters: bool) -> Result<Lacking, String> {
    if has_filters && !needs.has_drivers {
        let restricted = syscalls::restrict_to_sessions();
        let restricted = restricted.map_err(|e| format!("cannot restrict system calls: {e}"))?;
        if !restricted {
            return Err("the kernel refuses a second filter of system calls".into());
        }
    }
    let status = enforce(needs).map_err(|e| format!("cannot restrict files: {e}"))?;
    Ok(match status {
        RulesetStatus::FullyEnforced => None,
        RulesetStatus::PartiallyEnforced => Some("a part of Landlock"),
        RulesetStatus::NotEnforced => Some("Landlock"),
    })
}

/// Enforces the rules of Landlock, as far as the kernel knows them.
fn enforce(needs: &Needs) -> Result<RulesetStatus, landlock::RulesetError> {
    let read = AccessFs::from_read(LANDLOCK);
    let all = AccessFs::from_all(LANDLOCK);
    // A path that may be written may be read, too, and files below it may be made, removed and
    // truncated. But no sockets, with which this process could pose as a service, and no devices.
    let special =
        AccessFs::MakeSock | AccessFs::MakeFifo | AccessFs::MakeChar | AccessFs::MakeBlock;
    let write = all & !special;
    let readable = match needs.has_drivers {
        true => all_but(Path::new("/"), &needs.hidden),
        false => READABLE.iter().map(PathBuf::from).collect(),
    };
    let writable = writable(needs);
    let own_threads = needs.has_drivers.then_some(OWN_THREADS);
    // The kernel forgets the rule for this directory with the directory's entry in its cache, unless
    // somebody has it open.
    std::mem::forget(own_threads.map(fs::File::open));
    let status = Ruleset::default()
        .handle_access(all)?
        // No rule allows a port to listen on.
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::from_all(LANDLOCK))?
        .create()?
        .add_rules(path_beneath_rules(readable, read))?
        .add_rules(path_beneath_rules(writable, write))?
        .add_rules(path_beneath_rules(
            own_threads,
            AccessFs::WriteFile | AccessFs::Truncate,
        ))?
        .restrict_self()?;
    Ok(status.ruleset)
}

fn writable(needs: &Needs) -> Vec<PathBuf> {
    let mut writable: Vec<_> = DEVICES.iter().map(PathBuf::from).collect();
    if needs.has_drivers {
        let scratch = DRIVER_WRITABLE.iter().map(Path::new);
        writable.extend(scratch.flat_map(|path| all_but(path, &needs.hidden)));
        writable.extend(needs.kernel_cache.clone());
    }
    writable
}

/// Returns the fewest files and directories that together are all of `root` except `hidden`
/// and the directories above those. Symbolic links are left out: what they lead to is allowed
/// by its own path, if at all.
fn all_but(root: &Path, hidden: &[PathBuf]) -> Vec<PathBuf> {
    let hidden = hidden.iter();
    let hidden: BTreeSet<_> = hidden.flat_map(fs::canonicalize).collect();
    let mut allowed = Vec::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        if hidden.iter().any(|path| directory.starts_with(path)) {
            continue;
        }
        if !hidden.iter().any(|path| path.starts_with(&directory)) {
            allowed.push(directory);
            continue;
        }
        // An unreadable directory has nothing for this process.
        let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
        let is_link = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_symlink());
        let entries = entries.filter(|entry| !is_link(entry));
        directories.extend(entries.map(|entry| entry.path()));
    }
    allowed.sort();
    allowed.dedup();
    allowed
}

#[cfg(test)]
mod tests;
