//! Requests that wait because of their tenant's limit alone: spot leases of the tenant are suspended for them.
//!
//! Spot leases count in full towards a limit, so a tenant that uses what is left of its limit for them would keep its
//! own other requests waiting. As few of them are suspended as the limit demands, and only if there are, or will be,
//! devices for the request then.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::Engine;
use super::coming::few;
use super::holds::{Entitled, Expected};
use super::reclaim::Plan;
use super::victims::{Borrowed, Victim};
use crate::device::DeviceSpec;
use crate::tenants::{Amounts, NOTHING};

impl Engine {
    /// Returns what the tenant of a request has: if that is too much for the request, without those of its own spot
    /// leases that `may_go`, as far as these are expected to make room.
    pub(super) fn used_beside_own_spot(
        &self,
        entitled: &Entitled,
        expected: &Expected,
        may_go: impl Fn(&Borrowed) -> bool,
    ) -> Amounts {
        let used = expected.used.get(&entitled.tenant).unwrap_or(&NOTHING);
        let mut used = used.clone();
        if self.is_within_limit_beside(entitled, &used) {
            return used;
        }
        let own = own_spot(entitled, expected).filter(|it| may_go(it));
        own.for_each(|lease| used.subtract(&lease.charge));
        used
    }

    /// Returns whether the limit of a request's tenant, which has `used`, leaves enough devices for the request.
    fn is_within_limit_beside(&self, entitled: &Entitled, used: &Amounts) -> bool {
        let (demand, limit) = (&entitled.demand, &self.policy_of(&entitled.tenant).limit);
        let may_have = |device: &DeviceSpec| limit.allows(used, device, demand);
        self.pool.offers(demand, may_have) >= demand.devices as usize
    }

    /// Takes the leases out that are no spot leases of a request's tenant, if its limit demands that some of these are
    /// suspended.
    pub(super) fn set_others_aside(
        &self,
        entitled: &Entitled,
        expected: &mut Expected,
    ) -> Vec<Borrowed> {
        let used = expected.used.get(&entitled.tenant).unwrap_or(&NOTHING);
        if self.is_within_limit_beside(entitled, used) {
            return Vec::new();
        }
        let is_other = |it: &mut Borrowed| !(it.is_spot && it.tenant == entitled.tenant);
        expected.borrowed.extract_if(.., is_other).collect()
    }

    /// Suspends as few spot leases of a request's tenant as its limit demands for the request, which is going to get
    /// devices otherwise.
    pub(super) fn make_room_within_limit(&mut self, entitled: &Entitled, plan: &mut Plan) {
        let used = plan.expected.used.get(&entitled.tenant);
        let used = used.unwrap_or(&NOTHING);
        if self.is_within_limit_beside(entitled, used) {
            return;
        }
        let own = own_spot(entitled, &plan.expected);
        let mut own: Vec<_> = own.filter(|it| it.suspendable_at <= self.now).collect();
        own.sort_by_key(|it| (it.charge.all_permille, Reverse(it.granted_at), it.lease));
        let chosen = few(own, |leases| {
            let mut used = used.clone();
            leases.iter().for_each(|it| used.subtract(&it.charge));
            self.is_within_limit_beside(entitled, &used)
        });
        let chosen = chosen.into_iter().flatten();
        let victims: Vec<_> = chosen.map(|it| Victim::of(&[it], 0)).collect();
        for victim in victims {
            self.suspend_victim(&victim, &entitled.demand, plan);
        }
    }

    /// Sets the time at which spot leases of a request's tenant can be suspended, if its limit demands that and these
    /// have yet to run for long enough.
    pub(super) fn await_own_spot(&mut self, entitled: &Entitled, expected: &Expected) {
        let used = expected.used.get(&entitled.tenant).unwrap_or(&NOTHING);
        if self.is_within_limit_beside(entitled, used) {
            return;
        }
        let later = own_spot(entitled, expected).map(|it| it.suspendable_at);
        let later: BTreeSet<_> = later.filter(|at| *at > self.now).collect();
        let next = later.first().copied();
        self.reclaim_at = self.reclaim_at.into_iter().chain(next).min();
    }
}

/// Returns the spot leases of a request's tenant that are expected to make room.
fn own_spot<'a>(
    entitled: &'a Entitled,
    expected: &'a Expected,
) -> impl Iterator<Item = &'a Borrowed> {
    let spot = expected.borrowed.iter().filter(|it| it.is_spot);
    spot.filter(|it| it.tenant == entitled.tenant)
}
