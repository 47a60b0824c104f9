//! The choice of a keeper for the sessions of a lease on one of its workers.

use std::collections::BTreeSet;

use tensord_proto::ids::{LeaseId, WorkerId};

use super::Engine;
use super::durable::{KEEPER_SILENCE, RECORDED_KEEPER_TIMEOUT};
use crate::device::Requirement;
use crate::lease::{Keeper, Lease};
use crate::time::Timestamp;

/// How good a worker is as a keeper; less is better. Whether it has refused a snapshot a short time ago,
/// whether the sessions could not go on there, and whether it is one of the lease's own workers.
type Rank = (bool, bool, bool);

/// The rank that no other one is better than.
const BEST_RANK: Rank = (false, false, false);

/// The order of the candidates, the best first: by rank, those with free devices first, then those that keep
/// nothing else of the lease, then the present keeper, then those whose devices have the same fingerprint,
/// and then by the number of parts of leases whose snapshots they keep.
type Merit = (Rank, bool, bool, bool, bool, usize, WorkerId);

/// A keeper that is chosen for the sessions of a lease on one of its workers.
pub(super) struct Chosen {
    /// `None` if there is no worker that could be the keeper.
    pub(super) keeper: Option<Keeper>,
    pub(super) stability: Stability,
}

/// When a choice must be made again although the lease and the two workers do not change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stability {
    /// Whether another worker may be a better keeper, if it joins or can be reached again.
    pub(super) depends_on_workers: bool,
    /// Whether it may change when devices become free or are taken, or when any worker changes.
    pub(super) depends_on_devices: bool,
    /// When it must be made again at the latest.
    pub(super) until: Option<Timestamp>,
}

impl Stability {
    /// Returns when one of two choices must be made again.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            depends_on_workers: self.depends_on_workers || other.depends_on_workers,
            depends_on_devices: self.depends_on_devices || other.depends_on_devices,
            until: self.until.into_iter().chain(other.until).min(),
        }
    }
}

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
    /// could take the place of those of `source`; `None` if one of these is not known.
    pub(super) fn choose_keeper(&self, id: LeaseId, source: WorkerId) -> Option<Chosen> {
        let lease = self.leases.get(id)?;
        let (part, _, devices) = lease.devices_by_worker().swap_remove_full(&source)?;
        let count = devices.len();
        let devices = devices.iter().map(|it| self.pool.device(*it));
        let devices = devices.collect::<Option<Vec<_>>>()?;
        let Some(requirement) =
            Requirement::of(devices.into_iter(), lease.durability, lease.share())
        else {
            return Some(Chosen {
                keeper: None,
                stability: Stability::default(),
            });
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
        let worker = choice.choose();
        let stability = choice.stability(worker);
        let keeper = worker.map(|worker| Keeper {
            worker,
            part: part as u32,
            assignment: 0,
            requirement,
            is_announced: false,
            is_kept: false,
            previous: None,
        });
        Some(Chosen { keeper, stability })
    }
}

impl KeeperChoice<'_> {
    /// Returns the present keeper if it is good enough, or if it is from a record and may yet join; or
    /// else the best candidate.
    fn choose(&self) -> Option<WorkerId> {
        let Self { engine, source, .. } = self;
        let best = self.best();
        let best_rank = best.map(|(rank, ..)| rank);
        let present = self.present();
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
                let best = best.map(|(.., worker)| worker);
                // Until it is gone, it has the snapshots.
                best.or(known).or(recorded)
            }
        }
    }

    fn present(&self) -> Option<WorkerId> {
        let keeper = self.lease.keepers.get(&self.source);
        keeper.map(|keeper| keeper.worker)
    }

    /// Returns when this keeper must be chosen again.
    fn stability(&self, keeper: Option<WorkerId>) -> Stability {
        let engine = self.engine;
        let Engine {
            pool, now, started, ..
        } = engine;
        let is_steady = |worker: &WorkerId| pool.is_connected(*worker) && pool.stays(*worker);
        let unsteady = [Some(self.source), keeper].into_iter().flatten();
        let unsteady: Vec<_> = unsteady.filter(|worker| !is_steady(worker)).collect();
        let keeps_other = keeper.is_some_and(|keeper| self.others.contains(&keeper));
        let silent_at = unsteady.iter().copied();
        let silent_at = silent_at.filter_map(|worker| engine.gives_way_at(worker));
        let given_up_at = *started + RECORDED_KEEPER_TIMEOUT;
        let times = self.lease.avoids_until().chain(silent_at);
        let times = times.chain([given_up_at]).filter(|at| at > now);
        Stability {
            depends_on_workers: keeper
                .is_none_or(|keeper| !self.can_keep(keeper) || self.rank(keeper) > BEST_RANK),
            depends_on_devices: keeps_other || !unsteady.is_empty(),
            until: times.min(),
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
        let is_avoided = self.engine.is_avoided(self.lease, worker)
            || self.engine.is_excluded(self.lease, worker);
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

    /// Returns the best of the workers with a stream that could be the keeper.
    fn best(&self) -> Option<Merit> {
        let special = self.special();
        let of_special = special.iter().copied().filter_map(|it| self.merit(it));
        let groups = self.engine.pool.index().groups();
        let groups = groups.filter(|(key, _)| key.is_connected && !key.is_draining);
        let of_others = groups.filter_map(|(_, group)| {
            // All that are alike have the same merit but for what they keep.
            let is_candidate = |worker| !special.contains(&worker) && self.can_keep(worker);
            let mut by_kept = group.by_kept();
            let (_, first) = by_kept.find(|(_, worker)| is_candidate(*worker))?;
            self.merit(first)
        });
        of_special.chain(of_others).min()
    }

    /// Returns the workers that differ from those like them as far as the lease is concerned.
    fn special(&self) -> BTreeSet<WorkerId> {
        let special = self.workers.iter().chain(self.lease.avoided.keys());
        let special = special.chain(self.lease.excluded.keys());
        let special = special.chain(&self.others).copied();
        special.chain(self.present()).collect()
    }

    /// Returns the merit of a worker with a stream that could be the keeper.
    fn merit(&self, worker: WorkerId) -> Option<Merit> {
        let pool = &self.engine.pool;
        if !pool.is_connected(worker) || !self.can_keep(worker) {
            return None;
        }
        let has_no_free = !self.has_free(worker);
        let is_other = self.others.contains(&worker);
        let is_new = Some(worker) != self.present();
        let differs = !pool.has_equal(worker, self.requirement, self.count);
        let kept = self.engine.leases.index().kept(worker);
        let rank = self.rank(worker);
        Some((rank, has_no_free, is_other, is_new, differs, kept, worker))
    }
}
