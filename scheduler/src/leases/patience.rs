//! Leases that were suspended for others, and wait for devices until there are some.
//!
//! There may be many of them. Nothing need be done for one, as its client knows that it waits, before there are as many
//! free devices of the kind that it needs. So they are by what they wait for.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::LeaseId;

use crate::by_key;
use crate::device::Requirement;
use crate::lease::{Lease, Standing};
use crate::tenants::TenantName;

/// What a patient lease waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Patience {
    tenant: TenantName,
    /// What the devices of its largest part must be like, and their number.
    needs: (Requirement, usize),
}

impl Patience {
    /// Returns what a lease waits for, if it is patient.
    pub(super) fn of(lease: &Lease) -> Option<Self> {
        let is_resumed = matches!(lease.standing, Standing::Resuming { cause: None, .. });
        let is_known = lease.is_reclaimed && lease.is_standing_reported;
        // Workers may be about to hand its snapshots over, or may do so again after a while.
        let is_handed_over = !lease.keepers.is_empty() || !lease.avoided.is_empty();
        // It can go on at further workers after a while.
        let has_excluded = !lease.excluded.is_empty();
        if !is_resumed || !is_known || is_handed_over || has_excluded {
            return None;
        }
        let largest = lease.parts.iter().max_by_key(|part| part.devices)?;
        Some(Self {
            tenant: lease.tenant.clone()?,
            needs: (largest.requirement.clone(), largest.devices),
        })
    }
}

/// The patient leases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PatientLeases {
    by_needs: BTreeMap<(Requirement, usize), BTreeSet<LeaseId>>,
    by_tenant: BTreeMap<TenantName, BTreeSet<LeaseId>>,
}

impl PatientLeases {
    /// Adds a lease, or removes it.
    pub(super) fn count(&mut self, id: LeaseId, patience: &Patience, is_added: bool) {
        let Patience { tenant, needs } = patience;
        match is_added {
            true => {
                by_key::insert(&mut self.by_needs, needs.clone(), id);
                by_key::insert(&mut self.by_tenant, tenant.clone(), id);
            }
            false => {
                by_key::remove(&mut self.by_needs, needs, &id);
                by_key::remove(&mut self.by_tenant, tenant, &id);
            }
        }
    }

    /// Returns the leases for which `has_free` returns true, of what devices must be like for them and how many each
    /// needs.
    pub(crate) fn with(
        &self,
        has_free: impl Fn(&Requirement, usize) -> bool,
    ) -> impl Iterator<Item = LeaseId> {
        let by_needs = self.by_needs.iter();
        let with = by_needs.filter(move |((requirement, count), _)| has_free(requirement, *count));
        with.flat_map(|(_, leases)| leases).copied()
    }

    /// Returns the leases of those tenants for which `is_wanted` returns true.
    pub(crate) fn of_tenants(
        &self,
        is_wanted: impl Fn(&TenantName) -> bool,
    ) -> impl Iterator<Item = LeaseId> {
        let by_tenant = self.by_tenant.iter();
        let wanted = by_tenant.filter(move |(tenant, _)| is_wanted(tenant));
        wanted.flat_map(|(_, leases)| leases).copied()
    }
}
