//! Which keepers of durable leases must be chosen again although the leases do not change.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;

use tensord_proto::ids::LeaseId;

use super::keeper_choice::Stability;
use crate::time::Timestamp;

/// The leases whose keepers must be chosen again although the leases do not change.
#[derive(Default)]
pub(super) struct UnstableKeepers {
    stability: BTreeMap<LeaseId, Stability>,
    depending_on_workers: BTreeSet<LeaseId>,
    depending_on_devices: BTreeSet<LeaseId>,
    until: BTreeSet<(Timestamp, LeaseId)>,
    /// The version of the pool's index when those were checked last that depend on devices.
    checked_version: u64,
}

impl UnstableKeepers {
    /// Returns the leases that may get a better keeper, as some workers have changed.
    pub(super) fn depending_on_workers(&self) -> impl Iterator<Item = LeaseId> {
        self.depending_on_workers.iter().copied()
    }

    /// Records when the keepers of a lease must be chosen again; `None` if it needs none.
    pub(super) fn record(&mut self, id: LeaseId, stability: Option<Stability>) {
        if let Some(before) = self.stability.remove(&id) {
            self.depending_on_workers.remove(&id);
            self.depending_on_devices.remove(&id);
            if let Some(at) = before.until {
                self.until.remove(&(at, id));
            }
        }
        let Some(stability) = stability.filter(|it| *it != Stability::default()) else {
            return;
        };
        self.stability.insert(id, stability);
        if stability.depends_on_workers {
            self.depending_on_workers.insert(id);
        }
        if stability.depends_on_devices {
            self.depending_on_devices.insert(id);
        }
        self.until.extend(stability.until.map(|at| (at, id)));
    }

    #[cfg(test)]
    pub(super) fn is_due(&self, id: LeaseId, now: Timestamp) -> bool {
        let until = self.stability.get(&id).and_then(|it| it.until);
        until.is_some_and(|until| until <= now)
    }

    /// Returns the leases whose keepers must be chosen again by now, if the pool's index has this version.
    pub(super) fn due(&mut self, now: Timestamp, version: u64) -> Vec<LeaseId> {
        let by_time = self.until.iter().take_while(|(at, _)| *at <= now);
        let mut due: Vec<_> = by_time.map(|(_, id)| *id).collect();
        if mem::replace(&mut self.checked_version, version) != version {
            due.extend(&self.depending_on_devices);
        }
        due
    }
}
