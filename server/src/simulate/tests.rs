//! Runs of small traces that can be checked by hand, and what holds in all runs.

mod fairness;

use std::{collections::BTreeMap, time::Duration};

use proptest::{collection::vec, option, prelude::*};
use tensord_scheduler::{Policy, RequestOrder, TenantPolicy};

use super::{Outcome, Setup, picture, report, run, timeline, trace::Job};

const ORDERS: [RequestOrder; 3] = [
    RequestOrder::Fair,
    RequestOrder::Backfill,
    RequestOrder::Fifo,
];

/// Arrival in seconds, tenant, devices, and duration in seconds.
type Line<'a> = (u64, &'a str, u32, u64);

/// The first grant, the end, both in seconds, and the number of suspensions.
type Times = (u64, u64, u32);

fn jobs(lines: &[Line<'_>]) -> Vec<Job> {
    let jobs = lines
        .iter()
        .map(|&(arrival, tenant, devices, duration)| Job {
            arrival_ms: arrival * 1000,
            tenant: tenant.into(),
            user: String::new(),
            devices,
            kind: Some("cuda".into()),
            share_permille: None,
            memory_bytes: 0,
            duration_ms: duration * 1000,
            priority: 0,
            max_duration_ms: None,
            is_durable: true,
            is_spot: false,
        });
    jobs.collect()
}

fn policy(tenants: &[(&str, u32, u32)]) -> Policy {
    let tenants = tenants.iter().map(|(name, weight, guaranteed)| {
        let policy = TenantPolicy {
            weight: *weight,
            guaranteed: [("cuda".into(), *guaranteed)].into(),
            ..TenantPolicy::default()
        };
        ((*name).into(), policy)
    });
    tenants.collect()
}

fn simulate(
    jobs: &[Job],
    pool: &str,
    policy: &Policy,
    order: RequestOrder,
    release_ms: u64,
) -> Outcome {
    let half_life = Duration::from_secs(86_400);
    simulate_with(jobs, pool, policy, order, half_life, release_ms)
}

fn simulate_with(
    jobs: &[Job],
    pool: &str,
    policy: &Policy,
    order: RequestOrder,
    half_life: Duration,
    release_ms: u64,
) -> Outcome {
    let pool = pool.parse().unwrap();
    let setup = Setup {
        jobs,
        pool: &pool,
        policy,
        order,
        half_life,
        reserve_after: Duration::from_secs(600),
        release_ms,
    };
    run(&setup, &mut |_| {})
}

fn times(outcome: &Outcome) -> Vec<Times> {
    let jobs = outcome.jobs.iter();
    let times = jobs.map(|job| {
        let [granted, done] = [job.granted_ms, job.done_ms].map(|at| at.unwrap() / 1000);
        (granted, done, job.suspensions)
    });
    times.collect()
}

/// On two devices: two jobs that have both, then a gang, and two single jobs, of which the later is of a tenant
/// without devices.
const GANG: [Line<'_>; 5] = [
    (0, "red", 1, 10),
    (0, "red", 1, 20),
    (1, "red", 2, 5),
    (2, "red", 1, 5),
    (3, "blue", 1, 5),
];

#[test]
fn each_order_gives_devices_in_its_own_way() {
    let first = [(0, 10, 0), (0, 20, 0)];
    let cases = [
        (RequestOrder::Fair, [(20, 25, 0), (15, 20, 0), (10, 15, 0)]),
        (
            RequestOrder::Backfill,
            [(20, 25, 0), (10, 15, 0), (15, 20, 0)],
        ),
        (RequestOrder::Fifo, [(20, 25, 0), (25, 30, 0), (25, 30, 0)]),
    ];
    for (order, expected) in cases {
        let outcome = simulate(&jobs(&GANG), "1x2:cuda:8GiB", &Policy::new(), order, 0);
        assert_eq!(
            times(&outcome),
            [&first[..], &expected].concat(),
            "{order:?}"
        );
    }
}

#[test]
fn devices_are_free_when_leases_have_left_them() {
    let lines = [(0, "red", 1, 10), (0, "red", 1, 10), (10, "red", 1, 10)];
    let outcome = simulate(
        &jobs(&lines),
        "1x1:cuda:8GiB",
        &Policy::new(),
        RequestOrder::Fair,
        2000,
    );
    assert_eq!(times(&outcome), [(0, 10, 0), (12, 22, 0), (24, 34, 0)]);
}

#[test]
fn a_borrowed_lease_is_suspended_for_a_guarantee_and_goes_on_later() {
    let lines = [(0, "red", 1, 60), (0, "red", 1, 60), (20, "blue", 1, 10)];
    let cases = [
        (RequestOrder::Fair, [(0, 60, 0), (0, 70, 1), (20, 30, 0)]),
        (
            RequestOrder::Backfill,
            [(0, 60, 0), (0, 60, 0), (60, 70, 0)],
        ),
        (RequestOrder::Fifo, [(0, 60, 0), (0, 60, 0), (60, 70, 0)]),
    ];
    let policy = policy(&[("blue", 1, 2)]);
    for (order, expected) in cases {
        for pool in ["1x2:cuda:8GiB", "2x1:cuda:8GiB"] {
            let outcome = simulate(&jobs(&lines), pool, &policy, order, 0);
            assert_eq!(times(&outcome), expected, "{order:?} on {pool}");
        }
    }
}

#[test]
fn the_metrics_of_a_small_run_are_those_of_their_formulas() {
    // Red has both devices for 10 s, while blue waits for one; then blue has one for 10 s.
    let lines = [(5, "red", 2, 10), (5, "blue", 1, 10), (5, "blue", 3, 1)];
    let outcome = simulate(
        &jobs(&lines),
        "1x2:cuda:8GiB",
        &Policy::new(),
        RequestOrder::Fair,
        0,
    );
    assert_eq!((outcome.start_ms, outcome.end_ms), (5000, 25_000));
    assert_eq!(outcome.utilisation, 30.0 / 40.0);
    // For 10 s, one of two devices should be with the other tenant.
    assert_eq!(outcome.fair_share_error, 0.5 * 10.0 / 20.0);
    let tenants = outcome.tenants.iter();
    let tenants = tenants.map(|it| (it.name.as_str(), it.device_seconds, it.fair_device_seconds));
    let expected = [("blue", 10.0, 20.0), ("red", 20.0, 10.0)];
    assert_eq!(tenants.collect::<Vec<_>>(), expected);
    // Of 0.5 and 2.
    assert_eq!(outcome.jains_index, 2.5 * 2.5 / (2.0 * 4.25));
    let waits = [
        outcome.waits.median_ms,
        outcome.waits.p99_ms,
        outcome.waits.worst_ms,
    ];
    assert_eq!(waits, [0, 10_000, 10_000]);
    let reason = "requested 3 devices of kind cuda; the pool has 2 cuda (8.0 GiB)".to_owned();
    assert_eq!(outcome.failures, BTreeMap::from([(reason, 1)]));
    assert_eq!(
        (outcome.done, outcome.unfinished, outcome.suspensions),
        (2, 0, 0)
    );
}

#[test]
fn a_picture_has_each_tenant_and_the_length_of_the_longest_run() {
    let outcomes =
        ORDERS.map(|order| simulate(&jobs(&GANG), "1x2:cuda:8GiB", &Policy::new(), order, 0));
    let svg = timeline::svg(&outcomes);
    for text in [
        "order fair",
        "order fifo",
        ">red<",
        ">blue<",
        ">30 s<",
        ">devices in use<",
    ] {
        assert!(svg.contains(text), "{text}");
    }
    assert_eq!(svg.matches("<svg").count(), 1);
    // However long the run is.
    assert!(svg.len() < 200_000, "{}", svg.len());
}

#[test]
fn a_picture_of_a_small_pool_shows_each_job_on_its_devices() {
    // Red has both devices; blue's guarantee takes one, so the later job of red waits and goes on.
    let lines = [(0, "red", 1, 60), (0, "red", 1, 60), (20, "blue", 1, 30)];
    let jobs = jobs(&lines);
    let policy = policy(&[("blue", 1, 1)]);
    let spec = "1x2:cuda:8GiB";
    let outcome = simulate(&jobs, spec, &policy, RequestOrder::Fair, 0);
    let pieces = outcome.jobs.iter().map(|job| {
        let pieces = job.pieces.iter();
        let pieces = pieces.map(|it| (it.from_ms / 1000, it.to_ms / 1000, it.devices.clone()));
        pieces.collect::<Vec<_>>()
    });
    let expected = [
        vec![(0, 60, vec![0])],
        vec![(0, 20, vec![1]), (50, 90, vec![1])],
        vec![(20, 50, vec![1])],
    ];
    assert_eq!(pieces.collect::<Vec<_>>(), expected);
    let svg = picture(
        std::slice::from_ref(&outcome),
        &jobs,
        &spec.parse().unwrap(),
    );
    // The suspended job has two bars, each with a torn edge.
    let counts = [
        ">cuda:0<",
        ">1<",
        ">2<",
        ">3<",
        ">2 suspended<",
        "stroke-dasharray",
    ];
    let counts = counts.map(|text| svg.matches(text).count());
    assert_eq!(counts, [1, 1, 2, 1, 1, 1], "{svg}");
    let torn = svg.lines().filter(|line| line.contains("l-3.0 ")).count();
    assert_eq!(torn, 2, "{svg}");
}

#[test]
fn a_picture_of_a_large_pool_or_a_long_trace_has_areas() {
    let cases = [
        (4, 100, true),
        (4, 101, false),
        (16, 9, true),
        (17, 9, false),
    ];
    for (devices, count, has_bars) in cases {
        let jobs = jobs(&vec![(0, "red", 1, 10); count]);
        let spec = format!("1x{devices}:cuda:8GiB");
        let outcome = simulate(&jobs, &spec, &Policy::new(), RequestOrder::Fair, 0);
        let svg = picture(&[outcome], &jobs, &spec.parse().unwrap());
        assert_eq!(
            svg.contains(">devices in use<"),
            !has_bars,
            "{devices} devices"
        );
        assert_eq!(svg.contains(">cuda:0<"), has_bars, "{count} jobs");
    }
}

#[test]
fn a_report_compares_the_orders_line_by_line() {
    let outcomes =
        ORDERS.map(|order| simulate(&jobs(&GANG), "1x2:cuda:8GiB", &Policy::new(), order, 0));
    let text = report::text(&outcomes, 1);
    let mut lines = text.lines();
    assert_eq!(
        lines.next(),
        Some("5 jobs of 2 tenants on 2 devices of 1 worker")
    );
    assert_eq!(text.matches("\nfair ").count(), 1, "{text}");
    assert_eq!(text.matches("\nblue ").count(), 3, "{text}");
    let json = serde_json::to_value(report::json(&outcomes, 1)).unwrap();
    assert_eq!(json["orders"][2]["order"], "fifo");
    assert_eq!(json["orders"][2]["waiting"]["worst_seconds"], 23.0);
    assert_eq!(json["orders"][0]["gangs"][1]["devices"], 2);
}

/// Jobs of these tenants that arrive at once and run for 10 s each, with shares of a device and memory in GiB; 0
/// for the same part of the device's memory.
fn sharing_jobs(shares: &[(&str, Option<u32>, u64)]) -> Vec<Job> {
    let lines: Vec<Line<'_>> = shares
        .iter()
        .map(|(tenant, ..)| (0, *tenant, 1, 10))
        .collect();
    let mut jobs = jobs(&lines);
    for (job, (_, share, gib)) in jobs.iter_mut().zip(shares) {
        (job.share_permille, job.memory_bytes) = (*share, gib << 30);
    }
    jobs
}

#[test]
fn shares_of_a_device_run_beside_each_other() {
    let half = Some(500);
    let whole = [("red", None, 0), ("red", half, 0), ("red", half, 0)];
    let cases = [
        (&[("red", half, 0); 3][..], [0, 0, 10]),
        // There is memory for one of them.
        (&[("red", Some(250), 6); 3], [0, 10, 20]),
        (&whole, [0, 10, 10]),
    ];
    for (shares, expected) in cases {
        for order in ORDERS {
            let jobs = sharing_jobs(shares);
            let outcome = simulate(&jobs, "1x1:cuda:8GiB", &Policy::new(), order, 0);
            let granted = times(&outcome).into_iter().map(|(granted, ..)| granted);
            let granted: Vec<_> = granted.collect();
            assert_eq!(granted, expected, "{order:?} of {shares:?}");
        }
    }
}

#[test]
fn shares_count_by_their_part() {
    let jobs = sharing_jobs(&[
        ("red", Some(500), 0),
        ("blue", Some(250), 0),
        ("red", Some(500), 0),
    ]);
    let outcome = simulate(
        &jobs,
        "1x1:cuda:8GiB",
        &Policy::new(),
        RequestOrder::Fair,
        0,
    );
    let length = (outcome.end_ms - outcome.start_ms) as f64 / 1000.0;
    assert_eq!((length, outcome.utilisation), (20.0, 12.5 / 20.0));
    let tenants = outcome.tenants.iter();
    let tenants = tenants.map(|it| (it.name.as_str(), it.device_seconds));
    assert_eq!(tenants.collect::<Vec<_>>(), [("blue", 2.5), ("red", 10.0)]);
    let sizes: Vec<_> = outcome.gangs.keys().copied().collect();
    assert_eq!(sizes, [250, 500]);
    let text = report::text(std::slice::from_ref(&outcome), 1);
    assert!(text.contains("\n   0.25  fair      1"), "{text}");
    let json = serde_json::to_value(report::json(std::slice::from_ref(&outcome), 1)).unwrap();
    assert_eq!(json["orders"][0]["gangs"][1]["devices"], 0.5);
}

#[test]
fn a_lease_that_is_not_durable_or_spot_or_short_follows_its_rule() {
    type Change = fn(&mut Job);
    let usual: Change = |_| {};
    let spot: Change = |job| job.is_spot = true;
    let not_durable: Change = |job| job.is_durable = false;
    let weak: Change = |job| (job.is_durable, job.is_spot) = (false, true);
    let short: Change = |job| job.max_duration_ms = Some(15_000);
    // When the first job ends as it should, how often it is suspended, and when the second one begins, in seconds.
    let guarantee = policy(&[("blue", 1, 1)]);
    let none = Policy::new();
    let cases = [
        ("usual", usual, &guarantee, (Some(70), 1, 20)),
        ("not durable", not_durable, &guarantee, (Some(60), 0, 60)),
        (
            "usual, without a guarantee",
            usual,
            &none,
            (Some(60), 0, 60),
        ),
        ("spot", spot, &none, (Some(70), 1, 20)),
        ("spot and not durable", weak, &none, (None, 0, 20)),
        ("short", short, &none, (None, 0, 20)),
    ];
    for (name, change, policy, expected) in cases {
        let mut jobs = jobs(&[(0, "red", 1, 60), (20, "blue", 1, 10)]);
        change(&mut jobs[0]);
        let outcome = simulate(&jobs, "1x1:cuda:8GiB", policy, RequestOrder::Fair, 0);
        let [first, second] = [0, 1].map(|at| &outcome.jobs[at]);
        let ends = first.done_ms.map(|at| at / 1000);
        let begins = second.granted_ms.unwrap() / 1000;
        assert_eq!((ends, first.suspensions, begins), expected, "{name}");
        assert_eq!(first.failure.is_some(), ends.is_none(), "{name}");
    }
}

fn line() -> impl Strategy<Value = Line<'static>> {
    let tenant = prop_oneof![Just("red"), Just("green"), Just("blue")];
    (0_u64..200, tenant, 1_u32..8, 1_u64..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_job_ends_or_is_refused_and_the_pool_is_never_exceeded(
        mut lines in vec(line(), 1..60),
        guaranteed in 0_u32..5,
        release_ms in 0_u64..2000,
        shares in vec(option::of(1_u32..1000), 60),
    ) {
        lines.sort_by_key(|line| line.0);
        let mut jobs = jobs(&lines);
        for (job, share) in jobs.iter_mut().zip(shares) {
            job.share_permille = share.filter(|_| job.devices == 1);
        }
        let policy = policy(&[("red", 1, guaranteed), ("green", 2, 0)]);
        for order in ORDERS {
            let outcome = simulate(&jobs, "2x2:cuda:8GiB,2x1:cuda:8GiB", &policy, order, release_ms);
            prop_assert_eq!(outcome.unfinished, 0);
            for (job, state) in jobs.iter().zip(&outcome.jobs) {
                prop_assert_eq!(state.failure.is_some(), job.devices > 6);
                let ran = state.granted_ms.zip(state.done_ms);
                let ran = ran.is_none_or(|(from, to)| to - from >= job.duration_ms);
                prop_assert!(ran, "{:?}", state);
            }
            let mut held = [0; 3];
            for sample in &outcome.samples {
                held[sample.tenant as usize] = sample.held;
                prop_assert!(held.iter().sum::<u32>() <= 6000);
            }
            let again = simulate(&jobs, "2x2:cuda:8GiB,2x1:cuda:8GiB", &policy, order, release_ms);
            prop_assert_eq!(outcome, again);
        }
    }
}
