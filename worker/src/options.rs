//! The configuration of a worker.

#[cfg(target_os = "linux")]
use std::ffi::OsString;
use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use tensord_transport::{Identity, PoolUrl};

use crate::{CustomOps, StoreLocation, devices::DeviceSelection};

/// The configuration of a worker: a field for each option.
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
    /// Bytes of host memory for snapshots of sessions, from which a lease goes on when its process
    /// has died; 0 keeps none. They are divided among the devices. Only leases with processes
    /// of their own have snapshots. `None`: a sixteenth of the host's memory.
    pub snapshot_bytes: Option<u64>,
    /// Directory or bucket in which snapshots are kept, too, so that a lease can go on when this worker
    /// starts again, or at another worker that has the same one. A missing directory is made. Buckets
    /// need the feature `object-storage`. Only leases with processes of their own have snapshots.
    /// `None`: memory only.
    pub snapshot_store: Option<StoreLocation>,
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
    /// Custom ops, in addition to Burn's. With processes for leases, the program passes its
    /// custom ops to `run_lease_process` as well.
    pub custom_ops: CustomOps,
    /// Where leases run.
    pub isolation: Isolation,
}

impl WorkerOptions {
    /// The default of [`collective_timeout`](Self::collective_timeout).
    pub const COLLECTIVE_TIMEOUT: Duration = Duration::from_secs(30);

    /// The default of [`op_timeout`](Self::op_timeout): far longer than any op of a training step,
    /// and short enough for users to see soon that a device is stuck.
    pub const OP_TIMEOUT: Duration = Duration::from_secs(60);

    /// Options of a worker that listens on a free port of the loopback interface, runs all
    /// leases in its own process, keeps no uploads and caches no kernels. Its name is made of
    /// its identity.
    pub fn new(identity: Arc<Identity>, scheduler: PoolUrl, devices: Vec<DeviceSelection>) -> Self {
        Self {
            name: format!("worker-{}", identity.fingerprint().short()),
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            advertise: None,
            devices,
            identity,
            scheduler,
            memory_bytes: None,
            cache_bytes: 0,
            snapshot_bytes: None,
            snapshot_store: None,
            collective_timeout: Self::COLLECTIVE_TIMEOUT,
            op_timeout: Self::OP_TIMEOUT,
            bucket_bytes: None,
            kernel_cache: None,
            custom_ops: CustomOps::new(),
            isolation: Isolation::None,
        }
    }
}

/// Where the leases of a worker run.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Isolation {
    /// In the worker's own process. A program that gets past the checks of its session, or
    /// crashes a driver, reaches all other leases.
    None,
    /// Each in a process of its own, which runs this program.
    #[cfg(target_os = "linux")]
    Processes(ProcessProgram),
}

/// A program that calls `run_lease_process`.
#[cfg(target_os = "linux")]
#[derive(Debug, Clone)]
pub struct ProcessProgram {
    /// The file to run. [`ProcessProgram::CURRENT`] is this program, even if its file was
    /// replaced meanwhile.
    pub path: PathBuf,
    /// The program's name, as tools such as `ps` show it.
    pub name: OsString,
    /// The arguments by which the program knows that it is to call `run_lease_process`.
    pub args: Vec<OsString>,
    /// Variables to set in each process. A process inherits the worker's other variables, except
    /// those that may be secret: their names begin with `TENSORD_`, or, as the credentials of object
    /// storage do, with `AWS_`, `AZURE_`, `GOOGLE_`, `IDENTITY_`, `MSI_` or `SERVICE_ACCOUNT`.
    pub env: Vec<(OsString, OsString)>,
    /// Files and directories that the processes must not open: those with secrets.
    pub hidden: Vec<PathBuf>,
}

#[cfg(target_os = "linux")]
impl ProcessProgram {
    /// The file that this process runs.
    pub const CURRENT: &str = "/proc/self/exe";

    /// Runs the current program with `argument` as its only argument.
    pub fn current(name: impl Into<OsString>, argument: impl Into<OsString>) -> Self {
        Self {
            path: Self::CURRENT.into(),
            name: name.into(),
            args: vec![argument.into()],
            env: Vec::new(),
            hidden: Vec::new(),
        }
    }
}
