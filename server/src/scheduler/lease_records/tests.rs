use std::{fs, os::unix::fs::PermissionsExt};

use tensord_proto::{
    grant::GrantNumber,
    ids::{ClientId, StoreId, WorkerId},
    share::DeviceShare,
};
use tensord_scheduler::{
    Amounts, DeviceRef, Durability, GrantedDevice, RecordedKeeper, RecordedStanding, RecordedStore,
    Requirement, Share, SuspendedPart, Suspender,
};

use super::*;

const REQUIREMENT: Requirement = Requirement {
    fingerprint: [9; 16],
    kind: None,
    smallest_bytes: 1 << 30,
    largest_bytes: u64::MAX,
    share: Some(SHARE),
};

const SHARE: Share = Share {
    permille: 250,
    memory_bytes: 1 << 30,
};

fn record(standing: RecordedStanding) -> LeaseRecord {
    LeaseRecord {
        owner: ClientId(u64::MAX),
        tenant: Some("red".into()),
        charge: Amounts {
            permille: [("cuda".into(), 1250)].into(),
            all_permille: 1250,
            memory_bytes: 160 << 30,
        },
        is_reclaimed: true,
        epoch: 3,
        durability: Durability::Continue,
        recover_within: Some(Duration::from_millis(1_500)),
        time_left: Some(Duration::from_millis(90_000)),
        is_spot: true,
        may_end: true,
        standing,
        devices: vec![GrantedDevice {
            device_ref: DeviceRef {
                worker: WorkerId(1),
                index: 2,
            },
            grant: GrantNumber { term: 4, count: 5 },
            share: Some(DeviceShare {
                permille: SHARE.permille,
                memory_bytes: SHARE.memory_bytes,
                lane: 3,
            }),
        }],
        keepers: vec![RecordedKeeper {
            source: WorkerId(1),
            part: 1,
            keeper: WorkerId(6),
            assignment: (4 << 32) + 7,
            requirement: REQUIREMENT,
            is_kept: true,
        }],
        stored: vec![RecordedStore {
            source: WorkerId(1),
            store: StoreId(u64::MAX),
            requirement: REQUIREMENT,
        }],
        parts: vec![SuspendedPart {
            source: WorkerId(1),
            devices: 2,
            requirement: REQUIREMENT,
            holders: vec![WorkerId(6), WorkerId(1)],
            store: Some(StoreId(7)),
        }],
    }
}

fn records() -> Vec<(LeaseId, LeaseRecord)> {
    let cause = Some("worker \"a\" was lost".to_owned());
    let standings = [
        RecordedStanding::Running,
        RecordedStanding::Lost("it is gone".into()),
        RecordedStanding::Suspended(Suspender::Administrator),
        RecordedStanding::Suspended(Suspender::Client),
        RecordedStanding::Suspended(Suspender::Idleness),
        RecordedStanding::Resuming(cause),
        RecordedStanding::Resuming(None),
    ];
    (1..).map(LeaseId).zip(standings.map(record)).collect()
}

fn change(lease: LeaseId, record: Option<LeaseRecord>) -> RecordChange {
    RecordChange {
        lease,
        record,
        is_urgent: false,
    }
}

fn changes(records: Vec<(LeaseId, LeaseRecord)>) -> Vec<RecordChange> {
    let records = records.into_iter();
    let change = |(lease, record)| change(lease, Some(record));
    records.map(change).collect()
}

fn state() -> (tempfile::TempDir, StateDir) {
    let directory = tempfile::tempdir().unwrap();
    let state = StateDir::open(directory.path()).unwrap();
    (directory, state)
}

#[test]
fn records_outlive_the_process() {
    let (directory, state) = state();
    let opened = LeaseRecords::open(&state).unwrap();
    assert_eq!(opened.known, []);
    opened.records.queue(changes(records()));
    drop(opened);
    let mode = fs::metadata(directory.path().join(FILE))
        .unwrap()
        .permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    let opened = LeaseRecords::open(&state).unwrap();
    assert_eq!(opened.known, records());
    // The latest record of a lease counts.
    let later = record(RecordedStanding::Running);
    opened
        .records
        .queue(vec![change(LeaseId(1), None), change(LeaseId(2), None)]);
    opened
        .records
        .queue(vec![change(LeaseId(2), Some(later.clone()))]);
    drop(opened);
    let mut expected = records();
    expected.remove(0);
    expected[0].1 = later;
    assert_eq!(LeaseRecords::open(&state).unwrap().known, expected);
}

#[tokio::test]
async fn written_records_are_on_disk_although_the_process_dies() {
    let (_directory, state) = state();
    let opened = LeaseRecords::open(&state).unwrap();
    opened.records.queue(changes(records()));
    opened.records.written().await;
    // A copy of the file is what the next process would find.
    let (copy, copied) = self::state();
    fs::copy(state.path().join(FILE), copy.path().join(FILE)).unwrap();
    assert_eq!(LeaseRecords::open(&copied).unwrap().known, records());
}

/// A record as the version before shares has written it.
const OLD_RECORD: &str = r#"{"owner":7,"tenant":"red","charge":{"devices":{"cuda":2},"memory_bytes":9},
    "is_reclaimed":false,"epoch":3,"durability":"auto","recover_within_ms":null,"time_left_ms":null,
    "is_spot":false,"standing":"running","devices":[{"worker":1,"index":2,"grant":[4,5]}],
    "keepers":[],"stored":[],"parts":[{"source":1,"devices":2,"requirement":{"fingerprint":
    [9,9,9,9,9,9,9,9,9,9,9,9,9,9,9,9],"kind":null,"smallest_bytes":1,"largest_bytes":2},"holders":[]}]}"#;

#[test]
fn record_of_an_earlier_version_is_of_whole_devices() {
    let record = format::decode(OLD_RECORD.as_bytes()).unwrap();
    let expected = Amounts {
        permille: [("cuda".into(), 2000)].into(),
        all_permille: 2000,
        memory_bytes: 9,
    };
    assert_eq!(record.charge, expected);
    assert_eq!(record.devices[0].share, None);
    assert_eq!(record.parts[0].requirement.share, None);
    let again = format::decode(&format::encode(&record)).unwrap();
    assert_eq!(again, record);
}

#[test]
fn damaged_file_is_put_aside() {
    for damage in [0, 5_000] {
        let (directory, state) = state();
        let opened = LeaseRecords::open(&state).unwrap();
        opened.records.queue(changes(records()));
        drop(opened);
        let path = directory.path().join(FILE);
        let mut bytes = fs::read(&path).unwrap();
        bytes[damage..].fill(0x5a);
        fs::write(&path, &bytes).unwrap();
        let opened = LeaseRecords::open(&state).unwrap();
        assert_eq!(opened.known, []);
        assert_eq!(
            fs::read(path.with_extension("redb.damaged")).unwrap(),
            bytes
        );
        opened.records.queue(changes(records()));
        drop(opened);
        assert_eq!(LeaseRecords::open(&state).unwrap().known, records());
    }
}

#[test]
fn record_of_an_unknown_version_is_skipped() {
    let (_directory, state) = state();
    let opened = LeaseRecords::open(&state).unwrap();
    opened.records.queue(changes(records()));
    drop(opened);
    let (database, _) = open_database(state.private_file(FILE).unwrap()).unwrap();
    let transaction = database.begin_write().unwrap();
    {
        let mut table = transaction.open_table(LEASES).unwrap();
        table
            .insert(1, &br#"{"owner":1,"standing":"new"}"#[..])
            .unwrap();
        table.insert(2, &b"no JSON"[..]).unwrap();
    }
    transaction.commit().unwrap();
    drop(database);
    for _ in 0..2 {
        let opened = LeaseRecords::open(&state).unwrap();
        assert_eq!(opened.known, records()[2..]);
    }
    let (_, left) = open_database(state.private_file(FILE).unwrap()).unwrap();
    assert_eq!(left.len(), records()[2..].len(), "the others are dropped");
}

#[test]
fn urgent_record_is_on_disk_at_once() {
    let (_directory, state) = state();
    let opened = LeaseRecords::open(&state).unwrap();
    let mut urgent = changes(records());
    urgent[0].is_urgent = true;
    // A slow disk takes longer than the queue waits.
    let is_written = (0..100).any(|_| {
        opened.records.queue(urgent.clone());
        let pending = opened.records.shared.lock();
        pending.written == pending.queued && pending.changes.is_empty()
    });
    assert!(is_written);
}

#[tokio::test]
async fn writing_goes_on_after_an_error() {
    let (directory, state) = state();
    let opened = LeaseRecords::open(&state).unwrap();
    let path = directory.path().join(FILE);
    // The writer opens the file again, and finds a directory.
    let aside = directory.path().join("aside");
    fs::rename(&path, &aside).unwrap();
    fs::create_dir(&path).unwrap();
    let writer = Writer {
        shared: opened.records.shared.clone(),
        path: path.clone(),
        database: None,
        written: watch::channel(0).0,
    };
    let mut failing = writer;
    let some = Changes::from([(LeaseId(1), Some(records().remove(0).1))]);
    assert!(failing.write(&some).is_err());
    fs::remove_dir(&path).unwrap();
    drop(opened);
    fs::rename(&aside, &path).unwrap();
    assert!(failing.write(&some).is_ok());
    drop(failing);
    assert_eq!(LeaseRecords::open(&state).unwrap().known, records()[..1]);
}

#[test]
fn ends_of_leases_without_a_record_take_no_memory() {
    let mut pending = Pending::default();
    for lease in 0..1000 {
        pending.add(LeaseId(lease), None);
    }
    assert!(pending.changes.is_empty());
    pending.add(LeaseId(7), Some(records().remove(0).1));
    pending.add(LeaseId(7), None);
    assert_eq!(pending.changes, Changes::from([(LeaseId(7), None)]));
}

#[test]
fn driver_waits_within_its_budget_only() {
    // Without a writer, nothing is ever on disk.
    let records = LeaseRecords {
        shared: Arc::default(),
        written: watch::channel(0).1,
        writer: None,
    };
    let mut urgent = changes(self::records());
    urgent[0].is_urgent = true;
    let has_timed_out = || {
        records.queue(urgent.clone());
        records.shared.lock().is_slow
    };
    records.shared.lock().wait_budget.spend(Duration::MAX);
    assert!(!has_timed_out(), "no wait, so nothing is known of the disk");
    records.shared.lock().wait_budget = WaitBudget::default();
    assert!(has_timed_out());
}
