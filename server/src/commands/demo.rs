//! `tensord demo`: a training run on a pool of its own or on an existing one.
//!
//! If no pool is given, the demo starts a scheduler in this process and two
//! workers (with `--chaos`, two more than it trains on devices) as processes of their
//! own. So it uses everything that a real pool does: several workers, TLS, leases, op streams over TCP, and, with several devices,
//! gradients that go from worker to worker.

mod chaos;
pub(crate) mod error;
mod own_pool;

use std::{
    collections::BTreeMap,
    io,
    time::{Duration, Instant},
};

use tensord_client::{Lease, LeaseRequest, Pool};
use tensord_demo::{self as demo, Interrupter, Losses, Panics, TrainError, TrainOptions, View};
use tracing::info;

use self::{error::DemoError, own_pool::OwnPool};
use crate::{config::DemoConfig, failure::Failure, shutdown::Shutdown, stdout};

/// Number of workers in the demo's own pool, which share the devices.
const WORKERS: u32 = 2;

/// How long the workers may take to join.
const JOIN_DEADLINE: Duration = Duration::from_secs(30);

/// Trains, and prints the result.
pub(super) async fn run(config: DemoConfig) -> Result<(), Failure> {
    let mut shutdown = Shutdown::listen().map_err(Failure::system("wait for signals"))?;
    // The other workers warn of those that are killed.
    let (count, log) = match config.chaos {
        true => (config.devices + chaos::OTHER_WORKERS, "error"),
        false => (WORKERS, "warn"),
    };
    let own = match &config.pool {
        Some(_) => None,
        None => Some(OwnPool::start(count, config.devices, config.kind.as_deref(), log).await?),
    };
    let url = config
        .pool
        .clone()
        .or_else(|| own.as_ref().map(|own| own.url.clone()));
    let url = url.expect("without a given pool, the demo has started its own");
    let interrupter = Interrupter::new();
    let stop = interrupter.clone();
    let json = config.json;
    // The scheduler of the demo's own pool stays until the end.
    let (workers, _own) = own.map(OwnPool::split).unzip();
    let mut training = tokio::task::spawn_blocking(move || {
        let pool = Pool::connect_url(url).map_err(DemoError::from)?;
        let count = workers.as_ref().map_or(0, |workers| workers.count());
        wait_for_workers(&pool, count)?;
        match workers {
            Some(workers) if config.chaos => chaos::train(&config, &pool, workers, interrupter),
            // The workers stay until the training has ended.
            _workers => train(&config, &pool, interrupter, Losses::default()),
        }
    });
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
    stdout::print(&text)?;
    let chaos = outcome.chaos.filter(|_| outcome.is_exact);
    match chaos.and_then(|chaos| chaos.first_difference) {
        Some(step) => Err(DemoError::Differs(step + 1).into()),
        None => Ok(()),
    }
}

/// Leases devices and trains on them.
fn train(
    config: &DemoConfig,
    pool: &Pool,
    interrupter: Interrupter,
    losses: Losses,
) -> Result<demo::Outcome, DemoError> {
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
    options.losses = losses;
    options.view = match options.view {
        // With kills, there is a line for each of them.
        _ if config.quiet || config.chaos => View::Quiet,
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
    let mut fingerprints = lease.descriptions().into_iter().map(|it| it.fingerprint);
    outcome.is_exact = fingerprints.all(|it| it.is_some_and(|it| it.is_exact));
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
