//! Where a lease that waits for devices could go on if its snapshots were there.
//!
//! The workers that have the snapshots of a lease may have no free devices while others have some, and
//! they may be fewer than the parts of the lease. Then each part gets a destination: a worker with enough
//! free devices, which are held back for the lease while the worker receives the snapshots
//! (`handover.rs`).

use std::cmp::Reverse;
use std::collections::BTreeSet;

use tensord_proto::ids::{LeaseId, WorkerId};

use super::Engine;
use super::assignment::assign;
use super::durable::KEEPER_SILENCE;
use super::waiting::what_happened;
use crate::lease::{Lease, Standing, SuspendedPart};

impl Engine {
    /// Returns a worker with enough free devices for each part of a lease that was resumed, all
    /// different, if there are such workers. Those that lack the snapshots of their part can get them.
    pub(super) fn destinations(&self, id: LeaseId, lease: &Lease) -> Option<Vec<WorkerId>> {
        let is_resumed = matches!(lease.standing, Standing::Resuming { .. });
        if !is_resumed || self.is_over_limit(id) {
            return None;
        }
        let candidates = (0..)
            .zip(&lease.parts)
            .map(|(index, part)| self.candidates_for(id, lease, index, part));
        assign(&candidates.collect::<Vec<_>>())
    }

    /// Returns a worker for each part of a lease that was resumed and finds too few free devices anywhere,
    /// as far as there are: those whose free devices to hold back until more are free. All are different,
    /// and could run their part.
    pub(super) fn waiting_places(&self, id: LeaseId, lease: &Lease) -> Vec<(usize, WorkerId)> {
        let candidates = (0..).zip(&lease.parts).map(|(index, part)| {
            let with_snapshots = self.holders_and_loaders(part);
            let can_be_sent = self.source_of(id, lease, index, part).is_some();
            let (requirement, count) = (&part.requirement, part.devices);
            let could_go_on = |worker: &WorkerId| {
                let can_get = || can_be_sent && !self.is_avoided(lease, *worker);
                self.pool.can_run(*worker, requirement, count)
                    && !self.pool.is_ending(*worker, id)
                    && !self.is_excluded(lease, *worker)
                    && (with_snapshots.contains(worker) || can_get())
            };
            // Those that are special to the lease, and of the others as many as it could need.
            let mut special: BTreeSet<_> = with_snapshots.iter().copied().collect();
            special.insert(part.source);
            let held_back = self.pool.held_back_for(id).into_iter();
            special.extend(held_back.map(|device_ref| device_ref.worker));
            let is_other = |worker| !special.contains(&worker) && could_go_on(&worker);
            let others = self
                .pool
                .offering(requirement, count, lease.parts.len(), is_other);
            let special = special.iter().copied().filter(could_go_on);
            let possible: BTreeSet<_> = special.chain(others).collect();
            let mut workers: Vec<_> = possible.into_iter().collect();
            workers.sort_by_cached_key(|worker| {
                let free = self.pool.fitting(*worker, id, requirement, count);
                let lacks_snapshots = !with_snapshots.contains(worker);
                (Reverse(free.len()), *worker != part.source, lacks_snapshots)
            });
            workers
        });
        let candidates: Vec<_> = candidates.collect();
        if let Some(all) = assign(&candidates) {
            return all.into_iter().enumerate().collect();
        }
        let mut places = Vec::new();
        // Those first that can be where they were.
        let mut parts: Vec<_> = (0..candidates.len()).collect();
        parts.sort_by_key(|part| !candidates[*part].contains(&lease.parts[*part].source));
        for part in parts {
            let is_taken = |worker: &WorkerId| places.iter().any(|(_, taken)| taken == worker);
            let source = lease.parts[part].source;
            let own = candidates[part].iter().filter(|worker| **worker == source);
            let mut workers = own.chain(&candidates[part]);
            let place = workers.find(|worker| !is_taken(worker)).copied();
            places.extend(place.map(|worker| (part, worker)));
        }
        places
    }

    /// Holds back the free devices for which a lease without devices waits, or where it goes on once its
    /// snapshots are there.
    pub(super) fn hold_back_devices(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let share = lease.share();
        if let Some(workers) = self.destinations(id, lease) {
            let parts = lease.parts.iter().zip(workers);
            let free = parts.filter_map(|(part, worker)| {
                let (requirement, count) = (&part.requirement, part.devices);
                self.pool.free_fitting(worker, id, requirement, count)
            });
            let free = free.flatten().collect();
            return self.pool.hold_back(id, free, |_| share);
        }
        if let Some(free) = self.free_beside_spot(id) {
            return self.pool.hold_back(id, free, |_| share);
        }
        let has_earlier_requests = || self.queue.shapes().any(|shape| !shape.is_spot);
        if lease.is_reclaimed || lease.is_spot && has_earlier_requests() {
            // It waits behind others, perhaps for long.
            return;
        }
        if matches!(lease.standing, Standing::Resuming { .. }) {
            let places = self.waiting_places(id, lease).into_iter();
            let free = places.flat_map(|(part, worker)| {
                let SuspendedPart {
                    requirement,
                    devices,
                    ..
                } = &lease.parts[part];
                self.pool.fitting(worker, id, requirement, *devices)
            });
            let free = free.collect();
            return self.pool.hold_back(id, free, |_| share);
        }
        let free = self.free_for_lost(id, lease);
        self.pool.hold_back(id, free, |_| share);
    }

    /// Has a lease whose worker is lost go on at any worker with free devices, if there is one and its
    /// keeper, which has the snapshots, has too few or drains: the lease becomes one that was suspended
    /// and resumed. It does not wait for its worker any more. A spot lease that is in the way of a request
    /// leaves only a keeper that drains.
    pub(super) fn seek_destination(&mut self, id: LeaseId) {
        let is_attached = self.attached_owner(id).is_some();
        let Some(lease) = self.leases.get(id).filter(|_| is_attached) else {
            return;
        };
        let (Some(reason), Some(keeper)) = (lease.lost(), lease.only_keeper()) else {
            return;
        };
        let can_send = keeper.is_kept && self.pool.is_connected(keeper.worker);
        let (true, Some(source)) = (can_send, lease.only_worker()) else {
            return;
        };
        let part = SuspendedPart {
            source,
            devices: lease.lease_devices.len(),
            requirement: keeper.requirement.clone(),
            holders: vec![keeper.worker],
            store: lease.only_stored().map(|stored| stored.store),
        };
        let is_destination = |worker: WorkerId| {
            worker != keeper.worker && !self.pool.is_ending(worker, id) && self.has_room(worker)
        };
        // A keeper that drains hands the snapshots over in any case.
        let must_leave = self.pool.is_draining(keeper.worker);
        let has_destination = || {
            let with_free = self.pool.with_free(id, &part.requirement, part.devices);
            !self.is_in_the_way(id) && with_free.into_iter().any(is_destination)
        };
        if !must_leave && !has_destination() {
            return;
        }
        let cause = what_happened(reason);
        let (since, rejoin_by) = (self.now, lease.rejoin_by);
        let cause = Some(cause);
        self.suspend_running(id, vec![part], Standing::Resuming { since, cause });
        if let Some(mut lease) = self.leases.get_mut(id) {
            lease.rejoin_by = rejoin_by;
        }
    }

    /// Returns the workers with enough free devices for a part of a lease, the best first: the one that gets
    /// its snapshots already; the one where the part ran; those that have its snapshots; those with devices
    /// of the same fingerprint. The worker of another part is the last.
    fn candidates_for(
        &self,
        id: LeaseId,
        lease: &Lease,
        index: u32,
        part: &SuspendedPart,
    ) -> Vec<WorkerId> {
        let with_snapshots = self.holders_and_loaders(part);
        let receiving = lease.receiver(index);
        let can_be_sent = self.source_of(id, lease, index, part).is_some();
        let with_free = self.pool.with_free(id, &part.requirement, part.devices);
        let fits = |worker: &WorkerId| {
            let (requirement, count) = (&part.requirement, part.devices);
            let is_receiving = receiving == Some(*worker);
            // A handover need not begin anew if a stream breaks for a moment.
            let is_part_of_handover = is_receiving
                || !lease.keepers.is_empty()
                    && with_snapshots.contains(worker)
                    && self.pool.can_run(*worker, requirement, count);
            let is_away = is_part_of_handover && self.is_away_briefly(*worker);
            let can_get = || {
                can_be_sent
                    && !self.is_avoided(lease, *worker)
                    && (is_receiving || self.has_room(*worker))
            };
            (with_free.contains(worker) || is_away)
                && !self.pool.is_ending(*worker, id)
                && !self.is_excluded(lease, *worker)
                && (with_snapshots.contains(worker) || can_get())
        };
        let known = with_snapshots.iter().copied().chain(receiving);
        let known = known.filter(|worker| self.pool.contains(*worker));
        let possible: BTreeSet<_> = with_free.iter().copied().chain(known).collect();
        let mut workers: Vec<_> = possible.into_iter().filter(fits).collect();
        workers.sort_by_cached_key(|worker| {
            let is_own = *worker == part.source;
            let is_of_other = !is_own && lease.parts.iter().any(|it| it.source == *worker);
            let differs = !self
                .pool
                .has_equal(*worker, &part.requirement, part.devices);
            let lacks_snapshots = !with_snapshots.contains(worker);
            let is_new = receiving != Some(*worker);
            (is_new, !is_own, is_of_other, lacks_snapshots, differs)
        });
        workers
    }

    /// Returns whether a worker that receives snapshots has no stream, and is likely to be back.
    fn is_away_briefly(&self, worker: WorkerId) -> bool {
        !self.pool.is_connected(worker) && self.pool.silence(worker, self.now) < KEEPER_SILENCE
    }

    /// Returns whether this worker has failed to receive snapshots of a lease a short time ago.
    pub(crate) fn is_avoided(&self, lease: &Lease, worker: WorkerId) -> bool {
        let until = lease.avoided.get(&worker);
        until.is_some_and(|until| self.now < *until)
    }

    /// Returns the holder that sends the snapshots of a part of a suspended lease to another worker, or
    /// could: it has a stream, and its process of the lease has ended.
    pub(super) fn source_of(
        &self,
        id: LeaseId,
        lease: &Lease,
        index: u32,
        part: &SuspendedPart,
    ) -> Option<WorkerId> {
        let holders = || part.holders.iter().copied();
        // If its stream breaks for a moment, the other worker must not drop what it has received.
        let is_sending = |holder: &WorkerId| {
            let keeper = lease.keepers.get(holder);
            keeper.is_some_and(|keeper| keeper.part == index)
        };
        let is_ready = |holder: &WorkerId| {
            self.pool.is_connected(*holder) && !self.pool.is_ending(*holder, id)
        };
        // The network of one that the lease has left may be broken altogether.
        let is_good = |holder: &WorkerId| is_ready(holder) && !self.is_excluded(lease, *holder);
        holders()
            .find(is_sending)
            .or_else(|| holders().find(is_good))
            .or_else(|| holders().find(is_ready))
    }
}
