//! The ended leases that have not left the devices of a worker.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::LeaseId;
use tensord_proto::share::{DeviceShare, lane};

use crate::event::DeviceGrant;

/// Most ended leases of one lane of a device that are known not to have left it. Usually there is one, as nobody gets
/// the lane before that one has left. A second one is possible after a restart, if a client has claimed the lane by a
/// later grant, and that lease has ended, too.
const MAX_PER_LANE: usize = 2;

/// The devices of a worker that ended leases have not left yet. An entry is removed when the worker has released the
/// device.
#[derive(Default)]
pub(super) struct EndingLeases(BTreeMap<(u32, LeaseId), Ending>);

/// What an ended lease had of a device, and by which grant.
#[derive(Clone, Copy)]
pub(super) struct Ending {
    pub(super) grant: GrantNumber,
    pub(super) share: Option<DeviceShare>,
}

impl EndingLeases {
    /// Adds an ended lease that has not left a device. If that makes too many of its lane, which is possible only if
    /// the worker reports leases that do not exist, the one with the earliest grant is removed.
    pub(super) fn insert(&mut self, index: u32, lease: LeaseId, ending: Ending) {
        self.0.insert((index, lease), ending);
        let same_lane = self.on_device(index);
        let same_lane = same_lane.filter(|(_, it)| lane(it.share) == lane(ending.share));
        let grants: BTreeSet<_> = same_lane.map(|(lease, it)| (it.grant, lease)).collect();
        if grants.len() > MAX_PER_LANE
            && let Some((_, earliest)) = grants.first()
        {
            self.0.remove(&(index, *earliest));
        }
    }

    /// Adds an ended lease that the worker reports, unless a later grant of it is known.
    pub(super) fn insert_reported(&mut self, index: u32, lease: LeaseId, ending: Ending) {
        let known = self.0.get(&(index, lease));
        if known.is_none_or(|known| ending.grant >= known.grant) {
            self.insert(index, lease, ending);
        }
    }

    /// Removes the devices of a lease, except the `busy` ones, and returns whether it had any of these.
    pub(super) fn release(&mut self, lease: LeaseId, busy: &BTreeSet<u32>) -> bool {
        let before = self.0.len();
        let stays = |index: &u32, of: &LeaseId| *of != lease || busy.contains(index);
        self.0.retain(|(index, of), _| stays(index, of));
        self.0.len() < before
    }

    /// Returns the leases, each with the grants of its devices.
    pub(super) fn by_lease(&self) -> BTreeMap<LeaseId, Vec<DeviceGrant>> {
        let mut by_lease = BTreeMap::<_, Vec<_>>::new();
        for (&(index, lease), &Ending { grant, share }) in &self.0 {
            let grants = by_lease.entry(lease).or_default();
            let lane = lane(share);
            grants.push(DeviceGrant { index, lane, grant });
        }
        by_lease
    }

    /// Returns whether a lease has not left a device.
    pub(super) fn contains(&self, lease: LeaseId) -> bool {
        self.0.keys().any(|(_, of)| *of == lease)
    }

    /// Returns the leases that have not left a device.
    pub(super) fn on_device(&self, index: u32) -> impl Iterator<Item = (LeaseId, &Ending)> {
        let first = (index, LeaseId(u64::MIN));
        let last = (index, LeaseId(u64::MAX));
        let on_device = self.0.range(first..=last);
        on_device.map(|((_, lease), ending)| (*lease, ending))
    }
}
