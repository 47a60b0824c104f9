//! The devices of a lease, and groups of them.

use std::sync::Arc;

use tensord_proto::{ids::WorkerId, v1};

/// The devices of a lease, in the order of its shares. A device's *lease rank* is its
/// number in this order.
#[derive(Debug)]
pub(crate) struct LeaseMembers {
    shares: Vec<v1::LeaseShare>,
    me: WorkerId,
}

impl LeaseMembers {
    pub(crate) fn new(shares: Vec<v1::LeaseShare>, me: WorkerId) -> Self {
        Self { shares, me }
    }

    /// Returns this worker's id.
    pub(crate) fn me(&self) -> WorkerId {
        self.me
    }

    /// Returns the number of devices.
    pub(crate) fn len(&self) -> usize {
        self.shares.len()
    }

    /// Returns the share at `lease_rank`.
    pub(crate) fn share(&self, lease_rank: u32) -> Option<&v1::LeaseShare> {
        self.shares.get(lease_rank as usize)
    }

    /// Returns the worker at `lease_rank`.
    pub(crate) fn worker(&self, lease_rank: u32) -> Option<WorkerId> {
        self.share(lease_rank)
            .map(|share| WorkerId(share.worker_id))
    }

    /// Returns the lease rank of a device of `worker`.
    pub(crate) fn lease_rank(&self, worker: WorkerId, device_index: u32) -> Option<u32> {
        let is_it = |s: &v1::LeaseShare| (s.worker_id, s.device_index) == (worker.0, device_index);
        self.shares.iter().position(is_it).map(|at| at as u32)
    }

    /// Returns the first share of each worker except this one.
    pub(crate) fn others(&self) -> impl Iterator<Item = &v1::LeaseShare> {
        let is_first = |at: usize, worker| !self.shares[..at].iter().any(|s| s.worker_id == worker);
        let shares = self.shares.iter().enumerate();
        shares
            .filter(move |(at, s)| s.worker_id != self.me.0 && is_first(*at, s.worker_id))
            .map(|(_, share)| share)
    }

    /// Returns whether this worker dials `other`; otherwise, `other` dials. Of two workers,
    /// the one that comes first in the lease dials.
    pub(crate) fn dials(&self, other: WorkerId) -> bool {
        let first = self.shares.iter().map(|share| WorkerId(share.worker_id));
        first.into_iter().find(|w| [self.me, other].contains(w)) == Some(self.me)
    }

    /// Returns a description of a device for messages.
    pub(crate) fn describe(&self, lease_rank: u32) -> String {
        match self.share(lease_rank) {
            Some(share) => format!("device {} of worker {}", share.device_index, share.worker),
            None => format!("place {lease_rank} of the lease"),
        }
    }
}

/// The lease ranks of a group's devices, ascending. A device's *rank* in the group is its
/// position in this list.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Members(Arc<[u32]>);

impl Members {
    /// Creates the group of the devices at `lease_ranks`, which may be in any order.
    ///
    /// # Errors
    ///
    /// If a device is missing, duplicated or not part of the lease: a message for the
    /// program.
    pub(crate) fn new(
        mut lease_ranks: Vec<u32>,
        lease_members: &LeaseMembers,
    ) -> Result<Self, String> {
        lease_ranks.sort_unstable();
        if lease_ranks.is_empty() {
            return Err("the group has no devices".into());
        }
        if let Some(twice) = lease_ranks.windows(2).find(|pair| pair[0] == pair[1]) {
            let rank = lease_ranks
                .iter()
                .position(|lease_rank| *lease_rank == twice[0]);
            let (rank, what) = (rank.unwrap_or_default(), lease_members.describe(twice[0]));
            let again = rank + 1;
            return Err(format!(
                "ranks {rank} and {again} of the group are both {what}"
            ));
        }
        if let Some(lease_rank) = lease_ranks
            .iter()
            .find(|lease_rank| **lease_rank as usize >= lease_members.len())
        {
            let devices = lease_members.len();
            return Err(format!(
                "the group includes device {lease_rank} of the lease, which has {devices} devices"
            ));
        }
        Ok(Self(lease_ranks.into()))
    }

    /// Returns the lease ranks, ascending.
    pub(crate) fn lease_ranks(&self) -> &[u32] {
        &self.0
    }

    /// Returns the rank of the device at `lease_rank` in the group.
    pub(crate) fn rank(&self, lease_rank: u32) -> Option<usize> {
        self.0.binary_search(&lease_rank).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease_members(me: u64) -> LeaseMembers {
        let share = |(worker_id, device_index)| v1::LeaseShare {
            worker_id,
            device_index,
            worker: format!("w{worker_id}"),
            ..v1::LeaseShare::default()
        };
        let shares = [(7, 0), (9, 0), (7, 2), (8, 1)];
        LeaseMembers::new(shares.map(share).to_vec(), WorkerId(me))
    }

    #[test]
    fn first_worker_of_the_lease_dials() {
        assert!(lease_members(7).dials(WorkerId(9)) && lease_members(9).dials(WorkerId(8)));
        assert!(!lease_members(9).dials(WorkerId(7)) && !lease_members(8).dials(WorkerId(9)));
        let others: Vec<_> = lease_members(9)
            .others()
            .map(|share| share.worker_id)
            .collect();
        assert_eq!(others, [7, 8]);
        assert_eq!(lease_members(9).lease_rank(WorkerId(7), 2), Some(2));
    }

    #[test]
    fn groups_ignore_order_and_invalid_groups_are_refused() {
        let group = |lease_ranks: &[u32]| Members::new(lease_ranks.to_vec(), &lease_members(7));
        assert_eq!(group(&[3, 0]), group(&[0, 3]));
        assert_eq!(group(&[3, 0]).unwrap().rank(3), Some(1));
        let wrong = |lease_ranks: &[u32]| group(lease_ranks).unwrap_err();
        assert!(wrong(&[]).contains("no devices"));
        let twice = wrong(&[2, 0, 2]);
        assert_eq!(
            twice,
            "ranks 1 and 2 of the group are both device 2 of worker w7"
        );
        assert!(wrong(&[0, 4]).contains("device 4 of the lease, which has 4 devices"));
    }
}
