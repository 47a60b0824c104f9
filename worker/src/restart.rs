//! Decides when the worker's process must be restarted because a device is lost.
//!
//! A thread cannot be killed, so a device whose op never returns is out of service until
//! the process ends. [`crate::Worker::lost_device`] reports this to the program that runs
//! the worker, once no session on another device would end with the process.

use std::{
    fmt,
    time::{Duration, Instant},
};

/// A lost device: its current op has exceeded the time limit and the grace period, and is not
/// expected to return.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostDevice {
    /// The device's index on this worker.
    pub index: u32,
    /// The op that does not return, and its time limit.
    pub reason: String,
}

impl fmt::Display for LostDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} is lost: {}", self.index, self.reason)
    }
}

/// How a device is used, as input of the decision.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DeviceUse {
    /// Since when an op has been known to exceed its time limit, if it still runs.
    pub(crate) stuck_since: Option<Instant>,
    /// Whether a session uses the device.
    pub(crate) has_sessions: bool,
}

/// Returns the first of `devices` that is lost, if no session uses a device that is not
/// lost. A device is lost once its op has continued for `grace_period` after it was known to
/// exceed its time limit.
pub(crate) fn first_lost_device(
    devices: &[DeviceUse],
    now: Instant,
    grace_period: Duration,
) -> Option<usize> {
    let is_lost = |device: &DeviceUse| {
        let since = device.stuck_since;
        since.is_some_and(|since| now.saturating_duration_since(since) >= grace_period)
    };
    let first = devices.iter().position(is_lost)?;
    let mut others = devices.iter().filter(|device| !is_lost(device));
    (!others.any(|device| device.has_sessions)).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn worker_restarts_for_a_lost_device_when_the_others_are_idle() {
        let start = Instant::now();
        let now = start + PATIENCE;
        let free = DeviceUse::default();
        let used = DeviceUse {
            has_sessions: true,
            ..free
        };
        let stuck = |seconds| DeviceUse {
            stuck_since: Some(now - Duration::from_secs(seconds)),
            has_sessions: true,
        };
        let cases: &[(&[DeviceUse], Option<usize>)] = &[
            (&[], None),
            (&[free, used], None),
            (&[stuck(59)], None),
            (&[stuck(60)], Some(0)),
            (&[free, stuck(60)], Some(1)),
            (&[used, stuck(60)], None),
            // The first device may come back, and its session would go on.
            (&[stuck(59), stuck(60)], None),
            (&[stuck(61), stuck(60), free], Some(0)),
        ];
        for (devices, expected) in cases {
            assert_eq!(
                first_lost_device(devices, now, PATIENCE),
                *expected,
                "{devices:?}"
            );
        }
    }

    #[test]
    fn a_lost_device_is_named_with_its_op() {
        let lost = LostDevice {
            index: 3,
            reason: "op 41 (Matmul) has not ended within 1s".into(),
        };
        assert_eq!(
            lost.to_string(),
            "device 3 is lost: op 41 (Matmul) has not ended within 1s"
        );
    }
}
