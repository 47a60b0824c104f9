//! What a simulation has led to, in numbers.

use std::collections::BTreeMap;

use tensord_proto::share::WHOLE_PERMILLE;
use tensord_scheduler::RequestOrder;

use super::pieces::Piece;
use super::recorder::{Recorder, Sample};
use super::trace::Job;

/// Thousandths of a device.
const PERMILLE: f64 = WHOLE_PERMILLE as f64;

/// What has become of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct JobOutcome {
    /// When it first got devices, in milliseconds.
    pub(super) granted_ms: Option<u64>,
    /// When it ended as it should, in milliseconds.
    pub(super) done_ms: Option<u64>,
    /// How often it was suspended.
    pub(super) suspensions: u32,
    /// Why it was refused or lost, if it was.
    pub(super) failure: Option<String>,
    /// The times for which it had devices, in order, of a [small pool](super::pieces::are_kept).
    pub(super) pieces: Vec<Piece>,
}

/// The times that jobs have waited, from their arrival to their first grant, in milliseconds. Each is that of
/// a job (nearest rank): the `n` jobs are sorted by it, and the one at position `ceil(p n)` is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Waits {
    pub(crate) jobs: usize,
    /// `p` = 0.5.
    pub(crate) median_ms: u64,
    /// `p` = 0.99.
    pub(crate) p99_ms: u64,
    /// `p` = 1.
    pub(crate) worst_ms: u64,
}

/// What a tenant has had.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TenantOutcome {
    pub(crate) name: String,
    pub(crate) weight: u32,
    /// Device-seconds that its jobs had.
    pub(crate) device_seconds: f64,
    /// Device-seconds of the weighted max-min fair division, at each moment by what the tenants wanted then.
    pub(crate) fair_device_seconds: f64,
    pub(crate) waits: Waits,
}

/// The result of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) order: RequestOrder,
    /// The first arrival and the last end of a job, in milliseconds.
    pub(crate) start_ms: u64,
    pub(crate) end_ms: u64,
    /// The number of devices of the pool.
    pub(crate) devices: u64,
    /// Device-seconds that jobs had, divided by those of the pool.
    pub(crate) utilisation: f64,
    /// The number of jobs that ran for their duration.
    pub(crate) done: usize,
    /// The jobs that were refused or lost, counted by the reason.
    pub(crate) failures: BTreeMap<String, usize>,
    /// The number of jobs that still waited when nothing happened any more.
    pub(crate) unfinished: usize,
    pub(crate) suspensions: u64,
    /// The mean over time of the part of the pool that is not with the tenant to which the fair division
    /// gives it: half the sum over tenants of |devices held - fair devices|, divided by the devices of the
    /// pool.
    pub(crate) fair_share_error: f64,
    /// Jain's index of what tenants had, divided by what was fair: `(sum x)^2 / (n sum x^2)`; 1 if all got
    /// the same part of it, and `1 / n` if one got all (Jain, Chiu and Hawe, "A Quantitative Measure of
    /// Fairness and Discrimination", DEC-TR-301, 1984).
    pub(crate) jains_index: f64,
    pub(crate) waits: Waits,
    /// By name.
    pub(crate) tenants: Vec<TenantOutcome>,
    /// By the number of devices of the jobs, in thousandths.
    pub(crate) gangs: BTreeMap<u64, Waits>,
    pub(super) jobs: Vec<JobOutcome>,
    pub(super) samples: Vec<Sample>,
}

/// Returns the result of a simulation that began at `start_ms`.
pub(super) fn outcome(
    order: RequestOrder,
    start_ms: u64,
    trace: &[Job],
    jobs: Vec<JobOutcome>,
    recorder: Recorder,
) -> Outcome {
    let ends = jobs.iter().filter_map(|job| job.done_ms);
    let end_ms = ends.max().unwrap_or(start_ms);
    // Not 0, so that what is divided by it is 0 if nothing ran.
    let length_ms = (end_ms - start_ms).max(1) as f64;
    let received: u128 = recorder.usage.iter().map(|usage| usage.received).sum();
    let mut failures = BTreeMap::new();
    for reason in jobs.iter().filter_map(|job| job.failure.clone()) {
        *failures.entry(reason).or_default() += 1;
    }
    let done = jobs.iter().filter(|job| job.done_ms.is_some()).count();
    let failed: usize = failures.values().sum();
    let ratios = recorder.usage.iter().filter(|usage| usage.fair > 0.0);
    let ratios: Vec<_> = ratios.map(|it| it.received as f64 / it.fair).collect();
    Outcome {
        order,
        start_ms,
        end_ms,
        devices: recorder.devices,
        utilisation: received as f64 / (PERMILLE * recorder.devices as f64 * length_ms),
        done,
        failures,
        unfinished: jobs.len() - done - failed,
        suspensions: jobs.iter().map(|job| u64::from(job.suspensions)).sum(),
        fair_share_error: recorder.unfair / length_ms,
        jains_index: jains_index(&ratios),
        waits: waits_of(trace.iter().zip(&jobs)),
        tenants: tenants(trace, &jobs, &recorder),
        gangs: gangs(trace, &jobs),
        samples: recorder.samples,
        jobs,
    }
}

fn tenants(trace: &[Job], jobs: &[JobOutcome], recorder: &Recorder) -> Vec<TenantOutcome> {
    let mut by_tenant = vec![Vec::new(); recorder.tenants.len()];
    for pair in trace.iter().zip(jobs) {
        by_tenant[recorder.tenant_of(pair.0)].push(pair);
    }
    let named = recorder.tenants.iter().zip(&recorder.usage).zip(by_tenant);
    let outcomes = named.map(|((name, usage), jobs)| TenantOutcome {
        name: name.clone(),
        weight: usage.weight,
        device_seconds: usage.received as f64 / (1000.0 * PERMILLE),
        fair_device_seconds: usage.fair / (1000.0 * PERMILLE),
        waits: waits_of(jobs.into_iter()),
    });
    outcomes.collect()
}

fn gangs(trace: &[Job], jobs: &[JobOutcome]) -> BTreeMap<u64, Waits> {
    let mut by_size = BTreeMap::<u64, Vec<_>>::new();
    for pair in trace.iter().zip(jobs) {
        by_size.entry(pair.0.permille()).or_default().push(pair);
    }
    let waits = by_size.into_iter();
    waits
        .map(|(devices, jobs)| (devices, waits_of(jobs.into_iter())))
        .collect()
}

/// Returns the waiting times of those jobs that got devices.
fn waits_of<'a>(jobs: impl Iterator<Item = (&'a Job, &'a JobOutcome)>) -> Waits {
    let waits = jobs.filter_map(|(job, outcome)| Some(outcome.granted_ms? - job.arrival_ms));
    let mut waits: Vec<_> = waits.collect();
    waits.sort_unstable();
    let at = |percent: usize| {
        let position = (percent * waits.len()).div_ceil(100);
        waits
            .get(position.saturating_sub(1))
            .copied()
            .unwrap_or_default()
    };
    Waits {
        jobs: waits.len(),
        median_ms: at(50),
        p99_ms: at(99),
        worst_ms: at(100),
    }
}

fn jains_index(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().sum();
    let squares: f64 = values.iter().map(|value| value * value).sum();
    match squares > 0.0 {
        true => sum * sum / (values.len() as f64 * squares),
        false => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jains_index_is_1_for_equal_parts_and_less_for_others() {
        let cases: [(&[f64], f64); 5] = [
            (&[], 1.0),
            (&[0.5, 0.5, 0.5], 1.0),
            (&[1.0, 0.0], 0.5),
            (&[1.0, 0.0, 0.0, 0.0], 0.25),
            (&[1.0, 3.0], 0.8),
        ];
        for (values, expected) in cases {
            assert_eq!(jains_index(values), expected, "{values:?}");
        }
    }
}
