//! A lease, and whether it has devices.
//!
//! Two optional deadlines describe a lease's state. `expires_at` is set while the lease has
//! no attached client: the client is detached, or a worker reported the lease before its
//! client claimed it. `rejoin_by` is set while a worker of a claimed lease has yet to join, or
//! is gone and the lease waits to move to another one.
//! Neither is set while the lease is in normal use.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::Duration;

use indexmap::IndexMap;
use tensord_proto::ids::{ClientId, LeaseId, PartId, StoreId, WorkerId};
use tensord_proto::share::lane;

use crate::device::{DeviceSpec, Durability, Requirement, Share};
use crate::event::{AssignedKeeper, DeviceGrant, DeviceRef, GrantedDevice, Suspender};
use crate::options::Options;
use crate::reason::EndReason;
use crate::tenants::{Amounts, TenantName};
use crate::time::Timestamp;

/// Maximum number of suspended leases whose snapshots one worker holds: half of what a worker takes, as
/// it also holds those of leases that go on soon.
pub(crate) const MAX_HELD: usize = 256;

/// A client's right to use some devices.
#[derive(Default)]
pub(crate) struct Lease {
    /// The client that holds the lease; `None` if a worker reported the lease and no client
    /// has claimed it yet.
    pub(crate) owner: Option<ClientId>,
    /// The tenant of the client; `None` after a restart until the client has claimed the lease.
    pub(crate) tenant: Option<TenantName>,
    /// What the lease counts as: the devices that it was granted, also while it has none or others.
    pub(crate) charge: Amounts,
    /// All devices of the lease in the order of its ranks, including those of workers that have yet to join, each
    /// with the grant by which the lease has it, or a share of it. Those of one worker are next to each other.
    /// Empty while the lease is suspended.
    pub(crate) lease_devices: IndexMap<DeviceRef, GrantedDevice>,
    /// When the lease was granted; the start of the engine if that is not known.
    pub(crate) granted_at: Timestamp,
    /// Since when it has its devices.
    pub(crate) running_since: Timestamp,
    /// For how long it may have devices, from `running_since` on; `None` for any time.
    pub(crate) time_left: Option<Duration>,
    /// Whether it gives its devices to any request that is not one for a spot lease.
    pub(crate) is_spot: bool,
    /// Whether it may end if its devices are reclaimed and it cannot be suspended.
    pub(crate) may_end: bool,
    /// The requests whose reservations it has passed, some of which may not wait any more.
    pub(crate) passed: BTreeSet<LeaseId>,
    /// Whether it was suspended for a request that waited, and waits to go on.
    pub(crate) is_reclaimed: bool,
    /// The time at which the lease ends unless its client attaches.
    pub(crate) expires_at: Option<Timestamp>,
    /// The time at which the lease ends unless all its workers have joined, or it has moved to
    /// another worker.
    pub(crate) rejoin_by: Option<Timestamp>,
    /// Whether the lease goes on from snapshots if a process of it dies, or at its keeper if its worker
    /// is lost.
    pub(crate) durability: Durability,
    /// How long the lease may wait for devices after a worker or a process of it was lost; `None` for the
    /// pool's default.
    pub(crate) recover_within: Option<Duration>,
    /// Who keeps the snapshots of the sessions on each of the lease's workers; while the lease is
    /// suspended, to whom a holder hands its snapshots over.
    pub(crate) keepers: BTreeMap<WorkerId, Keeper>,
    /// Where else the sessions on each of the lease's workers could go on: the snapshot store that has
    /// their snapshots, as the worker has reported.
    pub(crate) stored: BTreeMap<WorkerId, StoredSessions>,
    /// The workers of the lease that must load the snapshots of its sessions from their store, and have
    /// not reported them since.
    pub(crate) load_stored: BTreeSet<WorkerId>,
    /// What each of the lease's own workers has reported of the snapshots of its sessions, on its
    /// current stream.
    pub(crate) kept_at: BTreeMap<WorkerId, KeptHere>,
    /// When a worker reported first that its process of the lease has died, if the lease has not gone
    /// on since.
    pub(crate) interrupted_at: Option<Timestamp>,
    /// What the lease had on each worker, if it is suspended.
    pub(crate) parts: Vec<SuspendedPart>,
    /// The workers to which a handover has failed, or that have refused a snapshot, each with the time until
    /// which others are preferred.
    pub(crate) avoided: BTreeMap<WorkerId, Timestamp>,
    /// What happened to a keeper that had the snapshots, until another one has them.
    pub(crate) keeper_gone: Option<EndReason>,
    /// Whether the client could go on from snapshots, as it has reported.
    pub(crate) is_restorable: bool,
    /// Since when the client (`None`), or a worker of the lease, has reported that it cannot reach another worker of
    /// it.
    pub(crate) unreachable: BTreeMap<(Option<WorkerId>, WorkerId), Unreachable>,
    /// The workers that the lease has left, as its client or another of its workers could not reach them, or they could
    /// not reach another one.
    pub(crate) excluded: BTreeMap<WorkerId, Exclusion>,
    /// How often the lease has moved to another worker.
    pub(crate) epoch: u64,
    pub(crate) origin: Origin,
    pub(crate) standing: Standing,
    /// Whether the client has an earlier token than that of the present epoch, and could not be told where
    /// the lease is, as a worker of it has yet to join.
    pub(crate) is_move_unreported: bool,
    /// Whether the client knows the standing, on its current stream, if it is another one than
    /// [`Running`](Standing::Running).
    pub(crate) is_standing_reported: bool,
}

/// How the engine knows a lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A worker or a client has just reported it. If it cannot have its devices, it is not adopted.
    #[default]
    Reported,
    /// It dates from before a restart, and was adopted or restored. Also one that the engine has granted, if it has had
    /// a grant by whose number the engine would not recognise that.
    Adopted,
    /// The engine has granted it.
    Granted,
}

/// Whether a lease has devices, or why it has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It has its devices.
    #[default]
    Running,
    /// Its worker is gone. It ends for this reason at its `rejoin_by`, unless it has moved to its
    /// keeper by then.
    Lost(EndReason),
    /// It was suspended, and has no devices.
    Suspended { by: Suspender },
    /// It was suspended, because of `cause`, or else by an administrator or its client, and then resumed
    /// at this time, and waits for devices. If there is a cause, it ends at its `rejoin_by`.
    Resuming {
        since: Timestamp,
        cause: Option<EndReason>,
    },
}

/// The other worker that keeps the snapshots of a lease that one worker has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keeper {
    pub(crate) worker: WorkerId,
    /// The position of the part of the lease whose snapshots it keeps.
    pub(crate) part: u32,
    /// The number of its assignment. If the lease is suspended, each command has a new one.
    pub(crate) assignment: u64,
    /// What devices must be like for these sessions to go on there.
    pub(crate) requirement: Requirement,
    /// Whether it and the lease's worker know each other, by commands on their current streams.
    pub(crate) is_announced: bool,
    /// Whether it has the snapshots from which the sessions would go on, as the lease's worker has
    /// reported.
    pub(crate) is_kept: bool,
    /// The keeper before, which has the snapshots, until this one has them.
    pub(crate) previous: Option<WorkerId>,
}

impl Keeper {
    /// Returns what workers call this keeper of a part of `lease`.
    pub(crate) fn assigned(&self, lease: LeaseId) -> AssignedKeeper {
        AssignedKeeper {
            part: PartId {
                lease,
                index: self.part,
            },
            worker: self.worker,
            assignment: self.assignment,
        }
    }

    /// Returns the workers that have snapshots of the part, or get them, with the part.
    pub(crate) fn workers(&self) -> impl Iterator<Item = (WorkerId, u32)> + use<> {
        let part = self.part;
        let workers = [Some(self.worker), self.previous].into_iter();
        workers.flatten().map(move |worker| (worker, part))
    }

    /// Returns the worker that has the snapshots, if one has.
    pub(crate) fn with_snapshots(&self) -> Option<WorkerId> {
        match self.is_kept {
            true => Some(self.worker),
            false => self.previous,
        }
    }
}

/// The snapshot store that has the snapshots from which the sessions on one worker of a lease would go
/// on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredSessions {
    pub(crate) store: StoreId,
    /// What devices must be like for these sessions to go on.
    pub(crate) requirement: Requirement,
}

/// What a worker of a lease has of the snapshots of its sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeptHere {
    /// It lacks one.
    Lacking,
    /// It has all, and no room to hold them if the lease is suspended.
    WithoutRoom,
    /// It has all, and can hold them.
    WithRoom,
}

/// The devices that a suspended lease had on one worker, and will have on one worker again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SuspendedPart {
    /// The worker where its sessions ran.
    pub source: WorkerId,
    /// The number of devices.
    pub devices: usize,
    /// What they must be like.
    pub requirement: Requirement,
    /// The workers that have the snapshots of these devices' sessions in memory; first the one where
    /// they ran.
    pub holders: Vec<WorkerId>,
    /// The snapshot store that has them, too.
    pub store: Option<StoreId>,
}

/// A worker that a lease has left, and to which it does not come back for a while.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exclusion {
    /// Until when it does not.
    pub(crate) until: Timestamp,
    /// With which other worker it had no connection; `None` for the client.
    pub(crate) with: Option<WorkerId>,
}

/// The reports of a client, or of a worker, that it cannot reach a worker of its lease.
#[derive(Clone, Copy)]
pub(crate) struct Unreachable {
    /// The first report.
    pub(crate) since: Timestamp,
    latest: Timestamp,
}

impl Unreachable {
    /// Time without a report after which the worker was reached again. Reports come several times a second.
    const MAX_INTERVAL: Duration = Duration::from_secs(2);

    /// Adds a report to the earlier ones.
    pub(crate) fn extend(earlier: Option<Self>, now: Timestamp) -> Self {
        let since = earlier
            .filter(|it| it.is_recent(now))
            .map_or(now, |it| it.since);
        Self { since, latest: now }
    }

    fn is_recent(&self, now: Timestamp) -> bool {
        now.saturating_since(self.latest) <= Self::MAX_INTERVAL
    }
}

impl Lease {
    /// Returns the times until which workers are avoided, or the lease does not go on at them.
    pub(crate) fn avoids_until(&self) -> impl Iterator<Item = Timestamp> {
        let excluded = self.excluded.values().map(|it| it.until);
        self.avoided.values().copied().chain(excluded)
    }

    /// Returns how many others, workers or the client, miss this worker or are missed by it, now or when the lease left
    /// a worker a while ago.
    pub(crate) fn missed_with(&self, worker: WorkerId, now: Timestamp) -> usize {
        let recent = self.unreachable.iter().filter(|(_, it)| it.is_recent(now));
        let recent = recent.filter_map(|((missed_by, missed), _)| match *missed_by {
            missed_by if *missed == worker => Some(missed_by),
            Some(missed_by) if missed_by == worker => Some(Some(*missed)),
            _ => None,
        });
        let earlier = self.excluded.iter().filter(|(_, it)| now < it.until);
        let earlier = earlier.filter_map(|(left, it)| match it.with {
            with if *left == worker => Some(with),
            Some(with) if with == worker => Some(Some(*left)),
            _ => None,
        });
        recent.chain(earlier).collect::<BTreeSet<_>>().len()
    }

    /// Creates a lease that was granted to `client` or claimed by it.
    pub(crate) fn owned(
        client: ClientId,
        lease_devices: &[GrantedDevice],
        durability: Durability,
        epoch: u64,
    ) -> Self {
        let mut lease = Self {
            owner: Some(client),
            durability,
            epoch,
            ..Self::default()
        };
        lease.add(lease_devices);
        lease
    }

    /// Sets the devices. Returns the grants of those that the lease has no more, by worker.
    pub(crate) fn set_devices(
        &mut self,
        lease_devices: &[GrantedDevice],
    ) -> Vec<(WorkerId, Vec<DeviceGrant>)> {
        let mut dropped = mem::take(&mut self.lease_devices);
        self.add(lease_devices);
        dropped.retain(|device_ref, before| {
            let known = self.lease_devices.get(device_ref);
            known.is_none_or(|known| lane(known.share) != lane(before.share))
        });
        grants_by_worker(&dropped)
    }

    /// Adds devices, and updates the grants of devices that the lease has already.
    pub(crate) fn add(&mut self, lease_devices: &[GrantedDevice]) {
        let lease_devices = lease_devices
            .iter()
            .map(|granted| (granted.device_ref, *granted));
        self.lease_devices.extend(lease_devices);
    }

    pub(crate) fn workers(&self) -> BTreeSet<WorkerId> {
        self.lease_devices
            .keys()
            .map(|device_ref| device_ref.worker)
            .collect()
    }

    /// Returns the grants by which the lease has its devices, by worker.
    pub(crate) fn grants(&self) -> Vec<(WorkerId, Vec<DeviceGrant>)> {
        grants_by_worker(&self.lease_devices)
    }

    /// Returns the part of a device that the lease has, or had until it was suspended; `None` for whole devices.
    pub(crate) fn share(&self) -> Option<Share> {
        let granted = self.lease_devices.first();
        let granted = granted.map(|(_, granted)| granted.share.map(Share::from));
        let suspended = || self.parts.first().map(|part| part.requirement.share);
        granted.or_else(suspended).flatten()
    }

    /// Returns the keeper of a lease that has all its devices on one worker, if it has a keeper.
    pub(crate) fn only_keeper(&self) -> Option<&Keeper> {
        self.keepers.get(&self.only_worker()?)
    }

    /// Returns the snapshot store of a lease that has all its devices on one worker, if a store has the
    /// snapshots of its sessions.
    pub(crate) fn only_stored(&self) -> Option<&StoredSessions> {
        self.stored.get(&self.only_worker()?)
    }

    /// Returns whether stores have the snapshots of all sessions of the lease.
    pub(crate) fn is_stored(&self) -> bool {
        if self.is_suspended() {
            return self.parts.iter().all(|part| part.store.is_some());
        }
        let workers = self.workers();
        let mut all = workers.iter();
        !workers.is_empty() && all.all(|worker| self.stored.contains_key(worker))
    }

    /// Returns what devices must be like for a lease to go on elsewhere that has all its devices on one
    /// worker, if it could.
    pub(crate) fn requirement_elsewhere(&self) -> Option<Requirement> {
        let keeper = self.only_keeper().map(|keeper| keeper.requirement.clone());
        keeper.or_else(|| Some(self.only_stored()?.requirement.clone()))
    }

    /// Returns whether the lease could go on elsewhere although its worker is there: the keeper or a
    /// store has what the client needs, and the client has the rest.
    pub(crate) fn is_movable(&self) -> bool {
        let is_kept = self.only_keeper().is_some_and(|keeper| keeper.is_kept);
        self.is_restorable && (is_kept || self.only_stored().is_some())
    }

    /// Returns the lease's devices on each worker, in the order of its ranks.
    pub(crate) fn devices_by_worker(&self) -> IndexMap<WorkerId, Vec<DeviceRef>> {
        let mut devices = IndexMap::<_, Vec<_>>::new();
        for device_ref in self.lease_devices.keys() {
            devices
                .entry(device_ref.worker)
                .or_default()
                .push(*device_ref);
        }
        devices
    }

    /// Returns the workers that keep snapshots of the lease for others, or hold them while the lease is
    /// suspended.
    pub(crate) fn keepers_and_holders(&self) -> BTreeSet<WorkerId> {
        let keepers = self.keepers.values().flat_map(Keeper::workers);
        let keepers = keepers.map(|(worker, _)| worker);
        keepers.chain(self.holders()).collect()
    }

    /// Returns the worker to which the snapshots of a part of the suspended lease are being sent, if any.
    pub(crate) fn receiver(&self, part: u32) -> Option<WorkerId> {
        let mut keepers = self.keepers.values();
        let keeper = keepers.find(|keeper| keeper.part == part)?;
        Some(keeper.worker)
    }

    /// Returns how long the lease may wait for devices after a worker or a process of it was lost.
    pub(crate) fn recovery_timeout(&self, options: &Options) -> Duration {
        self.recover_within.unwrap_or(options.recovery_timeout)
    }

    /// Returns the workers that have snapshots of the suspended lease.
    pub(crate) fn holders(&self) -> BTreeSet<WorkerId> {
        let holders = self.parts.iter().flat_map(|part| &part.holders);
        holders.copied().collect()
    }

    /// Returns the worker that has all devices of the lease, if one has.
    pub(crate) fn only_worker(&self) -> Option<WorkerId> {
        let mut workers = self
            .lease_devices
            .keys()
            .map(|device_ref| device_ref.worker);
        let first = workers.next()?;
        workers.all(|worker| worker == first).then_some(first)
    }

    /// Returns why the lease will end, if its worker is gone.
    pub(crate) fn lost(&self) -> Option<&EndReason> {
        match &self.standing {
            Standing::Lost(reason) => Some(reason),
            Standing::Running | Standing::Suspended { .. } | Standing::Resuming { .. } => None,
        }
    }

    /// Returns what has interrupted a lease that waits to go on; `None` if it was suspended for another reason.
    pub(crate) fn interruption(&self) -> Option<&EndReason> {
        match &self.standing {
            Standing::Resuming { cause, .. } => cause.as_ref(),
            Standing::Running | Standing::Lost(_) | Standing::Suspended { .. } => None,
        }
    }

    /// Returns whether the lease is suspended, or was and waits for devices.
    pub(crate) fn is_suspended(&self) -> bool {
        matches!(
            self.standing,
            Standing::Suspended { .. } | Standing::Resuming { .. }
        )
    }

    /// Returns whether the lease has devices, or is to get as many as it had before all others.
    pub(crate) fn counts(&self) -> bool {
        match &self.standing {
            Standing::Running | Standing::Lost(_) => true,
            Standing::Resuming { cause, .. } => cause.is_some(),
            Standing::Suspended { .. } => false,
        }
    }

    /// Returns whether the lease has devices, and all of its workers are there.
    pub(crate) fn runs(&self) -> bool {
        self.standing == Standing::Running && self.rejoin_by.is_none()
    }

    /// Returns whether the lease runs, and may be suspended or end if its devices are needed.
    pub(crate) fn is_interruptible(&self) -> bool {
        self.runs() && (self.durability.is_durable() || self.is_spot || self.may_end)
    }

    /// Changes the standing. The client does not know it yet.
    pub(crate) fn set_standing(&mut self, standing: Standing) {
        (self.standing, self.is_standing_reported) = (standing, false);
    }

    /// Returns whether the lease may go on at `device`: any, unless the lease is lost.
    pub(crate) fn may_resume_at(&self, device: Option<&DeviceSpec>) -> bool {
        let lost = self.lost().and_then(|_| self.requirement_elsewhere());
        let accepts_back = |requirement: Requirement| {
            device.is_some_and(|device| requirement.accepts_back(device))
        };
        lost.is_none_or(accepts_back)
    }

    /// Returns when it will have had devices for as long as it may, if it has some now.
    pub(crate) fn time_over_at(&self) -> Option<Timestamp> {
        let left = self.time_left.filter(|_| !self.lease_devices.is_empty());
        left.map(|left| self.running_since + left)
    }

    /// Limits the time for which it may still have its devices. What a scheduler has recorded of a lease is older
    /// than the token of its client.
    pub(crate) fn limit_time(&mut self, now: Timestamp, left: Option<Duration>) {
        if let (Some(at), Some(left)) = (self.time_over_at(), left) {
            let at = at.min(now + left);
            self.time_left = Some(at.saturating_since(self.running_since));
        }
    }

    /// Counts the time for which it has had its devices until now.
    pub(crate) fn count_time(&mut self, now: Timestamp) {
        if !self.lease_devices.is_empty() {
            let had = now.saturating_since(self.running_since);
            self.time_left = self.time_left.map(|left| left.saturating_sub(had));
            self.running_since = now;
        }
    }

    /// Returns the earlier of the two deadlines.
    pub(crate) fn ends_at(&self) -> Option<Timestamp> {
        self.expires_at.into_iter().chain(self.rejoin_by).min()
    }
}

/// Groups the grants of devices by worker, in the order of the workers' ids.
fn grants_by_worker(
    devices: &IndexMap<DeviceRef, GrantedDevice>,
) -> Vec<(WorkerId, Vec<DeviceGrant>)> {
    let mut by_worker = BTreeMap::<_, Vec<_>>::new();
    for granted in devices.values() {
        let grants = by_worker.entry(granted.device_ref.worker).or_default();
        grants.push(granted.device_grant());
    }
    by_worker.into_iter().collect()
}
