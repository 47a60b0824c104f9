//! The keepers of durable leases: which worker keeps the snapshots of a lease's sessions.
//!
//! A lease is durable if its client asked for that. Each of its workers has a *keeper*: another worker,
//! best one that has as many devices on which the sessions could go on, of the same fingerprint or of the
//! same kind ([`Requirement`](crate::device::Requirement)); `keeper_choice.rs` has the rules. A worker of the lease itself is no such worker: an all-reduce
//! first adds up what the devices of each worker contribute, so devices of two workers must not come
//! together on one. If there is none, any other worker is the keeper, and hands the snapshots over when
//! the lease has to go on elsewhere (`destinations.rs`).

use std::collections::BTreeSet;
use std::time::Duration;

use tensord_proto::ids::{LeaseId, PartId, WorkerId};

use super::Engine;
use super::keeper_choice::{Chosen, Stability};
use super::waiting::what_happened;
use crate::command::{Command, Peer};
use crate::event::AssignedKeeper;
use crate::lease::{Keeper, Lease, Standing};
use crate::reason::EndReason;
use crate::time::Timestamp;

/// Time without a stream after which a keeper gives way to another one. It may be lost, which the
/// engine finds out later.
pub(super) const KEEPER_SILENCE: Duration = Duration::from_secs(2);

/// How long after a restart of the scheduler a keeper from its records does not give way to another
/// one, although it has not joined yet: twice the longest pause between a worker's attempts to join.
pub(super) const RECORDED_KEEPER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a worker that has refused a snapshot of a lease is the keeper only if there is no other one.
const AVOID_REFUSING: Duration = Duration::from_secs(300);

impl Engine {
    /// Ends the leases that waited to move to a worker that is lost now, because of `gone`, unless a store has their
    /// snapshots, too, and lets others find another keeper. A lease that loses its own worker before that ends because
    /// of both.
    pub(super) fn on_keeper_lost(&mut self, worker: WorkerId, gone: &EndReason) {
        let mut over = Vec::new();
        for id in self.leases.index().of_worker(worker).collect::<Vec<_>>() {
            let Some(mut lease) = self.leases.get_mut(id) else {
                continue;
            };
            let keepers = lease.keepers.len();
            let had_snapshots = |keeper: &Keeper| match keeper.previous {
                Some(previous) => previous == worker,
                None => keeper.is_kept && keeper.worker == worker,
            };
            if lease.keepers.values().any(had_snapshots) {
                lease.keeper_gone = Some(gone.clone());
            }
            for keeper in lease.keepers.values_mut() {
                keeper.previous = keeper.previous.filter(|previous| *previous != worker);
            }
            lease.keepers.retain(|_, keeper| keeper.worker != worker);
            if lease.keepers.len() < keepers && lease.only_stored().is_none() {
                let cause = lease.lost().map(what_happened);
                over.extend(cause.map(|cause| (id, EndReason::nothing_left(cause, gone.clone()))));
            }
        }
        for (id, reason) in over {
            self.end_lease(id, Some(reason));
        }
    }

    /// Has the keepers of leases announced again that use `worker`, which has a new stream, and will
    /// report again what they have.
    pub(super) fn forget_announced(&mut self, worker: WorkerId) {
        for id in self.leases.index().of_worker(worker).collect::<Vec<_>>() {
            let Some(mut lease) = self.leases.get_mut(id) else {
                continue;
            };
            for (source, keeper) in &mut lease.keepers {
                let is_source = *source == worker;
                keeper.is_announced &= !is_source && keeper.worker != worker;
                keeper.is_kept &= !is_source;
            }
            lease.kept_at.remove(&worker);
        }
    }

    /// Records which keepers have refused snapshots that `worker` has sent, so that others take over.
    pub(super) fn avoid_refusing(&mut self, worker: WorkerId, refused: &[AssignedKeeper]) {
        for refusing in refused {
            let id = refusing.part.lease;
            let Some(mut lease) = self.leases.get_mut(id) else {
                continue;
            };
            let keeper = lease.keepers.get(&worker);
            let is_its = keeper.is_some_and(|it| it.assigned(id) == *refusing);
            if is_its && !lease.is_suspended() {
                let until = self.now + AVOID_REFUSING;
                lease.avoided.insert(refusing.worker, until);
            }
        }
    }

    /// Gives every durable lease a keeper if there is one, and announces it to both workers. `changed` has the
    /// leases that have changed, and those for which a worker that has changed matters.
    pub(super) fn assign_keepers(&mut self, changed: &BTreeSet<LeaseId>) {
        let version = self.pool.index().version();
        let mut due = changed.clone();
        due.extend(self.unstable_keepers.due(self.now, version));
        for id in due {
            self.assign_keepers_of(id);
        }
    }

    /// Returns the time from which a worker without a stream gives way as a keeper; `None` if that was earlier.
    pub(super) fn gives_way_at(&self, worker: WorkerId) -> Option<Timestamp> {
        let silence = self.pool.silence(worker, self.now);
        Some(self.now + KEEPER_SILENCE.checked_sub(silence)?)
    }

    /// Has the pool know how many parts of leases each worker keeps.
    pub(super) fn count_kept(&mut self) {
        for worker in self.leases.take_changed_keepers() {
            let kept = self.leases.index().kept(worker);
            self.pool.set_kept(worker, kept);
        }
    }

    /// Gives a lease keepers if it is durable and there are some.
    fn assign_keepers_of(&mut self, id: LeaseId) {
        let is_durable =
            |lease: &&Lease| lease.durability.is_durable() && lease.standing == Standing::Running;
        let durable = self.leases.get(id).filter(is_durable);
        let workers = durable.map(Lease::workers).into_iter().flatten();
        let stability = workers.map(|source| self.assign_keeper(id, source));
        let stability = stability.reduce(Stability::and);
        self.unstable_keepers.record(id, stability);
    }

    /// Gives the sessions of a lease on `source` a keeper if there is one, and announces it. Returns
    /// when the keeper must be chosen again.
    fn assign_keeper(&mut self, id: LeaseId, source: WorkerId) -> Stability {
        self.count_kept();
        let Some(chosen) = self.choose_keeper(id, source) else {
            // The worker has yet to join.
            return Stability::default();
        };
        let Chosen {
            keeper: chosen,
            stability,
        } = chosen;
        let worker = chosen.as_ref().map(|chosen| chosen.worker);
        let stays = |before: &&Keeper| worker == Some(before.worker);
        let Some(mut lease) = self.leases.get_mut(id) else {
            return stability;
        };
        let before = lease.keepers.remove(&source);
        if let Some(mut chosen) = chosen {
            if let Some(before) = before.as_ref().filter(stays) {
                chosen.assignment = before.assignment;
                chosen.is_announced = before.is_announced;
                chosen.is_kept = before.is_kept;
                chosen.previous = before.previous;
            } else {
                self.assignments += 1;
                chosen.assignment = self.assignments;
            }
            lease.keepers.insert(source, chosen);
        }
        drop(lease);
        let is_changed = before.as_ref().map(|before| before.worker) != worker;
        if let Some(before) = before.filter(|before| !stays(&before)) {
            self.replace_keeper(id, source, before);
        }
        self.announce_keeper(id, source);
        // The best keepers of the lease's other workers may be others now: they are chosen again with the next
        // event.
        let again = is_changed.then_some(self.now);
        stability.and(Stability {
            until: again,
            ..Stability::default()
        })
    }

    /// Has a keeper that has given way to another one drop its snapshots: at once if they are not complete,
    /// and otherwise once the other one has the snapshots.
    fn replace_keeper(&mut self, id: LeaseId, source: WorkerId, before: Keeper) {
        let is_here = |worker: &WorkerId| self.pool.is_connected(*worker);
        let with_snapshots = before.with_snapshots().filter(is_here);
        let present = self.leases.get_mut(id).and_then(|mut lease| {
            let present = lease.keepers.get_mut(&source)?;
            present.previous = with_snapshots.filter(|worker| *worker != present.worker);
            Some((present.worker, present.previous))
        });
        let needed = present.map_or([None; 2], |(worker, previous)| [Some(worker), previous]);
        let all = [Some(before.worker), before.previous];
        for worker in all.into_iter().flatten() {
            if !needed.contains(&Some(worker)) {
                self.drop_kept(worker, id, before.part);
            }
        }
    }

    /// Has a worker drop what it keeps of a part of a lease: of the whole lease if it has nothing else of it.
    pub(super) fn drop_kept(&mut self, keeper: WorkerId, id: LeaseId, part: u32) {
        let lease = self.leases.get(id);
        let has_other = lease.is_some_and(|lease| {
            lease.workers().contains(&keeper) || lease.keepers_and_holders().contains(&keeper)
        });
        match has_other {
            true => self.drop_part(keeper, id, part),
            false => self.drop_snapshots(keeper, id),
        }
    }

    /// Announces a lease's keeper, unless that is done or one of the two workers has no stream.
    pub(super) fn announce_keeper(&mut self, id: LeaseId, source: WorkerId) {
        let known = self.leases.get(id);
        let keeper = known.and_then(|lease| lease.keepers.get(&source));
        if keeper.is_none_or(|keeper| keeper.is_announced) {
            return;
        }
        let Some(mut lease) = self.leases.get_mut(id) else {
            return;
        };
        let is_suspended = lease.is_suspended();
        let Some(known) = lease.keepers.get_mut(&source) else {
            return;
        };
        let peer = |worker: WorkerId| {
            let joined = self.pool.get(worker)?;
            let endpoint = joined.endpoint().clone();
            let is_connected = self.pool.is_connected(worker);
            is_connected.then_some(Peer { worker, endpoint })
        };
        if let (Some(source), Some(keeper)) = (peer(source), peer(known.worker)) {
            known.is_announced = true;
            if is_suspended {
                self.assignments += 1;
                known.assignment = self.assignments;
            }
            self.commands.push(Command::KeepSnapshots {
                part: PartId {
                    lease: id,
                    index: known.part,
                },
                source,
                keeper,
                assignment: known.assignment,
            });
        }
    }

    pub(super) fn drop_snapshots(&mut self, keeper: WorkerId, lease: LeaseId) {
        if self.pool.is_connected(keeper) {
            let part = None;
            self.commands.push(Command::DropSnapshots {
                keeper,
                lease,
                part,
            });
        }
    }

    /// Has a worker drop the snapshots that it keeps of a part of a lease.
    pub(super) fn drop_part(&mut self, keeper: WorkerId, lease: LeaseId, part: u32) {
        if self.pool.is_connected(keeper) {
            let part = Some(part);
            self.commands.push(Command::DropSnapshots {
                keeper,
                lease,
                part,
            });
        }
    }
}
