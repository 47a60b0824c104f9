//! Which leases are beyond the guarantee of their tenant, and how these could give their devices to others.
//!
//! To find this out for all leases with each event would take too long. So the engine keeps the [`BorrowedLeases`], and
//! looks again only at leases that have changed, or a worker of which has, or whose tenant has others within its
//! guarantee than before.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use tensord_proto::ids::LeaseId;

use super::Engine;
use super::borrowed_leases::{Borrowed, BorrowedLeases};
use crate::device::Requirement;
use crate::event::Suspender;
use crate::lease::{Lease, Standing};
use crate::reason::CannotMove;
use crate::tenants::{Amounts, NOTHING, TenantName};
use crate::time::Timestamp;

/// Time after [`Options::min_run_time`](crate::Options::min_run_time) from which a durable lease that may end does so
/// if its devices are needed and it cannot be suspended: it should have snapshots by then.
const SNAPSHOTS_WITHIN: Duration = Duration::from_secs(60);

/// How a lease could give its devices to others.
struct WayOut {
    /// The time from which it may have to.
    from: Timestamp,
    /// Whether it ends then; else it is suspended.
    ends: bool,
}

/// What is known of borrowed leases from earlier events.
#[derive(Debug, Default)]
pub(super) struct KnownBorrowed {
    leases: BorrowedLeases,
    /// The leases of each tenant that are within its guarantee, if it has some.
    within: BTreeMap<TenantName, BTreeSet<LeaseId>>,
    /// Whether all leases have been looked at since the policy has changed, and `leases` is not taken.
    is_complete: bool,
}

impl KnownBorrowed {
    /// Has all leases be looked at again, as guarantees have changed.
    pub(super) fn forget(&mut self) {
        self.is_complete = false;
    }

    fn is_within(&self, tenant: &TenantName, id: LeaseId) -> bool {
        let within = self.within.get(tenant);
        within.is_some_and(|leases| leases.contains(&id))
    }

    /// Sets the leases of a tenant that are within its guarantee. Returns those that were not before, and those that
    /// are not any more.
    fn set_within(&mut self, tenant: TenantName, within: BTreeSet<LeaseId>) -> BTreeSet<LeaseId> {
        let before = match within.is_empty() {
            true => self.within.remove(&tenant),
            false => self.within.insert(tenant, within.clone()),
        };
        before
            .unwrap_or_default()
            .symmetric_difference(&within)
            .copied()
            .collect()
    }
}

impl Engine {
    /// Takes the borrowed leases that could be suspended for others, or end, as of now.
    /// [`give_back_borrowed`](Self::give_back_borrowed) must follow.
    pub(super) fn take_borrowed(&mut self) -> BorrowedLeases {
        let unchecked = self.leases.take_unchecked();
        let was_complete = mem::take(&mut self.borrowed.is_complete);
        let mut workers = self.leases.take_changed_room();
        workers.extend(self.pool.index().changed());
        let mut tenants = self.leases.take_changed_guarantees();
        let mut stale = unchecked.filter(|_| was_complete).unwrap_or_else(|| {
            tenants.extend(self.policy.keys().cloned());
            tenants.extend(self.borrowed.within.keys().cloned());
            let known = self.borrowed.leases.ids();
            known.chain(self.leases.index().interruptible()).collect()
        });
        let at_workers = workers.into_iter();
        stale.extend(at_workers.flat_map(|it| self.leases.index().of_worker(it)));
        stale.extend(self.borrowed.leases.forget_taken());
        for tenant in tenants {
            let within = self.leases_within_guarantee(&tenant);
            stale.extend(self.borrowed.set_within(tenant, within));
        }
        for id in stale {
            match self.as_borrowed(id) {
                Some(lease) => self.borrowed.leases.insert(&self.pool, Arc::new(lease)),
                None => drop(self.borrowed.leases.remove(&self.pool, id)),
            }
        }
        mem::take(&mut self.borrowed.leases)
    }

    /// Puts the borrowed leases back, of which some were taken.
    pub(super) fn give_back_borrowed(&mut self, leases: BorrowedLeases) {
        self.borrowed.leases = leases;
        self.borrowed.is_complete = true;
    }

    /// Returns the spot leases that could be suspended for a lease that waits, or would end.
    pub(super) fn spot_leases(&self) -> BorrowedLeases {
        let spot = self.leases.index().spot();
        let spot = spot.filter_map(|id| Some(Arc::new(self.as_borrowed(id)?)));
        BorrowedLeases::of(&self.pool, spot)
    }

    /// Returns a lease if it is borrowed, and could give its devices to others.
    fn as_borrowed(&self, id: LeaseId) -> Option<Borrowed> {
        let lease = self.leases.get(id).filter(|it| it.counts())?;
        let tenant = lease.tenant.as_ref()?;
        if self.borrowed.is_within(tenant, id) {
            return None;
        }
        let way_out = self.way_out_of(id, lease)?;
        Some(Borrowed {
            lease: id,
            tenant: tenant.clone(),
            devices: lease.lease_devices.keys().copied().collect(),
            charge: lease.charge.clone(),
            device_share: lease.share(),
            passed: lease.passed.clone(),
            is_spot: lease.is_spot,
            suspendable_at: way_out.from,
            ends: way_out.ends,
            granted_at: lease.granted_at,
        })
    }

    /// Returns the leases of a tenant that fit within its guarantee, in the order of their grants.
    fn leases_within_guarantee(&self, tenant: &TenantName) -> BTreeSet<LeaseId> {
        let policy = self.policy_of(tenant);
        let mut used = Amounts::default();
        let mut within = BTreeSet::new();
        for id in self.leases.index().of_tenant(tenant) {
            if !policy.guarantees_more(&used, &NOTHING) {
                break;
            }
            let lease = self.leases.get(id);
            let lease = lease.filter(|it| policy.guarantees(&used, &NOTHING, &it.charge));
            if let Some(lease) = lease {
                used.add(&lease.charge);
                within.insert(id);
            }
        }
        within
    }

    /// Returns how a lease that runs could give its devices to others, if it could. One that has snapshots does not
    /// end because they cannot be reached for now, as when a worker is away, or no worker that stays has room for them.
    fn way_out_of(&self, id: LeaseId, lease: &Lease) -> Option<WayOut> {
        let is_attached = self.attached_owner(id).is_some();
        let from = lease.running_since + self.options.min_run_time;
        let may_end = is_attached && (lease.is_spot || lease.may_end);
        if !lease.is_interruptible() {
            return None;
        }
        let end_from = match self.check_suspend(id, Suspender::Administrator) {
            Ok(()) => return Some(WayOut { from, ends: false }),
            Err(CannotMove::NotDurable) => from,
            Err(CannotMove::NotReplaceable | CannotMove::NotRestorable) => from + SNAPSHOTS_WITHIN,
            Err(_) => return None,
        };
        may_end.then_some(WayOut {
            from: end_from,
            ends: true,
        })
    }

    /// Returns what devices must be like for leases to go on that wait and come before all requests.
    pub(crate) fn needed_by_leases(&self) -> Vec<Requirement> {
        let index = self.leases.index();
        // Those that were suspended for others do not come before requests unless there is room in a guarantee.
        let within = index.patient().of_tenants(|tenant| {
            let (used, spot) = (self.used_by(tenant), self.spot_by(tenant));
            self.policy_of(tenant).guarantees_more(used, spot)
        });
        let waiting = index.restless().chain(within);
        let waiting = waiting.filter(|id| !self.comes_after_guaranteed(*id));
        waiting.flat_map(|id| self.needed_by(id)).collect()
    }

    /// Returns what devices must be like for a lease to go on, if it waits for some.
    pub(super) fn needed_by(&self, id: LeaseId) -> Vec<Requirement> {
        let lease = self.leases.get(id);
        let Some(lease) = lease.filter(|_| self.attached_owner(id).is_some()) else {
            return Vec::new();
        };
        let parts = match lease.standing {
            Standing::Resuming { .. } => &lease.parts[..],
            Standing::Running | Standing::Lost(_) | Standing::Suspended { .. } => &[],
        };
        let parts = parts.iter().map(|part| part.requirement.clone());
        let lost = lease.lost().and_then(|_| lease.requirement_elsewhere());
        parts.chain(lost).collect()
    }
}

#[cfg(test)]
impl Engine {
    /// Asserts that what is known of borrowed leases is right, of those that have not changed since it was found out.
    pub(crate) fn check_borrowed(&self) {
        let Some(mut stale) = self.leases.unchecked().cloned() else {
            return;
        };
        let tenants = self.leases.index().changed_guarantees();
        let has_changed = !self.leases.index().changed_room().is_empty() || !tenants.is_empty();
        if has_changed || !self.borrowed.is_complete {
            return;
        }
        stale.extend(self.borrowed.leases.taken());
        for tenant in self.policy.keys() {
            let known = self.borrowed.within.get(tenant).cloned();
            assert_eq!(
                known.unwrap_or_default(),
                self.leases_within_guarantee(tenant)
            );
        }
        for (id, _) in self.leases.iter().filter(|(id, _)| !stale.contains(id)) {
            let known = self.borrowed.leases.get(id).map(|it| &**it);
            assert_eq!(known, self.as_borrowed(id).as_ref(), "{id}");
        }
        self.borrowed.leases.check(&self.pool, &stale);
    }
}
