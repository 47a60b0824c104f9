//! The engine: the state of the pool, and what changes it.
//!
//! Here is what all events have in common: deadlines, the ends of leases, and
//! the settling of the queue after each event. What workers and clients say is
//! handled in `engine/workers.rs` and `engine/clients.rs`.
//!
//! What holds after every event:
//! - A device has at most one lease, and no lease has a device that does not
//!   exist.
//! - No lease gets a device that its worker has not released from the lease
//!   before, or that is out of service.
//! - No request waits that would fit, and none that could never fit.
//! - A lease without its client, or with a worker yet to join, has a deadline.

mod clients;
mod workers;

use std::collections::BTreeMap;
use std::mem;

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::{ClientId, LeaseId, WorkerId};

use crate::command::Command;
use crate::event::{DeviceGrant, DeviceRef, Event, GrantedShare, StreamId};
use crate::lease::Leases;
use crate::options::Options;
use crate::pool::{Pool, Verdict};
use crate::queue::{Queue, QueuedRequest};
use crate::reason::{EndReason, RefuseReason};
use crate::snapshot::{LeaseSnapshot, Snapshot};
use crate::time::Timestamp;

/// The scheduler's state. See the crate's documentation.
pub struct Engine {
    options: Options,
    /// When the event being handled happened.
    now: Timestamp,
    pool: Pool,
    leases: Leases,
    queue: Queue,
    /// The number of the latest grant.
    granted: GrantNumber,
    /// Attached clients, with the stream each speaks on.
    clients: BTreeMap<ClientId, StreamId>,
    /// What the event being handled led to.
    commands: Vec<Command>,
}

impl Engine {
    /// A pool without workers, which starts now. `term` must be at least 1, and higher than
    /// that of any engine before it: grants are numbered by it.
    pub fn new(options: Options, term: u64, now: Timestamp) -> Self {
        Self {
            granted: GrantNumber { term, count: 0 },
            leases: Leases::new(now + options.adoption_window),
            options,
            now,
            pool: Pool::default(),
            queue: Queue::default(),
            clients: BTreeMap::new(),
            commands: Vec::new(),
        }
    }

    /// Takes in what happened at `now`, and says what to do about it, in
    /// order.
    pub fn handle(&mut self, event: Event, now: Timestamp) -> Vec<Command> {
        self.now = now;
        match event {
            Event::Tick => self.tick(),
            Event::Suspended { since } => self.resume_after(since),
            Event::Evict { client } => self.evict(client),
            Event::Worker {
                worker,
                stream,
                event,
            } => self.worker_event(worker, stream, event),
            Event::Client {
                client,
                stream,
                event,
            } => self.client_event(client, stream, event),
        }
        self.settle();
        mem::take(&mut self.commands)
    }

    /// When to send the next [`Event::Tick`], which may be a moment in the
    /// past. `None` until there is something to wait for.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let losses = self
            .pool
            .losses(self.options.worker_timeout)
            .map(|(at, _)| at);
        let ends = self.leases.iter().filter_map(|(_, lease)| lease.ends_at());
        losses.chain(ends).min()
    }

    /// The pool as it is.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            workers: self.pool.snapshot(),
            waiting_requests: self.queue.len(),
            waiting: self.queue.clients().collect(),
            leases: self.leases.len(),
            owners: self
                .leases
                .iter()
                .map(|(id, lease)| (id, lease.owner))
                .collect(),
        }
    }

    /// A lease, if there is one of this id.
    pub fn lease(&self, id: LeaseId) -> Option<LeaseSnapshot> {
        let lease = self.leases.get(id)?;
        let device = |(&share, &grant)| self.pool.leased_device(GrantedShare { share, grant });
        Some(LeaseSnapshot {
            owner: lease.owner,
            devices: lease.shares.iter().map(device).collect(),
        })
    }

    /// The leases of a client, attached or not.
    pub fn leases_of(&self, client: ClientId) -> Vec<LeaseId> {
        self.leases.owned_by(client)
    }

    /// The scheduler did not run from `since` until now: workers and clients get the time to
    /// come back that they get after a restart. What the engine does not know stays
    /// unknown, as it has forgotten nothing.
    fn resume_after(&mut self, since: Timestamp) {
        let wait = self.options.lease_expiry;
        self.pool.spare_until(self.now + wait);
        self.leases.put_off(since, self.now, wait);
    }

    fn tick(&mut self) {
        let losses = self.pool.losses(self.options.worker_timeout);
        let due = losses.filter(|(at, _)| *at <= self.now);
        for (_, worker) in due.collect::<Vec<_>>() {
            self.lose(worker);
        }
        let ends = self.leases.iter();
        let due = ends.filter(|(_, lease)| lease.ends_at().is_some_and(|at| at <= self.now));
        for id in due.map(|(id, _)| id).collect::<Vec<_>>() {
            self.end_lease(id, self.missing_worker(id));
        }
        self.leases.forget_ended(self.now);
    }

    /// Why an overdue lease ends, if it is not for want of its client.
    fn missing_worker(&self, lease: LeaseId) -> Option<EndReason> {
        let workers = self.leases.get(lease)?.workers();
        let worker = workers
            .into_iter()
            .find(|worker| !self.pool.contains(*worker))?;
        Some(EndReason::WorkerMissing { worker })
    }

    /// Ends a lease, and tells everyone who is there. Its client is told why;
    /// `None` is for an end the client itself brought about, by a command or
    /// by staying away.
    fn end_lease(&mut self, id: LeaseId, reason: Option<EndReason>) {
        let Some(lease) = self.leases.remove(id, self.now) else {
            return;
        };
        for worker in lease.workers() {
            let grants = lease.grants_on(worker);
            self.pool.end(worker, id, &grants);
            if self.pool.is_connected(worker) {
                self.send_end(worker, id, grants);
            }
        }
        if let (Some(owner), Some(reason)) = (lease.owner, reason) {
            self.report_ended(owner, id, reason);
        }
    }

    /// Has a worker end a lease. What it is to be told of the same lease on this very
    /// occasion becomes one command.
    fn send_end(&mut self, worker: WorkerId, lease: LeaseId, grants: Vec<DeviceGrant>) {
        let mut commands = self.commands.iter_mut();
        let known = commands.find_map(|command| match command {
            Command::EndLease {
                worker: of,
                lease: ended,
                grants,
            } if (*of, *ended) == (worker, lease) => Some(grants),
            _ => None,
        });
        match known {
            None => self.commands.push(Command::EndLease {
                worker,
                lease,
                grants,
            }),
            Some(known) => {
                for grant in grants {
                    match known.iter_mut().find(|known| known.index == grant.index) {
                        Some(known) => known.grant = known.grant.max(grant.grant),
                        None => known.push(grant),
                    }
                }
            }
        }
    }

    fn report_ended(&mut self, client: ClientId, lease: LeaseId, reason: EndReason) {
        if self.clients.contains_key(&client) {
            self.commands.push(Command::LeaseEnded {
                client,
                lease,
                reason,
            });
        }
    }

    /// Takes every device of an adopted lease whose worker is here. The lease
    /// ends if one is not to be had, and gets a deadline if a worker is not
    /// here yet.
    fn reserve(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let mut complete = true;
        for (share, grant) in lease.shares.clone() {
            let unavailable = EndReason::DeviceUnavailable {
                worker: share.worker,
                index: share.index,
            };
            if !self.pool.contains(share.worker) {
                complete = false;
                continue;
            }
            if let Some(earlier) = self.outranked(share, id, grant) {
                self.end_lease(earlier, Some(unavailable.clone()));
            }
            if self.pool.take(share, id, grant).is_err() {
                return self.end_lease(id, Some(unavailable));
            }
        }
        let Some(lease) = self.leases.get_mut(id) else {
            return;
        };
        let rejoin_by = lease
            .rejoin_by
            .unwrap_or(self.now + self.options.lease_expiry);
        lease.rejoin_by = (!complete).then_some(rejoin_by);
    }

    /// Another lease that has this device by an earlier grant than `grant`. Only leases
    /// from before a restart can meet like this: the other one is over.
    fn outranked(&self, share: DeviceRef, lease: LeaseId, grant: GrantNumber) -> Option<LeaseId> {
        let holder = self.pool.holder(share).filter(|holder| *holder != lease)?;
        let held_by = self.leases.get(holder)?.shares.get(&share)?;
        (self.pool.is_good(share, grant) && *held_by < grant).then_some(holder)
    }

    /// Grants or refuses whatever can be by now, and tells the others where
    /// they stand.
    fn settle(&mut self) {
        // Grants only make the pool fuller, so one pass is enough.
        if self.pool.take_changed() {
            for waiting in self.queue.take() {
                if let Some(waiting) = self.resolve(waiting) {
                    self.queue.push(waiting);
                }
            }
        }
        for (waiting, position) in self.queue.moved() {
            let QueuedRequest {
                client, request, ..
            } = *waiting;
            self.commands.push(Command::Queued {
                client,
                request,
                position,
            });
        }
    }

    /// Grants or refuses a request, or hands it back to wait.
    fn resolve(&mut self, waiting: QueuedRequest) -> Option<QueuedRequest> {
        match self.pool.assess(&waiting.demand) {
            Verdict::Fits(shares) => self.grant(waiting, shares),
            Verdict::Busy => return Some(waiting),
            Verdict::Never => {
                let QueuedRequest {
                    client,
                    request,
                    demand,
                    ..
                } = waiting;
                let pool = self.pool.inventory();
                self.refuse(
                    client,
                    request,
                    RefuseReason::Unsatisfiable { demand, pool },
                );
            }
        }
        None
    }
}

/// For tests to look inside.
#[cfg(test)]
impl Engine {
    pub(crate) fn leases(&self) -> &Leases {
        &self.leases
    }

    pub(crate) fn attached_clients(&self) -> usize {
        self.clients.len()
    }
}
