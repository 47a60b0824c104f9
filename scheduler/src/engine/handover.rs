//! Snapshots of suspended leases that are handed over from one worker to another.
//!
//! A worker that is about to stop may be the only one that has the snapshots of a suspended lease. And a
//! lease that was resumed may find free devices only at workers that do not have them. Then a holder sends
//! the snapshots to another worker: its *keeper* for this lease, although nothing of the lease runs. When
//! that one has all of them, it is a holder, too.

use std::collections::BTreeMap;

use tensord_proto::ids::{LeaseId, PartId, WorkerId};

use super::Engine;
use super::suspension::MAX_HELD;
use crate::lease::{Keeper, Lease};

/// A part of a suspended lease whose snapshots a worker is to hand over.
#[derive(Clone, Copy)]
struct Handover {
    /// The position of the part.
    index: u32,
    /// The worker to which to hand them over; `None` if the engine may choose one.
    destination: Option<WorkerId>,
}

impl Engine {
    /// Gives every worker that must hand snapshots of a suspended lease over a keeper for them, if there
    /// is one, and takes keepers back that are not needed any more. A worker hands over one part of a
    /// lease after the other.
    pub(super) fn assign_handovers(&mut self) {
        let suspended = self.leases.iter().filter(|(_, lease)| lease.is_suspended());
        for id in suspended.map(|(id, _)| id).collect::<Vec<_>>() {
            let Some(lease) = self.leases.get(id) else {
                continue;
            };
            let needed = self.needed_handovers(id, lease);
            let is_needed = |(source, keeper): (&WorkerId, &Keeper)| {
                let mut parts = needed.get(source).into_iter().flatten();
                parts.any(|handover| handover.index == keeper.part)
            };
            let unneeded = lease.keepers.iter().filter(|it| !is_needed(*it));
            let unneeded: Vec<_> = unneeded.map(|(source, _)| *source).collect();
            for source in unneeded {
                self.withdraw_handover(id, source);
            }
            for (source, parts) in needed {
                let lease = self.leases.get(id);
                let begun = lease.and_then(|lease| lease.keepers.get(&source));
                let begun = begun.map(|keeper| keeper.part);
                let mut present = parts.iter().filter(|it| Some(it.index) == begun);
                let next = present.next().or(parts.first());
                if let Some(handover) = next {
                    self.assign_handover(id, source, *handover);
                }
            }
        }
    }

    /// When a keeper has all snapshots of the part of a suspended lease that `source` was to hand over,
    /// makes it a holder; the only one, if `source` drains. `at_keepers` has the parts of which `source`
    /// reports that, with the keepers.
    pub(super) fn on_handed_over(&mut self, source: WorkerId, at_keepers: &[(PartId, WorkerId)]) {
        let is_draining = self.pool.is_draining(source);
        for &(part, worker) in at_keepers {
            let id = part.lease;
            let is_connected = self.pool.is_connected(worker);
            let Some(lease) = self.leases.get_mut(id).filter(|_| is_connected) else {
                continue;
            };
            let keeper = lease.keepers.get(&source);
            let is_its = keeper
                .is_some_and(|it| (it.worker, it.part) == (worker, part.index) && it.is_announced);
            if !lease.is_suspended() || !is_its {
                continue;
            }
            lease.keepers.remove(&source);
            if let Some(part) = lease.parts.get_mut(part.index as usize) {
                let gone = Some(source).filter(|_| is_draining);
                part.holders
                    .retain(|holder| *holder != worker && Some(*holder) != gone);
                part.holders.push(worker);
            }
            let is_holder = lease.holders().contains(&source);
            self.hold_snapshots(worker, id);
            match (is_draining, is_holder) {
                (true, true) => self.drop_part(source, id, part.index),
                (true, false) => self.drop_snapshots(source, id),
                (false, _) => {}
            }
        }
    }

    /// Returns the parts of a suspended lease that workers must hand over: to the destination of a part
    /// that lacks its snapshots, if the lease was resumed; or to any worker, from the first of a part's
    /// holders if all of these drain, and no store has the part. The latter does not change when the
    /// worker's stream breaks: otherwise the keeper would drop what it has received.
    fn needed_handovers(&self, id: LeaseId, lease: &Lease) -> BTreeMap<WorkerId, Vec<Handover>> {
        let is_draining = |worker: &WorkerId| self.pool.is_draining(*worker);
        let destinations = self.destinations(id, lease).unwrap_or_default();
        let mut needed = BTreeMap::<_, Vec<_>>::new();
        for (index, part) in (0..).zip(&lease.parts) {
            let destination = destinations.get(index as usize).copied();
            let destination = destination.filter(|it| !self.holders_and_loaders(part).contains(it));
            let must_leave = part.store.is_none() && part.holders.iter().all(is_draining);
            let source = match destination {
                Some(_) => self.source_of(id, lease, index, part),
                None => part.holders.first().copied().filter(|_| must_leave),
            };
            if let Some(source) = source {
                let handover = Handover { index, destination };
                needed.entry(source).or_default().push(handover);
            }
        }
        needed
    }

    /// Gives `source` a keeper for its snapshots of a part of a suspended lease, if there is one: the
    /// present one if it can go on, or else the one with free devices that has no other part, and the
    /// fewest suspended leases.
    fn assign_handover(&mut self, id: LeaseId, source: WorkerId, handover: Handover) {
        let Handover { index, destination } = handover;
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let Some(part) = lease.parts.get(index as usize) else {
            return;
        };
        let can_hold = |worker: &WorkerId| {
            *worker != source
                && destination.is_none_or(|it| it == *worker)
                && !self.pool.is_ending(*worker, id)
                && self.pool.can_keep(*worker, &part.requirement, part.devices)
        };
        let of_others = lease.keepers_and_holders();
        let has_free = |worker: WorkerId| {
            let free = self
                .pool
                .free_fitting(worker, id, &part.requirement, part.devices);
            free.is_some()
        };
        let present = lease.keepers.get(&source).map(|keeper| keeper.worker);
        // Its process may still be ending: the snapshots are not held yet.
        let is_ready = !self.pool.is_ending(source, id);
        if present.as_ref().is_some_and(can_hold) {
            if is_ready {
                self.announce_keeper(id, source);
            }
            return;
        }
        let has_room = |worker: &WorkerId| {
            self.pool.is_connected(*worker) && self.to_be_held_at(*worker) < MAX_HELD
        };
        let may_begin = is_ready && self.pool.is_connected(source);
        let candidates = self.pool.ids().filter(can_hold).filter(has_room);
        let candidates = candidates.filter(|_| may_begin);
        let best = candidates.min_by_key(|worker| {
            let has_other_part = of_others.contains(worker);
            (
                !has_free(*worker),
                has_other_part,
                self.to_be_held_at(*worker),
            )
        });
        let keeper = best.map(|worker| Keeper {
            worker,
            part: index,
            requirement: part.requirement.clone(),
            is_announced: false,
            is_kept: false,
        });
        self.withdraw_handover(id, source);
        if let (Some(keeper), Some(lease)) = (keeper, self.leases.get_mut(id)) {
            lease.keepers.insert(source, keeper);
            self.announce_keeper(id, source);
        }
    }

    /// Takes the keeper back to which `source` was to hand the snapshots of a suspended lease over.
    fn withdraw_handover(&mut self, id: LeaseId, source: WorkerId) {
        let Some(lease) = self.leases.get_mut(id) else {
            return;
        };
        let Some(keeper) = lease.keepers.remove(&source) else {
            return;
        };
        let is_needed = lease.keepers_and_holders().contains(&keeper.worker);
        let part = lease.parts.get(keeper.part as usize);
        let is_holder = part.is_some_and(|part| part.holders.contains(&keeper.worker));
        let is_held = lease.holders().contains(&source);
        match is_needed {
            true if is_holder => {}
            true => self.drop_part(keeper.worker, id, keeper.part),
            false => self.drop_snapshots(keeper.worker, id),
        }
        if is_held {
            self.hold_snapshots(source, id);
        }
    }

    /// Returns the number of suspended leases of which a worker has snapshots, or is to get some.
    pub(super) fn to_be_held_at(&self, worker: WorkerId) -> usize {
        let suspended = self.leases.iter().filter(|(_, lease)| lease.is_suspended());
        let held = suspended.filter(|(_, lease)| lease.keepers_and_holders().contains(&worker));
        held.count()
    }
}
