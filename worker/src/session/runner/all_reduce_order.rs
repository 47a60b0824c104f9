//! The order of a session's all-reduces.
//!
//! The all-reduces of a group keep their order, as the n-th must be the n-th on every rank.
//! So an all-reduce that cannot begin delays those after it.

use std::collections::{HashMap, HashSet, VecDeque, hash_map::Entry};

use burn_ir::TensorId;
use tensord_proto::{
    codec::{DecodedOps, tensor_bytes},
    collective_op::AllReduce,
};

/// Maximum bytes of all-reduces that have begun before their turn, unless it is one. Their results are charged to the
/// session when their turn comes.
const MAX_EARLY_BYTES: usize = 256 << 20;

/// The state of an all-reduce that has begun.
#[derive(Debug)]
pub(super) struct BegunAllReduce {
    /// The ticket of the result in flight, or the reason why the group is not valid.
    pub(super) ticket: Result<u64, String>,
    /// Bytes that count towards [`MAX_EARLY_BYTES`]: 0 if the all-reduce has begun at its turn.
    pub(super) early_bytes: usize,
}

/// All-reduces that are decoded and whose turn has not come.
#[derive(Default)]
pub(super) struct AllReduceOrder {
    /// All-reduces that have not begun, in order, by group.
    decoded: HashMap<Vec<u32>, VecDeque<AllReduce>>,
    /// All-reduces that have begun, by output.
    begun: HashMap<TensorId, BegunAllReduce>,
    /// Bytes of all-reduces that have begun before their turn.
    early_bytes: usize,
}

impl AllReduceOrder {
    /// Records the all-reduces among `ops`, which were just decoded.
    pub(super) fn record(&mut self, ops: &DecodedOps) {
        for op in ops.iter().filter_map(|it| AllReduce::of(&it.op)) {
            let group = self.decoded.entry(op.lease_ranks.clone()).or_default();
            group.push_back(op);
        }
    }

    /// Removes and returns the all-reduces that may begin before their turn, in the order of each group, with their
    /// bytes. `may_begin` receives the first all-reduce of a group and the number of all-reduces already chosen by this
    /// call; when it returns `false`, the rest of the group stays. So it does if the all-reduces that have begun before
    /// their turn have too many bytes, or one with the same output has begun.
    pub(super) fn take_ready(
        &mut self,
        may_begin: impl Fn(&AllReduce, usize) -> bool,
    ) -> Vec<(AllReduce, usize)> {
        let mut ready = Vec::new();
        if self.decoded.is_empty() {
            return ready;
        }
        let (begun, early_bytes) = (&self.begun, &mut self.early_bytes);
        let mut outs = HashSet::new();
        self.decoded.retain(|_, group| {
            while let Some(op) = group.front()
                && let bytes = tensor_bytes(&op.tensor.shape, op.tensor.dtype).unwrap_or(usize::MAX)
                && (*early_bytes == 0 || early_bytes.saturating_add(bytes) <= MAX_EARLY_BYTES)
                && may_begin(op, ready.len())
                && !begun.contains_key(&op.out.id)
                && outs.insert(op.out.id)
            {
                *early_bytes = early_bytes.saturating_add(bytes);
                ready.extend(group.pop_front().map(|op| (op, bytes)));
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
    pub(super) fn set_begun(&mut self, out: TensorId, state: BegunAllReduce) {
        self.begun.insert(out, state);
    }

    /// Returns the state of the all-reduce with output `out` at its turn, or `None` if it
    /// has not begun.
    pub(super) fn take_begun(&mut self, out: TensorId) -> Option<BegunAllReduce> {
        let begun = self.begun.remove(&out)?;
        self.early_bytes = self.early_bytes.saturating_sub(begun.early_bytes);
        Some(begun)
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
    use burn_ir::{TensorIr, TensorStatus};

    use super::*;

    fn all_reduce(out: u64, bytes: usize) -> AllReduce {
        let tensor = |id, status| TensorIr {
            id: TensorId::new(id),
            shape: [bytes / 4].into(),
            status,
            dtype: DType::F32,
        };
        AllReduce {
            tensor: tensor(1, TensorStatus::ReadOnly),
            out: tensor(out, TensorStatus::NotInit),
            mean: false,
            lease_ranks: vec![0],
        }
    }

    /// Begins what may begin before its turn. Returns the outputs.
    fn begin_ready(order: &mut AllReduceOrder) -> Vec<u64> {
        let ready = order.take_ready(|_, _| true);
        for (op, early_bytes) in &ready {
            let begun = BegunAllReduce {
                ticket: Ok(0),
                early_bytes: *early_bytes,
            };
            order.set_begun(op.out.id, begun);
        }
        ready.iter().map(|(op, _)| op.out.id.value()).collect()
    }

    fn decoded(ops: impl IntoIterator<Item = AllReduce>) -> AllReduceOrder {
        let mut order = AllReduceOrder::default();
        order.decoded.insert(vec![0], ops.into_iter().collect());
        order
    }

    #[test]
    fn bytes_that_begin_before_their_turn_are_bounded() {
        let half = MAX_EARLY_BYTES / 2;
        let sizes = [half, half, 4, 2 * MAX_EARLY_BYTES, 4];
        let mut order = decoded((10..).zip(sizes).map(|(out, size)| all_reduce(out, size)));
        assert_eq!(begin_ready(&mut order), [10, 11]);
        assert_eq!(begin_ready(&mut order), [0; 0]);
        order.take_begun(TensorId::new(10)).unwrap();
        assert_eq!(begin_ready(&mut order), [12]);
        for out in [11, 12] {
            assert_eq!(begin_ready(&mut order), [0; 0]);
            order.take_begun(TensorId::new(out)).unwrap();
        }
        // One that is larger than the bound begins alone.
        assert_eq!(begin_ready(&mut order), [13]);
        order.take_begun(TensorId::new(13)).unwrap();
        assert_eq!(begin_ready(&mut order), [14]);
    }

    #[test]
    fn all_reduces_with_one_output_begin_one_after_the_other() {
        let mut order = decoded([all_reduce(10, 4), all_reduce(10, 4), all_reduce(11, 4)]);
        assert_eq!(begin_ready(&mut order), [10]);
        assert_eq!(begin_ready(&mut order), [0; 0]);
        order.take_begun(TensorId::new(10)).unwrap();
        assert_eq!(begin_ready(&mut order), [10, 11]);
    }
}
