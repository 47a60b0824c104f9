//! Resource usage of a process with the processes that it started, as a worker runs each lease
//! in a process of its own; and a wait until it has returned to an earlier level.
//!
//! The figures come from Linux's `/proc`.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use crate::cluster::{Cluster, Process};

/// Time limit for a process to release what an attack made it allocate: timers of
/// connections and leases run for some seconds, and allocators keep memory for a while.
pub const SETTLE_DEADLINE: Duration = Duration::from_secs(60);

/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Resource usage of a process and its descendants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResourceUsage {
    /// Resident memory in bytes.
    pub resident_bytes: u64,
    /// Highest resident memory so far, in bytes: the sum of what each process had at most.
    pub peak_bytes: u64,
    /// Number of open descriptors: files, sockets, pipes.
    pub descriptors: u64,
    /// Number of threads.
    pub threads: u64,
}

/// Increase over an earlier measurement up to which a process counts as settled.
#[derive(Debug, Clone, Copy)]
pub struct Bound {
    /// Increase of resident memory in bytes.
    pub resident_bytes: u64,
    /// Increase of open descriptors.
    pub descriptors: u64,
    /// Increase of the number of threads.
    pub threads: u64,
}

impl Default for Bound {
    /// 32 MiB for caches and fragmentation of allocators, and 4 descriptors and 4 threads
    /// for a connection or two that are about to end.
    fn default() -> Self {
        Self {
            resident_bytes: 32 << 20,
            descriptors: 4,
            threads: 4,
        }
    }
}

impl fmt::Display for ResourceUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} MiB resident ({} at most), {} descriptors, {} threads",
            self.resident_bytes >> 20,
            self.peak_bytes >> 20,
            self.descriptors,
            self.threads
        )
    }
}

impl ResourceUsage {
    /// Returns the usage of the process `id`.
    ///
    /// # Panics
    ///
    /// If there is no such process, which after an attack means that it has crashed.
    pub fn of(id: u32) -> Self {
        Self::read(id).unwrap_or_else(|| panic!("process {id} is gone"))
    }

    fn read(id: u32) -> Option<Self> {
        let mut usage = Self::read_one(id)?;
        let mut left = children(id);
        while let Some(id) = left.pop() {
            // A process may have ended meanwhile.
            if let Some(one) = Self::read_one(id) {
                usage.resident_bytes += one.resident_bytes;
                usage.peak_bytes += one.peak_bytes;
                usage.descriptors += one.descriptors;
                usage.threads += one.threads;
                left.extend(children(id));
            }
        }
        Some(usage)
    }

    fn read_one(id: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
        let descriptors = fs::read_dir(format!("/proc/{id}/fd")).ok()?;
        Some(Self {
            descriptors: descriptors.count() as u64,
            ..Self::parse(&status)?
        })
    }

    /// Parses `/proc/<id>/status`, which has all figures except descriptors. Returns `None`
    /// for a zombie, whose status has no memory figures.
    fn parse(status: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            let number = line.split_whitespace().next()?;
            number.parse::<u64>().ok()
        };
        Some(Self {
            resident_bytes: field("VmRSS:")? << 10,
            peak_bytes: field("VmHWM:")? << 10,
            descriptors: 0,
            threads: field("Threads:")?,
        })
    }

    /// Names the first figure of `self` that exceeds `before` by more than `bound`.
    fn excess(&self, before: &Self, bound: Bound) -> Option<&'static str> {
        if self.resident_bytes > before.resident_bytes + bound.resident_bytes {
            return Some("memory");
        }
        if self.descriptors > before.descriptors + bound.descriptors {
            return Some("descriptors");
        }
        (self.threads > before.threads + bound.threads).then_some("threads")
    }
}

/// Returns the ids of the processes that process `id` has started and that have not been
/// reaped. Linux lists them by the thread that started them.
pub fn children(id: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{id}/task"));
    let tasks = tasks.into_iter().flatten().flatten();
    let lists = tasks.flat_map(|task| fs::read_to_string(task.path().join("children")));
    let mut ids: Vec<u32> = lists
        .flat_map(|ids| {
            ids.split_whitespace()
                .flat_map(str::parse)
                .collect::<Vec<_>>()
        })
        .collect();
    ids.sort_unstable();
    ids
}

/// Returns the ids of the processes that run leases of the worker with process `id`. Spares have
/// another name.
pub fn processes_of_leases(id: u32) -> Vec<u32> {
    let name = |id: &u32| fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
    let mut running = children(id);
    running.retain(|id| name(id).trim_end() == "tensord-lease");
    running
}

/// Returns the control groups that the worker with process `id` has made for its processes.
pub fn control_groups(id: u32) -> Vec<PathBuf> {
    let prefix = format!("tensord-lease-{id}-");
    let (mut found, mut open) = (Vec::new(), vec![PathBuf::from("/sys/fs/cgroup")]);
    while let Some(directory) = open.pop() {
        // Other groups come and go.
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if entry.file_name().to_string_lossy().starts_with(&prefix) {
                found.push(entry.path());
            }
            open.push(entry.path());
        }
    }
    found
}

/// Returns the fields of `/proc/<id>/stat` after the process's name, or `None` if there is no such
/// process. The first one is its state.
pub fn stat_fields(id: u32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name is in parentheses, and may contain any character.
    let (_, fields) = stat.rsplit_once(')')?;
    Some(fields.split_whitespace().map(str::to_owned).collect())
}

/// Returns whether a process has not ended yet. One that its parent has not waited for, a
/// zombie, has ended.
pub fn is_running(id: u32) -> bool {
    let fields = stat_fields(id).unwrap_or_default();
    let state = fields.first();
    state.is_some_and(|state| !matches!(state.as_str(), "Z" | "X"))
}

/// Sends a signal to a process. Returns `false` if the process is gone.
pub fn signal_process(id: u32, signal: &str) -> bool {
    let arguments = [format!("-{signal}"), id.to_string()];
    let sent = Command::new("kill").args(arguments).status();
    sent.is_ok_and(|status| status.success())
}

/// Returns the size of each snapshot that the process with this id has in memory.
pub fn snapshots_bytes(id: u32) -> Vec<u64> {
    let size = |path: &Path| fs::metadata(path).ok().map(|file| file.len());
    snapshot_paths(id).filter_map(|path| size(&path)).collect()
}

fn snapshot_paths(id: u32) -> impl Iterator<Item = PathBuf> {
    let fds = fs::read_dir(format!("/proc/{id}/fd"));
    let paths = fds.into_iter().flatten().flatten().map(|fd| fd.path());
    paths.filter(|path| {
        let target = fs::read_link(path).unwrap_or_default();
        target.to_string_lossy().contains("tensord-snapshot")
    })
}

impl Cluster {
    /// Waits until another worker than the one with index `source` has a snapshot, whole.
    ///
    /// # Panics
    ///
    /// Under the conditions of [`wait`](Self::wait).
    pub fn wait_for_copy(&self, source: usize) {
        self.wait("a snapshot at another worker", || {
            let taken = self.workers[source].snapshots_bytes();
            let mut others = (0..).zip(&self.workers).filter(|(at, _)| *at != source);
            others.any(|(_, worker)| {
                let mut kept = worker.snapshots_bytes().into_iter();
                kept.any(|bytes| bytes > 0 && taken.contains(&bytes))
            })
        });
    }
}

impl Process {
    /// Returns the ids of the processes that run leases, and of those that wait for one.
    pub fn children(&self) -> Vec<u32> {
        children(self.id())
    }

    /// Returns the ids of the processes that run leases.
    pub fn processes_of_leases(&self) -> Vec<u32> {
        processes_of_leases(self.id())
    }

    /// Returns the size of each snapshot that this process has in memory.
    pub fn snapshots_bytes(&self) -> Vec<u64> {
        snapshots_bytes(self.id())
    }

    /// Returns the content of each snapshot that this process has in memory.
    pub fn snapshots(&self) -> Vec<Vec<u8>> {
        snapshot_paths(self.id())
            .filter_map(|path| fs::read(path).ok())
            .collect()
    }

    /// Waits until exactly one process runs a lease, and returns its id; processes of earlier
    /// leases may still be exiting.
    ///
    /// # Panics
    ///
    /// If there is none, or several, within 10 seconds. The message contains the log.
    pub fn process_of_lease(&self) -> u32 {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let running = self.processes_of_leases();
            match running[..] {
                [id] => return id,
                _ if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
                _ => panic!("{running:?} run leases; the log:\n{}", self.log()),
            }
        }
    }

    /// Sends a signal to a process that this worker has started.
    ///
    /// # Panics
    ///
    /// If the process is gone.
    pub fn signal_child(&self, id: u32, signal: &str) {
        let is_sent = signal_process(id, signal);
        assert!(is_sent, "process {id} is gone; the log:\n{}", self.log());
    }

    /// Waits until this worker has as many processes as `leases` run and spares wait, and none of
    /// them is still starting.
    ///
    /// # Panics
    ///
    /// If it has not within [`SETTLE_DEADLINE`]. The message contains the log.
    pub fn wait_for_processes(&self, leases: usize, spares: usize) {
        let until = Instant::now() + SETTLE_DEADLINE;
        let mut before = None;
        loop {
            let now = self.resource_usage();
            let now = (self.children(), now.descriptors, now.threads);
            if now.0.len() == leases + spares && before.as_ref() == Some(&now) {
                return;
            }
            before = Some(now);
            assert!(
                Instant::now() < until,
                "{:?} instead of {leases} processes of leases and {spares} spares; its log:\n{}",
                self.children(),
                self.log()
            );
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the process's current usage.
    ///
    /// # Panics
    ///
    /// If the process has ended. The message contains the log.
    pub fn resource_usage(&self) -> ResourceUsage {
        ResourceUsage::read(self.id())
            .unwrap_or_else(|| panic!("the process has ended; its log:\n{}", self.log()))
    }

    /// Waits until the process's usage is within `bound` of `before`, and returns that
    /// usage.
    ///
    /// # Panics
    ///
    /// If the process takes longer than [`SETTLE_DEADLINE`] or has ended. The message
    /// contains the log.
    pub fn wait_until_settled(&self, before: &ResourceUsage, bound: Bound) -> ResourceUsage {
        let until = Instant::now() + SETTLE_DEADLINE;
        loop {
            let now = self.resource_usage();
            let Some(what) = now.excess(before, bound) else {
                return now;
            };
            assert!(
                Instant::now() < until,
                "too many {what}: {before} before, {now} now; its log:\n{}",
                self.log()
            );
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_read_for_live_processes_only() {
        let own = ResourceUsage::of(std::process::id());
        assert!(own.resident_bytes > 1 << 20 && own.peak_bytes >= own.resident_bytes);
        assert!(own.descriptors >= 3 && own.threads >= 1);
        assert_eq!(ResourceUsage::read(u32::MAX), None);
        assert_eq!(
            ResourceUsage::parse("State:\tZ (zombie)\nThreads:\t1\n"),
            None
        );
    }

    #[test]
    fn excess_names_the_exceeded_figure() {
        let before = ResourceUsage {
            resident_bytes: 100 << 20,
            peak_bytes: 200 << 20,
            descriptors: 20,
            threads: 10,
        };
        let bound = Bound::default();
        let excess = |now: ResourceUsage| now.excess(&before, bound);
        assert_eq!(excess(before), None);
        let with = |resident_bytes, descriptors, threads| ResourceUsage {
            resident_bytes,
            descriptors,
            threads,
            ..before
        };
        assert_eq!(excess(with(132 << 20, 24, 14)), None);
        assert_eq!(excess(with(133 << 20, 24, 14)), Some("memory"));
        assert_eq!(excess(with(1, 25, 14)), Some("descriptors"));
        assert_eq!(excess(with(1, 24, 15)), Some("threads"));
    }
}
