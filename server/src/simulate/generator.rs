//! Synthetic traces: Poisson arrivals, exponential durations, and jobs of 1 to 8 devices, or of shares of one.
//!
//! A trace depends on the settings and the seed alone, for one version of this program.

use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::trace::Job;

/// A day, in seconds: the period of [`Load::Diurnal`].
const DAY: f64 = 86_400.0;

/// By how much the rate of arrivals of [`Load::Diurnal`] is above and below its mean.
const SWING: f64 = 0.8;

/// The number of jobs of a burst, from and to.
const BURST: std::ops::RangeInclusive<usize> = 20..=60;

/// The part of the jobs that is of the greedy tenant.
const GREEDY: f64 = 0.8;

/// The part of the jobs of [`Load::Gangs`] that are gangs.
const GANGS: f64 = 0.05;

/// Numbers of devices of a job, with how many of 100 jobs have so many.
const SIZES: [(u32, u32); 4] = [(1, 70), (2, 15), (4, 10), (8, 5)];

/// The shares that jobs have, in thousandths, each equally often.
const SHARES: [u32; 2] = [250, 500];

/// The sort of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Load {
    /// Jobs of all tenants arrive at an even rate
    Steady,
    /// A tenant at random submits 20 to 60 jobs at once
    Bursty,
    /// The rate rises and falls with the time of day, from 0.2 to 1.8 times the mean
    Diurnal,
    /// One tenant, named greedy, submits 80 % of all jobs
    Greedy,
    /// 5 % of the jobs need a quarter of all devices, and the others one device each
    Gangs,
}

/// What to generate.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Recipe {
    pub(crate) load: Load,
    pub(crate) seed: u64,
    /// The number of jobs, at least 1.
    pub(crate) jobs: usize,
    /// The number of tenants, at least 1.
    pub(crate) tenants: u32,
    /// The number of devices of the pool, at least 1.
    pub(crate) devices: u32,
    /// The devices that all jobs want, by the mean over time, divided by those of the pool.
    pub(crate) demand: f64,
    /// The mean duration of a job, in seconds.
    pub(crate) duration: f64,
    /// The part of the jobs that have a share of a device, from 0 to 1.
    pub(crate) sharing: f64,
    /// The kind of all devices; any if `None`.
    pub(crate) kind: Option<String>,
}

/// Returns the jobs of a synthetic load, in the order of their arrival.
pub(crate) fn generate(recipe: &Recipe) -> Vec<Job> {
    let mut rng = StdRng::seed_from_u64(recipe.seed);
    let mut now = 0.0;
    let mut jobs = Vec::with_capacity(recipe.jobs);
    while jobs.len() < recipe.jobs {
        let (count, tenant) = match recipe.load {
            Load::Bursty => (rng.random_range(BURST), tenant(recipe, &mut rng)),
            _ => (1, tenant(recipe, &mut rng)),
        };
        now += until_next(recipe, now, &mut rng);
        for _ in 0..count.min(recipe.jobs - jobs.len()) {
            jobs.push(job(recipe, now, &tenant, &mut rng));
        }
    }
    jobs
}

/// Returns the time until the next arrival, in seconds.
fn until_next(recipe: &Recipe, now: f64, rng: &mut StdRng) -> f64 {
    let burst = match recipe.load {
        Load::Bursty => (BURST.start() + BURST.end()) as f64 / 2.0,
        _ => 1.0,
    };
    let mean =
        burst * mean_size(recipe) * recipe.duration / (recipe.demand * f64::from(recipe.devices));
    if recipe.load != Load::Diurnal {
        return exponential(mean, rng);
    }
    // Thinning (Lewis and Shedler, "Simulation of Nonhomogeneous Poisson Processes by Thinning", 1979): arrivals
    // at the highest rate, each kept with the probability of the rate at its time by the highest one.
    let mut waited = 0.0;
    loop {
        waited += exponential(mean / (1.0 + SWING), rng);
        let phase = (now + waited) / DAY * std::f64::consts::TAU;
        // The rate is lowest at midnight.
        let rate = 1.0 - SWING * phase.cos();
        if rng.random_bool(rate / (1.0 + SWING)) {
            return waited;
        }
    }
}

/// Returns the mean number of devices of a job.
fn mean_size(recipe: &Recipe) -> f64 {
    let share = f64::from(SHARES.iter().sum::<u32>()) / (SHARES.len() as f64 * 1000.0);
    recipe.sharing * share + (1.0 - recipe.sharing) * mean_whole_size(recipe)
}

/// Returns the mean number of devices of a job that has whole ones.
fn mean_whole_size(recipe: &Recipe) -> f64 {
    if recipe.load == Load::Gangs {
        return GANGS * f64::from(gang_size(recipe)) + 1.0 - GANGS;
    }
    let of_size = |(size, percent): &(u32, u32)| f64::from(size.min(&recipe.devices) * percent);
    SIZES.iter().map(of_size).sum::<f64>() / 100.0
}

fn gang_size(recipe: &Recipe) -> u32 {
    (recipe.devices / 4).max(1)
}

fn tenant(recipe: &Recipe, rng: &mut StdRng) -> String {
    if recipe.load == Load::Greedy && rng.random_bool(GREEDY) {
        return "greedy".into();
    }
    format!("team-{}", rng.random_range(0..recipe.tenants))
}

/// Returns the share of a device that the next job has, if it has one.
fn share(recipe: &Recipe, rng: &mut StdRng) -> Option<u32> {
    // Without shares, the trace is the same as that of earlier versions.
    let has_share = recipe.sharing > 0.0 && rng.random_bool(recipe.sharing);
    has_share.then(|| SHARES[rng.random_range(0..SHARES.len())])
}

/// Returns the number of devices that the next job has.
fn size(recipe: &Recipe, rng: &mut StdRng) -> u32 {
    let size = match recipe.load {
        Load::Gangs if rng.random_bool(GANGS) => gang_size(recipe),
        Load::Gangs => 1,
        _ => {
            let mut left = rng.random_range(0..100);
            let found = SIZES.iter().find(|(_, percent)| {
                let is_it = left < *percent;
                left = left.saturating_sub(*percent);
                is_it
            });
            found.map_or(1, |(size, _)| *size)
        }
    };
    size.min(recipe.devices)
}

fn job(recipe: &Recipe, now: f64, tenant: &str, rng: &mut StdRng) -> Job {
    let share_permille = share(recipe, rng);
    let devices = match share_permille {
        Some(_) => 1,
        None => size(recipe, rng),
    };
    // The longest is so long that one job in a billion is shortened.
    let duration = exponential(recipe.duration, rng).min(20.0 * recipe.duration);
    Job {
        arrival_ms: (now * 1000.0) as u64,
        tenant: tenant.into(),
        user: format!("user-{}", rng.random_range(0..4)),
        devices,
        kind: recipe.kind.clone(),
        share_permille,
        memory_bytes: 0,
        duration_ms: ((duration * 1000.0) as u64).max(1),
        priority: 0,
        max_duration_ms: None,
        is_durable: true,
        is_spot: false,
    }
}

/// Returns a random number with an exponential distribution of this mean.
fn exponential(mean: f64, rng: &mut StdRng) -> f64 {
    let uniform: f64 = rng.random();
    // From 0 (not included) to 1.
    -mean * (1.0 - uniform).ln()
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;
    use crate::simulate::trace;

    fn recipe(load: Load) -> Recipe {
        Recipe {
            load,
            seed: 7,
            jobs: 20_000,
            tenants: 4,
            devices: 64,
            demand: 0.8,
            duration: 600.0,
            sharing: 0.0,
            kind: Some("cuda".into()),
        }
    }

    #[test]
    fn a_load_wants_as_many_devices_as_it_should() {
        for load in Load::value_variants() {
            for sharing in [0.0, 0.3, 1.0] {
                let jobs = generate(&Recipe {
                    sharing,
                    ..recipe(*load)
                });
                let wanted = jobs.iter().map(|it| it.permille() * it.duration_ms);
                let wanted = wanted.sum::<u64>() as f64 / 1000.0;
                let length_ms = jobs.last().unwrap().arrival_ms as f64;
                let demand = wanted / length_ms / 64.0;
                assert!((0.7..0.9).contains(&demand), "{load:?} wants {demand}");
                assert_eq!(jobs.len(), 20_000);
                assert_eq!(trace::parse(&trace::print(&jobs)).unwrap(), jobs);
                let shares = jobs.iter().filter(|it| it.share_permille.is_some()).count();
                let part = shares as f64 / 20_000.0;
                assert!((part - sharing).abs() < 0.02, "{load:?} shares {part}");
            }
        }
    }

    #[test]
    fn a_seed_always_gives_the_same_jobs() {
        for load in Load::value_variants() {
            let other = Recipe {
                seed: 8,
                ..recipe(*load)
            };
            assert_eq!(generate(&recipe(*load)), generate(&recipe(*load)));
            assert_ne!(generate(&recipe(*load)), generate(&other));
        }
    }

    #[test]
    fn loads_differ_in_what_they_are_named_for() {
        let greedy = generate(&recipe(Load::Greedy));
        let of_greedy = greedy.iter().filter(|job| job.tenant == "greedy").count();
        assert!((15_000..17_000).contains(&of_greedy), "{of_greedy}");
        let gangs = generate(&recipe(Load::Gangs));
        assert!(gangs.iter().all(|job| matches!(job.devices, 1 | 16)));
        let bursty = generate(&recipe(Load::Bursty));
        let at_once = bursty
            .windows(2)
            .filter(|pair| pair[0].arrival_ms == pair[1].arrival_ms);
        assert!(at_once.count() > 19_000);
        let diurnal = generate(&recipe(Load::Diurnal));
        let by_day = diurnal
            .iter()
            .filter(|job| (6..18).contains(&(job.arrival_ms / 3_600_000 % 24)));
        let by_day = by_day.count();
        assert!(by_day > 14_000, "{by_day}");
    }
}
