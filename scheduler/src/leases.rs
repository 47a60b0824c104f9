//! All leases.

mod adoption;
mod index;
mod patience;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use tensord_proto::ids::{ClientId, LeaseId, WorkerId};

use crate::lease::{Lease, Origin};
use crate::record::{LeaseRecord, RecordChange};
use crate::tenants::TenantName;
use crate::time::Timestamp;
pub(crate) use adoption::{AdoptionWindow, Reporter};
use index::Keys;
pub(crate) use index::LeaseIndex;

/// All leases, and which others may still be adopted.
pub(crate) struct Leases {
    leases: BTreeMap<LeaseId, Entry>,
    index: LeaseIndex,
    adoption_window: AdoptionWindow,
    /// The leases that may have changed in the present event.
    touched: BTreeSet<LeaseId>,
    /// The leases that may have changed since [`take_unchecked`](Self::take_unchecked); `None` if these are too many
    /// to list.
    unchecked: Option<BTreeSet<LeaseId>>,
    /// The leases that may have changed since the driver last took the changes of records.
    changed: BTreeSet<LeaseId>,
    /// The records that the driver has.
    recorded: BTreeMap<LeaseId, LeaseRecord>,
}

/// A lease, and its keys in the index.
struct Entry {
    lease: Lease,
    keys: Keys,
}

/// A lease that is changed. When this is dropped, the index is updated.
pub(crate) struct LeaseMut<'a> {
    id: LeaseId,
    entry: &'a mut Entry,
    index: &'a mut LeaseIndex,
}

impl Deref for LeaseMut<'_> {
    type Target = Lease;

    fn deref(&self) -> &Lease {
        &self.entry.lease
    }
}

impl DerefMut for LeaseMut<'_> {
    fn deref_mut(&mut self) -> &mut Lease {
        &mut self.entry.lease
    }
}

impl Drop for LeaseMut<'_> {
    fn drop(&mut self) {
        let keys = Keys::of(&self.entry.lease);
        if keys != self.entry.keys {
            self.index.replace(self.id, &self.entry.keys, &keys);
            self.entry.keys = keys;
        }
    }
}

impl Leases {
    pub(crate) fn new(adopt_until: Timestamp) -> Self {
        Self {
            leases: BTreeMap::new(),
            index: LeaseIndex::default(),
            adoption_window: AdoptionWindow::new(adopt_until),
            touched: BTreeSet::new(),
            unchecked: Some(BTreeSet::new()),
            changed: BTreeSet::new(),
            recorded: BTreeMap::new(),
        }
    }

    /// Returns the end of the adoption window.
    pub(crate) fn adopt_until(&self) -> Timestamp {
        self.adoption_window.until()
    }

    /// Returns which unknown leases may still be adopted.
    pub(crate) fn adoption_window(&self) -> &AdoptionWindow {
        &self.adoption_window
    }

    /// Records that a lease was adopted because of `reporter`, if it has not ended since.
    pub(crate) fn record_adoption(&mut self, id: LeaseId, reporter: Reporter) {
        let Some(mut lease) = self.get_mut(id) else {
            return;
        };
        lease.origin = Origin::Adopted;
        drop(lease);
        self.adoption_window.record_adoption(reporter);
    }

    pub(crate) fn len(&self) -> usize {
        self.leases.len()
    }

    pub(crate) fn get(&self, lease: LeaseId) -> Option<&Lease> {
        self.leases.get(&lease).map(|entry| &entry.lease)
    }

    /// Returns the indexes of leases, and sums over them.
    pub(crate) fn index(&self) -> &LeaseIndex {
        &self.index
    }

    pub(crate) fn get_mut(&mut self, id: LeaseId) -> Option<LeaseMut<'_>> {
        if !self.leases.contains_key(&id) {
            return None;
        }
        self.record_change(id);
        let entry = self.leases.get_mut(&id)?;
        let index = &mut self.index;
        Some(LeaseMut { id, entry, index })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (LeaseId, &Lease)> {
        let leases = self.leases.iter();
        leases.map(|(id, entry)| (*id, &entry.lease))
    }

    pub(crate) fn insert(&mut self, id: LeaseId, lease: Lease) {
        let keys = Keys::of(&lease);
        self.index.replace(id, &Keys::default(), &keys);
        let replaced = self.leases.insert(id, Entry { lease, keys });
        assert!(replaced.is_none(), "lease id {id} was used twice");
        self.record_change(id);
    }

    /// Records that a lease may have changed.
    fn record_change(&mut self, id: LeaseId) {
        self.changed.insert(id);
        self.touched.insert(id);
        self.uncheck(id);
    }

    /// Has a lease be looked at again for what it could give to others, as something has changed on which that depends.
    pub(crate) fn uncheck(&mut self, id: LeaseId) {
        // Nobody may ask for a long time.
        let most = 2 * self.leases.len() + 64;
        let Some(unchecked) = &mut self.unchecked else {
            return;
        };
        unchecked.insert(id);
        if unchecked.len() > most {
            self.unchecked = None;
        }
    }

    /// Returns the leases that may have changed since the last call, or been [unchecked](Self::uncheck); `None` if
    /// these are too many to list.
    pub(crate) fn take_unchecked(&mut self) -> Option<BTreeSet<LeaseId>> {
        self.unchecked.replace(BTreeSet::new())
    }

    /// Returns the workers that have got room to hold snapshots of leases since the last call, or have none any more.
    pub(crate) fn take_changed_room(&mut self) -> BTreeSet<WorkerId> {
        self.index.take_changed_room()
    }

    /// Returns the tenants of which leases that count towards a guarantee may be others than at the last call.
    pub(crate) fn take_changed_guarantees(&mut self) -> BTreeSet<TenantName> {
        self.index.take_changed_guarantees()
    }

    /// Has a lease be among those that may have changed, as something has changed on which it depends.
    pub(crate) fn touch(&mut self, id: LeaseId) {
        self.touched.insert(id);
    }

    /// Returns whether leases may have changed since the last [`take_touched`](Self::take_touched).
    pub(crate) fn has_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Returns the leases that may have changed since the last call.
    pub(crate) fn take_touched(&mut self) -> BTreeSet<LeaseId> {
        mem::take(&mut self.touched)
    }

    /// Returns the tenants that may have other devices than at the last call.
    pub(crate) fn take_changed_tenants(&mut self) -> BTreeSet<TenantName> {
        self.index.take_changed_tenants()
    }

    /// Returns the workers that keep the snapshots of more or fewer parts of leases than at the last call.
    pub(crate) fn take_changed_keepers(&mut self) -> BTreeSet<WorkerId> {
        self.index.take_changed_keepers()
    }

    pub(crate) fn remove(&mut self, id: LeaseId, now: Timestamp) -> Option<Lease> {
        let Entry { lease, keys } = self.leases.remove(&id)?;
        self.index.replace(id, &keys, &Keys::default());
        self.record_change(id);
        match lease.origin {
            Origin::Reported => {}
            Origin::Adopted => self.adoption_window.record_end(id, false, now),
            Origin::Granted => self.adoption_window.record_end(id, true, now),
        }
        Some(lease)
    }

    /// Extends the deadlines, because the scheduler did not run from `since` until `now`:
    /// those of leases to at least `wait` from now, and the adoption window by the gap if
    /// it was open.
    pub(crate) fn extend_deadlines(&mut self, since: Timestamp, now: Timestamp, wait: Duration) {
        self.adoption_window.extend(since, now);
        for id in self.leases.keys().copied().collect::<Vec<_>>() {
            let Some(mut lease) = self.get_mut(id) else {
                continue;
            };
            let lease = &mut *lease;
            for deadline in [&mut lease.expires_at, &mut lease.rejoin_by] {
                *deadline = deadline.map(|at| at.max(now + wait));
            }
        }
    }

    /// Clears what is recorded for the adoption window once that is over.
    pub(crate) fn forget_ended(&mut self, now: Timestamp) {
        self.adoption_window.forget(now);
    }

    /// Sets the record of a lease that the driver has from an earlier scheduler.
    pub(crate) fn set_recorded(&mut self, id: LeaseId, record: LeaseRecord) {
        self.recorded.insert(id, record);
    }

    /// Returns how records have changed since the last call.
    pub(crate) fn take_record_changes(&mut self) -> Vec<RecordChange> {
        let mut changes = Vec::new();
        for id in mem::take(&mut self.changed) {
            let record = self.get(id).and_then(LeaseRecord::of);
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
        self.index.owned_by(client).collect()
    }
}

#[cfg(test)]
impl Leases {
    /// Returns the leases that may have changed since they were looked at.
    pub(crate) fn unchecked(&self) -> Option<&BTreeSet<LeaseId>> {
        self.unchecked.as_ref()
    }

    /// Asserts that the index is that of the leases.
    pub(crate) fn check_index(&self) {
        let mut index = LeaseIndex::default();
        for (id, lease) in self.iter() {
            index.replace(id, &Keys::default(), &Keys::of(lease));
        }
        assert_eq!(self.index.without_version(), index.without_version());
    }
}
