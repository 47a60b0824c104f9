//! What a program requests of the pool.

use std::{fmt, time::Duration};

use tensord_proto::v1;

use super::{
    LeasedDevice,
    event::{EventCallback, LeaseEvent},
};

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
    pub(crate) timeout: Option<Duration>,
    pub(crate) durability: Durability,
    pub(crate) recover_within: Option<Duration>,
    pub(crate) max_duration: Option<Duration>,
    pub(crate) spot: bool,
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
            timeout: None,
            durability: Durability::Auto,
            recover_within: None,
            max_duration: None,
            spot: false,
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

    /// Requests only devices with at least this much memory each.
    pub fn memory_bytes(mut self, bytes: u64) -> Self {
        self.memory_bytes = bytes;
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
}

impl fmt::Debug for LeaseRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseRequest")
            .field("devices", &self.devices)
            .field("kind", &self.kind)
            .field("memory_bytes", &self.memory_bytes)
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
    /// [`Exact`](Self::Exact) on exact devices, which CPU devices are; [`Continue`](Self::Continue)
    /// on GPUs.
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
