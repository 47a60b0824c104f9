//! Snapshots of suspended leases that a worker which drains hands over to another one.
//!
//! A worker that is about to stop may be the only one that has the snapshots of a suspended lease. It
//! then sends them to another worker that could go on with the lease: its *keeper* for this lease,
//! although nothing of the lease runs. When that one has all of them, it is the holder.

use std::collections::BTreeMap;

use tensord_proto::ids::{LeaseId, PartId, WorkerId};

use super::Engine;
use super::suspension::{MAX_HELD, can_be_placed};
use crate::lease::{Keeper, Lease, SuspendedPart};

impl Engine {
    /// Gives every draining worker that alone has snapshots of a suspended lease a keeper for them, if
    /// there is one, and takes keepers back that are not needed any more. A worker hands over one part
    /// of a lease after the other.
    pub(super) fn assign_handovers(&mut self) {
        let suspended = self.leases.iter().filter(|(_, lease)| lease.is_suspended());
        for id in suspended.map(|(id, _)| id).collect::<Vec<_>>() {
            let Some(lease) = self.leases.get(id) else {
                continue;
            };
            let needed = self.needed_handovers(lease);
            let is_needed = |(source, keeper): (&WorkerId, &Keeper)| {
                let parts = needed.get(source);
                parts.is_some_and(|parts| parts.contains(&keeper.part))
            };
            let unneeded = lease.keepers.iter().filter(|it| !is_needed(*it));
            let unneeded: Vec<_> = unneeded.map(|(source, _)| *source).collect();
            for source in unneeded {
                self.withdraw_handover(id, source);
            }
            for (source, parts) in needed {
                let lease = self.leases.get(id);
                let begun = lease.and_then(|lease| lease.keepers.get(&source));
                let part = begun.map_or(parts[0], |keeper| keeper.part);
                self.assign_handover(id, part, source);
            }
        }
    }

    /// When a keeper has all snapshots of the part of a suspended lease that `source` was to hand over,
    /// makes it their holder. `at_keepers` has the parts of which `source` reports that, with the
    /// keepers.
    pub(super) fn on_handed_over(&mut self, source: WorkerId, at_keepers: &[(PartId, WorkerId)]) {
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
            let parts = parts_after(&lease.parts, part.index, source, worker);
            if !can_be_placed(&parts) {
                continue;
            }
            lease.keepers.remove(&source);
            lease.parts = parts;
            let is_holder = lease.holders().contains(&source);
            self.hold_snapshots(worker, id);
            match is_holder {
                true => self.drop_part(source, id, part.index),
                false => self.drop_snapshots(source, id),
            }
        }
    }

    /// Returns the parts of a suspended lease that a worker must hand over: it is the first of the
    /// holders of the part, all of which drain, and no store has that part. That does not change when the
    /// worker's stream breaks: otherwise the keeper would drop what it has received.
    fn needed_handovers(&self, lease: &Lease) -> BTreeMap<WorkerId, Vec<u32>> {
        let is_draining = |worker: &WorkerId| self.pool.is_draining(*worker);
        let mut needed = BTreeMap::<_, Vec<_>>::new();
        for (index, part) in (0..).zip(&lease.parts) {
            if let Some(source) = part.holders.first()
                && part.store.is_none()
                && part.holders.iter().all(is_draining)
            {
                needed.entry(*source).or_default().push(index);
            }
        }
        needed
    }

    /// Gives `source` a keeper for its snapshots of a part of a suspended lease, if there is one: the
    /// present one if it can go on, or else the one with free devices and the fewest suspended leases.
    fn assign_handover(&mut self, id: LeaseId, index: u32, source: WorkerId) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let Some(part) = lease.parts.get(index as usize) else {
            return;
        };
        // The parts as they will be when the other sources have handed their snapshots over.
        let keepers = lease.keepers.iter().filter(|(of, _)| **of != source);
        let planned = keepers.fold(lease.parts.clone(), |parts, (of, keeper)| {
            parts_after(&parts, keeper.part, *of, keeper.worker)
        });
        let can_hold = |worker: &WorkerId| {
            *worker != source
                && !self.pool.is_ending(*worker, id)
                && self.pool.can_keep(*worker, &part.requirement, part.devices)
                && can_be_placed(&parts_after(&planned, index, source, *worker))
        };
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
        let best =
            candidates.min_by_key(|worker| (!has_free(*worker), self.to_be_held_at(*worker)));
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
    fn to_be_held_at(&self, worker: WorkerId) -> usize {
        let suspended = self.leases.iter().filter(|(_, lease)| lease.is_suspended());
        let held = suspended.filter(|(_, lease)| lease.keepers_and_holders().contains(&worker));
        held.count()
    }
}

/// Returns the parts of a suspended lease when `source` has handed the part at `index` over to `keeper`.
fn parts_after(
    parts: &[SuspendedPart],
    index: u32,
    source: WorkerId,
    keeper: WorkerId,
) -> Vec<SuspendedPart> {
    let mut parts = parts.to_vec();
    if let Some(part) = parts.get_mut(index as usize) {
        part.holders
            .retain(|holder| ![source, keeper].contains(holder));
        part.holders.push(keeper);
    }
    parts
}
