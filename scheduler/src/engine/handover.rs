//! Snapshots of suspended leases that are handed over from one worker to another.
//!
//! A worker that is about to stop may be the only one that has the snapshots of a suspended lease. And a
//! lease that was resumed may find free devices only at workers that do not have them. Then a holder sends
//! the snapshots to another worker: its *keeper* for this lease, although nothing of the lease runs. When
//! that one has all of them, it is a holder, too.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tensord_proto::ids::{LeaseId, PartId, WorkerId};

use super::Engine;
use super::durable::RECORDED_KEEPER_TIMEOUT;
use super::suspension::have_snapshots;
use crate::device::Requirement;
use crate::event::{HandedOver, HandoverOutcome};
use crate::lease::{Keeper, Lease, MAX_HELD};
use crate::reason::EndReason;

/// How long a worker gets no snapshots of a lease after a handover to it has failed: it may have no room for
/// them, or the two workers cannot reach each other.
const RETRY_AFTER: Duration = Duration::from_secs(30);

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
    /// lease after the other. `changed` has the leases that have changed, and those for which a worker that
    /// has changed matters. If the pool [is settled](Self::is_settled), no other worker is there for the others.
    pub(super) fn assign_handovers(&mut self, changed: &BTreeSet<LeaseId>, is_settled: bool) {
        let index = self.leases.index();
        let mut due: BTreeSet<_> = index.handing_over().collect();
        due.extend(changed);
        if !is_settled {
            let has_free = |it: &Requirement, count| self.has_free_in_pool(it, count);
            due.extend(index.restless().chain(index.patient().with(has_free)));
            // These need another worker, whichever that is.
            let draining = self.pool.index().draining().iter();
            due.extend(draining.flat_map(|worker| index.of_worker(*worker)));
        }
        for id in due {
            let Some(lease) = self.leases.get(id).filter(|lease| lease.is_suspended()) else {
                continue;
            };
            let needed = self.needed_handovers(id, lease);
            let is_needed = |(source, keeper): (&WorkerId, &Keeper)| {
                let mut parts = needed.get(source).into_iter().flatten();
                parts.any(|handover| handover.index == keeper.part)
            };
            // After a restart of the scheduler, these workers may have yet to join.
            let is_soon = self.now < self.started + RECORDED_KEEPER_TIMEOUT;
            let is_recorded = |(source, keeper): (&WorkerId, &Keeper)| {
                is_soon && (self.may_yet_join(*source) || self.may_yet_join(keeper.worker))
            };
            let stays = |it: (&WorkerId, &Keeper)| is_needed(it) || is_recorded(it);
            let unneeded = lease.keepers.iter().filter(|it| !stays(*it));
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

    /// When a keeper has all snapshots of a part of a suspended lease that `source` was to hand over, makes
    /// it a holder; the only one, if `source` drains. If it could not get them, another worker may.
    pub(super) fn on_handed_over(&mut self, source: WorkerId, reports: &[HandedOver]) {
        for report in reports {
            let PartId { lease: id, index } = report.to.part;
            let Some(lease) = self.leases.get(id).filter(|lease| lease.is_suspended()) else {
                continue;
            };
            let keeper = lease.keepers.get(&source);
            // Not of an earlier handover, which may have been withdrawn.
            let is_its = keeper.is_some_and(|it| it.assigned(id) == report.to && it.is_announced);
            if !is_its {
                continue;
            }
            match report.outcome {
                HandoverOutcome::Done if self.pool.is_connected(report.to.worker) => {
                    self.finish_handover(id, index, source, report.to.worker);
                }
                HandoverOutcome::Done => {}
                HandoverOutcome::Failed => {
                    if let Some(mut lease) = self.leases.get_mut(id) {
                        lease
                            .avoided
                            .insert(report.to.worker, self.now + RETRY_AFTER);
                    }
                    self.withdraw_handover(id, source);
                }
                HandoverOutcome::Missing => self.remove_holder(id, index, source),
            }
        }
    }

    /// Removes a worker from the holders of a part that does not have its snapshots. Ends the lease if there
    /// is no other one.
    fn remove_holder(&mut self, id: LeaseId, index: u32, source: WorkerId) {
        self.withdraw_handover(id, source);
        let Some(mut lease) = self.leases.get_mut(id) else {
            return;
        };
        if let Some(part) = lease.parts.get_mut(index as usize) {
            part.holders.retain(|holder| *holder != source);
        }
        let is_over = !have_snapshots(&lease.parts);
        drop(lease);
        if is_over {
            let name = self.pool.get(source).map(|known| known.name().to_owned());
            let reason = EndReason::SnapshotsLost {
                worker: source,
                name: name.unwrap_or_default(),
            };
            self.end_lease(id, Some(reason));
        }
    }

    fn finish_handover(&mut self, id: LeaseId, index: u32, source: WorkerId, keeper: WorkerId) {
        let is_draining = self.pool.is_draining(source);
        let Some(mut lease) = self.leases.get_mut(id) else {
            return;
        };
        lease.keepers.remove(&source);
        if let Some(part) = lease.parts.get_mut(index as usize) {
            let gone = Some(source).filter(|_| is_draining);
            part.holders
                .retain(|holder| *holder != keeper && Some(*holder) != gone);
            part.holders.push(keeper);
        }
        drop(lease);
        self.hold_snapshots(keeper, id, Some(index));
        match is_draining {
            true => self.drop_kept(source, id, index),
            // The handover is over.
            false => self.hold_snapshots(source, id, Some(index)),
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
    /// present one if it can go on, or else the one that could run it, with free devices and no other
    /// part, and the fewest suspended leases.
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
                && self.pool.stays(*worker)
        };
        let can_run = |worker: WorkerId| self.pool.can_run(worker, &part.requirement, part.devices);
        let of_others = lease.keepers_and_holders();
        let (requirement, count) = (&part.requirement, part.devices);
        let has_free = |worker| self.pool.has_free(worker, id, requirement, count);
        let present = lease.keepers.get(&source).map(|keeper| keeper.worker);
        // Its process may still be ending: the snapshots are not held yet.
        let is_ready = !self.pool.is_ending(source, id);
        if present.as_ref().is_some_and(can_hold) {
            if is_ready {
                self.announce_keeper(id, source);
            }
            return;
        }
        let has_room =
            |worker: &WorkerId| self.pool.is_connected(*worker) && self.has_room(*worker);
        let may_begin = is_ready && self.pool.is_connected(source);
        let candidates = self.pool.ids().filter(can_hold).filter(has_room);
        let candidates = candidates.filter(|_| may_begin);
        let best = candidates.min_by_key(|worker| {
            let has_other_part = of_others.contains(worker);
            (
                // Better than to lose them with the worker that drains.
                self.is_avoided(lease, *worker),
                !can_run(*worker),
                !has_free(*worker),
                has_other_part,
                self.leases.index().held(*worker),
            )
        });
        let keeper = best.map(|worker| Keeper {
            worker,
            part: index,
            assignment: 0,
            requirement: part.requirement.clone(),
            is_announced: false,
            is_kept: false,
            previous: None,
        });
        self.withdraw_handover(id, source);
        let Some(keeper) = keeper else {
            return;
        };
        if let Some(mut lease) = self.leases.get_mut(id) {
            lease.keepers.insert(source, keeper);
        }
        self.announce_keeper(id, source);
    }

    /// Takes the keeper back to which `source` was to hand the snapshots of a suspended lease over.
    fn withdraw_handover(&mut self, id: LeaseId, source: WorkerId) {
        let has_keeper = |lease: &Lease| lease.keepers.contains_key(&source);
        // A lease that is not changed must not count as such, or the next report of a worker costs a decision.
        if !self.leases.get(id).is_some_and(has_keeper) {
            return;
        }
        let Some(mut lease) = self.leases.get_mut(id) else {
            return;
        };
        let Some(keeper) = lease.keepers.remove(&source) else {
            return;
        };
        let part = lease.parts.get(keeper.part as usize);
        let is_holder = part.is_some_and(|part| part.holders.contains(&keeper.worker));
        let is_held = lease.holders().contains(&source);
        drop(lease);
        if !is_holder {
            self.drop_kept(keeper.worker, id, keeper.part);
        }
        if is_held {
            self.hold_snapshots(source, id, Some(keeper.part));
        }
    }

    /// Returns whether a worker can hold the snapshots of one more suspended lease.
    pub(super) fn has_room(&self, worker: WorkerId) -> bool {
        self.leases.index().held(worker) < MAX_HELD
    }
}
