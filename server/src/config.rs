//! Configuration: from flags, environment and file to one typed value per
//! command.
//!
//! ```text
//! flags + their environment (cli) ─┐
//! configuration file (file) ───────┼─► resolve ─► Config
//! host environment (environment) ──┘
//! ```
//!
//! Precedence: flags, environment, file, defaults. Everything is validated
//! here, once; the commands never look at the environment or the file again.

mod environment;
mod error;
mod file;
mod pool_file;
mod resolve;
pub(crate) mod settings;
mod usage_values;
pub(crate) mod values;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use tensord_proto::ids::LeaseId;
use tensord_transport::{PoolUrl, Secret};
use tensord_worker::{DeviceSelection, StoreLocation};

use self::values::{DeviceLimit, Filter, Kinds};
use crate::{audit, simulate};

pub(crate) use environment::Environment;
pub(crate) use error::ConfigError;
pub(crate) use file::File;
pub(crate) use pool_file::MAX_POOL_FILE_BYTES;
pub(crate) use resolve::{log_filter, resolve};
pub(crate) use usage_values::{Column, Since};

/// The command to run, with its validated settings.
#[derive(Debug)]
pub(crate) enum Config {
    /// `tensord up`.
    Up(UpConfig),
    /// `tensord scheduler`.
    Scheduler(SchedulerConfig),
    /// `tensord worker`.
    Worker(WorkerConfig),
    /// `tensord worker list` and `remove`.
    Workers(WorkersConfig),
    /// List or move leases.
    Leases(LeasesConfig),
    /// `tensord queue` and `tensord why`.
    Queue(QueueConfig),
    /// `tensord usage`.
    Usage(UsageConfig),
    /// `tensord gateway`.
    Gateway(GatewayConfig),
    /// `tensord status`.
    Status(StatusConfig),
    /// `tensord tenant`.
    Tenants(TenantsConfig),
    /// `tensord apply`.
    Apply(ApplyConfig),
    /// `tensord token`.
    Token(TokenConfig),
    /// `tensord simulate`.
    Simulate(SimulateConfig),
    /// `tensord devices`.
    Devices(DevicesConfig),
    /// `tensord demo`.
    #[cfg(feature = "demo")]
    Demo(DemoConfig),
}

/// The settings of a scheduler and a worker that share one process.
#[derive(Debug)]
pub(crate) struct UpConfig {
    /// The scheduler.
    pub(crate) scheduler: SchedulerConfig,
    /// The worker.
    pub(crate) node: NodeConfig,
    /// Time limit for running sessions to end after a stop signal.
    pub(crate) drain: Duration,
}

/// The settings of a scheduler.
#[derive(Debug)]
pub(crate) struct SchedulerConfig {
    /// The state directory, with the keys and tokens of the pool.
    pub(crate) state: StatePath,
    /// The address on which the scheduler listens.
    pub(crate) listen: SocketAddr,
    /// The host in the URLs that the scheduler prints; derived from `listen` if `None`.
    pub(crate) advertise: Option<String>,
    /// This host's name, for the printed URLs if no outward address is found.
    pub(crate) host_name: Option<String>,
    /// The location and size of the audit log.
    pub(crate) audit: audit::Settings,
    /// How long a lease token can open new sessions.
    pub(crate) lease_token_life: Duration,
    /// How long ago a tenant's use counts half as much as now; zero if it does not count.
    pub(crate) half_life: Duration,
    /// How long a request that is next waits until others pass it only if they can be suspended.
    pub(crate) reserve_after: Duration,
    /// How long a lease must have been idle before it is suspended for others; zero if it never is.
    pub(crate) idle_timeout: Duration,
}

/// The settings of a worker, and the pool it joins.
#[derive(Debug)]
pub(crate) struct WorkerConfig {
    /// The pool's URL, with a worker token.
    pub(crate) url: PoolUrl,
    /// The worker.
    pub(crate) node: NodeConfig,
    /// Time limit for running sessions to end after a stop signal.
    pub(crate) drain: Duration,
}

/// The settings of one host's worker, each a field.
#[derive(Clone, Debug)]
pub(crate) struct NodeConfig {
    /// The worker's name, unique in its pool.
    pub(crate) name: String,
    /// The address on which op streams arrive.
    pub(crate) listen: SocketAddr,
    /// The host under which programs reach the worker. If `None`, the IP address of `listen`,
    /// or, if that is unspecified, the one from which the scheduler sees the worker connect.
    pub(crate) advertise: Option<String>,
    /// The devices that the worker offers.
    pub(crate) devices: Vec<DeviceSelection>,
    /// The most memory that each device may use, in bytes; all it has if `None`.
    pub(crate) memory_bytes: Option<u64>,
    /// Memory for uploads that are kept for reuse, in bytes; 0 keeps none.
    pub(crate) cache_bytes: u64,
    /// See [`WorkerOptions::snapshot_bytes`](tensord_worker::WorkerOptions::snapshot_bytes).
    pub(crate) snapshot_bytes: Option<u64>,
    /// The directory or bucket that keeps snapshots, too.
    pub(crate) snapshot_store: Option<StoreLocation>,
    /// How long a rank of a collective may keep the others waiting.
    pub(crate) collective_timeout: Duration,
    /// How long an op may run before its device is out of service.
    pub(crate) op_timeout: Duration,
    /// The bytes of all-reduces that start together; if `None`, derived from the measured
    /// rate of the links.
    pub(crate) bucket_bytes: Option<u64>,
    /// The directory for compiled kernels; none are kept if `None`.
    pub(crate) kernel_cache: Option<PathBuf>,
    /// The state directory with the worker's key; if `None`, the worker makes a new key at
    /// each start.
    pub(crate) state: Option<PathBuf>,
    /// The filter for the logs of the processes that run leases.
    pub(crate) log: Filter,
    /// Files and directories with secrets, which the processes that run leases must not open.
    pub(crate) secret_paths: Vec<PathBuf>,
}

/// The settings of a gateway.
#[derive(Debug)]
pub(crate) struct GatewayConfig {
    /// The pool's URL, with a program token.
    pub(crate) url: PoolUrl,
    /// The address that stock Burn programs connect to.
    pub(crate) listen: SocketAddr,
    /// The devices to lease.
    pub(crate) demand: Demand,
    /// The source of the token that stock Burn programs send.
    pub(crate) token: GatewayToken,
}

/// A demand for devices to lease.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Demand {
    /// The number of devices.
    pub(crate) devices: u32,
    /// The part of one device, if not whole ones.
    pub(crate) share: Option<f64>,
    /// The kind of device; any if `None`.
    pub(crate) kind: Option<String>,
    /// The least memory that each device must have, in bytes; of a share, the memory that the lease gets, or 0 for
    /// the same part of the device's memory.
    pub(crate) memory_bytes: u64,
}

/// The source of the gateway's token.
#[derive(Debug)]
pub(crate) enum GatewayToken {
    /// The token from `TENSORD_GATEWAY_TOKEN`.
    Given(Secret),
    /// The state directory, in which the gateway creates the token if it is missing.
    FromState(StatePath),
}

/// The settings of `tensord status`.
#[derive(Debug)]
pub(crate) struct StatusConfig {
    /// The pool's URL, with a program token.
    pub(crate) url: PoolUrl,
    /// Whether to print JSON instead of a table.
    pub(crate) json: bool,
}

/// An administrator's call that lists or changes a pool's tokens.
#[derive(Debug)]
pub(crate) struct TokenConfig {
    /// The source of the pool's URL with an admin token.
    pub(crate) admin: AdminUrl,
    /// What to do with the tokens.
    pub(crate) action: TokenAction,
    /// Whether to print JSON instead of text.
    pub(crate) json: bool,
}

/// An administrator's call that lists or changes a pool's tenants.
#[derive(Debug)]
pub(crate) struct TenantsConfig {
    /// The source of the pool's URL with an admin token.
    pub(crate) admin: AdminUrl,
    /// What to do with the tenants.
    pub(crate) action: TenantsAction,
    /// Whether to print JSON instead of text.
    pub(crate) json: bool,
}

/// An action on the tenants of a pool.
#[derive(Debug)]
pub(crate) enum TenantsAction {
    /// Add a tenant.
    Add(TenantChange),
    /// Change a tenant.
    Set(TenantChange),
    /// List every tenant.
    List,
    /// Show the tenant of this name.
    Show(String),
    /// Remove the tenant of this name.
    Remove(String),
}

/// An administrator's call that makes the tenants of a pool those of a file.
#[derive(Debug)]
pub(crate) struct ApplyConfig {
    /// The source of the pool's URL with an admin token.
    pub(crate) admin: AdminUrl,
    /// Every tenant of the file. What is `None` has the value of a new tenant.
    pub(crate) tenants: Vec<TenantChange>,
    /// Whether to show the changes only.
    pub(crate) dry_run: bool,
    /// Whether to make changes that concern what is in use.
    pub(crate) force: bool,
    /// Whether to print JSON instead of text.
    pub(crate) json: bool,
}

/// The weight, guarantee and limit of a tenant from now on. What is `None` stays as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TenantChange {
    /// The tenant's name.
    pub(crate) name: String,
    /// By how much its share is divided before it is compared with those of others.
    pub(crate) weight: Option<u32>,
    /// The devices for which its requests come first.
    pub(crate) guaranteed: Option<Kinds>,
    /// The most that it may have at a time.
    pub(crate) limit: Option<DeviceLimit>,
}

/// An administrator's call that lists or removes a pool's workers.
#[derive(Debug)]
pub(crate) struct WorkersConfig {
    /// The source of the pool's URL with an admin token.
    pub(crate) admin: AdminUrl,
    /// What to do with the workers.
    pub(crate) action: WorkersAction,
}

/// An administrator's call about a pool's leases.
#[derive(Debug)]
pub(crate) struct LeasesConfig {
    /// The source of the pool's URL with an admin token.
    pub(crate) admin: AdminUrl,
    /// What to do with the leases.
    pub(crate) action: LeasesAction,
}

/// An action on the leases of a pool.
#[derive(Debug)]
pub(crate) enum LeasesAction {
    /// List every lease.
    List {
        /// Whether to print JSON instead of a table.
        json: bool,
    },
    /// Move a lease to another worker.
    Move {
        /// The lease.
        lease: LeaseId,
    },
    /// Have a lease give its devices back.
    Suspend {
        /// The lease.
        lease: LeaseId,
    },
    /// Let a suspended lease go on.
    Resume {
        /// The lease.
        lease: LeaseId,
    },
    /// End a lease, or refuse a request that waits.
    End {
        /// The lease, or the one that the request would become.
        lease: LeaseId,
    },
    /// Change the priority of a request that waits.
    Priority {
        /// The lease that the request would become.
        lease: LeaseId,
        /// The new priority.
        priority: i32,
    },
}

/// An administrator's question about what waits for devices.
#[derive(Debug)]
pub(crate) struct QueueConfig {
    /// The source of the pool's URL with an admin token.
    pub(crate) admin: AdminUrl,
    /// Only this lease or request, and why it waits.
    pub(crate) lease: Option<LeaseId>,
    /// Whether to print JSON instead of text.
    pub(crate) json: bool,
}

/// An administrator's question about what leases have used.
#[derive(Debug)]
pub(crate) struct UsageConfig {
    /// The source of the pool's URL with an admin token.
    pub(crate) admin: AdminUrl,
    /// From when on.
    pub(crate) since: Since,
    /// The columns by which usage is grouped into rows.
    pub(crate) by: Vec<Column>,
    /// The form of the reply.
    pub(crate) format: UsageFormat,
}

/// A form of what leases have used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UsageFormat {
    /// A table for people.
    Table,
    /// JSON.
    Json,
    /// Comma-separated values.
    Csv,
}

/// An action on the workers of a pool.
#[derive(Debug)]
pub(crate) enum WorkersAction {
    /// List every worker that may join.
    List {
        /// Whether to print JSON instead of a table.
        json: bool,
    },
    /// Drain a worker, or no longer.
    Drain {
        /// The worker's name.
        name: String,
        /// Whether it gets leases again.
        undo: bool,
        /// How long to wait until it has no lease left.
        wait: Option<Duration>,
    },
    /// Remove a worker's enrolment and end its leases.
    Remove {
        /// The worker's name.
        name: String,
    },
}

/// The source of the URL with an admin token.
#[derive(Debug)]
pub(crate) enum AdminUrl {
    /// The URL that the user gave.
    Given(PoolUrl),
    /// The state directory of this host's scheduler.
    FromState(StatePath),
}

/// An action on the tokens of a pool.
#[derive(Debug)]
pub(crate) enum TokenAction {
    /// Create a token.
    Create {
        /// The token's name; the scheduler picks a free name if `None`.
        name: Option<String>,
        /// The role of the token's holder.
        role: String,
        /// The tenant to which the token belongs.
        tenant: String,
        /// The person or program that gets the token; may be empty.
        user: String,
        /// What the token is for; may be empty.
        note: String,
        /// How long the token is valid; for ever if `None`.
        life: Option<Duration>,
        /// How many workers may enrol with the token; any number if `None`.
        uses: Option<u64>,
    },
    /// List every token.
    List,
    /// Create a successor of a token.
    Rotate {
        /// The name of the token to replace.
        name: String,
        /// How long the replaced token stays valid along with its successor.
        grace: Duration,
    },
    /// Revoke a token.
    Revoke {
        /// The token's name.
        name: String,
        /// Whether leases opened with the token go on until they end by themselves.
        keep_leases: bool,
    },
}

/// A simulation, or a trace for one.
#[derive(Debug)]
pub(crate) enum SimulateConfig {
    /// Run a trace.
    Run(SimulationConfig),
    /// Print a synthetic trace.
    Generate(simulate::generator::Recipe),
}

/// The settings of a simulation.
#[derive(Debug)]
pub(crate) struct SimulationConfig {
    /// The file with the trace.
    pub(crate) trace: PathBuf,
    /// The workers.
    pub(crate) pool: simulate::pool_spec::PoolSpec,
    /// The tenants; one that is not among them has weight 1.
    pub(crate) policy: tensord_scheduler::Policy,
    /// The orders of requests to compare.
    pub(crate) orders: Vec<tensord_scheduler::RequestOrder>,
    /// What tenants had so long ago counts half as much as what they have now.
    pub(crate) half_life: Duration,
    /// How long a request that is next waits until others pass it only if they can be suspended.
    pub(crate) reserve_after: Duration,
    /// How long it takes from the end of a job until its devices are free.
    pub(crate) release: Duration,
    /// The file for the picture.
    pub(crate) svg: Option<PathBuf>,
    /// Whether to print JSON instead of tables.
    pub(crate) json: bool,
}

/// The settings of `tensord devices`.
#[derive(Debug)]
pub(crate) struct DevicesConfig {
    /// Whether to print JSON instead of a table.
    pub(crate) json: bool,
}

/// The settings of a demo training run.
#[cfg(feature = "demo")]
#[derive(Debug)]
pub(crate) struct DemoConfig {
    /// The network to train.
    pub(crate) model: tensord_demo::Model,
    /// The number of devices that train the model together.
    pub(crate) devices: u32,
    /// The kind of device; if `None`, any kind on an existing pool, else CPUs.
    pub(crate) kind: Option<String>,
    /// The pool to train on; the demo starts its own if `None`.
    pub(crate) pool: Option<PoolUrl>,
    /// The number of passes over the training set; the default if `None`.
    pub(crate) epochs: Option<usize>,
    /// The directory for checkpoints and metric logs; none are written if `None`.
    pub(crate) artifacts: Option<PathBuf>,
    /// Whether to kill workers while the demo trains.
    pub(crate) chaos: bool,
    /// Whether to print the result as JSON on the last line.
    pub(crate) json: bool,
    /// Whether to print nothing but the result.
    pub(crate) quiet: bool,
}

/// The path of a state directory, and its form in messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StatePath {
    /// The path itself.
    pub(crate) path: PathBuf,
    /// The same path, with `~` for the home directory.
    pub(crate) display_path: String,
}
