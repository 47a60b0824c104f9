//! A lease: devices, or a share of one, that this program has until it drops the lease.

#[cfg(unix)]
mod ctrl_c;
mod durability_status;
mod event;
mod request;
mod standing;

use std::{
    fmt,
    net::TcpListener,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use burn::{backend::ExecutionError, tensor::Device};
use burn_remote::server::ServeError;
use tensord_proto::{ids::LeaseId, share::WHOLE_PERMILLE, v1};
use tensord_session::{Cohort, LEASE_DROPPED};
use tensord_transport::Secret;

#[cfg(unix)]
use self::ctrl_c::CtrlC;
pub(crate) use self::event::LeaseEvents;
pub use self::{
    durability_status::DurabilityStatus,
    event::LeaseEvent,
    request::{Durability, LeaseRequest},
};
use crate::{
    backend::{Registration, TensordDevice, no_reply_error},
    blocking::block_on,
    bridge::{self, Bridge},
    control::{handle::ControlHandle, lease_watch::LeaseWatch},
    session::Session,
};

/// The reason for the end of a lease that Ctrl+C has ended.
#[cfg(unix)]
const CTRL_C: &str = "Ctrl+C ended the lease";

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
    /// The device's memory, in bytes; of a [share](Self::share), the part of it that the lease has.
    pub memory_bytes: u64,
    /// The name of the device's worker.
    pub worker: String,
    /// What the bits of the device's results depend on; `None` if its worker does not report it.
    pub fingerprint: Option<DeviceFingerprint>,
    /// The part of the device's time that the lease has, in thousandths; 0 for all of it.
    share_permille: u32,
}

impl LeasedDevice {
    /// The part of the device's time that the lease gets while all leases of the device have work; `None` if the
    /// lease has the whole device.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tensord_client::{LeaseRequest, Pool};
    ///
    /// let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1).share(0.25))?;
    /// assert_eq!(lease.descriptions()[0].share(), Some(0.25));
    /// # Ok(()) }
    /// ```
    pub fn share(&self) -> Option<f64> {
        part_of_device(self.share_permille)
    }
}

/// Returns a number of thousandths as a part of a device; `None` for none.
pub(crate) fn part_of_device(permille: u32) -> Option<f64> {
    (permille > 0).then(|| f64::from(permille) / f64::from(WHOLE_PERMILLE))
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
    /// Whether a program gives the same bits each time it runs on such a device. Devices of
    /// kind `flex` are exact, and others are if their worker was built without the feature `tuning`:
    /// with it, kernels add up with atomics, and are chosen by measurements.
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
            memory_bytes: leased
                .share
                .map_or(device.memory_bytes, |share| share.memory_bytes),
            share_permille: leased.share.map_or(0, |share| share.permille),
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
    /// What [`Lease::end_on_ctrl_c`] has started.
    #[cfg(unix)]
    pub(crate) ctrl_c: std::sync::OnceLock<CtrlC>,
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

    /// Has the workers offer the uploads of this lease to your other leases while this one runs, as they do
    /// when it has ended. So a program that runs a model on several leases uploads the weights once for all
    /// leases on a host: load the model on the first one, call this, then request the others.
    ///
    /// Blocks until the devices have done all that was requested of them and the workers offer the uploads to
    /// sessions that open later. The devices go on meanwhile. Each worker copies and hashes the uploads that it
    /// keeps and has not shared before, and holds the copies in its memory, in addition: in half of its
    /// `--upload-cache`, for all programs of all tenants. What does not fit is not shared, and other
    /// leases upload it again. A worker that is older than this function does nothing.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tensord_client::{LeaseRequest, Pool};
    ///
    /// let pool = Pool::connect_env()?;
    /// let first = pool.lease(LeaseRequest::devices(1))?;
    /// // … load the weights …
    /// first.share_uploads()?;
    /// let second = pool.lease(LeaseRequest::devices(1))?;
    /// // … load the weights: if it is on the same host, they are there already …
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Device::sync`]: the first failure of an op that was not reported before, or why a session has
    /// ended. The uploads of the other devices are shared all the same.
    pub fn share_uploads(&self) -> Result<(), ExecutionError> {
        // Burn's client may have ops that it has not passed on.
        let synced = self.devices().iter().map(Device::sync);
        let synced = synced.fold(Ok(()), Result::and);
        let sessions = self.lease_devices.iter().map(|it| &it.session);
        let answers: Vec<_> = sessions.map(|session| session.share_uploads()).collect();
        let answers = answers.into_iter().map(|answer| {
            // Without a limit, as the driver answers when it gives the worker up.
            let answer = block_on(answer, None).and_then(Result::ok);
            answer.unwrap_or_else(|| Err(no_reply_error()))
        });
        answers.fold(synced, Result::and)
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

    /// Has Ctrl+C (SIGINT) end this lease instead of the process: at once, its devices are free for
    /// others, and reads of its tensors fail with an error that names the reason. The program goes on, so that it
    /// can save what it has. A second Ctrl+C kills the process, and so does the first once every lease
    /// with this setting was dropped.
    ///
    /// Without this call, Ctrl+C ends the process, and its devices are free when the lease has
    /// expired, 30 s later. The library installs no handler by itself. The one that this installs
    /// stays for the life of the process. It is for programs that do not handle SIGINT by themselves: a handler
    /// of the program is called, too, but cannot keep the second Ctrl+C from killing the process. On Unix only.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tensord_client::{LeaseRequest, Pool};
    ///
    /// let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
    /// lease.end_on_ctrl_c()?;
    /// // … train, until a read returns an error …
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// The system's error, if it does not install the handler.
    #[cfg(unix)]
    pub fn end_on_ctrl_c(&self) -> std::io::Result<()> {
        if self.ctrl_c.get().is_some() {
            return Ok(());
        }
        let (id, control) = (self.id, Arc::downgrade(&self.control));
        let sessions: Vec<_> = self
            .lease_devices
            .iter()
            .map(|lease_device| lease_device.session.clone())
            .collect();
        let end = move || {
            sessions.iter().for_each(|session| session.fail(CTRL_C));
            if let Some(control) = control.upgrade() {
                control.release(id);
            }
        };
        let started = CtrlC::start(&self.control.runtime_handle, end)?;
        // If another thread was first, dropping this one leaves that one.
        let _ = self.ctrl_c.set(started);
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_sees_the_memory_of_its_share() {
        let leased = |share| {
            LeasedDevice::from(&v1::LeasedDevice {
                device: Some(v1::Device {
                    memory_bytes: 80,
                    ..v1::Device::default()
                }),
                share,
                ..v1::LeasedDevice::default()
            })
        };
        let whole = leased(None);
        assert_eq!((whole.share(), whole.memory_bytes), (None, 80));
        let quarter = leased(Some(v1::DeviceShare {
            permille: 250,
            memory_bytes: 20,
            lane: 1,
        }));
        assert_eq!((quarter.share(), quarter.memory_bytes), (Some(0.25), 20));
    }
}
