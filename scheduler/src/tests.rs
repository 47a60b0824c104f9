//! Table tests: each rule is a list of events with their times, and the exact commands that
//! each event leads to. The module `property` checks the invariants over random events.
//!
//! Ids are small numbers. Worker 3 is called "w3", and unless `on` sets another stream, a
//! client or worker uses the stream of its own number.

mod actions;
mod bound_model;
mod clients;
mod commands;
mod durable;
mod durable_world;
mod durations;
mod ending;
mod found_choices;
mod found_moves;
mod found_sequences;
mod grants;
mod handover;
mod idle;
mod idle_model;
mod invariants;
mod moves;
mod order;
mod placement;
mod property;
mod queue;
mod reclaim;
mod records;
mod reservation_model;
mod reservations;
mod restart;
mod room_model;
mod scene;
mod several_workers;
mod share_model;
mod shared_reclaim;
mod shares;
mod spot;
mod spot_model;
mod stores;
mod suspension;
mod tenant_model;
mod tenants;
mod trading_model;
mod unreachable;
mod victim_model;
mod waiting;
mod workers;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::{ClientId, LeaseId, PartId, RequestId, StoreId, WorkerId};

use self::commands::*;
use crate::{
    AssignedKeeper, Claim, ClientEvent, Command, Demand, DeviceFingerprint, DeviceGrant, DeviceRef,
    DeviceSpec, Durability, EndReason, Endpoint, Engine, Event, GrantedDevice, HandedOver,
    HandoverOutcome, HeldDevice, LeasedDevice, Options, Outages, Peer, Policy, RefuseReason,
    Registration, RequestOrder, SnapshotPlaces, StreamId, Suspender, TenantLimit, TenantName,
    TenantPolicy, Timestamp, WaitReason, Waiter, WorkerEvent,
};

/// A time in ms, the event at that time, and the expected commands.
type Step = (u64, Event, Vec<Command>);

fn check(steps: impl IntoIterator<Item = Step>) -> Engine {
    check_with(Options::default(), steps)
}

/// Runs the steps, with a tick at every deadline between them. These ticks must cause no
/// commands: a deadline that has an effect must be a step of its own, `tick()`.
fn check_with(options: Options, steps: impl IntoIterator<Item = Step>) -> Engine {
    check_on(Engine::new(options, TERM, at(0)), steps)
}

/// Does what [`check_with`] does with an engine that has handled no event yet.
fn check_on(mut engine: Engine, steps: impl IntoIterator<Item = Step>) -> Engine {
    for (i, (now, event, expected)) in steps.into_iter().enumerate() {
        while let Some(deadline) = engine
            .next_deadline()
            .filter(|deadline| *deadline < at(now))
        {
            let commands = engine.handle(Event::Tick, deadline);
            assert_eq!(
                commands,
                [],
                "before step {i}, at the deadline {deadline:?}"
            );
        }
        if event == Event::Tick {
            assert_eq!(
                engine.next_deadline(),
                Some(at(now)),
                "step {i}: no deadline now"
            );
        }
        let numbered = with_assignments(&engine, event.clone());
        let commands = engine.handle(numbered, at(now));
        let commands = without_numbers(commands);
        assert_eq!(commands, expected, "step {i}: {event:?} at {now} ms");
    }
    engine
}

/// The tenant of clients, unless a test has several.
const TENANT: &str = "default";

/// The term of the engines that `check` creates.
const TERM: u64 = 7;

/// Removes the grant numbers from commands; the tests in `grants` check the numbers.
fn without_numbers(mut commands: Vec<Command>) -> Vec<Command> {
    for command in &mut commands {
        match command {
            Command::Granted { devices, .. } | Command::Moved { devices, .. } => {
                for device in devices {
                    // A lease from before a restart keeps its grants.
                    assert!(device.grant.term >= TERM - 1, "{device:?}");
                    device.grant = GrantNumber::ZERO;
                }
            }
            Command::EndLease { grants, .. } => {
                assert!(!grants.is_empty(), "an end that names no grant");
                grants.clear();
            }
            Command::KeepSnapshots { assignment, .. } => *assignment = 0,
            Command::Queued { .. }
            | Command::Refused { .. }
            | Command::LeaseEnded { .. }
            | Command::Interrupted { .. }
            | Command::Suspended { .. }
            | Command::HoldSnapshots { .. }
            | Command::DropSnapshots { .. }
            | Command::DropStored { .. } => {}
        }
    }
    commands
}

/// Gives reports of the present keepers the numbers of their assignments. A report that has a number gets another
/// one: it is of another assignment.
fn with_assignments(engine: &Engine, mut event: Event) -> Event {
    if let Event::Worker {
        worker,
        event:
            WorkerEvent::SnapshotsKept {
                at_keepers,
                refused,
                handed_over,
                ..
            },
        ..
    } = &mut event
    {
        let handed_over = handed_over.iter_mut().map(|report| &mut report.to);
        let kept = at_keepers.iter_mut().chain(refused);
        for report in kept.chain(handed_over) {
            let lease = engine.leases().get(report.part.lease);
            let keeper = lease.and_then(|lease| lease.keepers.get(worker));
            let keeper = keeper.filter(|keeper| keeper.worker == report.worker);
            report.assignment += keeper.map_or(0, |keeper| keeper.assignment);
        }
    }
    event
}

/// The grant by which a lease from before a restart has its devices.
fn old_grant(lease: u64) -> GrantNumber {
    GrantNumber {
        term: TERM - 1,
        count: lease,
    }
}

pub(crate) fn at(millis: u64) -> Timestamp {
    Timestamp::from_millis(millis)
}

/// Returns options with other bounds, and the times that the tables rely on.
fn bounds(max_waiting: usize, max_waiting_per_client: usize) -> Options {
    let defaults = Options::default();
    assert_eq!(defaults.worker_timeout, Duration::from_secs(5));
    assert_eq!(defaults.lease_expiry, Duration::from_secs(30));
    assert_eq!(defaults.adoption_window, Duration::from_secs(60));
    Options {
        max_waiting,
        max_waiting_per_client,
        ..defaults
    }
}

// Contents of the pool.

pub(crate) fn device(kind: &str, gib: u64) -> DeviceSpec {
    DeviceSpec {
        kind: kind.into(),
        name: format!("{kind} device"),
        memory_bytes: gib << 30,
        fingerprint: None,
        takes_shares: true,
    }
}

pub(crate) fn cuda(gib: u64) -> DeviceSpec {
    device("cuda", gib)
}

pub(crate) fn flex(gib: u64) -> DeviceSpec {
    device("flex", gib)
}

/// A CPU device whose results have the same bits as those of every other one of this function.
fn exact(gib: u64) -> DeviceSpec {
    DeviceSpec {
        fingerprint: Some(DeviceFingerprint {
            hash: [7; 16],
            is_exact: true,
        }),
        ..flex(gib)
    }
}

/// A GPU, whose results have other bits from time to time, and whose fingerprint is that of others made
/// with the same `hash`.
fn gpu(hash: u8, gib: u64) -> DeviceSpec {
    DeviceSpec {
        fingerprint: Some(DeviceFingerprint {
            hash: [hash; 16],
            is_exact: false,
        }),
        ..device("vulkan", gib)
    }
}

fn endpoint(worker: u64) -> Endpoint {
    Endpoint {
        name: format!("w{worker}"),
        address: format!("w{worker}:7420"),
        certificate_sha256: [worker as u8; 32],
    }
}

pub(crate) fn device_ref(worker: u64, index: u32) -> DeviceRef {
    DeviceRef {
        worker: WorkerId(worker),
        index,
    }
}

// Events.

fn tick() -> Event {
    Event::Tick
}

/// Moves an event to another stream.
fn on_stream(other: u64, event: Event) -> Event {
    let stream = StreamId(other);
    match event {
        Event::Tick
        | Event::Gap { .. }
        | Event::Evict { .. }
        | Event::SetPolicy { .. }
        | Event::Drain { .. }
        | Event::MoveLease { .. }
        | Event::EndLease { .. }
        | Event::SetPriority { .. }
        | Event::SuspendLease { .. }
        | Event::ResumeLease { .. } => event,
        Event::Worker { worker, event, .. } => Event::Worker {
            worker,
            stream,
            event,
        },
        Event::Client { client, event, .. } => Event::Client {
            client,
            stream,
            event,
        },
    }
}

fn worker(worker: u64, event: WorkerEvent) -> Event {
    Event::Worker {
        worker: WorkerId(worker),
        stream: StreamId(worker),
        event,
    }
}

fn join(id: u64, devices: &[DeviceSpec]) -> Event {
    join_holding(id, devices, &[])
}

/// A join; `held` are leases and device indices.
fn join_holding(id: u64, devices: &[DeviceSpec], held: &[(u64, u32)]) -> Event {
    let registration = Registration {
        endpoint: endpoint(id),
        devices: devices.to_vec(),
        store: None,
    };
    let held = held.iter().map(|&(lease, index)| HeldDevice {
        lease: LeaseId(lease),
        index,
        grant: old_grant(lease),
        ended: false,
        share: None,
    });
    worker(
        id,
        WorkerEvent::Join {
            registration,
            held: held.collect(),
            ended: Vec::new(),
            suspended: Vec::new(),
            out_of_service: Outages::new(),
            leaving: false,
        },
    )
}

/// As `join_holding`, but the worker has been sent `EndLease` for all leases in `held`.
fn join_ending(id: u64, devices: &[DeviceSpec], held: &[(u64, u32)]) -> Event {
    let mut join = join_holding(id, devices, held);
    if let Event::Worker {
        event: WorkerEvent::Join { held, .. },
        ..
    } = &mut join
    {
        held.iter_mut().for_each(|held| held.ended = true);
    }
    join
}

/// Marks the joining worker as leaving.
fn join_leaving(join: Event) -> Event {
    match join {
        Event::Worker {
            worker,
            stream,
            event:
                WorkerEvent::Join {
                    registration,
                    held,
                    ended,
                    ..
                },
        } => Event::Worker {
            worker,
            stream,
            event: WorkerEvent::Join {
                registration,
                held,
                ended,
                suspended: Vec::new(),
                out_of_service: Outages::new(),
                leaving: true,
            },
        },
        other => panic!("{other:?} is no join"),
    }
}

fn beat(id: u64) -> Event {
    worker(id, WorkerEvent::Heartbeat)
}

/// The worker has released all devices of an ended lease.
fn released(id: u64, lease: u64) -> Event {
    released_but(id, lease, &[])
}

fn released_but(id: u64, lease: u64, busy: &[u32]) -> Event {
    let busy = busy.iter().copied().collect::<BTreeSet<_>>();
    let lease = LeaseId(lease);
    worker(id, WorkerEvent::Released { lease, busy })
}

/// The worker cannot offer these devices; the reason is "broken".
fn out_of_service(id: u64, devices: &[u32]) -> Event {
    let devices = devices.iter().map(|index| (*index, "broken".into()));
    let devices = devices.collect();
    worker(id, WorkerEvent::OutOfService { devices })
}

fn leaving(id: u64) -> Event {
    worker(id, WorkerEvent::Leaving)
}

fn worker_left(id: u64) -> Event {
    worker(id, WorkerEvent::Left)
}

fn worker_disconnected(id: u64) -> Event {
    worker(id, WorkerEvent::Disconnected)
}

fn client(client: u64, event: ClientEvent) -> Event {
    Event::Client {
        client: ClientId(client),
        stream: StreamId(client),
        event,
    }
}

fn attach(id: u64) -> Event {
    attach_claiming(id, &[])
}

/// An attach; `claims` are leases, with the worker and index of each device.
fn attach_claiming(id: u64, claims: &[(u64, &[(u64, u32)])]) -> Event {
    let claims = claims.iter().map(|&(lease, lease_devices)| Claim {
        lease: LeaseId(lease),
        lease_devices: lease_devices
            .iter()
            .map(|&(worker, index)| GrantedDevice {
                device_ref: device_ref(worker, index),
                grant: old_grant(lease),
                share: None,
            })
            .collect(),
        durability: Durability::Off,
        epoch: 0,
        time_left: None,
        is_spot: false,
        may_end: false,
    });
    client(
        id,
        ClientEvent::Attach {
            tenant: TENANT.into(),
            claims: claims.collect(),
        },
    )
}

/// Requests devices of any kind. The lease id, if the request is granted, is ten times the
/// request's id.
fn request(id: u64, request: u64, devices: u32) -> Event {
    request_for(id, request, demand_of(devices, None))
}

/// A demand of devices of a kind, or of any, without further wishes.
pub(crate) fn demand_of(devices: u32, kind: Option<&str>) -> Demand {
    Demand {
        devices,
        kind: kind.map(Into::into),
        memory_bytes: 0,
        durability: Durability::Off,
        recover_within: None,
        max_duration: None,
        is_spot: false,
        may_end: false,
        share_permille: None,
    }
}

fn request_for(id: u64, request: u64, demand: Demand) -> Event {
    let (request, lease) = (RequestId(request), LeaseId(request * 10));
    client(
        id,
        ClientEvent::Request {
            request,
            demand,
            priority: 0,
            lease,
        },
    )
}

fn cancel(id: u64, request: u64) -> Event {
    client(
        id,
        ClientEvent::Cancel {
            request: RequestId(request),
        },
    )
}

fn release(id: u64, lease: u64) -> Event {
    client(
        id,
        ClientEvent::Release {
            lease: LeaseId(lease),
        },
    )
}

fn client_disconnected(id: u64) -> Event {
    client(id, ClientEvent::Disconnected)
}
