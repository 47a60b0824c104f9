//! The test's own model of the leases that make room for others, the *victims*: each does for something that is entitled
//! to its devices, and none could have been spared. It tries all sets of leases, where the engine chooses one.

use std::collections::{BTreeMap, BTreeSet};

use super::room_model::{Claimant, Left, Right, WithDevices, has_room};
use super::share_model::needs_of;
use super::world::{SimLease, World, meets_demand, tenant_of};
use super::*;
use crate::Amounts;

/// All sets of so many leases are tried.
const MAX_TRIED: usize = 10;

/// A lease that has made room in this event.
pub(super) struct Victim {
    pub(super) id: LeaseId,
    /// The request, or the lease that waits, for which it did.
    pub(super) by: LeaseId,
    /// As it was before.
    pub(super) lease: SimLease,
}

impl World {
    /// Records that a lease makes room, for what the engine says.
    pub(super) fn add_victim(&mut self, id: LeaseId, lease: SimLease) {
        let mut made_room = self.made_room_for.iter();
        let by = made_room.find(|(victim, _)| *victim == id);
        let (_, by) = *by.unwrap_or_else(|| panic!("{id} makes room for nothing"));
        self.victims.push(Victim { id, by, lease });
    }

    /// Checks the leases that have made room in this event. Requests had these rights before it.
    pub(super) fn check_victims(&self, rights_before: &BTreeMap<LeaseId, Right>) {
        if self.victims.is_empty() || self.leases.is_none() {
            return;
        }
        for victim in &self.victims {
            self.check_entitled(victim, rights_before);
        }
        self.check_none_is_spared(rights_before);
    }

    /// What a lease has made room for was entitled to its devices.
    fn check_entitled(&self, victim: &Victim, rights_before: &BTreeMap<LeaseId, Right>) {
        let Victim { id, by, lease } = victim;
        let mut waiting = self.waiting.iter();
        let Some(waiting) = waiting.find(|it| it.lease == *by) else {
            // A lease that waits, or a request that was granted since.
            let is_granted = self.granted_now.contains(by);
            let is_for_lease = lease.is_spot && self.is_for_lease(lease);
            assert!(is_for_lease || is_granted, "{id} makes room for lease {by}");
            return;
        };
        // It may have got, or lost, its right in this event.
        let now = self.rights.get(by);
        let rights: BTreeSet<_> = now.into_iter().chain(rights_before.get(by)).collect();
        let is_other = tenant_of(waiting.client) != tenant_of(lease.client);
        let has_passed = lease.passed.contains(by);
        let is_entitled = match lease.is_spot {
            true => !waiting.demand.is_spot,
            false => {
                let by_guarantee = rights.contains(&Right::Guarantee) && (is_other || has_passed);
                // Another request of the tenant may be within the guarantee once the lease counts no more, and have the
                // reservation then.
                let may_have_had = rights.contains(&Right::Reservation) || !is_other;
                by_guarantee || may_have_had && has_passed
            }
        };
        assert!(
            is_entitled,
            "{id} makes room for {by}, which has {rights:?}: {}",
            waiting.demand
        );
        // What its tenant had at that moment is not known: it may have been granted in this event.
        let fits = |it: &DeviceRef| {
            let device = self.device(*it);
            meets_demand(device, &waiting.demand) && self.is_allowed(waiting, device, false)
        };
        // It may be in the way because of the limit alone.
        let is_limited = lease.is_spot && !is_other;
        let is_useful = is_limited || lease.lease_devices.iter().any(fits);
        assert!(is_useful, "{id} has no device for {by}");
    }

    /// No request for which leases have made room has enough devices without one of them, whatever earlier ones take.
    /// Leases that have made room for later ones do not count: leases are suspended for one request after the other.
    fn check_none_is_spared(&self, rights_before: &BTreeMap<LeaseId, Right>) {
        // Some lease may get what a request would have got otherwise, or what an idle one has left.
        if !self.engine.needed_by_leases().is_empty() || !self.made_room.is_empty() {
            return;
        }
        // The limit of the tenant may demand that its own spot leases go, and one that was suspended may have others make
        // room in turn.
        let is_limited = |it: &Victim| {
            let policy = self.policy.get(&tenant_of(it.lease.client));
            it.lease.is_spot && policy.is_some_and(|it| it.limit != TenantLimit::default())
        };
        let is_for_lease = |it: &Victim| self.engine.leases().get(it.by).is_some();
        if self
            .victims
            .iter()
            .any(|it| is_limited(it) || is_for_lease(it))
        {
            return;
        }
        let claimants = self.claimants();
        // One is in another place now, as a lease of its tenant that made room counts no more.
        let is_elsewhere = |it: &Claimant<'_>| {
            let before = rights_before.get(&it.waiting.lease);
            before.is_some_and(|before| *before != it.right)
        };
        if claimants.iter().any(is_elsewhere) {
            return;
        }
        for (at, claimant) in claimants.iter().enumerate() {
            // A lease that waits and comes before it gets devices that have yet to be released, which cannot be held back.
            // And a tenant that has got devices in this event was next before.
            let has_first_lease = !self.engine.needed_before_spot().is_empty();
            let may_be_later = has_first_lease || !self.granted.is_empty();
            if claimant.right == Right::Spot && may_be_later {
                continue;
            }
            let earlier: Vec<_> = claimants[..at].iter().collect();
            let is_for = |it: &&Victim, claimant: &Claimant<'_>| it.by == claimant.waiting.lease;
            // These had not made room then.
            let later = self.victims.iter();
            let later =
                later.filter(|it| claimants[at + 1..].iter().any(|other| is_for(it, other)));
            let later: Vec<_> = later.collect();
            let own = self.victims.iter().filter(|it| is_for(it, claimant));
            let own: Vec<_> = own.collect();
            for victim in &own {
                let spared = [&later[..], &[victim]].concat();
                assert!(
                    !self.has_enough_without(claimant, &earlier, &spared, &[]),
                    "{} makes room for {}, which has enough without it",
                    victim.id,
                    victim.by
                );
            }
            if own.len() == self.victims.len() {
                self.check_fewest(claimant, &earlier);
            }
        }
    }

    /// Returns whether a request would have enough devices if these leases had been spared, and others had made room
    /// instead, whatever these other requests take.
    fn has_enough_without(
        &self,
        claimant: &Claimant<'_>,
        others: &[&Claimant<'_>],
        spared: &[&Victim],
        instead: &[WithDevices<'_>],
    ) -> bool {
        let tenant = tenant_of(claimant.waiting.client);
        let (mut more, mut less) = (Amounts::default(), Amounts::default());
        for victim in spared
            .iter()
            .filter(|it| tenant_of(it.lease.client) == tenant)
        {
            more.add(&self.charges[&victim.id]);
        }
        for (id, _) in instead
            .iter()
            .filter(|(_, it)| tenant_of(it.client) == tenant)
        {
            less.add(&self.charges[id]);
        }
        let with_devices = spared.iter().map(|it| (it.id, &it.lease));
        let with_devices: Vec<WithDevices<'_>> = with_devices.collect();
        let gone = instead.iter().map(|(id, _)| *id).collect();
        let all = others.iter().chain([&claimant]);
        let leases: Vec<_> = all.map(|it| it.waiting.lease).collect();
        let left = self.left(&leases, &with_devices, &gone);
        self.has_enough(claimant, others, &left, more, &less)
    }

    /// If leases have made room for one request only, no fewer could have done so.
    fn check_fewest(&self, claimant: &Claimant<'_>, others: &[&Claimant<'_>]) {
        let instead = self.others_instead(claimant);
        let count = instead.len() + self.victims.len();
        let least = self.victims.len() as u32;
        if count > MAX_TRIED {
            return;
        }
        for set in (0..1_u32 << count).filter(|set| set.count_ones() < least) {
            let is_one = |at: usize| set >> at & 1 == 1;
            let spared = (0..).zip(&self.victims).filter(|(at, _)| !is_one(*at));
            let spared: Vec<_> = spared.map(|(_, victim)| victim).collect();
            let instead = (self.victims.len()..).zip(&instead);
            let instead = instead.filter(|(at, _)| is_one(*at)).map(|(_, it)| *it);
            let instead: Vec<_> = instead.collect();
            assert!(
                !self.has_enough_without(claimant, others, &spared, &instead),
                "{:?} make room for {}, and {:?} could have instead of {:?}",
                self.victims.iter().map(|it| it.id).collect::<Vec<_>>(),
                claimant.waiting.demand,
                instead.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
                spared.iter().map(|it| it.id).collect::<Vec<_>>(),
            );
        }
    }

    /// Returns the leases that could have made room for a request in the place of those that have: spot leases only if
    /// those that have are such, as they come first; and none that would have ended if none has, other than spot leases.
    fn others_instead(&self, claimant: &Claimant<'_>) -> Vec<WithDevices<'_>> {
        let only_spot = self.victims.iter().all(|it| it.lease.is_spot);
        let known = self.leases.as_ref().expect("it knows leases");
        let has_ended = |it: &Victim| !it.lease.is_spot && !known.contains_key(&it.id);
        let may_end = self.victims.iter().any(has_ended);
        let tenant = tenant_of(claimant.waiting.client);
        let policy = self.policy.get(&tenant);
        let has_limit = policy.is_some_and(|it| it.limit != TenantLimit::default());
        let others = known.iter().filter(|(id, lease)| {
            // Spot leases of its own tenant do so only if nothing but the limit holds it up.
            if lease.is_spot && has_limit && tenant_of(lease.client) == tenant {
                return false;
            }
            let is_victim = self.victims.iter().any(|it| it.id == **id);
            let ends = may_end
                && gives_way_to(claimant, lease)
                && self.may_end_now(**id, lease)
                && self.is_borrowed(**id);
            let is_free_to_go = ends || self.makes_room_for(claimant, **id, lease);
            !is_victim && (lease.is_spot || !only_spot) && is_free_to_go
        });
        others.map(|(id, lease)| (*id, lease)).collect()
    }

    /// Returns whether a lease can be suspended for a request now, or is a spot lease that can end.
    pub(super) fn makes_room_for(
        &self,
        claimant: &Claimant<'_>,
        id: LeaseId,
        lease: &SimLease,
    ) -> bool {
        match lease.is_spot {
            true => self.is_spot_due(id, lease),
            false => gives_way_to(claimant, lease) && self.is_suspendable(id, lease),
        }
    }

    /// Each request within a guarantee for which there are surely enough devices has these to come, together with all such
    /// requests: with the devices of leases that can be suspended now, there are as many as it wants, whatever earlier
    /// ones take. So it does not wait for borrowed leases that have run for long enough.
    pub(super) fn check_guaranteed(&self) {
        // Some lease may get what a request would have got otherwise.
        if self.leases.is_none() || !self.engine.needed_by_leases().is_empty() {
            return;
        }
        let claimants = self.claimants();
        let guaranteed = (1..).zip(&claimants);
        let guaranteed = guaranteed.filter(|(_, it)| it.right == Right::Guarantee);
        let mut earlier = Vec::new();
        let mut sure = Vec::new();
        for (next, claimant) in guaranteed {
            if self.is_sure(claimant, &earlier) {
                sure.push(claimant);
                // What is held back for later requests may be beside leases that have yet to make room for these.
                let later = claimants[next..].iter();
                let with_later: Vec<_> = sure.iter().copied().chain(later).collect();
                let left = self.left(&leases_of(&with_later), &[], &BTreeSet::new());
                assert!(
                    self.can_all_have(&sure, left),
                    "{} waits, and leases could make room for it and those before it",
                    claimant.waiting.demand
                );
            }
            earlier.push(claimant);
        }
    }

    /// Returns whether a request has enough devices with those of leases that can be suspended now, whatever these earlier
    /// ones take.
    fn is_sure(&self, claimant: &Claimant<'_>, earlier: &[&Claimant<'_>]) -> bool {
        let leases = self.leases.iter().flatten();
        let gone = leases.filter(|(id, lease)| self.makes_room_for(claimant, **id, lease));
        let gone = gone.map(|(id, _)| *id).collect();
        let left = self.left(&[claimant.waiting.lease], &[], &gone);
        self.has_enough(
            claimant,
            earlier,
            &left,
            Amounts::default(),
            &Amounts::default(),
        )
    }

    /// Returns whether a request has enough devices of what is `left`, whatever these others take, if its tenant had `more`
    /// than it has, and `less`.
    fn has_enough(
        &self,
        claimant: &Claimant<'_>,
        others: &[&Claimant<'_>],
        left: &Left,
        mut more: Amounts,
        less: &Amounts,
    ) -> bool {
        let waiting = claimant.waiting;
        let is_own =
            |it: &&&Claimant<'_>| tenant_of(it.waiting.client) == tenant_of(waiting.client);
        for other in others.iter().filter(is_own) {
            more.add(&self.most_of(other.waiting));
        }
        let needs = needs_of(waiting);
        let enough = left.iter().filter(|(device_ref, taken)| {
            let device = self.device(**device_ref);
            let has_room = match needs(device) {
                Some(share) => has_room(device, taken, share),
                None => taken.is_empty(),
            };
            let is_suitable = claimant.suitable.contains(device_ref) && has_room;
            is_suitable && self.is_allowed_with(waiting, device, &more, less)
        });
        let enough: BTreeSet<_> = enough.map(|(device_ref, _)| *device_ref).collect();
        let taken = others.iter().map(|other| {
            let common = enough.intersection(&other.suitable).count();
            common.min(other.waiting.demand.devices as usize)
        });
        enough.len() >= waiting.demand.devices as usize + taken.sum::<usize>()
    }
}

/// Returns whether a borrowed lease that is no spot lease makes room for a request, as far as it can.
fn gives_way_to(claimant: &Claimant<'_>, lease: &SimLease) -> bool {
    let is_other = tenant_of(lease.client) != tenant_of(claimant.waiting.client);
    let has_passed = lease.passed.contains(&claimant.waiting.lease);
    match claimant.right {
        Right::Guarantee => is_other || has_passed,
        Right::Reservation => has_passed,
        Right::Spot => false,
    }
}

fn leases_of(claimants: &[&Claimant<'_>]) -> Vec<LeaseId> {
    claimants.iter().map(|it| it.waiting.lease).collect()
}
