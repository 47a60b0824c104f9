//! Resource usage of a process, and a wait until it has returned to an earlier level.
//!
//! The figures come from Linux's `/proc`.

use std::{
    fmt, fs,
    time::{Duration, Instant},
};

use crate::cluster::Process;

/// Time limit for a process to release what an attack made it allocate: timers of
/// connections and leases run for some seconds, and allocators keep memory for a while.
pub const SETTLE_DEADLINE: Duration = Duration::from_secs(60);

/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Resource usage of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResourceUsage {
    /// Resident memory in bytes.
    pub resident_bytes: u64,
    /// Highest resident memory so far, in bytes.
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

impl Process {
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
