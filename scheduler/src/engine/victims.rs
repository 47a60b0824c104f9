//! Borrowed leases, and the choice of those that make room for a request (`reclaim.rs`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::LeaseId;

use super::holds::{Entitled, Entitlement, MayHave};
use crate::device::Share;
use crate::event::DeviceRef;
use crate::pool::Pool;
use crate::tenants::{Amounts, TenantName};
use crate::time::Timestamp;

/// A borrowed lease that could be suspended.
pub(super) struct Borrowed {
    pub(super) lease: LeaseId,
    pub(super) tenant: TenantName,
    pub(super) devices: BTreeSet<DeviceRef>,
    /// What it counts as in what its tenant has.
    pub(super) charge: Amounts,
    /// The part that it has of its device; `None` if it has whole devices.
    pub(super) device_share: Option<Share>,
    /// The requests whose reservations it has passed.
    pub(super) passed: BTreeSet<LeaseId>,
    pub(super) is_spot: bool,
    /// Whether it ends, as it cannot be suspended.
    pub(super) ends: bool,
    /// The time from which it may be suspended.
    pub(super) suspendable_at: Timestamp,
    /// A number that has the order of the shares of tenants.
    pub(super) tenant_share: u64,
    pub(super) granted_at: Timestamp,
}

impl Borrowed {
    /// Returns the number of its devices that an entitled request could get, which `may_have` these.
    pub(super) fn useful_for(&self, pool: &Pool, entitled: &Entitled, may_have: &MayHave) -> usize {
        let has_passed = self.passed.contains(&entitled.lease);
        let is_for = match entitled.by {
            Entitlement::Guarantee => self.tenant != entitled.tenant || has_passed,
            Entitlement::Reservation => has_passed,
            Entitlement::Spot => false,
        };
        match is_for || self.is_spot {
            true => {
                let devices = self.devices.iter();
                devices.filter(|it| may_have.contains(pool, **it)).count()
            }
            false => 0,
        }
    }
}

/// A borrowed lease that has devices which a request could get, or leases that share such a device.
pub(super) struct Victim {
    pub(super) leases: Vec<LeaseId>,
    /// The device, if leases share it.
    pub(super) shared: Option<DeviceRef>,
    /// The shares that they have of it.
    pub(super) shares: Vec<Share>,
    /// All its devices.
    pub(super) devices: BTreeSet<DeviceRef>,
    /// The number of those that the request could get.
    pub(super) useful: usize,
    pub(super) is_spot: bool,
    /// Whether one of them ends that is no spot lease.
    pub(super) ends: bool,
    pub(super) tenant_share: u64,
    pub(super) granted_at: Timestamp,
}

impl Victim {
    /// Returns one lease, or several that share a device, with so many devices which a request could get.
    pub(super) fn of(leases: &[&Borrowed], useful: usize) -> Self {
        let shares = leases.iter().map(|it| it.tenant_share);
        let granted_at = leases.iter().map(|it| it.granted_at);
        let devices = leases.iter().flat_map(|it| &it.devices).copied();
        let devices: BTreeSet<_> = devices.collect();
        let device_shares = leases.iter().filter_map(|it| it.device_share);
        let device_shares: Vec<_> = device_shares.collect();
        let shared = devices.first().copied();
        Self {
            leases: leases.iter().map(|it| it.lease).collect(),
            shared: shared.filter(|_| !device_shares.is_empty()),
            shares: device_shares,
            devices,
            useful,
            is_spot: leases.iter().all(|it| it.is_spot),
            ends: leases.iter().any(|it| it.ends && !it.is_spot),
            // They deserve to be spared as much as the one that deserves it most.
            tenant_share: shares.min().unwrap_or_default(),
            granted_at: granted_at.min().unwrap_or_default(),
        }
    }
}

/// Returns the number of useful devices that these have together.
pub(super) fn useful(victims: &[(Timestamp, Victim)]) -> usize {
    victims.iter().map(|(_, victim)| victim.useful).sum()
}

/// Leaves out the leases that would end if the others have enough of the `missing` devices, though later.
pub(super) fn without_ending(
    victims: Vec<(Timestamp, Victim)>,
    missing: usize,
) -> Vec<(Timestamp, Victim)> {
    let (ending, others): (Vec<_>, Vec<_>) = victims.into_iter().partition(|(_, it)| it.ends);
    match useful(&others) >= missing {
        true => others,
        false => others.into_iter().chain(ending).collect(),
    }
}

/// Takes what a lease counts as away from what its tenant has.
pub(super) fn take_away(used: &mut BTreeMap<TenantName, Amounts>, lease: &Borrowed) {
    if let Some(used) = used.get_mut(&lease.tenant) {
        used.subtract(&lease.charge);
    }
}

/// Returns the fewest of these leases that have `missing` useful devices together, which all have. Several that share a
/// device are more than one lease with devices, of which some may not be needed.
pub(super) fn fewest(candidates: Vec<Victim>, missing: usize) -> Vec<Victim> {
    let is_single = |victim: &Victim| victim.leases.len() == 1;
    let (mut single, sharing): (Vec<_>, Vec<_>) = candidates.into_iter().partition(is_single);
    let of_single = single.iter().map(|victim| victim.useful).sum();
    match missing.checked_sub(of_single) {
        None | Some(0) => fewest_victims(single, missing),
        Some(missing) => {
            single.extend(fewest_victims(sharing, missing));
            single
        }
    }
}

/// Returns the fewest of these victims that have `missing` useful devices together.
fn fewest_victims(mut candidates: Vec<Victim>, missing: usize) -> Vec<Victim> {
    candidates.sort_by_key(|victim| {
        let by_share = (Reverse(victim.tenant_share), Reverse(victim.granted_at));
        let size = (victim.leases.len(), victim.devices.len());
        // Of equally useful ones, spot leases go first.
        let kind = (!victim.is_spot, size, victim.ends);
        (victim.useful, kind, by_share, victim.leases.clone())
    });
    let mut chosen = Vec::new();
    let mut left = missing;
    while left > 0 && !candidates.is_empty() {
        // The smallest that is enough alone, or else the first of the largest.
        let most = candidates.last().map_or(0, |victim| victim.useful);
        let wanted = left.min(most);
        let at = candidates.partition_point(|victim| victim.useful < wanted);
        let victim = candidates.remove(at);
        left = left.saturating_sub(victim.useful);
        chosen.push(victim);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{at, device_ref};

    /// Asserts which leases are suspended. `victims` have the number of devices, of which all are useful, the
    /// share, and the time of the grant of each; its number is the lease's.
    #[track_caller]
    fn check(victims: &[(usize, f64, u64)], missing: usize, expected: &[u64]) {
        let victims = (0..).zip(victims);
        let victims = victims.map(|(id, (count, share, granted_at))| Victim {
            leases: vec![LeaseId(id)],
            shared: None,
            shares: Vec::new(),
            devices: (0..*count as u32).map(|at| device_ref(1, at)).collect(),
            useful: *count,
            is_spot: false,
            ends: false,
            tenant_share: share.to_bits(),
            granted_at: at(*granted_at),
        });
        let chosen = fewest(victims.collect(), missing);
        let chosen: Vec<_> = chosen.iter().map(|it| it.leases[0].0).collect();
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

    /// Lease 1 has so many devices, and others share one device each.
    #[track_caller]
    fn check_sharing(devices: u32, sharing: &[&[u64]], missing: usize, expected: &[&[u64]]) {
        let victim = |leases: &[u64], count| Victim {
            leases: leases.iter().copied().map(LeaseId).collect(),
            shared: None,
            shares: Vec::new(),
            devices: (0..count).map(|at| device_ref(leases[0], at)).collect(),
            useful: count as usize,
            is_spot: false,
            ends: false,
            tenant_share: 0,
            granted_at: at(0),
        };
        let sharing = sharing.iter().map(|leases| victim(leases, 1));
        let chosen = fewest(sharing.chain([victim(&[1], devices)]).collect(), missing);
        let chosen = chosen
            .iter()
            .map(|it| it.leases.iter().map(|it| it.0).collect());
        assert_eq!(chosen.collect::<Vec<Vec<_>>>(), expected);
    }

    #[test]
    fn leases_that_share_a_device_are_spared_if_fewer_are_enough() {
        check_sharing(2, &[&[2, 3]], 1, &[&[1]]);
        check_sharing(2, &[&[2]], 1, &[&[2]]);
        check_sharing(2, &[&[2, 3, 4], &[5, 6]], 3, &[&[1], &[5, 6]]);
    }

    #[test]
    fn a_spot_lease_goes_before_another_one_that_is_as_useful() {
        let victim = |lease, is_spot| Victim {
            leases: vec![LeaseId(lease)],
            shared: None,
            shares: Vec::new(),
            devices: [device_ref(lease, 0)].into(),
            useful: 1,
            is_spot,
            ends: false,
            tenant_share: 0,
            granted_at: at(0),
        };
        let victims = vec![victim(1, false), victim(2, false), victim(3, true)];
        let chosen = fewest(victims, 2);
        let chosen: Vec<_> = chosen.iter().map(|it| it.leases[0].0).collect();
        assert_eq!(chosen, [3, 1]);
    }

    #[test]
    fn a_lease_with_other_devices_is_spared() {
        let victim = |lease, all| Victim {
            leases: vec![LeaseId(lease)],
            shared: None,
            shares: Vec::new(),
            devices: (0..all).map(|at| device_ref(1, at)).collect(),
            useful: 1,
            is_spot: false,
            ends: false,
            tenant_share: 0,
            granted_at: at(0),
        };
        let chosen = fewest(vec![victim(1, 8), victim(2, 1)], 1);
        assert_eq!(chosen[0].leases, [LeaseId(2)]);
        assert_eq!(chosen.len(), 1);
    }
}
