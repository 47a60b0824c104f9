//! The leases and requests that wait for devices, in the order in which they get them, and why.

use tensord_proto::ids::{ClientId, LeaseId, RequestId, WorkerId};

use super::Engine;
use crate::device::{DeviceSpec, Requirement};
use crate::lease::{Lease, Standing, SuspendedPart};
use crate::queue::QueuedRequest;
use crate::reason::EndReason;
use crate::time::Timestamp;
use crate::waiting::{LeftWorker, NeededDevices, Waiter, Waiting};

/// What a part of a lease needs that waits for devices, all of one worker.
pub(super) struct WaitingPart<'a> {
    /// The number of devices.
    pub(super) devices: usize,
    pub(super) requirement: Requirement,
    /// The workers that have its snapshots.
    pub(super) with_snapshots: Vec<WorkerId>,
    /// Returns whether the part could go on at a worker, which has its snapshots or could get them.
    pub(super) can_run_at: Box<dyn Fn(WorkerId) -> bool + 'a>,
}

impl Engine {
    /// Returns the ids of the leases and requests that wait for devices. Each gets devices before those
    /// that follow it, unless there are too few for it, and enough for a later one.
    pub fn waiting_ids(&self) -> Vec<LeaseId> {
        let leases = self.leases_without_devices().into_iter();
        let waits = |id: &LeaseId| {
            let lease = self.leases.get(*id);
            lease.is_some_and(|it| !matches!(it.standing, Standing::Suspended { .. }))
        };
        let (later, leases): (Vec<_>, Vec<_>) = leases
            .filter(waits)
            .partition(|id| self.comes_after_guaranteed(*id));
        let requests = self.queue_order().into_iter();
        let is_guaranteed = |lease: &LeaseId| self.queue.guaranteed().contains(*lease);
        let (guaranteed, others): (Vec<_>, Vec<_>) = requests.partition(is_guaranteed);
        let first = leases.into_iter().chain(guaranteed);
        first.chain(later).chain(others).collect()
    }

    /// Returns the lease that a request of a client would become, if it is pending.
    pub fn lease_of_request(&self, client: ClientId, request: RequestId) -> Option<LeaseId> {
        self.queue.lease_of(client, request)
    }

    /// Returns what a lease or request waits for; `None` if there is none with this id that waits.
    pub fn waiting(&self, id: LeaseId) -> Option<Waiting> {
        self.waiting_lease(id)
            .or_else(|| Some(self.waiting_request(self.queue.get(id)?)))
    }

    /// Returns the leases that have no devices, in the order in which they get some: those first that a
    /// death has interrupted, as they had devices until then; and then by the time at which the lease ends,
    /// or would end if it had been lost when it was resumed.
    pub(super) fn leases_without_devices(&self) -> Vec<LeaseId> {
        self.in_order(self.leases.index().unsettled())
    }

    /// Returns those of the leases that have no devices for which something may have to be done now, in the same order:
    /// none that was suspended for others if the pool has too few free devices for it.
    pub(super) fn leases_to_look_at(&self) -> Vec<LeaseId> {
        let index = self.leases.index();
        let may_make_room = index.has_spot();
        let has_free = |requirement: &Requirement, count| {
            may_make_room || self.has_free_in_pool(requirement, count)
        };
        let patient = index.patient().with(has_free);
        self.in_order(index.restless().chain(patient))
    }

    /// Returns whether the whole pool has so many free devices that meet a requirement, or room for the share that it needs.
    pub(super) fn has_free_in_pool(&self, requirement: &Requirement, count: usize) -> bool {
        let index = self.pool.index();
        let accepts = |device: &DeviceSpec| requirement.accepts(device);
        let share_of = |device: &DeviceSpec| requirement.share.filter(|_| accepts(device));
        index.free().count(accepts) >= count || index.with_room(share_of).next().is_some()
    }

    /// Returns whether a lease waits for devices as its client knows, there are too few for it, and none would be held
    /// back for it. There may be many such leases.
    pub(super) fn waits_behind_others(&self, id: LeaseId) -> bool {
        let lease = self.leases.get(id);
        lease.is_some_and(|lease| {
            let may_make_room = self.leases.index().has_spot() && !lease.is_spot;
            lease.is_reclaimed
                && lease.is_standing_reported
                && !may_make_room
                && self.lacks_devices(id, lease)
        })
    }

    /// Returns whether the whole pool has too few free devices for a lease that was resumed, and is not being handed over.
    fn lacks_devices(&self, id: LeaseId, lease: &Lease) -> bool {
        let is_resumed = matches!(lease.standing, Standing::Resuming { .. });
        if !is_resumed || !lease.keepers.is_empty() || self.pool.is_held_back_for(id) {
            return false;
        }
        let mut parts = lease.parts.iter();
        parts.any(|part| !self.has_free_in_pool(&part.requirement, part.devices))
    }

    /// Returns those of these leases that have no devices, in the order in which they get some.
    fn in_order(&self, leases: impl Iterator<Item = LeaseId>) -> Vec<LeaseId> {
        let ordered = leases.filter_map(|id| {
            let lease = self.leases.get(id)?;
            let (is_interrupted, since) = match &lease.standing {
                Standing::Running => return None,
                Standing::Lost(_) => (false, lease.rejoin_by),
                Standing::Resuming { since, cause } => {
                    let timeout = lease.recovery_timeout(&self.options);
                    (cause.is_some(), lease.rejoin_by.or(Some(*since + timeout)))
                }
                Standing::Suspended { .. } => (false, None),
            };
            Some((!is_interrupted, since, id))
        });
        let mut ordered: Vec<_> = ordered.collect();
        ordered.sort_unstable();
        ordered.into_iter().map(|(.., id)| id).collect()
    }

    /// Returns what a lease waits for; `None` if it is suspended, or has devices.
    fn waiting_lease(&self, id: LeaseId) -> Option<Waiting> {
        let lease = self.leases.get(id)?;
        let (cause, resumed_at) = match &lease.standing {
            Standing::Running | Standing::Suspended { .. } => return None,
            Standing::Lost(reason) => (Some(what_happened(reason)), None),
            Standing::Resuming { since, .. } if lease.is_reclaimed => {
                (Some(EndReason::Reclaimed), Some(*since))
            }
            Standing::Resuming { since, cause } => {
                (cause.clone(), cause.is_none().then_some(*since))
            }
        };
        Some(Waiting {
            lease: id,
            client: lease.owner,
            tenant: lease.tenant.clone(),
            is_at_limit: self.is_over_limit(id) || self.is_in_the_way(id),
            waiter: Waiter::Lease {
                cause,
                resumed_at,
                is_client_attached: self.attached_owner(id).is_some(),
                ends_at: lease.ends_at(),
                receivers: self.receivers(id, lease),
                left_workers: self.left_workers(lease),
            },
            needs: self.needs_of(id, lease),
        })
    }

    /// Returns the names of the workers that have devices for the parts of a lease and get the snapshots of
    /// these.
    fn receivers(&self, id: LeaseId, lease: &Lease) -> Vec<String> {
        if lease.lost().is_some() || lease.keepers.is_empty() {
            return Vec::new();
        }
        let destinations = self.destinations(id, lease);
        let destinations = (0..).zip(destinations.unwrap_or_default());
        let receiving = destinations.filter(|(part, it)| lease.receiver(*part) == Some(*it));
        let name = |(_, worker)| Some(self.pool.get(worker)?.name().to_owned());
        receiving.filter_map(name).collect()
    }

    fn left_workers(&self, lease: &Lease) -> Vec<LeftWorker> {
        let left = lease.excluded.iter();
        let left = left.filter(|(worker, _)| self.is_excluded(lease, **worker));
        let left = left.filter_map(|(worker, exclusion)| {
            let name = self.pool.get(*worker)?.name().to_owned();
            let until = exclusion.until;
            Some(LeftWorker { name, until })
        });
        left.collect()
    }

    /// Returns the devices that a lease needs, of the workers that have its snapshots or could get them.
    fn needs_of(&self, id: LeaseId, lease: &Lease) -> Vec<NeededDevices> {
        let parts = self.parts_that_wait(id, lease).into_iter();
        let needed =
            parts.map(|part| self.needed(id, part.devices, &part.requirement, part.can_run_at));
        needed.collect()
    }

    /// Returns what the parts of a lease need which waits for devices.
    pub(super) fn parts_that_wait<'a>(
        &'a self,
        id: LeaseId,
        lease: &'a Lease,
    ) -> Vec<WaitingPart<'a>> {
        match &lease.standing {
            Standing::Lost(_) => {
                let part = lease
                    .requirement_elsewhere()
                    .map(|requirement| WaitingPart {
                        devices: lease.lease_devices.len(),
                        requirement,
                        with_snapshots: self.workers_with_lost(lease),
                        can_run_at: Box::new(self.workers_for_lost(lease)),
                    });
                part.into_iter().collect()
            }
            Standing::Resuming { .. } => {
                let parts = (0..).zip(&lease.parts);
                let parts = parts.map(|(index, part)| WaitingPart {
                    devices: part.devices,
                    requirement: part.requirement.clone(),
                    with_snapshots: self.holders_and_loaders(part),
                    can_run_at: Box::new(self.workers_for_part(id, lease, index, part)),
                });
                parts.collect()
            }
            Standing::Running | Standing::Suspended { .. } => Vec::new(),
        }
    }

    /// Returns a check of whether a lost lease could go on at a worker, which has its snapshots or could get them.
    fn workers_for_lost(&self, lease: &Lease) -> impl Fn(WorkerId) -> bool + use<> {
        let keeper = lease.only_keeper();
        let can_be_sent = keeper.is_some_and(|it| it.is_kept && self.pool.is_connected(it.worker));
        let with_snapshots = self.workers_with_lost(lease);
        move |worker| can_be_sent || with_snapshots.contains(&worker)
    }

    /// Returns the workers that have the snapshots of a lost lease, in memory or in their store.
    fn workers_with_lost(&self, lease: &Lease) -> Vec<WorkerId> {
        let keeper = lease.only_keeper().map(|it| it.worker);
        let store = lease.only_stored().map(|stored| stored.store);
        keeper
            .into_iter()
            .chain(self.workers_with_store(store))
            .collect()
    }

    /// Returns a check of whether a part of a suspended lease could go on at a worker, which has its snapshots or
    /// could get them.
    fn workers_for_part<'a>(
        &'a self,
        id: LeaseId,
        lease: &'a Lease,
        index: u32,
        part: &SuspendedPart,
    ) -> impl Fn(WorkerId) -> bool + 'a {
        let with_snapshots = self.holders_and_loaders(part);
        let can_be_sent = self.source_of(id, lease, index, part).is_some();
        move |worker| {
            let can_get = can_be_sent && !self.is_avoided(lease, worker);
            let is_excluded = self.is_excluded(lease, worker);
            !is_excluded && (can_get || with_snapshots.contains(&worker))
        }
    }

    /// Returns `count` devices of one worker that a part of a lease needs.
    fn needed(
        &self,
        id: LeaseId,
        count: usize,
        requirement: &Requirement,
        can_run_at: impl Fn(WorkerId) -> bool,
    ) -> NeededDevices {
        let is_suitable = |worker: WorkerId, device: &DeviceSpec| {
            can_run_at(worker) && requirement.accepts(device)
        };
        NeededDevices {
            count,
            share_permille: requirement.share.map(|share| share.permille),
            at_one_worker: true,
            suitable: self.pool.suitable(id, is_suitable, |_| requirement.share),
        }
    }

    /// Returns the request that has a reservation because of which another one may not get some of the devices
    /// that meet its demand.
    pub(super) fn reservation_before(&self, queued: &QueuedRequest) -> Option<LeaseId> {
        let (lease, demand) = (queued.lease, &queued.demand);
        let classes = self.pool.classes().filter(|it| demand.accepts(it));
        let mut before = classes.filter_map(|it| self.reservation_against(lease, demand, it));
        before.next().map(|it| it.lease)
    }

    /// Returns when enough devices will be free for a request, if that is known.
    fn enough_for(&self, queued: &QueuedRequest) -> Option<Timestamp> {
        let counts = self.counts_for(&queued.tenant, queued.rank());
        let may_get = self.may_get(queued, &counts);
        self.enough_at(queued.lease, queued.demand.devices as usize, may_get)
    }

    fn waiting_request(&self, queued: &QueuedRequest) -> Waiting {
        let demand = &queued.demand;
        let accepts = |_, device: &DeviceSpec| demand.accepts(device);
        let share_of = |device: &DeviceSpec| demand.share_of(device);
        let suitable = self.pool.suitable(queued.lease, accepts, share_of);
        Waiting {
            lease: queued.lease,
            client: Some(queued.client),
            tenant: Some(queued.tenant.clone()),
            is_at_limit: self.is_at_limit(queued),
            waiter: Waiter::Request {
                demand: demand.clone(),
                since: queued.since,
                priority: queued.priority,
                is_guaranteed: self.queue.guaranteed().contains(queued.lease),
                has_reservation: self.reservation_of(queued.lease).is_some(),
                reserved_for: self.reservation_before(queued),
                enough_at: self.enough_for(queued),
            },
            needs: vec![NeededDevices {
                count: demand.devices as usize,
                share_permille: demand.share_permille,
                at_one_worker: false,
                suitable,
            }],
        }
    }
}

/// Returns what happened to the worker of a lost lease. The reason that the lease has for its end may also
/// name the places at which it could have gone on.
pub(super) fn what_happened(reason: &EndReason) -> EndReason {
    match reason {
        EndReason::NotReplaced { gone, .. } => (**gone).clone(),
        other => other.clone(),
    }
}
