//! `tensord demo --chaos`: kills workers while a model trains in the pool, and compares its losses
//! with those of a training that nobody disturbs.

use std::{
    fs,
    io::{IsTerminal, Write, stdout},
    panic::resume_unwind,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use rand::{Rng, RngExt, seq::IndexedRandom};
use tensord_client::Pool;
use tensord_demo::{Chaos, Interrupter, Kill, Losses, Outcome, by_step, first_difference};

use super::{error::DemoError, own_pool::Workers};
use crate::config::DemoConfig;

/// Number of workers that do not train: one that keeps the snapshots, and one to keep them if a worker
/// is killed.
pub(super) const OTHER_WORKERS: u32 = 2;

/// Name of the file with all losses and kills, among the artifacts.
const CURVE_FILE: &str = "chaos.json";

/// Passes over the training set: enough for several kills.
const EPOCHS: usize = 300;

/// Bounds of the time between a recovery and the next kill, in milliseconds. The pool must have time
/// to find another keeper for the snapshots if the last one was killed: 2 s, and some for the
/// snapshot.
const PAUSE_MS: [u64; 2] = [3_500, 5_000];

/// Limit for the training to go on after a kill, and for a new worker to join.
const RECOVERY_DEADLINE: Duration = Duration::from_secs(60);

/// Interval at which the number of steps is shown.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Interval of the checks of the pool's status.
const POLL_INTERVAL: Duration = Duration::from_millis(25);

/// Trains undisturbed, and then while workers are killed.
pub(super) fn train(
    config: &DemoConfig,
    pool: &Pool,
    workers: Workers,
    interrupter: Interrupter,
) -> Result<Outcome, DemoError> {
    let config = &DemoConfig {
        epochs: Some(config.epochs.unwrap_or(EPOCHS)),
        pool: None,
        kind: config.kind.clone(),
        artifacts: config.artifacts.clone(),
        ..*config
    };
    let undisturbed = train_undisturbed(config, pool, interrupter.clone())?;
    if interrupter.should_stop() {
        return Err(DemoError::NoKill);
    }
    let devices = config.devices as usize;
    let killer = Killer {
        pool,
        devices,
        losses: Losses::default(),
        is_quiet: config.quiet,
        is_over: &AtomicBool::new(false),
        started: Instant::now(),
    };
    let (trained, kills) = thread::scope(|scope| {
        let killing = scope.spawn(|| killer.run(workers, &mut rand::rng()));
        let trained = super::train(config, pool, interrupter, killer.losses.clone());
        killer.is_over.store(true, Ordering::Relaxed);
        (trained, killing.join())
    });
    // If workers could not be killed or replaced, that is why the training failed.
    let killed = kills.unwrap_or_else(|payload| resume_unwind(payload));
    let kills = killed?;
    let mut outcome = trained?;
    if kills.is_empty() {
        return Err(DemoError::NoKill);
    }
    let losses = by_step(killer.losses.values(), devices);
    let mut undisturbed = by_step(undisturbed, devices);
    // A training that the user has stopped is compared as far as it went.
    undisturbed.truncate(losses.len());
    let chaos = Chaos {
        first_difference: first_difference(&losses, &undisturbed).map(|at| at / devices),
        kills,
        losses,
        undisturbed,
    };
    if let Some(directory) = &config.artifacts {
        let path = directory.join(CURVE_FILE);
        let curve = chaos.to_json(config.model.name(), devices);
        fs::write(&path, curve).map_err(|source| DemoError::Curve { path, source })?;
    }
    outcome.chaos = Some(chaos);
    Ok(outcome)
}

/// Trains in the pool while nobody kills workers, and returns the losses.
fn train_undisturbed(
    config: &DemoConfig,
    pool: &Pool,
    interrupter: Interrupter,
) -> Result<Vec<f64>, DemoError> {
    let model = config.model.name();
    let losses = Losses::default();
    if !config.quiet {
        println!("training {model} undisturbed, to have losses to compare with");
    }
    let is_over = AtomicBool::new(false);
    let outcome = thread::scope(|scope| {
        if !config.quiet && stdout().is_terminal() {
            scope.spawn(|| show_progress(&losses, config.devices as usize, &is_over));
        }
        let trained = super::train(config, pool, interrupter, losses.clone());
        is_over.store(true, Ordering::Relaxed);
        trained
    })?;
    if !config.quiet {
        let (steps, seconds) = (outcome.steps, outcome.seconds);
        println!("  {steps} steps in {seconds:.1} s");
        let workers = config.devices + OTHER_WORKERS;
        println!("training {model} again, and killing one of {workers} workers every few seconds");
    }
    Ok(losses.values())
}

/// Shows the number of steps on the terminal until `is_over`, and then clears the line.
fn show_progress(losses: &Losses, devices: usize, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        print!("\r  {} steps", losses.count() / devices);
        let _ = stdout().flush();
        thread::sleep(PROGRESS_INTERVAL);
    }
    print!("\r\x1b[K");
}

/// Kills workers while a training runs.
struct Killer<'a> {
    pool: &'a Pool,
    /// Number of devices that train, each at a worker of its own.
    devices: usize,
    losses: Losses,
    is_quiet: bool,
    /// Whether the training is over.
    is_over: &'a AtomicBool,
    started: Instant,
}

impl Killer<'_> {
    /// Kills a random worker every few seconds, and starts another one in its place. Returns the
    /// kills.
    fn run(&self, mut workers: Workers, rng: &mut impl Rng) -> Result<Vec<Kill>, DemoError> {
        let mut kills = Vec::new();
        // The first kill comes when the training runs.
        self.wait_for("the first loss", || Ok(self.losses.count() > 0))?;
        loop {
            self.pause(Duration::from_millis(
                rng.random_range(PAUSE_MS[0]..=PAUSE_MS[1]),
            ));
            if self.is_over() {
                return Ok(kills);
            }
            let training = self.workers_that_train()?;
            let names = workers.names();
            // The first one is a worker that trains, so that there is something to see.
            let first = training.first().filter(|_| kills.is_empty());
            let Some(name) = first.or_else(|| names.choose(rng)) else {
                return Ok(kills);
            };
            let (step, killed) = (self.losses.count() / self.devices, Instant::now());
            workers.kill(name);
            workers.start_next().map_err(DemoError::Start)?;
            let is_training = training.contains(name);
            let recovery_ms = match is_training {
                true => self.recovery(name, killed)?.map(|it| it.as_millis() as u64),
                false => None,
            };
            if !self.is_quiet {
                let at = (killed - self.started).as_secs_f64();
                let effect = effect(is_training, recovery_ms);
                println!("  {at:>5.1} s  step {step:>5}  killed {name}, {effect}");
            }
            kills.push(Kill {
                step,
                worker: name.clone(),
                recovery_ms,
            });
            let names = workers.names();
            self.wait_for("a new worker", || {
                let joined = self.pool.status()?.workers;
                let joined: Vec<_> = joined.into_iter().map(|worker| worker.name).collect();
                Ok(names.iter().all(|name| joined.contains(name)))
            })?;
        }
    }

    /// Waits until the training goes on without the worker `lost`. Returns the time from `killed` to the
    /// first loss after that, or `None` if the training is over.
    fn recovery(&self, lost: &str, killed: Instant) -> Result<Option<Duration>, DemoError> {
        self.wait_for("the move of the lease", || {
            let training = self.workers_that_train()?;
            Ok(training.len() == self.devices && !training.iter().any(|worker| worker == lost))
        })?;
        let count = self.losses.count();
        let deadline = Instant::now() + RECOVERY_DEADLINE;
        while !self
            .losses
            .wait_for_more(count, Instant::now() + POLL_INTERVAL)
        {
            if self.is_over() {
                return Ok(None);
            }
            check("the next loss", deadline)?;
        }
        Ok(Some(killed.elapsed()))
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Sleeps, but not for longer than the training runs.
    fn pause(&self, duration: Duration) {
        let until = Instant::now() + duration;
        while Instant::now() < until && !self.is_over() {
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until `holds`, or the training is over. `what` is for the error.
    fn wait_for(
        &self,
        what: &str,
        holds: impl Fn() -> Result<bool, DemoError>,
    ) -> Result<(), DemoError> {
        let deadline = Instant::now() + RECOVERY_DEADLINE;
        while !self.is_over() && !holds()? {
            check(what, deadline)?;
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns the names of the workers whose devices are leased.
    fn workers_that_train(&self) -> Result<Vec<String>, DemoError> {
        let workers = self.pool.status()?.workers.into_iter();
        let leased = workers.filter(|worker| worker.devices.iter().any(|device| device.leased));
        Ok(leased.map(|worker| worker.name).collect())
    }
}

/// Says what the kill of a worker did to the training.
fn effect(is_training: bool, recovery_ms: Option<u64>) -> String {
    match (is_training, recovery_ms) {
        (_, Some(ms)) => format!("which trained; the next loss came after {ms} ms"),
        (true, None) => "which trained".to_owned(),
        (false, None) => "which did not train".to_owned(),
    }
}

fn check(what: &str, deadline: Instant) -> Result<(), DemoError> {
    match Instant::now() > deadline {
        true => Err(DemoError::Chaos(format!(
            "{what} did not come within {RECOVERY_DEADLINE:?}"
        ))),
        false => Ok(()),
    }
}
