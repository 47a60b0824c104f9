//! Durable leases: who keeps their snapshots. `moves` has the tests of how they move.

use super::*;

/// Requests an exact device for a durable lease, whose id is ten times that of the request.
pub(super) fn request_durable(id: u64, request: u64) -> Event {
    request_durable_of(1, id, request)
}

/// As [`request_durable`], for a lease of several devices.
pub(super) fn request_durable_of(devices: u32, id: u64, request: u64) -> Event {
    request_for(
        id,
        request,
        Demand {
            durability: Durability::Auto,
            ..demand_of(devices, Some("flex"))
        },
    )
}

pub(super) fn granted_exact(client: u64, request: u64, worker: u64, index: u32) -> Command {
    granted(client, request, &[(worker, index, exact(16))])
}

pub(super) fn moved(client: u64, lease: u64, epoch: u64, worker: u64, index: u32) -> Command {
    moved_to(client, lease, epoch, worker, &[index])
}

/// A lease has moved to these devices of a worker.
pub(super) fn moved_to(
    client: u64,
    lease: u64,
    epoch: u64,
    worker: u64,
    indices: &[u32],
) -> Command {
    let leased = |&index: &u32| LeasedDevice {
        device_ref: device_ref(worker, index),
        grant: GrantNumber::ZERO,
        device: exact(16),
        worker: endpoint(worker),
        share: None,
    };
    Command::Moved {
        client: ClientId(client),
        lease: LeaseId(lease),
        epoch,
        devices: indices.iter().map(leased).collect(),
        load_stored: BTreeSet::new(),
    }
}

pub(super) fn keep(lease: u64, source: u64, keeper: u64) -> Command {
    keep_part(lease, 0, source, keeper)
}

pub(super) fn keep_part(lease: u64, index: u32, source: u64, keeper: u64) -> Command {
    let peer = |worker| Peer {
        worker: WorkerId(worker),
        endpoint: endpoint(worker),
    };
    Command::KeepSnapshots {
        part: part(lease, index),
        source: peer(source),
        keeper: peer(keeper),
        assignment: 0,
    }
}

pub(super) fn drop_snapshots(keeper: u64, lease: u64) -> Command {
    Command::DropSnapshots {
        keeper: WorkerId(keeper),
        lease: LeaseId(lease),
        part: None,
    }
}

pub(super) fn interrupted(client: u64, lease: u64, worker: u64, keeper: u64) -> Command {
    Command::Interrupted {
        client: ClientId(client),
        lease: LeaseId(lease),
        reason: not_replaced(worker, keeper),
    }
}

pub(super) fn not_replaced(worker: u64, keeper: u64) -> EndReason {
    not_replaced_after(lost(worker), keeper)
}

pub(super) fn not_replaced_after(gone: EndReason, keeper: u64) -> EndReason {
    EndReason::NotReplaced {
        gone: Box::new(gone),
        places: SnapshotPlaces::Keeper(format!("w{keeper}")),
    }
}

/// A worker that had the snapshots of a lease is lost.
pub(super) fn snapshots_lost(worker: u64) -> EndReason {
    EndReason::SnapshotsLost {
        worker: WorkerId(worker),
        name: format!("w{worker}"),
    }
}

pub(super) fn part(lease: u64, index: u32) -> PartId {
    let lease = LeaseId(lease);
    PartId { lease, index }
}

/// A worker reports that the keepers of these leases have the snapshots of their first part.
pub(super) fn kept(worker_id: u64, leases: &[(u64, u64)]) -> Event {
    let parts: Vec<_> = leases
        .iter()
        .map(|&(lease, keeper)| (lease, 0, keeper))
        .collect();
    kept_parts(worker_id, &parts)
}

/// A worker reports that the keepers of these parts of leases have their snapshots.
pub(super) fn kept_parts(worker_id: u64, leases: &[(u64, u32, u64)]) -> Event {
    let is_here = |(.., keeper): &&(u64, u32, u64)| *keeper == worker_id;
    let here = leases.iter().filter(is_here);
    let here = here.map(|&(lease, ..)| (LeaseId(lease), true));
    let others = leases.iter().filter(|kept| !is_here(kept));
    let at_keepers = others.map(|&(lease, index, keeper)| assigned(lease, index, keeper));
    let at_keepers: Vec<_> = at_keepers.collect();
    let kept = WorkerEvent::SnapshotsKept {
        handed_over: handed_over(&at_keepers, HandoverOutcome::Done),
        refused: Vec::new(),
        at_keepers,
        here: here.collect(),
        in_store: BTreeSet::new(),
    };
    worker(worker_id, kept)
}

/// Reports of handovers to these workers.
fn handed_over(keepers: &[AssignedKeeper], outcome: HandoverOutcome) -> Vec<HandedOver> {
    let handed_over = keepers.iter().map(|&to| HandedOver { to, outcome });
    handed_over.collect()
}

/// A keeper in a report, by its present assignment.
pub(super) fn assigned(lease: u64, index: u32, worker: u64) -> AssignedKeeper {
    AssignedKeeper {
        part: part(lease, index),
        worker: WorkerId(worker),
        assignment: 0,
    }
}

/// A worker reports that it could not hand the first part of a lease over.
pub(super) fn not_handed_over(
    worker_id: u64,
    lease: u64,
    keeper: u64,
    outcome: HandoverOutcome,
) -> Event {
    let kept = WorkerEvent::SnapshotsKept {
        at_keepers: Vec::new(),
        handed_over: handed_over(&[assigned(lease, 0, keeper)], outcome),
        refused: Vec::new(),
        here: BTreeMap::new(),
        in_store: BTreeSet::new(),
    };
    worker(worker_id, kept)
}

/// A worker reports that the keeper of a lease has refused a snapshot.
fn refused(worker_id: u64, lease: u64, keeper: u64) -> Event {
    let refused = WorkerEvent::SnapshotsKept {
        at_keepers: Vec::new(),
        refused: vec![assigned(lease, 0, keeper)],
        handed_over: Vec::new(),
        here: BTreeMap::new(),
        in_store: BTreeSet::new(),
    };
    worker(worker_id, refused)
}

/// A client reports whether it could go on with a lease from snapshots.
pub(super) fn restorable(id: u64, lease: u64, is_restorable: bool) -> Event {
    let lease = LeaseId(lease);
    let event = ClientEvent::Restorable {
        lease,
        is_restorable,
    };
    client(id, event)
}

/// Worker 1 runs lease 10 of client 1, and worker 2 has joined after that and keeps its
/// snapshots.
pub(super) fn kept_by_worker_2() -> Vec<Step> {
    vec![
        (0, join(1, &[exact(16)]), vec![]),
        (0, attach(1), vec![]),
        (1, request_durable(1, 1), vec![granted_exact(1, 1, 1, 0)]),
        (1, restorable(1, 10, true), vec![]),
        (2, join(2, &[exact(16)]), vec![keep(10, 1, 2)]),
    ]
}

/// As before, and client 2 has the device of worker 2 when worker 1 is lost.
pub(super) fn lost_while_worker_2_is_busy() -> Vec<Step> {
    let mut steps = kept_by_worker_2();
    steps.extend([
        (3, attach(2), vec![]),
        (3, request(2, 2, 1), vec![granted_exact(2, 2, 2, 0)]),
        (4, request(2, 3, 1), vec![queued(2, 3, 1)]),
        (5, worker_disconnected(1), vec![]),
        (5_000, tick(), vec![interrupted(1, 10, 1, 2)]),
    ]);
    steps
}

/// Until there is one, it is any other worker.
#[test]
fn keeper_is_another_worker_with_an_equal_device() {
    check([
        (0, join(1, &[exact(16)]), vec![]),
        (0, join(2, &[flex(16), cuda(16)]), vec![]),
        (0, attach(1), vec![]),
        (
            1,
            request_durable(1, 1),
            vec![granted_exact(1, 1, 1, 0), keep(10, 1, 2)],
        ),
        (
            2,
            join(3, &[exact(16)]),
            vec![drop_snapshots(2, 10), keep(10, 1, 3)],
        ),
        (3, join(4, &[exact(16)]), vec![]),
        (4, worker_disconnected(3), vec![]),
        (2_001, beat(1), vec![]),
        // It may be lost.
        (2_002, beat(1), vec![keep(10, 1, 4)]),
        (2_005, join(3, &[exact(16)]), vec![]),
        (
            2_006,
            leaving(4),
            vec![drop_snapshots(4, 10), keep(10, 1, 3)],
        ),
        (2_007, worker_disconnected(3), vec![]),
        // The keeper is back on a new stream.
        (2_008, join(3, &[exact(16)]), vec![keep(10, 1, 3)]),
        // A keeper that joins now would get nothing.
        (2_009, worker_disconnected(1), vec![]),
        (2_009, join(5, &[exact(16)]), vec![]),
        (2_010, join(1, &[exact(16)]), vec![keep(10, 1, 3)]),
        (
            2_011,
            release(1, 10),
            vec![end_lease(1, 10), drop_snapshots(3, 10)],
        ),
    ]);
}

#[test]
fn keeper_that_refuses_a_snapshot_gives_way_to_another() {
    let refusals = [
        // There is no other one.
        (3, refused(1, 10, 2), vec![]),
        (
            4,
            join(3, &[flex(16)]),
            vec![drop_snapshots(2, 10), keep(10, 1, 3)],
        ),
        // Of an earlier keeper.
        (5, refused(1, 10, 2), vec![]),
        (
            6,
            join(4, &[exact(16)]),
            vec![drop_snapshots(3, 10), keep(10, 1, 4)],
        ),
        (
            7,
            refused(1, 10, 4),
            vec![drop_snapshots(4, 10), keep(10, 1, 3)],
        ),
        // Now worker 2 may have room.
        (300_002, beat(1), vec![]),
        (
            300_003,
            beat(1),
            vec![drop_snapshots(3, 10), keep(10, 1, 2)],
        ),
    ];
    check(kept_by_worker_2().into_iter().chain(refusals));
}

/// As if the keeper had given way to another one, and were the keeper again.
#[test]
fn report_of_another_assignment_does_not_count() {
    let of_another = WorkerEvent::SnapshotsKept {
        at_keepers: vec![AssignedKeeper {
            assignment: 1,
            ..assigned(10, 0, 2)
        }],
        refused: Vec::new(),
        handed_over: Vec::new(),
        here: BTreeMap::new(),
        in_store: BTreeSet::new(),
    };
    let move_lease = || Event::MoveLease { lease: LeaseId(10) };
    let reports = [
        (3, worker(1, of_another), vec![]),
        (4, move_lease(), vec![]),
        (5, kept(1, &[(10, 2)]), vec![]),
        (
            6,
            move_lease(),
            vec![end_lease(1, 10), moved(1, 10, 1, 2, 0)],
        ),
    ];
    check(kept_by_worker_2().into_iter().chain(reports));
}

#[test]
fn assignment_has_a_new_number_if_the_keeper_was_another_one_before() {
    let mut engine = Engine::new(Options::default(), TERM, at(0));
    let mut number = |event| {
        let commands = engine.handle(event, at(1));
        let number = commands.into_iter().find_map(|command| match command {
            Command::KeepSnapshots {
                keeper, assignment, ..
            } => Some((keeper.worker.0, assignment)),
            _ => None,
        });
        number.unwrap_or_default()
    };
    number(join(1, &[exact(16)]));
    number(join(2, &[exact(16)]));
    number(attach(1));
    let first = number(request_durable(1, 1));
    assert_eq!(first.0, 2);
    assert_eq!(first.1 >> u32::BITS, TERM);
    // It is announced again on a new stream.
    number(worker_disconnected(2));
    assert_eq!(number(join(2, &[exact(16)])), first);
    number(join(3, &[exact(16)]));
    let other = number(leaving(2));
    assert_eq!(other, (3, first.1 + 1));
    number(worker_left(2));
    number(join(2, &[exact(16)]));
    assert_eq!(number(leaving(3)), (2, first.1 + 2));
}

#[test]
fn workers_share_the_snapshots() {
    check([
        (0, join(1, &[exact(16), exact(16)]), vec![]),
        (0, join(2, &[exact(16)]), vec![]),
        (0, out_of_service(2, &[0]), vec![]),
        (0, join(3, &[exact(16)]), vec![]),
        (0, out_of_service(3, &[0]), vec![]),
        (0, attach(1), vec![]),
        (
            1,
            request_durable(1, 1),
            vec![granted_exact(1, 1, 1, 0), keep(10, 1, 2)],
        ),
        (
            2,
            request_durable(1, 2),
            vec![granted_exact(1, 2, 1, 1), keep(20, 1, 3)],
        ),
    ]);
}
