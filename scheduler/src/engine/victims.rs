//! The choice of the borrowed leases that make room for a request (`reclaim.rs`).

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use tensord_proto::ids::LeaseId;

use super::borrowed_leases::Borrowed;
use crate::device::Share;
use crate::event::DeviceRef;
use crate::tenants::{Amounts, TenantName};
use crate::time::Timestamp;

/// A borrowed lease that has devices which a request could get, or leases that share such a device.
#[derive(Clone)]
pub(super) struct Victim {
    pub(super) leases: Vec<Arc<Borrowed>>,
    /// The number of their devices that the request could get.
    pub(super) useful: usize,
}

impl Victim {
    /// Returns the device, if leases share it.
    pub(super) fn shared(&self) -> Option<DeviceRef> {
        self.leases.first()?.shared()
    }

    /// Returns the shares that they have of it.
    pub(super) fn shares(&self) -> impl Iterator<Item = Share> {
        self.leases.iter().filter_map(|it| it.device_share)
    }

    /// Returns all their devices.
    pub(super) fn devices(&self) -> impl Iterator<Item = DeviceRef> {
        let shared = self.shared();
        let others = self.leases.iter().filter(move |_| shared.is_none());
        let others = others.flat_map(|it| &it.devices).copied();
        shared.into_iter().chain(others)
    }

    pub(super) fn is_spot(&self) -> bool {
        self.leases.iter().all(|it| it.is_spot)
    }

    /// Returns whether one of them ends that is no spot lease.
    pub(super) fn ends(&self) -> bool {
        self.leases.iter().any(|it| it.is_last_resort())
    }

    /// Returns the time from which all may be suspended, and what has the order of those with the same time.
    pub(super) fn order(&self) -> (Timestamp, usize, Option<LeaseId>) {
        let times = self.leases.iter().map(|it| it.suspendable_at);
        let first = self.leases.first().map(|it| it.lease);
        (times.max().unwrap_or_default(), self.leases.len(), first)
    }

    /// Returns what has the order in which equally useful ones make room, if a tenant has this share.
    fn preference(&self, share_of: &impl Fn(&TenantName) -> u64) -> Preference {
        let shares = self.leases.iter().map(|it| share_of(&it.tenant));
        let granted_at = self.leases.iter().map(|it| it.granted_at);
        // They deserve to be spared as much as the one that deserves it most.
        let by_share = (Reverse(shares.min()), Reverse(granted_at.min()));
        let size = (self.leases.len(), self.devices().count());
        let first = self.leases.first().map(|it| it.lease);
        // Spot leases go first.
        (!self.is_spot(), size, self.ends(), by_share, first)
    }
}

/// What has the order of equally useful victims: the lowest makes room first.
type Preference = (
    bool,
    (usize, usize),
    bool,
    (Reverse<Option<u64>>, Reverse<Option<Timestamp>>),
    Option<LeaseId>,
);

/// Returns the number of useful devices that these have together.
pub(super) fn useful<'a>(victims: impl IntoIterator<Item = &'a Victim>) -> usize {
    victims.into_iter().map(|victim| victim.useful).sum()
}

/// Takes what a lease counts as away from what its tenant has.
pub(super) fn take_away(used: &mut BTreeMap<TenantName, Amounts>, lease: &Borrowed) {
    if let Some(used) = used.get_mut(&lease.tenant) {
        used.subtract(&lease.charge);
    }
}

/// Returns the fewest of these leases that have `missing` useful devices together, which all have. Several that share a
/// device are more than one lease with devices, of which some may not be needed. Of equally useful ones, those of the
/// tenant with the largest share go first, which `share_of` returns.
pub(super) fn fewest(
    candidates: Vec<Victim>,
    missing: usize,
    share_of: impl Fn(&TenantName) -> u64,
) -> Vec<Victim> {
    let is_single = |victim: &Victim| victim.leases.len() == 1;
    let (mut single, sharing): (Vec<_>, Vec<_>) = candidates.into_iter().partition(is_single);
    match missing.checked_sub(useful(&single)) {
        None | Some(0) => fewest_victims(single, missing, &share_of),
        Some(missing) => {
            single.extend(fewest_victims(sharing, missing, &share_of));
            single
        }
    }
}

/// Returns the fewest of these victims that have `missing` useful devices together.
fn fewest_victims(
    candidates: Vec<Victim>,
    missing: usize,
    share_of: &impl Fn(&TenantName) -> u64,
) -> Vec<Victim> {
    let candidates = candidates.into_iter();
    let mut candidates: Vec<_> = candidates
        .map(|victim| ((victim.useful, victim.preference(share_of)), victim))
        .collect();
    let mut chosen = Vec::new();
    let mut left = missing;
    while left > 0 && !candidates.is_empty() {
        // The smallest that is enough alone, or else the first of the largest.
        let most = candidates.iter().map(|(_, victim)| victim.useful).max();
        let wanted = left.min(most.unwrap_or_default());
        let enough = candidates.iter().enumerate();
        let enough = enough.filter(|(_, (_, victim))| victim.useful >= wanted);
        let first = enough.min_by(|(_, (one, _)), (_, (other, _))| one.cmp(other));
        let Some((at, _)) = first else {
            break;
        };
        let (_, victim) = candidates.swap_remove(at);
        left = left.saturating_sub(victim.useful);
        chosen.push(victim);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{at, device_ref};

    /// A lease with so many devices, of a tenant whose name is that of its share.
    fn lease(id: u64, devices: u32, share: u64, granted_at: u64) -> Borrowed {
        Borrowed {
            lease: LeaseId(id),
            tenant: share.to_string().as_str().into(),
            devices: (0..devices).map(|index| device_ref(id, index)).collect(),
            charge: Amounts::default(),
            device_share: None,
            passed: Default::default(),
            is_spot: false,
            ends: false,
            suspendable_at: at(0),
            granted_at: at(granted_at),
        }
    }

    fn victim(useful: usize, leases: impl IntoIterator<Item = Borrowed>) -> Victim {
        Victim {
            leases: leases.into_iter().map(Arc::new).collect(),
            useful,
        }
    }

    /// Asserts which leases are suspended, those of one victim together.
    #[track_caller]
    fn check_victims(victims: Vec<Victim>, missing: usize, expected: &[&[u64]]) {
        let share_of = |tenant: &TenantName| tenant.as_str().parse().unwrap();
        let chosen = fewest(victims, missing, share_of);
        let ids = |victim: &Victim| victim.leases.iter().map(|it| it.lease.0).collect();
        let chosen: Vec<Vec<_>> = chosen.iter().map(ids).collect();
        assert_eq!(chosen, expected);
    }

    /// Asserts which leases are suspended. `victims` have the number of devices, of which all are useful, the
    /// share, and the time of the grant of each; its number is the lease's.
    #[track_caller]
    fn check(victims: &[(u32, u64, u64)], missing: usize, expected: &[u64]) {
        let victims = (0..).zip(victims);
        let victims = victims.map(|(id, (devices, share, granted_at))| {
            victim(
                *devices as usize,
                [lease(id, *devices, *share, *granted_at)],
            )
        });
        let expected: Vec<_> = expected.chunks(1).collect();
        check_victims(victims.collect(), missing, &expected);
    }

    #[test]
    fn the_fewest_leases_are_suspended() {
        check(&[(1, 5, 0), (2, 5, 0), (4, 5, 0)], 4, &[2]);
        check(&[(1, 5, 0), (2, 5, 0), (4, 5, 0)], 5, &[2, 0]);
        check(&[(1, 5, 0), (2, 5, 0), (4, 5, 0)], 7, &[2, 1, 0]);
        check(&[(3, 5, 0), (3, 5, 0), (2, 5, 0)], 5, &[0, 2]);
    }

    #[test]
    fn a_lease_with_devices_that_are_not_needed_is_spared() {
        check(&[(8, 9, 9), (1, 1, 0), (2, 5, 5)], 1, &[1]);
        check(&[(8, 9, 9), (1, 1, 0), (3, 5, 5)], 2, &[2]);
    }

    #[test]
    fn the_least_entitled_and_the_latest_go_first() {
        check(&[(1, 2, 9), (1, 5, 0), (1, 4, 9)], 1, &[1]);
        check(&[(1, 5, 3), (1, 5, 7), (1, 5, 5)], 1, &[1]);
        check(&[(1, 5, 7), (1, 5, 7)], 1, &[0]);
        check(&[(2, 2, 9), (2, 5, 0), (2, 4, 9)], 4, &[1, 2]);
    }

    /// Lease 1 has so many devices, and others share one device each.
    #[track_caller]
    fn check_sharing(devices: u32, sharing: &[&[u64]], missing: usize, expected: &[&[u64]]) {
        let shares = |leases: &[u64]| {
            let leases = leases.iter().map(|id| Borrowed {
                devices: [device_ref(leases[0], 0)].into(),
                device_share: Some(Share {
                    permille: 100,
                    memory_bytes: 0,
                }),
                ..lease(*id, 1, 0, 0)
            });
            victim(1, leases)
        };
        let whole = victim(devices as usize, [lease(1, devices, 0, 0)]);
        let all = sharing.iter().map(|leases| shares(leases)).chain([whole]);
        check_victims(all.collect(), missing, expected);
    }

    #[test]
    fn leases_that_share_a_device_are_spared_if_fewer_are_enough() {
        check_sharing(2, &[&[2, 3]], 1, &[&[1]]);
        check_sharing(2, &[&[2]], 1, &[&[2]]);
        check_sharing(2, &[&[2, 3, 4], &[5, 6]], 3, &[&[1], &[5, 6]]);
    }

    #[test]
    fn a_spot_lease_goes_before_another_one_that_is_as_useful() {
        let spot = Borrowed {
            is_spot: true,
            ..lease(3, 1, 0, 0)
        };
        let others = [1, 2].map(|id| victim(1, [lease(id, 1, 0, 0)]));
        let victims = others.into_iter().chain([victim(1, [spot])]);
        check_victims(victims.collect(), 2, &[&[3], &[1]]);
    }

    #[test]
    fn a_lease_with_other_devices_is_spared() {
        let victims = [(1, 8), (2, 1)].map(|(id, all)| victim(1, [lease(id, all, 0, 0)]));
        check_victims(victims.into(), 1, &[&[2]]);
    }
}
