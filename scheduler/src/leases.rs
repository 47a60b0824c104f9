//! All leases, and the rule for which unknown leases the engine may still adopt.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::Duration;

use tensord_proto::ids::{ClientId, LeaseId};

use crate::lease::Lease;
use crate::record::{LeaseRecord, RecordChange};
use crate::time::Timestamp;

/// All leases, and a short list of those that ended.
pub(crate) struct Leases {
    leases: BTreeMap<LeaseId, Lease>,
    /// The end of the adoption window.
    adopt_until: Timestamp,
    /// The leases that ended before `adopt_until`: they are unknown because they ended, not
    /// because the scheduler restarted.
    ended: BTreeSet<LeaseId>,
    /// The leases that may have changed since the driver last took the changes of records.
    changed: BTreeSet<LeaseId>,
    /// The records that the driver has.
    recorded: BTreeMap<LeaseId, LeaseRecord>,
}

impl Leases {
    /// The largest size of `ended`, half a megabyte. A pool in which this many leases have
    /// ended has long recovered from the restart, so the window closes.
    const MAX_ENDED: usize = 1 << 16;

    pub(crate) fn new(adopt_until: Timestamp) -> Self {
        Self {
            leases: BTreeMap::new(),
            adopt_until,
            ended: BTreeSet::new(),
            changed: BTreeSet::new(),
            recorded: BTreeMap::new(),
        }
    }

    /// Returns the end of the adoption window.
    pub(crate) fn adopt_until(&self) -> Timestamp {
        self.adopt_until
    }

    pub(crate) fn len(&self) -> usize {
        self.leases.len()
    }

    pub(crate) fn get(&self, lease: LeaseId) -> Option<&Lease> {
        self.leases.get(&lease)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (LeaseId, &mut Lease)> {
        self.changed.extend(self.leases.keys());
        self.leases.iter_mut().map(|(id, lease)| (*id, lease))
    }

    pub(crate) fn get_mut(&mut self, id: LeaseId) -> Option<&mut Lease> {
        let lease = self.leases.get_mut(&id)?;
        self.changed.insert(id);
        Some(lease)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (LeaseId, &Lease)> {
        self.leases.iter().map(|(id, lease)| (*id, lease))
    }

    pub(crate) fn insert(&mut self, id: LeaseId, lease: Lease) {
        let replaced = self.leases.insert(id, lease);
        assert!(replaced.is_none(), "lease id {id} was used twice");
        self.changed.insert(id);
    }

    pub(crate) fn remove(&mut self, id: LeaseId, now: Timestamp) -> Option<Lease> {
        let removed = self.leases.remove(&id)?;
        self.changed.insert(id);
        if now < self.adopt_until {
            self.ended.insert(id);
            if self.ended.len() >= Self::MAX_ENDED {
                self.adopt_until = now;
            }
        }
        Some(removed)
    }

    /// Extends the deadlines, because the scheduler did not run from `since` until `now`:
    /// those of leases to at least `wait` from now, and the adoption window by the gap if
    /// it was open.
    pub(crate) fn extend_deadlines(&mut self, since: Timestamp, now: Timestamp, wait: Duration) {
        if since < self.adopt_until {
            self.adopt_until = self.adopt_until + now.saturating_since(since);
        }
        for lease in self.leases.values_mut() {
            for deadline in [&mut lease.expires_at, &mut lease.rejoin_by] {
                *deadline = deadline.map(|at| at.max(now + wait));
            }
        }
    }

    /// Returns whether an unknown lease may date from before a restart, so that it may be
    /// adopted, rather than having ended.
    pub(crate) fn may_adopt(&self, id: LeaseId, now: Timestamp) -> bool {
        now < self.adopt_until && !self.ended.contains(&id)
    }

    /// Clears the list of ended leases once the adoption window is over.
    pub(crate) fn forget_ended(&mut self, now: Timestamp) {
        if now >= self.adopt_until {
            self.ended.clear();
        }
    }

    /// Sets the record of a lease that the driver has from an earlier scheduler.
    pub(crate) fn set_recorded(&mut self, id: LeaseId, record: LeaseRecord) {
        self.recorded.insert(id, record);
    }

    /// Returns how records have changed since the last call.
    pub(crate) fn take_record_changes(&mut self) -> Vec<RecordChange> {
        let mut changes = Vec::new();
        for id in mem::take(&mut self.changed) {
            let record = self.leases.get(&id).and_then(LeaseRecord::of);
            let earlier = self.recorded.get(&id);
            if record.as_ref() == earlier {
                continue;
            }
            let is_urgent = record
                .as_ref()
                .is_some_and(|it| it.is_urgent_after(earlier));
            match &record {
                Some(record) => self.recorded.insert(id, record.clone()),
                None => self.recorded.remove(&id),
            };
            changes.push(RecordChange {
                lease: id,
                record,
                is_urgent,
            });
        }
        changes
    }

    /// Returns the leases of a client, attached or not.
    pub(crate) fn owned_by(&self, client: ClientId) -> Vec<LeaseId> {
        let owned = self.iter().filter(|(_, lease)| lease.owner == Some(client));
        owned.map(|(id, _)| id).collect()
    }
}

#[cfg(test)]
impl Leases {
    /// Returns the number of recorded ended leases.
    pub(crate) fn ended_len(&self) -> usize {
        self.ended.len()
    }
}
