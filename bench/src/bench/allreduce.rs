//! All-reduce between workers, each a process on its own host, over links of a known rate.
//!
//! A sample is the time of several all-reduces, each on the result of the previous one,
//! from all ranks ready to all ranks done. The throughput of the links is measured in the
//! same run. With `n` ranks an all-reduce of `S` bytes has to move at least `2(n-1)/n·S`
//! out of each rank; *bus bandwidth* is that number divided by the time. So it can be
//! compared with the link for every `n`: its upper bound is the rate of the link.

mod group;
mod run;

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::{
    group::Group,
    run::{Run, report},
};
use crate::{
    bench::Bench,
    context::Context,
    fleet::Fleet,
    gloo::{self, Size},
    namespace_entry::{NamespaceEntry, NetworkFeatures},
    network::{Network, Shape},
    probe::{self, LinkMeasurement},
    race::Contender,
    report::Report,
    stats::{Summary, ratio},
};

const MIB: usize = 1 << 20;

/// Numbers of workers, and the rate of their links in Mbit/s, which is such that the links
/// are the bottleneck and not the cores that all workers share.
const WORLD_SIZES: [(usize, u64); 3] = [(2, 1000), (4, 1000), (8, 250)];

/// One-way latencies in ms.
const LATENCIES_MS: [u64; 2] = [0, 20];

const SIZES_MIB: [usize; 4] = [1, 16, 64, 256];

/// Minimum time of a sample, and the maximum number of all-reduces in it.
const MIN_SAMPLE_TIME: Duration = Duration::from_secs(1);
const MAX_REPETITIONS: usize = 32;

/// The part of the bench that is measured in one network.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct AllReducePart {
    world: usize,
    rate_mbit: u64,
    latency_ms: u64,
    gloo: bool,
}

/// Runs the bench.
///
/// # Errors
///
/// If a worker, the network or Gloo fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    context.progress.update("allreduce");
    let entry = NamespaceEntry::find(Bench::Allreduce, context);
    let gloo = gloo::available();
    let mut runs: Vec<Run> = Vec::new();
    for &latency_ms in context.full_or_quick::<&[u64]>(&LATENCIES_MS, &[0]) {
        for &(world, rate_mbit) in context.full_or_quick::<&[_]>(&WORLD_SIZES, &WORLD_SIZES[..1]) {
            let part = AllReducePart {
                world,
                rate_mbit,
                latency_ms,
                gloo,
            };
            runs.extend(entry.run::<Vec<Run>>(context, &part)?);
        }
    }
    Ok(report(&runs))
}

/// Measures a [`AllReducePart`].
///
/// # Errors
///
/// If a worker, the network or Gloo fails.
pub(super) fn measure(context: &Context, facts: NetworkFeatures, part: Value) -> Result<Value> {
    let part: AllReducePart = serde_json::from_value(part)?;
    let shape = Shape {
        rate_mbit: part.rate_mbit,
        latency: Duration::from_millis(part.latency_ms),
    };
    let dir = tempfile::tempdir()?;
    let network = Network::shaped(facts, part.world, shape, &dir)?;
    let link = probe::measure(&network, shape, &dir)?;
    let sizes = context.full_or_quick::<&[usize]>(&SIZES_MIB, &[1]);
    let sizes = sizes.iter().map(|&mib| Size {
        mib,
        repetitions: repetitions(mib, part.world, shape),
    });
    let sizes: Vec<Size> = sizes.collect();
    let mut runs = measure_sizes(context, &network, part, link, &sizes)?;
    if part.gloo {
        let found = gloo::measure(&network, part.world, &sizes, context)?;
        for (run, seconds) in runs.iter_mut().zip(found.into_iter().flatten()) {
            let moved = moved_bytes(run.mib, part.world);
            run.gloo_busbw_gbs = Some(moved / seconds.median / 1e9);
        }
    }
    Ok(serde_json::to_value(runs)?)
}

fn measure_sizes(
    context: &Context,
    network: &Network,
    part: AllReducePart,
    link: LinkMeasurement,
    sizes: &[Size],
) -> Result<Vec<Run>> {
    let world = part.world;
    context
        .progress
        .update(&format!("allreduce: starting {world} workers"));
    let fleet = Fleet::start(network, world, None)?;
    let runs = sizes.iter().map(|&size| {
        let (seconds, sent) = measure_size(context, &fleet, size)?;
        let moved = moved_bytes(size.mib, world);
        let busbw_gbs = moved / seconds.median / 1e9;
        Ok(Run {
            mib: size.mib,
            world,
            latency_ms: part.latency_ms,
            rate_mbit: part.rate_mbit,
            network: network.kind().into(),
            seconds,
            busbw_gbs,
            link_gbs: link.gbs,
            link_rtt_ms: link.rtt_ms,
            ring_bound_ratio: bound_ratio(network, busbw_gbs, link),
            bytes_sent_per_rank_ratio: sent.and_then(|sent| ratio(sent, moved)),
            gloo_busbw_gbs: None,
        })
    });
    runs.collect()
}

/// Returns the ratio of the bus bandwidth to the link's, or `None` where the link has no
/// rate limit.
fn bound_ratio(network: &Network, busbw_gbs: f64, link: LinkMeasurement) -> Option<f64> {
    match network {
        Network::Plain => None,
        Network::Relayed { .. } | Network::Namespaces(_) => ratio(busbw_gbs, link.gbs),
    }
}

/// Returns the bytes that an all-reduce has to move out of each rank.
fn moved_bytes(mib: usize, world: usize) -> f64 {
    let world = world as f64;
    2.0 * (world - 1.0) / world * (mib * MIB) as f64
}

/// Returns the number of all-reduces that fill a sample.
fn repetitions(mib: usize, world: usize, shape: Shape) -> usize {
    let carried = moved_bytes(mib, world) / shape.bytes_per_second();
    let took = carried + 2.0 * shape.latency.as_secs_f64();
    let count = (MIN_SAMPLE_TIME.as_secs_f64() / took).ceil() as usize;
    count.clamp(1, MAX_REPETITIONS)
}

/// Measures the seconds of an all-reduce, and the bytes sent by the rank that sent most.
fn measure_size(
    context: &Context,
    fleet: &Fleet<'_>,
    size: Size,
) -> Result<(Summary, Option<f64>)> {
    let world = fleet.devices().len();
    let title = format!("allreduce {world} × {} MiB", size.mib);
    let group = Group::new(fleet.devices(), size.mib * MIB / 4);
    group.check()?;
    let mut sent = Vec::new();
    let contender = Contender::new("seconds", "tensord", |run| {
        let before = fleet.sent()?;
        let took = group.time(size.repetitions)?;
        let after = fleet.sent()?;
        if run > 0 {
            sent.extend(most_sent(before, after, size.repetitions));
        }
        Ok(took.as_secs_f64() / size.repetitions as f64)
    });
    let found = context.race(&title, vec![contender])?;
    let seconds = found
        .iter()
        .next()
        .context("the benchmark returned no figures")?
        .summary;
    Ok((seconds, Summary::of(&sent).map(|sent| sent.median)))
}

/// Returns the bytes per all-reduce sent by the rank that sent most, over `count`
/// all-reduces.
fn most_sent(before: Option<Vec<u64>>, after: Option<Vec<u64>>, count: usize) -> Option<f64> {
    let each = before?.into_iter().zip(after?);
    let most = each.map(|(before, after)| after - before).max()?;
    Some(most as f64 / count as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_moved_are_those_of_a_ring() {
        assert_eq!(moved_bytes(1, 2), MIB as f64);
        assert_eq!(moved_bytes(4, 4), 6.0 * MIB as f64);
        assert_eq!(moved_bytes(64, 8), 112.0 * MIB as f64);
    }

    #[test]
    fn samples_are_filled_within_bounds() {
        let shape = |latency_ms| Shape {
            rate_mbit: 1000,
            latency: Duration::from_millis(latency_ms),
        };
        assert_eq!(repetitions(256, 4, shape(0)), 1);
        assert_eq!(repetitions(64, 2, shape(0)), 2);
        assert_eq!(repetitions(1, 2, shape(0)), MAX_REPETITIONS);
        assert_eq!(repetitions(1, 2, shape(20)), 21);
    }

    #[test]
    fn json_reports_the_rank_that_sent_most() {
        let most = |before: &[u64], after: &[u64]| {
            most_sent(Some(before.to_vec()), Some(after.to_vec()), 2)
        };
        assert_eq!(most(&[10, 10], &[20, 40]), Some(15.0));
        assert_eq!(most_sent(None, Some(vec![1]), 1), None);
    }
}
