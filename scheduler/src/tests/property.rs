//! Property tests: random events in random order keep the invariants.

use proptest::collection::vec;
use proptest::prelude::*;

use super::actions::KeptRecords;
use super::world::World;
use super::*;

pub(super) const WORKERS: usize = 4;
pub(super) const CLIENTS: usize = 3;

/// An action in the world. `nth` and `index` may exceed the number of items; `World` takes
/// them modulo that number.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Join {
        worker: usize,
        changed: bool,
    },
    /// A worker joins and reports a lease with the id of a request that waits.
    JoinFalsely {
        worker: usize,
        nth: usize,
    },
    Beat {
        worker: usize,
    },
    Leaving {
        worker: usize,
    },
    WorkerLeft {
        worker: usize,
    },
    Drain {
        worker: usize,
        is_drained: bool,
    },
    MoveLease {
        nth: usize,
    },
    EndLease {
        nth: usize,
    },
    SetPriority {
        nth: usize,
        priority: i32,
    },
    SuspendLease {
        nth: usize,
        by: Suspender,
    },
    ResumeLease {
        nth: usize,
        by: Suspender,
    },
    Restorable {
        client: usize,
        nth: usize,
        is_restorable: bool,
    },
    SnapshotsKept {
        worker: usize,
        all: bool,
    },
    Interrupt {
        worker: usize,
    },
    /// Some leases have something to do at a worker.
    Work {
        worker: usize,
        leases: u32,
    },
    ReportIdle {
        worker: usize,
    },
    /// All workers report which leases are idle.
    AllReportIdle,
    /// Workers and clients report that all leases could go on from snapshots.
    AllKept,
    WorkerDisconnected {
        worker: usize,
    },
    CloseSessions {
        worker: usize,
    },
    Finish {
        worker: usize,
        devices: u32,
    },
    ToggleBroken {
        worker: usize,
        device: u32,
    },
    Attach {
        client: usize,
        give_up: usize,
        outdated: usize,
    },
    ClientDisconnected {
        client: usize,
    },
    Request {
        client: usize,
        demand: Demand,
        priority: i32,
    },
    SetPolicy {
        which: usize,
    },
    RequestAgain {
        client: usize,
    },
    Cancel {
        client: usize,
        nth: usize,
    },
    Missing {
        nth: usize,
        which: usize,
        /// Of which worker; `None` if the client reports it.
        by: Option<usize>,
    },
    Unreachable {
        client: usize,
        nth: usize,
    },
    Release {
        client: usize,
        nth: usize,
    },
    OldStreamEvents {
        index: usize,
    },
    Wait {
        millis: u64,
    },
    Oversleep {
        millis: u64,
    },
    Suspend {
        millis: u64,
    },
    Restart {
        sessions_closed: bool,
        kept: KeptRecords,
    },
}

pub(super) const POLICIES: usize = 4;

/// Returns guarantees, limits and weights of the tenants of the clients.
fn policy(which: usize) -> Policy {
    let kinds = |kinds: &[(&str, u32)]| {
        let kinds = kinds.iter().map(|(kind, count)| ((*kind).into(), *count));
        kinds.collect::<BTreeMap<String, u32>>()
    };
    let tenant = |weight, guaranteed: &[_], limit: &[_], gib: Option<u64>| TenantPolicy {
        weight,
        guaranteed: kinds(guaranteed),
        limit: TenantLimit {
            devices: kinds(limit),
            memory_bytes: gib.map(|gib| gib << 30),
        },
    };
    match which {
        0 => Policy::new(),
        1 => Policy::from([
            ("a".into(), tenant(3, &[], &[("cuda", 1)], None)),
            (
                "b".into(),
                tenant(1, &[("cuda", 2), ("flex", 1)], &[], None),
            ),
        ]),
        2 => Policy::from([
            (
                "a".into(),
                tenant(1, &[("flex", 1), ("vulkan", 1)], &[], None),
            ),
            (
                "b".into(),
                tenant(2, &[("flex", 3), ("vulkan", 2)], &[], None),
            ),
        ]),
        _ => Policy::from([
            ("a".into(), tenant(1, &[("flex", 2)], &[], Some(40))),
            (
                "b".into(),
                tenant(2, &[], &[("flex", 0), ("vulkan", 1)], None),
            ),
        ]),
    }
}

/// Returns the devices of a worker, or different ones if it comes back `changed`. Small ones take no shares.
fn devices(worker: usize, changed: bool) -> Vec<DeviceSpec> {
    let mut devices = all_devices(worker, changed);
    for device in &mut devices {
        device.takes_shares = device.memory_bytes > 8 << 30;
    }
    devices
}

fn all_devices(worker: usize, changed: bool) -> Vec<DeviceSpec> {
    match (worker, changed) {
        (0, false) => vec![exact(16), exact(16), flex(16), gpu(1, 16)],
        (1, false) => vec![exact(16), exact(8), cuda(16), gpu(2, 16), gpu(1, 16)],
        (2, false) => vec![cuda(80), gpu(1, 16)],
        (_, false) => vec![cuda(8), exact(8), gpu(2, 8)],
        (0, true) => vec![],
        (_, true) => vec![exact(16), exact(16), cuda(8)],
    }
}

fn durability() -> impl Strategy<Value = Durability> {
    prop_oneof![
        3 => Just(Durability::Off),
        2 => Just(Durability::Auto),
        1 => Just(Durability::Exact),
        1 => Just(Durability::Continue),
    ]
}

fn duration() -> impl Strategy<Value = Option<Duration>> {
    let seconds = prop_oneof![6 => Just(None), 1 => (1..30_u64).prop_map(Some)];
    seconds.prop_map(|it| it.map(Duration::from_secs))
}

pub(super) fn spot() -> impl Strategy<Value = bool> {
    prop::bool::weighted(0.2)
}

fn may_end() -> impl Strategy<Value = bool> {
    prop::bool::weighted(0.2)
}

pub(super) fn share() -> impl Strategy<Value = Option<u32>> {
    let permille = prop_oneof![2 => Just(250), 1 => Just(500), 1 => 1..1000_u32];
    prop_oneof![3 => Just(None), 1 => permille.prop_map(Some)]
}

fn demand() -> impl Strategy<Value = Demand> {
    let count = prop_oneof![30 => 1..4_u32, 4 => 4..8_u32, 1 => Just(0), 1 => Just(u32::MAX)];
    let kind = prop_oneof![4 => Just(None), 2 => Just(Some("cuda")), 1 => Just(Some("flex"))];
    let gib = prop_oneof![6 => Just(0_u64), 1 => Just(9), 1 => Just(16), 1 => Just(81)];
    let ways = (spot(), may_end(), share());
    (count, kind, gib, durability(), duration(), ways).prop_map(
        |(devices, kind, gib, durability, max_duration, (is_spot, may_end, share_permille))| {
            Demand {
                devices: if share_permille.is_some() { 1 } else { devices },
                kind: kind.map(str::to_owned),
                memory_bytes: gib << 30,
                durability,
                recover_within: None,
                max_duration,
                is_spot,
                may_end,
                share_permille,
            }
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![20 => worker_op(), 32 => client_op(), 8 => time_op()]
}

/// About half of the ops are workers and clients that come back.
fn op_or_restart() -> impl Strategy<Value = Op> {
    let back = prop_oneof![
        (0..WORKERS).prop_map(|worker| Op::Join {
            worker,
            changed: false
        }),
        (0..CLIENTS).prop_map(|client| Op::Attach {
            client,
            give_up: 0,
            outdated: 0
        }),
    ];
    let kept = prop_oneof![
        4 => Just(KeptRecords::All),
        1 => Just(KeptRecords::Earlier),
        1 => Just(KeptRecords::None)
    ];
    let restart = (prop::bool::ANY, kept).prop_map(|(sessions_closed, kept)| Op::Restart {
        sessions_closed,
        kept,
    });
    prop_oneof![10 => op(), 10 => back, 1 => restart]
}

/// Ops after which tenants have devices beyond their guarantees, and others need these.
fn reclaiming_op() -> impl Strategy<Value = Op> {
    let client = || 0..CLIENTS;
    let kind = prop_oneof![2 => Just("flex"), 1 => Just("vulkan")];
    let durability = prop_oneof![4 => Just(Durability::Auto), 1 => Just(Durability::Off)];
    let ways = (spot(), may_end(), share());
    let demand = (1..4_u32, kind, durability, duration(), ways).prop_map(
        |(devices, kind, durability, max_duration, (is_spot, may_end, share_permille))| {
            let devices = if share_permille.is_some() { 1 } else { devices };
            Demand {
                durability,
                max_duration,
                is_spot,
                may_end,
                share_permille,
                ..demand_of(devices, Some(kind))
            }
        },
    );
    let millis = prop_oneof![3 => Just(10_000), 2 => 0..4_000_u64];
    prop_oneof![
        10 => (client(), demand, -1..2).prop_map(
            |(client, demand, priority)| Op::Request { client, demand, priority }
        ),
        4 => Just(Op::AllKept),
        4 => millis.prop_map(|millis| Op::Wait { millis }),
        4 => (0..WORKERS, prop_oneof![3 => Just(u32::MAX), 1 => 0..8_u32])
            .prop_map(|(worker, devices)| Op::Finish { worker, devices }),
        2 => (client(), 0..64_usize).prop_map(|(client, nth)| Op::Release { client, nth }),
        1 => (1..POLICIES).prop_map(|which| Op::SetPolicy { which }),
        1 => (0..CLIENTS).prop_map(|client| Op::Attach {
            client,
            give_up: 0,
            outdated: 0
        }),
        4 => op(),
    ]
}

/// Ops after which leases are idle, and others need their devices.
fn idle_op() -> impl Strategy<Value = Op> {
    let (client, worker) = (|| 0..CLIENTS, || 0..WORKERS);
    let kind = prop_oneof![2 => Just(None), 2 => Just(Some("flex")), 1 => Just(Some("vulkan"))];
    let durability = prop_oneof![6 => Just(Durability::Auto), 1 => Just(Durability::Off)];
    let demand = (1..5_u32, kind, durability).prop_map(|(devices, kind, durability)| Demand {
        devices,
        kind: kind.map(str::to_owned),
        memory_bytes: 0,
        durability,
        recover_within: None,
        max_duration: None,
        is_spot: false,
        may_end: false,
        share_permille: None,
    });
    let millis = prop_oneof![3 => Just(5_000), 2 => 0..4_000_u64];
    prop_oneof![
        10 => (client(), demand).prop_map(
            |(client, demand)| Op::Request { client, demand, priority: 0 }
        ),
        4 => Just(Op::AllKept),
        4 => Just(Op::AllReportIdle),
        2 => worker().prop_map(|worker| Op::ReportIdle { worker }),
        3 => (worker(), 0..16_u32).prop_map(|(worker, leases)| Op::Work { worker, leases }),
        5 => millis.prop_map(|millis| Op::Wait { millis }),
        4 => (worker(), prop_oneof![3 => Just(u32::MAX), 1 => 0..8_u32])
            .prop_map(|(worker, devices)| Op::Finish { worker, devices }),
        3 => (0..64_usize, suspender()).prop_map(|(nth, by)| Op::ResumeLease { nth, by }),
        2 => (client(), 0..64_usize).prop_map(|(client, nth)| Op::Release { client, nth }),
        4 => op(),
    ]
}

fn suspender() -> impl Strategy<Value = Suspender> {
    prop_oneof![Just(Suspender::Administrator), Just(Suspender::Client)]
}

fn worker_op() -> impl Strategy<Value = Op> {
    let worker = || 0..WORKERS;
    let changed = prop::bool::weighted(0.1);
    prop_oneof![
        8 => (worker(), changed).prop_map(|(worker, changed)| Op::Join { worker, changed }),
        1 => (worker(), 0..8_usize).prop_map(|(worker, nth)| Op::JoinFalsely { worker, nth }),
        3 => worker().prop_map(|worker| Op::Beat { worker }),
        1 => worker().prop_map(|worker| Op::Leaving { worker }),
        1 => worker().prop_map(|worker| Op::WorkerLeft { worker }),
        1 => (worker(), prop::bool::ANY)
            .prop_map(|(worker, is_drained)| Op::Drain { worker, is_drained }),
        1 => (0..64_usize).prop_map(|nth| Op::MoveLease { nth }),
        1 => (0..64_usize).prop_map(|nth| Op::EndLease { nth }),
        1 => (0..8_usize, -2..3).prop_map(|(nth, priority)| Op::SetPriority { nth, priority }),
        3 => (0..64_usize, suspender()).prop_map(|(nth, by)| Op::SuspendLease { nth, by }),
        4 => (0..64_usize, suspender()).prop_map(|(nth, by)| Op::ResumeLease { nth, by }),
        3 => (worker(), prop::bool::ANY).prop_map(|(worker, all)| Op::SnapshotsKept { worker, all }),
        3 => worker().prop_map(|worker| Op::Interrupt { worker }),
        2 => worker().prop_map(|worker| Op::ReportIdle { worker }),
        1 => (worker(), 0..16_u32).prop_map(|(worker, leases)| Op::Work { worker, leases }),
        3 => worker().prop_map(|worker| Op::WorkerDisconnected { worker }),
        1 => worker().prop_map(|worker| Op::CloseSessions { worker }),
        8 => (worker(), prop_oneof![3 => Just(u32::MAX), 1 => 0..8_u32])
            .prop_map(|(worker, devices)| Op::Finish { worker, devices }),
        2 => (worker(), 0..3_u32).prop_map(|(worker, device)| Op::ToggleBroken { worker, device }),
    ]
}

fn client_op() -> impl Strategy<Value = Op> {
    let client = || 0..CLIENTS;
    let rarely_some = || prop_oneof![4 => Just(0_usize), 1 => 1..3_usize];
    prop_oneof![
        6 => (client(), rarely_some(), rarely_some())
            .prop_map(|(client, give_up, outdated)| Op::Attach { client, give_up, outdated }),
        2 => client().prop_map(|client| Op::ClientDisconnected { client }),
        18 => (client(), demand(), prop_oneof![3 => Just(0), 1 => -1..2]).prop_map(
            |(client, demand, priority)| Op::Request { client, demand, priority }
        ),
        2 => (0..POLICIES).prop_map(|which| Op::SetPolicy { which }),
        1 => client().prop_map(|client| Op::RequestAgain { client }),
        2 => (client(), 0..8_usize).prop_map(|(client, nth)| Op::Cancel { client, nth }),
        5 => (client(), 0..64_usize).prop_map(|(client, nth)| Op::Unreachable { client, nth }),
        2 => (0..64_usize, 0..4_usize, prop::option::of(0..4_usize))
            .prop_map(|(nth, which, by)| Op::Missing { nth, which, by }),
        5 => (client(), 0..64_usize).prop_map(|(client, nth)| Op::Release { client, nth }),
        4 => (client(), 0..64_usize, prop::bool::weighted(0.8)).prop_map(
            |(client, nth, is_restorable)| Op::Restorable { client, nth, is_restorable }
        ),
        1 => (0..WORKERS).prop_map(|index| Op::OldStreamEvents { index }),
    ]
}

fn time_op() -> impl Strategy<Value = Op> {
    let millis = || prop_oneof![6 => 0..2_000_u64, 2 => Just(5_000), 1 => 20_000..70_000_u64];
    prop_oneof![
        5 => millis().prop_map(|millis| Op::Wait { millis }),
        1 => millis().prop_map(|millis| Op::Oversleep { millis }),
        1 => millis().prop_map(|millis| Op::Suspend { millis }),
    ]
}

fn apply(world: &mut World, op: Op) {
    match op {
        Op::Join { worker, changed } => world.join(worker, devices(worker, changed)),
        Op::JoinFalsely { worker, nth } => world.join_falsely(worker, devices(worker, false), nth),
        Op::Beat { worker } => world.beat(worker),
        Op::Leaving { worker } => world.leaving(worker),
        Op::WorkerLeft { worker } => world.worker_left(worker),
        Op::Drain { worker, is_drained } => world.drain(worker, is_drained),
        Op::MoveLease { nth } => world.move_lease_by_command(nth),
        Op::EndLease { nth } => world.end_lease(nth),
        Op::SetPriority { nth, priority } => world.set_priority(nth, priority),
        Op::SuspendLease { nth, by } => world.suspend_lease(nth, by),
        Op::ResumeLease { nth, by } => world.resume_lease(nth, by),
        Op::Restorable {
            client,
            nth,
            is_restorable,
        } => world.report_restorable(client, nth, is_restorable),
        Op::SnapshotsKept { worker, all } => world.snapshots_kept(worker, all),
        Op::AllKept => world.all_kept(),
        Op::Interrupt { worker } => world.interrupt(worker),
        Op::Work { worker, leases } => world.work(worker, leases),
        Op::ReportIdle { worker } => world.report_idle(worker),
        Op::AllReportIdle => (0..WORKERS).for_each(|worker| world.report_idle(worker)),
        Op::WorkerDisconnected { worker } => world.worker_disconnected(worker),
        Op::CloseSessions { worker } => world.close_sessions(worker),
        Op::Finish { worker, devices } => world.finish(worker, |index| devices >> index & 1 == 1),
        Op::ToggleBroken { worker, device } => world.toggle_broken(worker, device),
        Op::Attach {
            client,
            give_up,
            outdated,
        } => world.attach(client, give_up, outdated),
        Op::ClientDisconnected { client } => world.client_disconnected(client),
        Op::Request {
            client,
            demand,
            priority,
        } => world.request(client, demand, priority),
        Op::SetPolicy { which } => world.set_policy(policy(which)),
        Op::RequestAgain { client } => world.request_again(client),
        Op::Cancel { client, nth } => world.cancel(client, nth),
        Op::Missing { nth, which, by } => world.report_missing(nth, which, by),
        Op::Unreachable { client, nth } => world.report_unreachable(client, nth),
        Op::Release { client, nth } => world.release(client, nth),
        Op::OldStreamEvents { index } => world.send_on_old_stream(index),
        Op::Wait { millis } => world.wait(millis),
        Op::Oversleep { millis } => world.oversleep(millis),
        Op::Suspend { millis } => world.suspend(millis),
        Op::Restart {
            sessions_closed,
            kept,
        } => world.restart(sessions_closed, kept),
    }
}

/// Applies the ops to a pool that starts with some workers and clients, then removes all of
/// them.
pub(super) fn check_any(ops: Vec<Op>) {
    let mut world = World::new(WORKERS, CLIENTS);
    for worker in 0..3 {
        world.join(worker, devices(worker, false));
    }
    for client in 0..2 {
        world.attach(client, 0, 0);
    }
    for op in ops {
        apply(&mut world, op);
    }
    for client in 0..CLIENTS {
        world.client_disconnected(client);
    }
    for worker in 0..WORKERS {
        world.worker_disconnected(worker);
    }
    world.wait(60_000);
    world.oversleep(0);
    world.check_nothing_left();
}

/// As [`check_any`], with a policy of tenants, and client 2, which is of another tenant than the others.
pub(super) fn check_with_policy(which: usize, ops: impl IntoIterator<Item = Op>) {
    let start = [Op::SetPolicy { which }, attach_client_2()];
    check_any(start.into_iter().chain(ops).collect());
}

pub(super) fn attach_client_2() -> Op {
    Op::Attach {
        client: 2,
        give_up: 0,
        outdated: 0,
    }
}

/// Returns a request with the usual priority.
pub(super) fn request(client: usize, demand: Demand) -> Op {
    Op::Request {
        client,
        demand,
        priority: 0,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Without restarts, the world predicts every lease and every deadline exactly.
    #[test]
    fn any_events(ops in vec(op(), 1..120)) {
        check_any(ops);
    }

    /// The same while tenants have devices beyond their guarantees, and others need these.
    #[test]
    fn any_events_with_reclaims(ops in vec(reclaiming_op(), 1..80), which in 1..POLICIES) {
        check_with_policy(which, ops);
    }

    /// The same while leases are idle, and others need their devices.
    #[test]
    fn any_events_with_idle_leases(ops in vec(idle_op(), 1..80), which in 0..POLICIES) {
        check_with_policy(which, ops);
    }

    /// One request waits for devices of leases that are idle since different times.
    #[test]
    fn any_choice_of_idle_leases(
        leases in vec((1..4_u32, 0..3_000_u64), 2..7),
        work in vec((0..WORKERS, 0..16_u32, 0..3_000_u64), 0..6),
        wanted in 1..6_u32,
    ) {
        let exact = |devices| Demand {
            durability: Durability::Auto,
            ..demand_of(devices, Some("flex"))
};
        let wait = |millis| Op::Wait { millis };
        let join = Op::Join { worker: 3, changed: true };
        let leases = leases.into_iter().flat_map(|(devices, millis)| {
            [request(0, exact(devices)), Op::Cancel { client: 0, nth: 0 }, wait(millis)]
        });
        let work = work.into_iter().flat_map(|(worker, leases, millis)| {
            [Op::Work { worker, leases }, wait(millis)]
        });
        let ops = [join].into_iter().chain(leases).chain([Op::AllKept]).chain(work);
        let last = [wait(2_000), Op::AllReportIdle, request(1, exact(wanted)), wait(9_000)];
        check_any(ops.chain(last).collect());
    }

    /// With restarts, only the invariants are checked: all parties agree in the end.
    #[test]
    fn any_events_with_restarts(ops in vec(op_or_restart(), 1..120)) {
        check_any(ops);
    }
}
