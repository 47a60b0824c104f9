//! Short streams that use all of the grammar, for tests that need very many.

use burn_backend::Slice;
use burn_ir::{
    BaseOperationIr, InitOperationIr, IrVisitorMut, ScalarIr, ScalarOpIr, SliceOpIr, TensorId,
};

use super::{kinds::any_op, *};

/// A stream: its frames, each with its count of ops.
pub(super) type Stream = Vec<(Vec<u8>, u32)>;

/// Returns the op that stands for an upload.
pub(super) fn init(id: u64) -> OperationIr {
    OperationIr::Init(InitOperationIr { out: tensor(id) })
}

/// Returns streams of a few frames, always the same ones.
pub(super) fn streams(count: usize) -> Vec<Stream> {
    let mut rng = Rng(11);
    (0..count).map(|_| stream(&mut rng)).collect()
}

/// Returns a loop of a few iterations, one frame each, with exceptions.
fn stream(rng: &mut Rng) -> Stream {
    let body: Vec<_> = (0..2 + rng.below(3)).map(|_| loop_op(rng)).collect();
    let mut pair = Pair::default();
    let rounds = 0..2 + rng.below(3) as u64;
    let frames = rounds.map(|round| {
        let mut ops: Vec<_> = body.iter().map(|op| later(op, round)).collect();
        let at = rng.below(ops.len());
        match rng.below(8) {
            0 => ops.insert(at, drop_of(round)),
            1 => drop(ops.remove(at)),
            2 => ops.rotate_left(at),
            3 => ops.push(loop_op(rng)),
            _ => {}
        }
        (pair.encode(&ops), ops.len() as u32)
    });
    frames.collect()
}

fn loop_op(rng: &mut Rng) -> OperationIr {
    let [a, b, c] = [0; 3].map(|_: u64| 16 + rng.below(20) as u64);
    match rng.below(6) {
        0 => add(a, b, c),
        1 => init(a),
        2 => drop_of(a),
        3 => OperationIr::NumericFloat(
            DType::F32,
            NumericOperationIr::MulScalar(ScalarOpIr {
                lhs: tensor(a),
                rhs: ScalarIr::Float(0.1),
                out: tensor(b),
            }),
        ),
        4 => OperationIr::BaseFloat(BaseOperationIr::Slice(SliceOpIr {
            tensor: tensor(1),
            ranges: vec![Slice::new(0, Some(64), 1)],
            out: tensor(c),
        })),
        _ => any_op(rng).unwrap_or_else(|| drop_of(1)),
    }
}

/// Returns `op` as it is `rounds` iterations later: with new ids, scalars and bounds.
fn later(op: &OperationIr, rounds: u64) -> OperationIr {
    struct Later(u64);
    impl IrVisitorMut for Later {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            // The first few outlive the loop.
            if tensor.id.value() >= 16 {
                tensor.id = TensorId::new(tensor.id.value() + 20 * self.0);
            }
        }

        fn visit_scalar_mut(&mut self, scalar: &mut ScalarIr) {
            if let ScalarIr::Float(by) = scalar {
                *by = by.powi(self.0 as i32);
            }
        }

        fn visit_range_mut(&mut self, range: &mut Slice) {
            range.start = range.start.wrapping_add(64 * self.0 as isize);
        }
    }
    let mut op = op.clone();
    op.visit_mut(&mut Later(rounds));
    op
}
