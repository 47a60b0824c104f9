//! The worker: offers a host's devices to a pool and runs sessions on them.
//!
//! - [`devices`](parse_devices): the devices of this host.
//! - [`custom`]: custom ops, in addition to Burn's.
//! - `backend`: the interface to Burn's backends.
//! - `session`: an op stream with its tensors; failures of ops are values (faults).
//! - `collective`: all-reduces and transfers between sessions of one lease, on one worker
//!   or several.
//! - `blobs`: uploads kept for later sessions.
//! - `executor`: a thread per device, shared fairly by its sessions.
//! - `admission`: which grant of a device is the current one.
//! - `registry`, `connection`: who may open a session, and the session's connections.
//! - `restart`: whether a device is lost until the process is started again.
//! - `registration`: joins the pool and keeps the worker registered.
//! - `testing`: a session without a network; needs the feature `testing`.
//!
//! The crate does not depend on the scheduler or the client, only on the messages of
//! `tensord-proto`.

mod admission;
mod backend;
mod blobs;
mod collective;
mod connection;
pub mod custom;
mod device_slot;
mod devices;
mod executor;
mod health;
mod locks;
mod memory;
mod op_check;
mod op_progress;
mod registration;
mod registry;
mod restart;
mod session;
#[cfg(feature = "testing")]
pub mod testing;

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use rand::Rng;
use tensord_proto::v1::{Error, ErrorCode};
use tensord_transport::{
    Identity, Listener, PoolUrl,
    identity::{START_BYTES, worker_id},
    listen::BindError,
};
use tokio::{
    runtime::Handle,
    sync::watch,
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep},
};
use tracing::{info, warn};

pub use self::{
    custom::{CustomOps, OpResult, PortableOp},
    devices::{
        AUTO, DeviceParseError, DeviceSelection, FoundDevice, KINDS, MissingDevice, discover,
        parse_devices, resolve_devices,
    },
    registration::RefusedError,
    restart::LostDevice,
};
use self::{
    devices::OpenedDevice,
    registration::{LEAVE_TIMEOUT, LeaveStage, Registration, RegistrationState, WorkerDescription},
    registry::Registry,
};

/// Interval of the checks for sessions without a client, groups without a rank, and
/// devices. It is short against the difference between the timeout of a worker that can
/// name the rank at fault and the longer one of a worker that cannot.
const SWEEP_INTERVAL: Duration = Duration::from_millis(250);

/// The configuration of a worker.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The worker's name in status output and errors; the host name by convention.
    pub name: String,
    /// The address to listen on, for UDP and TCP; port 0 lets the system choose a port.
    pub listen: SocketAddr,
    /// The host name or address under which clients reach the worker. `None`: the address
    /// from which the scheduler sees the worker connect, unless `listen` names one.
    pub advertise: Option<String>,
    /// The devices to offer.
    pub devices: Vec<DeviceSelection>,
    /// The worker's key and certificate, which it presents to its scheduler, to programs
    /// and to other workers. A worker that keeps its key needs a token only once.
    pub identity: Arc<Identity>,
    /// The scheduler's URL, with the token for workers.
    pub scheduler: PoolUrl,
    /// Memory limit of each device in bytes. `None`: all of the device's memory; CPU
    /// devices share the host's.
    pub memory_bytes: Option<u64>,
    /// Bytes of host memory for uploads that are kept so that they need not be sent again;
    /// 0 keeps none.
    pub cache_bytes: u64,
    /// How long a rank of a collective may keep the others waiting.
    pub collective_timeout: Duration,
    /// How long an op may take, including the wait for its inputs. A session whose op takes
    /// longer is ended, and its device is not offered until the op has returned.
    pub op_timeout: Duration,
    /// Bytes of all-reduces that are started together. `None`: derived from the measured
    /// rate of the links.
    pub bucket_bytes: Option<u64>,
    /// Directory that caches the kernels compiled and tuned for this host's devices, for
    /// the next start. `None`: no cache.
    pub kernel_cache: Option<PathBuf>,
    /// Custom ops, in addition to Burn's.
    pub custom_ops: CustomOps,
}

/// The error when a worker cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The worker could not listen on its address.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The system could not start a thread for a device.
    #[error("cannot start a thread for a device: {0}")]
    Thread(#[from] std::io::Error),
    /// None of the selected devices is available.
    #[error("{}", missing.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NoDevice {
        /// The missing devices, each with the reason.
        missing: Vec<MissingDevice>,
    },
}

/// A running worker. Dropping it ends its sessions at once.
pub struct Worker {
    address: SocketAddr,
    registry: Arc<Registry>,
    registration_state: watch::Receiver<RegistrationState>,
    leave: watch::Sender<LeaveStage>,
    lost: watch::Receiver<Option<LostDevice>>,
    _tasks: JoinSet<()>,
}

impl Worker {
    /// Starts a worker. It joins its pool in the background, and joins again whenever the
    /// connection to the scheduler was lost.
    ///
    /// # Errors
    ///
    /// When the worker cannot listen, when none of its devices can be opened, or when a
    /// thread cannot be started.
    pub async fn start(options: WorkerOptions) -> Result<Self, StartError> {
        let identity = options.identity.clone();
        let mut start = [0; START_BYTES];
        rand::rng().fill_bytes(&mut start);
        let listener = Listener::bind(options.listen, &identity).await?;
        let address = listener.address();
        let opened = Self::open_devices(&options).await?;
        let worker_description = WorkerDescription {
            name: options.name.clone(),
            address: advertised(options.advertise.as_deref(), address),
            identity: identity.clone(),
            start,
            devices: opened.iter().map(OpenedDevice::description).collect(),
        };
        let id = worker_id(&identity.fingerprint(), &start);
        let collective_settings = collective::CollectiveSettings {
            deadline: options.collective_timeout,
            bucket_bytes: options.bucket_bytes.map(|bytes| bytes as usize),
            runtime: Handle::current(),
            identity: identity.clone(),
        };
        let registry = Registry::new(
            id,
            &options.name,
            opened,
            options.cache_bytes,
            collective_settings,
            options.op_timeout,
            &Handle::current(),
        )?;
        let registry = Arc::new(registry);
        let (registration_state, state_receiver) = watch::channel(RegistrationState::Joining);
        let (leave, leave_receiver) = watch::channel(LeaveStage::Staying);
        let registration = Registration {
            scheduler: options.scheduler,
            worker_description,
            registry: registry.clone(),
            registration_state,
            leave: leave_receiver,
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(registration.run());
        tasks.spawn(accept(listener, registry.clone()));
        tasks.spawn(sweep(registry.clone()));
        let (found, lost) = watch::channel(None);
        tasks.spawn(watch_devices(registry.clone(), found));
        info!(name = options.name, %address, certificate = %identity.fingerprint(), "worker listening");
        Ok(Self {
            address,
            registry,
            registration_state: state_receiver,
            leave,
            lost,
            _tasks: tasks,
        })
    }

    /// Opens the devices that can be opened, and logs which cannot and why.
    async fn open_devices(options: &WorkerOptions) -> Result<Vec<OpenedDevice>, StartError> {
        let selections = options.devices.clone();
        let (memory_bytes, cache) = (options.memory_bytes, options.kernel_cache.clone());
        let custom_ops = options.custom_ops.clone();
        // Loading a driver may block for long.
        let open = tokio::task::spawn_blocking(move || {
            devices::configure(cache.as_deref());
            devices::open(&resolve_devices(&selections), memory_bytes, &custom_ops)
        });
        let (opened, missing) = open.await.map_err(std::io::Error::other)?;
        if opened.is_empty() {
            return Err(StartError::NoDevice { missing });
        }
        for missing in missing {
            warn!("{missing}");
        }
        for OpenedDevice { found, .. } in &opened {
            let (name, driver) = (&found.name, &found.driver);
            info!(device = %found.selection, name, driver, "offering a device");
        }
        Ok(opened)
    }

    /// Returns the address that the worker listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until the worker has joined its pool.
    ///
    /// # Errors
    ///
    /// When the scheduler refuses the worker.
    pub async fn joined(&self) -> Result<(), RefusedError> {
        let mut registration_state = self.registration_state.clone();
        let state_receiver = registration_state
            .wait_for(|registration_state| *registration_state != RegistrationState::Joining)
            .await;
        match state_receiver.as_deref() {
            Ok(RegistrationState::Refused(refused)) => Err(refused.clone()),
            _ => Ok(()),
        }
    }

    /// Waits until the scheduler refuses the worker, which is final, and returns the
    /// reason.
    pub async fn failed(&self) -> RefusedError {
        let mut registration_state = self.registration_state.clone();
        let refused = |registration_state: &RegistrationState| {
            matches!(registration_state, RegistrationState::Refused(_))
        };
        if let Ok(registration_state) = registration_state.wait_for(refused).await
            && let RegistrationState::Refused(refused) = &*registration_state
        {
            return refused.clone();
        }
        // The registration ended because the worker leaves the pool, which is no failure.
        std::future::pending().await
    }

    /// Waits until a device of this worker is lost: an op has occupied it for twice
    /// [`WorkerOptions::op_timeout`], and no session uses another device. The device
    /// becomes usable again only when this process has ended and the program was started
    /// again.
    pub async fn lost_device(&self) -> LostDevice {
        let mut lost = self.lost.clone();
        if let Ok(lost) = lost.wait_for(Option::is_some).await
            && let Some(lost) = &*lost
        {
            return lost.clone();
        }
        // The worker is shutting down: its devices are not checked any more.
        std::future::pending().await
    }

    /// Leaves the pool: the worker accepts no new sessions, existing ones may finish until
    /// `deadline` has passed, and then they are ended.
    pub async fn drain(&self, deadline: Duration) {
        self.leave.send_replace(LeaveStage::Draining);
        let idle = async {
            while self.registry.live_session_count() > 0 {
                sleep(Duration::from_millis(50)).await;
            }
        };
        if tokio::time::timeout(deadline, idle).await.is_err() {
            self.registry
                .end_all(&Error::new(ErrorCode::Draining, "the worker shuts down"));
            // Leaves time to send the final error to the clients.
            sleep(Duration::from_millis(200)).await;
        }
        self.leave.send_replace(LeaveStage::Leaving);
        let mut registration_state = self.registration_state.clone();
        let over = |registration_state: &RegistrationState| {
            !matches!(
                registration_state,
                RegistrationState::Joining | RegistrationState::Joined
            )
        };
        // Bounds the wait in case the scheduler is unreachable.
        let _ = tokio::time::timeout(2 * LEAVE_TIMEOUT, registration_state.wait_for(over)).await;
    }
}

/// Returns the address for clients. The scheduler fills in an unspecified host.
fn advertised(host: Option<&str>, listening: SocketAddr) -> String {
    match host {
        Some(host) if host.contains(':') && !host.starts_with('[') => {
            format!("[{host}]:{}", listening.port())
        }
        Some(host) => format!("{host}:{}", listening.port()),
        None => listening.to_string(),
    }
}

async fn accept(mut listener: Listener, registry: Arc<Registry>) {
    let mut connections = JoinSet::new();
    loop {
        let link = listener.accept().await;
        while connections.try_join_next().is_some() {}
        connections.spawn(connection::serve(registry.clone(), link));
    }
}

async fn sweep(registry: Arc<Registry>) {
    let mut tick = interval(SWEEP_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        registry.sweep();
    }
}

/// Checks the devices when notified, and at least every [`SWEEP_INTERVAL`].
async fn watch_devices(registry: Arc<Registry>, lost: watch::Sender<Option<LostDevice>>) {
    loop {
        // A timeout leads to the same check as a notification.
        let _ = tokio::time::timeout(SWEEP_INTERVAL, registry.wait_for_check()).await;
        registry.check_devices();
        lost.send_if_modified(|lost| {
            let found = registry.lost_device(Instant::now());
            let is_new = *lost != found;
            *lost = found;
            is_new
        });
    }
}
