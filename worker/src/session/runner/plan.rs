//! Work that is decoded but not executed, in the order in which it was received.
//!
//! Work is decoded ahead, so that an all-reduce can begin before its turn.

use std::collections::VecDeque;

use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};
use bytes::Bytes;
use tensord_proto::codec::{CodecError, DecodedOp, DecodedOps, OpDecoder};

use super::Work;

/// Approximate number of ops that are decoded ahead: several steps of a small model, or
/// the backward pass of a large one, at some hundred bytes each.
const AHEAD_OPS: usize = 8192;

/// Approximate size of ops that are decoded ahead, as [`DecodedOp::plain_bytes`] counts it: more than [`AHEAD_OPS`]
/// usual ops have, which have some tens of these bytes each. A frame of a few bytes may stand for thousands of ops
/// with a thousand inputs each.
const AHEAD_BYTES: usize = 1 << 20;

/// Decoded work.
enum Plan {
    /// The ops of a frame, and the contents list of its uploads until the frame begins.
    Ops(VecDeque<DecodedOp>, Option<Bytes>),
    Other(Work),
    Close,
}

/// The next piece of work. An op has the number of ops up to it; other work and the end of a
/// frame have the bytes of credit that they return.
pub(super) enum Planned {
    /// A frame of ops with this contents list begins.
    FrameBegin(Bytes),
    Op(DecodedOp, u64),
    /// The ops of a frame are done, which returns these bytes of credit.
    FrameEnd(usize),
    Other(Task, usize),
    /// The client closed the session. Every further call of [`PlanQueue::next`] returns this.
    Close,
}

/// Work that is due now or was deferred.
pub(super) struct Task {
    pub(super) kind: TaskKind,
    /// Number of the op in the session, or of the last op before this work.
    pub(super) number: u64,
}

pub(super) enum TaskKind {
    Op(DecodedOp),
    Other(Work),
}

impl Task {
    /// Returns the task's size, as [`DecodedOp::plain_bytes`] counts it. Work other than ops is small.
    pub(super) fn plain_bytes(&self) -> usize {
        match &self.kind {
            TaskKind::Op(decoded) => decoded.plain_bytes as usize,
            TaskKind::Other(_) => 0,
        }
    }

    /// Calls `visit` with each tensor that the task uses, and whether the task consumes
    /// it.
    pub(super) fn visit_used(&self, visit: &mut dyn FnMut(TensorId, bool)) {
        let mut one = |tensor: &TensorIr| visit(tensor.id, is_consumed(tensor));
        match &self.kind {
            TaskKind::Op(decoded) => match &*decoded.op {
                OperationIr::Drop(tensor) => visit(tensor.id, true),
                op => op.inputs().for_each(one),
            },
            TaskKind::Other(Work::Read { tensor, .. } | Work::Offer { tensor, .. }) => one(tensor),
            TaskKind::Other(Work::Alias { source, .. }) => visit(*source, false),
            TaskKind::Other(_) => {}
        }
    }

    /// Calls `visit` with each tensor that the task makes.
    pub(super) fn visit_made(&self, visit: &mut dyn FnMut(TensorId)) {
        match &self.kind {
            TaskKind::Op(decoded) => decoded.op.outputs().for_each(|out| visit(out.id)),
            TaskKind::Other(Work::Alias { id, .. } | Work::Poison { id, .. }) => visit(*id),
            TaskKind::Other(Work::Take { out, .. }) => visit(out.id),
            TaskKind::Other(_) => {}
        }
    }
}

fn is_consumed(tensor: &TensorIr) -> bool {
    tensor.status == TensorStatus::ReadWrite
}

/// The decoded work of a session.
#[derive(Default)]
pub(super) struct PlanQueue {
    decoder: OpDecoder,
    /// With the bytes of credit that each piece returns.
    plans: VecDeque<(Plan, usize)>,
    /// Number of ops and other pieces of work in `plans`.
    planned_ops: usize,
    /// Size of the ops in `plans`, as [`DecodedOp::plain_bytes`] counts it.
    planned_bytes: usize,
    /// Number of ops whose turn has come.
    ops_seen: u64,
    /// Whether a mark is planned. Nothing is planned behind it, as all-reduces begin when they are
    /// planned, and the session's state at the mark must not have them.
    has_mark: bool,
}

impl PlanQueue {
    /// Restores the state at a mark: the number of ops whose turn had come, and the decoder's
    /// counter.
    pub(super) fn restore(&mut self, ops_seen: u64, decoder_counter: u64) {
        self.ops_seen = ops_seen;
        self.decoder = OpDecoder::starting_at(decoder_counter);
    }

    /// Returns the decoder's counter. At the turn of a mark it is the counter at the mark, as
    /// nothing is planned behind one.
    pub(super) fn decoder_counter(&self) -> u64 {
        self.decoder.counter()
    }

    /// Returns whether the next piece of work is a mark.
    pub(super) fn is_mark_next(&self) -> bool {
        matches!(self.plans.front(), Some((Plan::Other(Work::Mark(_)), _)))
    }

    /// Returns the number of ops whose turn has come.
    pub(super) fn ops_seen(&self) -> u64 {
        self.ops_seen
    }

    pub(super) fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    /// Returns whether more work may be decoded ahead.
    pub(super) fn has_room(&self) -> bool {
        let has_room = self.planned_ops < AHEAD_OPS && self.planned_bytes < AHEAD_BYTES;
        has_room && !self.has_mark
    }

    /// Decodes and queues a piece of work, which returns `credit` bytes when done. Calls
    /// `on_ops` with the ops of a frame.
    pub(super) fn push(
        &mut self,
        work: Work,
        credit: usize,
        on_ops: impl FnOnce(&DecodedOps),
    ) -> Result<(), CodecError> {
        // The client's encoder records these tensors at the same point of the stream.
        if let Work::Poison { id, .. }
        | Work::Alias { id, .. }
        | Work::Take {
            out: TensorIr { id, .. },
            ..
        } = &work
        {
            self.decoder.note_tensor(*id);
        }
        let plan = match work {
            Work::Ops {
                count,
                encoded,
                contents,
            } => {
                let ops = self.decoder.decode(&encoded, count)?;
                let bytes = ops.iter().map(|decoded| decoded.plain_bytes as usize);
                self.planned_ops += ops.len();
                self.planned_bytes += bytes.sum::<usize>();
                on_ops(&ops);
                Plan::Ops(ops.into(), Some(contents))
            }
            work => {
                if let Work::Mark(_) = work {
                    self.decoder.restart();
                    self.has_mark = true;
                }
                self.planned_ops += 1;
                Plan::Other(work)
            }
        };
        self.plans.push_back((plan, credit));
        Ok(())
    }

    /// Queues the end of the session behind all planned work.
    pub(super) fn push_close(&mut self) {
        self.plans.push_back((Plan::Close, 0));
    }

    /// Returns whether the next piece of work is neither an op nor the end of the session.
    pub(super) fn is_other_next(&self) -> bool {
        matches!(self.plans.front(), Some((Plan::Other(_), _)))
    }

    /// Returns the next piece of work, whose turn has come.
    pub(super) fn next(&mut self) -> Option<Planned> {
        match &mut self.plans.front_mut()?.0 {
            Plan::Ops(ops, contents) => {
                if let Some(contents) = contents.take() {
                    return Some(Planned::FrameBegin(contents));
                }
                if let Some(op) = ops.pop_front() {
                    self.planned_ops -= 1;
                    self.planned_bytes -= op.plain_bytes as usize;
                    self.ops_seen += 1;
                    return Some(Planned::Op(op, self.ops_seen));
                }
            }
            Plan::Other(_) => {}
            Plan::Close => return Some(Planned::Close),
        }
        let (plan, credit) = self.plans.pop_front()?;
        let Plan::Other(work) = plan else {
            return Some(Planned::FrameEnd(credit));
        };
        self.planned_ops -= 1;
        if let Work::Mark(_) = work {
            self.has_mark = false;
        }
        let is_op = matches!(
            work,
            Work::Poison { .. } | Work::Alias { .. } | Work::Take { .. }
        );
        self.ops_seen += u64::from(is_op);
        let task = Task {
            kind: TaskKind::Other(work),
            number: self.ops_seen,
        };
        Some(Planned::Other(task, credit))
    }

    /// Returns the next op, or `None` if other work is planned before it.
    #[cfg(feature = "testing")]
    pub(super) fn next_op(&self) -> Option<&OperationIr> {
        match self.plans.front() {
            Some((Plan::Ops(ops, _), _)) => ops.front().map(|decoded| &*decoded.op),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
    use burn_ir::{CustomOpIr, TensorIr};
    use tensord_proto::codec::OpEncoder;

    use super::*;

    /// Returns a frame of `count` equal ops that have a thousand inputs each.
    fn frame(encoder: &mut OpEncoder, count: u32) -> Work {
        let tensor = |id| TensorIr::uninit(TensorId::new(id), [1].into(), DType::F32);
        let inputs: Vec<_> = (0..1000).map(tensor).collect();
        let op = OperationIr::Custom(CustomOpIr::new("large", &inputs, &[]));
        let mut encoded = Vec::new();
        (0..count).for_each(|_| encoder.encode(&op, &mut encoded));
        encoder.finish(&mut encoded);
        Work::Ops {
            count,
            encoded: encoded.into(),
            contents: Bytes::new(),
        }
    }

    #[test]
    fn large_ops_are_decoded_ahead_within_a_bound_of_bytes() {
        const OPS: u32 = 100;
        let (mut queue, mut encoder) = (PlanQueue::default(), OpEncoder::default());
        let (mut frames, mut of_one) = (0, 0);
        while queue.has_room() {
            queue.push(frame(&mut encoder, OPS), 7, |_| {}).unwrap();
            frames += 1;
            of_one = queue.planned_bytes / frames;
        }
        assert!(queue.planned_ops < AHEAD_OPS);
        assert!((AHEAD_BYTES..AHEAD_BYTES + of_one).contains(&queue.planned_bytes));
        let (mut ops, mut ended) = (0, 0);
        while let Some(next) = queue.next() {
            match next {
                Planned::FrameEnd(credit) => ended += credit,
                Planned::Op(..) => ops += 1,
                _ => {}
            }
        }
        assert_eq!((ops, ended), (frames * OPS as usize, frames * 7));
        assert_eq!((queue.planned_ops, queue.planned_bytes), (0, 0));
        assert!(queue.has_room());
    }
}
