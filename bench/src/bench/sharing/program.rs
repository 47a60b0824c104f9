//! The programs that share a device, each in a process of its own.

use std::{
    collections::VecDeque,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use burn::tensor::{Device, Distribution, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tensord_client::{Lease, LeaseRequest, Pool};

use crate::{
    context::Context,
    data::{PendingRead, ReadStart, start_read},
    pool::{durability, lease_as},
};

/// Steps that a program queues before it waits for the first: ten times the work of one that reads
/// after each step.
const QUEUED_STEPS: usize = 10;

/// Steps that warm up a program and its worker.
const WARMUP_STEPS: usize = 5;

/// What a step consists of: products of square matrices, each of the one before, and a read of a
/// number of the last one.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Step {
    /// Rows of a matrix.
    pub(super) rows: usize,
    /// Number of products.
    pub(super) products: usize,
}

/// A program with a lease of the pool's only device, or with a device of its own process.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::bench) struct SharingTurn {
    /// The URL of the pool, or `None` for Flex in the program's own process.
    pub(super) url: Option<String>,
    /// The share of the device, or `None` for the whole device.
    pub(super) share: Option<f64>,
    pub(super) step: Step,
    pub(super) program: Program,
}

/// What the program does.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum Program {
    /// Takes one step, then nothing until the process is killed.
    Idle,
    /// Always has steps queued, until the process is killed.
    Busy,
    /// Always has steps queued for this time, and returns the steps per second.
    Throughput(Duration),
    /// Takes this number of steps, one after the other, and returns the time of each in ms.
    Steps(usize),
    /// The same, with a pause of this time before each step, which does not count.
    PausedSteps(usize, Duration),
}

/// Runs a program.
///
/// # Errors
///
/// If the pool fails.
pub(super) fn run(context: &Context, turn: &SharingTurn) -> Result<Value> {
    let leased = turn.url.as_ref().map(|url| lease(url, turn.share));
    let leased = leased.transpose()?;
    let device = match &leased {
        Some((_pool, lease)) => lease.devices()[0].clone(),
        None => Device::flex(),
    };
    let mut steps = Steps::new(&device, turn.step);
    match turn.program {
        Program::Idle => {
            steps.take()?;
            context.progress.update("idle");
            loop {
                sleep(Duration::from_secs(1));
            }
        }
        Program::Busy => {
            steps.keep_queued()?;
            context.progress.update("busy");
            loop {
                steps.keep_queued()?;
            }
        }
        Program::Throughput(duration) => Ok(throughput(&mut steps, duration)?.into()),
        Program::Steps(count) => Ok(times(&mut steps, count, Duration::ZERO)?.into()),
        Program::PausedSteps(count, pause) => Ok(times(&mut steps, count, pause)?.into()),
    }
}

/// Returns the times in ms of `count` steps, with a pause before each.
fn times(steps: &mut Steps, count: usize, pause: Duration) -> Result<Vec<f64>> {
    for _ in 0..WARMUP_STEPS {
        steps.take()?;
    }
    let paused = (0..count).map(|_| {
        sleep(pause);
        steps.take()
    });
    paused.collect()
}

fn lease(url: &str, share: Option<f64>) -> Result<(Pool, Lease)> {
    let mut request = LeaseRequest::devices(1).durable(durability());
    if let Some(share) = share {
        request = request.share(share);
    }
    lease_as(url.parse()?, request)
}

/// Returns the steps per second of a program that always has steps queued.
fn throughput(steps: &mut Steps, duration: Duration) -> Result<f64> {
    for _ in 0..WARMUP_STEPS {
        steps.keep_queued()?;
    }
    let begun = Instant::now();
    let mut count = 0;
    while begun.elapsed() < duration {
        steps.keep_queued()?;
        count += 1;
    }
    Ok(f64::from(count) / begun.elapsed().as_secs_f64())
}

/// The steps of a program.
struct Steps {
    start: Tensor<2>,
    factor: Tensor<2>,
    products: usize,
    queued: VecDeque<PendingRead>,
}

impl Steps {
    fn new(device: &Device, step: Step) -> Self {
        let Step { rows, products } = step;
        // So products neither vanish nor overflow, whose times may differ.
        let deviation = (rows as f64).sqrt().recip();
        let random = |deviation| {
            let distribution = Distribution::Normal(0.0, deviation);
            Tensor::random([rows, rows], distribution, device)
        };
        Self {
            start: random(1.0),
            factor: random(deviation),
            products,
            queued: VecDeque::new(),
        }
    }

    /// Queues a step.
    fn queue(&mut self) {
        let mut product = self.start.clone();
        for _ in 0..self.products {
            product = product.matmul(self.factor.clone());
        }
        let number = product.slice([0..1, 0..1]).reshape([1]);
        let read = start_read::<1, _>(number, ReadStart::Call);
        self.queued.push_back(read);
    }

    /// Waits for the first queued step, if there is one.
    fn wait(&mut self) -> Result<()> {
        if let Some(read) = self.queued.pop_front() {
            let number = read.scalar()?;
            ensure!(number.is_finite(), "a product is {number}");
        }
        Ok(())
    }

    /// Takes a step. Returns its time in ms.
    fn take(&mut self) -> Result<f64> {
        let begun = Instant::now();
        self.queue();
        self.wait()?;
        Ok(begun.elapsed().as_secs_f64() * 1000.0)
    }

    /// Queues steps up to [`QUEUED_STEPS`] and waits for the first.
    fn keep_queued(&mut self) -> Result<()> {
        while self.queued.len() < QUEUED_STEPS {
            self.queue();
        }
        self.wait()
    }
}
