//! What goes wrong, and what an administrator does.

use rand::{RngExt, rngs::StdRng};
use tensord_proto::ids::PartId;

use super::Simulation;
use crate::{network::Link, scheduler::LEASE};

/// The probability that a second host loses its process, or its worker, at the same moment, if the lease would go on
/// without both.
const AT_ONCE: f64 = 0.3;

/// How many faults of each kind a run has at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Faults {
    /// Ends of connections.
    pub cuts: u32,
    /// Ends of processes of the lease.
    pub kills: u32,
    /// Ends of workers, and of their connections to the scheduler.
    pub losses: u32,
    /// Restarts of the scheduler.
    pub restarts: u32,
    /// Moves, suspensions and drained workers, by an administrator.
    pub moves: u32,
}

impl Faults {
    /// No faults. A lease without faults is not durable, so that no snapshots are taken.
    pub const NONE: Self = Self {
        cuts: 0,
        kills: 0,
        losses: 0,
        restarts: 0,
        moves: 0,
    };

    /// Returns a random number of each, so that some runs have few faults, and some many.
    pub(super) fn some(self, rng: &mut StdRng) -> Self {
        Self {
            cuts: rng.random_range(0..=self.cuts),
            kills: rng.random_range(0..=self.kills),
            losses: rng.random_range(0..=self.losses),
            restarts: rng.random_range(0..=self.restarts),
            moves: rng.random_range(0..=self.moves),
        }
    }
}

/// Takes one of the faults that are left. Returns whether there was one.
fn take(left: &mut u32) -> bool {
    let has_one = *left > 0;
    *left -= u32::from(has_one);
    has_one
}

impl Simulation<'_> {
    /// Ends a connection of a session, of two workers, or of a worker to a keeper.
    pub(super) fn cut(&mut self, rank: usize, at: usize, is_bulk: bool) {
        if self.faults.cuts == 0 {
            return;
        }
        match self.rng.random_range(0..4) {
            0 | 1 => {
                let link = &mut self.clients[rank].links[usize::from(is_bulk)];
                if link.is_down() {
                    return;
                }
                *link = Link::Down;
            }
            2 => {
                let links: Vec<_> = self.peer_links.keys().copied().collect();
                if links.is_empty() {
                    return;
                }
                let link = links[self.rng.random_range(0..links.len())];
                self.cut_peer_link(link);
            }
            _ => {
                let Some(worker) = &mut self.nodes[at].worker else {
                    return;
                };
                let is_cut = match (worker.keeper(), self.rng.random_bool(0.5)) {
                    (Some(_), true) => worker.deliver_copy(self.now, false),
                    (Some(keeper), false) => worker.disconnect_from_keeper(self.now, keeper),
                    (None, _) => false,
                };
                if !is_cut {
                    return;
                }
            }
        }
        self.faults.cuts -= 1;
        self.report.cuts += 1;
    }

    /// Ends a process or a worker, or a connection to the scheduler, or the scheduler itself, or has an
    /// administrator move or suspend the lease.
    pub(super) fn inject(&mut self, at: usize) {
        match self.rng.random_range(0..8) {
            0..4 => self.kill_processes(at),
            4 => self.lose_workers(at),
            5 => self.cut_off(at),
            6 => self.restart_scheduler(),
            _ => self.administrate(at),
        }
    }

    /// Decides at random whether a second host has the same fault at the same moment. Returns one for which `can_fail`
    /// holds, if there is one.
    fn another_host(
        &mut self,
        at: usize,
        can_fail: impl Fn(&Self, usize) -> bool,
    ) -> Option<usize> {
        if !self.rng.random_bool(AT_ONCE) {
            return None;
        }
        let others = (0..self.nodes.len()).filter(|other| *other != at && can_fail(self, *other));
        let others: Vec<_> = others.collect();
        (!others.is_empty()).then(|| others[self.rng.random_range(0..others.len())])
    }

    /// Kills the process of a worker, or those of two at once, if the lease would go on. Before the first
    /// snapshots are kept, it would not.
    fn kill_processes(&mut self, at: usize) {
        if self.faults.kills == 0 || !self.can_lose_process(at) {
            return;
        }
        let has_two = self.faults.kills >= 2;
        let other = self.another_host(at, |it, other| has_two && it.can_lose_process(other));
        self.report.process_pairs += u32::from(other.is_some());
        self.kill_process(at);
        if let Some(other) = other {
            self.kill_process(other);
        }
    }

    fn kill_process(&mut self, at: usize) {
        let is_spread = self.places().len() > 1;
        let node = &mut self.nodes[at];
        let Some(worker) = &mut node.worker else {
            return;
        };
        self.faults.kills -= 1;
        self.report.kills += 1;
        self.report.group_kills += u32::from(self.clients.len() > 1);
        self.report.spread_kills += u32::from(is_spread);
        worker.kill_process();
        let id = node.id;
        self.trace(|| format!("the process at worker {id} is killed"));
        self.disconnect_process(id);
    }

    /// Returns whether a worker runs a process without which the lease would go on.
    fn can_lose_process(&self, at: usize) -> bool {
        let node = &self.nodes[at];
        let Some(worker) = &node.worker else {
            return false;
        };
        let Some(part) = worker.running_part() else {
            return false;
        };
        let places = self.places();
        let Some(place) = places.get(part.index as usize) else {
            return false;
        };
        match places.len() > 1 {
            // All parts go on from the same cut, as the scheduler decides.
            true => self.all_could_go_on(&[]),
            false => {
                let sessions = self.sessions_at(*place);
                self.can_be_restored() && worker.can_lose_process(&sessions)
            }
        }
    }

    fn trace(&self, what: impl FnOnce() -> String) {
        self.scheduler.trace(self.now, what);
    }

    fn can_be_restored(&self) -> bool {
        let mut clients = self.clients.iter();
        clients.all(|client| client.session.can_be_restored())
    }

    /// Returns whether the lease runs, and all its workers but those that are `lost` have reported snapshots of
    /// their sessions, from which these could go on.
    fn all_could_go_on(&self, lost: &[u64]) -> bool {
        let claims = self.lease.claims.as_ref();
        let epoch = claims.map_or(u64::MAX, |claims| claims.epoch);
        if !self.scheduler.runs(epoch) || !self.can_be_restored() {
            return false;
        }
        let places = self.places().into_iter();
        let mut others = places.filter(|place| !lost.contains(place));
        others.all(|place| {
            let node = self.nodes.iter().find(|node| node.id == place);
            let worker = node.and_then(|node| node.worker.as_ref());
            let sessions = self.sessions_at(place);
            // One that drains does not hold the snapshots of a lease that is interrupted.
            node.is_some_and(|node| node.drained_since.is_none())
                && self.scheduler.has_snapshots(place)
                && worker
                    .is_some_and(|it| it.running_part().is_some() && it.can_lose_process(&sessions))
        })
    }

    /// Returns whether the lease would go on without the workers of these hosts.
    fn can_lose_workers(&self, hosts: &[usize]) -> bool {
        let lost: Vec<_> = hosts.iter().map(|at| self.nodes[*at].id).collect();
        let mut hosts = hosts.iter();
        hosts.all(|at| self.is_replaceable(*at, &lost))
            // The parts on other workers go on from what these have.
            && self.all_could_go_on(&lost)
    }

    /// Returns whether a worker that is not `lost` has what the lease needs of the worker of a host.
    fn is_replaceable(&self, at: usize, lost: &[u64]) -> bool {
        let id = self.nodes[at].id;
        let Some(worker) = &self.nodes[at].worker else {
            return false;
        };
        let places = self.places();
        let Some(part) = places.iter().position(|place| *place == id) else {
            // While the lease is suspended or moves, the worker may be the only one with its snapshots.
            return worker.running_part().is_none();
        };
        let index = part as u32;
        let part = PartId {
            lease: LEASE,
            index,
        };
        let keeper = self.scheduler.keeper_with_snapshots(id, index);
        let keeper = keeper.filter(|keeper| worker.keeper() == Some(*keeper));
        let keeper = keeper.filter(|keeper| !places.contains(keeper) && !lost.contains(keeper));
        let keeper = self.nodes.iter().find(|node| Some(node.id) == keeper);
        let keeper = keeper.and_then(|node| node.worker.as_ref());
        let sessions = self.sessions_at(id);
        keeper.is_some_and(|keeper| keeper.keeps(part, &sessions))
    }

    /// Kills a worker, or two at once, if the lease would go on.
    fn lose_workers(&mut self, at: usize) {
        if self.faults.losses == 0 || !self.can_lose_workers(&[at]) {
            return;
        }
        let has_two = self.faults.losses >= 2;
        let can_both = |it: &Self, other| has_two && it.can_lose_workers(&[at, other]);
        let other = self.another_host(at, can_both);
        let run_parts = other.is_some_and(|other| self.runs_part(at) && self.runs_part(other));
        self.report.part_pairs += u32::from(run_parts);
        self.lose_worker(at);
        if let Some(other) = other {
            self.lose_worker(other);
        }
    }

    /// Returns whether the lease has devices of the worker of a host.
    fn runs_part(&self, at: usize) -> bool {
        self.places().contains(&self.nodes[at].id)
    }

    fn lose_worker(&mut self, at: usize) {
        self.faults.losses -= 1;
        self.report.lost_workers += 1;
        let id = self.nodes[at].id;
        self.report.lost_parts += u32::from(self.runs_part(at));
        self.trace(|| format!("worker {id} is killed"));
        self.disconnect_process(id);
        if !self.runs_part(at) {
            // A lease that an administrator moves to a worker that is gone would be lost.
            self.scheduler.disconnect(id, self.now);
        }
        self.nodes[at].worker = None;
        for node in &mut self.nodes {
            if let Some(worker) = &mut node.worker {
                worker.disconnect_from_keeper(self.now, id);
            }
        }
    }

    /// Cuts a worker off from the scheduler. If that lasts, the scheduler takes the worker for lost.
    fn cut_off(&mut self, at: usize) {
        let id = self.nodes[at].id;
        if !self.scheduler.has_joined(id)
            || !self.can_lose_workers(&[at])
            || !take(&mut self.faults.losses)
        {
            return;
        }
        self.report.cut_off += u32::from(self.runs_part(at));
        self.trace(|| format!("worker {id} is cut off from the scheduler"));
        self.scheduler.disconnect(id, self.now);
    }

    fn restart_scheduler(&mut self) {
        if self.lease.claims.is_none() {
            return;
        }
        if self.rng.random_bool(0.3) {
            if take(&mut self.faults.cuts) {
                self.report.cuts += 1;
                self.scheduler.disconnect_client(self.now);
            }
            return;
        }
        if take(&mut self.faults.restarts) {
            self.report.restarts += 1;
            self.trace(|| "the scheduler restarts".into());
            self.scheduler.restart(self.now);
        }
    }

    /// Drains a worker, unless the lease waits for snapshots there. Returns whether it did.
    fn drain(&mut self, at: usize) -> bool {
        let can_drain = self.all_could_go_on(&[]);
        let node = &mut self.nodes[at];
        let is_new = node.drained_since.is_none() && self.scheduler.has_joined(node.id);
        if is_new && can_drain {
            node.drained_since = Some(self.now);
            self.scheduler.drain(node.id, true, self.now);
        }
        is_new && can_drain
    }

    fn administrate(&mut self, at: usize) {
        if self.faults.moves == 0 {
            return;
        }
        // A lease may be lost that is suspended before the scheduler knows that its worker is gone: a keeper that
        // drains drops what it has of the lease.
        let places = self.places();
        let is_up = |place: &u64| {
            let mut nodes = self.nodes.iter();
            nodes.any(|node| node.id == *place && node.worker.is_some())
        };
        let are_up = places.iter().all(is_up);
        let is_done = match self.rng.random_range(0..3) {
            0 if !are_up => false,
            0 => self.scheduler.suspend(self.now),
            1 => self.scheduler.move_lease(self.now),
            _ => self.drain(at),
        };
        self.faults.moves -= u32::from(is_done);
        self.report.moves += u32::from(is_done);
    }
}
