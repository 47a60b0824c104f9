//! The settings of each command, before defaults are applied.
//!
//! Each struct is both a group of flags (with their environment variables) and
//! a table of the configuration file, so that the names of the two cannot differ.
//! Every setting is optional here; [`resolve`](super::resolve()) merges flags and
//! file and fills in defaults.

use std::{num::NonZeroU32, path::PathBuf};

use clap::Args;
use serde::Deserialize;

#[cfg(feature = "demo")]
use super::values::DeviceCount;
use super::values::{
    Devices, Host, Listen, Memory, MemoryOrZero, Name, Period, Seconds, Share, SnapshotStore,
};

/// Settings of `up`, a scheduler and a worker in one process: a field for each flag.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct UpSettings {
    /// Address on which programs and further workers reach the pool [default: 127.0.0.1:7461]
    #[arg(long, value_name = "IP:PORT", env = "TENSORD_LISTEN")]
    pub(crate) listen: Option<Listen>,
    /// Host that the printed URLs name [default: the address listened on]
    #[arg(long, value_name = "HOST", env = "TENSORD_ADVERTISE")]
    pub(crate) advertise: Option<Host>,
    /// Devices to offer, such as cuda:0,1 or flex*2 [default: auto, which is all GPUs of the first kind found, or else the CPU]
    #[arg(long, value_name = "LIST", env = "TENSORD_DEVICES")]
    pub(crate) devices: Option<Devices>,
    /// Name of this host's worker [default: the host's name]
    #[arg(long, value_name = "NAME", env = "TENSORD_WORKER_NAME")]
    pub(crate) name: Option<Name>,
    /// Memory that each device may use, such as 16GiB [default: 95 % of a GPU's memory; CPU devices share 80 % of the host's]
    #[arg(long, value_name = "SIZE", env = "TENSORD_WORKER_MEMORY")]
    pub(crate) memory: Option<Memory>,
    /// Memory for cached uploads, or 0 for no cache [default: 1GiB]
    #[arg(long, value_name = "SIZE", env = "TENSORD_WORKER_UPLOAD_CACHE")]
    pub(crate) upload_cache: Option<MemoryOrZero>,
    /// Memory for snapshots, from which a lease goes on when its process dies, divided among the devices; or 0 for none [default: a sixteenth of the host's memory]
    #[arg(long, value_name = "SIZE", env = "TENSORD_WORKER_SNAPSHOT_MEMORY")]
    pub(crate) snapshot_memory: Option<MemoryOrZero>,
    /// Also write snapshots to this directory or bucket (s3://, gs:// or az://), so that leases continue after a restart of this worker, or on another worker with the same directory or bucket [default: memory only]
    #[arg(long, value_name = "DIR|URL", env = "TENSORD_WORKER_SNAPSHOTS")]
    pub(crate) snapshots: Option<SnapshotStore>,
    /// Seconds that the ranks of a collective wait for a slow rank [default: 30]
    #[arg(long, value_name = "N", env = "TENSORD_COLLECTIVE_TIMEOUT")]
    pub(crate) collective_timeout: Option<Seconds>,
    /// Seconds that one op may take [default: 60]
    #[arg(long, value_name = "N", env = "TENSORD_OP_TIMEOUT")]
    pub(crate) op_timeout: Option<Seconds>,
    /// Size of the gradients that are reduced together, such as 4MiB [default: measured on the links]
    #[arg(long, value_name = "SIZE", env = "TENSORD_WORKER_BUCKET_SIZE")]
    pub(crate) bucket_size: Option<Memory>,
    /// Address that receives op streams, over TCP and UDP [default: any free port on the address of --listen]
    #[arg(long, value_name = "IP:PORT", env = "TENSORD_WORKER_LISTEN")]
    pub(crate) worker_listen: Option<Listen>,
    /// Largest size of one file of the audit log, or 0 for no log [default: 16MiB]
    #[arg(long, value_name = "SIZE", env = "TENSORD_AUDIT_LOG_SIZE")]
    pub(crate) audit_log_size: Option<MemoryOrZero>,
    /// Number of files of the audit log to keep [default: 4]
    #[arg(long, value_name = "N", env = "TENSORD_AUDIT_LOG_FILES")]
    pub(crate) audit_log_files: Option<NonZeroU32>,
    /// Seconds for which a lease token can open sessions; it is renewed before it expires [default: 600]
    #[arg(long, value_name = "N", env = "TENSORD_LEASE_TOKEN_SECONDS")]
    pub(crate) lease_token_seconds: Option<Seconds>,
    /// Half-life of past usage in the order of the queue; 0s ignores past usage [default: 1d]
    #[arg(long, value_name = "TIME", env = "TENSORD_HALF_LIFE")]
    pub(crate) half_life: Option<Period>,
    /// Time in the queue after which a request reserves devices: others then get these only for leases that can be suspended, may end, or end before the large request could have the devices [default: 10m]
    #[arg(long, value_name = "TIME", env = "TENSORD_RESERVE_AFTER")]
    pub(crate) reserve_after: Option<Period>,
    /// Time for which a lease must have been idle before it is suspended for others that wait for its devices; with 0s, it never is [default: 10m]
    #[arg(long, value_name = "TIME", env = "TENSORD_IDLE_TIMEOUT")]
    pub(crate) idle_timeout: Option<Period>,
}

/// Settings of `scheduler`: a pool's scheduler alone.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct SchedulerSettings {
    /// Address on which programs and workers reach the pool [default: 0.0.0.0:7461]
    #[arg(long, value_name = "IP:PORT", env = "TENSORD_LISTEN")]
    pub(crate) listen: Option<Listen>,
    /// Host that the printed URLs name [default: this host's address]
    #[arg(long, value_name = "HOST", env = "TENSORD_ADVERTISE")]
    pub(crate) advertise: Option<Host>,
    /// Largest size of one file of the audit log, or 0 for no log [default: 16MiB]
    #[arg(long, value_name = "SIZE", env = "TENSORD_AUDIT_LOG_SIZE")]
    pub(crate) audit_log_size: Option<MemoryOrZero>,
    /// Number of files of the audit log to keep [default: 4]
    #[arg(long, value_name = "N", env = "TENSORD_AUDIT_LOG_FILES")]
    pub(crate) audit_log_files: Option<NonZeroU32>,
    /// Seconds for which a lease token can open sessions; it is renewed before it expires [default: 600]
    #[arg(long, value_name = "N", env = "TENSORD_LEASE_TOKEN_SECONDS")]
    pub(crate) lease_token_seconds: Option<Seconds>,
    /// Half-life of past usage in the order of the queue; 0s ignores past usage [default: 1d]
    #[arg(long, value_name = "TIME", env = "TENSORD_HALF_LIFE")]
    pub(crate) half_life: Option<Period>,
    /// Time in the queue after which a request reserves devices: others then get these only for leases that can be suspended, may end, or end before the large request could have the devices [default: 10m]
    #[arg(long, value_name = "TIME", env = "TENSORD_RESERVE_AFTER")]
    pub(crate) reserve_after: Option<Period>,
    /// Time for which a lease must have been idle before it is suspended for others that wait for its devices; with 0s, it never is [default: 10m]
    #[arg(long, value_name = "TIME", env = "TENSORD_IDLE_TIMEOUT")]
    pub(crate) idle_timeout: Option<Period>,
}

/// Settings of `worker`: one host's devices.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct WorkerSettings {
    /// Devices to offer, such as cuda:0,1 or flex*2 [default: auto, which is all GPUs of the first kind found, or else the CPU]
    #[arg(long, value_name = "LIST", env = "TENSORD_DEVICES")]
    pub(crate) devices: Option<Devices>,
    /// Name of this worker [default: the host's name]
    #[arg(long, value_name = "NAME", env = "TENSORD_WORKER_NAME")]
    pub(crate) name: Option<Name>,
    /// Memory that each device may use, such as 16GiB [default: 95 % of a GPU's memory; CPU devices share 80 % of the host's]
    #[arg(long, value_name = "SIZE", env = "TENSORD_WORKER_MEMORY")]
    pub(crate) memory: Option<Memory>,
    /// Memory for cached uploads, or 0 for no cache [default: 1GiB]
    #[arg(long, value_name = "SIZE", env = "TENSORD_WORKER_UPLOAD_CACHE")]
    pub(crate) upload_cache: Option<MemoryOrZero>,
    /// Memory for snapshots, from which a lease goes on when its process dies, divided among the devices; or 0 for none [default: a sixteenth of the host's memory]
    #[arg(long, value_name = "SIZE", env = "TENSORD_WORKER_SNAPSHOT_MEMORY")]
    pub(crate) snapshot_memory: Option<MemoryOrZero>,
    /// Also write snapshots to this directory or bucket (s3://, gs:// or az://), so that leases continue after a restart of this worker, or on another worker with the same directory or bucket [default: memory only]
    #[arg(long, value_name = "DIR|URL", env = "TENSORD_WORKER_SNAPSHOTS")]
    pub(crate) snapshots: Option<SnapshotStore>,
    /// Seconds that the ranks of a collective wait for a slow rank [default: 30]
    #[arg(long, value_name = "N", env = "TENSORD_COLLECTIVE_TIMEOUT")]
    pub(crate) collective_timeout: Option<Seconds>,
    /// Seconds that one op may take [default: 60]
    #[arg(long, value_name = "N", env = "TENSORD_OP_TIMEOUT")]
    pub(crate) op_timeout: Option<Seconds>,
    /// Size of the gradients that are reduced together, such as 4MiB [default: measured on the links]
    #[arg(long, value_name = "SIZE", env = "TENSORD_WORKER_BUCKET_SIZE")]
    pub(crate) bucket_size: Option<Memory>,
    /// Address that receives op streams, over TCP and UDP [default: 0.0.0.0:7462]
    #[arg(long, value_name = "IP:PORT", env = "TENSORD_WORKER_LISTEN")]
    pub(crate) listen: Option<Listen>,
    /// Host under which programs reach this worker [default: the address the scheduler sees]
    #[arg(long, value_name = "HOST", env = "TENSORD_WORKER_ADVERTISE")]
    pub(crate) advertise: Option<Host>,
}

/// Settings of `gateway`: leased devices for stock Burn programs.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct GatewaySettings {
    /// Address on which stock Burn programs connect [default: 127.0.0.1:7463]
    #[arg(long, value_name = "IP:PORT", env = "TENSORD_GATEWAY_LISTEN")]
    pub(crate) listen: Option<Listen>,
    /// Number of devices to lease [default: 1]
    #[arg(long, value_name = "N", env = "TENSORD_GATEWAY_DEVICES")]
    pub(crate) devices: Option<u32>,
    /// Part of one device to lease, such as 0.25; others have the rest at the same time [default: 1]
    #[arg(long, value_name = "PART", env = "TENSORD_GATEWAY_SHARE")]
    pub(crate) share: Option<Share>,
    /// Kind of the devices, such as flex [default: any]
    #[arg(long, value_name = "KIND", env = "TENSORD_GATEWAY_KIND")]
    pub(crate) kind: Option<Name>,
    /// Memory that each device must have, such as 16GiB; with --share, what the lease gets of it [default: any; the same part as --share]
    #[arg(long, value_name = "SIZE", env = "TENSORD_GATEWAY_MEMORY")]
    pub(crate) memory: Option<Memory>,
    /// Allow --listen on an address that other hosts can reach, although ws:// is not encrypted
    #[arg(long, env = "TENSORD_GATEWAY_ALLOW_PLAINTEXT")]
    pub(crate) allow_plaintext: bool,
}

/// Settings of `demo`: a training run on a pool.
#[cfg(feature = "demo")]
#[derive(Args, Clone, Debug)]
pub(crate) struct DemoSettings {
    /// Network to train
    #[arg(long, value_enum, value_name = "NAME", default_value_t)]
    pub(crate) model: tensord_demo::Model,
    /// Number of devices for data-parallel training, which divide the 64 digits of a step: 1, 2, 4, 8 or 16
    #[arg(long, value_name = "N", default_value_t)]
    pub(crate) devices: DeviceCount,
    /// Kind of the devices, such as cuda [default: flex; any of an existing pool]
    #[arg(long, value_name = "KIND")]
    pub(crate) kind: Option<Name>,
    /// Train on an existing pool: the one in TENSORD_URL, or at URL, which other users of this
    /// host can then see [default: a temporary pool]
    #[arg(long, value_name = "URL", num_args = 0..=1)]
    pub(crate) url: Option<Option<String>>,
    /// Passes over the training set [default: 12, or 300 with --chaos]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) epochs: Option<u32>,
    /// Directory for checkpoints and metric logs, and with --chaos for chaos.json, from which
    /// `tensord-bench plot` draws the losses [default: none are kept]
    #[arg(long, value_name = "DIR")]
    pub(crate) artifacts: Option<PathBuf>,
    /// Kill a random worker of the temporary pool every few seconds, and compare the losses with
    /// those of an undisturbed training
    #[arg(long)]
    pub(crate) chaos: bool,
    /// Print the result as JSON on the last line
    #[arg(long)]
    pub(crate) json: bool,
    /// Print nothing but the result
    #[arg(long)]
    pub(crate) quiet: bool,
}

/// Settings of commands that keep secrets on disk.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct StateSettings {
    /// Directory of keys, tokens and compiled kernels [default: ~/.local/state/tensord]
    #[arg(long, value_name = "DIR", env = "TENSORD_STATE")]
    pub(crate) state: Option<PathBuf>,
}

/// Settings of commands that connect to a pool.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct UrlSettings {
    /// File that holds the pool URL, instead of TENSORD_URL
    #[arg(long, value_name = "FILE", env = "TENSORD_URL_FILE")]
    pub(crate) url_file: Option<PathBuf>,
}

/// Settings of administrators' commands.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct AdminSettings {
    /// Pool URL with an admin token, which other users of this host can then see [default: TENSORD_URL, or else that of the scheduler that runs on this host's state]
    #[arg(long, value_name = "URL", conflicts_with = "url_file")]
    pub(crate) url: Option<String>,
    #[command(flatten)]
    pub(crate) file: UrlSettings,
    #[command(flatten)]
    pub(crate) state: StateSettings,
}

/// Settings of commands whose sessions have time to end after a stop signal.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct DrainSettings {
    /// Seconds that running sessions get to end after Ctrl+C or SIGTERM [default: 10]
    #[arg(long, value_name = "N", env = "TENSORD_DRAIN_SECONDS")]
    pub(crate) drain_seconds: Option<u64>,
}

impl UpSettings {
    /// Returns these settings, with those of `fallback` where one is not set.
    pub(super) fn with_fallback(self, fallback: Self) -> Self {
        Self {
            listen: self.listen.or(fallback.listen),
            advertise: self.advertise.or(fallback.advertise),
            devices: self.devices.or(fallback.devices),
            name: self.name.or(fallback.name),
            memory: self.memory.or(fallback.memory),
            upload_cache: self.upload_cache.or(fallback.upload_cache),
            snapshot_memory: self.snapshot_memory.or(fallback.snapshot_memory),
            snapshots: self.snapshots.or(fallback.snapshots),
            collective_timeout: self.collective_timeout.or(fallback.collective_timeout),
            op_timeout: self.op_timeout.or(fallback.op_timeout),
            bucket_size: self.bucket_size.or(fallback.bucket_size),
            worker_listen: self.worker_listen.or(fallback.worker_listen),
            audit_log_size: self.audit_log_size.or(fallback.audit_log_size),
            audit_log_files: self.audit_log_files.or(fallback.audit_log_files),
            lease_token_seconds: self.lease_token_seconds.or(fallback.lease_token_seconds),
            half_life: self.half_life.or(fallback.half_life),
            reserve_after: self.reserve_after.or(fallback.reserve_after),
            idle_timeout: self.idle_timeout.or(fallback.idle_timeout),
        }
    }
}

impl SchedulerSettings {
    /// Returns these settings, with those of `fallback` where one is not set.
    pub(super) fn with_fallback(self, fallback: Self) -> Self {
        Self {
            listen: self.listen.or(fallback.listen),
            advertise: self.advertise.or(fallback.advertise),
            audit_log_size: self.audit_log_size.or(fallback.audit_log_size),
            audit_log_files: self.audit_log_files.or(fallback.audit_log_files),
            lease_token_seconds: self.lease_token_seconds.or(fallback.lease_token_seconds),
            half_life: self.half_life.or(fallback.half_life),
            reserve_after: self.reserve_after.or(fallback.reserve_after),
            idle_timeout: self.idle_timeout.or(fallback.idle_timeout),
        }
    }
}

impl WorkerSettings {
    /// Returns these settings, with those of `fallback` where one is not set.
    pub(super) fn with_fallback(self, fallback: Self) -> Self {
        Self {
            devices: self.devices.or(fallback.devices),
            name: self.name.or(fallback.name),
            memory: self.memory.or(fallback.memory),
            upload_cache: self.upload_cache.or(fallback.upload_cache),
            snapshot_memory: self.snapshot_memory.or(fallback.snapshot_memory),
            snapshots: self.snapshots.or(fallback.snapshots),
            collective_timeout: self.collective_timeout.or(fallback.collective_timeout),
            op_timeout: self.op_timeout.or(fallback.op_timeout),
            bucket_size: self.bucket_size.or(fallback.bucket_size),
            listen: self.listen.or(fallback.listen),
            advertise: self.advertise.or(fallback.advertise),
        }
    }
}

impl GatewaySettings {
    /// Returns these settings, with those of `fallback` where one is not set.
    pub(super) fn with_fallback(self, fallback: Self) -> Self {
        Self {
            listen: self.listen.or(fallback.listen),
            devices: self.devices.or(fallback.devices),
            share: self.share.or(fallback.share),
            kind: self.kind.or(fallback.kind),
            memory: self.memory.or(fallback.memory),
            allow_plaintext: self.allow_plaintext || fallback.allow_plaintext,
        }
    }
}
