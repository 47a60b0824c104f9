//! The order of a session's all-reduces.
//!
//! The all-reduces of a group keep their order, as the n-th must be the n-th on every rank.
//! So an all-reduce that cannot begin delays those after it.

use std::collections::{HashMap, VecDeque, hash_map::Entry};

use burn_ir::TensorId;
use tensord_proto::{codec::DecodedOps, collective_op::AllReduce};

/// The state of an all-reduce that was begun before its turn.
#[derive(Debug)]
pub(super) enum EarlyAllReduce {
    /// The result is in flight under this ticket.
    Ticket(u64),
    /// The group is not valid, for this reason.
    Invalid(String),
}

/// All-reduces that are decoded and whose turn has not come.
#[derive(Default)]
pub(super) struct AllReduceOrder {
    /// All-reduces that have not begun, in order, by group.
    decoded: HashMap<Vec<u32>, VecDeque<AllReduce>>,
    /// All-reduces that have begun, by output.
    early: HashMap<TensorId, EarlyAllReduce>,
}

impl AllReduceOrder {
    /// Records the all-reduces among `ops`, which were just decoded.
    pub(super) fn record(&mut self, ops: &DecodedOps) {
        for op in ops.iter().filter_map(|op| AllReduce::of(op)) {
            let group = self.decoded.entry(op.lease_ranks.clone()).or_default();
            group.push_back(op);
        }
    }

    /// Removes and returns the all-reduces that may begin, in the order of each group.
    /// `may_begin` receives the first all-reduce of a group and the number of all-reduces
    /// already chosen by this call; when it returns `false`, the rest of the group stays.
    pub(super) fn take_ready(
        &mut self,
        may_begin: impl Fn(&AllReduce, usize) -> bool,
    ) -> Vec<AllReduce> {
        let mut ready = Vec::new();
        if self.decoded.is_empty() {
            return ready;
        }
        self.decoded.retain(|_, group| {
            while let Some(op) = group.front()
                && may_begin(op, ready.len())
            {
                ready.extend(group.pop_front());
            }
            !group.is_empty()
        });
        ready
    }

    /// Removes `op` from the head of its group, at its turn. Returns `false` if another
    /// all-reduce or none is at the head, as when `op` has begun before.
    pub(super) fn take_next(&mut self, op: &AllReduce) -> bool {
        let Entry::Occupied(mut group) = self.decoded.entry(op.lease_ranks.clone()) else {
            return false;
        };
        let is_next = |next: &mut AllReduce| next.out.id == op.out.id;
        let taken = group.get_mut().pop_front_if(is_next).is_some();
        if taken && group.get().is_empty() {
            group.remove();
        }
        taken
    }

    /// Returns the output of the all-reduce of the same group that must begin just before
    /// `op`, or `None` if every all-reduce before `op` in the group has begun.
    pub(super) fn preceding_unstarted(&self, op: &AllReduce) -> Option<TensorId> {
        let group = self.decoded.get(&op.lease_ranks)?;
        let at = group.iter().position(|one| one.out.id == op.out.id)?;
        Some(group.get(at.checked_sub(1)?)?.out.id)
    }

    /// Records that the all-reduce with output `out` has begun.
    pub(super) fn set_begun(&mut self, out: TensorId, state: EarlyAllReduce) {
        self.early.insert(out, state);
    }

    /// Returns the state of the all-reduce with output `out` at its turn, or `None` if it
    /// has not begun.
    pub(super) fn take_begun(&mut self, out: TensorId) -> Option<EarlyAllReduce> {
        self.early.remove(&out)
    }
}
