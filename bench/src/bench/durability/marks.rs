//! How long a mark holds up a program that has many tensors.
//!
//! The program changes one of [`TENSORS`] tensors at a time and reads a number of it. Each such read takes well below
//! a millisecond, so it shows what a step of a training hides. When a mark was placed is known once its snapshot is
//! kept; the figure is the longest read within [`WINDOW`] from then on, beyond the median of all reads. Without
//! snapshots, the windows are placed every 2 s, as marks would be at most, and show how long reads take by
//! themselves.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use burn::tensor::{Distribution, Tensor};
use tensord_client::LeaseRequest;

use super::turns::{MARK_INTERVAL, TurnFigures};
use crate::{
    data::scalar,
    pool::{durability_if, lease_as},
    stats::Summary,
};

/// Number of the program's tensors, and elements of each: about 16 MiB.
const TENSORS: usize = 10_000;
const ELEMENTS: usize = 420;

/// Within this time after a mark, it may hold up a read.
const WINDOW: Duration = Duration::from_millis(100);

/// A read: when it began, and how long it took.
struct Read {
    begun: Instant,
    took: Duration,
}

impl Read {
    /// Returns whether something that happened at `at` may have held up the read.
    fn is_within(&self, at: Instant) -> bool {
        self.begun + self.took >= at && self.begun <= at + WINDOW
    }
}

/// Reads for `duration`. The turn's main figure is the median read.
///
/// # Errors
///
/// If the pool fails.
pub(super) fn measure(url: &str, is_durable: bool, duration: Duration) -> Result<TurnFigures> {
    let request = LeaseRequest::devices(1).durable(durability_if(is_durable));
    let (_pool, lease) = lease_as(url.parse().context("a pool URL")?, request)?;
    let device = &lease.devices()[0];
    let mut tensors: Vec<Tensor<1>> = (0..TENSORS)
        .map(|_| Tensor::random([ELEMENTS], Distribution::Default, device))
        .collect();
    let mut read = |at: usize| -> Result<Read> {
        let begun = Instant::now();
        let changed = tensors[at % TENSORS].clone().neg();
        tensors[at % TENSORS] = changed.clone();
        scalar(changed.slice(0..1))?;
        let took = begun.elapsed();
        Ok(Read { begun, took })
    };
    // Until all tensors are made, and the first mark, which may have none of them, was placed.
    let start = Instant::now();
    let mut at = 0;
    while start.elapsed() < MARK_INTERVAL {
        read(at)?;
        at += 1;
    }
    let start = Instant::now();
    let (mut reads, mut marks) = (Vec::new(), Vec::new());
    let mut commits = lease.durability_status().commits;
    while start.elapsed() < duration {
        reads.push(read(at)?);
        at += 1;
        let status = lease.durability_status();
        if status.commits > commits
            && let Some(age) = status.since_commit
        {
            commits = status.commits;
            marks.extend(Instant::now().checked_sub(age).filter(|at| *at > start));
        }
    }
    if !is_durable {
        let mut at = start + MARK_INTERVAL;
        while at.elapsed() > WINDOW {
            marks.push(at);
            at += MARK_INTERVAL;
        }
    }
    figures(&reads, &marks, is_durable)
}

fn figures(reads: &[Read], marks: &[Instant], is_durable: bool) -> Result<TurnFigures> {
    let milliseconds = |took: Duration| took.as_secs_f64() * 1000.0;
    let times: Vec<_> = reads.iter().map(|read| milliseconds(read.took)).collect();
    let median = Summary::of(&times).context("there are reads")?.median;
    let longest = marks.iter().filter_map(|at| {
        let held_up = reads.iter().filter(|read| read.is_within(*at));
        held_up.map(|read| read.took).max()
    });
    let stalls = longest.map(|took| milliseconds(took) - median).collect();
    let mut figures = TurnFigures::of(Duration::from_secs_f64(median / 1000.0));
    let key = match is_durable {
        true => "mark_stall_p99_ms",
        false => "off_mark_stall_p99_ms",
    };
    // Without any stall if a snapshot has cost so much that no other mark was placed.
    figures.add_p99(key, stalls);
    Ok(figures)
}
