//! What leases use of devices: how long the devices work, memory over time, bytes moved, and ops.
//!
//! - A [`DeviceMeter`] counts how long a device works, for all leases.
//! - A [`LeaseMeter`] counts what one lease uses of a device, in the process that runs the lease.
//! - [`ledger`] adds up what the processes of leases have counted, grant by grant, for the
//!   scheduler.
//!
//! The two meters count the same work, and each of them by itself, so that a sum over leases can be
//! checked against the devices. Both are updated at the bounds of time slices and of reads that are
//! awaited, never within an op. What a GPU still computes when a time slice is over counts once
//! the session waits for a value of it.

pub(crate) mod ledger;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tensord_proto::v1::UsageCounters;

use crate::{locks::lock, memory::DeviceMemory};

/// Nanoseconds in a second.
const NANOS: u128 = 1_000_000_000;

/// The time in which something runs. Time in which several run counts once.
#[derive(Debug, Default)]
struct BusyTime {
    running: usize,
    /// Up to when time is counted.
    counted_to: Option<Instant>,
    total: Duration,
}

impl BusyTime {
    fn begin(&mut self, now: Instant) {
        if self.running == 0 {
            // Another thread may have ended later than this one has read the clock.
            self.counted_to = self.counted_to.max(Some(now));
        }
        self.running += 1;
    }

    fn end(&mut self, now: Instant) {
        self.advance(now);
        self.running -= 1;
    }

    /// Returns the time up to `now`, that of what still runs included.
    fn advance(&mut self, now: Instant) -> Duration {
        if self.running > 0
            && let Some(counted_to) = self.counted_to
        {
            self.total += now.saturating_duration_since(counted_to);
            self.counted_to = Some(counted_to.max(now));
        }
        self.total
    }
}

/// The sum of bytes over time, from samples. Between two samples, the bytes count as their mean.
#[derive(Debug)]
struct BytesOverTime {
    sampled_at: Instant,
    bytes: u64,
    /// Twice the sum, as the mean of two numbers of bytes need not be a whole number.
    doubled_byte_nanos: u128,
}

impl BytesOverTime {
    fn new(now: Instant, bytes: u64) -> Self {
        Self {
            sampled_at: now,
            bytes,
            doubled_byte_nanos: 0,
        }
    }

    fn sample(&mut self, now: Instant, bytes: u64) {
        let nanos = now.saturating_duration_since(self.sampled_at).as_nanos();
        let doubled_mean = u128::from(self.bytes) + u128::from(bytes);
        self.doubled_byte_nanos += doubled_mean * nanos;
        (self.sampled_at, self.bytes) = (self.sampled_at.max(now), bytes);
    }

    fn byte_seconds(&self) -> u64 {
        let byte_seconds = self.doubled_byte_nanos / (2 * NANOS);
        byte_seconds.try_into().unwrap_or(u64::MAX)
    }
}

/// Counts how long a device works.
#[derive(Debug, Default)]
pub(crate) struct DeviceMeter(Mutex<BusyTime>);

impl DeviceMeter {
    /// Returns the time up to `now`, in microseconds.
    pub(crate) fn busy_us(&self, now: Instant) -> u64 {
        micros(lock(&self.0).advance(now))
    }
}

/// Counts what one lease uses of a device, in this process.
#[derive(Debug)]
pub(crate) struct LeaseMeter {
    memory: Arc<DeviceMemory>,
    over_time: Mutex<OverTime>,
    moved_bytes: AtomicU64,
    ops: AtomicU64,
}

#[derive(Debug)]
struct OverTime {
    busy: BusyTime,
    live: BytesOverTime,
}

impl LeaseMeter {
    /// Creates a meter of the lease that has the device with this memory.
    pub(crate) fn new(memory: Arc<DeviceMemory>) -> Arc<Self> {
        let live = BytesOverTime::new(Instant::now(), memory.live_bytes());
        let over_time = OverTime {
            busy: BusyTime::default(),
            live,
        };
        Arc::new(Self {
            memory,
            over_time: Mutex::new(over_time),
            moved_bytes: AtomicU64::new(0),
            ops: AtomicU64::new(0),
        })
    }

    /// Counts ops that were processed.
    pub(crate) fn add_ops(&self, ops: u64) {
        self.ops.fetch_add(ops, Ordering::Relaxed);
    }

    /// Returns the number of ops.
    pub(crate) fn ops(&self) -> u64 {
        self.ops.load(Ordering::Relaxed)
    }

    /// Counts bytes to or from a client or another device.
    pub(crate) fn add_moved(&self, bytes: usize) {
        self.moved_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Returns what was used up to `now`. How long the lease has had the device is not known here.
    pub(crate) fn used(&self, now: Instant) -> UsageCounters {
        let mut over_time = lock(&self.over_time);
        over_time.live.sample(now, self.memory.live_bytes());
        UsageCounters {
            held_us: 0,
            busy_us: micros(over_time.busy.advance(now)),
            byte_seconds: over_time.live.byte_seconds(),
            moved_bytes: self.moved_bytes.load(Ordering::Relaxed),
            ops: self.ops(),
        }
    }
}

/// The two meters that count the work of a session.
#[derive(Debug, Clone)]
pub(crate) struct Meters {
    pub(crate) device: Arc<DeviceMeter>,
    pub(crate) lease: Arc<LeaseMeter>,
}

impl Meters {
    /// Creates the meters of a device with this memory, for its first lease.
    pub(crate) fn new(memory: &Arc<DeviceMemory>) -> Self {
        Self {
            device: Arc::default(),
            lease: LeaseMeter::new(memory.clone()),
        }
    }

    /// Returns these meters of the device, for another lease.
    pub(crate) fn for_lease(&self, lease: Arc<LeaseMeter>) -> Self {
        Self {
            device: self.device.clone(),
            lease,
        }
    }

    /// Counts work on the device from `now` on, until the returned value is dropped.
    pub(crate) fn begin(&self, now: Instant) -> Work {
        lock(&self.device.0).begin(now);
        let mut over_time = lock(&self.lease.over_time);
        over_time.busy.begin(now);
        over_time.live.sample(now, self.lease.memory.live_bytes());
        drop(over_time);
        Work(self.clone())
    }
}

/// Work that runs on a device: a time slice, or a read that is awaited.
#[derive(Debug)]
pub(crate) struct Work(Meters);

impl Drop for Work {
    fn drop(&mut self) {
        let (now, Meters { device, lease }) = (Instant::now(), &self.0);
        let mut over_time = lock(&lease.over_time);
        over_time.busy.end(now);
        over_time.live.sample(now, lease.memory.live_bytes());
        drop(over_time);
        lock(&device.0).end(now);
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros().try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_several_run_counts_once() {
        let (mut busy, start) = (BusyTime::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        busy.begin(at(1));
        busy.begin(at(2));
        assert_eq!(busy.advance(at(3)), Duration::from_secs(2), "it still runs");
        busy.end(at(4));
        busy.end(at(6));
        assert_eq!(busy.advance(at(9)), Duration::from_secs(5));
        // A thread that has read the clock before another one has ended.
        busy.begin(at(5));
        busy.end(at(7));
        assert_eq!(busy.advance(at(9)), Duration::from_secs(6));
    }

    #[test]
    fn bytes_count_for_as_long_as_they_live() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut live = BytesOverTime::new(start, 0);
        live.sample(at(2), 0);
        // They are allocated at some time of a second.
        live.sample(at(3), 11);
        live.sample(at(13), 11);
        live.sample(at(12), 11);
        assert_eq!(live.byte_seconds(), 5 + 110);
        let mut large = BytesOverTime::new(start, u64::MAX);
        large.sample(at(1_000_000), u64::MAX);
        assert_eq!(large.byte_seconds(), u64::MAX);
    }

    #[test]
    fn both_meters_count_the_same_work() {
        let memory = DeviceMemory::new(1 << 30);
        let first = Meters::new(&memory);
        let second = first.for_lease(LeaseMeter::new(memory.clone()));
        let mut held = memory.open();
        held.take(1 << 20).unwrap();
        for meters in [&first, &second, &first] {
            let work = meters.begin(Instant::now());
            let overlapping = meters.begin(Instant::now());
            meters.lease.add_ops(3);
            meters.lease.add_moved(7);
            drop(work);
            drop(overlapping);
        }
        let now = Instant::now();
        let used = [&first, &second].map(|meters| meters.lease.used(now));
        assert_eq!(used.map(|it| (it.ops, it.moved_bytes)), [(6, 14), (3, 7)]);
        let by_leases = used[0].busy_us + used[1].busy_us;
        // Each is rounded down by itself.
        let device = first.device.busy_us(now);
        assert!(device.abs_diff(by_leases) <= 1, "{device} and {by_leases}");
    }
}
