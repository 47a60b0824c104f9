//! What a scheduler must know of a durable lease to go on with it after a restart.
//!
//! Most leases need no record: after a restart, their clients claim them and their workers report
//! them. Nobody but the scheduler knows who keeps the snapshots of a lease, no worker runs one that is
//! suspended or lost, and the client of a lease that has moved may not know it yet. How long a lease may
//! wait is not in its client's token either.

use std::time::Duration;

use tensord_proto::ids::{ClientId, LeaseId, StoreId, WorkerId};

use crate::device::{Durability, Requirement};
use crate::event::{GrantedDevice, Suspender};
use crate::lease::{Keeper, Lease, Origin, Standing, StoredSessions, SuspendedPart};
use crate::reason::EndReason;
use crate::tenants::{Amounts, TenantName};
use crate::time::Timestamp;

/// The record of a lease. The driver keeps it, and passes it to
/// [`Engine::restore`](crate::Engine::restore) after a restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// The lease's client.
    pub owner: ClientId,
    /// The client's tenant, if it is known.
    pub tenant: Option<TenantName>,
    /// What the lease counts as: the devices that it was granted.
    pub charge: Amounts,
    /// Whether it was suspended for a request, and waits to go on.
    pub is_reclaimed: bool,
    /// Whether it is a spot lease.
    pub is_spot: bool,
    /// Whether it may end if its devices are reclaimed and it cannot be suspended.
    pub may_end: bool,
    /// How often the lease has moved to another worker.
    pub epoch: u64,
    /// Whether and where the lease goes on.
    pub durability: Durability,
    /// How long the lease may wait for devices after a worker or a process of it was lost; `None` for the
    /// pool's default.
    pub recover_within: Option<Duration>,
    /// For how long it may have devices, from when it had them last; `None` for any time.
    pub time_left: Option<Duration>,
    /// Whether the lease has devices, or why it has none.
    pub standing: RecordedStanding,
    /// The lease's devices, in the order of its ranks. Those of a lost worker are among them.
    pub devices: Vec<GrantedDevice>,
    /// Who keeps the snapshots of the sessions on each of the lease's workers.
    pub keepers: Vec<RecordedKeeper>,
    /// Which snapshot store has the snapshots of the sessions on each of the lease's workers.
    pub stored: Vec<RecordedStore>,
    /// What the lease had on each worker, if it is suspended.
    pub parts: Vec<SuspendedPart>,
}

/// Whether a recorded lease has devices, or why it has none. A cause is kept as text, because it is
/// only shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordedStanding {
    /// It has its devices.
    Running,
    /// Its worker is gone, for this reason, and it waits for devices of its keeper.
    Lost(String),
    /// It was suspended.
    Suspended(Suspender),
    /// It was suspended, because of the cause, or else by an administrator or its client, and waits for
    /// devices.
    Resuming(Option<String>),
}

/// The worker that keeps the snapshots of the sessions on one worker of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedKeeper {
    /// The worker that runs the sessions.
    pub source: WorkerId,
    /// The position of the part of the lease that they are.
    pub part: u32,
    /// The worker that keeps their snapshots.
    pub keeper: WorkerId,
    /// The number of its assignment.
    pub assignment: u64,
    /// What devices must be like for these sessions to go on there.
    pub requirement: Requirement,
    /// Whether the keeper has the snapshots from which the sessions would go on.
    pub is_kept: bool,
}

/// The snapshot store that has the snapshots of the sessions on one worker of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedStore {
    /// The worker that runs the sessions.
    pub source: WorkerId,
    /// The store.
    pub store: StoreId,
    /// What devices must be like for these sessions to go on.
    pub requirement: Requirement,
}

/// A change of a lease's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordChange {
    /// The lease.
    pub lease: LeaseId,
    /// The new record; `None` if the lease needs none any more.
    pub record: Option<LeaseRecord>,
    /// Whether the commands of the event that changed it should wait until the record is written. A
    /// scheduler that restarted with the earlier record could not go on with the lease after these
    /// commands.
    pub is_urgent: bool,
}

impl LeaseRecord {
    /// Returns whether commands must not be carried out before this record is written, which follows
    /// `earlier`: the lease has got other devices, or lost them, or another worker has its snapshots.
    pub(crate) fn is_urgent_after(&self, earlier: Option<&Self>) -> bool {
        match earlier {
            Some(earlier) => {
                let place = (earlier.epoch, &earlier.standing, &earlier.devices);
                place != (self.epoch, &self.standing, &self.devices)
                    || self.has_other_holders_than(earlier)
            }
            None => self.epoch > 0 || self.standing != RecordedStanding::Running,
        }
    }

    /// Returns whether a part has a holder that it did not have: the one before drops its snapshots.
    fn has_other_holders_than(&self, earlier: &Self) -> bool {
        let mut parts = self.parts.iter().zip(&earlier.parts);
        parts.any(|(part, earlier)| {
            let mut holders = part.holders.iter();
            holders.any(|holder| !earlier.holders.contains(holder))
        })
    }

    /// Returns the record of a lease, or `None` if the lease needs none.
    pub(crate) fn of(lease: &Lease) -> Option<Self> {
        let owner = lease.owner.filter(|_| lease.durability.is_durable())?;
        let has_keepers = !lease.keepers.is_empty() || !lease.stored.is_empty();
        let is_as_granted = lease.epoch == 0 && !lease.is_suspended();
        if !has_keepers && is_as_granted && lease.recover_within.is_none() {
            return None;
        }
        let devices = lease.lease_devices.iter();
        let devices = devices.map(|(_, granted)| *granted);
        let keeper = |(&source, keeper): (&WorkerId, &Keeper)| RecordedKeeper {
            source,
            part: keeper.part,
            keeper: keeper.worker,
            assignment: keeper.assignment,
            requirement: keeper.requirement.clone(),
            is_kept: keeper.is_kept,
        };
        let stored = |(&source, it): (&WorkerId, &StoredSessions)| RecordedStore {
            source,
            store: it.store,
            requirement: it.requirement.clone(),
        };
        Some(Self {
            owner,
            tenant: lease.tenant.clone(),
            charge: lease.charge.clone(),
            is_reclaimed: lease.is_reclaimed,
            is_spot: lease.is_spot,
            may_end: lease.may_end,
            epoch: lease.epoch,
            durability: lease.durability,
            recover_within: lease.recover_within,
            time_left: lease.time_left,
            standing: RecordedStanding::of(&lease.standing),
            devices: devices.collect(),
            keepers: lease.keepers.iter().map(keeper).collect(),
            stored: lease.stored.iter().map(stored).collect(),
            parts: lease.parts.clone(),
        })
    }

    /// Returns the lease, without deadlines. Its client and its workers are away.
    pub(crate) fn into_lease(self, now: Timestamp) -> Lease {
        let mut lease = Lease::owned(self.owner, &self.devices, self.durability, self.epoch);
        let keeper = |it: RecordedKeeper| {
            let keeper = Keeper {
                worker: it.keeper,
                part: it.part,
                assignment: it.assignment,
                requirement: it.requirement,
                is_announced: false,
                is_kept: it.is_kept,
                previous: None,
            };
            (it.source, keeper)
        };
        lease.keepers = self.keepers.into_iter().map(keeper).collect();
        let stored = |it: RecordedStore| {
            let RecordedStore {
                source,
                store,
                requirement,
            } = it;
            (source, StoredSessions { store, requirement })
        };
        lease.stored = self.stored.into_iter().map(stored).collect();
        // Its worker may not have got the command to load the snapshots. One that runs the lease ignores
        // the command.
        lease.load_stored = lease.stored.keys().copied().collect();
        lease.recover_within = self.recover_within;
        (lease.running_since, lease.time_left) = (now, self.time_left);
        (lease.tenant, lease.charge) = (self.tenant, self.charge);
        (lease.is_reclaimed, lease.is_spot) = (self.is_reclaimed, self.is_spot);
        lease.may_end = self.may_end;
        lease.parts = self.parts;
        lease.standing = self.standing.into_standing(now);
        lease.origin = Origin::Adopted;
        lease
    }
}

impl RecordedStanding {
    fn of(standing: &Standing) -> Self {
        match standing {
            Standing::Running => Self::Running,
            Standing::Lost(reason) => Self::Lost(reason.to_string()),
            Standing::Suspended { by } => Self::Suspended(*by),
            Standing::Resuming { cause, .. } => {
                Self::Resuming(cause.as_ref().map(EndReason::to_string))
            }
        }
    }

    fn into_standing(self, now: Timestamp) -> Standing {
        let recorded = |text| EndReason::BeforeRestart { text };
        match self {
            Self::Running => Standing::Running,
            Self::Lost(text) => Standing::Lost(recorded(text)),
            Self::Suspended(by) => Standing::Suspended { by },
            Self::Resuming(cause) => Standing::Resuming {
                since: now,
                cause: cause.map(recorded),
            },
        }
    }
}
