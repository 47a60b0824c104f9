//! Which leases are beyond the guarantee of their tenant, and how these could give their devices to others.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tensord_proto::ids::LeaseId;

use super::Engine;
use super::holds::{Entitled, Entitlement};
use super::victims::Borrowed;
use crate::device::{DeviceSpec, Requirement};
use crate::event::{DeviceRef, Suspender};
use crate::lease::{Lease, Standing};
use crate::reason::CannotMove;
use crate::tenants::{Amounts, TenantName};
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

impl Engine {
    /// Returns the borrowed leases that could be suspended for one of these requests, apart from devices that a
    /// lease would get which waits and comes before all requests.
    pub(super) fn borrowed_leases(&self, entitled: &[Entitled]) -> Vec<Borrowed> {
        let mut by_tenant = BTreeMap::<&TenantName, Vec<(LeaseId, &Lease)>>::new();
        for (id, lease) in self.could_make_room_for(entitled) {
            if let Some(tenant) = lease.tenant.as_ref().filter(|_| lease.counts()) {
                by_tenant.entry(tenant).or_default().push((id, lease));
            }
        }
        let (pool, needed) = (self.pool.amounts(), self.needed_by_leases());
        let mut borrowed = Vec::new();
        for (tenant, leases) in by_tenant {
            let within = self.leases_within_guarantee(tenant);
            let (used, spot) = (self.used_by(tenant), self.spot_by(tenant));
            let share = self.shares(&pool).key(tenant, used, spot);
            let beyond = leases.into_iter().filter(|(id, _)| !within.contains(id));
            let suspendable = beyond.filter_map(|(id, lease)| {
                let devices = self.without_needed(lease, &needed);
                self.as_borrowed(id, lease, tenant, share, devices)
            });
            borrowed.extend(suspendable);
        }
        borrowed
    }

    /// Returns the spot leases that could be suspended for a lease that waits, or would end.
    pub(super) fn spot_leases(&self) -> Vec<Borrowed> {
        let pool = self.pool.amounts();
        let spot = self.leases.index().spot().filter_map(|id| {
            let lease = self.leases.get(id).filter(|it| it.counts())?;
            let tenant = lease.tenant.as_ref()?;
            let (used, spot) = (self.used_by(tenant), self.spot_by(tenant));
            let share = self.shares(&pool).key(tenant, used, spot);
            let devices = lease.lease_devices.keys().copied().collect();
            self.as_borrowed(id, lease, tenant, share, devices)
        });
        spot.collect()
    }

    /// Returns a borrowed lease with those of its devices that others could get, if it could give them away.
    fn as_borrowed(
        &self,
        id: LeaseId,
        lease: &Lease,
        tenant: &TenantName,
        tenant_share: u64,
        devices: BTreeSet<DeviceRef>,
    ) -> Option<Borrowed> {
        let way_out = self.way_out_of(id, lease)?;
        Some(Borrowed {
            lease: id,
            tenant: tenant.clone(),
            devices,
            charge: lease.charge.clone(),
            device_share: lease.share(),
            passed: lease.passed.clone(),
            is_spot: lease.is_spot,
            suspendable_at: way_out.from,
            ends: way_out.ends,
            tenant_share,
            granted_at: lease.granted_at,
        })
    }

    /// Returns the leases that could make room for one of these requests if they are borrowed: for those with
    /// guarantees all, and for others those that have passed one of them, and spot leases.
    fn could_make_room_for(&self, entitled: &[Entitled]) -> Vec<(LeaseId, &Lease)> {
        let index = self.leases.index();
        let candidates: BTreeSet<_> =
            match entitled.iter().any(|it| it.by == Entitlement::Guarantee) {
                true => index.interruptible().collect(),
                false => {
                    let passing = entitled.iter().flat_map(|it| index.passing(it.lease));
                    passing.chain(index.spot()).collect()
                }
            };
        let known = candidates
            .into_iter()
            .filter_map(|id| Some((id, self.leases.get(id)?)));
        known.collect()
    }

    /// Returns the leases of a tenant that fit within its guarantee, in the order of their grants.
    fn leases_within_guarantee(&self, tenant: &TenantName) -> BTreeSet<LeaseId> {
        let policy = self.policy_of(tenant);
        if policy.guaranteed.is_empty() {
            return BTreeSet::new();
        }
        let own = self.leases.index().of_tenant(tenant).filter_map(|id| {
            let lease = self.leases.get(id)?;
            Some((lease.granted_at, id, lease))
        });
        let mut own: Vec<_> = own.collect();
        own.sort_unstable_by_key(|(granted_at, id, _)| (*granted_at, *id));
        let mut used = Amounts::default();
        let within = own.into_iter().filter(|(.., lease)| {
            let is_within = policy.guarantees(&used, &lease.charge);
            if is_within {
                used.add(&lease.charge);
            }
            is_within
        });
        within.map(|(_, id, _)| id).collect()
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
        self.needed_by(|id, _| !self.comes_after_guaranteed(id))
    }

    /// Returns what devices must be like for leases to go on that wait, of those that `counts` accepts.
    pub(super) fn needed_by(&self, counts: impl Fn(LeaseId, &Lease) -> bool) -> Vec<Requirement> {
        let waiting = self.leases_without_devices().into_iter();
        let waiting = waiting.filter(|id| self.attached_owner(*id).is_some());
        let waiting = waiting.filter_map(|id| Some((id, self.leases.get(id)?)));
        let waiting = waiting.filter(|(id, lease)| counts(*id, lease));
        let waiting = waiting.map(|(_, lease)| lease);
        let needed = waiting.flat_map(|lease| {
            let parts = match lease.standing {
                Standing::Resuming { .. } => &lease.parts[..],
                Standing::Running | Standing::Lost(_) | Standing::Suspended { .. } => &[],
            };
            let parts = parts.iter().map(|part| part.requirement.clone());
            let lost = lease.lost().and_then(|_| lease.requirement_elsewhere());
            parts.chain(lost).collect::<Vec<_>>()
        });
        needed.collect()
    }

    fn without_needed(&self, lease: &Lease, needed: &[Requirement]) -> BTreeSet<DeviceRef> {
        let is_needed = |device: &DeviceSpec| needed.iter().any(|it| it.accepts(device));
        let devices = lease.lease_devices.keys().copied();
        devices
            .filter(|it| self.pool.device(*it).is_some_and(|it| !is_needed(it)))
            .collect()
    }
}
