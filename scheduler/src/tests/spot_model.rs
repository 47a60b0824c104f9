//! The test's own model of spot leases, which give their devices to all other requests.

use super::share_model::needs_of;
use super::world::{SimLease, World, meets_demand, tenant_of};
use super::*;
use crate::lease::{Lease, Standing};
use crate::reason::CannotMove;

impl World {
    /// The engine has ended a lease that could not be suspended: it has run for long enough, and is borrowed; if it is no
    /// spot lease, its request said that it may end. For what it has is checked after the event (`victim_model.rs`).
    pub(super) fn end_reclaimed(&mut self, id: LeaseId) {
        let is_known = self.leases.iter().flatten().any(|(known, _)| *known == id);
        let is_borrowed = is_known && self.is_borrowed(id);
        let leases = self.leases.as_mut();
        let Some(lease) = leases.and_then(|leases| leases.remove(&id)) else {
            return;
        };
        assert!(lease.is_spot || lease.may_end, "{id} must not end");
        assert!(is_borrowed, "{id} is within the guarantee");
        // A durable one might have got snapshots.
        let least = if lease.durability.is_durable() {
            70_000
        } else {
            10_000
        };
        assert!(
            self.now >= lease.running_since + least,
            "{id} has just begun"
        );
        self.add_victim(id, lease);
    }

    /// Returns how long a lease runs in ms before it ends for others, if it may; `None` if it could be suspended, now
    /// or once its snapshots can be reached again.
    pub(super) fn ends_after(&self, id: LeaseId) -> Option<u64> {
        match self.engine.check_suspend(id, Suspender::Administrator) {
            Err(CannotMove::NotDurable) => Some(10_000),
            Err(CannotMove::NotReplaceable | CannotMove::NotRestorable) => Some(70_000),
            Ok(()) | Err(_) => None,
        }
    }

    /// Returns whether a lease that cannot be suspended has run for long enough to end for others.
    pub(super) fn may_end_now(&self, id: LeaseId, lease: &SimLease) -> bool {
        let runs_for = self.ends_after(id);
        lease.may_end && runs_for.is_some_and(|it| self.has_run_for(id, lease, it))
    }

    /// Returns whether a lease runs since so many milliseconds ago at least, and its client is attached.
    fn has_run_for(&self, id: LeaseId, lease: &SimLease, millis: u64) -> bool {
        let known = self.engine.leases().get(id);
        let runs = known.is_some_and(Lease::runs);
        let is_attached = self.clients[lease.client].attached;
        runs && is_attached && self.now >= lease.running_since + millis
    }

    /// Returns whether a spot lease has a device that another lease could get which waits, or has waited before this
    /// event.
    pub(super) fn is_for_lease(&self, spot: &SimLease) -> bool {
        let devices = || spot.lease_devices.iter().map(|it| self.device(*it));
        let mut leases = self.engine.leases().iter();
        let waits = leases.any(|(_, lease)| {
            let is_waiting = matches!(
                lease.standing,
                Standing::Lost(_) | Standing::Resuming { .. }
            );
            let parts = lease.parts.iter().map(|part| part.requirement.clone());
            let lost = lease.lost().and_then(|_| lease.requirement_elsewhere());
            let mut needed = parts.chain(lost);
            let fits = needed.any(|needed| devices().any(|it| needed.accepts(it)));
            is_waiting && !lease.is_spot && fits
        });
        let mut moved = self.moved.iter();
        waits || moved.any(|moved| devices().any(|it| it.kind == moved.kind))
    }

    /// Of the leases that wait before all requests, the first that is no spot lease has too few devices at each worker
    /// with its snapshots, with those of all spot leases that have run for long enough; or it has enough to come.
    pub(super) fn check_spot_for_leases(&self) {
        let Some(leases) = &self.leases else {
            return;
        };
        // A request within a guarantee may come before.
        let id = self.engine.waiting_ids().into_iter().next();
        let first = id.and_then(|id| Some((id, self.engine.leases().get(id)?)));
        let Some((id, first)) = first.filter(|(_, it)| !it.is_spot) else {
            return;
        };
        let attached = first
            .owner
            .is_some_and(|id| self.clients.iter().any(|it| it.attached && it.id == id.0));
        // A request with a reservation may come before, and take what is coming.
        let is_reserved = !self.reserved.is_empty();
        if !attached || is_reserved || first.parts.len() != 1 || self.is_over_limit(first) {
            return;
        }
        let part = &first.parts[0];
        let needs = |_: &DeviceSpec| part.requirement.share;
        let due = leases.iter().filter(|(id, it)| self.is_spot_due(**id, it));
        let due = due.map(|(id, _)| *id);
        let due: BTreeSet<_> = due.collect();
        let room = |gone: &BTreeSet<LeaseId>| self.with_room(&needs, gone, false, id);
        let (room_now, room_then) = (room(&BTreeSet::new()), room(&due));
        let coming = self.coming();
        let devices = |worker: u64, with_spot: bool| {
            let here = self.workers.iter().find(|it| it.id == worker).unwrap();
            let count = here.known.as_ref().map_or(0, |it| it.devices.len());
            let devices = (0..count as u32).map(|index| device_ref(worker, index));
            let suitable = devices.filter(|it| {
                let is_own = self.is_held_for_none_but(id, *it);
                let is_there = coming.contains(it) && is_own || room_now.contains(it);
                let is_freed = self.has_only(*it, &due) && is_own || room_then.contains(it);
                let is_meant = self.is_usable(*it) && part.requirement.accepts(self.device(*it));
                is_meant && (is_there || with_spot && is_freed)
            });
            suitable.count()
        };
        let ends = |worker: WorkerId| self.workers[worker.0 as usize].unanswered.contains(&id);
        // It may go on where it was, once the worker has released it.
        let possible = self.workers.iter().map(|it| WorkerId(it.id));
        let mut possible = possible.filter(|it| part.holders.contains(it) || !ends(*it));
        let is_coming = possible.any(|it| devices(it.0, false) >= part.devices);
        let holders = part.holders.iter().filter(|it| !ends(**it));
        let mut holders = holders.map(|it| it.0);
        assert!(
            is_coming || !holders.any(|it| devices(it, true) >= part.devices),
            "{id} waits, and there are enough devices of spot leases"
        );
    }

    /// If no request is entitled to devices otherwise, none waits that is not for a spot lease and would have
    /// enough with those of spot leases that have run for long enough.
    pub(super) fn check_spot(&self) {
        if self.leases.is_none() {
            return;
        }
        let order = &self.order;
        let has_guaranteed = order.iter().any(|(_, is_guaranteed)| *is_guaranteed);
        let is_other = has_guaranteed || !self.reserved.is_empty();
        // They make room in the order of reservations, in which they do not count: otherwise another request could be
        // the first once some have made room.
        let first = self.reservation_order().into_iter().next();
        let Some(first) = first.filter(|_| !is_other) else {
            return;
        };
        let first = &self.waiting[first];
        let fits = |device_ref: &DeviceRef| {
            let device = self.device(*device_ref);
            meets_demand(device, &first.demand) && self.is_allowed(first, device, true)
        };
        let needed = self.engine.needed_before_spot();
        self.check_too_few(first, &needed, fits, |id, lease| {
            self.is_spot_due(id, lease)
        });
    }

    /// The first request does not wait because of its tenant's limit if enough devices are free for it, the limit would
    /// allow them without spot leases of the tenant that have run for long enough, and there will not be enough within
    /// the limit anyway.
    pub(super) fn check_own_spot(&self) {
        let first = self.order.first().copied();
        let (Some((first, _)), Some(leases)) = (first, &self.leases) else {
            return;
        };
        let first = &self.waiting[first];
        let tenant = tenant_of(first.client);
        if first.demand.is_spot || !self.reserved.is_empty() {
            return;
        }
        let own = leases.iter().filter(|(id, lease)| {
            tenant_of(lease.client) == tenant && self.is_spot_due(**id, lease)
        });
        let mut gone = crate::Amounts::default();
        for (id, _) in own {
            gone.add(&self.engine.leases().get(*id).unwrap().charge);
        }
        let room = self.with_room(&needs_of(first), &BTreeSet::new(), false, first.lease);
        let coming = self.coming().into_iter().chain(room).filter(|it| {
            let device = self.device(*it);
            let is_meant = meets_demand(device, &first.demand);
            is_meant && self.is_allowed(first, device, true)
        });
        if coming.count() >= first.demand.devices as usize {
            return;
        }
        let mut free = self.grantable_to(first);
        free.retain(|it| meets_demand(self.device(*it), &first.demand));
        free.retain(|it| self.is_allowed_without(first, self.device(*it), &gone));
        assert!(
            free.len() < first.demand.devices as usize,
            "{} waits because of spot leases of its tenant",
            first.demand
        );
    }

    /// Returns whether a lease is a spot lease that has run for long enough to be suspended, or else to end.
    pub(super) fn is_spot_due(&self, id: LeaseId, lease: &SimLease) -> bool {
        let can_suspend = self.engine.check_suspend(id, Suspender::Administrator);
        let runs_for = match can_suspend {
            Ok(()) => Some(10_000),
            Err(_) => self.ends_after(id),
        };
        lease.is_spot && runs_for.is_some_and(|it| self.has_run_for(id, lease, it))
    }
}
