//! The test's own model of what requests could have together: it tries all ways to give them devices, where the
//! engine gives each in turn what comes first.

use std::collections::{BTreeMap, BTreeSet};

use super::reservation_model::class_of;
use super::share_model::needs_of;
use super::world::{SimLease, SimRequest, World, meets_demand, tenant_of};
use super::*;
use crate::Amounts;
use crate::device::Share;

/// Why leases may be suspended for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Right {
    /// It is within its tenant's guarantee.
    Guarantee,
    /// It has a reservation.
    Reservation,
    /// Spot leases give their devices to all other requests.
    Spot,
}

/// A request for which leases may be suspended.
pub(super) struct Claimant<'a> {
    pub(super) waiting: &'a SimRequest,
    pub(super) right: Right,
    /// The devices that it could get if they were free, and its tenant had no limit.
    pub(super) suitable: BTreeSet<DeviceRef>,
}

/// The shares that are taken of each device that nobody has as a whole.
pub(super) type Left = BTreeMap<DeviceRef, Vec<Share>>;

/// A lease with the devices that it has, or had.
pub(super) type WithDevices<'a> = (LeaseId, &'a SimLease);

impl World {
    /// Returns the requests for which leases may be suspended, in the order in which they are.
    pub(super) fn claimants(&self) -> Vec<Claimant<'_>> {
        let rights = self.rights_in_order().into_iter();
        rights.map(|(at, right)| self.claimant(at, right)).collect()
    }

    /// Returns the requests for which leases may be suspended, in the order in which they are, each with why.
    pub(super) fn rights_in_order(&self) -> Vec<(usize, Right)> {
        let guaranteed = self
            .order
            .iter()
            .filter(|(_, is_guaranteed)| *is_guaranteed);
        let guaranteed = guaranteed.map(|(at, _)| (*at, Right::Guarantee));
        let beyond = self.reservation_order();
        let is_reserved = |at: &usize| self.reserved.contains_key(&self.waiting[*at].lease);
        let (reserved, others): (Vec<_>, Vec<_>) = beyond.into_iter().partition(is_reserved);
        let reserved = reserved.into_iter().map(|at| (at, Right::Reservation));
        // The last spot lease may have ended in this event.
        let has_spot = self.victims.iter().any(|it| it.lease.is_spot);
        let before_spot = match has_spot || self.engine.has_spot_or_requests() {
            true => others,
            false => Vec::new(),
        };
        let before_spot = before_spot.into_iter().map(|at| (at, Right::Spot));
        guaranteed.chain(reserved).chain(before_spot).collect()
    }

    fn claimant(&self, at: usize, right: Right) -> Claimant<'_> {
        let waiting = &self.waiting[at];
        let may_get = |device: &DeviceSpec| match right {
            Right::Guarantee => true,
            Right::Reservation => self.reserved[&waiting.lease].contains(&class_of(device)),
            Right::Spot => self.may_pass(waiting, device),
        };
        let suitable = self.usable().filter(|it| {
            let device = self.device(*it);
            meets_demand(device, &waiting.demand) && may_get(device)
        });
        Claimant {
            waiting,
            right,
            suitable: suitable.collect(),
        }
    }

    /// Returns the devices that leases could get if they were free.
    fn usable(&self) -> impl Iterator<Item = DeviceRef> {
        let workers = self.workers.iter().filter_map(|worker| {
            let known = worker.known.as_ref()?;
            let is_there = known.connected && !known.is_draining();
            is_there.then_some((worker, known))
        });
        workers.flat_map(|(worker, known)| {
            let devices = 0..known.devices.len() as u32;
            let working = devices.filter(|index| !worker.broken.contains(index));
            working.map(|index| device_ref(worker.id, index))
        })
    }

    /// Returns what all leases leave of the devices without those that are `gone`, and if these others had kept theirs.
    /// What is held back for others than these claimants is taken.
    pub(super) fn left(
        &self,
        claimants: &[LeaseId],
        spared: &[WithDevices<'_>],
        gone: &BTreeSet<LeaseId>,
    ) -> Left {
        let mut left: Left = self.usable().map(|it| (it, Vec::new())).collect();
        let mut take = |device_ref: DeviceRef, share: Option<Share>| match share {
            Some(share) => left
                .get_mut(&device_ref)
                .into_iter()
                .for_each(|it| it.push(share)),
            None => drop(left.remove(&device_ref)),
        };
        let others = self.leases.iter().flatten();
        let others = others.filter(|(id, _)| !gone.contains(id));
        let others = others.filter(|(id, _)| spared.iter().all(|(it, _)| it != *id));
        let others = others.map(|(id, lease)| (*id, lease));
        for (id, lease) in others.chain(spared.iter().copied()) {
            for device_ref in &lease.lease_devices {
                let share = self.shares.get(&(id, *device_ref)).copied();
                take(*device_ref, share.map(Share::from));
            }
        }
        for (device_ref, held) in self.engine.held_back() {
            let is_other = |it: LeaseId| !claimants.contains(&it);
            for (_, share) in held.iter().filter(|(of, _)| is_other(*of)) {
                take(*device_ref, *share);
            }
        }
        left
    }

    /// Returns whether these requests could all have their devices of what is `left`.
    pub(super) fn can_all_have(&self, claimants: &[&Claimant<'_>], mut left: Left) -> bool {
        let mut allowed = Vec::new();
        for (at, claimant) in claimants.iter().enumerate() {
            // What the others have of the same tenant is not known yet.
            let tenant = tenant_of(claimant.waiting.client);
            let mut more = Amounts::default();
            for other in &claimants[..at] {
                if tenant_of(other.waiting.client) == tenant {
                    more.add(&self.most_of(other.waiting));
                }
            }
            let is_allowed = |it: &&DeviceRef| {
                self.is_allowed_with(
                    claimant.waiting,
                    self.device(**it),
                    &more,
                    &Amounts::default(),
                )
            };
            let devices = claimant.suitable.iter().filter(is_allowed).copied();
            allowed.push((claimant.waiting, devices.collect()));
        }
        let needs_share = |(waiting, _): &(&SimRequest, BTreeSet<DeviceRef>)| {
            waiting.demand.share_permille.is_some()
        };
        let (shares, whole): (Vec<_>, Vec<_>) = allowed.into_iter().partition(needs_share);
        self.can_have_shares(&shares, &whole, &mut left)
    }

    /// Gives each of the first requests a share, in all ways, until there are enough devices for the others.
    fn can_have_shares(
        &self,
        shares: &[(&SimRequest, BTreeSet<DeviceRef>)],
        whole: &[(&SimRequest, BTreeSet<DeviceRef>)],
        left: &mut Left,
    ) -> bool {
        let Some(((waiting, suitable), rest)) = shares.split_first() else {
            return can_have_whole(whole, left);
        };
        for device_ref in suitable {
            let device = self.device(*device_ref);
            let share = needs_of(waiting)(device).expect("it needs a share");
            let taken = left
                .get(device_ref)
                .filter(|it| has_room(device, it, share));
            if taken.is_none() {
                continue;
            }
            let taken = |left: &mut Left| left.get_mut(device_ref).map(|it| it.push(share));
            taken(left);
            let can_all = self.can_have_shares(rest, whole, left);
            left.get_mut(device_ref).map(Vec::pop);
            if can_all {
                return true;
            }
        }
        false
    }
}

/// Returns whether so much is left of a device, of which these shares are taken.
pub(super) fn has_room(device: &DeviceSpec, taken: &[Share], share: Share) -> bool {
    let permille: u32 = taken.iter().map(|it| it.permille).sum();
    let bytes: u64 = taken.iter().map(|it| it.memory_bytes).sum();
    permille + share.permille <= 1000
        && bytes + share.memory_bytes <= device.memory_bytes
        && taken.len() < 16
}

/// Returns whether all these requests could have whole devices: any of them together have as many as they want (Hall's
/// marriage theorem).
fn can_have_whole(requests: &[(&SimRequest, BTreeSet<DeviceRef>)], left: &Left) -> bool {
    let free: Vec<_> = left.iter().filter(|(_, taken)| taken.is_empty()).collect();
    let mask = |suitable: &BTreeSet<DeviceRef>| {
        let bits = (0..)
            .zip(&free)
            .filter(|(_, (it, _))| suitable.contains(it));
        bits.fold(0_u64, |mask, (bit, _)| mask | 1 << bit)
    };
    let requests = requests.iter();
    let requests: Vec<_> = requests
        .map(|(it, suitable)| (it.demand.devices, mask(suitable)))
        .collect();
    (1..1_u32 << requests.len()).all(|set| {
        let chosen = (0..).zip(&requests).filter(|(at, _)| set >> at & 1 == 1);
        let (wanted, suitable) = chosen.fold((0, 0), |(wanted, all), (_, (devices, mask))| {
            (wanted + devices, all | mask)
        });
        wanted <= suitable.count_ones()
    })
}
