//! What administrators see of the leases and requests that wait for devices.

use std::collections::BTreeMap;

use tensord_proto::{
    ids::{ClientId, LeaseId},
    v1::{self, DevicesOfLease, WaitingList},
};
use tensord_scheduler::{
    EndReason, LeftWorker, NeededDevices, SuitableDevices, Timestamp, Waiter, Waiting,
};

use super::Driver;
use crate::scheduler::view;

/// Number of leases and requests in a list, the first ones. Each needs a pass over all devices of the
/// pool, while nothing else is decided.
const MAX_LISTED: usize = 256;

impl Driver {
    /// Returns what waits, in the order in which it gets devices, up to [`MAX_LISTED`]; only `wanted`, with
    /// the leases that have suitable devices, if it is given.
    pub(super) fn list_waiting(&self, wanted: Option<LeaseId>) -> WaitingList {
        let all = self.engine.waiting_ids();
        let total = view::count(all.len());
        let listed = (1..).zip(all);
        let listed = listed.filter(|(_, id)| wanted.is_none_or(|wanted| wanted == *id));
        let waiting = listed.take(MAX_LISTED);
        let waiting = waiting.filter_map(|(at, id)| Some((at, self.engine.waiting(id)?)));
        let waiting =
            waiting.map(|(position, it)| self.waiting_info(position, &it, wanted.is_some()));
        WaitingList {
            waiting: waiting.collect(),
            count: total,
            lease: wanted.and_then(|id| self.lease_info(id)),
        }
    }

    fn waiting_info(&self, position: u32, waiting: &Waiting, with_leases: bool) -> v1::Waiting {
        let now = self.now();
        let since = |at: Timestamp| now.as_millis().saturating_sub(at.as_millis());
        let until = |at: Timestamp| at.as_millis().saturating_sub(now.as_millis());
        let left_worker = |left: &LeftWorker| v1::LeftWorker {
            name: left.name.clone(),
            remaining_ms: until(left.until),
        };
        let (tenant, token) = self.holder_names(waiting.client);
        let needs = waiting.needs.iter();
        let info = v1::Waiting {
            lease_id: waiting.lease.0,
            tenant,
            token,
            position,
            at_limit: waiting.is_at_limit,
            tenant_info: waiting
                .tenant
                .as_ref()
                .filter(|_| with_leases)
                .and_then(|tenant| self.list_tenants(Some(tenant.as_str())).pop()),
            needs: needs
                .map(|it| self.needed_devices(it, with_leases))
                .collect(),
            ..v1::Waiting::default()
        };
        match &waiting.waiter {
            Waiter::Request {
                demand,
                since: at,
                priority,
                is_guaranteed,
                has_reservation,
                reserved_for,
                enough_at,
            } => v1::Waiting {
                requested: demand.to_string(),
                waited_ms: Some(since(*at)),
                priority: *priority,
                guaranteed: *is_guaranteed,
                has_reservation: *has_reservation,
                reserved_for: reserved_for.map(|lease| lease.0),
                enough_in_ms: enough_at.map(until),
                ..info
            },
            Waiter::Lease {
                cause,
                resumed_at,
                is_client_attached,
                ends_at,
                receivers,
                left_workers,
            } => v1::Waiting {
                client_away: !is_client_attached,
                waited_ms: resumed_at.map(since),
                ends_in_ms: ends_at.map(until),
                cause: cause.as_ref().map_or_else(String::new, ToString::to_string),
                reclaimed: *cause == Some(EndReason::Reclaimed),
                receivers: receivers.clone(),
                left_workers: left_workers.iter().map(left_worker).collect(),
                ..info
            },
        }
    }

    fn needed_devices(&self, needed: &NeededDevices, with_leases: bool) -> v1::NeededDevices {
        let NeededDevices {
            count,
            share_permille,
            at_one_worker,
            suitable,
        } = needed;
        let SuitableDevices {
            free,
            free_at_one_worker,
            leased_devices,
            leased,
            held_back,
            ending,
            out_of_service,
            unreachable,
            draining,
        } = suitable;
        let by_lease = |devices: &BTreeMap<LeaseId, usize>| match with_leases {
            true => self.devices_of_leases(devices),
            false => Vec::new(),
        };
        v1::NeededDevices {
            count: view::count(*count),
            at_one_worker: *at_one_worker,
            free: view::count(*free),
            free_at_one_worker: view::count(*free_at_one_worker),
            leased: view::count(*leased_devices),
            held_back: view::count(held_back.values().sum()),
            ending: view::count(*ending),
            out_of_service: view::count(*out_of_service),
            unreachable: view::count(*unreachable),
            draining: view::count(*draining),
            leased_by: by_lease(leased),
            held_back_for: by_lease(held_back),
            share_permille: share_permille.unwrap_or_default(),
        }
    }

    fn devices_of_leases(&self, devices: &BTreeMap<LeaseId, usize>) -> Vec<DevicesOfLease> {
        let of_lease = |(lease, count): (&LeaseId, &usize)| {
            let known = self.engine.lease(*lease);
            let owner = known.as_ref().and_then(|lease| lease.owner);
            let devices = known.and_then(|lease| lease.devices);
            let share = devices.and_then(|devices| devices.first()?.share);
            // Devices may be held back for a request.
            let owner = owner.or_else(|| self.engine.waiting(*lease)?.client);
            let (tenant, token) = self.holder_names(owner);
            DevicesOfLease {
                lease_id: lease.0,
                tenant,
                token,
                count: view::count(*count),
                share_permille: share.map_or(0, |share| share.permille),
            }
        };
        devices.iter().map(of_lease).collect()
    }

    /// Returns the tenant and the name of the token of a client; empty if they are not known.
    pub(super) fn holder_names(&self, client: Option<ClientId>) -> (String, String) {
        let auth = client.and_then(|client| self.holders.auth(client));
        let names = auth.map(|auth| (auth.tenant.to_string(), auth.token.to_string()));
        names.unwrap_or_default()
    }
}
