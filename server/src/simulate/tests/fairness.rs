//! How devices are divided among tenants that want more than there are.

use super::*;
use crate::simulate::generator::{Load, Recipe, generate};

/// All tenants wait for devices for ten half-lives, with jobs of equal demand, so that what they get depends on their
/// weights alone.
#[test]
fn tenants_that_want_more_than_there_is_get_devices_by_weight() {
    let weights = [("red", 1), ("green", 2), ("blue", 3)];
    let half_life = Duration::from_secs(2_000);
    let policy = policy(&weights.map(|(name, weight)| (name, weight, 0)));
    for seed in [3, 4, 5] {
        let mut jobs = generate(&Recipe {
            load: Load::Steady,
            seed,
            jobs: 12_000,
            tenants: 3,
            devices: 36,
            demand: 4.0,
            duration: 100.0,
            sharing: 0.0,
            kind: Some("cuda".into()),
        });
        for (number, job) in jobs.iter_mut().enumerate() {
            (job.arrival_ms, job.devices) = (0, 1);
            job.tenant = weights[number % 3].0.into();
        }
        let (pool, order) = ("9x4:cuda:8GiB", RequestOrder::Fair);
        let outcome = simulate_with(&jobs, pool, &policy, order, half_life, 0);
        let (received, all, lasted) = received_while_all_wait(&outcome);
        assert!(lasted >= 10 * half_life, "all waited for {lasted:?} only");
        for (name, weight) in weights {
            let part = received[name] / all * 6.0 / f64::from(weight);
            assert!(
                (0.98..1.02).contains(&part),
                "seed {seed}: {name} has {part} of its share"
            );
        }
        let index = outcome.jains_index;
        assert!(index >= 0.99, "seed {seed}: {index}");
    }
}

/// Returns the device-time of each tenant, and of all, until the first of them waits for nothing, and how long that
/// took.
fn received_while_all_wait(outcome: &Outcome) -> (BTreeMap<&str, f64>, f64, Duration) {
    let of_tenant = |tenant: usize| {
        let samples = outcome.samples.iter();
        samples.filter(move |sample| sample.tenant as usize == tenant)
    };
    let tenants = 0..outcome.tenants.len();
    let satisfied = tenants.clone().filter_map(|tenant| {
        // All have arrived at the start.
        let mut samples = of_tenant(tenant).skip_while(|it| it.at_ms == outcome.start_ms);
        samples
            .find(|sample| sample.waiting == 0)
            .map(|it| it.at_ms)
    });
    let until_ms = satisfied.min().unwrap();
    let received = tenants.map(|tenant| {
        let samples: Vec<_> = of_tenant(tenant)
            .filter(|it| it.at_ms <= until_ms)
            .collect();
        let pairs = samples.windows(2);
        let time = pairs.map(|pair| u64::from(pair[0].held) * (pair[1].at_ms - pair[0].at_ms));
        (
            outcome.tenants[tenant].name.as_str(),
            time.sum::<u64>() as f64,
        )
    });
    let received: BTreeMap<_, _> = received.collect();
    let all = received.values().sum();
    (
        received,
        all,
        Duration::from_millis(until_ms - outcome.start_ms),
    )
}
