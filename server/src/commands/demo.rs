//! `tensord demo`: a training run on a pool of its own or on an existing one.
//!
//! If no pool is given, the demo starts a scheduler in this process and two
//! workers as processes of their own. So it uses everything that a real pool does:
//! two workers, TLS, leases, op streams over TCP, and, with several devices,
//! gradients that go from worker to worker.

pub(crate) mod error;

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use burn::train::Interrupter;
use tempfile::TempDir;
use tensord_client::{Lease, LeaseRequest, Pool, PoolUrl};
use tracing::info;

use self::error::DemoError;
use crate::{
    audit,
    config::{DemoConfig, SchedulerConfig, StatePath},
    demo::{self, Panics, TrainError, TrainOptions, View},
    failure::Failure,
    local::LocalPool,
    scheduler::LEASE_TOKEN_LIFE,
    shutdown::Shutdown,
    stdout,
};

/// Number of workers in the demo's own pool, which share the devices.
const WORKERS: u32 = 2;

/// How long the workers may take to join.
const JOIN_DEADLINE: Duration = Duration::from_secs(30);

/// Trains, and prints the result.
pub(super) async fn run(config: DemoConfig) -> Result<(), Failure> {
    let mut shutdown = Shutdown::listen().map_err(Failure::system("wait for signals"))?;
    let own = match &config.pool {
        Some(_) => None,
        None => Some(OwnPool::start(config.devices, config.kind.as_deref()).await?),
    };
    let url = config
        .pool
        .clone()
        .or_else(|| own.as_ref().map(|own| own.url.clone()));
    let url = url.expect("without a given pool, the demo has started its own");
    let workers = own.as_ref().map_or(0, |own| own.workers.len());
    let interrupter = Interrupter::new();
    let stop = interrupter.clone();
    let json = config.json;
    let mut training =
        tokio::task::spawn_blocking(move || train(&config, url, workers, interrupter));
    let trained = tokio::select! {
        trained = &mut training => trained,
        () = shutdown.requested() => {
            stop.stop(Some("a signal requested a stop"));
            training.await
        }
    };
    let outcome = trained
        .map_err(io::Error::other)
        .map_err(Failure::system("train"))??;
    let mut text = format!("\n{}\n", demo::render_table(&outcome));
    if json {
        text.push_str(&demo::to_json(&outcome));
        text.push('\n');
    }
    stdout::print(&text)
}

/// Leases devices and trains on them.
fn train(
    config: &DemoConfig,
    url: PoolUrl,
    workers: usize,
    interrupter: Interrupter,
) -> Result<demo::Outcome, DemoError> {
    let pool = Pool::connect_url(url)?;
    wait_for_workers(&pool, workers)?;
    let queued =
        |position| info!("waiting for devices: the request is at position {position} of the queue");
    let mut request = LeaseRequest::devices(config.devices).on_queued(queued);
    if let Some(kind) = &config.kind {
        request = request.kind(kind);
    }
    let lease = pool.lease(request)?;
    let mut options = TrainOptions::new(config.model, lease.devices().to_vec());
    options.epochs = config.epochs.unwrap_or(options.epochs);
    options.artifacts.clone_from(&config.artifacts);
    options.interrupter = interrupter;
    options.view = match options.view {
        _ if config.quiet => View::Quiet,
        // The dashboard uses the terminal's alternate screen, so when it ends, no progress
        // remains visible above the JSON.
        _ if config.json => View::Lines,
        detected => detected,
    };
    if let View::Lines = options.view {
        println!("{}", introduction(config, &lease));
    }
    let panics = Panics::install_hook();
    let trained = demo::train(&options);
    let mut outcome = trained.map_err(|error| explain(error, &lease, &panics))?;
    let workers = count_by_worker(&lease).into_keys();
    outcome.workers = workers.map(|(worker, _)| worker).collect();
    outcome.workers.dedup();
    let traffic = lease.traffic();
    (outcome.bytes_up, outcome.bytes_down) = (traffic.bytes_up, traffic.bytes_down);
    Ok(outcome)
}

/// Replaces a training error by its cause, if the lease or the first panic shows one.
fn explain(error: TrainError, lease: &Lease, panics: &Panics) -> DemoError {
    match (lease.ended(), error, panics.first()) {
        (Some(reason), ..) => DemoError::Lost(reason),
        (None, TrainError::Panicked(_), Some(first)) => TrainError::Panicked(first.into()).into(),
        (None, error, _) => error.into(),
    }
}

fn introduction(config: &DemoConfig, lease: &Lease) -> String {
    let places = count_by_worker(lease).into_iter();
    let places: Vec<_> = places
        .map(|((worker, kind), count)| match config.devices {
            1 => format!("{kind} on {worker}"),
            _ => format!("{count} {kind} on {worker}"),
        })
        .collect();
    format!("training {} on {}", config.model.name(), places.join(", "))
}

/// Counts the devices of a lease by worker and kind.
fn count_by_worker(lease: &Lease) -> BTreeMap<(String, String), usize> {
    let mut places = BTreeMap::new();
    for device in lease.descriptions() {
        *places.entry((device.worker, device.kind)).or_default() += 1;
    }
    places
}

fn wait_for_workers(pool: &Pool, count: usize) -> Result<(), DemoError> {
    let until = Instant::now() + JOIN_DEADLINE;
    while pool.status()?.workers.len() < count {
        if Instant::now() > until {
            return Err(DemoError::JoinTimeout);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// A pool for one run of the demo. Dropping it kills the workers, stops the scheduler and
/// removes the state directory.
struct OwnPool {
    url: PoolUrl,
    workers: Vec<Child>,
    _pool: LocalPool,
    _state: TempDir,
}

impl OwnPool {
    /// Starts a pool with at least `devices` devices, the same number on each worker.
    async fn start(devices: u32, kind: Option<&str>) -> Result<Self, Failure> {
        let state = tempfile::tempdir().map_err(DemoError::Start)?;
        let path: PathBuf = state.path().join("state");
        let display_path = path.display().to_string();
        let audit = audit::Settings {
            directory: path.clone(),
            file_bytes: 0,
            files: 1,
        };
        let config = SchedulerConfig {
            state: StatePath { path, display_path },
            listen: ([127, 0, 0, 1], 0).into(),
            advertise: None,
            host_name: None,
            // The log is turned off: only the demo connects, and the state directory is
            // temporary.
            audit,
            lease_token_life: LEASE_TOKEN_LIFE,
        };
        let pool = LocalPool::start(&config).await?;
        let made = "the tokens of a new pool are valid";
        let url = pool.urls.programs.clone().expect(made);
        let mut own = Self {
            url,
            workers: Vec::new(),
            _pool: pool,
            _state: state,
        };
        for number in 1..=WORKERS {
            let kind = kind.unwrap_or("flex");
            let devices = format!("{kind}*{}", devices.div_ceil(WORKERS));
            let worker = start_worker(&own._pool.urls.own_worker, number, &devices);
            own.workers.push(worker.map_err(DemoError::Start)?);
        }
        Ok(own)
    }
}

impl Drop for OwnPool {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            // Both fail if the process has already exited.
            let _ = worker.kill();
            let _ = worker.wait();
        }
    }
}

/// Starts a worker process. Its URL goes through the environment, as every user of
/// the host can see a process's arguments.
fn start_worker(url: &PoolUrl, number: u32, devices: &str) -> io::Result<Child> {
    Command::new(std::env::current_exe()?)
        .args(["worker", "--listen", "127.0.0.1:0"])
        .args(["--devices", devices])
        .args(["--name", &format!("demo-{number}")])
        .env("TENSORD_URL", url.reveal())
        .env("TENSORD_LOG", "warn")
        .env_remove("TENSORD_CONFIG")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
}
