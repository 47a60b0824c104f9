//! Sums on disk, and sums of them.

use tensord_proto::v1::{UsageColumn, UsageSums};

use super::{
    super::{
        amount::HOURS_A_DAY,
        store::{DETAILED_DAYS, KEPT_DAYS, Limits, Loaded},
        totals::MAX_ROWS,
    },
    *,
};

/// A store in a directory of its own.
pub(super) struct StoreRig {
    directory: tempfile::TempDir,
    pub(super) store: Store,
    pub(super) loaded: Loaded,
}

impl StoreRig {
    pub(super) fn new() -> Self {
        Self::on(tempfile::tempdir().unwrap())
    }

    fn on(directory: tempfile::TempDir) -> Self {
        let state = StateDir::open(directory.path()).unwrap();
        let (store, loaded) = Store::open_or_put_aside(&state).unwrap();
        Self {
            directory,
            store,
            loaded,
        }
    }

    /// Returns the store as a process finds it that starts after a crash at this moment: what is not
    /// written is lost, and the file was not closed.
    pub(super) fn after_crash(&self) -> Self {
        let copied = tempfile::tempdir().unwrap();
        StateDir::open(copied.path()).unwrap();
        let name = "usage.redb";
        std::fs::copy(self.directory.path().join(name), copied.path().join(name)).unwrap();
        Self::on(copied)
    }

    fn sums(&mut self, since: UnixMillis, by: &[UsageColumn]) -> UsageSums {
        let by = by.iter().copied().collect();
        let totals = self.store.sum(&Query { since, by }).unwrap();
        totals.into_reply(after(100 * DAY_MS))
    }

    pub(super) fn total_ops(&mut self) -> u64 {
        self.sums(UnixMillis(0), &[]).total.unwrap().ops
    }
}

fn changes_of(number: u64, at_ms: u64, tenant: &str, lease: u64, n: u64) -> Changes {
    let key = SumKey {
        time: u32::try_from(at_ms / HOUR_MS).unwrap(),
        subject: Subject::Lease(owner(tenant, "ada"), LeaseId(lease)),
        kind: "flex".into(),
    };
    Changes {
        sums: [(key, amount(n))].into(),
        ..numbered(number)
    }
}

#[test]
fn changes_are_written_once_and_survive_a_crash() {
    let mut rig = StoreRig::new();
    let first = changes_of(1, START.0, "red", 1, 5);
    rig.store.write(&first).unwrap();
    // The disk had it, although an error was returned.
    rig.store.write(&first).unwrap();
    rig.store
        .write(&changes_of(2, START.0, "red", 1, 7))
        .unwrap();
    let mut crashed = rig.after_crash();
    assert_eq!(crashed.loaded.batch, 2);
    assert_eq!(crashed.total_ops(), 12);
    let bytes = crashed.sums(START, &[]).total.unwrap().byte_seconds;
    assert_eq!(bytes, (12_u128 << 70) as f64);
}

#[test]
fn damaged_file_is_put_aside() {
    let directory = tempfile::tempdir().unwrap();
    StateDir::open(directory.path()).unwrap();
    std::fs::write(directory.path().join("usage.redb"), [7; 5000]).unwrap();
    let mut rig = StoreRig::on(directory);
    assert_eq!(rig.total_ops(), 0);
    assert!(rig.directory.path().join("usage.redb.damaged").exists());
}

#[test]
fn old_details_become_sums_by_day_and_then_go() {
    let mut rig = StoreRig::new();
    let at = |day: u64, hour: u64| START.0 + day * DAY_MS + hour * HOUR_MS;
    let written = [
        (0, 3, "red", 1, 1),
        (0, 23, "red", 2, 2),
        (0, 5, "blue", 3, 4),
        (1, 0, "red", 1, 8),
    ];
    for (number, (day, hour, tenant, lease, n)) in (1..).zip(written) {
        let changes = changes_of(number, at(day, hour), tenant, lease, n);
        rig.store.write(&changes).unwrap();
    }
    let by = [UsageColumn::Day, UsageColumn::Tenant, UsageColumn::Lease];
    let rows = |rig: &mut StoreRig, since| {
        let rows = rig.sums(since, &by).rows.into_iter();
        let rows = rows.map(|it| (it.day - 20_758, it.tenant, it.lease_id, it.sum.unwrap().ops));
        rows.collect::<Vec<_>>()
    };
    let row = |day, tenant: &str, lease, ops| (day, tenant.to_owned(), lease, ops);
    let detailed = [
        row(0, "blue", 3, 4),
        row(0, "red", 2, 2),
        row(0, "red", 1, 1),
        row(1, "red", 1, 8),
    ];
    let last_detailed = after(u64::from(DETAILED_DAYS) * DAY_MS);
    rig.store.tidy(last_detailed).unwrap();
    assert_eq!(rows(&mut rig, START), detailed);
    let since = UnixMillis(at(0, 5) + 1);
    assert_eq!(rig.sums(since, &by).since_ms, at(0, 5));
    assert_eq!(
        rows(&mut rig, since),
        [&detailed[..2], &detailed[3..]].concat()
    );
    rig.store
        .tidy(UnixMillis(last_detailed.0 + DAY_MS))
        .unwrap();
    let summed_up = [
        row(0, "blue", 0, 4),
        row(0, "red", 0, 3),
        row(1, "red", 1, 8),
    ];
    assert_eq!(rows(&mut rig, since), summed_up);
    assert_eq!(rig.sums(since, &by).since_ms, START.0);
    rig.store
        .tidy(after((u64::from(KEPT_DAYS) + 1) * DAY_MS))
        .unwrap();
    assert_eq!(rows(&mut rig, START), [row(1, "red", 0, 8)]);
}

#[test]
fn number_of_sums_is_bounded() {
    let mut rig = StoreRig::new();
    rig.store.set_limits(Limits {
        hourly: 6,
        daily: 1,
    });
    let mut number = 0;
    for day in 0..3 {
        for lease in 0..2 {
            number += 1;
            let at_ms = START.0 + day * DAY_MS;
            let changes = changes_of(number, at_ms, "red", lease + 1, 1 << day);
            rig.store.write(&changes).unwrap();
        }
    }
    // Two days become a sum each, of which the first one is dropped.
    rig.store.set_limits(Limits {
        hourly: 3,
        daily: 1,
    });
    rig.store.tidy(after(2 * DAY_MS)).unwrap();
    assert_eq!(rig.total_ops(), 2 * 2 + 2 * 4);
    // Today is not summed up, but no further leases are told apart.
    rig.store.set_limits(Limits {
        hourly: 1,
        daily: 9,
    });
    rig.store.tidy(after(2 * DAY_MS)).unwrap();
    assert_eq!(rig.total_ops(), 2 * 2 + 2 * 4);
    for lease in [2, 3, 4] {
        number += 1;
        let changes = changes_of(number, START.0 + 2 * DAY_MS, "red", lease, 100);
        rig.store.write(&changes).unwrap();
    }
    let leases = rig.sums(START, &[UsageColumn::Lease]).rows;
    let leases = leases
        .iter()
        .map(|row| (row.lease_id, row.sum.unwrap().ops));
    let leases: BTreeMap<_, _> = leases.collect();
    assert_eq!(leases, [(0, 2 * 2 + 200), (1, 4), (2, 104)].into());
}

#[test]
fn rows_beyond_the_longest_are_one() {
    let query = Query {
        since: START,
        by: [UsageColumn::Lease].into(),
    };
    let mut totals = Totals::new(&query, START.0);
    let leases = MAX_ROWS as u64 + 5;
    for lease in 1..=leases {
        let changes = changes_of(1, START.0, "red", lease, lease);
        let (key, amount) = changes.sums.first_key_value().unwrap();
        totals.add(key.time / HOURS_A_DAY, key, amount);
    }
    let devices = SumKey {
        time: 0,
        subject: Subject::Devices,
        kind: "flex".into(),
    };
    totals.add(0, &devices, &Amount::of_device(17));
    let reply = totals.into_reply(START);
    assert_eq!((reply.rows.len(), reply.other_rows), (MAX_ROWS, 5));
    assert_eq!(reply.rows[0].lease_id, leases);
    assert_eq!(reply.others.unwrap().ops, 1 + 2 + 3 + 4 + 5);
    assert_eq!(reply.total.unwrap().ops, leases * (leases + 1) / 2);
    assert_eq!(reply.devices_busy_us, 17);
}

#[test]
fn without_columns_there_is_a_total_only() {
    let mut rig = StoreRig::new();
    rig.store
        .write(&changes_of(1, START.0, "red", 1, 5))
        .unwrap();
    let sums = rig.sums(START, &[]);
    assert_eq!((sums.rows.len(), sums.total.unwrap().ops), (0, 5));
}
