//! Tests of what is counted; `bounds` has those of false reports, `store` those of what is on disk, and
//! `crashes` those of both together.

mod bounds;
mod crashes;
mod store;

use std::collections::BTreeSet;

use tensord_proto::v1::{UsageColumn, UsageCounters};

use super::{
    accounts::Changes,
    amount::{HOUR_MS, SumKey, by_hours},
    *,
};

const DAY_MS: u64 = 24 * HOUR_MS;
const LEASE: LeaseId = LeaseId(0x9a);
const WORKER: WorkerId = WorkerId(7);
/// The beginning of a day.
const START: UnixMillis = UnixMillis(20_758 * DAY_MS);

fn after(ms: u64) -> UnixMillis {
    UnixMillis(START.0 + ms)
}

fn owner(tenant: &str, user: &str) -> Owner {
    Owner {
        tenant: tenant.into(),
        user: user.into(),
    }
}

fn amount(n: u64) -> Amount {
    Amount {
        held_us: 10 * n,
        busy_us: n,
        byte_seconds: u128::from(n) << 70,
        moved_bytes: 3 * n,
        ops: n,
    }
}

fn key(device: u32, count: u64) -> AccountKey {
    AccountKey {
        worker: WORKER.0,
        device,
        grant: GrantNumber { term: 1, count },
    }
}

fn lease_of(tenant: &str) -> Option<Subject> {
    Some(Subject::Lease(owner(tenant, "ada"), LEASE))
}

fn reported(n: u64) -> Reported {
    Reported {
        amount: amount(n),
        is_final: false,
    }
}

fn is_final(n: u64) -> Reported {
    Reported {
        is_final: true,
        ..reported(n)
    }
}

fn total(sums: &BTreeMap<SumKey, Amount>) -> Amount {
    let mut total = Amount::default();
    sums.values().for_each(|amount| total.add(amount));
    total
}

fn numbered(number: u64) -> Changes {
    Changes {
        number,
        ..Changes::default()
    }
}

#[test]
fn amount_is_divided_at_the_hours() {
    let hour = u32::try_from(START.0 / HOUR_MS).unwrap();
    let quarter = HOUR_MS / 4;
    let cases = [
        ((0, quarter), vec![(hour, 100)]),
        ((0, HOUR_MS), vec![(hour, 100)]),
        ((HOUR_MS, HOUR_MS), vec![(hour + 1, 100)]),
        // A clock that was set back.
        ((HOUR_MS, quarter), vec![(hour, 100)]),
        ((3 * quarter, 5 * quarter), vec![(hour, 50), (hour + 1, 50)]),
        (
            (3 * quarter, 12 * quarter),
            vec![(hour, 11), (hour + 1, 44), (hour + 2, 45)],
        ),
    ];
    for ((from, to), expected) in cases {
        let parts = by_hours(after(from).0, after(to).0, &amount(100));
        let ops: Vec<_> = parts.iter().map(|(hour, part)| (*hour, part.ops)).collect();
        assert_eq!(ops, expected, "{from} to {to}");
        let mut sum = Amount::default();
        parts.iter().for_each(|(_, part)| sum.add(part));
        assert_eq!(sum, amount(100), "{from} to {to}");
    }
}

#[test]
fn report_counts_once_and_a_lost_one_does_no_harm() {
    let (mut accounts, mut changes) = (Accounts::new(BTreeMap::new()), numbered(1));
    let mut observe = |at, reported| {
        let subject = || lease_of("red");
        accounts.observe(
            after(at),
            key(0, 1),
            reported,
            "flex",
            subject,
            &mut changes,
        )
    };
    assert!(!observe(1000, reported(5)));
    assert!(!observe(2000, reported(5)));
    assert!(!observe(9000, reported(20)));
    assert!(!observe(10_000, reported(11)), "an old one");
    assert!(observe(11_000, is_final(30)));
    assert!(!observe(12_000, is_final(30)), "it has ended before");
    assert_eq!(total(&changes.sums), amount(30));
    let listed = BTreeMap::from([(key(0, 1), 1), (key(0, 9), 9)]);
    let recorded = |written| accounts.recorded(&listed, written).collect::<Vec<_>>();
    assert_eq!((recorded(0), recorded(1)), (vec![], vec![&1]));
}

#[test]
fn released_grant_is_forgotten_once_the_worker_has_forgotten_it() {
    let mut accounts = Accounts::new(BTreeMap::new());
    let mut changes = numbered(4);
    let subject = || lease_of("red");
    accounts.observe(START, key(0, 1), is_final(1), "flex", subject, &mut changes);
    accounts.observe(START, key(0, 2), reported(1), "flex", subject, &mut changes);
    let listed = BTreeMap::from([(key(0, 1), ())]);
    for (listed, written, expected) in [
        (&listed, 4, false),
        (&BTreeMap::new(), 3, false),
        (&BTreeMap::new(), 4, true),
    ] {
        let mut changes = numbered(5);
        accounts.forget_released(WORKER.0, listed, written, &mut changes);
        assert_eq!(changes.accounts.contains_key(&key(0, 1)), expected);
        assert!(!changes.accounts.contains_key(&key(0, 2)));
    }
}

#[test]
fn lease_that_nobody_has_claimed_counts_when_it_is_known_or_over() {
    let (mut accounts, mut changes) = (Accounts::new(BTreeMap::new()), numbered(1));
    let mut observe = |device, reported, subject: Option<Subject>| {
        let at = after(2 * HOUR_MS);
        accounts.observe(
            at,
            key(device, 1),
            reported,
            "flex",
            || subject,
            &mut changes,
        );
    };
    observe(0, reported(5), None);
    observe(1, reported(6), None);
    observe(0, reported(7), lease_of("red"));
    observe(1, is_final(8), None);
    observe(1, is_final(8), lease_of("red"));
    let by_subject = changes
        .sums
        .iter()
        .map(|(key, sum)| (key.subject.clone(), sum.ops));
    let by_subject: BTreeMap<_, _> = by_subject.collect();
    let expected = [(lease_of("red").unwrap(), 7), (Subject::Unknown, 8)];
    assert_eq!(by_subject, expected.into());
}

fn grant_usage(count: u64, used: u64, released: bool) -> GrantUsage {
    let counters = UsageCounters {
        held_us: 2 * used,
        busy_us: used,
        byte_seconds: used,
        moved_bytes: used,
        ops: used,
    };
    GrantUsage {
        lease_id: LEASE.0,
        grant: Some(DeviceGrant {
            device_index: 0,
            grant: Some(GrantNumber { term: 1, count }.into()),
            share: None,
        }),
        used: Some(counters),
        released,
    }
}

/// The log as the driver and administrators use it, over a restart.
#[tokio::test]
async fn worker_may_forget_what_is_on_disk() {
    let directory = tempfile::tempdir().unwrap();
    let state = StateDir::open(directory.path()).unwrap();
    let kinds = ["flex".to_owned()];
    let report = |log: &UsageLog, grants: &[GrantUsage], busy_us| {
        let report = WorkerReport {
            worker: WORKER,
            kinds: &kinds,
            devices_busy_us: vec![busy_us],
            grants,
        };
        log.reported(
            UnixMillis::now(),
            &report,
            |_| true,
            |_, _| Some(owner("red", "ada")),
        )
    };
    let query = Query {
        since: UnixMillis(0),
        by: [UsageColumn::Tenant].into(),
    };
    let log = UsageLog::open(&state).unwrap();
    let grants = [grant_usage(1, 5, true), grant_usage(2, 7, false)];
    assert_eq!(report(&log, &grants, 12), []);
    // The reply to the question comes when all of this is written.
    let sums = log.sum(query.clone()).await.unwrap().into_reply(START);
    let row = &sums.rows[0];
    assert_eq!((&*row.tenant, row.sum.unwrap().busy_us), ("red", 12));
    assert_eq!(sums.devices_busy_us, 12);
    assert_eq!(report(&log, &grants, 12), [grants[0].grant.unwrap()]);
    drop(log);
    let log = UsageLog::open(&state).unwrap();
    // The worker has not received that it may forget the first one.
    let grants = [grant_usage(1, 5, true), grant_usage(2, 9, false)];
    assert_eq!(report(&log, &grants, 14), [grants[0].grant.unwrap()]);
    let sums = log.sum(query).await.unwrap().into_reply(START);
    assert_eq!(sums.total.unwrap().busy_us, 14);
    assert_eq!(sums.devices_busy_us, 14);
}

/// A scheduler that stops does not wait for the next regular write.
#[tokio::test]
async fn everything_is_written_on_request() {
    let directory = tempfile::tempdir().unwrap();
    let state = StateDir::open(directory.path()).unwrap();
    let log = UsageLog::open(&state).unwrap();
    let report = WorkerReport {
        worker: WORKER,
        kinds: &["flex".to_owned()],
        devices_busy_us: vec![],
        grants: &[grant_usage(1, 5, false)],
    };
    log.reported(
        UnixMillis::now(),
        &report,
        |_| true,
        |_, _| Some(owner("red", "ada")),
    );
    log.written().await.unwrap();
    // The file, as another process finds it while this one has it open.
    let copied = tempfile::tempdir().unwrap();
    let name = "usage.redb";
    std::fs::copy(directory.path().join(name), copied.path().join(name)).unwrap();
    let state = StateDir::open(copied.path()).unwrap();
    let (mut store, _) = Store::open_or_put_aside(&state).unwrap();
    let query = Query {
        since: UnixMillis(0),
        by: BTreeSet::new(),
    };
    let total = store.sum(&query).unwrap().into_reply(START).total;
    assert_eq!(total.unwrap().ops, 5);
}

#[test]
fn worker_cannot_report_a_device_as_a_grant() {
    let report = WorkerReport {
        worker: WORKER,
        kinds: &["flex".to_owned()],
        devices_busy_us: vec![],
        grants: &[],
    };
    let grant = |device_index, grant: Option<GrantNumber>| DeviceGrant {
        device_index,
        grant: grant.map(Into::into),
        share: None,
    };
    let number = GrantNumber { term: 1, count: 2 };
    let known = report.account_of(&grant(0, Some(number)));
    assert_eq!(known, Some((key(0, 2), "flex")));
    for other in [
        grant(0, None),
        grant(0, Some(GrantNumber::ZERO)),
        grant(1, Some(number)),
    ] {
        assert_eq!(report.account_of(&other), None, "{other:?}");
    }
}
