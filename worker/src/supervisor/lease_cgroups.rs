//! A control group for the process of each lease, which bounds the process's memory. A process is
//! moved to its group when it starts, as that takes long, and is bounded when it has a lease.
//!
//! A session's [account](crate::memory) counts tensors exactly. The control group bounds what the
//! account does not see: compiled kernels, buffers of drivers, and whatever a program allocates
//! that has gained control of the process. Without it, the kernel would look for a process to kill
//! when the whole host has no memory left.
//!
//! The groups are children of the worker's own group, so the worker must be allowed to make
//! them. In version 2 a group that has children must have no processes itself, so the worker
//! moves to a child, too.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
};

use tracing::debug;

use crate::{cgroup::own_memory_group, memory::format_bytes};

/// How often a tensor may be in memory: once on its device, and once in replies on their way to the
/// client.
const COPIES: u64 = 2;

/// Memory of a process beyond tensors: program, stacks, kernels and what drivers allocate.
const OVERHEAD_BYTES: u64 = 1 << 30;

/// How the names of groups of processes of leases begin. The process ids of the worker and of the
/// process follow.
const LEASE_PREFIX: &str = "tensord-lease-";

/// How the names of groups of workers begin. The process id follows.
const WORKER_PREFIX: &str = "tensord-worker-";

/// The file of a group with the processes in it.
const PROCESSES: &str = "cgroup.procs";

/// The parent of the groups of a worker's leases.
#[derive(Debug)]
pub(super) struct LeaseCgroups {
    parent: PathBuf,
    is_v2: bool,
}

/// The control group of a process that runs a lease, or will. Dropping it removes the group, in
/// which no process must be left.
#[derive(Debug)]
pub(super) struct LeaseCgroup {
    directory: PathBuf,
    is_v2: bool,
    /// `None` until the process has a lease.
    limit_bytes: Option<u64>,
}

impl LeaseCgroups {
    /// Prepares the worker's own group to have children, and removes those that earlier workers
    /// have left. Must be called before the worker starts its first process.
    ///
    /// # Errors
    ///
    /// What is missing, for people.
    pub(super) fn prepare() -> Result<Self, String> {
        let (is_v2, own) = own_memory_group().ok_or("control groups for memory")?;
        let parent = match is_v2 {
            true => prepare_v2(&own),
            false => Ok(own.clone()),
        };
        let parent = parent.and_then(|parent| {
            remove_leftovers(&parent)?;
            // Whether the worker may make groups.
            let probe = parent.join(format!("{LEASE_PREFIX}{}-probe", process::id()));
            fs::create_dir(&probe)?;
            fs::remove_dir(&probe)?;
            Ok(parent)
        });
        match parent {
            Ok(parent) => Ok(Self { parent, is_v2 }),
            Err(e) => Err(format!(
                "permission to make control groups in {} ({e})",
                own.display()
            )),
        }
    }

    /// Makes a group for the process `id`, and moves the process to it. The kernel may take more
    /// than 10 ms for the move.
    ///
    /// # Errors
    ///
    /// When the system refuses it.
    pub(super) fn create(&self, id: u32) -> io::Result<LeaseCgroup> {
        let name = format!("{LEASE_PREFIX}{}-{id}", process::id());
        let group = LeaseCgroup {
            directory: self.parent.join(name),
            is_v2: self.is_v2,
            limit_bytes: None,
        };
        fs::create_dir(&group.directory)?;
        fs::write(group.directory.join(PROCESSES), id.to_string())?;
        Ok(group)
    }
}

impl LeaseCgroup {
    /// Bounds the memory of the group's process, which may take `device_bytes` for tensors.
    ///
    /// # Errors
    ///
    /// When the system refuses it.
    pub(super) fn limit(&mut self, device_bytes: u64) -> io::Result<()> {
        let limit_bytes = device_bytes
            .saturating_mul(COPIES)
            .saturating_add(OVERHEAD_BYTES);
        let limit = match self.is_v2 {
            true => "memory.max",
            false => "memory.limit_in_bytes",
        };
        fs::write(self.directory.join(limit), limit_bytes.to_string())?;
        self.limit_bytes = Some(limit_bytes);
        // Tensors must not be swapped. Not every kernel counts swap.
        let (swap, swap_limit) = match self.is_v2 {
            true => ("memory.swap.max", 0),
            false => ("memory.memsw.limit_in_bytes", limit_bytes),
        };
        let swap = self.directory.join(swap);
        if swap.exists() {
            fs::write(swap, swap_limit.to_string())?;
        }
        Ok(())
    }

    /// Returns a description of the process's end if the kernel has killed it because it reached
    /// the limit.
    pub(super) fn out_of_memory(&self) -> Option<String> {
        let limit = format_bytes(self.limit_bytes?);
        let events = match self.is_v2 {
            true => "memory.events",
            false => "memory.oom_control",
        };
        let events = fs::read_to_string(self.directory.join(events)).ok()?;
        (oom_kills(&events) > 0)
            .then(|| format!("the kernel killed it because it needed more than {limit} of memory"))
    }
}

impl Drop for LeaseCgroup {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_dir(&self.directory) {
            // The next start of a worker removes it.
            debug!("cannot remove {}: {e}", self.directory.display());
        }
    }
}

/// Moves this process from its group to a child of the group, and has the group's children
/// count memory. Returns the group.
fn prepare_v2(own: &Path) -> io::Result<PathBuf> {
    let id = process::id().to_string();
    let worker = own.join(format!("{WORKER_PREFIX}{id}"));
    fs::create_dir(&worker)?;
    let prepared = fs::write(worker.join(PROCESSES), &id)
        .and_then(|()| fs::write(own.join("cgroup.subtree_control"), "+memory"));
    if prepared.is_err() {
        // Nothing better can be done about errors: this process works in either group.
        let _ = fs::write(own.join(PROCESSES), &id);
        let _ = fs::remove_dir(&worker);
    }
    prepared.map(|()| own.to_owned())
}

/// Removes the groups of workers that have ended.
fn remove_leftovers(parent: &Path) -> io::Result<()> {
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        let owner = entry.file_name().to_str().and_then(owner_of);
        if owner.is_some_and(|id| !Path::new(&format!("/proc/{id}")).exists()) {
            // An error means that a process is still exiting.
            let _ = fs::remove_dir(entry.path());
        }
    }
    Ok(())
}

/// Returns the process id of the worker that has made a group of this name.
fn owner_of(name: &str) -> Option<u32> {
    let own = [LEASE_PREFIX, WORKER_PREFIX];
    let rest = own.iter().find_map(|prefix| name.strip_prefix(prefix))?;
    rest.split('-').next()?.parse().ok()
}

/// Returns how many processes the kernel has killed, from the text of `memory.events` or
/// `memory.oom_control`.
fn oom_kills(events: &str) -> u64 {
    let mut counts = events
        .lines()
        .filter_map(|line| line.strip_prefix("oom_kill "));
    counts
        .next()
        .and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_name_their_worker() {
        assert_eq!(owner_of("tensord-lease-17-4194303"), Some(17));
        assert_eq!(owner_of("tensord-worker-4194304"), Some(4_194_304));
        for other in ["tensord-lease-", "tensord-lease-x-1", "user.slice", ""] {
            assert_eq!(owner_of(other), None, "{other}");
        }
    }

    #[test]
    fn kills_are_counted_in_both_versions() {
        let v2 = "low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\noom_group_kill 0\n";
        assert_eq!(oom_kills(v2), 1);
        let v1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        assert_eq!(oom_kills(v1), 3);
        assert_eq!(oom_kills("oom_kill_disable 1\n"), 0);
        assert_eq!(oom_kills(""), 0);
    }
}
