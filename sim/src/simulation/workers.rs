//! The workers: their processes, the links between these, and the copies of snapshots.

use rand::RngExt;
use tensord_proto::v1::Joined;
use tensord_worker::testing::SimulatedWorker;

use super::{MAX_STEPS, Simulation};
use crate::network::Link;

impl Simulation<'_> {
    /// Returns the worker with this id, if it is up.
    pub(super) fn worker(&mut self, id: u64) -> Option<&mut SimulatedWorker> {
        let node = self.nodes.iter_mut().find(|node| node.id == id)?;
        node.worker.as_mut()
    }

    pub(super) fn run_process(&mut self, at: usize) {
        let steps = self.rng.random_range(1..=MAX_STEPS);
        if let Some(worker) = &mut self.nodes[at].worker {
            worker.run(steps);
        }
    }

    pub(super) fn keep_snapshot(&mut self, rank: usize) {
        let has_room = self.rng.random_bool(0.9);
        if let Some((worker, index)) = self.worker_of(rank)
            && worker.keep_snapshot(index, has_room)
        {
            self.report.snapshots += 1;
        }
    }

    pub(super) fn reply_to_snapshot(&mut self, at: usize) {
        if let Some(worker) = &mut self.nodes[at].worker {
            worker.reply_to_snapshot();
        }
    }

    /// Has a worker start a process, or exchange a message with it, or lets a process exit.
    pub(super) fn step_supervisor(&mut self, at: usize) {
        let which = self.rng.random_range(0..4);
        let Some(worker) = &mut self.nodes[at].worker else {
            return;
        };
        match which {
            0 => worker.take_job(),
            1 => worker.deliver_to_process(),
            2 => worker.receive_report(),
            _ => {
                if worker.exit_process() {
                    let id = self.nodes[at].id;
                    self.disconnect_process(id);
                }
            }
        }
    }

    /// Ends all connections of the process of a worker.
    pub(super) fn disconnect_process(&mut self, id: u64) {
        for rank in 0..self.clients.len() {
            if self.place(rank).is_some_and(|place| place.0 == id) {
                self.clients[rank].disconnect();
            }
        }
        let links: Vec<_> = self.peer_links.keys().copied().collect();
        for (dialler, acceptor) in links {
            if dialler == id || acceptor == id {
                self.cut_peer_link((dialler, acceptor));
            }
        }
    }

    pub(super) fn cut_peer_link(&mut self, (dialler, acceptor): (u64, u64)) {
        self.peer_links.remove(&(dialler, acceptor));
        if let Some(worker) = self.worker(dialler) {
            worker.detach(acceptor);
        }
        if let Some(worker) = self.worker(acceptor) {
            worker.detach(dialler);
        }
    }

    /// Opens the links that a process wants, or moves frames on one.
    pub(super) fn step_peer_links(&mut self, at: usize) -> Result<(), String> {
        let id = self.nodes[at].id;
        if self.rng.random_bool(0.1) {
            self.open_peer_links(at);
        }
        let links = self.peer_links.keys();
        let links: Vec<_> = links
            .filter(|it| it.0 == id || it.1 == id)
            .copied()
            .collect();
        if links.is_empty() {
            return Ok(());
        }
        let link = links[self.rng.random_range(0..links.len())];
        match self.rng.random_range(0..5) {
            0 => self.establish_peer_link(link),
            1 | 2 => self.send_to_peer(id, link),
            _ => return self.deliver_to_peer(id, link),
        }
        Ok(())
    }

    fn open_peer_links(&mut self, at: usize) {
        let Some(worker) = &self.nodes[at].worker else {
            return;
        };
        for join in worker.join_requests() {
            let link = (join.from_worker_id, join.to_worker_id);
            if self.peer_links.contains_key(&link) {
                continue;
            }
            let acceptor = self.worker(join.to_worker_id);
            if let Some(joined) = acceptor.and_then(|acceptor| acceptor.accept(&join)) {
                let mut opening = Link::default();
                opening.accept(joined);
                self.peer_links.insert(link, opening);
            }
        }
    }

    fn establish_peer_link(&mut self, link: (u64, u64)) {
        let joined: Option<Joined> = self.peer_links.get_mut(&link).and_then(Link::establish);
        let Some(joined) = joined else {
            return;
        };
        let dialler = self.worker(link.0);
        if !dialler.is_some_and(|dialler| dialler.joined(link.1, &joined)) {
            self.cut_peer_link(link);
        }
    }

    fn send_to_peer(&mut self, from: u64, link: (u64, u64)) {
        let (dialler, acceptor) = link;
        let is_dialler = from == dialler;
        let is_ready = match self.peer_links.get(&link) {
            Some(link) => !is_dialler || link.is_up(),
            None => false,
        };
        if !is_ready {
            return;
        }
        let to = if is_dialler { acceptor } else { dialler };
        let is_ping = self.rng.random_bool(0.1);
        let worker = self.worker(from);
        let frames = worker.map_or_else(Vec::new, |worker| match is_ping {
            true => worker.ping_to(to).into_iter().collect(),
            false => worker.next_frames_to(to),
        });
        let link = self.peer_links.get_mut(&link).and_then(Link::accepted);
        if let Some(link) = link {
            match is_dialler {
                true => link.to_acceptor.extend(frames),
                false => link.to_dialler.extend(frames),
            }
        }
    }

    fn deliver_to_peer(&mut self, to: u64, link: (u64, u64)) -> Result<(), String> {
        let (dialler, acceptor) = link;
        let is_dialler = to == dialler;
        let Some(frames) = self.peer_links.get_mut(&link) else {
            return Ok(());
        };
        let frame = match is_dialler {
            true => frames.next_for_dialler(),
            false => frames.next_for_acceptor(),
        };
        let Some(frame) = frame else {
            return Ok(());
        };
        let from = if is_dialler { acceptor } else { dialler };
        let Some(worker) = self.worker(to) else {
            return Ok(());
        };
        let received = worker.receive_from(from, frame);
        received.map_err(|e| format!("worker {to} has not accepted a frame of worker {from}: {e}"))
    }

    /// Moves snapshots to keepers, and to workers that are to hold them.
    pub(super) fn step_copies(&mut self, at: usize) {
        let (which, now) = (self.rng.random_range(0..20), self.now);
        let Some(mut worker) = self.nodes[at].worker.take() else {
            return;
        };
        match which {
            0..4 => {
                if let Some(keeper) = worker.keeper().and_then(|keeper| self.worker(keeper)) {
                    worker.connect_to_keeper(now, keeper);
                }
            }
            4..9 => worker.take_copy(now),
            9..14 => drop(worker.deliver_copy(now, true)),
            14..18 => worker.deliver_copy_reply(now),
            18 => {
                if let Some(keeper) = worker.handover_to() {
                    worker.hand_over(self.worker(keeper).map(|it| &*it));
                }
            }
            _ => worker.give_up_copies(now),
        }
        self.nodes[at].worker = Some(worker);
    }
}
