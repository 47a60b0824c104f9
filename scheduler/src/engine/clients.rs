//! What clients say: they attach, ask, cancel, release and go.

use std::collections::BTreeSet;

use tensord_proto::ids::{ClientId, LeaseId, RequestId};

use super::Engine;
use crate::command::Command;
use crate::event::{Claim, ClientEvent, DeviceRef, GrantedShare, StreamId};
use crate::lease::Lease;
use crate::queue::QueuedRequest;
use crate::reason::{EndReason, RefuseReason};

impl Engine {
    pub(super) fn client_event(&mut self, client: ClientId, stream: StreamId, event: ClientEvent) {
        match event {
            ClientEvent::Attach { claims } => self.attach(client, stream, claims),
            // The end of a stream that was replaced, or what was left in it.
            _ if self.clients.get(&client) != Some(&stream) => {}
            ClientEvent::Request {
                request,
                demand,
                lease,
            } => {
                self.request(QueuedRequest::new(client, request, demand, lease));
            }
            ClientEvent::Cancel { request } => self.cancel(client, request),
            ClientEvent::Release { lease } => self.release(client, lease),
            ClientEvent::Gone => self.detach(client),
        }
    }

    /// Ends all that a client has here, attached or not.
    pub(super) fn evict(&mut self, client: ClientId) {
        self.queue.remove_all_of(client);
        for lease in self.leases.owned_by(client) {
            self.end_lease(lease, Some(EndReason::TokenRevoked));
        }
        self.clients.remove(&client);
    }

    /// A client is here with all it holds. What it had and does not claim it
    /// gave up while it was away, or it never learned of the grant; so it ends.
    fn attach(&mut self, client: ClientId, stream: StreamId, claims: Vec<Claim>) {
        self.detach(client);
        self.clients.insert(client, stream);
        let claimed: BTreeSet<_> = claims.iter().map(|claim| claim.lease).collect();
        for lease in self.leases.owned_by(client) {
            if !claimed.contains(&lease) {
                self.end_lease(lease, None);
            }
        }
        for claim in claims {
            self.claim(client, claim);
        }
    }

    /// Drops what waits, since the client asks again when it is back, and lets
    /// its leases expire.
    fn detach(&mut self, client: ClientId) {
        if self.clients.remove(&client).is_none() {
            return;
        }
        self.queue.remove_all_of(client);
        for id in self.leases.owned_by(client) {
            if let Some(lease) = self.leases.get_mut(id) {
                lease.expires_at = Some(self.now + self.options.lease_expiry);
            }
        }
    }

    fn claim(&mut self, client: ClientId, claim: Claim) {
        let Claim { lease: id, shares } = claim;
        let may_adopt = self.leases.may_adopt(id, self.now) && !shares.is_empty();
        match self.leases.get_mut(id) {
            Some(lease) if lease.owner == Some(client) => lease.expires_at = None,
            Some(lease) if lease.owner.is_none() => {
                lease.owner = Some(client);
                lease.expires_at = None;
                lease.add(&shares);
                self.reserve(id);
            }
            None if may_adopt => {
                self.leases.insert(id, Lease::owned(client, &shares));
                self.reserve(id);
            }
            Some(_) | None => self.report_ended(client, id, EndReason::Unknown),
        }
    }

    /// Grants or refuses the request, or lets it wait if there is room. To ask
    /// again for what waits already changes nothing.
    fn request(&mut self, queued: QueuedRequest) {
        let (client, request) = (queued.client, queued.request);
        if self.queue.contains(client, request) {
            return;
        }
        if queued.demand.devices == 0 {
            return self.refuse(client, request, RefuseReason::NoDevices);
        }
        let Some(waiting) = self.resolve(queued) else {
            return;
        };
        let max = self.options.max_waiting_per_client;
        if self.queue.len_of(client) >= max {
            return self.refuse(client, request, RefuseReason::ClientLimit { max });
        }
        let max = self.options.max_waiting;
        if self.queue.len() >= max {
            return self.refuse(client, request, RefuseReason::PoolLimit { max });
        }
        self.queue.push(waiting);
    }

    /// A request that does not wait has its answer on the way already.
    fn cancel(&mut self, client: ClientId, request: RequestId) {
        if self.queue.remove(client, request) {
            self.refuse(client, request, RefuseReason::Cancelled);
        }
    }

    fn release(&mut self, client: ClientId, lease: LeaseId) {
        let owner = self.leases.get(lease).and_then(|lease| lease.owner);
        if owner == Some(client) {
            self.end_lease(lease, None);
        } else {
            self.report_ended(client, lease, EndReason::Unknown);
        }
    }

    pub(super) fn grant(&mut self, granted: QueuedRequest, shares: Vec<DeviceRef>) {
        let QueuedRequest {
            client,
            request,
            lease,
            ..
        } = granted;
        let shares = self.number(shares);
        for &GrantedShare { share, grant } in &shares {
            let taken = self.pool.take(share, lease, grant);
            assert!(taken.is_ok(), "{share:?} was free a moment ago");
        }
        let devices = shares
            .iter()
            .filter_map(|share| self.pool.leased_device(*share));
        let devices = devices.collect();
        self.commands.push(Command::Granted {
            client,
            request,
            lease,
            devices,
        });
        self.leases.insert(lease, Lease::owned(client, &shares));
    }

    /// Gives free devices the number of their next grant: the next of this engine, or if
    /// their worker knows of a later grant, as when the state of an earlier scheduler was
    /// lost, one above that. What a worker reports numbers no other worker's devices.
    fn number(&mut self, shares: Vec<DeviceRef>) -> Vec<GrantedShare> {
        self.granted = self.granted.next().unwrap_or(self.granted);
        let number = |share| GrantedShare {
            share,
            grant: self.granted.max(self.pool.next_grant(share)),
        };
        shares.into_iter().map(number).collect()
    }

    pub(super) fn refuse(&mut self, client: ClientId, request: RequestId, reason: RefuseReason) {
        self.commands.push(Command::Refused {
            client,
            request,
            reason,
        });
    }
}
