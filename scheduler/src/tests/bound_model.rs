//! The test's own model of how long a request with a reservation waits at most.
//!
//! The rule (`docs/teams.md`): leases that had devices of the reservation before it was made keep these. All other
//! devices of it are free, being released, or of leases that have passed the request or are spot leases, and that make
//! room for it once they have run for 10 s. So from the moment when these are *enough* for the request, it waits for 10 s
//! at most, and then for workers to release devices.
//!
//! That holds as long as nothing comes before the request: no request within a guarantee and no lost lease waits, no
//! other request of its tenant counts in the limit that they would exceed together, and no lease gets devices without
//! passing it. It begins anew with an event that changes the devices of the pool or how leases
//! can make room: a worker joins, leaves or drains, a client comes or goes, or the policy or a priority changes.

use std::collections::{BTreeMap, BTreeSet};

use super::reservation_model::{Class, class_of};
use super::world::{SimLease, SimRequest, World, meets_demand};
use super::*;

/// Time in ms after which a lease makes room that can be suspended.
const MIN_RUN_TIME: u64 = 10_000;

/// What the wait of a request with a reservation depends on.
pub(super) struct Bound {
    /// The devices that are reserved.
    classes: BTreeSet<Class>,
    /// The leases that keep such devices: they had them before, or came before the request since.
    keep: BTreeSet<LeaseId>,
    /// Since when there are enough devices without those that these keep.
    enough_since: Option<u64>,
}

/// Returns whether an event changes the devices of the pool, or how leases can make room, by itself.
fn begins_anew(event: &Event) -> bool {
    match event {
        Event::Tick | Event::EndLease { .. } => false,
        Event::Worker { event, .. } => !matches!(
            event,
            WorkerEvent::Heartbeat
                | WorkerEvent::SnapshotsKept { .. }
                | WorkerEvent::Idle { .. }
                | WorkerEvent::Released { .. }
        ),
        Event::Client { event, .. } => !matches!(
            event,
            ClientEvent::Request { .. }
                | ClientEvent::Cancel { .. }
                | ClientEvent::Release { .. }
                | ClientEvent::Restorable { .. }
        ),
        _ => true,
    }
}

impl World {
    /// Requests with reservations wait no longer than the rule says. `workers_changed` is whether one was lost in this
    /// event.
    pub(super) fn check_bounds(&mut self, event: &Event, workers_changed: bool) {
        let mut before = std::mem::take(&mut self.bounds);
        if begins_anew(event) || workers_changed || self.leases.is_none() {
            before.clear();
        }
        let mut bounds = BTreeMap::new();
        for (lease, classes) in &self.reserved {
            let mut waiting = self.waiting.iter();
            let waiting = waiting.find(|it| it.lease == *lease);
            let whole = waiting.filter(|it| it.demand.share_permille.is_none());
            let (Some(waiting), Some(leases)) = (whole, &self.leases) else {
                continue;
            };
            let known = before.remove(lease).filter(|it| it.classes == *classes);
            let holders = leases.iter().filter(|(_, it)| self.has_one_of(it, classes));
            let passes = |(_, it): &(&LeaseId, &SimLease)| it.passed.contains(lease) || it.is_spot;
            let keep: BTreeSet<_> = match &known {
                None => holders.map(|(id, _)| *id).collect(),
                Some(_) => holders
                    .filter(|it| !passes(it))
                    .map(|(id, _)| *id)
                    .collect(),
            };
            // Another lease that has come before it has taken devices.
            let known = known.filter(|known| keep.is_subset(&known.keep));
            let mut bound = match known {
                Some(known) => known,
                None => Bound {
                    classes: classes.clone(),
                    keep,
                    enough_since: None,
                },
            };
            self.check_bound(waiting, &mut bound);
            bounds.insert(*lease, bound);
        }
        self.bounds = bounds;
    }

    /// Returns whether a lease has devices of these classes.
    fn has_one_of(&self, lease: &SimLease, classes: &BTreeSet<Class>) -> bool {
        let mut devices = lease.lease_devices.iter();
        lease.lost_until.is_none()
            && devices.any(|it| classes.contains(&class_of(self.device(*it))))
    }

    fn check_bound(&self, waiting: &SimRequest, bound: &mut Bound) {
        let has_guaranteed = self.order.iter().any(|(_, is_guaranteed)| *is_guaranteed);
        let is_first = !has_guaranteed
            && self.engine.needed_by_leases().is_empty()
            && !self.could_be_over_limit_with_others(waiting);
        let wanted = waiting.demand.devices as usize;
        let passing = self.leases.iter().flatten().filter(|(id, lease)| {
            let keeps = bound.keep.contains(id) && !lease.is_spot;
            !keeps && self.makes_room_in_time(**id, lease)
        });
        let passing = passing.map(|(id, _)| *id).collect();
        if !is_first || self.devices_without(waiting, &bound.classes, &passing) < wanted {
            bound.enough_since = None;
            return;
        }
        let since = *bound.enough_since.get_or_insert(self.now);
        let coming = self.devices_without(waiting, &bound.classes, &BTreeSet::new());
        assert!(
            coming >= wanted || self.now < since + MIN_RUN_TIME,
            "{} has a reservation, and {coming} devices to come, although there are enough since {since} at {}",
            waiting.demand,
            self.now
        );
    }

    /// Returns whether a lease can be suspended once it has run for long enough, or ends then.
    fn makes_room_in_time(&self, id: LeaseId, lease: &SimLease) -> bool {
        let can_suspend = self.engine.check_suspend(id, Suspender::Administrator);
        let ends = can_suspend.is_err() && self.ends_after(id) == Some(MIN_RUN_TIME);
        let may_end = ends && (lease.is_spot || lease.may_end);
        let is_attached = self.clients[lease.client].attached;
        let can = can_suspend.is_ok() || may_end && is_attached;
        !lease.lease_devices.is_empty() && self.is_borrowed(id) && can
    }

    /// Returns the number of devices of these classes that a request could have without these leases.
    fn devices_without(
        &self,
        waiting: &SimRequest,
        classes: &BTreeSet<Class>,
        gone: &BTreeSet<LeaseId>,
    ) -> usize {
        let left = self.left(&[waiting.lease], &[], gone);
        let free = left.iter().filter(|(device_ref, taken)| {
            let device = self.device(**device_ref);
            let is_one =
                classes.contains(&class_of(device)) && meets_demand(device, &waiting.demand);
            taken.is_empty() && is_one && self.is_allowed(waiting, device, true)
        });
        free.count()
    }
}
