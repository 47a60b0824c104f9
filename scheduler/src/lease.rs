//! The leases, and which of the leases it never granted the engine may still
//! believe in.
//!
//! A lease is in one of three states, told by its two deadlines. Granted and
//! in use: neither is set. Without its client, because that is detached or
//! because a worker told of the lease before the client did: `expires_at`.
//! Claimed by its client before all its workers joined: `rejoin_by`.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::{ClientId, LeaseId, WorkerId};

use crate::event::Share;
use crate::time::Timestamp;

/// A client's right to some devices.
#[derive(Default)]
pub(crate) struct Lease {
    /// `None`: a worker runs it, and its client has not claimed it yet.
    pub(crate) owner: Option<ClientId>,
    /// Every device it has, those of workers that have yet to join included.
    pub(crate) shares: BTreeSet<Share>,
    /// When it ends unless its client attaches.
    pub(crate) expires_at: Option<Timestamp>,
    /// When it ends unless its last worker has joined.
    pub(crate) rejoin_by: Option<Timestamp>,
}

impl Lease {
    /// Granted to its client, or claimed by it.
    pub(crate) fn owned(client: ClientId, shares: Vec<Share>) -> Self {
        Self {
            owner: Some(client),
            shares: shares.into_iter().collect(),
            ..Self::default()
        }
    }

    pub(crate) fn workers(&self) -> BTreeSet<WorkerId> {
        self.shares.iter().map(|share| share.worker).collect()
    }

    /// When it ends if nobody comes.
    pub(crate) fn ends_at(&self) -> Option<Timestamp> {
        self.expires_at.into_iter().chain(self.rejoin_by).min()
    }
}

/// Every lease, and a short memory of those that ended.
pub(crate) struct Leases {
    leases: BTreeMap<LeaseId, Lease>,
    /// Until when a lease may be adopted.
    adopt_until: Timestamp,
    /// Those that ended before `adopt_until`: the leases that are unknown
    /// for another reason than a restart.
    ended: BTreeSet<LeaseId>,
}

impl Leases {
    /// Bound on `ended`, half a megabyte. A pool in which so many leases have
    /// ended within the window has long recovered, so the window closes.
    const MAX_ENDED: usize = 1 << 16;

    pub(crate) fn new(adopt_until: Timestamp) -> Self {
        Self {
            leases: BTreeMap::new(),
            adopt_until,
            ended: BTreeSet::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.leases.len()
    }

    pub(crate) fn get(&self, lease: LeaseId) -> Option<&Lease> {
        self.leases.get(&lease)
    }

    pub(crate) fn get_mut(&mut self, lease: LeaseId) -> Option<&mut Lease> {
        self.leases.get_mut(&lease)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (LeaseId, &Lease)> {
        self.leases.iter().map(|(id, lease)| (*id, lease))
    }

    pub(crate) fn insert(&mut self, id: LeaseId, lease: Lease) {
        let replaced = self.leases.insert(id, lease);
        assert!(replaced.is_none(), "lease id {id} used twice");
    }

    pub(crate) fn remove(&mut self, id: LeaseId, now: Timestamp) -> Option<Lease> {
        let removed = self.leases.remove(&id)?;
        if now < self.adopt_until {
            self.ended.insert(id);
            if self.ended.len() >= Self::MAX_ENDED {
                self.adopt_until = now;
            }
        }
        Some(removed)
    }

    /// Whether a lease that is not here may be one from before a restart,
    /// rather than one that ended.
    pub(crate) fn may_adopt(&self, id: LeaseId, now: Timestamp) -> bool {
        now < self.adopt_until && !self.ended.contains(&id)
    }

    /// Drops the memory that is of no use any more.
    pub(crate) fn forget_ended(&mut self, now: Timestamp) {
        if now >= self.adopt_until {
            self.ended.clear();
        }
    }

    /// Leases of a client, attached or not.
    pub(crate) fn owned_by(&self, client: ClientId) -> Vec<LeaseId> {
        let owned = self.iter().filter(|(_, lease)| lease.owner == Some(client));
        owned.map(|(id, _)| id).collect()
    }
}

#[cfg(test)]
impl Leases {
    /// How many ended leases it remembers.
    pub(crate) fn ended_len(&self) -> usize {
        self.ended.len()
    }
}
