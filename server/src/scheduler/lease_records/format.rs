//! How the record of a lease is written: as JSON, whose fields later versions may add to.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};
use tensord_proto::{
    grant::GrantNumber,
    ids::{ClientId, StoreId, WorkerId},
    share::{self, DeviceShare, WHOLE_PERMILLE},
};
use tensord_scheduler::{
    Amounts, DeviceRef, Durability, GrantedDevice, LeaseRecord, RecordedKeeper, RecordedStanding,
    RecordedStore, Requirement, Share, SuspendedPart, Suspender, TenantName,
};

use crate::scheduler::access::millis;

/// Returns the bytes of a record.
pub(super) fn encode(record: &LeaseRecord) -> Vec<u8> {
    serde_json::to_vec(&StoredLease::from(record))
        .expect("numbers and texts can be written as JSON")
}

/// Returns the record that bytes stand for.
///
/// # Errors
///
/// If they are not a record that this version knows.
pub(super) fn decode(bytes: &[u8]) -> Result<LeaseRecord, serde_json::Error> {
    serde_json::from_slice::<StoredLease>(bytes).map(LeaseRecord::from)
}

#[derive(Serialize, Deserialize)]
struct StoredLease {
    owner: u64,
    /// Records of earlier versions have none of these three.
    #[serde(default)]
    tenant: Option<String>,
    #[serde(default)]
    charge: StoredAmounts,
    #[serde(default)]
    is_reclaimed: bool,
    epoch: u64,
    /// Records of earlier versions have none.
    #[serde(default)]
    durability: StoredDurability,
    recover_within_ms: Option<u64>,
    /// Records of earlier versions have none of these three.
    #[serde(default)]
    time_left_ms: Option<u64>,
    #[serde(default)]
    is_spot: bool,
    #[serde(default)]
    may_end: bool,
    standing: StoredStanding,
    devices: Vec<StoredDevice>,
    keepers: Vec<StoredKeeper>,
    /// The snapshot stores that have the lease's snapshots. Records of earlier versions have none.
    #[serde(default)]
    stored: Vec<StoredStore>,
    parts: Vec<StoredPart>,
}

#[derive(Default, Serialize, Deserialize)]
struct StoredAmounts {
    /// Whole devices by kind, in records of earlier versions only.
    #[serde(default, skip_serializing)]
    devices: BTreeMap<String, u64>,
    /// Thousandths of devices by kind.
    #[serde(default)]
    permille: BTreeMap<String, u64>,
    memory_bytes: u64,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoredDurability {
    Off,
    #[default]
    Auto,
    Exact,
    Continue,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoredStanding {
    Running,
    Lost { reason: String },
    SuspendedByAdministrator,
    SuspendedByClient,
    SuspendedForIdleness,
    Resuming { cause: Option<String> },
}

#[derive(Serialize, Deserialize)]
struct StoredDevice {
    worker: u64,
    index: u32,
    /// Term and count.
    grant: (u64, u64),
    /// Records of earlier versions have none: they are of whole devices.
    #[serde(default)]
    share: Option<StoredShare>,
    /// The lane of the share.
    #[serde(default)]
    lane: u32,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct StoredShare {
    permille: u32,
    memory_bytes: u64,
}

#[derive(Serialize, Deserialize)]
struct StoredRequirement {
    fingerprint: [u8; 16],
    /// Records of earlier versions have none.
    #[serde(default)]
    kind: Option<String>,
    smallest_bytes: u64,
    largest_bytes: u64,
    /// Records of earlier versions have none: they are of whole devices.
    #[serde(default)]
    share: Option<StoredShare>,
}

#[derive(Serialize, Deserialize)]
struct StoredKeeper {
    source: u64,
    #[serde(default)]
    part: u32,
    keeper: u64,
    #[serde(default)]
    assignment: u64,
    requirement: StoredRequirement,
    is_kept: bool,
}

#[derive(Serialize, Deserialize)]
struct StoredStore {
    source: u64,
    store: u64,
    requirement: StoredRequirement,
}

#[derive(Serialize, Deserialize)]
struct StoredPart {
    source: u64,
    devices: usize,
    requirement: StoredRequirement,
    holders: Vec<u64>,
    #[serde(default)]
    store: Option<u64>,
}

impl From<&LeaseRecord> for StoredLease {
    fn from(record: &LeaseRecord) -> Self {
        let device = |it: &GrantedDevice| StoredDevice {
            worker: it.device_ref.worker.0,
            index: it.device_ref.index,
            grant: (it.grant.term, it.grant.count),
            share: it.share.map(|share| Share::from(share).into()),
            lane: share::lane(it.share),
        };
        let keeper = |it: &RecordedKeeper| StoredKeeper {
            source: it.source.0,
            part: it.part,
            keeper: it.keeper.0,
            assignment: it.assignment,
            requirement: it.requirement.clone().into(),
            is_kept: it.is_kept,
        };
        let part = |it: &SuspendedPart| StoredPart {
            source: it.source.0,
            devices: it.devices,
            requirement: it.requirement.clone().into(),
            holders: it.holders.iter().map(|holder| holder.0).collect(),
            store: it.store.map(|store| store.0),
        };
        let stored = |it: &RecordedStore| StoredStore {
            source: it.source.0,
            store: it.store.0,
            requirement: it.requirement.clone().into(),
        };
        Self {
            owner: record.owner.0,
            tenant: record.tenant.as_ref().map(TenantName::to_string),
            charge: StoredAmounts {
                devices: BTreeMap::new(),
                permille: record.charge.permille.clone(),
                memory_bytes: record.charge.memory_bytes.try_into().unwrap_or(u64::MAX),
            },
            is_reclaimed: record.is_reclaimed,
            epoch: record.epoch,
            durability: record.durability.into(),
            recover_within_ms: record.recover_within.map(millis),
            time_left_ms: record.time_left.map(millis),
            is_spot: record.is_spot,
            may_end: record.may_end,
            standing: (&record.standing).into(),
            devices: record.devices.iter().map(device).collect(),
            keepers: record.keepers.iter().map(keeper).collect(),
            stored: record.stored.iter().map(stored).collect(),
            parts: record.parts.iter().map(part).collect(),
        }
    }
}

impl From<StoredLease> for LeaseRecord {
    fn from(stored: StoredLease) -> Self {
        let device = |it: StoredDevice| GrantedDevice {
            device_ref: DeviceRef {
                worker: WorkerId(it.worker),
                index: it.index,
            },
            grant: GrantNumber {
                term: it.grant.0,
                count: it.grant.1,
            },
            share: it.share.map(|share| DeviceShare {
                permille: share.permille,
                memory_bytes: share.memory_bytes,
                lane: it.lane,
            }),
        };
        let keeper = |it: StoredKeeper| RecordedKeeper {
            source: WorkerId(it.source),
            part: it.part,
            keeper: WorkerId(it.keeper),
            assignment: it.assignment,
            requirement: it.requirement.into(),
            is_kept: it.is_kept,
        };
        let part = |it: StoredPart| SuspendedPart {
            source: WorkerId(it.source),
            devices: it.devices,
            requirement: it.requirement.into(),
            holders: it.holders.into_iter().map(WorkerId).collect(),
            store: it.store.map(StoreId),
        };
        let recorded_store = |it: StoredStore| RecordedStore {
            source: WorkerId(it.source),
            store: StoreId(it.store),
            requirement: it.requirement.into(),
        };
        Self {
            owner: ClientId(stored.owner),
            tenant: stored.tenant.as_deref().map(TenantName::from),
            charge: stored.charge.into(),
            is_reclaimed: stored.is_reclaimed,
            epoch: stored.epoch,
            durability: stored.durability.into(),
            recover_within: stored.recover_within_ms.map(Duration::from_millis),
            time_left: stored.time_left_ms.map(Duration::from_millis),
            is_spot: stored.is_spot,
            may_end: stored.may_end,
            standing: stored.standing.into(),
            devices: stored.devices.into_iter().map(device).collect(),
            keepers: stored.keepers.into_iter().map(keeper).collect(),
            stored: stored.stored.into_iter().map(recorded_store).collect(),
            parts: stored.parts.into_iter().map(part).collect(),
        }
    }
}

impl From<StoredAmounts> for Amounts {
    fn from(stored: StoredAmounts) -> Self {
        let StoredAmounts {
            devices,
            mut permille,
            memory_bytes,
        } = stored;
        for (kind, count) in devices {
            let of_kind = permille.entry(kind).or_default();
            *of_kind = of_kind.saturating_add(count.saturating_mul(WHOLE_PERMILLE.into()));
        }
        Self {
            all_permille: permille.values().fold(0, |all, it| all.saturating_add(*it)),
            permille,
            memory_bytes: memory_bytes.into(),
        }
    }
}

impl From<Share> for StoredShare {
    fn from(share: Share) -> Self {
        Self {
            permille: share.permille,
            memory_bytes: share.memory_bytes,
        }
    }
}

impl From<StoredShare> for Share {
    fn from(stored: StoredShare) -> Self {
        Self {
            permille: stored.permille,
            memory_bytes: stored.memory_bytes,
        }
    }
}

impl From<Durability> for StoredDurability {
    fn from(durability: Durability) -> Self {
        match durability {
            Durability::Off => Self::Off,
            Durability::Auto => Self::Auto,
            Durability::Exact => Self::Exact,
            Durability::Continue => Self::Continue,
        }
    }
}

impl From<StoredDurability> for Durability {
    fn from(stored: StoredDurability) -> Self {
        match stored {
            StoredDurability::Off => Self::Off,
            StoredDurability::Auto => Self::Auto,
            StoredDurability::Exact => Self::Exact,
            StoredDurability::Continue => Self::Continue,
        }
    }
}

impl From<&RecordedStanding> for StoredStanding {
    fn from(standing: &RecordedStanding) -> Self {
        match standing {
            RecordedStanding::Running => Self::Running,
            RecordedStanding::Lost(reason) => Self::Lost {
                reason: reason.clone(),
            },
            RecordedStanding::Suspended(Suspender::Administrator) => Self::SuspendedByAdministrator,
            RecordedStanding::Suspended(Suspender::Client) => Self::SuspendedByClient,
            RecordedStanding::Suspended(Suspender::Idleness) => Self::SuspendedForIdleness,
            RecordedStanding::Resuming(cause) => Self::Resuming {
                cause: cause.clone(),
            },
        }
    }
}

impl From<StoredStanding> for RecordedStanding {
    fn from(stored: StoredStanding) -> Self {
        match stored {
            StoredStanding::Running => Self::Running,
            StoredStanding::Lost { reason } => Self::Lost(reason),
            StoredStanding::SuspendedByAdministrator => Self::Suspended(Suspender::Administrator),
            StoredStanding::SuspendedByClient => Self::Suspended(Suspender::Client),
            StoredStanding::SuspendedForIdleness => Self::Suspended(Suspender::Idleness),
            StoredStanding::Resuming { cause } => Self::Resuming(cause),
        }
    }
}

impl From<Requirement> for StoredRequirement {
    fn from(requirement: Requirement) -> Self {
        let Requirement {
            fingerprint,
            kind,
            smallest_bytes,
            largest_bytes,
            share,
        } = requirement;
        Self {
            fingerprint,
            kind,
            smallest_bytes,
            largest_bytes,
            share: share.map(Into::into),
        }
    }
}

impl From<StoredRequirement> for Requirement {
    fn from(stored: StoredRequirement) -> Self {
        let StoredRequirement {
            fingerprint,
            kind,
            smallest_bytes,
            largest_bytes,
            share,
        } = stored;
        Self {
            fingerprint,
            kind,
            smallest_bytes,
            largest_bytes,
            share: share.map(Into::into),
        }
    }
}
