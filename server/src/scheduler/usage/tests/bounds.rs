//! False reports, too many grants, and clocks that are set.

use super::*;

#[test]
fn old_reports_are_dropped_and_the_number_is_bounded() {
    let (mut accounts, mut changes) = (Accounts::new(BTreeMap::new()), numbered(1));
    for count in 1..=9000 {
        let subject = Subject::Unknown;
        accounts.begin(after(count), key(0, count), subject, "flex", &mut changes);
    }
    let known = |changes: &Changes| changes.accounts.values().flatten().count();
    assert_eq!(known(&changes), 8192);
    assert_eq!(changes.accounts[&key(0, 1)], None, "the oldest one");
    accounts.expire(after(7 * DAY_MS), &mut changes);
    assert_eq!(known(&changes), 8192);
    accounts.expire(after(7 * DAY_MS + HOUR_MS), &mut changes);
    assert_eq!(known(&changes), 0);
}

/// Whatever a worker reports, it counts no more than is possible in the time since, and is divided among few
/// hours.
#[test]
fn false_reports_count_what_was_possible() {
    const MOST: UsageCounters = UsageCounters {
        held_us: u64::MAX,
        busy_us: u64::MAX,
        byte_seconds: u64::MAX,
        moved_bytes: u64::MAX,
        ops: u64::MAX,
    };
    let (mut accounts, mut changes) = (Accounts::new(BTreeMap::new()), numbered(1));
    let reported = |is_final| Reported {
        amount: Amount::from(&MOST),
        is_final,
    };
    accounts.begin(after(0), key(0, 2), Subject::Unknown, "flex", &mut changes);
    let mut observe = |at: UnixMillis, key, is_final| {
        let (changes, subject) = (&mut changes, || None);
        accounts.observe(at, key, reported(is_final), "flex", subject, changes);
        let total = total(&changes.sums);
        (total.held_us / 1000, changes.sums.len())
    };
    let week = 7 * DAY_MS;
    let (held_ms, hours) = observe(after(0), key(0, 1), true);
    assert!(
        held_ms >= week && held_ms <= week + week / 64 + 1,
        "{held_ms}"
    );
    assert_eq!(hours, 7 * 24);
    let (again_ms, _) = observe(after(10_000), key(0, 1), true);
    assert_eq!(again_ms, held_ms, "the rest is not counted later");
    let (with_known_ms, _) = observe(after(10_000), key(0, 2), false);
    assert!((10_000..=10_200).contains(&(with_known_ms - held_ms)));
    // A clock that was not set until now.
    let mut accounts = Accounts::new(BTreeMap::new());
    let mut changes = numbered(1);
    for (at, n) in [
        (UnixMillis(5000), 1),
        (START, 100),
        (UnixMillis(5000), 101),
        (after(0), 200),
    ] {
        let subject = || lease_of("red");
        let reported = Reported {
            amount: Amount::of_device(n),
            is_final: false,
        };
        accounts.observe(at, key(0, 1), reported, "flex", subject, &mut changes);
    }
    assert_eq!(total(&changes.sums).busy_us, 200);
    assert!(changes.sums.len() <= 2 * 7 * 24);
}

/// If one report comes late and the next one does not, the first one's delay is not taken off the sum.
#[test]
fn delayed_reports_are_made_up_for() {
    let (mut accounts, mut changes) = (Accounts::new(BTreeMap::new()), numbered(1));
    for (at_s, sent_s) in [(9, 0), (10, 10), (29, 20), (30, 30), (40, 40)] {
        let reported = Reported {
            amount: Amount::of_device(sent_s * 1_000_000),
            is_final: false,
        };
        let (at, subject) = (after(at_s * 1000), || lease_of("red"));
        accounts.observe(at, key(0, 1), reported, "flex", subject, &mut changes);
    }
    let busy_us = total(&changes.sums).busy_us;
    assert!(busy_us > 30_000_000, "{busy_us}");
}

/// A process reports to its worker four times a second, so a worker's report may lack the last work, and the
/// next one, with all of it, may follow at once.
#[test]
fn work_that_one_report_lacks_counts_with_the_next() {
    let subject = || lease_of("red");
    for is_final in [true, false] {
        let (mut accounts, mut changes) = (Accounts::new(BTreeMap::new()), numbered(1));
        let start = lease_of("red").unwrap();
        accounts.begin(after(0), key(0, 1), start, "flex", &mut changes);
        for (at_ms, busy_ms) in [(1000, 1000), (2000, 1750), (2990, 2740), (3000, 3000)] {
            let reported = Reported {
                amount: Amount::of_device(busy_ms * 1000),
                is_final: is_final && at_ms == 3000,
            };
            let (at, changes) = (after(at_ms), &mut changes);
            accounts.observe(at, key(0, 1), reported, "flex", subject, changes);
        }
        assert_eq!(total(&changes.sums).busy_us, 3_000_000);
    }
}

/// A grant that was idle for long cannot have worked since for more than that.
#[test]
fn idle_time_makes_no_false_report_possible() {
    let (mut accounts, mut changes) = (Accounts::new(BTreeMap::new()), numbered(1));
    let mut busy_us = |at_ms: u64, busy_ms: u64| {
        let (subject, changes) = (|| lease_of("red"), &mut changes);
        let reported = Reported {
            amount: Amount::of_device(busy_ms * 1000),
            is_final: false,
        };
        accounts.observe(after(at_ms), key(0, 1), reported, "flex", subject, changes);
        total(&changes.sums).busy_us
    };
    busy_us(0, 0);
    assert_eq!(busy_us(3_600_000, 0), 0);
    let counted = busy_us(3_610_000, 1_000_000);
    // Ten seconds, two before that, and a 64th of the ten.
    assert_eq!(counted, 12_157_000);
    assert_eq!(busy_us(3_610_000, 1_000_000), counted + 1000);
}

#[test]
fn accounts_of_all_workers_are_bounded_and_the_silent_ones_go_first() {
    let (mut accounts, mut changes) = (Accounts::new(BTreeMap::new()), numbered(1));
    let key_of = |worker| AccountKey {
        worker,
        ..key(0, 1)
    };
    let begin = |accounts: &mut Accounts, at, worker, changes: &mut Changes| {
        accounts.begin(after(at), key_of(worker), Subject::Unknown, "flex", changes);
    };
    // Worker 1 has released a device, and repeats that. Worker 2 has, too, and is gone.
    begin(&mut accounts, 0, 1, &mut changes);
    begin(&mut accounts, 0, 2, &mut changes);
    for (at, worker) in [(1, 1), (1, 2), (3 * HOUR_MS, 1)] {
        let subject = || None;
        accounts.observe(
            after(at),
            key_of(worker),
            is_final(1),
            "flex",
            subject,
            &mut changes,
        );
    }
    for worker in 3..=70_000 {
        begin(&mut accounts, worker, worker, &mut changes);
    }
    let known = changes.accounts.values().flatten().count();
    assert!((60_000..=65_536).contains(&known), "{known}");
    assert!(accounts.contains(&key_of(1)), "it is reported");
    assert!(!accounts.contains(&key_of(2)) && !accounts.contains(&key_of(3)));
    assert!(accounts.contains(&key_of(70_000)));
}

#[test]
fn nothing_is_forgotten_before_workers_had_time_to_report() {
    let account_at = |at| {
        let (mut accounts, mut changes) = (Accounts::new(BTreeMap::new()), numbered(1));
        accounts.begin(at, key(0, 1), Subject::Unknown, "flex", &mut changes);
        (accounts, changes)
    };
    let week = 7 * DAY_MS;
    let cases: [(&[u64], bool); 5] = [
        // The first heartbeat after a restart of the scheduler.
        (&[2 * week], false),
        (&[2 * week, 2 * week + HOUR_MS / 2], false),
        (&[2 * week, 2 * week + HOUR_MS], true),
        // No worker was connected for long, or the clock was set.
        (&[HOUR_MS, 2 * week], false),
        (&[2 * week, HOUR_MS, 2 * week], false),
    ];
    for (times, expected) in cases {
        let (mut accounts, mut changes) = account_at(START);
        for at in times {
            accounts.expire(after(*at), &mut changes);
        }
        assert_eq!(!accounts.contains(&key(0, 1)), expected, "{times:?}");
    }
}

/// A heartbeat makes few grants known, and none that the scheduler cannot have given.
#[tokio::test]
async fn invented_grants_are_not_counted() {
    let directory = tempfile::tempdir().unwrap();
    let state = StateDir::open(directory.path()).unwrap();
    let log = UsageLog::open(&state).unwrap();
    let grants: Vec<_> = (1..=100).map(|count| grant_usage(count, 1, true)).collect();
    let report = WorkerReport {
        worker: WORKER,
        kinds: &["flex".to_owned()],
        devices_busy_us: vec![],
        grants: &grants,
    };
    let query = Query {
        since: UnixMillis(0),
        by: BTreeSet::new(),
    };
    for expected in [64, 70, 70] {
        let may_be_granted = |grant: &DeviceGrant| number(grant.grant).count <= 70;
        log.reported(UnixMillis::now(), &report, may_be_granted, |_, _| None);
        let total = log
            .sum(query.clone())
            .await
            .unwrap()
            .into_reply(START)
            .total;
        assert_eq!(total.unwrap().ops, expected);
    }
}
