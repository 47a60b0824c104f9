//! Requests that wait because of their tenant's limit alone: spot leases of the tenant are suspended for them.
//!
//! Spot leases count in full towards a limit, so a tenant that uses what is left of its limit for them would keep its
//! own other requests waiting. As few of them are suspended as the limit demands, and only if there are, or will be,
//! devices for the request then. Neither these nor other spot leases get devices before the request has got its own,
//! unless there is room for both.

use std::cmp::Reverse;
use std::sync::Arc;

use tensord_proto::ids::LeaseId;

use super::Engine;
use super::borrowed_leases::Borrowed;
use super::coming::few;
use super::holds::{Entitled, Expected};
use super::possible_victims::MakesRoom;
use super::reclaim::Plan;
use super::victims::Victim;
use crate::event::DeviceRef;
use crate::lease::Standing;
use crate::tenants::{Amounts, NOTHING, TenantLimit};

impl Engine {
    /// Returns what the tenant of a request has without those of its spot leases that `may_go`, as far as these are
    /// expected to make room; `None` if that makes no difference for the request.
    pub(super) fn used_without_own_spot(
        &self,
        entitled: &Entitled,
        expected: &Expected,
        may_go: impl Fn(&Borrowed) -> bool,
    ) -> Option<Amounts> {
        if self.policy_of(&entitled.tenant).limit == TenantLimit::default() {
            return None;
        }
        let mut own = own_spot(entitled, expected)
            .filter(|it| may_go(it))
            .peekable();
        own.peek()?;
        let mut used = expected.used.get(&entitled.tenant)?.clone();
        own.for_each(|lease| used.subtract(&lease.charge));
        Some(used)
    }

    /// Suspends as few spot leases of a request's tenant as its limit demands, and others as far as there will be too
    /// few devices. Returns the devices that the request can count on; `None` if there are too few for now.
    pub(super) fn make_room_within_limit(
        &mut self,
        entitled: &Entitled,
        plan: &mut Plan,
    ) -> Option<Vec<DeviceRef>> {
        let is_due = |it: &Borrowed| it.suspendable_at <= self.now;
        let used = self.used_without_own_spot(entitled, &plan.expected, is_due);
        let devices = used.and_then(|used| {
            let may_have = self.may_have(&used, entitled);
            // The limit demands that some of its own go in any case, which may be enough.
            let devices = self.make_room_for(entitled, &may_have, MakesRoom::OwnSpot, plan);
            devices.or_else(|| self.make_room_for(entitled, &may_have, MakesRoom::Any, plan))
        });
        let Some(devices) = devices else {
            self.await_own_spot(entitled, &plan.expected);
            return None;
        };
        self.suspend_own_spot(entitled, &devices, plan);
        let used = plan.expected.used.get(&entitled.tenant);
        if !self.are_within_limit(entitled, used.unwrap_or(&NOTHING), &devices) {
            // One could not be suspended any more, so the request gets nothing for now.
            self.await_own_spot(entitled, &plan.expected);
            return None;
        }
        Some(devices)
    }

    /// Suspends as few spot leases of a request's tenant as its limit demands for these devices, or none if all are
    /// not enough.
    fn suspend_own_spot(&mut self, entitled: &Entitled, devices: &[DeviceRef], plan: &mut Plan) {
        let used = plan.expected.used.get(&entitled.tenant);
        let used = used.unwrap_or(&NOTHING);
        if self.are_within_limit(entitled, used, devices) {
            return;
        }
        let own = own_spot(entitled, &plan.expected);
        let own = own.filter(|it| it.suspendable_at <= self.now);
        let mut own: Vec<_> = own.cloned().collect();
        own.sort_by_key(|it| (it.charge.all_permille, Reverse(it.granted_at), it.lease));
        let chosen = few(own, |leases| {
            let mut used = used.clone();
            leases.iter().for_each(|it| used.subtract(&it.charge));
            self.are_within_limit(entitled, &used, devices)
        });
        let chosen = chosen.unwrap_or_default();
        for lease in chosen {
            let leases = vec![self.without_needed(&lease, &plan.expected)];
            self.suspend_victim(&Victim { leases, useful: 0 }, entitled, plan);
        }
    }

    /// Has a spot lease go on if there are devices for it, and it is not in the way of a request. Returns whether it
    /// goes on.
    pub(super) fn spot_goes_on(&mut self, id: LeaseId) -> bool {
        if self.is_in_the_way(id) {
            self.seek_destination(id);
            self.report_standing(id);
            return false;
        }
        self.go_on_or_wait(id)
    }

    /// Returns whether a tenant could exceed its limit by a spot lease that waits and the requests that can count on
    /// devices. The lease would have to make room for these again, and they would never get their devices. They may get
    /// other devices than they count on, also larger ones.
    pub(super) fn is_in_the_way(&self, id: LeaseId) -> bool {
        let lease = self.leases.get(id).filter(|it| it.is_spot);
        let Some((lease, tenant)) = lease.and_then(|it| Some((it, it.tenant.as_ref()?))) else {
            return false;
        };
        let limit = &self.policy_of(tenant).limit;
        // A lease that was lost counts already.
        let charge = if lease.counts() {
            &NOTHING
        } else {
            &lease.charge
        };
        self.counting.has_any_of(tenant)
            && !limit.allows_all(&self.most_with_requests(tenant), charge)
    }

    /// Returns whether a spot lease waits whose tenant has a limit.
    pub(super) fn has_limited_spot_that_waits(&self) -> bool {
        let mut spot = self.leases.index().spot();
        spot.any(|id| {
            let lease = self.leases.get(id);
            let lease = lease.filter(|it| it.standing != Standing::Running);
            let tenant = lease.and_then(|it| it.tenant.as_ref());
            tenant.is_some_and(|it| self.policy_of(it).limit != TenantLimit::default())
        })
    }

    /// Returns whether the limit of a request's tenant, which has `used`, allows these devices for the request.
    fn are_within_limit(&self, entitled: &Entitled, used: &Amounts, devices: &[DeviceRef]) -> bool {
        let limit = &self.policy_of(&entitled.tenant).limit;
        let mut devices = devices.iter().filter_map(|it| self.pool.device(*it));
        devices.all(|device| limit.allows(used, device, &entitled.demand))
    }

    /// Sets the time at which further spot leases of a request's tenant will have run for long enough.
    fn await_own_spot(&mut self, entitled: &Entitled, expected: &Expected) {
        if self.policy_of(&entitled.tenant).limit == TenantLimit::default() {
            return;
        }
        let later = own_spot(entitled, expected).map(|it| it.suspendable_at);
        let next = later.filter(|at| *at > self.now).min();
        self.reclaim_at = self.reclaim_at.into_iter().chain(next).min();
    }
}

/// Returns the spot leases of a request's tenant that are expected to make room.
fn own_spot<'a>(
    entitled: &'a Entitled,
    expected: &'a Expected,
) -> impl Iterator<Item = &'a Arc<Borrowed>> {
    let spot = expected.borrowed.spot();
    spot.filter(|it| it.tenant == entitled.tenant)
}
