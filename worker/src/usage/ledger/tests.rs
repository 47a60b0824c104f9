use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const A: LeaseId = LeaseId(1);
const B: LeaseId = LeaseId(2);
const MEMORY: u64 = 1000;
const SECOND_US: u64 = 1_000_000;

fn grant(device: u32, count: u64) -> DeviceGrant {
    DeviceGrant {
        device_index: device,
        grant: Some(GrantNumber { term: 1, count }.into()),
        share: None,
    }
}

/// A device that has worked for the lease all the time, with its memory full.
fn busy(seconds: u64) -> ProcessCounters {
    ProcessCounters {
        used: UsageCounters {
            held_us: 0,
            busy_us: seconds * SECOND_US,
            byte_seconds: seconds * MEMORY,
            moved_bytes: seconds,
            ops: seconds,
        },
        device_busy_us: seconds * SECOND_US,
    }
}

/// Returns lease, device, count of the grant, seconds of holding, of work, and whether it is released.
fn summary(usage: &[GrantUsage]) -> Vec<(u64, u32, u64, u64, u64, bool)> {
    let rows = usage.iter().map(|it| {
        let (grant, used) = (it.grant.unwrap(), it.used.unwrap());
        let count = number(grant.grant).count;
        let (held, busy) = (used.held_us / SECOND_US, used.busy_us / SECOND_US);
        assert_eq!((used.ops, used.moved_bytes), (busy, busy));
        assert_eq!(used.byte_seconds, busy * MEMORY);
        (
            it.lease_id,
            grant.device_index,
            count,
            held,
            busy,
            it.released,
        )
    });
    rows.collect()
}

#[test]
fn processes_of_a_lease_add_up() {
    let (mut ledger, start) = (UsageLedger::default(), Instant::now());
    let at = |seconds| start + Duration::from_secs(seconds);
    ledger.granted(at(0), A, &grant(0, 1));
    ledger.granted(at(1), A, &grant(0, 1));
    ledger.reported(at(10), A, 0, MEMORY, busy(4));
    ledger.process_exited(at(11), A);
    ledger.reported(at(20), A, 0, MEMORY, busy(2));
    assert_eq!(summary(&ledger.usage(at(21))), [(1, 0, 1, 21, 6, false)]);
    // The device goes to another lease once it is released.
    ledger.released(at(30), A);
    ledger.granted(at(31), B, &grant(0, 2));
    ledger.reported(at(33), B, 0, MEMORY, busy(1));
    let expected = [(2, 0, 2, 9, 1, false), (1, 0, 1, 30, 6, true)];
    assert_eq!(summary(&ledger.usage(at(40))), expected);
    assert_eq!(ledger.device_busy_us(0), 7 * SECOND_US);
    assert_eq!(ledger.device_busy_us(1), 0);
    ledger.recorded(&[grant(0, 2), grant(1, 1)]);
    assert_eq!(summary(&ledger.usage(at(40))), expected, "other grants");
    ledger.recorded(&[grant(0, 1)]);
    assert_eq!(summary(&ledger.usage(at(40))), expected[..1]);
}

#[test]
fn later_grant_of_the_same_lease_counts_by_itself() {
    let (mut ledger, start) = (UsageLedger::default(), Instant::now());
    let at = |seconds| start + Duration::from_secs(seconds);
    ledger.granted(at(0), A, &grant(0, 1));
    ledger.reported(at(5), A, 0, MEMORY, busy(5));
    ledger.granted(at(6), A, &grant(0, 7));
    ledger.reported(at(8), A, 0, MEMORY, busy(1));
    let expected = [(1, 0, 7, 4, 1, false), (1, 0, 1, 6, 5, true)];
    assert_eq!(summary(&ledger.usage(at(10))), expected);
}

#[test]
fn leases_that_share_a_device_count_by_themselves() {
    let (mut ledger, start) = (UsageLedger::default(), Instant::now());
    let at = |seconds| start + Duration::from_secs(seconds);
    let share_of = |lane, permille, count| DeviceGrant {
        share: Some(DeviceShare {
            permille,
            memory_bytes: MEMORY / 2,
            lane,
        }),
        ..grant(0, count)
    };
    let grants = [share_of(1, 300, 1), share_of(2, 700, 2)];
    ledger.granted(at(0), A, &grants[0]);
    ledger.granted(at(10), B, &grants[1]);
    // A has the device alone at first, and the two take turns then.
    ledger.reported(at(20), A, 0, MEMORY, busy(14));
    ledger.reported(at(20), B, 0, MEMORY, busy(6));
    // Each is counted as having its part of the device, whatever it gets.
    let expected = [(1, 0, 1, 6, 14, false), (2, 0, 2, 7, 6, false)];
    assert_eq!(summary(&ledger.usage(at(20))), expected);
    assert_eq!(ledger.usage(at(20))[0].grant, Some(grants[0]));
    ledger.released(at(30), A);
    ledger.reported(at(40), B, 0, MEMORY, busy(26));
    let usage = ledger.usage(at(40));
    let expected = [(2, 0, 2, 21, 26, false), (1, 0, 1, 9, 14, true)];
    assert_eq!(summary(&usage), expected);
    let by_leases: u64 = usage.iter().map(|it| it.used.unwrap().busy_us).sum();
    assert_eq!(ledger.device_busy_us(0), by_leases);
    // The scheduler may name a grant without its share.
    ledger.recorded(&[grant(0, 1)]);
    assert_eq!(summary(&ledger.usage(at(40))), expected[..1]);
}

#[test]
fn process_cannot_claim_more_than_it_had_nor_take_back() {
    let (mut ledger, start) = (UsageLedger::default(), Instant::now());
    let at = |seconds| start + Duration::from_secs(seconds);
    ledger.granted(at(0), A, &grant(0, 1));
    let mut false_counters = busy(1_000_000);
    (false_counters.used.ops, false_counters.used.moved_bytes) = (10, 10);
    ledger.reported(at(10), A, 0, MEMORY, false_counters);
    assert_eq!(summary(&ledger.usage(at(10))), [(1, 0, 1, 10, 10, false)]);
    ledger.reported(at(20), A, 0, MEMORY, busy(0));
    assert_eq!(summary(&ledger.usage(at(20))), [(1, 0, 1, 20, 10, false)]);
    // It has no grant of this device, or none any more.
    ledger.reported(at(20), A, 1, MEMORY, busy(5));
    ledger.reported(at(20), B, 0, MEMORY, busy(5));
    assert_eq!(ledger.device_busy_us(0), 10 * SECOND_US);
    assert_eq!(ledger.device_busy_us(1), 0);
}

#[test]
fn process_cannot_bring_sums_to_their_largest_number() {
    for seconds in [0, 1, 3600, 5 * 365 * 24 * 3600] {
        let (mut ledger, start) = (UsageLedger::default(), Instant::now());
        ledger.granted(start, A, &grant(0, 1));
        let mut false_counters = busy(0);
        (false_counters.used.ops, false_counters.used.moved_bytes) = (u64::MAX, u64::MAX);
        let now = start + Duration::from_secs(seconds);
        ledger.reported(now, A, 0, MEMORY, false_counters);
        let used = ledger.usage(now)[0].used.unwrap();
        assert_eq!(used.ops, seconds * MAX_OPS_PER_S);
        assert_eq!(used.moved_bytes, seconds * MAX_MOVED_PER_S);
    }
}

#[test]
fn number_of_released_grants_is_bounded() {
    let (mut ledger, now) = (UsageLedger::default(), Instant::now());
    for count in 0..=MAX_RELEASED as u64 {
        ledger.granted(now, A, &grant(0, count));
        ledger.released(now, A);
    }
    let usage = ledger.usage(now);
    assert_eq!(usage.len(), MAX_RELEASED);
    assert_eq!(number(usage[0].grant.unwrap().grant).count, 1);
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Work(u64),
    Exit,
    Release,
    Record,
}

proptest! {
    /// Whatever processes end in between, the scheduler gets what they have counted, once.
    #[test]
    fn nothing_is_lost_or_counted_twice(steps in prop::collection::vec(prop_oneof![
        4 => (0..5u64).prop_map(Step::Work),
        1 => Just(Step::Exit),
        1 => Just(Step::Release),
        2 => Just(Step::Record),
    ], 0..60)) {
        let (mut ledger, mut now) = (UsageLedger::default(), Instant::now());
        let (mut worked, mut in_process, mut number_of_grant) = (0, 0, 1);
        // What the scheduler has on disk, and what it has heard last of the others.
        let (mut recorded, mut known) = (0, BTreeSet::new());
        ledger.granted(now, A, &grant(0, number_of_grant));
        for step in steps {
            now += Duration::from_secs(5);
            match step {
                Step::Work(seconds) => {
                    worked += seconds;
                    in_process += seconds;
                    ledger.reported(now, A, 0, MEMORY, busy(in_process));
                }
                Step::Exit => {
                    in_process = 0;
                    ledger.process_exited(now, A);
                }
                Step::Release => {
                    in_process = 0;
                    number_of_grant += 1;
                    ledger.released(now, A);
                    ledger.granted(now, A, &grant(0, number_of_grant));
                }
                Step::Record => {
                    let usage = ledger.usage(now);
                    let released: Vec<_> = usage.iter().filter(|it| it.released).collect();
                    for it in &released {
                        prop_assert!(known.insert(number(it.grant.unwrap().grant)));
                        recorded += it.used.unwrap().busy_us / SECOND_US;
                    }
                    let grants: Vec<_> = released.iter().filter_map(|it| it.grant).collect();
                    ledger.recorded(&grants);
                }
            }
            let usage = ledger.usage(now);
            let reported: u64 = usage.iter().map(|it| it.used.unwrap().busy_us / SECOND_US).sum();
            prop_assert_eq!(recorded + reported, worked);
            prop_assert_eq!(ledger.device_busy_us(0), worked * SECOND_US);
        }
    }
}
