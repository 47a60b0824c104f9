//! The leases, and which of the leases it never granted the engine may still
//! believe in.
//!
//! A lease is in one of three states, told by its two deadlines. Granted and
//! in use: neither is set. Without its client, because that is detached or
//! because a worker told of the lease before the client did: `expires_at`.
//! Claimed by its client before all its workers joined: `rejoin_by`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tensord_proto::grant::GrantNumber;
use tensord_proto::ids::{ClientId, LeaseId, WorkerId};

use crate::event::{DeviceGrant, DeviceRef, GrantedShare};
use crate::time::Timestamp;

/// A client's right to some devices.
#[derive(Default)]
pub(crate) struct Lease {
    /// `None`: a worker runs it, and its client has not claimed it yet.
    pub(crate) owner: Option<ClientId>,
    /// Every device it has, those of workers that have yet to join included, and the grant
    /// by which it has it.
    pub(crate) shares: BTreeMap<DeviceRef, GrantNumber>,
    /// When it ends unless its client attaches.
    pub(crate) expires_at: Option<Timestamp>,
    /// When it ends unless its last worker has joined.
    pub(crate) rejoin_by: Option<Timestamp>,
}

impl Lease {
    /// Granted to its client, or claimed by it.
    pub(crate) fn owned(client: ClientId, shares: &[GrantedShare]) -> Self {
        let mut lease = Self {
            owner: Some(client),
            ..Self::default()
        };
        lease.add(shares);
        lease
    }

    /// Notes further devices, or the right grants of those it has.
    pub(crate) fn add(&mut self, shares: &[GrantedShare]) {
        let shares = shares.iter().map(|granted| (granted.share, granted.grant));
        self.shares.extend(shares);
    }

    pub(crate) fn workers(&self) -> BTreeSet<WorkerId> {
        self.shares.keys().map(|share| share.worker).collect()
    }

    /// The grants by which it has devices of `worker`.
    pub(crate) fn grants_on(&self, worker: WorkerId) -> Vec<DeviceGrant> {
        let shares = self.shares.iter();
        let shares = shares.filter(|(share, _)| share.worker == worker);
        let grant = |(share, &grant): (&DeviceRef, _)| DeviceGrant {
            index: share.index,
            grant,
        };
        shares.map(grant).collect()
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

    /// Puts off what has a deadline, as the scheduler did not run from `since` until `now`.
    pub(crate) fn put_off(&mut self, since: Timestamp, now: Timestamp, wait: Duration) {
        if since < self.adopt_until {
            self.adopt_until = self.adopt_until + now.saturating_since(since);
        }
        for lease in self.leases.values_mut() {
            for deadline in [&mut lease.expires_at, &mut lease.rejoin_by] {
                *deadline = deadline.map(|at| at.max(now + wait));
            }
        }
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
