//! What a program requests of the pool.

use std::{fmt, time::Duration};

use tensord_proto::{share::WHOLE_PERMILLE, v1};
use tensord_session::GoesOn;

use super::{
    LeasedDevice,
    event::{EventCallback, LeaseEvent},
};
use crate::error::LeaseError;

/// What to lease, and how to wait for it.
///
/// ```
/// # use std::time::Duration;
/// # use tensord_client::LeaseRequest;
/// let request = LeaseRequest::devices(4)
///     .kind("cuda")
///     .memory_bytes(16 << 30)
///     .timeout(Duration::from_secs(600))
///     .on_queued(|position| eprintln!("position {position} in the queue"));
/// ```
#[must_use = "a request does nothing until it is given to Pool::lease"]
pub struct LeaseRequest {
    pub(crate) devices: u32,
    pub(crate) kind: String,
    pub(crate) memory_bytes: u64,
    pub(crate) share: Option<f64>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) durability: Durability,
    pub(crate) recover_within: Option<Duration>,
    pub(crate) max_duration: Option<Duration>,
    pub(crate) spot: bool,
    pub(crate) may_end: bool,
    pub(crate) priority: i32,
    pub(crate) on_queued: Option<Box<dyn FnMut(u32) + Send>>,
    pub(crate) on_event: Option<EventCallback>,
}

impl LeaseRequest {
    /// Requests `count` devices, all or none.
    pub fn devices(count: u32) -> Self {
        Self {
            devices: count,
            kind: String::new(),
            memory_bytes: 0,
            share: None,
            timeout: None,
            durability: Durability::Auto,
            recover_within: None,
            max_duration: None,
            spot: false,
            may_end: false,
            priority: 0,
            on_queued: None,
            on_event: None,
        }
    }

    /// Requests only devices of this kind, such as `"cuda"` or `"flex"`.
    pub fn kind(mut self, kind: impl Into<String>) -> Self {
        self.kind = kind.into();
        self
    }

    /// Requests only devices with at least this much memory each. Of a [share](Self::share), sets how much memory
    /// of the device the lease gets: this much, and no more.
    pub fn memory_bytes(mut self, bytes: u64) -> Self {
        self.memory_bytes = bytes;
        self
    }

    /// Requests a share of *one* device instead of whole devices, so that several leases have the device at the
    /// same time.
    ///
    /// `part` is the part of the device's time that the lease gets while all leases of the device have work. While
    /// others have none, it gets all of their time, too. The lease has the same part of the device's memory, and
    /// ops fail that need more; [`memory_bytes`](Self::memory_bytes) gives it another amount. A fault of a program,
    /// and memory that it lacks, concerns its own lease alone.
    ///
    /// `part` is more than 0, and at most 1, which is the whole device. It is rounded to thousandths, of which a
    /// lease gets at least one. [`Pool::lease`](crate::Pool::lease) refuses other values, and shares of several
    /// devices, with [`LeaseError::Share`].
    ///
    /// ```
    /// # use tensord_client::LeaseRequest;
    /// // A quarter of a GPU's time, and 4 GiB of its memory.
    /// let request = LeaseRequest::devices(1).kind("cuda").share(0.25).memory_bytes(4 << 30);
    /// ```
    pub fn share(mut self, part: f64) -> Self {
        self.share = Some(part);
        self
    }

    /// Sets the priority, which is 0 otherwise. While requests of a tenant wait, those with a higher
    /// priority get devices before the others of the tenant.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Cancels the request after this time in the queue. Without a timeout, the
    /// request waits as long as the pool keeps it queued.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Chooses whether the lease goes on when a process that runs it dies or a worker is lost, and on
    /// which devices. By default it does where that is possible.
    pub fn durable(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// Ends the lease, with an error that says why, if it cannot go on within this time after its worker,
    /// or a process of it, was lost: for example because all devices are leased that would give the
    /// same bits. The default is an hour. A limit below 10 s counts as 10 s, and one beyond a day as a
    /// day. A lease that an administrator or this program has suspended waits without a limit.
    pub fn recover_within(mut self, limit: Duration) -> Self {
        self.recover_within = Some(limit);
        self
    }

    /// Ends the lease, with an error that says so, when it has had devices for this time. While it is suspended,
    /// the time does not run. Less than 1 s counts as 1 s.
    ///
    /// With such a declaration, also a lease that is not durable may get devices that are reserved for another
    /// request, if it surely ends before that request could start. And `tensord why` can estimate when there
    /// will be enough devices for others.
    pub fn max_duration(mut self, duration: Duration) -> Self {
        self.max_duration = Some(duration);
        self
    }

    /// Requests a *spot* lease, which uses what others leave free: it gets devices after all other requests, counts
    /// only a quarter in the share of its tenant, and gives its devices to any other request that needs them.
    /// It is suspended then, and goes on by itself once devices are free. A lease that is not durable
    /// ([`Durability::Off`]), or has no snapshots after a minute, ends instead, with an error that says why.
    pub fn spot(mut self) -> Self {
        self.spot = true;
        self
    }

    /// Allows the pool to end the lease, with an error that says why, if its devices are beyond the guarantee of its
    /// tenant, a request that is entitled to them needs them, and the lease cannot be suspended: it is not durable
    /// ([`Durability::Off`]), or has no snapshots a minute after it has begun. Without this, such a lease keeps its
    /// devices. A lease ends only if those that can be suspended are not enough, and has had its devices for 10 s.
    ///
    /// Such a request may also get devices that are reserved for another one.
    pub fn may_end(mut self) -> Self {
        self.may_end = true;
        self
    }

    /// Calls `callback` with the position in the queue, 1 being next, whenever
    /// the position changes.
    pub fn on_queued(mut self, callback: impl FnMut(u32) + Send + 'static) -> Self {
        self.on_queued = Some(Box::new(callback));
        self
    }

    /// Calls `callback` with what happens to the request and its lease: why the request waits in the queue, and
    /// later that the lease waits, is suspended, moves or runs again because the process that runs it died, its
    /// worker was lost or is about to stop, or others need its devices. The callback runs on a thread of its own,
    /// and holds up nothing; if it is slow, it may miss events.
    pub fn on_event(mut self, callback: impl FnMut(LeaseEvent) + Send + 'static) -> Self {
        self.on_event = Some(Box::new(callback));
        self
    }

    /// Returns the part of a device's time that is requested, in thousandths; 0 for whole devices.
    ///
    /// # Errors
    ///
    /// If there is no such share, or it is of several devices.
    pub(crate) fn share_permille(&self) -> Result<u32, LeaseError> {
        let Some(part) = self.share else {
            return Ok(0);
        };
        let refused = |reason: &str| LeaseError::Share {
            part,
            reason: reason.into(),
        };
        if !(part > 0.0 && part <= 1.0) {
            return Err(refused("it must be more than 0, and at most 1"));
        }
        if self.devices != 1 {
            return Err(refused(&format!(
                "it is of one device, and the request is for {}",
                self.devices
            )));
        }
        // From 1 to 1000.
        let permille = (part * f64::from(WHOLE_PERMILLE)).round().max(1.0) as u32;
        Ok(if permille == WHOLE_PERMILLE {
            0
        } else {
            permille
        })
    }
}

impl fmt::Debug for LeaseRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseRequest")
            .field("devices", &self.devices)
            .field("kind", &self.kind)
            .field("memory_bytes", &self.memory_bytes)
            .field("share", &self.share)
            .field("durability", &self.durability)
            .finish_non_exhaustive()
    }
}

/// Whether a lease goes on when a process that runs it dies or a worker is lost, and on which devices.
///
/// It goes on from snapshots, if the workers take any, and executes the ops since the last one again.
/// Answers that the program has already got are not given to it again.
///
/// ```
/// # use tensord_client::{Durability, LeaseRequest};
/// // Needs no memory for snapshots, and ends with its process.
/// let request = LeaseRequest::devices(1).durable(Durability::Off);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Durability {
    /// [`Exact`](Self::Exact) on [exact](crate::DeviceFingerprint::is_exact) devices, which CPU devices are;
    /// [`Continue`](Self::Continue) on other devices, as most GPUs are.
    #[default]
    Auto,
    /// The lease gets [exact](crate::DeviceFingerprint::is_exact) devices only, and goes on only where it
    /// gives the same bits: at devices of equal fingerprints. If an answer differs all the same, its
    /// session ends.
    Exact,
    /// The lease goes on at devices of the same kind, best of equal fingerprints. Later values may
    /// have other bits than without the loss. If an answer differs that the program has already
    /// got, a warning is logged.
    Continue,
    /// The lease ends. The worker takes no snapshots of it, and this process keeps nothing of
    /// what the worker has received.
    Off,
}

impl Durability {
    /// Returns what it means for a session on `device`.
    pub(crate) fn on(self, device: &LeasedDevice) -> Self {
        let is_exact = device.fingerprint.is_some_and(|it| it.is_exact);
        match self {
            Self::Auto if is_exact => Self::Exact,
            Self::Auto => Self::Continue,
            Self::Exact | Self::Continue | Self::Off => self,
        }
    }
}

impl From<Durability> for GoesOn {
    fn from(durability: Durability) -> Self {
        match durability {
            Durability::Off => Self::Never,
            Durability::Auto | Durability::Exact => Self::WithSameAnswers,
            Durability::Continue => Self::WithAnyAnswers,
        }
    }
}

impl From<Durability> for v1::Durability {
    fn from(durability: Durability) -> Self {
        match durability {
            Durability::Auto => Self::Auto,
            Durability::Exact => Self::Exact,
            Durability::Continue => Self::Continue,
            Durability::Off => Self::Off,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_is_rounded_to_thousandths() {
        let cases = [
            (1e-9, 1),
            (f64::MIN_POSITIVE, 1),
            (0.0014, 1),
            (0.0016, 2),
            (0.25, 250),
            (1.0 / 3.0, 333),
            (0.9994, 999),
            // The whole device.
            (0.9996, 0),
            (1.0, 0),
        ];
        for (part, expected) in cases {
            let permille = LeaseRequest::devices(1).share(part).share_permille();
            assert_eq!(permille.unwrap(), expected, "{part}");
        }
        assert_eq!(LeaseRequest::devices(3).share_permille().unwrap(), 0);
    }

    #[test]
    fn share_that_no_device_has_is_an_error_with_the_value() {
        let wrong = [0.0, -0.0, -0.25, 1.001, 25.0, f64::INFINITY, f64::NAN];
        for part in wrong {
            let error = LeaseRequest::devices(1).share(part).share_permille();
            let expected =
                format!("a share of {part} is not possible: it must be more than 0, and at most 1");
            assert_eq!(error.unwrap_err().to_string(), expected);
        }
        for devices in [0, 2] {
            let error = LeaseRequest::devices(devices).share(0.5).share_permille();
            let expected = format!(
                "a share of 0.5 is not possible: it is of one device, and the request is for {devices}"
            );
            assert_eq!(error.unwrap_err().to_string(), expected);
        }
    }
}
