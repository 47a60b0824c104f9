//! Configuration: from flags, environment and file to one typed value per
//! command.
//!
//! ```text
//! flags + their environment (cli) ─┐
//! configuration file (file) ───────┼─► resolve ─► Config
//! surroundings (environment) ──────┘
//! ```
//!
//! Precedence: flags, environment, file, defaults. Everything is validated
//! here, once; the commands never look at the environment or the file again.

mod environment;
mod error;
mod file;
mod resolve;
pub(crate) mod settings;
pub(crate) mod values;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use tensord_transport::{PoolUrl, Secret};
use tensord_worker::DeviceSelection;

use crate::audit;

pub(crate) use environment::Environment;
pub(crate) use error::ConfigError;
pub(crate) use file::File;
pub(crate) use resolve::{log_filter, resolve};

/// What to run, and how.
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
    /// `tensord gateway`.
    Gateway(GatewayConfig),
    /// `tensord status`.
    Status(StatusConfig),
    /// `tensord token`.
    Token(TokenConfig),
    /// `tensord devices`.
    Devices(DevicesConfig),
    /// `tensord demo`.
    #[cfg(feature = "demo")]
    Demo(DemoConfig),
}

/// A scheduler and a worker in one process.
#[derive(Debug)]
pub(crate) struct UpConfig {
    /// The scheduler.
    pub(crate) scheduler: SchedulerConfig,
    /// The worker.
    pub(crate) node: NodeConfig,
    /// How long running sessions get to end.
    pub(crate) drain: Duration,
}

/// A scheduler.
#[derive(Debug)]
pub(crate) struct SchedulerConfig {
    /// Where its secrets are.
    pub(crate) state: StatePath,
    /// Where it listens.
    pub(crate) listen: SocketAddr,
    /// The host in the URLs it prints, if the operator knows better.
    pub(crate) advertise: Option<String>,
    /// This host's name, where no address can stand for it.
    pub(crate) host_name: Option<String>,
    /// Its audit log.
    pub(crate) audit: audit::Settings,
    /// How long a lease token opens sessions.
    pub(crate) lease_token_life: Duration,
}

/// A worker, and the pool it joins.
#[derive(Debug)]
pub(crate) struct WorkerConfig {
    /// The pool, with the worker token.
    pub(crate) url: PoolUrl,
    /// The worker.
    pub(crate) node: NodeConfig,
    /// How long running sessions get to end.
    pub(crate) drain: Duration,
    /// It ends when its stdin does: another process started it.
    pub(crate) until_stdin_closes: bool,
}

/// One host's worker.
#[derive(Clone, Debug)]
pub(crate) struct NodeConfig {
    /// Its name, for people.
    pub(crate) name: String,
    /// Where op streams arrive.
    pub(crate) listen: SocketAddr,
    /// The host under which programs reach it, if the operator knows better.
    pub(crate) advertise: Option<String>,
    /// What it offers.
    pub(crate) devices: Vec<DeviceSelection>,
    /// What each device may use, if less than it has.
    pub(crate) memory_bytes: Option<u64>,
    /// For uploads that are kept.
    pub(crate) cache_bytes: u64,
    /// How long a rank of a collective may keep the others waiting.
    pub(crate) collective_timeout: Duration,
    /// How long an op may take.
    pub(crate) op_timeout: Duration,
    /// Bytes of all-reduces that are begun together, if the operator knows better.
    pub(crate) bucket_bytes: Option<u64>,
    /// Where compiled kernels are kept; nowhere if this host has no place.
    pub(crate) kernel_cache: Option<PathBuf>,
    /// Where its key is kept; nowhere if this host has no place.
    pub(crate) state: Option<PathBuf>,
}

/// A gateway.
#[derive(Debug)]
pub(crate) struct GatewayConfig {
    /// The pool, with the client token.
    pub(crate) url: PoolUrl,
    /// Where stock Burn programs connect.
    pub(crate) listen: SocketAddr,
    /// What to lease.
    pub(crate) demand: Demand,
    /// What stock Burn programs show.
    pub(crate) token: GatewayToken,
}

/// Devices to lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Demand {
    /// How many.
    pub(crate) devices: u32,
    /// Of which kind; any if `None`.
    pub(crate) kind: Option<String>,
    /// With at least this much memory each.
    pub(crate) memory_bytes: u64,
}

/// Where the gateway's token comes from.
#[derive(Debug)]
pub(crate) enum GatewayToken {
    /// The environment.
    Given(Secret),
    /// The state directory; made there if there is none yet.
    Kept(StatePath),
}

/// A look at the pool.
#[derive(Debug)]
pub(crate) struct StatusConfig {
    /// The pool, with the client token.
    pub(crate) url: PoolUrl,
    /// JSON instead of a table.
    pub(crate) json: bool,
}

/// Something to do with a pool's tokens.
#[derive(Debug)]
pub(crate) struct TokenConfig {
    /// The pool, with an admin token.
    pub(crate) admin: AdminUrl,
    /// What to do.
    pub(crate) action: TokenAction,
}

/// Something to do with a pool's workers.
#[derive(Debug)]
pub(crate) struct WorkersConfig {
    /// The pool, with an admin token.
    pub(crate) admin: AdminUrl,
    /// What to do.
    pub(crate) action: WorkersAction,
}

/// What to do with workers.
#[derive(Debug)]
pub(crate) enum WorkersAction {
    /// Show them all.
    List {
        /// JSON instead of a table.
        json: bool,
    },
    /// End one's registration.
    Remove {
        /// Which.
        name: String,
    },
}

/// Where the URL with an admin token comes from.
#[derive(Debug)]
pub(crate) enum AdminUrl {
    /// The user.
    Given(PoolUrl),
    /// The state directory of this host's scheduler.
    Kept(StatePath),
}

/// What to do with tokens.
#[derive(Debug)]
pub(crate) enum TokenAction {
    /// Make one.
    Create {
        /// Its name; any that is free if `None`.
        name: Option<String>,
        /// What it lets its holder be.
        role: String,
        /// Whose it is.
        tenant: String,
        /// How long it lasts; for ever if `None`.
        life: Option<Duration>,
        /// How many workers may enrol with it; any number if `None`.
        uses: Option<u64>,
    },
    /// Show them all.
    List {
        /// JSON instead of a table.
        json: bool,
    },
    /// Make a successor.
    Rotate {
        /// Of which.
        name: String,
        /// How long it stays good beside the successor.
        grace: Duration,
    },
    /// End one.
    Revoke {
        /// Which.
        name: String,
        /// What it opened may end by itself.
        keep_leases: bool,
    },
}

/// A look at this host.
#[derive(Debug)]
pub(crate) struct DevicesConfig {
    /// JSON instead of a table.
    pub(crate) json: bool,
}

/// A training run.
#[cfg(feature = "demo")]
#[derive(Debug)]
pub(crate) struct DemoConfig {
    /// The network.
    pub(crate) model: crate::demo::Model,
    /// How many devices train it together.
    pub(crate) devices: u32,
    /// Of which kind; if `None`, any of an existing pool, or CPUs.
    pub(crate) kind: Option<String>,
    /// The pool to train on; one of the demo's own if `None`.
    pub(crate) pool: Option<PoolUrl>,
    /// Passes over the training set, if not the usual number.
    pub(crate) epochs: Option<usize>,
    /// Where checkpoints and metric logs go; nowhere if `None`.
    pub(crate) artifacts: Option<PathBuf>,
    /// JSON on the last line.
    pub(crate) json: bool,
    /// No progress.
    pub(crate) quiet: bool,
}

/// A state directory, and how to write it for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StatePath {
    /// Where it is.
    pub(crate) path: PathBuf,
    /// The same, with `~` for the home directory.
    pub(crate) shown: String,
}
