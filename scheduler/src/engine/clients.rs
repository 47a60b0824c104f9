//! Events from clients: attach, request, cancel, release, and the end of a stream.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use tensord_proto::ids::{ClientId, LeaseId, RequestId};

use super::{AttachedClient, Engine};
use crate::command::Command;
use crate::device::{DeviceSpec, Share};
use crate::event::{Claim, ClientEvent, DeviceRef, GrantedDevice, StreamId};
use crate::lease::Lease;
use crate::leases::Reporter;
use crate::queue::QueuedRequest;
use crate::reason::{EndReason, RefuseReason};
use crate::tenants::TenantName;

impl Engine {
    pub(super) fn client_event(&mut self, client: ClientId, stream: StreamId, event: ClientEvent) {
        match event {
            ClientEvent::Attach { tenant, claims } => self.attach(client, stream, tenant, claims),
            // An event from a stream that was replaced.
            _ if !self.is_current(client, stream) => {}
            ClientEvent::Request {
                request,
                demand,
                priority,
                lease,
            } => {
                let tenant = self.clients.get(&client).map(|known| known.tenant.clone());
                let Some(tenant) = tenant else {
                    return;
                };
                let now = self.now;
                let queued =
                    QueuedRequest::new(client, tenant, request, demand, priority, lease, now);
                self.request(queued);
            }
            ClientEvent::Cancel { request } => self.cancel(client, request),
            ClientEvent::Unreachable { lease, worker } => {
                self.on_unreachable(client, lease, worker)
            }
            ClientEvent::Restorable {
                lease,
                is_restorable,
            } => self.set_restorable(client, lease, is_restorable),
            ClientEvent::Release { lease } => self.release(client, lease),
            ClientEvent::Disconnected => self.detach(client),
        }
    }

    /// Drops the client's pending requests and ends its leases, whether it is attached or
    /// not.
    pub(super) fn evict(&mut self, client: ClientId) {
        self.queue.remove_all_of(client);
        for lease in self.leases.owned_by(client) {
            self.end_lease(lease, Some(EndReason::TokenRevoked));
        }
        self.clients.remove(&client);
    }

    /// Attaches a client with the leases that it claims. Ends its other leases: the client
    /// gave them up while it was away, or never received their grants.
    fn attach(
        &mut self,
        client: ClientId,
        stream: StreamId,
        tenant: TenantName,
        claims: Vec<Claim>,
    ) {
        self.detach(client);
        let attached = AttachedClient {
            stream,
            tenant: tenant.clone(),
        };
        self.clients.insert(client, attached);
        let claimed: BTreeSet<_> = claims.iter().map(|claim| claim.lease).collect();
        for lease in self.leases.owned_by(client) {
            if !claimed.contains(&lease) {
                self.end_lease(lease, None);
            }
        }
        for claim in claims {
            let id = claim.lease;
            self.claim(client, claim);
            // After a restart, it is not known before.
            let lease = self.leases.get_mut(id);
            if let Some(mut lease) = lease.filter(|it| it.owner == Some(client)) {
                lease.tenant.get_or_insert_with(|| tenant.clone());
            }
        }
    }

    /// Returns whether `stream` is the client's current stream.
    fn is_current(&self, client: ClientId, stream: StreamId) -> bool {
        let known = self.clients.get(&client);
        known.is_some_and(|known| known.stream == stream)
    }

    /// Drops the client's pending requests, since it sends them again when it is back, and
    /// lets its leases expire.
    fn detach(&mut self, client: ClientId) {
        if self.clients.remove(&client).is_none() {
            return;
        }
        self.queue.remove_all_of(client);
        for id in self.leases.owned_by(client) {
            if let Some(mut lease) = self.leases.get_mut(id) {
                lease.expires_at = Some(self.now + self.options.lease_expiry);
            }
        }
    }

    fn claim(&mut self, client: ClientId, claim: Claim) {
        let (id, lease_devices) = (claim.lease, &claim.lease_devices);
        let tenant = self.clients.get(&client).map(|known| known.tenant.clone());
        let reporter = tenant.map(Reporter::Tenant);
        let reporter = reporter.filter(|it| self.may_adopt(id, lease_devices, it));
        match (self.leases.get(id).map(|lease| lease.owner), reporter) {
            (Some(owner), _) if owner == Some(client) => self.claim_again(client, claim),
            (Some(None), _) if !self.has_ended(id, lease_devices) => {
                self.claim_reported(client, claim);
            }
            (None, Some(reporter)) if !lease_devices.is_empty() => {
                let mut lease = Lease::owned(client, lease_devices, claim.durability, claim.epoch);
                (lease.running_since, lease.time_left) = (self.now, claim.time_left);
                (lease.is_spot, lease.may_end) = (claim.is_spot, claim.may_end);
                self.adopt(id, lease, reporter);
            }
            (Some(_) | None, _) => self.report_ended(client, id, EndReason::Unknown),
        }
    }

    /// Handles the claim of a lease of which it is known that the client has it.
    fn claim_again(&mut self, client: ClientId, claim: Claim) {
        let (id, now) = (claim.lease, self.now);
        let Some(mut lease) = self.leases.get_mut(id) else {
            return;
        };
        lease.expires_at = None;
        (lease.is_standing_reported, lease.is_restorable) = (false, false);
        let order = claim.epoch.cmp(&lease.epoch);
        // An older token does not know for how long the lease was suspended since.
        if order.is_ge() {
            lease.limit_time(now, claim.time_left);
        }
        match order {
            Ordering::Less => lease.is_move_unreported = true,
            Ordering::Equal => lease.is_move_unreported = false,
            Ordering::Greater => {}
        }
        drop(lease);
        match order {
            Ordering::Less => self.report_moved(id),
            Ordering::Equal => {}
            Ordering::Greater => self.adopt_later_claim(client, claim),
        }
    }

    /// Gives a lease to the client that claims it, of which only workers have reported devices so far.
    fn claim_reported(&mut self, client: ClientId, claim: Claim) {
        let id = claim.lease;
        let Some(mut lease) = self.leases.get_mut(id) else {
            return;
        };
        lease.owner = Some(client);
        lease.expires_at = None;
        (lease.durability, lease.epoch) = (claim.durability, claim.epoch);
        (lease.running_since, lease.time_left) = (self.now, claim.time_left);
        (lease.is_spot, lease.may_end) = (claim.is_spot, claim.may_end);
        // The client claims no devices of a worker that was lost before the lease moved, although
        // that worker reports them.
        let unclaimed = lease.set_devices(&claim.lease_devices);
        drop(lease);
        self.end_grants(id, unclaimed);
        self.reserve(id);
    }

    /// Cancels a pending request. A request that is not pending has been answered already.
    fn cancel(&mut self, client: ClientId, request: RequestId) {
        if self.queue.cancel(client, request) {
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

    pub(super) fn grant(&mut self, granted: QueuedRequest, lease_devices: Vec<DeviceRef>) {
        let passed = match self.queue.guaranteed().contains(granted.lease) {
            true => BTreeSet::new(),
            false => self.passed_by(Some(&granted), &lease_devices),
        };
        let QueuedRequest {
            client,
            tenant,
            request,
            lease,
            demand,
            ..
        } = granted;
        let share_of = |device: &DeviceSpec| demand.share_of(device);
        let lease_devices = self.take_devices(lease, lease_devices, share_of);
        let devices = lease_devices
            .iter()
            .filter_map(|device_ref| self.pool.leased_device(*device_ref));
        let devices = devices.collect();
        self.commands.push(Command::Granted {
            client,
            request,
            lease,
            devices,
        });
        let mut granted = Lease::owned(client, &lease_devices, demand.durability, 0);
        granted.origin = self.origin_by(&lease_devices);
        let (least, most) = (
            self.options.min_recovery_timeout,
            self.options.max_recovery_timeout,
        );
        (granted.is_spot, granted.may_end) = (demand.is_spot, demand.may_end);
        granted.time_left = demand.max_duration;
        granted.recover_within = demand.recover_within.map(|it| it.clamp(least, most));
        (granted.tenant, granted.passed) = (Some(tenant), passed);
        (granted.granted_at, granted.running_since) = (self.now, self.now);
        self.leases.insert(lease, granted);
        self.set_charge(lease);
        self.pool.give_up_held_back(&BTreeSet::from([lease]));
    }

    /// Takes free devices for a lease, or of each the share that `share_of` returns.
    ///
    /// The grants have the engine's next number, or the number after the latest grant that the worker knows if
    /// that is higher, for example because the state of an earlier scheduler was lost. A worker's report affects
    /// the numbers of its own devices only.
    pub(super) fn take_devices(
        &mut self,
        lease: LeaseId,
        devices: Vec<DeviceRef>,
        share_of: impl Fn(&DeviceSpec) -> Option<Share>,
    ) -> Vec<GrantedDevice> {
        self.granted = self.granted.next().unwrap_or(self.granted);
        let mut taken = Vec::new();
        for device_ref in devices {
            let share = self.pool.device(device_ref).and_then(&share_of);
            let lane = self.pool.free_lane(device_ref);
            let granted = GrantedDevice {
                device_ref,
                grant: self.granted.max(self.pool.next_grant(device_ref)),
                share: share.map(|share| share.in_lane(lane)),
            };
            let is_taken = self.pool.take(lease, granted).is_ok();
            assert!(is_taken, "{device_ref:?} must be free");
            taken.push(granted);
        }
        taken
    }

    pub(super) fn refuse(&mut self, client: ClientId, request: RequestId, reason: RefuseReason) {
        self.commands.push(Command::Refused {
            client,
            request,
            reason,
        });
    }
}
