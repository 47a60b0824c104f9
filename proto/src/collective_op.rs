//! The ops of collectives.
//!
//! Where these are in Burn's IR differs between its releases, so only this module knows it.

use burn_backend::distributed::ReduceOperation;
use burn_ir::{AllReduceOpIr, DeviceIdIr, DistributedOperationIr, OperationIr, TensorIr};

/// An all-reduce: a session's tensor becomes the sum or the mean over the tensors of a group.
#[derive(Debug, Clone, PartialEq)]
pub struct AllReduce {
    /// The tensor that is reduced.
    pub tensor: TensorIr,
    /// The result.
    pub out: TensorIr,
    /// Whether the result is the mean, or the sum.
    pub mean: bool,
    /// The group: the lease ranks of its sessions.
    pub lease_ranks: Vec<u32>,
}

impl AllReduce {
    /// Returns `op` as an all-reduce, if it is one.
    pub fn of(op: &OperationIr) -> Option<Self> {
        match CollectiveOp::of(op)? {
            CollectiveOp::AllReduce(op) => Some(op),
            CollectiveOp::Sync => None,
        }
    }

    /// Returns whether `op` is an all-reduce, without copying it.
    pub fn is(op: &OperationIr) -> bool {
        matches!(
            op,
            OperationIr::Distributed(DistributedOperationIr::AllReduce(_))
        )
    }
}

/// An op that is executed together with other sessions.
// One lives for as long as a call; nobody keeps many.
#[allow(clippy::large_enum_variant)]
#[derive(Debug, Clone, PartialEq)]
pub enum CollectiveOp {
    /// The session's part in an all-reduce.
    AllReduce(AllReduce),
    /// The all-reduces so far shall be executed without waiting for more of them.
    Sync,
}

impl CollectiveOp {
    /// Returns whether `op` is one of these, without copying it.
    pub fn is(op: &OperationIr) -> bool {
        matches!(op, OperationIr::Distributed(_))
    }

    /// Returns whether `op` is a [`Sync`](Self::Sync), without copying it.
    #[inline]
    pub fn is_sync(op: &OperationIr) -> bool {
        matches!(
            op,
            OperationIr::Distributed(DistributedOperationIr::SyncCollective)
        )
    }

    /// Returns `op` as one of these, if it is.
    pub fn of(op: &OperationIr) -> Option<Self> {
        let OperationIr::Distributed(op) = op else {
            return None;
        };
        Some(match op {
            DistributedOperationIr::AllReduce(op) => Self::AllReduce(AllReduce {
                tensor: op.tensor.clone(),
                out: op.out.clone(),
                mean: op.op == ReduceOperation::Mean,
                lease_ranks: op.device_ids.iter().map(|id| id.index_id.into()).collect(),
            }),
            DistributedOperationIr::SyncCollective => Self::Sync,
        })
    }
}

impl From<CollectiveOp> for OperationIr {
    fn from(op: CollectiveOp) -> Self {
        // A lease has fewer devices.
        let id = |lease_rank| DeviceIdIr {
            type_id: 0,
            index_id: lease_rank as u16,
        };
        Self::Distributed(match op {
            CollectiveOp::AllReduce(op) => DistributedOperationIr::AllReduce(AllReduceOpIr {
                tensor: op.tensor,
                out: op.out,
                op: match op.mean {
                    true => ReduceOperation::Mean,
                    false => ReduceOperation::Sum,
                },
                device_ids: op.lease_ranks.into_iter().map(id).collect(),
            }),
            CollectiveOp::Sync => DistributedOperationIr::SyncCollective,
        })
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::{DType, Shape};
    use burn_ir::{TensorId, TensorStatus};

    use super::*;

    #[test]
    fn ops_of_collectives_are_found_among_others() {
        let tensor = |id, status| TensorIr {
            id: TensorId::new(id),
            shape: Shape::new([2, 3]),
            status,
            dtype: DType::F32,
        };
        let reduce = |mean| AllReduce {
            tensor: tensor(1, TensorStatus::ReadWrite),
            out: tensor(2, TensorStatus::NotInit),
            mean,
            lease_ranks: vec![0, 3, 7],
        };
        for op in [
            CollectiveOp::AllReduce(reduce(false)),
            CollectiveOp::AllReduce(reduce(true)),
            CollectiveOp::Sync,
        ] {
            let burns = OperationIr::from(op.clone());
            assert_eq!(CollectiveOp::of(&burns), Some(op.clone()));
            assert!(CollectiveOp::is(&burns));
            assert_eq!(CollectiveOp::is_sync(&burns), op == CollectiveOp::Sync);
            let all_reduce = match op {
                CollectiveOp::AllReduce(op) => Some(op),
                CollectiveOp::Sync => None,
            };
            assert_eq!(AllReduce::is(&burns), all_reduce.is_some());
            assert_eq!(AllReduce::of(&burns), all_reduce);
        }
        let other = OperationIr::Drop(tensor(1, TensorStatus::ReadWrite));
        assert_eq!(CollectiveOp::of(&other), None);
        assert!(!AllReduce::is(&other));
        assert!(!CollectiveOp::is(&other));
    }
}
