//! A lease: devices that this program has to itself until it drops the lease.

mod durability_status;
mod event;

use std::{
    fmt,
    net::TcpListener,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use burn::tensor::Device;
use burn_remote::server::ServeError;
use tensord_proto::{ids::LeaseId, v1};
use tensord_transport::Secret;

pub(crate) use self::event::{EventCallback, LeaseEvents};
pub use self::{durability_status::DurabilityStatus, event::LeaseEvent};
use crate::{
    StandingError,
    backend::{Registration, TensordDevice},
    blocking::block_on,
    bridge::{self, Bridge},
    cohort::{Cohort, LEASE_DROPPED},
    control::{handle::ControlHandle, lease_watch::LeaseWatch},
    session::Session,
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
    /// A request that declares how long it takes may get devices that are reserved for one that has waited for
    /// long, if its lease surely ends in time, also if it is not durable. And others learn when they get
    /// devices at the latest.
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
    /// later that the lease waits, is suspended, moves or runs again because the process that runs it died, its worker was
    /// lost or is about to stop, or others need its devices. The callback runs on a thread of its own, and holds
    /// up nothing; if it is slow, it may miss events.
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
    /// The lease gets [exact](DeviceFingerprint::is_exact) devices only, and goes on only where it
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

/// A description of a leased device, with the name of its worker.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tensord_client::{LeaseRequest, Pool};
///
/// let lease = Pool::connect_env()?.lease(LeaseRequest::devices(2))?;
/// for device in lease.descriptions() {
///     let gib = device.memory_bytes >> 30;
///     println!("{} ({}, {gib} GiB) of {}", device.name, device.kind, device.worker);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeasedDevice {
    /// The device's kind, such as `"cuda"`.
    pub kind: String,
    /// The device's human-readable name.
    pub name: String,
    /// The device's memory, in bytes.
    pub memory_bytes: u64,
    /// The name of the device's worker.
    pub worker: String,
    /// What the bits of the device's results depend on; `None` if its worker does not report it.
    pub fingerprint: Option<DeviceFingerprint>,
}

/// What the bits of a device's results depend on: crates, compiler, processor and driver.
///
/// A program gives the same bits on two devices if their fingerprints are equal and
/// [exact](Self::is_exact). `tensord devices --json` on a worker's host shows what is in one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceFingerprint {
    /// Equal for devices that compute in the same way.
    pub hash: [u8; 16],
    /// Whether a program gives the same bits each time it runs on such a device. CPU devices
    /// are exact and GPUs are not: there, kernels add up with atomics, and are chosen by
    /// measurements.
    pub is_exact: bool,
}

impl DeviceFingerprint {
    /// Returns `None` if the hash has another length than 16.
    fn from_message(message: &v1::DeviceFingerprint) -> Option<Self> {
        Some(Self {
            hash: message.hash.as_ref().try_into().ok()?,
            is_exact: message.is_exact,
        })
    }
}

impl From<&v1::LeasedDevice> for LeasedDevice {
    fn from(leased: &v1::LeasedDevice) -> Self {
        let device = leased.device.clone().unwrap_or_default();
        let fingerprint = device.fingerprint.as_ref();
        Self {
            fingerprint: fingerprint.and_then(DeviceFingerprint::from_message),
            kind: device.kind,
            name: device.name,
            memory_bytes: device.memory_bytes,
            worker: leased
                .worker
                .as_ref()
                .map_or_else(String::new, |worker| worker.name.clone()),
        }
    }
}

/// Bytes between this process and the workers of a lease, including framing.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tensord_client::{LeaseRequest, Pool};
///
/// let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
/// let before = lease.traffic();
/// // … a step of the training …
/// let after = lease.traffic();
/// println!("the step sent {} bytes", after.bytes_up - before.bytes_up);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Traffic {
    /// Bytes sent to the workers.
    pub bytes_up: u64,
    /// Bytes received from the workers.
    pub bytes_down: u64,
    /// The part of `bytes_up` that is tensors. The rest is ops, read requests and
    /// the like.
    pub tensor_bytes_up: u64,
    /// The part of `bytes_down` that is tensors.
    pub tensor_bytes_down: u64,
}

/// The right to use some devices. Dropping the lease gives them back and ends
/// everything that still runs on them: read the values you need first.
pub struct Lease {
    pub(crate) id: LeaseId,
    pub(crate) control: Arc<ControlHandle>,
    pub(crate) lease_devices: Vec<LeaseDevice>,
    pub(crate) bridge: Option<Bridge>,
    pub(crate) cohort: Arc<Cohort>,
    pub(crate) watch: LeaseWatch,
}

/// One device of a lease.
pub(crate) struct LeaseDevice {
    pub(crate) device: TensordDevice,
    pub(crate) session: Arc<Session>,
    pub(crate) description: LeasedDevice,
    pub(crate) _registration: Option<Registration>,
}

impl Lease {
    /// The devices, in a fixed order, as ordinary Burn devices.
    pub fn devices(&self) -> &[Device] {
        self.bridge.as_ref().map_or(&[], Bridge::devices)
    }

    /// The devices for code that is generic over Burn's `Backend`, where
    /// [`Tensord`](crate::Tensord) is the backend.
    pub fn backend_devices(&self) -> Vec<TensordDevice> {
        self.lease_devices
            .iter()
            .map(|lease_device| lease_device.device)
            .collect()
    }

    /// A description of each device, in the order of [`devices`](Self::devices). That of a device
    /// of a lease that has moved is the present one.
    pub fn descriptions(&self) -> Vec<LeasedDevice> {
        if let Some(moved) = self.watch.last_move() {
            return moved.devices.iter().map(LeasedDevice::from).collect();
        }
        self.lease_devices
            .iter()
            .map(|lease_device| lease_device.description.clone())
            .collect()
    }

    /// Bytes sent and received so far, summed over all devices.
    pub fn traffic(&self) -> Traffic {
        let sum = |count: fn(&Session) -> u64| {
            self.lease_devices
                .iter()
                .map(|lease_device| count(&lease_device.session))
                .sum()
        };
        Traffic {
            bytes_up: sum(|session| session.counters.up.load(Ordering::Relaxed)),
            bytes_down: sum(|session| session.counters.down.load(Ordering::Relaxed)),
            tensor_bytes_up: sum(|session| session.counters.tensors_up.load(Ordering::Relaxed)),
            tensor_bytes_down: sum(|session| session.counters.tensors_down.load(Ordering::Relaxed)),
        }
    }

    /// Returns what the lease could go on from if it lost its processes or workers now.
    pub fn durability_status(&self) -> DurabilityStatus {
        let sessions = self.lease_devices.iter().map(|it| &it.session);
        DurabilityStatus::of_all(sessions.map(|session| session.durability_status()))
    }

    /// Returns why the lease can no longer be used (the pool ended it, or a worker is lost),
    /// or `None` while it can. The devices of an ended lease return errors. The first reason
    /// stays.
    pub fn ended(&self) -> Option<String> {
        self.cohort.end_reason()
    }

    /// Waits until the lease can no longer be used, and returns why, as
    /// [`ended`](Self::ended) does, or that the lease was dropped. The future
    /// does not keep the lease alive, and runs on any executor.
    ///
    /// ```no_run
    /// # async fn wait() -> Result<(), Box<dyn std::error::Error>> {
    /// use tensord_client::{LeaseRequest, Pool};
    ///
    /// let lease = Pool::connect_env()?.lease_async(LeaseRequest::devices(2)).await?;
    /// let ended = lease.ended_async();
    /// tokio::spawn(async move { eprintln!("stop the training: {}", ended.await) });
    /// # Ok(()) }
    /// ```
    pub fn ended_async(&self) -> impl Future<Output = String> + Send + 'static + use<> {
        self.cohort.ended()
    }

    /// As [`ended_async`](Self::ended_async), but blocks this thread, for at most `timeout`.
    /// Returns `None` if the lease can still be used then.
    pub fn wait_ended(&self, timeout: Duration) -> Option<String> {
        block_on(self.ended_async(), Some(timeout))
    }

    /// Gives the devices back, and keeps the state of the sessions, until [`resume`](Self::resume).
    /// Other leases can use the devices meanwhile. Reads of tensors wait, and so does a thread that
    /// records many ops. [`LeaseEvent::Suspended`] is reported.
    ///
    /// Blocks until the pool has taken the devices, or refuses. The ops since the last snapshot, usually
    /// of the last 2 s at most, are executed again later.
    ///
    /// ```no_run
    /// use tensord_client::{LeaseRequest, Pool};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
    /// // … train …
    /// lease.suspend()?;
    /// // … wait for a person, or for the night …
    /// lease.resume()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// The pool's reason: for example, that the lease has no snapshots yet, or that it is not
    /// [durable](LeaseRequest::durable). See `docs/durability.md`.
    pub fn suspend(&self) -> Result<(), StandingError> {
        block_on(self.suspend_async(), None).unwrap_or(Err(StandingError::Closed))
    }

    /// As [`suspend`](Self::suspend), without blocking the thread. Runs on any executor.
    ///
    /// # Errors
    ///
    /// As [`suspend`](Self::suspend).
    pub fn suspend_async(
        &self,
    ) -> impl Future<Output = Result<(), StandingError>> + Send + 'static + use<> {
        let (control, lease) = (self.control.clone(), self.id);
        async move { control.change_standing(lease, true).await }
    }

    /// Lets the lease go on after [`suspend`](Self::suspend): as soon as a worker that has its state
    /// has free devices, ahead of other requests. Does not wait for that; reads do.
    ///
    /// # Errors
    ///
    /// The pool's reason: for example, that the lease is not suspended, or that an administrator has
    /// suspended it.
    pub fn resume(&self) -> Result<(), StandingError> {
        block_on(self.resume_async(), None).unwrap_or(Err(StandingError::Closed))
    }

    /// As [`resume`](Self::resume), without blocking the thread. Runs on any executor.
    ///
    /// # Errors
    ///
    /// As [`resume`](Self::resume).
    pub fn resume_async(
        &self,
    ) -> impl Future<Output = Result<(), StandingError>> + Send + 'static + use<> {
        let (control, lease) = (self.control.clone(), self.id);
        async move { control.change_standing(lease, false).await }
    }

    /// Serves the devices to stock Burn programs, which connect with
    /// `RemoteHost::websocket` and `token` as the credential. Runs until the
    /// future is dropped, on the Tokio runtime that awaits it.
    ///
    /// The stock client uses WebSocket without TLS: bind `listener` to loopback.
    ///
    /// ```no_run
    /// # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::net::TcpListener;
    /// use tensord_client::{LeaseRequest, Pool, Secret};
    ///
    /// let lease = Pool::connect_env()?.lease_async(LeaseRequest::devices(1)).await?;
    /// let token = Secret::new(std::env::var("BURN_TOKEN")?);
    /// lease.serve(TcpListener::bind("127.0.0.1:9000")?, &token).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// When serving fails.
    ///
    /// # Panics
    ///
    /// When `token` is empty.
    pub fn serve(
        &self,
        listener: TcpListener,
        token: &Secret,
    ) -> impl Future<Output = Result<(), ServeError>> + Send + 'static + use<> {
        bridge::serve(self.backend_devices(), listener, token)
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("id", &self.id)
            .field("devices", &self.descriptions())
            .finish_non_exhaustive()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.cohort.end(LEASE_DROPPED);
        self.bridge.take();
        for lease_device in &self.lease_devices {
            lease_device.session.close();
            lease_device.device.unregister();
        }
        self.control.release(self.id);
    }
}
