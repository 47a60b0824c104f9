//! The engine: the pool's state and its transitions.
//!
//! This module has what all events share: deadlines, ends of leases, and settling the queue
//! after each event. Events from workers and clients are handled in `engine/workers.rs` and
//! `engine/clients.rs`, requests in `engine/requests.rs` and `engine/guaranteed.rs`, what is reclaimed
//! and held back for them in `engine/reclaim.rs`, `engine/borrowed.rs`, `engine/possible_victims.rs`,
//! `engine/victims.rs`, `engine/own_spot.rs`, `engine/holds.rs` and `engine/reservations.rs`, what is reclaimed
//! for leases in `engine/spot.rs`, idle leases in `engine/idle.rs`,
//! and leases that outlive their worker in `engine/durable.rs`, `engine/keeper_choice.rs`, `engine/moves.rs`,
//! `engine/interruptions.rs`, `engine/unreachable.rs` and `engine/suspension.rs`.
//!
//! Invariants after every event:
//! - Leases have no more of a device than there is: one has all of it, or several have shares of it. No lease
//!   has a device that does not exist.
//! - No lease gets a device, or a share of it, that its worker has not released from the previous lease, or
//!   that is out of service.
//! - No request is pending that could be granted now, or that could never be granted. Devices that are
//!   held back for a lease or for another request cannot be granted, nor can those beyond the limit of the
//!   request's tenant, or reserved for a request that comes before.
//! - A lease whose client is detached, or one of whose workers has yet to join, has a
//!   deadline.

mod adoption;
pub(crate) mod assignment;
mod borrowed;
mod borrowed_leases;
mod clients;
mod coming;
mod counting;
mod destinations;
mod durable;
mod ends;
mod estimate;
mod guaranteed;
mod handover;
mod holds;
mod idle;
mod interruptions;
mod keeper_choice;
mod moves;
mod own_spot;
mod possible_victims;
mod reclaim;
mod records;
mod requests;
mod reservations;
mod settle;
mod spot;
mod stores;
mod suspension;
#[cfg(test)]
mod test_access;
mod unreachable;
mod unstable_keepers;
mod usage;
mod victims;
mod waiting;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::{ClientId, LeaseId, WorkerId};

use self::borrowed::KnownBorrowed;
use self::counting::{CountedOn, CountingRequests};
use self::ends::SentEnds;
use self::guaranteed::GuaranteedBasis;
use self::idle::IdleLeases;
use self::reservations::{Basis, OrderBasis, Reservations};
use self::unstable_keepers::UnstableKeepers;
use crate::command::Command;
use crate::event::{DeviceGrant, DeviceRef, Event, GrantedDevice, StreamId, WorkerEvent};
use crate::lease::{Keeper, Standing};
use crate::leases::Leases;
use crate::options::Options;
use crate::pool::Pool;
use crate::queue::Queue;
use crate::reason::EndReason;
use crate::snapshot::{LeaseSnapshot, Snapshot};
use crate::tenants::{KnownGuaranteed, PastUse, Policy, TenantName};
use crate::time::Timestamp;

/// The scheduler's state. See the crate's documentation.
pub struct Engine {
    options: Options,
    /// When the engine was created. Each gap in which the scheduler did not run moves this time forward by
    /// its length.
    started: Timestamp,
    /// The time of the event that is being handled.
    now: Timestamp,
    pool: Pool,
    leases: Leases,
    queue: Queue,
    /// The number of the latest grant.
    granted: GrantNumber,
    /// The number of the latest assignment of a keeper: the term, and a count in the lower half.
    assignments: u64,
    /// The attached clients.
    clients: BTreeMap<ClientId, AttachedClient>,
    /// The guarantee, limit and weight of each tenant.
    policy: Policy,
    /// What tenants have had.
    past: PastUse,
    /// The time as of which the past counts in the order of the requests.
    ranked_at: Timestamp,
    /// The version of what tenants have when the requests were decided last; `None` if the policy has changed
    /// since.
    decided_version: Option<u64>,
    reservations: Reservations,
    /// Those with which the requests were decided last.
    decided_reservations: Reservations,
    /// What `reservations` were found from.
    reservations_basis: Option<Basis>,
    /// The requests beyond guarantees for which spot leases are suspended first, and what these were found from.
    before_spot: Option<(OrderBasis, Vec<LeaseId>)>,
    /// What the requests within guarantees were found from.
    guaranteed_basis: Option<GuaranteedBasis>,
    /// The requests within the guarantee of each tenant, as they were found last.
    known_guaranteed: KnownGuaranteed,
    /// The requests within guarantees for which devices are held back or leases are suspended, in order.
    first_guaranteed: Vec<LeaseId>,
    /// Rises whenever the policy changes.
    policy_version: u64,
    /// Rises whenever the past of a tenant changes.
    past_version: u64,
    /// The requests of tenants with limits that can count on devices.
    counting: CountingRequests,
    /// The devices on which requests can count.
    counted_on: CountedOn,
    /// The leases that could give their devices to others.
    borrowed: KnownBorrowed,
    /// Whether positions of requests may have changed since they were reported last.
    positions_changed: bool,
    positions_reported_at: Timestamp,
    /// When leases may be suspended for a request within a guarantee that waits, as they will have run for
    /// long enough.
    reclaim_at: Option<Timestamp>,
    /// The leases that have been idle lately.
    idle: IdleLeases,
    /// When further leases will have been idle for long enough to be suspended, if something waits for devices.
    idle_at: Option<Timestamp>,
    /// Until when leases and requests wait for the same devices as now if nothing changes; `None` if something
    /// has changed since these were found out.
    settled_until: Option<Timestamp>,
    /// The leases whose keepers must be chosen again although the leases do not change.
    unstable_keepers: UnstableKeepers,
    /// Whether a worker may yet join that a lease from an earlier scheduler's records names.
    awaits_recorded_workers: bool,
    /// The commands that the current event has caused so far.
    commands: Vec<Command>,
    /// Those of them that end leases.
    sent_ends: SentEnds,
    /// The leases that made room, each with the request or lease that waits and for which it did.
    #[cfg(test)]
    made_room: Vec<(LeaseId, LeaseId)>,
}

/// A client that has a stream.
struct AttachedClient {
    stream: StreamId,
    tenant: TenantName,
}

impl Engine {
    /// Creates an engine for a pool without workers, started at `now`. `term` must be at
    /// least 1 and higher than that of any engine before it: grants are numbered by it.
    pub fn new(options: Options, term: u64, now: Timestamp) -> Self {
        Self {
            granted: GrantNumber { term, count: 0 },
            assignments: term << u32::BITS,
            leases: Leases::new(now + options.adoption_window),
            started: now,
            now,
            pool: Pool::default(),
            queue: Queue::default(),
            clients: BTreeMap::new(),
            policy: Policy::new(),
            past: PastUse::new(options.half_life),
            ranked_at: now,
            decided_version: None,
            reservations: Reservations::default(),
            decided_reservations: Reservations::default(),
            reservations_basis: None,
            before_spot: None,
            guaranteed_basis: None,
            known_guaranteed: KnownGuaranteed::default(),
            first_guaranteed: Vec::new(),
            policy_version: 0,
            past_version: 0,
            counting: CountingRequests::default(),
            counted_on: CountedOn::new(),
            borrowed: KnownBorrowed::default(),
            positions_changed: false,
            positions_reported_at: now,
            reclaim_at: None,
            idle: IdleLeases::default(),
            idle_at: None,
            settled_until: None,
            unstable_keepers: UnstableKeepers::default(),
            options,
            awaits_recorded_workers: false,
            commands: Vec::new(),
            sent_ends: SentEnds::default(),
            #[cfg(test)]
            made_room: Vec::new(),
        }
    }

    /// Returns the engine's timeouts and bounds.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Handles an event that happened at `now` and returns the commands to carry out, in
    /// order.
    pub fn handle(&mut self, event: Event, now: Timestamp) -> Vec<Command> {
        self.now = now;
        let is_report = matches!(
            event,
            Event::Worker {
                event: WorkerEvent::Heartbeat
                    | WorkerEvent::SnapshotsKept { .. }
                    | WorkerEvent::Idle { .. },
                ..
            }
        );
        match event {
            Event::Tick => self.tick(),
            Event::Gap { since } => self.resume_after(since),
            Event::Evict { client } => self.evict(client),
            Event::SetPolicy { policy } => {
                self.policy = policy;
                self.borrowed.forget();
                self.decided_version = None;
                self.policy_version += 1;
            }
            Event::Drain { worker, is_drained } => self.pool.set_drained(worker, is_drained),
            Event::MoveLease { lease } => {
                if self.check_move(lease).is_ok() {
                    self.try_move(lease);
                }
            }
            Event::EndLease { lease } => self.end_by_administrator(lease),
            Event::SetPriority { lease, priority } => self.set_priority(lease, priority),
            Event::SuspendLease { lease, by } => self.suspend(lease, by),
            Event::ResumeLease { lease, by } => self.resume_suspended(lease, by),
            Event::Worker {
                worker,
                stream,
                event,
            } => self.worker_event(worker, stream, event),
            Event::Client {
                client,
                stream,
                event,
            } => self.client_event(client, stream, event),
        }
        // After the event, as a gap extends the time in which ended leases are recorded; and before others get devices,
        // as a lease that was suspended for them now would go on later only to end.
        self.end_leases_whose_time_is_over();
        // Workers report often, and mostly nothing new.
        let is_settled = is_report && self.is_settled();
        if !is_settled {
            self.place();
        }
        self.report_positions();
        self.settle(is_settled);
        self.sent_ends.clear();
        mem::take(&mut self.commands)
    }

    /// Returns when to send the next [`Event::Tick`], which may be in the past, or `None`
    /// if no deadline is set.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let losses = self
            .pool
            .loss_deadlines(self.options.worker_timeout)
            .map(|(at, _)| at);
        let ends = self.leases.index().ends().map(|(at, _)| at).next();
        let time_over = self.leases.index().time_over().map(|(at, _)| at).next();
        let recorded = self.awaits_recorded_workers;
        let recorded = recorded.then(|| self.leases.adopt_until());
        let all = losses.chain(ends).chain(time_over).chain(recorded);
        let all = all.chain(self.positions_due_at());
        all.chain(self.reclaim_at).chain(self.idle_at).min()
    }

    /// Returns the current state of the pool.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            workers: self.pool.snapshot(),
            waiting_requests: self.queue.len(),
            waiting: self.queue.iter().map(|it| it.client).collect(),
            leases: self.leases.len(),
            owners: self
                .leases
                .iter()
                .map(|(id, lease)| (id, lease.owner))
                .collect(),
        }
    }

    /// Returns the lease of this id, if it exists.
    pub fn lease(&self, id: LeaseId) -> Option<LeaseSnapshot> {
        let lease = self.leases.get(id)?;
        let device = |(_, granted): (&DeviceRef, &GrantedDevice)| self.pool.leased_device(*granted);
        Some(LeaseSnapshot {
            owner: lease.owner,
            devices: match lease.is_suspended() {
                true => None,
                false => lease.lease_devices.iter().map(device).collect(),
            },
            durability: lease.durability,
            epoch: lease.epoch,
            is_spot: lease.is_spot,
            may_end: lease.may_end,
            time_left: lease.time_over_at().map(|at| at.saturating_since(self.now)),
            waits: lease.lost().cloned(),
            suspension: self.suspension(lease),
            is_stored: lease.is_stored(),
            move_to: self.check_move(id),
        })
    }

    /// Returns whether a lease has devices: it is neither suspended nor waits for any.
    pub fn is_running(&self, id: LeaseId) -> bool {
        let lease = self.leases.get(id);
        lease.is_some_and(|lease| lease.standing == Standing::Running)
    }

    /// Returns the tenant of a lease; `None` also if it is not known, as after a restart of the scheduler.
    pub fn tenant_of(&self, id: LeaseId) -> Option<&TenantName> {
        self.leases.get(id)?.tenant.as_ref()
    }

    /// Returns the client of a lease of which a worker has snapshots, or may have: it runs the lease, keeps its snapshots or
    /// holds them while the lease is suspended.
    pub fn owner_of_snapshots(&self, id: LeaseId, worker: WorkerId) -> Option<ClientId> {
        let lease = self.leases.get(id)?;
        let mut devices = lease.lease_devices.keys();
        let runs = devices.any(|device_ref| device_ref.worker == worker);
        let mut keepers = lease.keepers.values().flat_map(Keeper::workers);
        let mut holders = lease.parts.iter().flat_map(|part| &part.holders);
        let has_some =
            runs || keepers.any(|(keeper, _)| keeper == worker) || holders.any(|it| *it == worker);
        lease.owner.filter(|_| has_some)
    }

    /// Returns whether a device can have been granted with this number: it is not above those that this or an
    /// earlier scheduler has given, as far as the device's worker has reported the latter.
    pub fn may_be_granted(&self, device_ref: DeviceRef, grant: GrantNumber) -> bool {
        self.pool.may_be_granted(device_ref, grant)
    }

    /// Returns the leases of a client, attached or not.
    pub fn leases_of(&self, client: ClientId) -> Vec<LeaseId> {
        self.leases.owned_by(client)
    }

    /// Returns all leases, in the order of their ids.
    pub fn lease_ids(&self) -> impl Iterator<Item = LeaseId> {
        self.leases.iter().map(|(id, _)| id)
    }

    /// Returns the leases that have devices of a worker, or shares of such.
    pub fn leases_at(&self, worker: WorkerId) -> BTreeSet<LeaseId> {
        self.pool.leases_at(worker)
    }

    /// Returns the worker of this name, if it is in the pool.
    pub fn worker_named(&self, name: &str) -> Option<WorkerId> {
        self.pool.worker_named(name)
    }

    /// Handles a gap in which the scheduler did not run: workers and clients get the time
    /// to come back that they get after a restart. No new adoption window opens, since the
    /// engine has lost no state.
    fn resume_after(&mut self, since: Timestamp) {
        let wait = self.options.lease_expiry;
        self.pool.postpone_loss(self.now + wait);
        self.leases.extend_deadlines(since, self.now, wait);
        self.started = self.started + self.now.saturating_since(since);
    }

    fn tick(&mut self) {
        let losses = self.pool.loss_deadlines(self.options.worker_timeout);
        let due = losses.filter(|(at, _)| *at <= self.now);
        for (_, worker) in due.collect::<Vec<_>>() {
            self.remove_lost_worker(worker);
        }
        let ends = self.leases.index().ends();
        let due: BTreeSet<_> = ends
            .take_while(|(at, _)| *at <= self.now)
            .map(|(_, id)| id)
            .collect();
        for id in due {
            let has_client = self.attached_owner(id).is_some();
            if !(has_client && self.outlives_missing_worker(id)) {
                self.end_lease(id, self.overdue_reason(id));
            }
        }
        self.give_up_recorded_workers();
        self.leases.forget_ended(self.now);
    }

    /// Ends the leases that have had devices for as long as their requests allow.
    fn end_leases_whose_time_is_over(&mut self) {
        let over = self.leases.index().time_over();
        let over = over.take_while(|(at, _)| *at <= self.now);
        for (_, id) in over.collect::<Vec<_>>() {
            self.end_lease(id, Some(EndReason::TimeOver));
        }
    }

    /// Returns the reason to report for an overdue lease if one of its workers is missing, or it could
    /// not go on elsewhere. `None` if it ends because its client is absent.
    fn overdue_reason(&self, lease: LeaseId) -> Option<EndReason> {
        let lease = self.leases.get(lease)?;
        if let Standing::Resuming {
            cause: Some(cause), ..
        } = &lease.standing
        {
            return Some(EndReason::NotResumed {
                cause: Box::new(cause.clone()),
                workers: self.holder_names(lease).join(", "),
            });
        }
        let missing = self.missing_worker(lease)?;
        Some(lease.lost().cloned().unwrap_or(missing))
    }

    /// Ends a lease and notifies its connected workers and its attached client. A `reason`
    /// of `None` means that the client itself caused the end, by a command or by staying
    /// away, and need not be notified.
    fn end_lease(&mut self, id: LeaseId, reason: Option<EndReason>) {
        let Some(lease) = self.leases.remove(id, self.now) else {
            return;
        };
        self.end_grants(id, lease.grants());
        for keeper in lease.keepers_and_holders() {
            self.drop_snapshots(keeper, id);
        }
        self.drop_stored(id, &lease);
        if let (Some(owner), Some(reason)) = (lease.owner, reason) {
            self.report_ended(owner, id, reason);
        }
    }

    /// Ends grants of a lease. A worker without a stream gets the command when it joins again.
    fn end_grants(&mut self, id: LeaseId, grants: Vec<(WorkerId, Vec<DeviceGrant>)>) {
        for (worker, grants) in grants {
            self.pool.end(worker, id, &grants);
            if self.pool.is_connected(worker) {
                self.send_end(worker, id, grants);
            }
        }
    }

    fn report_ended(&mut self, client: ClientId, lease: LeaseId, reason: EndReason) {
        if self.clients.contains_key(&client) {
            self.commands.push(Command::LeaseEnded {
                client,
                lease,
                reason,
            });
        }
    }
}
