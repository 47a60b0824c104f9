//! The program's sessions, and their connections with the processes of the lease.

use rand::RngExt;
use tensord_client::testing::SimulatedEnd;
use tensord_proto::ids::WorkerId;
use tensord_worker::testing::{SessionPoints, SimulatedWorker};

use super::Simulation;
use crate::{
    network::Link,
    scheduler::{LEASE, LeaseUpdate},
};

impl Simulation<'_> {
    /// Returns the worker and the index of its device on which the session of this rank is, if the client
    /// knows.
    pub(super) fn place(&self, rank: usize) -> Option<(u64, u32)> {
        let share = self.lease.claims.as_ref()?.shares.get(rank)?;
        Some((share.worker_id, share.device_index))
    }

    /// Returns the worker on which the session of this rank is, if that is up, and its device.
    pub(super) fn worker_of(&mut self, rank: usize) -> Option<(&mut SimulatedWorker, u32)> {
        let (id, index) = self.place(rank)?;
        let node = self.nodes.iter_mut().find(|node| node.id == id)?;
        Some((node.worker.as_mut()?, index))
    }

    /// Returns what the client could restore of the sessions that are on a worker.
    pub(super) fn sessions_at(&self, worker: u64) -> Vec<SessionPoints> {
        let is_there = |(rank, _): &(usize, _)| self.place(*rank).is_some_and(|it| it.0 == worker);
        let clients = self.clients.iter().enumerate().filter(is_there);
        let points = clients.map(|(_, client)| {
            let session = &client.session;
            (session.id(), session.restore_points())
        });
        points.collect()
    }

    /// Returns the workers of the lease, in the order of its ranks.
    pub(super) fn places(&self) -> Vec<u64> {
        let ranks = 0..self.clients.len();
        let mut places: Vec<_> = ranks
            .filter_map(|it| self.place(it))
            .map(|it| it.0)
            .collect();
        places.dedup();
        places
    }

    pub(super) fn send(&mut self, rank: usize, is_bulk: bool) {
        // An impatient look also sends what may wait for more.
        let is_patient = self.rng.random_bool(0.5);
        let client = &mut self.clients[rank];
        let link = &mut client.links[usize::from(is_bulk)];
        if !link.is_up() {
            return;
        }
        let frames = client.session.next_frames(is_bulk, is_patient, self.now);
        if let Some(link) = link.accepted() {
            link.to_acceptor.extend(frames);
        }
    }

    /// Queues the worker's frames.
    pub(super) fn reply(&mut self, rank: usize, is_bulk: bool) {
        if self.clients[rank].links[usize::from(is_bulk)].is_down() {
            return;
        }
        let worker = self.worker_of(rank);
        let frames = worker.map(|(worker, index)| worker.next_frames(index, is_bulk));
        let link = &mut self.clients[rank].links[usize::from(is_bulk)];
        if let Some(link) = link.accepted() {
            link.to_dialler.extend(frames.unwrap_or_default());
        }
    }

    pub(super) fn ping(&mut self, rank: usize, is_bulk: bool) {
        if !self.clients[rank].links[usize::from(is_bulk)].is_up() {
            return;
        }
        let of_client = self.clients[rank].session.ping(is_bulk);
        let worker = self.worker_of(rank);
        let of_worker = worker.and_then(|(worker, index)| worker.ping(index, is_bulk));
        let link = &mut self.clients[rank].links[usize::from(is_bulk)];
        if let Some(link) = link.accepted() {
            link.to_acceptor.extend(of_client);
            link.to_dialler.extend(of_worker);
        }
    }

    pub(super) fn deliver_to_worker(&mut self, rank: usize, is_bulk: bool) -> Result<(), String> {
        let link = &mut self.clients[rank].links[usize::from(is_bulk)];
        let Some(frame) = link.next_for_acceptor() else {
            return Ok(());
        };
        // The connections of a worker that is killed end with it.
        let Some((worker, index)) = self.worker_of(rank) else {
            return Err(format!("the connection of session {rank} leads nowhere"));
        };
        let received = worker.receive(index, is_bulk, frame);
        // Nothing is lost on a connection: it delivers all frames in order, or ends.
        received.map_err(|e| format!("the worker has not accepted a frame: {e}"))
    }

    pub(super) fn deliver_to_client(&mut self, rank: usize, is_bulk: bool) -> Result<(), String> {
        let client = &mut self.clients[rank];
        let Some(frame) = client.links[usize::from(is_bulk)].next_for_dialler() else {
            return Ok(());
        };
        match client.session.receive(is_bulk, frame, self.now) {
            Ok(()) => {}
            Err(SimulatedEnd::Ended(_)) => client.links[usize::from(is_bulk)] = Link::Down,
            Err(end) => return Err(format!("session {rank} has ended: {end:?}")),
        }
        client.collect_answers();
        Ok(())
    }

    /// Opens a connection, or lets the reply to the opening arrive.
    pub(super) fn connect(&mut self, rank: usize, is_bulk: bool) -> Result<(), String> {
        let client = &mut self.clients[rank];
        let link = &mut client.links[usize::from(is_bulk)];
        if let Some(opened) = link.establish() {
            return match client.session.opened(is_bulk, &opened) {
                Ok(()) => {
                    client.openings += 1;
                    Ok(())
                }
                Err(SimulatedEnd::Lost(_)) => {
                    *link = Link::Down;
                    Ok(())
                }
                Err(end) => Err(format!("client {rank} does not accept {opened:?}: {end:?}")),
            };
        }
        let is_needed = !is_bulk || client.session.needs_bulk();
        let is_down = link.is_down();
        let Some((worker_id, _)) = self.place(rank).filter(|_| is_down && is_needed) else {
            return Ok(());
        };
        if self.lease.is_suspended {
            return Ok(());
        }
        let open = self.clients[rank].session.open(is_bulk);
        let Some((worker, _)) = self.worker_of(rank) else {
            self.report_unreachable(WorkerId(worker_id));
            return Ok(());
        };
        match worker.open(&open, LEASE) {
            Ok(opened) => {
                self.clients[rank].links[usize::from(is_bulk)].accept(Box::new(opened));
                Ok(())
            }
            Err(None) => Ok(()),
            Err(Some(error)) => {
                let place = self.place(rank);
                self.scheduler.trace(self.now, || {
                    format!("session {rank} is rejected at {place:?}: {error}; {open:?}")
                });
                let end = self.clients[rank].session.rejected(is_bulk, &open, &error);
                match end {
                    SimulatedEnd::Lost(_) => Ok(()),
                    end => Err(format!("a worker rejects session {rank}: {end:?}")),
                }
            }
        }
    }

    /// Lets what the scheduler has sent to the client arrive.
    pub(super) fn receive_update(&mut self) -> Result<(), String> {
        match self.scheduler.next_update() {
            None => return Ok(()),
            Some(LeaseUpdate::Over(reason)) => return Err(format!("the lease is over: {reason}")),
            Some(LeaseUpdate::Interrupted) => {}
            Some(LeaseUpdate::Suspended) => {
                self.lease.is_suspended = true;
                self.clients.iter_mut().for_each(|it| it.disconnect());
            }
            Some(LeaseUpdate::Place { token, claims }) => {
                self.report.places += 1;
                self.lease.is_suspended = false;
                for (client, share) in self.clients.iter_mut().zip(&claims.shares) {
                    client.disconnect();
                    client.session.set_access(token.clone(), share.device_index);
                }
                self.lease.claims = Some(claims);
                return Ok(());
            }
        }
        let mut clients = self.clients.iter();
        match clients.position(|client| !client.session.can_be_restored()) {
            Some(rank) => Err(format!("session {rank} has nothing to go on from")),
            None => Ok(()),
        }
    }
}
