//! What workers and the client exchange with the scheduler.

use std::time::Duration;

use rand::RngExt;
use tensord_client::Durability;
use tensord_proto::ids::WorkerId;
use tensord_scheduler::{ClientEvent, Durability as Requested};

use super::Simulation;
use crate::scheduler::LEASE;

/// How long a worker is drained: longer than a report of another worker is on its way, which may say that
/// this one has snapshots that it has dropped since.
const DRAINED_FOR: Duration = Duration::from_secs(4);

impl Simulation<'_> {
    /// Has the client request its lease, once all workers have joined.
    pub(super) fn request_lease(&mut self, durability: Durability) {
        for node in &self.nodes {
            self.scheduler.receive_from(node.id, self.now);
        }
        self.scheduler.attach(None);
        self.scheduler.receive_from_client(self.now);
        let durability = match durability {
            Durability::Off => Requested::Off,
            _ => Requested::Auto,
        };
        self.scheduler.request(self.clients.len(), durability);
        self.scheduler.receive_from_client(self.now);
    }

    pub(super) fn heartbeat(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        if let Some(worker) = &mut node.worker {
            let reports = worker.report();
            self.scheduler.report(node.id, reports);
        }
    }

    /// Lets the next command of the scheduler arrive at a worker.
    pub(super) fn deliver_command(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        if let Some(worker) = &mut node.worker
            && let Some(command) = self.scheduler.next_command(node.id)
        {
            let reports = worker.execute(command);
            self.scheduler.report(node.id, reports);
        }
    }

    /// Has the client report whether its lease could go on from snapshots, if that has changed.
    pub(super) fn report_client(&mut self) {
        let mut clients = self.clients.iter();
        let is_restorable = clients.all(|client| client.session.can_be_restored());
        if self.scheduler.has_client()
            && self.lease.claims.is_some()
            && is_restorable != self.lease.reported_restorable
        {
            self.lease.reported_restorable = is_restorable;
            self.scheduler.report_client(ClientEvent::Restorable {
                lease: LEASE,
                is_restorable,
            });
        }
    }

    /// Has the client report that it cannot reach a worker of its lease.
    pub(super) fn report_unreachable(&mut self, worker: WorkerId) {
        let (lease, worker) = (LEASE, Some(worker));
        self.scheduler
            .report_client(ClientEvent::Unreachable { lease, worker });
    }

    /// Has somebody connect to the scheduler again, or the scheduler notice that a worker is gone, or a host
    /// start its worker again, or an administrator resume the lease.
    pub(super) fn repair(&mut self, at: usize) {
        if !self.scheduler.has_client() {
            self.scheduler.attach(self.lease.claims.as_ref());
            self.lease.reported_restorable = false;
        }
        if self.rng.random_bool(0.1) {
            self.scheduler.resume(self.now);
        }
        let node = &mut self.nodes[at];
        match &node.worker {
            None if self.scheduler.has_joined(node.id) => {
                self.scheduler.disconnect(node.id, self.now)
            }
            None => {
                if self.rng.random_bool(0.1) {
                    node.id += 100;
                    node.drained_since = None;
                    self.start_worker(at);
                }
            }
            Some(worker) if !self.scheduler.has_joined(node.id) => {
                if self.rng.random_bool(0.2) {
                    self.scheduler.join(node.id, worker);
                }
            }
            Some(_) => {
                let since = node.drained_since;
                if since.is_some_and(|since| self.now > since + DRAINED_FOR) {
                    node.drained_since = None;
                    self.scheduler.drain(node.id, false, self.now);
                }
            }
        }
    }
}
