//! What a process takes of its host, and a wait until it is back where it was.
//!
//! The figures are Linux's own, from `/proc`.

use std::{
    fmt, fs,
    time::{Duration, Instant},
};

use crate::cluster::Process;

/// How long a process may take to give back what an attack made it take: timers of
/// connections and leases run for some seconds, and allocators keep memory for a while.
pub const SETTLE_DEADLINE: Duration = Duration::from_secs(60);

/// Between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// What a process takes of its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meters {
    /// Memory that is resident.
    pub resident_bytes: u64,
    /// The most that ever was.
    pub peak_bytes: u64,
    /// Open descriptors: files, sockets, pipes.
    pub descriptors: u64,
    /// Threads.
    pub threads: u64,
}

/// By how much a process may be above what it was.
#[derive(Debug, Clone, Copy)]
pub struct Bound {
    /// Resident memory.
    pub resident_bytes: u64,
    /// Open descriptors.
    pub descriptors: u64,
    /// Threads.
    pub threads: u64,
}

impl Default for Bound {
    /// 32 MiB, which caches and fragments of an allocator account for, and no descriptor
    /// and no thread beyond those of a connection or two that is just going.
    fn default() -> Self {
        Self {
            resident_bytes: 32 << 20,
            descriptors: 4,
            threads: 4,
        }
    }
}

impl fmt::Display for Meters {
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

impl Meters {
    /// The figures of the process `id`.
    ///
    /// # Panics
    ///
    /// When there is no such process, which after an attack says that it has crashed.
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

    /// All but the descriptors. A process that has ended and was not waited for yet has no
    /// memory in its status.
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

    /// What of `self` is more than `bound` above `before`, in words.
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
    /// What it takes of its host now.
    ///
    /// # Panics
    ///
    /// When it has ended; prints the log.
    pub fn meters(&self) -> Meters {
        Meters::read(self.id())
            .unwrap_or_else(|| panic!("the process has ended; its log:\n{}", self.log()))
    }

    /// Waits until it is within `bound` of `before`, and returns what it takes then.
    ///
    /// # Panics
    ///
    /// When that takes longer than [`SETTLE_DEADLINE`], or it has ended; prints the log.
    pub fn settled(&self, before: &Meters, bound: Bound) -> Meters {
        let until = Instant::now() + SETTLE_DEADLINE;
        loop {
            let now = self.meters();
            let Some(what) = now.excess(before, bound) else {
                return now;
            };
            assert!(
                Instant::now() < until,
                "too many {what}: {before} before, {now} now; its log:\n{}",
                self.log()
            );
            std::thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_figures_are_read_and_a_process_that_is_gone_has_none() {
        let own = Meters::of(std::process::id());
        assert!(own.resident_bytes > 1 << 20 && own.peak_bytes >= own.resident_bytes);
        assert!(own.descriptors >= 3 && own.threads >= 1);
        assert_eq!(Meters::read(u32::MAX), None);
        assert_eq!(Meters::parse("State:\tZ (zombie)\nThreads:\t1\n"), None);
    }

    #[test]
    fn what_is_too_much_is_named() {
        let before = Meters {
            resident_bytes: 100 << 20,
            peak_bytes: 200 << 20,
            descriptors: 20,
            threads: 10,
        };
        let bound = Bound::default();
        let excess = |now: Meters| now.excess(&before, bound);
        assert_eq!(excess(before), None);
        let with = |resident_bytes, descriptors, threads| Meters {
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
