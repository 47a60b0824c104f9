//! Snapshots of suspended leases that a worker which drains hands over to another one.
//!
//! A worker that is about to stop may be the only one that has the snapshots of a suspended lease. It
//! then sends them to another worker that could go on with the lease: its *keeper* for this lease,
//! although nothing of the lease runs. When that one has all of them, it is the holder.

use tensord_proto::ids::{LeaseId, WorkerId};

use super::Engine;
use super::suspension::{MAX_HELD, can_be_placed};
use crate::lease::{Keeper, Lease, SuspendedPart};

impl Engine {
    /// Gives every draining worker that alone has snapshots of a suspended lease a keeper for them, if
    /// there is one, and takes keepers back that are not needed any more.
    pub(super) fn assign_handovers(&mut self) {
        let suspended = self.leases.iter().filter(|(_, lease)| lease.is_suspended());
        for id in suspended.map(|(id, _)| id).collect::<Vec<_>>() {
            let Some(lease) = self.leases.get(id) else {
                continue;
            };
            let needed = |source: &WorkerId| self.must_hand_over(lease, *source);
            let unneeded = lease.keepers.keys().filter(|it| !needed(it));
            let unneeded: Vec<_> = unneeded.copied().collect();
            let sources: Vec<_> = lease.holders().into_iter().filter(needed).collect();
            for source in unneeded {
                self.withdraw_handover(id, source);
            }
            for source in sources {
                self.assign_handover(id, source);
            }
        }
    }

    /// When a keeper has all snapshots of a suspended lease that `source` was to hand over, makes it
    /// their holder. `at_keepers` has the leases of which `source` reports that, with the keepers.
    pub(super) fn on_handed_over(&mut self, source: WorkerId, at_keepers: &[(LeaseId, WorkerId)]) {
        for &(id, worker) in at_keepers {
            let is_connected = self.pool.is_connected(worker);
            let Some(lease) = self.leases.get_mut(id).filter(|_| is_connected) else {
                continue;
            };
            let keeper = lease.keepers.get(&source);
            let is_its = keeper.is_some_and(|it| it.worker == worker && it.is_announced);
            if !lease.is_suspended() || !is_its {
                continue;
            }
            let parts = parts_after(&lease.parts, source, worker);
            if !can_be_placed(&parts) {
                continue;
            }
            lease.keepers.remove(&source);
            lease.parts = parts;
            self.hold_snapshots(worker, id);
            self.drop_snapshots(source, id);
        }
    }

    /// Returns whether a worker must hand its snapshots of a suspended lease over: it is the first of
    /// the holders of a part, all of which drain, and no store has that part. That does not change when
    /// the worker's stream breaks: otherwise the keeper would drop what it has received.
    fn must_hand_over(&self, lease: &Lease, source: WorkerId) -> bool {
        let is_draining = |worker: &WorkerId| self.pool.is_draining(*worker);
        let mut parts = lease.parts.iter().filter(|part| part.store.is_none());
        parts.any(|part| {
            part.holders.first() == Some(&source) && part.holders.iter().all(is_draining)
        })
    }

    /// Gives `source` a keeper for the snapshots of a suspended lease, if there is one: the present one
    /// if it can go on, or else the one with free devices and the fewest suspended leases.
    fn assign_handover(&mut self, id: LeaseId, source: WorkerId) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let parts = lease.parts.iter();
        let parts: Vec<_> = parts
            .filter(|part| part.holders.contains(&source))
            .collect();
        let Some(first) = parts.first() else {
            return;
        };
        let fits = |worker: WorkerId, part: &&SuspendedPart| {
            self.pool.can_keep(worker, &part.requirement, part.devices)
        };
        // The parts as they will be when the other sources have handed their snapshots over.
        let keepers = lease.keepers.iter().filter(|(of, _)| **of != source);
        let planned = keepers.fold(lease.parts.clone(), |parts, (of, keeper)| {
            parts_after(&parts, *of, keeper.worker)
        });
        let can_hold = |worker: &WorkerId| {
            *worker != source
                && !self.pool.is_ending(*worker, id)
                && parts.iter().all(|part| fits(*worker, part))
                && can_be_placed(&parts_after(&planned, source, *worker))
        };
        let has_free = |worker: WorkerId| {
            let free = self
                .pool
                .free_fitting(worker, id, &first.requirement, first.devices);
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
        let best =
            candidates.min_by_key(|worker| (!has_free(*worker), self.to_be_held_at(*worker)));
        let keeper = best.map(|worker| Keeper {
            worker,
            requirement: first.requirement.clone(),
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
        let is_held = lease.holders().contains(&source);
        if !is_needed {
            self.drop_snapshots(keeper.worker, id);
        }
        if is_held {
            self.hold_snapshots(source, id);
        }
    }

    /// Returns the number of suspended leases of which a worker has snapshots, or is to get some.
    fn to_be_held_at(&self, worker: WorkerId) -> usize {
        let suspended = self.leases.iter().filter(|(_, lease)| lease.is_suspended());
        let held = suspended.filter(|(_, lease)| lease.keepers_and_holders().contains(&worker));
        held.count()
    }
}

/// Returns the parts of a suspended lease when `source` has handed its snapshots over to `keeper`.
fn parts_after(parts: &[SuspendedPart], source: WorkerId, keeper: WorkerId) -> Vec<SuspendedPart> {
    let mut parts = parts.to_vec();
    for part in parts
        .iter_mut()
        .filter(|part| part.holders.contains(&source))
    {
        part.holders
            .retain(|holder| ![source, keeper].contains(holder));
        part.holders.push(keeper);
    }
    parts
}
