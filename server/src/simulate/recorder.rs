//! What the tenants of a simulated pool have and want over time.

use std::collections::BTreeMap;

use tensord_proto::share::WHOLE_PERMILLE;
use tensord_scheduler::{Policy, TenantPolicy};

use super::trace::Job;

/// The devices of a tenant from a time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    pub(super) at_ms: u64,
    /// The position of the tenant among the names.
    pub(super) tenant: u32,
    /// The devices that its jobs have, in thousandths.
    pub(super) held: u32,
    /// The devices for which its jobs wait, in thousandths.
    pub(super) waiting: u64,
}

/// What a tenant has and wants at the moment, and has had so far, in thousandths of devices.
#[derive(Clone, Debug)]
pub(super) struct Usage {
    pub(super) weight: u32,
    /// The devices of its jobs that have arrived and not ended: by the position of their kind, any kind last.
    wanted: Vec<u64>,
    /// The most devices of each of these that it can have.
    most: Vec<u64>,
    held: u64,
    /// What its jobs had, times milliseconds.
    pub(super) received: u128,
    /// The same of the weighted max-min fair division.
    pub(super) fair: f64,
}

/// Integrates over time what tenants have, and what would be fair.
pub(super) struct Recorder {
    /// The names of the tenants, sorted.
    pub(super) tenants: Vec<String>,
    pub(super) usage: Vec<Usage>,
    /// The number of devices of the pool.
    pub(super) devices: u64,
    /// Milliseconds times the part of the pool that is not divided fairly.
    pub(super) unfair: f64,
    pub(super) samples: Vec<Sample>,
    kinds: Vec<String>,
    now_ms: u64,
}

impl Recorder {
    /// Creates a recorder for the tenants of jobs in a pool with so many devices of each kind.
    pub(super) fn new(
        jobs: &[Job],
        pool: &BTreeMap<String, u64>,
        policy: &Policy,
        start_ms: u64,
    ) -> Self {
        let mut tenants: Vec<_> = jobs.iter().map(|job| job.tenant.clone()).collect();
        tenants.sort_unstable();
        tenants.dedup();
        let devices = pool.values().sum();
        let whole = u64::from(WHOLE_PERMILLE);
        let default = TenantPolicy::default();
        let usage = tenants.iter().map(|name| {
            let policy = policy.get(name.as_str()).unwrap_or(&default);
            let most = pool.iter().map(|(kind, count)| {
                let limit = policy.limit.devices.get(kind).copied();
                whole * limit.map_or(*count, |limit| u64::from(limit).min(*count))
            });
            let most: Vec<_> = most.collect();
            let all = most.iter().sum();
            Usage {
                weight: policy.weight.max(1),
                wanted: vec![0; pool.len() + 1],
                most: most.into_iter().chain([all]).collect(),
                held: 0,
                received: 0,
                fair: 0.0,
            }
        });
        Self {
            usage: usage.collect(),
            tenants,
            devices,
            unfair: 0.0,
            samples: Vec::new(),
            kinds: pool.keys().cloned().collect(),
            now_ms: start_ms,
        }
    }

    /// Adds up what tenants have had until now, before something changes.
    pub(super) fn advance(&mut self, now_ms: u64) {
        let passed_ms = now_ms - self.now_ms;
        self.now_ms = now_ms;
        if passed_ms == 0 {
            return;
        }
        let demands = self
            .usage
            .iter()
            .map(|usage| (usage.demand(), usage.weight));
        let all = self.devices * u64::from(WHOLE_PERMILLE);
        let fair = max_min(&demands.collect::<Vec<_>>(), all);
        let mut apart = 0.0;
        for (usage, fair) in self.usage.iter_mut().zip(fair) {
            usage.received += u128::from(usage.held) * u128::from(passed_ms);
            usage.fair += fair * passed_ms as f64;
            apart += (usage.held as f64 - fair).abs() / 2.0;
        }
        self.unfair += apart / all as f64 * passed_ms as f64;
    }

    /// A job has arrived.
    pub(super) fn arrive(&mut self, job: &Job) {
        *self.wanted(job) += job.permille();
        self.sample(job);
    }

    /// A job has got its devices.
    pub(super) fn start(&mut self, job: &Job) {
        self.of(job).held += job.permille();
        self.sample(job);
    }

    /// A job has lost its devices, or has given them back.
    pub(super) fn stop(&mut self, job: &Job) {
        self.of(job).held -= job.permille();
        self.sample(job);
    }

    /// A job that has no devices wants none any more.
    pub(super) fn leave(&mut self, job: &Job) {
        *self.wanted(job) -= job.permille();
        self.sample(job);
    }

    /// Returns the position of the tenant of a job.
    pub(super) fn tenant_of(&self, job: &Job) -> usize {
        // All tenants of jobs are there.
        self.tenants.partition_point(|name| *name < job.tenant)
    }

    fn of(&mut self, job: &Job) -> &mut Usage {
        let tenant = self.tenant_of(job);
        &mut self.usage[tenant]
    }

    /// What the tenant of a job wants of the kind of the job. A job of a kind that the pool does not have is
    /// refused at once.
    fn wanted(&mut self, job: &Job) -> &mut u64 {
        let mut kinds = self.kinds.iter();
        let kind = kinds.position(|kind| Some(kind) == job.kind.as_ref());
        let kind = kind.unwrap_or(self.kinds.len());
        &mut self.of(job).wanted[kind]
    }

    fn sample(&mut self, job: &Job) {
        let tenant = self.tenant_of(job);
        let usage = &self.usage[tenant];
        let wanted: u64 = usage.wanted.iter().sum();
        let sample = Sample {
            at_ms: self.now_ms,
            tenant: tenant as u32,
            // Of at most 100,000 devices.
            held: usage.held as u32,
            waiting: wanted.saturating_sub(usage.held),
        };
        self.samples.push(sample);
    }
}

impl Usage {
    /// Returns the devices that the tenant would have if it were alone, in thousandths: those that its jobs want,
    /// within its limit.
    fn demand(&self) -> u64 {
        let bounded = self.wanted.iter().zip(&self.most);
        let all: u64 = bounded.map(|(wanted, most)| wanted.min(most)).sum();
        all.min(self.most.last().copied().unwrap_or_default())
    }
}

/// Returns the weighted max-min fair division of `capacity` among those with these demands and weights: each
/// gets what it demands, or else as much by weight as all others that get less than they demand, which is no
/// less than any other gets by weight (Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2).
pub(super) fn max_min(demands: &[(u64, u32)], capacity: u64) -> Vec<f64> {
    let level = |(demand, weight): (u64, u32)| demand as f64 / f64::from(weight);
    let mut order: Vec<_> = (0..demands.len()).filter(|at| demands[*at].0 > 0).collect();
    order.sort_unstable_by(|a, b| {
        level(demands[*a])
            .total_cmp(&level(demands[*b]))
            .then(a.cmp(b))
    });
    let mut weights: f64 = order.iter().map(|at| f64::from(demands[*at].1)).sum();
    let mut left = capacity as f64;
    let mut fair = vec![0.0; demands.len()];
    for at in order {
        let (demand, weight) = demands[at];
        let weight = f64::from(weight);
        fair[at] = (demand as f64).min(left * weight / weights);
        left -= fair[at];
        weights -= weight;
    }
    fair
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Demands and weights, the number of devices, and their division.
    type Case<'a> = (&'a [(u64, u32)], u64, &'a [f64]);

    #[test]
    fn devices_are_divided_by_weight_up_to_what_each_wants() {
        let cases: [Case<'_>; 6] = [
            (&[], 8, &[]),
            (&[(9, 1), (9, 1)], 8, &[4.0, 4.0]),
            (&[(9, 1), (9, 3)], 8, &[2.0, 6.0]),
            (&[(1, 1), (9, 1), (9, 1)], 8, &[1.0, 3.5, 3.5]),
            (&[(0, 5), (2, 1), (3, 1)], 8, &[0.0, 2.0, 3.0]),
            (&[(3, 2), (9, 1), (9, 1)], 8, &[3.0, 2.5, 2.5]),
        ];
        for (demands, capacity, expected) in cases {
            assert_eq!(max_min(demands, capacity), expected, "{demands:?}");
        }
    }
}
