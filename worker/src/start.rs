//! Starts what runs the leases of a worker: this process, or one process for each lease.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tensord_proto::{ids::WorkerId, v1};
use tensord_transport::{Listener, listen::BindError};
use tokio::{
    runtime::Handle,
    sync::watch,
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};
use tracing::{info, warn};

use crate::{
    StoreLocation,
    blobs::BlobStore,
    collective, connection,
    devices::{self, FoundDevice, MissingDevice, OpenedDevice, resolve_devices},
    lease_host::LeaseHost,
    options::WorkerOptions,
    registry::{Registry, RegistrySettings},
    restart::LostDevice,
    session::KeptLimits,
};
#[cfg(target_os = "linux")]
use {
    crate::{options::ProcessProgram, process_message, supervisor},
    std::path::{Path, PathBuf},
};

/// Interval of the checks for sessions without a client, groups without a rank, and
/// devices. It is short against the difference between the timeout of a worker that can
/// name the rank at fault and the longer one of a worker that cannot.
pub(crate) const SWEEP_INTERVAL: Duration = Duration::from_millis(250);

/// The host's memory is divided by this for the snapshots of its leases. Those that are being
/// copied may take as much again, and those of other workers' leases half as much. CPU devices offer
/// four fifths of the host's memory, and uploads that are kept have 1 GiB by default.
#[cfg(target_os = "linux")]
const SNAPSHOT_DIVISOR: u64 = 16;

/// The error when a worker cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The worker could not listen on its address.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The system could not start a thread for a device.
    #[error("cannot start a thread for a device: {0}")]
    Thread(#[from] std::io::Error),
    /// The process that lists the host's devices could not be started, or it failed.
    #[error("cannot list the host's devices: {0}")]
    Process(String),
    /// The snapshot store cannot be opened.
    #[cfg(target_os = "linux")]
    #[error(transparent)]
    Store(#[from] supervisor::OpenStoreError),
    /// None of the selected devices is available.
    #[error("{}", missing.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NoDevice {
        /// The missing devices, each with the reason.
        missing: Vec<MissingDevice>,
    },
}

/// What runs the leases of a worker.
pub(crate) struct StartedHost {
    pub(crate) address: SocketAddr,
    pub(crate) host: Arc<dyn LeaseHost>,
    pub(crate) devices: Vec<v1::Device>,
    pub(crate) tasks: JoinSet<()>,
    pub(crate) lost: watch::Receiver<Option<LostDevice>>,
}

/// Starts a worker that runs all leases in this process.
pub(crate) async fn start_in_this_process(
    options: &WorkerOptions,
    worker_id: WorkerId,
) -> Result<StartedHost, StartError> {
    let listener = Listener::bind(options.listen, &options.identity).await?;
    if let Some(location) = &options.snapshot_store {
        warn_of_unused_store(location, "leases without processes of their own have none");
    }
    let opened = open_devices(options).await?;
    let devices = opened.iter().map(|opened| opened.found.description());
    let devices = devices.collect();
    let settings = RegistrySettings {
        worker_id,
        worker_name: options.name.as_str().into(),
        blobs: BlobStore::new(options.cache_bytes / 2),
        kept_limits: kept_limits(options.cache_bytes, opened.len()),
        collective_settings: collective::CollectiveSettings {
            deadline: options.collective_timeout,
            bucket_bytes: options.bucket_bytes.map(|bytes| bytes as usize),
            runtime: Handle::current(),
            identity: Some(options.identity.clone()),
        },
        op_timeout: options.op_timeout,
        runtime: Handle::current(),
        #[cfg(target_os = "linux")]
        op_records: Default::default(),
        turns: Default::default(),
        lanes: Default::default(),
        snapshot_stores: None,
    };
    let registry = Registry::new((0..).zip(opened).collect(), settings)?;
    let registry = Arc::new(registry);
    let (found, lost) = watch::channel(None);
    let mut tasks = JoinSet::new();
    let address = listener.address();
    tasks.spawn(accept(listener, registry.clone()));
    tasks.spawn(sweep(registry.clone()));
    tasks.spawn(watch_devices(registry.clone(), found));
    Ok(StartedHost {
        address,
        host: registry,
        devices,
        tasks,
        lost,
    })
}

#[cfg(target_os = "linux")]
/// Starts a worker that runs each lease in a process of its own.
pub(crate) async fn start_in_processes(
    options: &WorkerOptions,
    worker_id: WorkerId,
    program: ProcessProgram,
) -> Result<StartedHost, StartError> {
    let store_directory = options
        .snapshot_store
        .as_ref()
        .and_then(|it| it.directory());
    let credentials = supervisor::credential_paths();
    let hidden = program.hidden.iter().chain(&credentials);
    let hidden = hidden.map(PathBuf::as_path).chain(store_directory);
    let hidden = hidden.map(path_to_bytes).collect();
    let described = supervisor::describe(program, &options.devices, options.memory_bytes).await?;
    log_devices(&described.found, &described.missing);
    if described.found.is_empty() {
        return Err(StartError::NoDevice {
            missing: described.missing,
        });
    }
    let devices = described.found.iter().map(FoundDevice::description);
    let devices = devices.collect();
    let kept_limits = kept_limits(options.cache_bytes, described.found.len());
    let process_settings = process_message::ProcessSettings {
        new_kept_limit_bytes: kept_limits.new,
        restored_kept_limit_bytes: kept_limits.restored,
        op_timeout_ms: millis(options.op_timeout),
        collective_timeout_ms: millis(options.collective_timeout),
        bucket_bytes: options.bucket_bytes,
        kernel_cache: options.kernel_cache.as_deref().map(path_to_bytes),
        snapshot_bytes: snapshot_bytes(options.snapshot_bytes, described.found.len()),
    };

    let store = match &options.snapshot_store {
        Some(location) if process_settings.snapshot_bytes == 0 => {
            warn_of_unused_store(location, "this worker has no memory for snapshots");
            None
        }
        Some(location) => Some(supervisor::SnapshotStore::open(location).await?),
        None => None,
    };
    let settings = supervisor::SupervisorSettings {
        worker_id,
        worker_name: options.name.clone(),
        identity: options.identity.clone(),
        process_settings,
        hidden,
        cache_bytes: options.cache_bytes / 2,
        kept_for_others_bytes: total_snapshot_bytes(options.snapshot_bytes) / 2,
        store,
    };
    let (supervisor, run) = supervisor::Supervisor::new(described, settings);
    let listener =
        Listener::bind_with_router(options.listen, &options.identity, supervisor.clone()).await?;
    let address = listener.address();
    let mut tasks = JoinSet::new();
    tasks.spawn(run);
    tasks.spawn(supervisor.clone().accept(listener));
    let (_, lost) = watch::channel(None);
    Ok(StartedHost {
        address,
        host: supervisor,
        devices,
        tasks,
        lost,
    })
}

fn warn_of_unused_store(location: &StoreLocation, why: &str) {
    warn!("no snapshots are kept in {location}: {why}");
}

#[cfg(target_os = "linux")]
fn path_to_bytes(path: &Path) -> Vec<u8> {
    use std::os::unix::ffi::OsStrExt;
    path.as_os_str().as_bytes().to_vec()
}

#[cfg(target_os = "linux")]
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the most bytes of uploads that a session may keep. Half of the cache is for
/// running sessions, divided among the devices, and half for the uploads that sessions leave
/// or share. A session that began at a worker with fewer devices may need more than its part
/// to go on, and gets up to all of that half.
fn kept_limits(cache_bytes: u64, devices: usize) -> KeptLimits {
    let restored = cache_bytes / 2;
    KeptLimits {
        new: restored / devices.max(1) as u64,
        restored,
    }
}

/// Returns the maximum bytes of a lease's snapshots for each of its devices, if those of all
/// `devices` may have `total_bytes` or the default.
#[cfg(target_os = "linux")]
fn snapshot_bytes(total_bytes: Option<u64>, devices: usize) -> u64 {
    total_snapshot_bytes(total_bytes) / devices.max(1) as u64
}

/// Returns the maximum bytes of the snapshots of this worker's leases.
#[cfg(target_os = "linux")]
fn total_snapshot_bytes(total_bytes: Option<u64>) -> u64 {
    total_bytes.unwrap_or_else(|| devices::host_memory() / SNAPSHOT_DIVISOR)
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
    let found: Vec<_> = opened.iter().map(|opened| opened.found.clone()).collect();
    log_devices(&found, &missing);
    match opened.is_empty() {
        true => Err(StartError::NoDevice { missing }),
        false => Ok(opened),
    }
}

fn log_devices(found: &[FoundDevice], missing: &[MissingDevice]) {
    if !found.is_empty() {
        missing.iter().for_each(|missing| warn!("{missing}"));
    }
    for found in found {
        let (name, driver) = (&found.name, &found.driver);
        info!(device = %found.selection, name, driver, "offering a device");
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
pub(crate) async fn watch_devices(
    registry: Arc<Registry>,
    lost: watch::Sender<Option<LostDevice>>,
) {
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
