//! Merges the layers of settings and fills in the defaults.
//!
//! Pure except for the reads of three files, if they are named: that with the pool URL, and those with tenants
//! of `tensord apply` and `tensord simulate`.

mod admin;
#[cfg(feature = "demo")]
mod demo;
mod pool_url;
mod simulate;
mod state_files;

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use tensord_transport::PoolUrl;
use tensord_worker::{AUTO, DeviceSelection, WorkerOptions};

use self::{
    pool_url::{pool_url, url_in_file},
    state_files::{audit_log, kernel_cache},
};
use super::{
    Config, ConfigError, Demand, DevicesConfig, Environment, File, GatewayConfig, GatewayToken,
    NodeConfig, QueueConfig, SchedulerConfig, StatePath, StatusConfig, UpConfig, WorkerConfig,
    settings::{
        DrainSettings, GatewaySettings, SchedulerSettings, StateSettings, UpSettings, UrlSettings,
        WorkerSettings,
    },
    values::{Devices, Filter, Host, Listen, Name, Period, Seconds, SnapshotStore},
};
use crate::{
    cli::{Cli, Command},
    scheduler::LEASE_TOKEN_LIFE,
    state,
};

/// Default memory for uploads that are kept: room for 100,000 small images.
const CACHE_BYTES: u64 = 1 << 30;

/// Default port of a pool.
const POOL_PORT: u16 = 7461;
/// Default port of `tensord worker`.
const WORKER_PORT: u16 = 7462;
/// Default port of a gateway.
const GATEWAY_PORT: u16 = 7463;

/// Default time limit for running sessions to end after a stop signal, in seconds.
const DRAIN_SECONDS: u64 = 10;

const NO_URL: &str = "TENSORD_URL is not set; export the line that `tensord up` or `tensord scheduler` prints, or name a file that holds the URL with --url-file";
const NO_STATE: &str =
    "--state: this user has no home directory for the default state directory; name a directory";
const NO_NAME: &str =
    "--name: this host has no name that is valid for a worker; give the worker a name";
const NO_DEVICES: &str = "--devices: a lease needs at least 1 device";

/// Returns the log filter: that of the flags, else of the file, else the command's default.
pub(crate) fn log_filter(cli: &Cli, file: &File) -> Filter {
    let given = cli.common.log.clone().or(file.log.clone());
    given.unwrap_or_else(|| default_filter(&cli.command))
}

fn default_filter(command: &Command) -> Filter {
    match command {
        // Only warnings and errors may appear between the demo's lines of progress.
        #[cfg(feature = "demo")]
        Command::Demo { .. } => "warn,burn_remote=error"
            .parse()
            .expect("the filter is valid"),
        _ => Filter::default(),
    }
}

/// Merges `cli`, `file` and `environment` into a configuration.
///
/// # Errors
///
/// If a setting is missing or wrong; the error names it.
pub(crate) fn resolve(
    cli: Cli,
    file: File,
    environment: &Environment,
) -> Result<Config, ConfigError> {
    let layers = Layers {
        log: log_filter(&cli, &file),
        config_path: cli.common.config,
        file,
        environment,
    };
    Ok(match cli.command {
        Command::Up {
            settings,
            state,
            drain,
        } => Config::Up(layers.up(settings, state, &drain)?),
        Command::Scheduler { settings, state } => {
            Config::Scheduler(layers.scheduler(settings, state)?)
        }
        Command::Worker {
            command: Some(command),
            ..
        } => Config::Workers(layers.workers(command)?),
        Command::Lease { command } => Config::Leases(layers.leases(command)?),
        Command::Queue { json, admin } => Config::Queue(QueueConfig {
            admin: layers.admin(admin)?,
            lease: None,
            json,
        }),
        Command::Why { lease, json, admin } => Config::Queue(QueueConfig {
            admin: layers.admin(admin)?,
            lease: Some(lease),
            json,
        }),
        Command::Usage { args } => Config::Usage(layers.usage(args)?),
        Command::Worker {
            command: None,
            settings,
            url,
            state,
            drain,
        } => Config::Worker(layers.worker(settings, url, state, &drain)?),
        Command::Gateway {
            settings,
            url,
            state,
        } => Config::Gateway(layers.gateway(settings, url, state)?),
        Command::Status { json, url } => Config::Status(StatusConfig {
            url: layers.url(url)?,
            json,
        }),
        Command::Tenant { command } => Config::Tenants(layers.tenants(command)?),
        Command::Apply { args } => Config::Apply(layers.apply(args)?),
        Command::Token { command } => Config::Token(layers.token(command)?),
        Command::Simulate {
            command: Some(command),
            ..
        } => Config::Simulate(simulate::generate(command)),
        Command::Simulate {
            command: None,
            args,
        } => Config::Simulate(simulate::run(args)?),
        Command::Devices { json } => Config::Devices(DevicesConfig { json }),
        #[cfg(feature = "demo")]
        Command::Demo { settings, url } => Config::Demo(layers.demo(settings, url)?),
    })
}

/// The layers of settings below the command line.
struct Layers<'a> {
    log: Filter,
    /// The path of the configuration file; `None` if no file is named.
    config_path: Option<PathBuf>,
    file: File,
    environment: &'a Environment,
}

impl Layers<'_> {
    fn up(
        mut self,
        settings: UpSettings,
        state: StateSettings,
        drain: &DrainSettings,
    ) -> Result<UpConfig, ConfigError> {
        let settings = settings.with_fallback(std::mem::take(&mut self.file.up));
        let local = SocketAddr::from((Ipv4Addr::LOCALHOST, POOL_PORT));
        let listen = or_default(settings.listen, local);
        let advertise = settings.advertise.map(|Host(host)| host);
        let state = self.state(state)?;
        Ok(UpConfig {
            node: NodeConfig {
                name: self.worker_name(settings.name)?,
                listen: or_default(settings.worker_listen, SocketAddr::new(listen.ip(), 0)),
                advertise: advertise.clone(),
                devices: or_auto(settings.devices),
                memory_bytes: settings.memory.map(|memory| memory.size_bytes),
                cache_bytes: settings
                    .upload_cache
                    .map_or(CACHE_BYTES, |memory| memory.size_bytes),
                snapshot_bytes: settings.snapshot_memory.map(|memory| memory.size_bytes),
                snapshot_store: settings.snapshots.map(|SnapshotStore(location)| location),
                collective_timeout: settings
                    .collective_timeout
                    .map_or(WorkerOptions::COLLECTIVE_TIMEOUT, |Seconds(timeout)| {
                        timeout
                    }),
                op_timeout: settings
                    .op_timeout
                    .map_or(WorkerOptions::OP_TIMEOUT, |Seconds(timeout)| timeout),
                bucket_bytes: settings.bucket_size.map(|size| size.size_bytes),
                kernel_cache: Some(kernel_cache(&state)),
                state: Some(state.path.clone()),
                secret_paths: self.secret_paths(Some(&state), None),
                log: self.log.clone(),
            },
            scheduler: SchedulerConfig {
                audit: audit_log(&state, settings.audit_log_size, settings.audit_log_files),
                lease_token_life: token_life(settings.lease_token_seconds),
                half_life: half_life(settings.half_life),
                reserve_after: reserve_after(settings.reserve_after),
                idle_timeout: idle_timeout(settings.idle_timeout),
                state,
                listen,
                advertise,
                host_name: self.environment.host_name.clone(),
            },
            drain: self.drain(drain),
        })
    }

    fn scheduler(
        mut self,
        settings: SchedulerSettings,
        state: StateSettings,
    ) -> Result<SchedulerConfig, ConfigError> {
        let settings = settings.with_fallback(std::mem::take(&mut self.file.scheduler));
        let state = self.state(state)?;
        Ok(SchedulerConfig {
            audit: audit_log(&state, settings.audit_log_size, settings.audit_log_files),
            lease_token_life: token_life(settings.lease_token_seconds),
            half_life: half_life(settings.half_life),
            reserve_after: reserve_after(settings.reserve_after),
            idle_timeout: idle_timeout(settings.idle_timeout),
            state,
            listen: or_default(settings.listen, unspecified_addr(POOL_PORT)),
            advertise: settings.advertise.map(|Host(host)| host),
            host_name: self.environment.host_name.clone(),
        })
    }

    fn worker(
        mut self,
        settings: WorkerSettings,
        url: UrlSettings,
        state: StateSettings,
        drain: &DrainSettings,
    ) -> Result<WorkerConfig, ConfigError> {
        let settings = settings.with_fallback(std::mem::take(&mut self.file.worker));
        // Without a state directory, a worker runs with a new key at each start.
        let state = self.state(state).ok();
        let secret_paths = self.secret_paths(state.as_ref(), url.url_file.clone());
        Ok(WorkerConfig {
            url: self.url(url)?,
            node: NodeConfig {
                name: self.worker_name(settings.name)?,
                listen: or_default(settings.listen, unspecified_addr(WORKER_PORT)),
                advertise: settings.advertise.map(|Host(host)| host),
                devices: or_auto(settings.devices),
                memory_bytes: settings.memory.map(|memory| memory.size_bytes),
                cache_bytes: settings
                    .upload_cache
                    .map_or(CACHE_BYTES, |memory| memory.size_bytes),
                snapshot_bytes: settings.snapshot_memory.map(|memory| memory.size_bytes),
                snapshot_store: settings.snapshots.map(|SnapshotStore(location)| location),
                collective_timeout: settings
                    .collective_timeout
                    .map_or(WorkerOptions::COLLECTIVE_TIMEOUT, |Seconds(timeout)| {
                        timeout
                    }),
                op_timeout: settings
                    .op_timeout
                    .map_or(WorkerOptions::OP_TIMEOUT, |Seconds(timeout)| timeout),
                bucket_bytes: settings.bucket_size.map(|size| size.size_bytes),
                kernel_cache: state.as_ref().map(kernel_cache),
                state: state.map(|state| state.path),
                secret_paths,
                log: self.log.clone(),
            },
            drain: self.drain(drain),
        })
    }

    fn gateway(
        mut self,
        settings: GatewaySettings,
        url: UrlSettings,
        state: StateSettings,
    ) -> Result<GatewayConfig, ConfigError> {
        let settings = settings.with_fallback(std::mem::take(&mut self.file.gateway));
        let local = SocketAddr::from((Ipv4Addr::LOCALHOST, GATEWAY_PORT));
        let listen = or_default(settings.listen, local);
        if !listen.ip().is_loopback() && !settings.allow_plaintext {
            return Err(ConfigError::Plaintext(listen));
        }
        let share = settings.share.filter(|share| share.is_partial());
        let demand = Demand {
            devices: settings.devices.unwrap_or(1),
            share: share.map(|share| share.part),
            kind: settings.kind.map(|Name(kind)| kind),
            memory_bytes: settings.memory.map_or(0, |memory| memory.size_bytes),
        };
        if demand.devices == 0 {
            return Err(ConfigError::Missing(NO_DEVICES));
        }
        if let Some(part) = demand.share.filter(|_| demand.devices > 1) {
            return Err(ConfigError::ShareOfSeveral {
                part,
                devices: demand.devices,
            });
        }
        let token = match &self.environment.gateway_token {
            Some(token) if state::is_token(token.reveal()) => GatewayToken::Given(token.clone()),
            Some(_) => return Err(ConfigError::GatewayToken),
            None => GatewayToken::FromState(self.state(state)?),
        };
        Ok(GatewayConfig {
            url: self.url(url)?,
            listen,
            demand,
            token,
        })
    }

    fn state(&self, settings: StateSettings) -> Result<StatePath, ConfigError> {
        let chosen = settings.state.or(self.file.state.clone());
        let path = chosen.or_else(|| self.environment.default_state());
        let path = path.ok_or(ConfigError::Missing(NO_STATE))?;
        let home = self.environment.home.as_ref();
        let display_path = match home.and_then(|home| path.strip_prefix(home).ok()) {
            Some(fallback) => Path::new("~").join(fallback).display().to_string(),
            None => path.display().to_string(),
        };
        Ok(StatePath { path, display_path })
    }

    /// Returns the paths under which a worker's host keeps secrets.
    fn secret_paths(&self, state: Option<&StatePath>, url_file: Option<PathBuf>) -> Vec<PathBuf> {
        let state = state.map(|state| state.path.clone());
        [
            state,
            url_file,
            self.file.url_file.clone(),
            self.config_path.clone(),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Resolves the pool URL, in this order: the file named on the command line,
    /// `TENSORD_URL`, the file named in the configuration file.
    fn url(&self, settings: UrlSettings) -> Result<PoolUrl, ConfigError> {
        if let Some(path) = settings.url_file {
            return url_in_file(path);
        }
        if let Some(url) = &self.environment.url {
            return pool_url(url, "TENSORD_URL".into());
        }
        match &self.file.url_file {
            Some(path) => url_in_file(path.clone()),
            None => Err(ConfigError::Missing(NO_URL)),
        }
    }

    fn worker_name(&self, given: Option<Name>) -> Result<String, ConfigError> {
        let host = || self.environment.host_name.as_ref()?.parse().ok();
        let Name(name) = given.or_else(host).ok_or(ConfigError::Missing(NO_NAME))?;
        Ok(name)
    }

    fn drain(&self, settings: &DrainSettings) -> Duration {
        let seconds = settings.drain_seconds.or(self.file.drain_seconds);
        Duration::from_secs(seconds.unwrap_or(DRAIN_SECONDS))
    }
}

fn unspecified_addr(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))
}

fn token_life(given: Option<Seconds>) -> Duration {
    given.map_or(LEASE_TOKEN_LIFE, |Seconds(life)| life)
}

fn half_life(given: Option<Period>) -> Duration {
    given.map_or_else(
        || tensord_scheduler::Options::default().half_life,
        |Period(half_life)| half_life,
    )
}

fn reserve_after(given: Option<Period>) -> Duration {
    given.map_or_else(
        || tensord_scheduler::Options::default().reserve_after,
        |Period(time)| time,
    )
}

fn idle_timeout(given: Option<Period>) -> Duration {
    given.map_or_else(
        || tensord_scheduler::Options::default().idle_timeout,
        |Period(idle_timeout)| idle_timeout,
    )
}

fn or_default(listen: Option<Listen>, default: SocketAddr) -> SocketAddr {
    listen.map_or(default, |Listen(address)| address)
}

fn or_auto(devices: Option<Devices>) -> Vec<DeviceSelection> {
    let auto = || AUTO.parse().expect("auto is a valid list of devices");
    let Devices(devices) = devices.unwrap_or_else(auto);
    devices
}

#[cfg(test)]
mod tests;
