//! Devices that tenants have beyond their guarantee, and give back when another tenant needs them within its
//! own: leases are suspended for requests that are within a guarantee.
//!
//! The leases of a tenant count towards its guarantee in the order of their grants; those beyond it are
//! *borrowed*. A borrowed lease is suspended if it could go on later, so not if it is not durable or has no
//! snapshots, and not before it has run for [`Options::min_run_time`](crate::Options::min_run_time). Either as
//! many leases are suspended as the request needs, or none; the fewest, and among these the ones with the
//! fewest devices, of the tenants that have most by weight, the latest first.
//!
//! A reclaimed lease goes on by itself: before requests beyond guarantees, and after those within.
//!
//! No two leases take each other's place in turn: what a reclaimed lease gives up goes to a request within a
//! guarantee, whose lease is not borrowed while its tenant's guarantee stays. So each reclaim lowers the number
//! of devices that tenants are promised and wait for, and nothing but new demand or a changed policy raises it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::LeaseId;

use super::Engine;
use super::handover::HeldCounts;
use crate::device::Demand;
use crate::event::{DeviceRef, Suspender};
use crate::lease::{Lease, Standing};
use crate::queue::QueuedRequest;
use crate::tenants::{Amounts, TenantName, TenantPolicy};
use crate::time::Timestamp;

/// A lease that could be suspended for a request.
struct Victim {
    lease: LeaseId,
    /// Its devices that the request could get.
    devices: BTreeSet<DeviceRef>,
    /// The share of its tenant, by weight, as bits: those of a share that is not negative have its order.
    share: u64,
    granted_at: Timestamp,
}

impl Engine {
    /// Suspends borrowed leases for requests that are within their tenants' guarantees and wait for devices.
    /// Returns whether it has suspended some.
    pub(super) fn reclaim(&mut self) -> bool {
        self.reclaim_at = None;
        let mut has_suspended = false;
        let (mut coming, mut used) = (self.pool.coming(), self.used_by_tenants());
        for (lease, tenant, demand) in self.guaranteed_requests() {
            let may_have = self.may_have(&used, &tenant, &demand);
            let held = self.pool.held_back_for(lease);
            let fits = |device_ref: &&DeviceRef| may_have.contains(device_ref);
            let mut for_request: Vec<_> = coming.keys().filter(fits).copied().collect();
            let wanted = (demand.devices as usize).saturating_sub(held.len());
            for_request.truncate(wanted);
            let missing = wanted - for_request.len();
            let Some(victims) = self.victims(&tenant, &may_have, missing) else {
                continue;
            };
            coming.retain(|device_ref, _| !for_request.contains(device_ref));
            let mut freed = Vec::new();
            for victim in victims {
                freed.extend(victim.devices);
                self.suspend_borrowed(victim.lease);
                has_suspended = true;
            }
            // The next request may use what this one does not need.
            let left_over = freed.split_off(missing.min(freed.len()));
            let provided = [held, for_request, freed].concat();
            self.count(&mut used, tenant, &provided);
            let left_over = left_over.into_iter();
            coming.extend(left_over.map(|device_ref| (device_ref, false)));
        }
        has_suspended
    }

    /// Has reclaimed leases go on for which there are devices that no request within a guarantee needs.
    pub(super) fn go_on_with_reclaimed(&mut self, mut reclaimed: Vec<LeaseId>, held: &HeldCounts) {
        loop {
            self.arrange_queue(&self.used_by_tenants());
            self.drop_holds(|_| true);
            reclaimed
                .iter()
                .for_each(|id| self.pool.drop_held_back(*id));
            self.hold_back_for_guaranteed();
            let before = reclaimed.len();
            reclaimed.retain(|id| !self.go_on_or_wait(*id, held));
            if reclaimed.len() == before {
                return;
            }
            // Its tenant has more now, so other requests may be within the guarantee.
        }
    }

    /// Drops what is held back for requests that are not within guarantees any more. Returns whether
    /// something was.
    pub(super) fn drop_stale_holds(&mut self) -> bool {
        let before = self.pool.held_back_count();
        self.drop_holds(|queued| !queued.is_guaranteed);
        self.pool.held_back_count() < before
    }

    fn drop_holds(&mut self, is_dropped: impl Fn(&QueuedRequest) -> bool) {
        for queued in self.queue.iter().filter(|queued| is_dropped(queued)) {
            self.pool.drop_held_back(queued.lease);
        }
    }

    /// Holds back the free devices of requests within guarantees for which there will be enough once others
    /// are released, so that nothing else takes them meanwhile.
    fn hold_back_for_guaranteed(&mut self) {
        let (mut coming, mut used) = (self.pool.coming(), self.used_by_tenants());
        for (lease, tenant, demand) in self.guaranteed_requests() {
            let may_have = self.may_have(&used, &tenant, &demand);
            let fits = |(device_ref, _): &(&DeviceRef, &bool)| may_have.contains(device_ref);
            let for_request = coming.iter().filter(fits).map(|(at, free)| (*at, *free));
            let (free, ending): (Vec<_>, Vec<_>) = for_request.partition(|(_, is_free)| *is_free);
            let wanted = demand.devices as usize;
            if free.len() + ending.len() < wanted {
                continue;
            }
            let free = free.into_iter().map(|(device_ref, _)| device_ref);
            let free: Vec<_> = free.collect();
            let ending = ending.into_iter().map(|(device_ref, _)| device_ref);
            let missing = wanted.saturating_sub(free.len());
            let held = self.pool.choose(&free, wanted).unwrap_or(free);
            let taken: Vec<_> = held.iter().copied().chain(ending.take(missing)).collect();
            for device_ref in &taken {
                coming.remove(device_ref);
            }
            self.count(&mut used, tenant, &taken);
            self.pool.hold_back(lease, held);
        }
    }

    /// Returns the requests that wait and are within their tenants' guarantees, in order.
    fn guaranteed_requests(&self) -> Vec<(LeaseId, TenantName, Demand)> {
        let waiting = self.queue.iter().filter(|waiting| waiting.is_guaranteed);
        waiting
            .map(|it| (it.lease, it.tenant.clone(), it.demand.clone()))
            .collect()
    }

    /// Returns the devices that a request of a tenant could get if they were free.
    fn may_have(
        &self,
        used: &BTreeMap<TenantName, Amounts>,
        tenant: &TenantName,
        demand: &Demand,
    ) -> BTreeSet<DeviceRef> {
        let none = Amounts::default();
        let used = used.get(tenant).unwrap_or(&none);
        let limit = self.policy.get(tenant).map(|policy| &policy.limit);
        self.pool.usable(|device| {
            demand.accepts(device)
                && limit.is_none_or(|limit| limit.allows(used, device, demand.devices))
        })
    }

    /// Counts devices as those of a tenant.
    fn count(
        &self,
        used: &mut BTreeMap<TenantName, Amounts>,
        tenant: TenantName,
        devices: &[DeviceRef],
    ) {
        let devices = devices.iter().filter_map(|it| self.pool.device(*it));
        let devices = Amounts::of(devices);
        used.entry(tenant).or_default().add(&devices);
    }

    /// Returns the leases to suspend for a tenant that is missing so many of these devices, or `None` if that cannot be done
    /// now. Sets the time at which a lease may be suspended that has not run for long enough.
    fn victims(
        &mut self,
        tenant: &TenantName,
        may_have: &BTreeSet<DeviceRef>,
        missing: usize,
    ) -> Option<Vec<Victim>> {
        if missing == 0 {
            return Some(Vec::new());
        }
        let mut candidates = Vec::new();
        let mut young = Vec::new();
        for id in self.borrowed_leases(tenant) {
            let Some(victim) = self.victim(id, may_have) else {
                continue;
            };
            let ripe_at = self.ripe_at(id);
            if ripe_at > self.now {
                young.push((ripe_at, victim.devices.len()));
            } else {
                candidates.push(victim);
            }
        }
        let ripe: usize = candidates.iter().map(|victim| victim.devices.len()).sum();
        if ripe >= missing {
            return Some(fewest(candidates, missing));
        }
        young.sort_unstable();
        let mut all = ripe;
        for (ripe_at, devices) in young {
            all += devices;
            if all >= missing {
                let earliest = self.reclaim_at.map_or(ripe_at, |at| at.min(ripe_at));
                self.reclaim_at = Some(earliest);
                break;
            }
        }
        None
    }

    /// Returns the time from which a lease may be suspended for another tenant.
    fn ripe_at(&self, id: LeaseId) -> Timestamp {
        let lease = self.leases.get(id);
        let since = lease.map_or(self.now, |lease| lease.running_since);
        since + self.options.min_run_time
    }

    /// Returns the leases of other tenants that are beyond the guarantee of their tenant.
    fn borrowed_leases(&self, for_tenant: &TenantName) -> Vec<LeaseId> {
        let mut by_tenant = BTreeMap::<&TenantName, Vec<(Timestamp, LeaseId, &Lease)>>::new();
        for (id, lease) in self.leases.iter() {
            let other = lease.tenant.as_ref().filter(|it| *it != for_tenant);
            if let Some(tenant) = other.filter(|_| lease.counts()) {
                let of_tenant = by_tenant.entry(tenant).or_default();
                of_tenant.push((lease.granted_at, id, lease));
            }
        }
        let default = TenantPolicy::default();
        let mut borrowed = Vec::new();
        for (tenant, mut leases) in by_tenant {
            leases.sort_unstable_by_key(|(granted_at, id, _)| (*granted_at, *id));
            let policy = self.policy.get(tenant).unwrap_or(&default);
            let mut used = Amounts::default();
            for (_, id, lease) in leases {
                match policy.guarantees(&used, &lease.charge) {
                    true => used.add(&lease.charge),
                    false => borrowed.push(id),
                }
            }
        }
        borrowed
    }

    /// Returns a borrowed lease as one that could be suspended, if it could, and has such devices.
    fn victim(&self, id: LeaseId, may_have: &BTreeSet<DeviceRef>) -> Option<Victim> {
        let lease = self.leases.get(id)?;
        if lease.standing != Standing::Running || lease.rejoin_by.is_some() {
            return None;
        }
        let devices = lease.lease_devices.keys().copied();
        let devices: BTreeSet<_> = devices.filter(|it| may_have.contains(it)).collect();
        let can_suspend = || self.check_suspend(id, Suspender::Administrator).is_ok();
        if devices.is_empty() || !can_suspend() {
            return None;
        }
        let tenant = lease.tenant.as_ref()?;
        let used = self.used_by_tenants().remove(tenant).unwrap_or_default();
        let weight = self.policy.get(tenant).map_or(1, |policy| policy.weight);
        Some(Victim {
            lease: id,
            devices,
            share: used.weighted_share(&self.pool.amounts(), weight).to_bits(),
            granted_at: lease.granted_at,
        })
    }

    /// Suspends a borrowed lease, which goes on once there are devices for it again.
    fn suspend_borrowed(&mut self, id: LeaseId) {
        self.suspend(id, Suspender::Administrator);
        self.resume_suspended(id, Suspender::Administrator);
        if let Some(lease) = self.leases.get_mut(id) {
            lease.is_reclaimed = true;
        }
        self.report_standing(id);
    }
}

/// Returns the fewest of these leases that have `missing` devices together, which all have. Of several such
/// sets, one without devices that are not needed is preferred, then the leases of tenants with larger shares,
/// then later ones.
fn fewest(mut candidates: Vec<Victim>, missing: usize) -> Vec<Victim> {
    candidates.sort_by_key(|victim| {
        let by_merit = (Reverse(victim.share), Reverse(victim.granted_at));
        (victim.devices.len(), by_merit, victim.lease)
    });
    let mut chosen = Vec::new();
    let mut left = missing;
    while left > 0 {
        // The smallest that is enough alone, or else the largest.
        let enough = candidates.iter().position(|it| it.devices.len() >= left);
        let at = enough.unwrap_or_else(|| {
            let most = candidates.last().map(|victim| victim.devices.len());
            let first = candidates.iter();
            let mut first = first.map(|victim| Some(victim.devices.len()));
            first.position(|count| count == most).unwrap_or_default()
        });
        if at >= candidates.len() {
            break;
        }
        let victim = candidates.remove(at);
        left = left.saturating_sub(victim.devices.len());
        chosen.push(victim);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{at, device_ref};

    /// Asserts which leases are suspended. `victims` have the number of devices, the share, and the time of
    /// the grant of each; its number is the lease's.
    #[track_caller]
    fn check(victims: &[(u32, f64, u64)], missing: usize, expected: &[u64]) {
        let victims = (0..).zip(victims).map(|(id, (count, share, granted_at))| {
            let devices = (0..*count).map(|index| device_ref(id, index));
            Victim {
                lease: LeaseId(id),
                devices: devices.collect(),
                share: share.to_bits(),
                granted_at: at(*granted_at),
            }
        });
        let chosen = fewest(victims.collect(), missing);
        let chosen: Vec<_> = chosen.iter().map(|victim| victim.lease.0).collect();
        assert_eq!(chosen, expected);
    }

    #[test]
    fn the_fewest_leases_are_suspended() {
        check(&[(1, 0.5, 0), (2, 0.5, 0), (4, 0.5, 0)], 4, &[2]);
        check(&[(1, 0.5, 0), (2, 0.5, 0), (4, 0.5, 0)], 5, &[2, 0]);
        check(&[(1, 0.5, 0), (2, 0.5, 0), (4, 0.5, 0)], 7, &[2, 1, 0]);
        check(&[(3, 0.5, 0), (3, 0.5, 0), (2, 0.5, 0)], 5, &[0, 2]);
    }

    #[test]
    fn a_lease_with_devices_that_are_not_needed_is_spared() {
        check(&[(8, 0.9, 9), (1, 0.1, 0), (2, 0.5, 5)], 1, &[1]);
        check(&[(8, 0.9, 9), (1, 0.1, 0), (3, 0.5, 5)], 2, &[2]);
    }

    #[test]
    fn the_least_entitled_and_the_latest_go_first() {
        check(&[(1, 0.2, 9), (1, 0.5, 0), (1, 0.4, 9)], 1, &[1]);
        check(&[(1, 0.5, 3), (1, 0.5, 7), (1, 0.5, 5)], 1, &[1]);
        check(&[(1, 0.5, 7), (1, 0.5, 7)], 1, &[0]);
        check(&[(2, 0.2, 9), (2, 0.5, 0), (2, 0.4, 9)], 4, &[1, 2]);
    }
}
