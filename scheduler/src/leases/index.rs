//! Indexes of leases, and sums over them, so that no event has to go through all leases.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::{ClientId, LeaseId, WorkerId};

use super::patience::{Patience, PatientLeases};
use crate::by_key;
use crate::lease::{Keeper, Lease, MAX_HELD, Standing};
use crate::tenants::{Amounts, TenantName};
use crate::time::Timestamp;

/// The keys of one lease in the indexes, and what the lease adds to the sums.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Keys {
    owner: Option<ClientId>,
    /// The workers of its devices, those that keep or hold its snapshots, and those that have reported
    /// something of it.
    workers: BTreeSet<WorkerId>,
    /// The workers that keep its snapshots, or get them, once for each part.
    keepers: Vec<WorkerId>,
    /// The workers that hold its snapshots, or get them, while it is suspended.
    held_by: BTreeSet<WorkerId>,
    /// The workers that hold its snapshots.
    holders: BTreeSet<WorkerId>,
    is_unsettled: bool,
    patience: Option<Patience>,
    is_suspended: bool,
    ends_at: Option<Timestamp>,
    /// When it will have had devices for as long as it may.
    time_over_at: Option<Timestamp>,
    is_unclaimed: bool,
    /// What it adds to what a tenant has.
    charge: Option<(TenantName, Amounts)>,
    granted_at: Timestamp,
    /// Whether it is a spot lease that has devices or waits for some.
    is_spot: bool,
    is_reclaimed: bool,
    /// Whether it has passed reservations, with or without devices.
    has_passed: bool,
    is_interruptible: bool,
    /// The requests whose reservations it has passed, if it has devices.
    passed: BTreeSet<LeaseId>,
}

impl Keys {
    pub(super) fn of(lease: &Lease) -> Self {
        let keepers = lease.keepers.values();
        let named = keepers.clone().flat_map(Keeper::workers).map(|it| it.0);
        let devices = lease.lease_devices.keys();
        let holders = lease.parts.iter().flat_map(|part| &part.holders).copied();
        let workers = devices.map(|device_ref| device_ref.worker);
        let workers = workers.chain(named).chain(holders);
        let workers = workers.chain(lease.kept_at.keys().copied());
        let workers = workers.chain(lease.keepers.keys().copied());
        let is_suspended = lease.is_suspended();
        let waits = match lease.standing {
            Standing::Running => false,
            Standing::Lost(_) | Standing::Resuming { .. } => true,
            Standing::Suspended { .. } => !lease.is_standing_reported,
        };
        let tenant = lease
            .tenant
            .as_ref()
            .filter(|_| lease.counts() && !lease.charge.is_nothing());
        Self {
            owner: lease.owner,
            workers: workers.collect(),
            keepers: keepers.map(|keeper| keeper.worker).collect(),
            held_by: match is_suspended {
                true => lease.keepers_and_holders(),
                false => BTreeSet::new(),
            },
            holders: lease.holders(),
            is_unsettled: waits,
            patience: Patience::of(lease),
            is_suspended,
            ends_at: lease.ends_at(),
            time_over_at: lease.time_over_at(),
            is_unclaimed: lease.tenant.is_none(),
            charge: tenant.map(|tenant| (tenant.clone(), lease.charge.clone())),
            granted_at: lease.granted_at,
            is_spot: lease.is_spot && (lease.counts() || waits),
            is_reclaimed: lease.is_reclaimed,
            has_passed: !lease.passed.is_empty(),
            is_interruptible: lease.is_interruptible(),
            passed: match lease.counts() {
                true => lease.passed.clone(),
                false => BTreeSet::new(),
            },
        }
    }
}

/// Indexes of leases, and sums over them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LeaseIndex {
    by_owner: BTreeMap<ClientId, BTreeSet<LeaseId>>,
    by_worker: BTreeMap<WorkerId, BTreeSet<LeaseId>>,
    unsettled: BTreeSet<LeaseId>,
    /// Those of them that are not patient.
    restless: BTreeSet<LeaseId>,
    /// The others of them.
    patient: PatientLeases,
    ends: BTreeSet<(Timestamp, LeaseId)>,
    time_over: BTreeSet<(Timestamp, LeaseId)>,
    unclaimed: usize,
    kept: BTreeMap<WorkerId, usize>,
    /// The workers of which `kept` has changed since these were taken last.
    changed_keepers: BTreeSet<WorkerId>,
    handing_over: BTreeSet<LeaseId>,
    held: BTreeMap<WorkerId, usize>,
    /// The number of leases whose snapshots each worker holds.
    holding: BTreeMap<WorkerId, usize>,
    /// The leases that have passed the reservation of each request.
    passing: BTreeMap<LeaseId, BTreeSet<LeaseId>>,
    /// The workers that have got room for further snapshots of leases, or have none any more, since these were taken
    /// last.
    changed_room: BTreeSet<WorkerId>,
    /// The leases that count as what each tenant has, without spot leases, in the order of their grants.
    by_tenant: BTreeMap<TenantName, BTreeSet<(Timestamp, LeaseId)>>,
    /// The tenants of which `by_tenant` may have changed since these were taken last.
    changed_guarantees: BTreeSet<TenantName>,
    used: BTreeMap<TenantName, Amounts>,
    /// What each tenant has in spot leases.
    used_for_spot: BTreeMap<TenantName, Amounts>,
    /// The spot leases that have devices or wait for some.
    spot: BTreeSet<LeaseId>,
    /// The leases that were suspended for requests, and have passed reservations.
    reclaimed: BTreeSet<LeaseId>,
    /// The leases that run, and may be suspended or end if their devices are needed.
    interruptible: BTreeSet<LeaseId>,
    /// The tenants of which `used` has changed since these were taken last.
    changed_tenants: BTreeSet<TenantName>,
    /// Rises whenever a tenant has something else than before, or leases have passed other reservations.
    used_version: u64,
}

impl LeaseIndex {
    /// Replaces the keys `before` of a lease by `keys`.
    pub(super) fn replace(&mut self, id: LeaseId, before: &Keys, keys: &Keys) {
        self.count(id, before, false);
        self.count(id, keys, true);
        let have_others_passed =
            before.passed != keys.passed || before.is_reclaimed != keys.is_reclaimed;
        self.used_version += u64::from(have_others_passed);
        let granted_at = [before, keys].map(|it| (it.is_spot, it.granted_at));
        if before.charge != keys.charge || granted_at[0] != granted_at[1] {
            let charges = before.charge.iter().chain(&keys.charge);
            let tenants = charges.map(|(tenant, _)| tenant.clone());
            self.changed_guarantees.extend(tenants);
        }
        if (&before.charge, before.is_spot) != (&keys.charge, keys.is_spot) {
            self.used_version += 1;
            let charges = before.charge.iter().chain(&keys.charge);
            let tenants = charges.map(|(tenant, _)| tenant.clone());
            self.changed_tenants.extend(tenants);
            for (used, counts) in [
                (&mut self.used, (true, true)),
                (&mut self.used_for_spot, (before.is_spot, keys.is_spot)),
            ] {
                if let Some((tenant, charge)) = keys.charge.as_ref().filter(|_| counts.1) {
                    used.entry(tenant.clone()).or_default().add(charge);
                }
                if let Some((tenant, charge)) = before.charge.as_ref().filter(|_| counts.0) {
                    subtract(used, tenant, charge);
                }
            }
        }
    }

    /// Adds a lease to the sets and counts, or removes it from them.
    fn count(&mut self, id: LeaseId, keys: &Keys, is_added: bool) {
        let change = |set: &mut BTreeSet<LeaseId>, is_member: bool| {
            if is_member {
                match is_added {
                    true => set.insert(id),
                    false => set.remove(&id),
                };
            }
        };
        change(&mut self.unsettled, keys.is_unsettled);
        change(
            &mut self.restless,
            keys.is_unsettled && keys.patience.is_none(),
        );
        change(&mut self.spot, keys.is_spot);
        change(&mut self.reclaimed, keys.is_reclaimed && keys.has_passed);
        change(&mut self.interruptible, keys.is_interruptible);
        let is_handing_over = keys.is_suspended && !keys.keepers.is_empty();
        change(&mut self.handing_over, is_handing_over);
        if let Some(owner) = keys.owner {
            match is_added {
                true => by_key::insert(&mut self.by_owner, owner, id),
                false => by_key::remove(&mut self.by_owner, &owner, &id),
            }
        }
        if let Some(patience) = &keys.patience {
            self.patient.count(id, patience, is_added);
        }
        if let Some((tenant, _)) = keys.charge.as_ref().filter(|_| !keys.is_spot) {
            let granted = (keys.granted_at, id);
            match is_added {
                true => by_key::insert(&mut self.by_tenant, tenant.clone(), granted),
                false => by_key::remove(&mut self.by_tenant, tenant, &granted),
            }
        }
        for worker in &keys.workers {
            match is_added {
                true => by_key::insert(&mut self.by_worker, *worker, id),
                false => by_key::remove(&mut self.by_worker, worker, &id),
            }
        }
        if let Some(at) = keys.ends_at {
            match is_added {
                true => self.ends.insert((at, id)),
                false => self.ends.remove(&(at, id)),
            };
        }
        if let Some(at) = keys.time_over_at {
            match is_added {
                true => self.time_over.insert((at, id)),
                false => self.time_over.remove(&(at, id)),
            };
        }
        for worker in &keys.keepers {
            match is_added {
                true => by_key::increment(&mut self.kept, *worker),
                false => by_key::decrement(&mut self.kept, worker),
            }
            self.changed_keepers.insert(*worker);
        }
        for worker in &keys.held_by {
            match is_added {
                true => by_key::increment(&mut self.held, *worker),
                false => by_key::decrement(&mut self.held, worker),
            }
        }
        for worker in &keys.holders {
            let had_room = self.holding(*worker) < MAX_HELD;
            match is_added {
                true => by_key::increment(&mut self.holding, *worker),
                false => by_key::decrement(&mut self.holding, worker),
            }
            if had_room != (self.holding(*worker) < MAX_HELD) {
                self.changed_room.insert(*worker);
            }
        }
        for request in &keys.passed {
            match is_added {
                true => by_key::insert(&mut self.passing, *request, id),
                false => by_key::remove(&mut self.passing, request, &id),
            }
        }
        match (keys.is_unclaimed, is_added) {
            (true, true) => self.unclaimed += 1,
            (true, false) => self.unclaimed -= 1,
            (false, _) => {}
        }
    }

    /// Returns the leases of a client.
    pub(super) fn owned_by(&self, client: ClientId) -> impl Iterator<Item = LeaseId> {
        self.by_owner.get(&client).into_iter().flatten().copied()
    }

    /// Returns the leases that have devices of a worker, or snapshots, or of which it has reported something.
    pub(crate) fn of_worker(&self, worker: WorkerId) -> impl Iterator<Item = LeaseId> {
        self.by_worker.get(&worker).into_iter().flatten().copied()
    }

    /// Returns the leases that wait for devices, and those that are suspended and whose client does not know it
    /// yet.
    pub(crate) fn unsettled(&self) -> impl Iterator<Item = LeaseId> {
        self.unsettled.iter().copied()
    }

    /// Returns those of the [unsettled](Self::unsettled) leases for which something may have to be done, although there
    /// are no free devices for them.
    pub(crate) fn restless(&self) -> impl Iterator<Item = LeaseId> {
        self.restless.iter().copied()
    }

    /// Returns the others of the unsettled leases.
    pub(crate) fn patient(&self) -> &PatientLeases {
        &self.patient
    }

    /// Returns the times at which leases end whose client or worker is away, the earliest first.
    pub(crate) fn ends(&self) -> impl Iterator<Item = (Timestamp, LeaseId)> {
        self.ends.iter().copied()
    }

    /// Returns the times at which leases will have had devices for as long as they may, the earliest first.
    pub(crate) fn time_over(&self) -> impl Iterator<Item = (Timestamp, LeaseId)> {
        self.time_over.iter().copied()
    }

    /// Returns the leases that count as what a tenant has, without spot leases, in the order of their grants.
    pub(crate) fn of_tenant(&self, tenant: &TenantName) -> impl Iterator<Item = LeaseId> {
        let leases = self.by_tenant.get(tenant).into_iter().flatten();
        leases.map(|(_, id)| *id)
    }

    /// Returns the tenants of which leases that count towards a guarantee may be others than at the last call.
    pub(super) fn take_changed_guarantees(&mut self) -> BTreeSet<TenantName> {
        std::mem::take(&mut self.changed_guarantees)
    }

    /// Returns the workers that have got room to hold snapshots since the last call, or have none any more.
    pub(super) fn take_changed_room(&mut self) -> BTreeSet<WorkerId> {
        std::mem::take(&mut self.changed_room)
    }

    /// Returns the leases that run, and may be suspended or end if their devices are needed.
    pub(crate) fn interruptible(&self) -> impl Iterator<Item = LeaseId> {
        self.interruptible.iter().copied()
    }

    /// Returns whether there are leases whose tenant is not known yet.
    pub(crate) fn has_unclaimed(&self) -> bool {
        self.unclaimed > 0
    }

    /// Returns the number of parts of leases whose snapshots a worker keeps.
    pub(crate) fn kept(&self, worker: WorkerId) -> usize {
        self.kept.get(&worker).copied().unwrap_or_default()
    }

    /// Returns the suspended leases whose snapshots a worker hands over to another one.
    pub(crate) fn handing_over(&self) -> impl Iterator<Item = LeaseId> {
        self.handing_over.iter().copied()
    }

    /// Returns the tenants of which `used` has changed since the last call.
    pub(super) fn take_changed_tenants(&mut self) -> BTreeSet<TenantName> {
        std::mem::take(&mut self.changed_tenants)
    }

    /// Returns the workers that keep the snapshots of more or fewer parts than at the last call.
    pub(super) fn take_changed_keepers(&mut self) -> BTreeSet<WorkerId> {
        std::mem::take(&mut self.changed_keepers)
    }

    /// Returns the number of suspended leases of which a worker has snapshots, or is to get some.
    pub(crate) fn held(&self, worker: WorkerId) -> usize {
        self.held.get(&worker).copied().unwrap_or_default()
    }

    /// Returns the number of leases whose snapshots a worker holds.
    pub(crate) fn holding(&self, worker: WorkerId) -> usize {
        self.holding.get(&worker).copied().unwrap_or_default()
    }

    /// Returns the leases that have devices and have passed the reservation of a request.
    pub(crate) fn passing(&self, request: LeaseId) -> impl Iterator<Item = LeaseId> {
        self.passing.get(&request).into_iter().flatten().copied()
    }

    /// Returns the requests whose reservations leases have passed that have devices, each with these.
    pub(crate) fn passed(&self) -> impl Iterator<Item = (&LeaseId, &BTreeSet<LeaseId>)> {
        self.passing.iter()
    }

    /// Returns what each tenant has that has something.
    pub(crate) fn used(&self) -> &BTreeMap<TenantName, Amounts> {
        &self.used
    }

    /// Returns what each tenant has in spot leases.
    pub(crate) fn used_for_spot(&self) -> &BTreeMap<TenantName, Amounts> {
        &self.used_for_spot
    }

    /// Returns the leases that were suspended for requests and wait to go on, and have passed reservations.
    pub(crate) fn reclaimed(&self) -> impl Iterator<Item = LeaseId> {
        self.reclaimed.iter().copied()
    }

    /// Returns the spot leases that have devices or wait for some.
    pub(crate) fn spot(&self) -> impl Iterator<Item = LeaseId> {
        self.spot.iter().copied()
    }

    /// Returns whether there are spot leases that have devices or wait for some.
    pub(crate) fn has_spot(&self) -> bool {
        !self.spot.is_empty()
    }

    /// Returns a number that rises whenever a tenant has something else than before, or leases have passed other
    /// reservations.
    pub(crate) fn used_version(&self) -> u64 {
        self.used_version
    }
}

/// Takes devices from those of a tenant, to which they were added before.
fn subtract(used: &mut BTreeMap<TenantName, Amounts>, tenant: &TenantName, charge: &Amounts) {
    if let Some(of_tenant) = used.get_mut(tenant) {
        of_tenant.subtract(charge);
        if of_tenant.is_nothing() {
            used.remove(tenant);
        }
    }
}

#[cfg(test)]
impl LeaseIndex {
    pub(crate) fn changed_guarantees(&self) -> &BTreeSet<TenantName> {
        &self.changed_guarantees
    }

    pub(crate) fn changed_room(&self) -> &BTreeSet<WorkerId> {
        &self.changed_room
    }

    /// Returns the index without what depends on its past.
    pub(super) fn without_version(&self) -> Self {
        Self {
            used_version: 0,
            changed_keepers: BTreeSet::new(),
            changed_tenants: BTreeSet::new(),
            changed_guarantees: BTreeSet::new(),
            changed_room: BTreeSet::new(),
            ..self.clone()
        }
    }
}
