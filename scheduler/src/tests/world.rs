//! A simulated world around an engine: workers and clients behave correctly, the network
//! does not.
//!
//! The world knows only what workers and clients would know: the messages that they sent,
//! and the commands that reached them. From these it keeps its own, simpler model of the
//! pool and checks every command against it. The actions are in `actions`, the invariants
//! in `invariants`.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::share::DeviceShare;

use super::bound_model::Bound;
use super::reservation_model::{RESERVE_AFTER, Reserved};
use super::room_model::Right;
use super::share_model::{check_shares, needs_of};
use super::trading_model::Trades;
use super::victim_model::Victim;
use super::*;
use crate::device::Share;
use crate::lease::{Keeper, SuspendedPart};
use crate::{Amounts, LeaseRecord, RecordChange, Snapshot};

pub(super) struct World {
    pub(super) engine: Engine,
    /// The pool after the last event, as people see it. To take it anew for each check would take most of the time.
    pub(super) snapshot: Snapshot,
    /// The order of the requests after the last event, for the same reason.
    pub(super) order: Vec<(usize, bool)>,
    /// What was reserved after the last event, by the engine.
    pub(super) reserved: Reserved,
    pub(super) now: u64,
    /// The last number used for a stream, request or lease.
    last_number: u64,
    pub(super) workers: Vec<SimWorker>,
    pub(super) clients: Vec<SimClient>,
    /// The pending requests, in order of arrival.
    pub(super) waiting: Vec<SimRequest>,
    /// All leases that the engine must have; `None` once the scheduler has restarted.
    pub(super) leases: Option<BTreeMap<LeaseId, SimLease>>,
    /// The records that the driver has written, and those from before the last event.
    pub(super) records: BTreeMap<LeaseId, LeaseRecord>,
    pub(super) earlier_records: BTreeMap<LeaseId, LeaseRecord>,
    /// The guarantees, limits and weights of the tenants.
    pub(super) policy: Policy,
    /// The engine's term.
    pub(super) term: u64,
    /// All grants so far.
    pub(super) grants: BTreeMap<(LeaseId, DeviceRef), GrantNumber>,
    /// The shares that leases were granted of devices, not those that have all of one.
    pub(super) shares: BTreeMap<(LeaseId, DeviceRef), DeviceShare>,
    /// The latest grant of each device.
    pub(super) latest: BTreeMap<DeviceRef, GrantNumber>,
    /// The first and the latest of the reports by which a client has said without a pause that it
    /// cannot reach the worker of a lease.
    pub(super) reports: BTreeMap<(usize, LeaseId), (u64, u64)>,
    /// The same of leases on several workers: by which worker, or the client (`None`), and of which worker.
    pub(super) missing: BTreeMap<(LeaseId, Option<WorkerId>, WorkerId), (u64, u64)>,
    /// The leases that were suspended because of such reports, each with who could not reach which worker, and the
    /// time until which it does not go on at both.
    pub(super) apart: Vec<(LeaseId, Option<WorkerId>, WorkerId, u64)>,
    /// The lease that an administrator moves at this moment.
    pub(super) commanded: Option<LeaseId>,
    /// The leases that the present event has suspended because they were idle, as they were before.
    pub(super) made_room: Vec<(LeaseId, SimLease)>,
    /// The leases that the present event has suspended, or ended, for something that waits, each with what for, as the
    /// engine says.
    pub(super) made_room_for: Vec<(LeaseId, LeaseId)>,
    /// These leases as they were before.
    pub(super) victims: Vec<Victim>,
    /// Why leases could be suspended for the requests that waited after the last event.
    pub(super) rights: BTreeMap<LeaseId, Right>,
    /// The leases that the present event has granted.
    pub(super) granted_now: BTreeSet<LeaseId>,
    /// What the requests wanted that the present event has granted.
    pub(super) granted: Vec<Demand>,
    /// The devices of the leases that have gone on in the present event.
    pub(super) moved: Vec<DeviceSpec>,
    /// What the waits of requests with reservations depend on.
    pub(super) bounds: BTreeMap<LeaseId, Bound>,
    /// Which leases have made room for what since the last change of demand.
    pub(super) trades: Trades,
    /// What each lease counted as after the last event in which it was known.
    pub(super) charges: BTreeMap<LeaseId, Amounts>,
}

/// A worker process, and what the engine should know about it.
pub(super) struct SimWorker {
    pub(super) id: u64,
    pub(super) stream: u64,
    pub(super) old_stream: u64,
    /// The lease and device of each running session.
    pub(super) held: BTreeSet<(LeaseId, u32)>,
    /// For each device and lane, the latest grant that has ended, as far as the worker knows.
    pub(super) ended: BTreeMap<(u32, u32), GrantNumber>,
    /// The time before which the scheduler does not lose the worker, in ms; 0 if it was not
    /// suspended since the worker joined.
    pub(super) not_lost_before: u64,
    /// The leases that it must end, with the devices that it has not released yet.
    pub(super) busy: BTreeSet<(LeaseId, u32)>,
    /// The leases that it was sent `EndLease` for since it joined, and has not fully
    /// released.
    pub(super) unanswered: BTreeSet<LeaseId>,
    /// The devices that it reports as out of service.
    pub(super) broken: BTreeSet<u32>,
    /// When each lease had something to do there last.
    pub(super) worked: BTreeMap<LeaseId, u64>,
    /// The leases that it has reported on its present stream to be idle, each with since when.
    pub(super) idle: BTreeMap<LeaseId, u64>,
    /// The engine's expected view of it; `None` before it joined and after it was lost.
    pub(super) known: Option<KnownWorker>,
    /// The devices with which it joined last.
    pub(super) last_devices: Vec<DeviceSpec>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct KnownWorker {
    pub(super) devices: Vec<DeviceSpec>,
    pub(super) connected: bool,
    pub(super) leaving: bool,
    pub(super) drained: bool,
    pub(super) last_beat: u64,
}

impl KnownWorker {
    /// Returns whether the worker is to have no leases.
    pub(super) fn is_draining(&self) -> bool {
        self.leaving || self.drained
    }
}

impl SimWorker {
    /// Returns when it is lost unless it comes back, or `None` if it is connected or
    /// already lost.
    pub(super) fn lost_at(&self) -> Option<u64> {
        let known = self.known.as_ref().filter(|known| !known.connected)?;
        Some((known.last_beat + 5_000).max(self.not_lost_before))
    }
}

pub(super) struct SimClient {
    pub(super) id: u64,
    pub(super) attached: bool,
    pub(super) stream: u64,
    pub(super) old_stream: u64,
    /// The leases that the client believes it holds.
    pub(super) leases: BTreeSet<LeaseId>,
    /// What the token says of every lease that the client was granted.
    pub(super) tokens: BTreeMap<LeaseId, SimToken>,
}

pub(super) struct SimToken {
    pub(super) lease_devices: Vec<DeviceRef>,
    pub(super) durability: Durability,
    pub(super) epoch: u64,
    /// The least memory of its devices.
    pub(super) memory_bytes: u64,
    /// The devices that were granted.
    pub(super) granted: Vec<DeviceSpec>,
    /// Whether a worker of these has joined another scheduler with other devices, which takes these for the
    /// ones that were granted. A worker that keeps the rules does not do that.
    pub(super) has_changed: bool,
}

#[derive(Clone)]
pub(super) struct SimRequest {
    pub(super) client: usize,
    pub(super) request: RequestId,
    pub(super) lease: LeaseId,
    pub(super) demand: Demand,
    pub(super) priority: i32,
    /// When it arrived.
    pub(super) since: u64,
    /// The position and the reason that its client knows.
    pub(super) reported: Option<(u32, WaitReason)>,
    /// Whether the client was sent these in this event.
    pub(super) is_reported_now: bool,
}

#[derive(Clone)]
pub(super) struct SimLease {
    pub(super) client: usize,
    pub(super) lease_devices: Vec<DeviceRef>,
    pub(super) absent_since: Option<u64>,
    /// The workers that keep its snapshots, by the engine's choice, by the lease's own workers.
    pub(super) keepers: BTreeMap<WorkerId, Keeper>,
    /// The stores that have its snapshots, by the lease's own workers.
    pub(super) stored: BTreeMap<WorkerId, StoreId>,
    /// When the lease ends because a worker was lost, or a process has died, in ms.
    pub(super) lost_until: Option<u64>,
    /// Whether the lease is suspended, or was and waits for devices.
    pub(super) is_suspended: bool,
    /// When it was granted.
    pub(super) granted_at: u64,
    /// Since when it has its devices.
    pub(super) running_since: u64,
    pub(super) is_spot: bool,
    pub(super) may_end: bool,
    /// The requests whose reservations it has passed, by the engine's knowledge.
    pub(super) passed: BTreeSet<LeaseId>,
    /// For how long it may have devices, from `running_since` on, in ms.
    pub(super) time_left: Option<u64>,
    pub(super) durability: Durability,
    /// The devices that were granted.
    pub(super) granted: Vec<DeviceSpec>,
    /// Its parts while it is suspended, by the engine's choice.
    pub(super) parts: Vec<SuspendedPart>,
    /// The least memory of its devices, or that of its share.
    pub(super) memory_bytes: u64,
    /// Whether it has a share of a device.
    pub(super) has_share: bool,
}

impl SimLease {
    /// Returns when it has had devices for as long as it may.
    pub(super) fn time_over_at(&self) -> Option<u64> {
        let left = self.time_left.filter(|_| !self.lease_devices.is_empty());
        left.map(|left| self.running_since + left)
    }

    /// It has had its devices until now, and has none any more.
    pub(super) fn lose_devices(&mut self, now: u64) {
        if !self.lease_devices.is_empty() {
            let had = now - self.running_since;
            self.time_left = self.time_left.map(|left| left.saturating_sub(had));
        }
        self.lease_devices.clear();
    }
}

/// Returns the snapshot store that a worker has open: workers 0 and 1 share one.
pub(super) fn store_of(worker: WorkerId) -> Option<StoreId> {
    (worker.0 < 2).then_some(StoreId(1))
}

/// Returns the tenant of a client. Two of the three clients are of one.
pub(super) fn tenant_of(client: usize) -> TenantName {
    TenantName::from(if client < 2 { "a" } else { "b" })
}

/// Bounds small enough to be reached by a few requests.
pub(super) const MAX_WAITING: usize = 6;
pub(super) const MAX_WAITING_PER_CLIENT: usize = 3;

/// Short enough to pass often.
pub(super) const IDLE_TIMEOUT_MS: u64 = 5_000;

pub(super) fn engine_at(now: u64, term: u64) -> Engine {
    let options = Options {
        // The past counts within the times of a test.
        half_life: Duration::from_secs(60),
        reserve_after: Duration::from_millis(RESERVE_AFTER),
        idle_timeout: Duration::from_millis(IDLE_TIMEOUT_MS),
        ..bounds(MAX_WAITING, MAX_WAITING_PER_CLIENT)
    };
    Engine::new(options, term, at(now))
}

impl World {
    pub(super) fn new(workers: usize, clients: usize) -> Self {
        let worker = |id| SimWorker {
            id,
            stream: 0,
            old_stream: 0,
            held: BTreeSet::new(),
            ended: BTreeMap::new(),
            not_lost_before: 0,
            busy: BTreeSet::new(),
            unanswered: BTreeSet::new(),
            broken: BTreeSet::new(),
            worked: BTreeMap::new(),
            idle: BTreeMap::new(),
            known: None,
            last_devices: Vec::new(),
        };
        let client = |id| SimClient {
            id,
            attached: false,
            stream: 0,
            old_stream: 0,
            leases: BTreeSet::new(),
            tokens: BTreeMap::new(),
        };
        let engine = engine_at(0, 1);
        Self {
            snapshot: engine.snapshot(),
            order: Vec::new(),
            reserved: Reserved::new(),
            engine,
            now: 0,
            last_number: 0,
            workers: (0..).take(workers).map(worker).collect(),
            clients: (0..).take(clients).map(client).collect(),
            waiting: Vec::new(),
            leases: Some(BTreeMap::new()),
            records: BTreeMap::new(),
            earlier_records: BTreeMap::new(),
            policy: Policy::new(),
            term: 1,
            grants: BTreeMap::new(),
            shares: BTreeMap::new(),
            latest: BTreeMap::new(),
            reports: BTreeMap::new(),
            missing: BTreeMap::new(),
            apart: Vec::new(),
            commanded: None,
            made_room: Vec::new(),
            made_room_for: Vec::new(),
            victims: Vec::new(),
            rights: BTreeMap::new(),
            granted_now: BTreeSet::new(),
            granted: Vec::new(),
            moved: Vec::new(),
            bounds: BTreeMap::new(),
            trades: Trades::default(),
            charges: BTreeMap::new(),
        }
    }

    pub(super) fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Sends an event to the engine, applies the commands to the world and checks the
    /// invariants.
    pub(super) fn send(&mut self, event: Event) {
        self.end_leases_whose_time_is_over();
        for waiting in &mut self.waiting {
            waiting.is_reported_now = false;
        }
        let before = self.before();
        let pool_before = self.pool_now();
        let commands = self.engine.handle(event.clone(), at(self.now));
        self.snapshot = self.engine.snapshot();
        self.earlier_records.clone_from(&self.records);
        for RecordChange { lease, record, .. } in self.engine.take_record_changes() {
            match record {
                Some(record) => self.records.insert(lease, record),
                None => self.records.remove(&lease),
            };
        }
        self.check_grants(&commands);
        let granted = self.granted(&commands);
        self.made_room.clear();
        self.made_room_for = self.engine.take_made_room();
        self.victims.clear();
        self.granted_now = granted.iter().map(|(it, _)| it.lease).collect();
        self.granted.clear();
        self.moved.clear();
        for command in &commands {
            self.apply_command(&event, command);
        }
        for (id, lease) in self.leases.iter_mut().flatten() {
            let known = self.engine.leases().get(*id);
            lease.keepers = known.map_or_else(BTreeMap::new, |known| known.keepers.clone());
            let stored = known.into_iter().flat_map(|known| &known.stored);
            lease.stored = stored.map(|(worker, it)| (*worker, it.store)).collect();
            lease.parts = known.map_or_else(Vec::new, |known| known.parts.clone());
            lease.passed = known.map_or_else(BTreeSet::new, |known| known.passed.clone());
        }
        self.order = self.expected_order();
        self.reserved = self.reserved_now();
        let rights = self.rights_in_order().into_iter();
        let rights = rights.map(|(at, right)| (self.waiting[at].lease, right));
        let rights_before = std::mem::replace(&mut self.rights, rights.collect());
        self.check_invariants();
        self.check_victims(&rights_before);
        let workers_changed = self.pool_now().workers != pool_before.workers;
        self.check_bounds(&event, workers_changed);
        let leases = self.engine.leases().iter();
        self.charges
            .extend(leases.map(|(id, lease)| (id, lease.charge.clone())));
        self.check_trades(&event, &commands, &pool_before);
        if !matches!(event, Event::SetPriority { .. }) {
            let is_reclaimed =
                |it: &Command| matches!(it, Command::Suspended { cause: Some(_), .. });
            let has_reclaimed = commands.iter().any(is_reclaimed);
            for (granted, devices) in granted {
                self.check_passed(&before, &granted, &devices, has_reclaimed);
            }
        }
    }

    /// Returns the requests that these commands grant, with their devices.
    fn granted(&self, commands: &[Command]) -> Vec<(SimRequest, Vec<DeviceSpec>)> {
        let granted = commands.iter().filter_map(|command| match command {
            Command::Granted {
                request, devices, ..
            } => {
                let mut waiting = self.waiting.iter();
                let waiting = waiting.find(|it| it.request == *request)?;
                let devices = devices.iter().map(|it| it.device.clone());
                Some((waiting.clone(), devices.collect()))
            }
            _ => None,
        });
        granted.collect()
    }

    /// Removes the leases that have had devices for as long as they may, which the engine ends with any event.
    fn end_leases_whose_time_is_over(&mut self) {
        let now = self.now;
        if let Some(leases) = &mut self.leases {
            leases.retain(|_, lease| lease.time_over_at().is_none_or(|at| now < at));
        }
    }

    pub(super) fn send_worker(&mut self, i: usize, event: WorkerEvent) {
        let SimWorker { id, stream, .. } = self.workers[i];
        self.send(on_stream(stream, worker(id, event)));
    }

    pub(super) fn send_client(&mut self, i: usize, event: ClientEvent) {
        let SimClient { id, stream, .. } = self.clients[i];
        self.send(on_stream(stream, client(id, event)));
    }

    /// Sends events on a stream that was replaced. They must change nothing.
    pub(super) fn send_on_old_stream(&mut self, i: usize) {
        if let Some(worker_i) = self.workers.get(i) {
            let (id, stream) = (worker_i.id, worker_i.old_stream);
            for event in [
                WorkerEvent::Heartbeat,
                WorkerEvent::Leaving,
                WorkerEvent::OutOfService {
                    devices: Outages::new(),
                },
                WorkerEvent::Left,
                WorkerEvent::Disconnected,
            ] {
                self.send(on_stream(stream, worker(id, event)));
            }
        }
        let SimClient { id, old_stream, .. } = self.clients[i % self.clients.len()];
        self.send(on_stream(old_stream, request(id, u64::MAX / 10, 1)));
        self.send(on_stream(old_stream, client_disconnected(id)));
    }
}

/// Effects of commands on the workers and clients that receive them.
impl World {
    fn apply_command(&mut self, event: &Event, command: &Command) {
        match command {
            Command::Queued {
                client,
                request,
                position,
                reason,
            } => {
                let waiting = self.find_request(*client, *request);
                let waiting = &mut self.waiting[waiting];
                let reported = waiting.reported.replace((*position, *reason));
                assert_ne!(reported, waiting.reported, "the same again");
                waiting.is_reported_now = true;
            }
            Command::Granted {
                client,
                request,
                lease,
                devices,
            } => {
                self.take_lease(*client, *request, *lease, devices);
            }
            Command::Moved {
                client,
                lease,
                epoch,
                devices,
                load_stored,
            } => {
                self.check_apart(*lease, devices);
                self.move_lease(*client, *lease, *epoch, devices, load_stored);
            }
            Command::Interrupted { client, lease, .. } => self.check_interrupted(*client, *lease),
            Command::Suspended {
                client,
                lease,
                cause,
                ..
            } => {
                if let Some(EndReason::WorkerDrains { .. } | EndReason::WorkerUnreachable { .. }) =
                    cause
                {
                    self.suspend_for_worker(*lease);
                }
                if let Some(EndReason::WorkerMissed { worker, other, .. }) = cause {
                    self.suspend_as_missed(*lease, *other, *worker);
                }
                if *cause == Some(EndReason::Reclaimed) {
                    self.reclaim(*lease);
                } else if *cause == Some(EndReason::Idle) {
                    self.make_room(*lease);
                } else if cause.is_some() {
                    self.leave_lost_worker(*lease);
                }
                self.check_suspended(*client, *lease);
            }
            Command::KeepSnapshots {
                part,
                source,
                keeper,
                ..
            } => self.check_keeper(*part, source, keeper),
            Command::DropStored { worker, leases } => {
                self.connected_worker(*worker);
                assert!(store_of(*worker).is_some());
                let mut dropped = leases.iter();
                assert!(dropped.all(|id| self.engine.leases().get(*id).is_none()));
            }
            Command::DropSnapshots { keeper: worker, .. }
            | Command::HoldSnapshots { holder: worker, .. } => {
                self.connected_worker(*worker);
            }
            Command::Refused {
                client,
                request,
                reason,
            } => {
                let refused = self.find_request(*client, *request);
                self.check_refusal(event, refused, reason);
                self.waiting.remove(refused);
            }
            Command::LeaseEnded {
                client,
                lease,
                reason,
            } => {
                if *reason == EndReason::Reclaimed {
                    self.end_reclaimed(*lease);
                }
                let client = self.attached_client(*client);
                let had_it = self.clients[client].leases.remove(lease);
                assert!(
                    had_it || *reason == EndReason::Unknown,
                    "{lease} ended: {reason}"
                );
            }
            Command::EndLease {
                worker,
                lease,
                grants,
                ..
            } => {
                let worker = self.connected_worker(*worker);
                self.end_grants(worker, *lease, grants);
            }
        }
    }

    /// Ends a lease on a worker, which from now on admits none of these grants.
    fn end_grants(&mut self, worker: usize, lease: LeaseId, grants: &[DeviceGrant]) {
        let worker = &mut self.workers[worker];
        for (_, index) in worker.held.iter().filter(|(held, _)| *held == lease) {
            let named = grants.iter().any(|ended| ended.index == *index);
            assert!(named, "{lease} ends, but not on device {index}");
        }
        let over = worker.held.extract_if(.., |(held, _)| *held == lease);
        worker.busy.extend(over);
        worker.unanswered.insert(lease);
        for DeviceGrant { index, grant, lane } in grants {
            let at = (lease, device_ref(worker.id, *index));
            let granted = self.grants[&at];
            assert_eq!(*grant, granted, "{lease} ended by the grant of another");
            let share = self.shares.get(&at);
            assert_eq!(*lane, share.map_or(0, |share| share.lane));
            let ended = worker.ended.entry((*index, *lane)).or_default();
            *ended = granted.max(*ended);
        }
    }

    /// Records a grant; its number must be higher than that of every earlier grant of the
    /// device, also across restarts.
    fn record_grant(&mut self, lease: LeaseId, device_ref: DeviceRef, grant: GrantNumber) {
        let before = self.latest.insert(device_ref, grant).unwrap_or_default();
        assert!(grant > before, "{device_ref:?}: {grant} after {before}");
        assert_eq!(grant.term, self.term);
        self.grants.insert((lease, device_ref), grant);
    }

    /// A worker starts a lease on a device, which must be free.
    pub(super) fn take_device(&mut self, lease: LeaseId, leased: &LeasedDevice) {
        let LeasedDevice {
            device_ref,
            device,
            worker,
            grant,
            share,
        } = leased;
        self.record_grant(lease, *device_ref, *grant);
        match share {
            Some(share) => self.shares.insert((lease, *device_ref), *share),
            None => self.shares.remove(&(lease, *device_ref)),
        };
        let i = self.connected_worker(device_ref.worker);
        let known = self.workers[i].known.as_ref().unwrap();
        assert!(!known.is_draining());
        let uses = self.workers[i].held.iter().chain(&self.workers[i].busy);
        let others = uses.filter(|(_, index)| *index == device_ref.index);
        let others = others.map(|(of, _)| self.shares.get(&(*of, *device_ref)).copied());
        let shares: Vec<_> = others.chain([*share]).collect();
        check_shares(device, &shares);
        assert!(!self.workers[i].broken.contains(&device_ref.index));
        assert_eq!(device, &known.devices[device_ref.index as usize]);
        assert_eq!(worker, &endpoint(device_ref.worker.0));
        self.workers[i].held.insert((lease, device_ref.index));
    }

    fn take_lease(
        &mut self,
        client: ClientId,
        request: RequestId,
        lease: LeaseId,
        devices: &[LeasedDevice],
    ) {
        let granted = self.find_request(client, request);
        let granted = self.waiting.remove(granted);
        self.granted.push(granted.demand.clone());
        assert_eq!(granted.lease, lease);
        assert_eq!(granted.demand.devices as usize, devices.len());
        for leased in devices {
            self.take_device(lease, leased);
            assert!(meets_demand(&leased.device, &granted.demand));
            let share = leased.share.map(Share::from);
            assert_eq!(share, needs_of(&granted)(&leased.device));
        }
        let specs: Vec<_> = devices.iter().map(|leased| leased.device.clone()).collect();
        let memory_bytes = devices.iter().map(memory_of);
        let memory_bytes = memory_bytes.min().unwrap_or_default();
        let lease_devices: Vec<_> = devices.iter().map(|device| device.device_ref).collect();
        let client = granted.client;
        if let Some(leases) = &mut self.leases {
            let lease_of = SimLease {
                client,
                lease_devices: lease_devices.clone(),
                absent_since: None,
                keepers: BTreeMap::new(),
                stored: BTreeMap::new(),
                lost_until: None,
                is_suspended: false,
                granted_at: self.now,
                running_since: self.now,
                is_spot: granted.demand.is_spot,
                may_end: granted.demand.may_end,
                passed: BTreeSet::new(),
                time_left: granted.demand.max_duration.map(|it| it.as_millis() as u64),
                durability: granted.demand.durability,
                granted: specs.clone(),
                parts: Vec::new(),
                memory_bytes,
                has_share: granted.demand.share_permille.is_some(),
            };
            assert!(leases.insert(lease, lease_of).is_none());
        }
        self.clients[client].leases.insert(lease);
        let token = SimToken {
            lease_devices,
            durability: granted.demand.durability,
            epoch: 0,
            memory_bytes,
            granted: specs,
            has_changed: false,
        };
        self.clients[client].tokens.insert(lease, token);
    }

    /// Returns the index of a pending request. Panics if it has ended or never existed,
    /// because no command may refer to such a request.
    fn find_request(&self, client: ClientId, request: RequestId) -> usize {
        let client = self.attached_client(client);
        let found = self
            .waiting
            .iter()
            .position(|w| w.client == client && w.request == request);
        found.unwrap_or_else(|| panic!("request {request} has ended or never was"))
    }

    pub(super) fn attached_client(&self, client: ClientId) -> usize {
        let found = self
            .clients
            .iter()
            .position(|c| c.attached && c.id == client.0);
        found.unwrap_or_else(|| panic!("client {client} is not attached"))
    }

    pub(super) fn connected_worker(&self, worker: WorkerId) -> usize {
        let connected = |w: &SimWorker| w.known.as_ref().is_some_and(|known| known.connected);
        let found = self
            .workers
            .iter()
            .position(|w| w.id == worker.0 && connected(w));
        found.unwrap_or_else(|| panic!("worker {worker} has not joined"))
    }
}

/// Returns the memory that a lease has of a device.
pub(super) fn memory_of(leased: &LeasedDevice) -> u64 {
    let share = leased.share.map(|share| share.memory_bytes);
    share.unwrap_or(leased.device.memory_bytes)
}

/// Returns whether a device meets a demand, by the test's own rule.
pub(super) fn meets_demand(device: &DeviceSpec, demand: &Demand) -> bool {
    let kind_does = match &demand.kind {
        None => true,
        Some(kind) => kind == &device.kind,
    };
    let is_exact = device.fingerprint.is_some_and(|it| it.is_exact);
    let is_exact_enough = is_exact || demand.durability != Durability::Exact;
    let can_share = device.takes_shares || demand.share_permille.is_none();
    let is_enough = device.memory_bytes >= demand.memory_bytes;
    kind_does && is_exact_enough && can_share && is_enough
}

/// Returns whether a lease may go on at `other` in the place of `own`, by the test's own rule.
pub(super) fn can_replace(durability: Durability, own: &DeviceSpec, other: &DeviceSpec) -> bool {
    let (Some(own_bits), Some(other_bits)) = (own.fingerprint, other.fingerprint) else {
        return false;
    };
    match (durability, own_bits.is_exact) {
        (Durability::Off, _) | (Durability::Exact, false) => false,
        (Durability::Auto | Durability::Exact, true) => own_bits == other_bits,
        (Durability::Auto, false) | (Durability::Continue, _) => own.kind == other.kind,
    }
}
