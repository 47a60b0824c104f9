//! The tenants of a pool: their guarantees, limits and weights, and whose request is next.
//!
//! Nothing here knows leases, clients or time. The rules:
//!
//! - A tenant has at most the devices of its *limit*. A request that would exceed it waits, although there
//!   may be free devices.
//! - Requests within their tenant's *guarantee* get devices before all others. A request that names no kind
//!   is within the guarantee if each kind that it could get is.
//! - The next of the others is one of the tenant that has least: whose *dominant share*, together with the
//!   average of the shares that it has had (`past.rs`), divided by its *weight*, is smallest (Ghodsi et al.,
//!   "Dominant Resource Fairness: Fair Allocation of Multiple Resource Types", NSDI 2011). The resources are
//!   the devices of each kind, all devices, and their memory.
//! - Requests for spot leases come after all others, and such a lease counts a quarter in the share of its
//!   tenant.
//! - Of requests of one tenant, that of the highest priority is next, and then the earliest.
//!
//! A request that does not fit is passed over, and does not count for its tenant. In the order that people
//! see, each request counts as granted for those behind it, so the requests of several tenants are in turns.

mod order;
mod past;

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tensord_proto::share::WHOLE_PERMILLE;

use crate::device::{Demand, DeviceSpec, Memory, Share};

pub(crate) use order::{Guaranteed, Kinds, KnownGuaranteed, Shares, guaranteed, order};
pub(crate) use past::PastUse;

/// The name of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantName(Arc<str>);

impl TenantName {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for TenantName {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl Borrow<str> for TenantName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TenantName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The guarantee, limit and weight of each tenant of a pool. A tenant that is not among them has
/// [`TenantPolicy::default`].
pub type Policy = BTreeMap<TenantName, TenantPolicy>;

/// The guarantee, limit and weight of a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantPolicy {
    /// By how much the tenant's share is divided before it is compared with those of others. At least 1.
    pub weight: u32,
    /// The number of devices of each kind for which its requests come before those beyond a guarantee.
    pub guaranteed: BTreeMap<String, u32>,
    /// What it may have at a time.
    pub limit: TenantLimit,
}

/// The policy of a tenant that a pool's [`Policy`] does not have.
static DEFAULT_POLICY: TenantPolicy = TenantPolicy {
    weight: 1,
    guaranteed: BTreeMap::new(),
    limit: TenantLimit {
        devices: BTreeMap::new(),
        memory_bytes: None,
    },
};

impl Default for TenantPolicy {
    fn default() -> Self {
        DEFAULT_POLICY.clone()
    }
}

/// Returns the policy of a tenant.
pub(crate) fn policy_of<'a>(policy: &'a Policy, tenant: &TenantName) -> &'a TenantPolicy {
    policy.get(tenant).unwrap_or(&DEFAULT_POLICY)
}

/// What a tenant may have at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantLimit {
    /// The largest number of devices of each kind; any number of those of other kinds.
    pub devices: BTreeMap<String, u32>,
    /// The largest sum of the devices' memory, in bytes, if it is limited.
    pub memory_bytes: Option<u64>,
}

impl TenantPolicy {
    /// Returns whether a tenant that has `used`, of that `spot` in spot leases, is guaranteed `more`, too.
    pub(crate) fn guarantees(&self, used: &Amounts, spot: &Amounts, more: &Amounts) -> bool {
        more.permille.iter().all(|(kind, count)| {
            let most = self.guaranteed.get(kind).copied().unwrap_or_default();
            let of_kind = |it: &Amounts| it.permille.get(kind).copied().unwrap_or_default();
            let has = of_kind(used).saturating_sub(of_kind(spot));
            has + count <= in_permille(most)
        })
    }

    /// Returns whether a tenant that has `used`, of that `spot` in spot leases, has less than its guarantee of some kind.
    pub(crate) fn guarantees_more(&self, used: &Amounts, spot: &Amounts) -> bool {
        self.guaranteed.iter().any(|(kind, most)| {
            let of_kind = |it: &Amounts| it.permille.get(kind).copied().unwrap_or_default();
            of_kind(used).saturating_sub(of_kind(spot)) < in_permille(*most)
        })
    }
}

impl fmt::Display for TenantLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = self.devices.iter();
        let devices = devices.map(|(kind, max)| format!("{max} {kind}"));
        let memory = self.memory_bytes.map(|max| Memory(max).to_string());
        let all: Vec<_> = devices.chain(memory).collect();
        match all.is_empty() {
            true => write!(f, "the tenant has no limit"),
            false => write!(f, "the limit of the tenant is {}", all.join(", ")),
        }
    }
}

impl TenantLimit {
    /// Returns whether a tenant that has `used` may get as many devices like this one as are demanded, or such a
    /// share of it. If each of the devices of a lease passes, the lease does, too.
    pub(crate) fn allows(&self, used: &Amounts, device: &DeviceSpec, demand: &Demand) -> bool {
        let count = u64::from(demand.devices.max(1));
        let left = self.devices.get(&device.kind).map(|max| {
            let has = used.permille.get(&device.kind).copied();
            in_permille(*max).saturating_sub(has.unwrap_or_default())
        });
        let bytes_left = self
            .memory_bytes
            .map(|max| u128::from(max).saturating_sub(used.memory_bytes));
        let needed_bytes = u128::from(demand.memory_of(device)) * u128::from(count);
        left.is_none_or(|left| left >= count * demand.counted_permille(device))
            && bytes_left.is_none_or(|left| left >= needed_bytes)
    }

    /// Returns whether a tenant that has `used` may have `more`, too.
    pub(crate) fn allows_all(&self, used: &Amounts, more: &Amounts) -> bool {
        let mut all = used.clone();
        all.add(more);
        let is_within = |(kind, max): (&String, &u32)| {
            // A tenant keeps what it has when its limit becomes lower.
            let added = more.permille.get(kind).copied().unwrap_or_default();
            let all = all.permille.get(kind).copied();
            added == 0 || all.unwrap_or_default() <= in_permille(*max)
        };
        self.devices.iter().all(is_within)
            && self
                .memory_bytes
                .is_none_or(|max| all.memory_bytes <= u128::from(max))
    }
}

/// The numbers of leases and requests of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantCounts {
    /// The leases that have devices, or are to get as many as they had before all others.
    pub leases: usize,
    /// The leases that are suspended, or were and wait for devices.
    pub suspended: usize,
    /// The requests that wait.
    pub requests: usize,
}

/// Devices and shares of devices that a lease or a tenant has, or the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amounts {
    /// The devices of each kind, in thousandths of one.
    pub permille: BTreeMap<String, u64>,
    /// The devices of all kinds, in thousandths of one.
    pub all_permille: u64,
    /// The sum of their memory, in bytes.
    pub memory_bytes: u128,
}

/// Returns a number of devices in thousandths.
fn in_permille(devices: u32) -> u64 {
    u64::from(devices) * u64::from(WHOLE_PERMILLE)
}

/// The part of its devices for which a spot lease counts in the share of its tenant.
const SPOT_CHARGE: f64 = 0.25;

/// No devices.
pub(crate) static NOTHING: Amounts = Amounts {
    permille: BTreeMap::new(),
    all_permille: 0,
    memory_bytes: 0,
};

impl Amounts {
    /// Returns the sum of these devices.
    #[cfg(test)]
    pub(crate) fn of<'a>(devices: impl IntoIterator<Item = &'a DeviceSpec>) -> Self {
        let mut amounts = Self::default();
        for device in devices {
            amounts.add_devices(Some(&device.kind), 1, device.memory_bytes);
        }
        amounts
    }

    /// Adds devices of a kind, or of a kind that is not known, with this memory each.
    pub(crate) fn add_devices(&mut self, kind: Option<&str>, count: u64, memory_bytes: u64) {
        let memory_bytes = u128::from(count) * u128::from(memory_bytes);
        self.add_permille(kind, count * u64::from(WHOLE_PERMILLE), memory_bytes);
    }

    /// Adds thousandths of devices of a kind, or of a kind that is not known, with this memory together.
    pub(crate) fn add_permille(&mut self, kind: Option<&str>, permille: u64, memory_bytes: u128) {
        match kind.map(|kind| (kind, self.permille.get_mut(kind))) {
            Some((_, Some(known))) => *known += permille,
            Some((kind, None)) => drop(self.permille.insert(kind.to_owned(), permille)),
            None => {}
        }
        self.all_permille += permille;
        self.memory_bytes += memory_bytes;
    }

    /// Adds a device, or a share of it.
    pub(crate) fn add_share(&mut self, device: &DeviceSpec, share: Option<Share>) {
        match share {
            None => self.add_devices(Some(&device.kind), 1, device.memory_bytes),
            Some(share) => {
                let permille = share.counted_permille(device);
                self.add_permille(Some(&device.kind), permille, share.memory_bytes.into());
            }
        }
    }

    /// Adds other devices.
    pub(crate) fn add(&mut self, other: &Self) {
        for (kind, count) in &other.permille {
            match self.permille.get_mut(kind) {
                Some(known) => *known += count,
                None => drop(self.permille.insert(kind.clone(), *count)),
            }
        }
        self.all_permille += other.all_permille;
        self.memory_bytes += other.memory_bytes;
    }

    /// Takes devices away that were added before.
    pub(crate) fn subtract(&mut self, other: &Self) {
        for (kind, count) in &other.permille {
            if let Some(known) = self.permille.get_mut(kind) {
                *known -= count;
                if *known == 0 {
                    self.permille.remove(kind);
                }
            }
        }
        self.all_permille -= other.all_permille;
        self.memory_bytes -= other.memory_bytes;
    }

    /// Returns what a request with this demand counts as, in the check of a limit, if it could get these devices: as
    /// many as it demands of the largest of them, as in [`TenantLimit::allows`].
    pub(crate) fn most_of<'a>(
        demand: &Demand,
        devices: impl IntoIterator<Item = &'a DeviceSpec>,
    ) -> Self {
        let count = u64::from(demand.devices.max(1));
        let mut most = Self::default();
        for device in devices {
            let permille = count * demand.counted_permille(device);
            let of_kind = most.permille.entry(device.kind.clone()).or_default();
            *of_kind = permille.max(*of_kind);
            let bytes = u128::from(demand.memory_of(device)) * u128::from(count);
            most.memory_bytes = bytes.max(most.memory_bytes);
        }
        most.all_permille = most.permille.values().sum();
        most
    }

    /// Returns whether these are no devices.
    pub(crate) fn is_nothing(&self) -> bool {
        self.all_permille == 0
    }

    /// Returns the largest of the parts that these are of the resources of the pool: 0 for none, 1 for all
    /// devices of a kind. Those among them in `spot` leases count for less.
    pub(crate) fn dominant_share(&self, spot: &Self, pool: &Self) -> f64 {
        let part = |used: f64, spot: f64, total: f64| match total > 0.0 {
            true => (used - (1.0 - SPOT_CHARGE) * spot).max(0.0) / total,
            false => 0.0,
        };
        let of = |amounts: &Self, kind| {
            let count = amounts.permille.get(kind).copied();
            count.unwrap_or_default() as f64
        };
        let kinds = self.permille.iter();
        let kinds = kinds.map(|(kind, used)| part(*used as f64, of(spot, kind), of(pool, kind)));
        let others = [
            part(
                self.all_permille as f64,
                spot.all_permille as f64,
                pool.all_permille as f64,
            ),
            part(
                self.memory_bytes as f64,
                spot.memory_bytes as f64,
                pool.memory_bytes as f64,
            ),
        ];
        kinds.chain(others).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cuda, demand_of, flex};

    fn limit(devices: &[(&str, u32)], gib: Option<u64>) -> TenantLimit {
        let devices = devices.iter().map(|(kind, max)| ((*kind).into(), *max));
        TenantLimit {
            devices: devices.collect(),
            memory_bytes: gib.map(|gib| gib << 30),
        }
    }

    #[test]
    fn a_limit_bounds_devices_of_its_kinds_and_memory() {
        let used = Amounts::of(&[cuda(16), flex(4)]);
        let cases = [
            (limit(&[], None), cuda(80), 9, true),
            (limit(&[("cuda", 3)], None), cuda(16), 2, true),
            (limit(&[("cuda", 3)], None), cuda(16), 3, false),
            (limit(&[("cuda", 0)], None), cuda(16), 1, false),
            (limit(&[("cuda", 0)], None), flex(16), 9, true),
            (limit(&[], Some(36)), cuda(8), 2, true),
            (limit(&[], Some(35)), cuda(8), 2, false),
            // It has more than it may.
            (limit(&[], Some(1)), cuda(1), 1, false),
        ];
        for (limit, device, count, expected) in cases {
            let allowed = limit.allows(&used, &device, &demand_of(count, None));
            assert_eq!(allowed, expected, "{count} of {device:?} within {limit:?}");
            let more = vec![device; count as usize];
            let all = limit.allows_all(&used, &Amounts::of(&more));
            assert_eq!(all, expected, "{more:?} within {limit:?}");
        }
    }

    #[test]
    fn a_lowered_limit_of_one_kind_does_not_keep_another_kind() {
        let used = Amounts::of(&[cuda(1), cuda(1)]);
        let limit = limit(&[("cuda", 1), ("flex", 1)], None);
        assert!(limit.allows_all(&used, &Amounts::of(&[flex(1)])));
        assert!(!limit.allows_all(&used, &Amounts::of(&[cuda(1)])));
    }

    #[test]
    fn the_dominant_share_is_that_of_the_scarcest_resource() {
        let pool = Amounts::of(&[cuda(80), cuda(80), flex(20), flex(20)]);
        let share = |devices: &[DeviceSpec]| Amounts::of(devices).dominant_share(&NOTHING, &pool);
        assert_eq!(share(&[]), 0.0);
        assert_eq!(share(&[flex(20)]), 0.5);
        assert_eq!(share(&[flex(20), flex(20)]), 1.0);
        assert_eq!(share(&[cuda(80), flex(20)]), 0.5);
        // Of a kind that the pool does not have any more.
        assert_eq!(share(&[crate::tests::device("rocm", 200)]), 1.0);
        assert_eq!(NOTHING.dominant_share(&NOTHING, &NOTHING), 0.0);
    }
}
