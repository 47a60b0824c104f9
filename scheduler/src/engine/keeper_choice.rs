//! The choice of a keeper for the sessions of a lease on one of its workers.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::{LeaseId, WorkerId};

use super::Engine;
use super::durable::{KEEPER_SILENCE, RECORDED_KEEPER_TIMEOUT};
use crate::device::Requirement;
use crate::lease::{Keeper, Lease};

/// How good a worker is as a keeper; less is better. Whether it has refused a snapshot a short time ago,
/// whether the sessions could not go on there, and whether it is one of the lease's own workers.
type Rank = (bool, bool, bool);

/// The sessions of a lease on `source`, and what their keeper must have.
struct KeeperChoice<'a> {
    engine: &'a Engine,
    id: LeaseId,
    lease: &'a Lease,
    source: WorkerId,
    requirement: &'a Requirement,
    /// Number of devices.
    count: usize,
    /// The workers of the lease.
    workers: BTreeSet<WorkerId>,
    /// The keepers of the lease's other workers. If two workers of a lease are lost at once, their
    /// sessions need two workers.
    others: Vec<WorkerId>,
}

impl Engine {
    /// Returns who is to keep the snapshots of a lease's sessions on `source`. Nobody if no other devices
    /// could take the place of those of `source`; `None` if one of these is not known. `kept` has the number
    /// of leases whose snapshots each worker keeps.
    pub(super) fn choose_keeper(
        &self,
        id: LeaseId,
        source: WorkerId,
        kept: &BTreeMap<WorkerId, usize>,
    ) -> Option<Option<Keeper>> {
        let lease = self.leases.get(id)?;
        let (part, _, devices) = lease.devices_by_worker().swap_remove_full(&source)?;
        let count = devices.len();
        let devices = devices.iter().map(|it| self.pool.device(*it));
        let devices = devices.collect::<Option<Vec<_>>>()?;
        let Some(requirement) = Requirement::of(devices.into_iter(), lease.durability) else {
            return Some(None);
        };
        let others = lease.keepers.iter().filter(|(of, _)| **of != source);
        let choice = KeeperChoice {
            engine: self,
            id,
            lease,
            source,
            requirement: &requirement,
            count,
            workers: lease.workers(),
            others: others.map(|(_, keeper)| keeper.worker).collect(),
        };
        let worker = choice.choose(kept);
        let keeper = worker.map(|worker| Keeper {
            worker,
            part: part as u32,
            handover: 0,
            requirement,
            is_announced: false,
            is_kept: false,
            previous: None,
        });
        Some(keeper)
    }
}

impl KeeperChoice<'_> {
    /// Returns the present keeper if it is good enough, or if it is from a record and may yet join; or
    /// else the best candidate.
    fn choose(&self, kept: &BTreeMap<WorkerId, usize>) -> Option<WorkerId> {
        let Self { engine, source, .. } = self;
        let candidates = engine.pool.ids().filter(|it| self.can_keep(*it));
        let candidates = candidates.filter(|it| engine.pool.is_connected(*it));
        let candidates: Vec<_> = candidates.collect();
        let best_rank = candidates.iter().map(|it| self.rank(*it)).min();
        let present = self.lease.keepers.get(source).map(|keeper| keeper.worker);
        let recorded = present.filter(|worker| engine.may_yet_join(*worker));
        let is_soon = engine.now < engine.started + RECORDED_KEEPER_TIMEOUT;
        let known = present.filter(|worker| engine.pool.contains(*worker));
        let present = present.filter(|worker| self.can_keep(*worker));
        match present.filter(|worker| self.is_good_enough(*worker, best_rank)) {
            // The recorded keeper has snapshots, and is likely to join.
            None if is_soon && recorded.is_some() => recorded,
            Some(present) => Some(present),
            // Another worker would get no snapshots as long as the lease's worker has no stream.
            None if !engine.pool.is_connected(*source) => known.or(recorded),
            None => {
                let best = self.best(candidates, present, kept);
                // Until it is gone, it has the snapshots.
                best.or(known).or(recorded)
            }
        }
    }

    /// Returns whether a worker other than `source` will stay, and has released the lease if it has run it:
    /// it could not start the lease before.
    fn can_keep(&self, worker: WorkerId) -> bool {
        let pool = &self.engine.pool;
        worker != self.source && pool.stays(worker) && !pool.is_ending(worker, self.id)
    }

    fn has_free(&self, worker: WorkerId) -> bool {
        let (requirement, count) = (self.requirement, self.count);
        let pool = &self.engine.pool;
        pool.has_free(worker, self.id, requirement, count)
    }

    fn rank(&self, worker: WorkerId) -> Rank {
        let is_of_lease = self.workers.contains(&worker);
        let pool = &self.engine.pool;
        let can_run = !is_of_lease && pool.can_run(worker, self.requirement, self.count);
        let is_avoided = self.engine.is_avoided(self.lease, worker);
        (is_avoided, !can_run, is_of_lease)
    }

    /// Returns whether the present keeper need not give way to another worker. It does if its stream has
    /// been down for a while, as it may be lost; if the sessions must move soon, and it has no free devices
    /// for them; if it keeps the snapshots of another worker of the lease; or if others are of a better
    /// rank.
    fn is_good_enough(&self, worker: WorkerId, best_rank: Option<Rank>) -> bool {
        let Engine { pool, now, .. } = self.engine;
        let must_move_soon = pool.is_draining(self.source);
        // A stream that breaks only for a moment costs no snapshots.
        pool.silence(worker, *now) < KEEPER_SILENCE
            && (!must_move_soon || self.has_free(worker))
            && !self.others.contains(&worker)
            && best_rank.is_none_or(|best| self.rank(worker) <= best)
    }

    /// Returns the best of the candidates: among those of the best rank, one with free devices, then one
    /// that keeps nothing else of the lease, then the present keeper, then one whose devices have the
    /// same fingerprint, and then the one that keeps the snapshots of the fewest leases.
    fn best(
        &self,
        candidates: Vec<WorkerId>,
        present: Option<WorkerId>,
        kept: &BTreeMap<WorkerId, usize>,
    ) -> Option<WorkerId> {
        candidates.into_iter().min_by_key(|worker| {
            let pool = &self.engine.pool;
            let is_new = Some(*worker) != present;
            let differs = !pool.has_equal(*worker, self.requirement, self.count);
            let leases = kept.get(worker).copied().unwrap_or_default();
            (
                self.rank(*worker),
                !self.has_free(*worker),
                self.others.contains(worker),
                is_new,
                differs,
                leases,
            )
        })
    }
}
