//! The tenants of the leases whose snapshots this worker keeps, and the memory that is reserved for each.

use std::{collections::BTreeMap, sync::Arc};

use tensord_proto::ids::PartId;

/// Thousandths of the whole.
const WHOLE_PERMILLE: u32 = 1000;

/// The tenants of leases of which there may be snapshots.
#[derive(Debug)]
pub(super) struct Tenants {
    /// The tenant of each part of a lease of which snapshots may be kept. The name is empty if it is not known.
    of_parts: BTreeMap<PartId, Arc<str>>,
    /// The bytes of snapshots that are being received, by tenant.
    receiving_bytes: BTreeMap<Arc<str>, u64>,
    /// What one tenant may use of the memory, in thousandths.
    most_permille: u32,
}

/// Memory that is reserved for a snapshot that is being received. Pass it to [`Tenants::release`].
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(super) struct Reserved {
    tenant: Arc<str>,
    size_bytes: u64,
}

impl Default for Tenants {
    fn default() -> Self {
        Self {
            of_parts: BTreeMap::new(),
            receiving_bytes: BTreeMap::new(),
            most_permille: WHOLE_PERMILLE,
        }
    }
}

impl Tenants {
    /// Sets what one tenant may use of the memory, in thousandths; 0 for all of it.
    pub(super) fn set_most(&mut self, permille: u32) {
        self.most_permille = match permille {
            1..WHOLE_PERMILLE => permille,
            _ => WHOLE_PERMILLE,
        };
    }

    /// Returns what one tenant may use of `max_bytes`.
    pub(super) fn most_of(&self, max_bytes: u64) -> u64 {
        let most = u128::from(max_bytes) * u128::from(self.most_permille);
        u64::try_from(most / u128::from(WHOLE_PERMILLE)).unwrap_or(max_bytes)
    }

    /// Records the tenant of a part of a lease. An empty name means that it is not known, and replaces no other.
    pub(super) fn set(&mut self, part: PartId, tenant: &str) {
        let known = self.of_parts.entry(part);
        let known = known.or_insert_with(|| tenant.into());
        if !tenant.is_empty() && **known != *tenant {
            *known = tenant.into();
        }
    }

    /// Returns the tenant of a part of a lease.
    pub(super) fn of(&self, part: PartId) -> Arc<str> {
        let known = self.of_parts.get(&part);
        known.cloned().unwrap_or_else(|| "".into())
    }

    /// Returns the parts of leases of a tenant.
    pub(super) fn parts_of<'a>(&'a self, tenant: &'a str) -> impl Iterator<Item = PartId> + 'a {
        let of_tenant = self.of_parts.iter().filter(move |(_, of)| &***of == tenant);
        of_tenant.map(|(part, _)| *part)
    }

    /// Forgets the tenant of a part of a lease, of which there are no snapshots any more.
    pub(super) fn forget(&mut self, part: PartId) {
        self.of_parts.remove(&part);
    }

    /// Reserves memory for a snapshot of a tenant.
    pub(super) fn reserve(&mut self, tenant: Arc<str>, size_bytes: u64) -> Reserved {
        *self.receiving_bytes.entry(tenant.clone()).or_default() += size_bytes;
        Reserved { tenant, size_bytes }
    }

    /// Releases reserved memory.
    pub(super) fn release(&mut self, reserved: Reserved) {
        let Reserved { tenant, size_bytes } = reserved;
        if let Some(of_tenant) = self.receiving_bytes.get_mut(&tenant) {
            *of_tenant -= size_bytes;
            if *of_tenant == 0 {
                self.receiving_bytes.remove(&tenant);
            }
        }
    }

    /// Returns the reserved bytes of a tenant.
    pub(super) fn reserved_by(&self, tenant: &str) -> u64 {
        self.receiving_bytes
            .get(tenant)
            .copied()
            .unwrap_or_default()
    }

    /// Returns the reserved bytes of all tenants.
    pub(super) fn reserved_bytes(&self) -> u64 {
        self.receiving_bytes.values().sum()
    }
}
