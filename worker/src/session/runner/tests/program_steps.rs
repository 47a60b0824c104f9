//! The steps of a random program, and how a program executes each of them.

use burn_backend::{DType, Shape};
use burn_ir::{
    BaseOperationIr, BinaryOpIr, CatOpIr, FlipOpIr, FullOpIr, NumericOperationIr, OperationIr,
    ReduceOpIr, RepeatDimOpIr, ScalarIr, ScalarOpIr, ShapeOpIr, SliceOpIr, SwapDimsOpIr, TensorIr,
    TensorStatus,
};
use burn_std::Slice;
use proptest::prelude::*;
use tensord_proto::{bulk::INLINE_BYTES, codec::tensor_bytes};

use super::{super::Reply, COLUMNS, HeldReply, Program};

/// What a program does to the tensors that it picks.
#[derive(Debug, Clone)]
pub(super) enum ProgramStep {
    Full(usize),
    Slice(usize, usize),
    Reshape(usize),
    Swap(usize),
    Flip(usize),
    Expand(usize),
    Repeat(usize, usize),
    CatOne(usize),
    AddScalar(usize),
    Add(usize),
    Sum(usize),
    Mismatch(usize),
    Alias(usize),
    Read(usize),
    Forget(usize),
    Drop(usize),
}

/// Returns random steps, each with whether it uses its input for the last time.
pub(super) fn steps() -> impl Strategy<Value = Vec<(ProgramStep, bool)>> {
    let pick = || 0usize..64;
    let step = prop_oneof![
        4 => (1usize..120).prop_map(ProgramStep::Full),
        4 => (pick(), 1usize..120).prop_map(|(at, rows)| ProgramStep::Slice(at, rows)),
        2 => pick().prop_map(ProgramStep::Reshape),
        2 => pick().prop_map(ProgramStep::Swap),
        1 => pick().prop_map(ProgramStep::Flip),
        1 => pick().prop_map(ProgramStep::Expand),
        1 => (pick(), 1usize..3).prop_map(|(at, times)| ProgramStep::Repeat(at, times)),
        1 => pick().prop_map(ProgramStep::CatOne),
        3 => pick().prop_map(ProgramStep::AddScalar),
        2 => pick().prop_map(ProgramStep::Add),
        1 => pick().prop_map(ProgramStep::Sum),
        1 => pick().prop_map(ProgramStep::Mismatch),
        3 => pick().prop_map(ProgramStep::Alias),
        3 => pick().prop_map(ProgramStep::Read),
        2 => pick().prop_map(ProgramStep::Forget),
        4 => pick().prop_map(ProgramStep::Drop),
    ];
    prop::collection::vec((step, any::<bool>()), 0..80)
}

fn float(op: BaseOperationIr) -> OperationIr {
    OperationIr::BaseFloat(op)
}

fn number(op: NumericOperationIr) -> OperationIr {
    OperationIr::NumericFloat(DType::F32, op)
}

fn add_one(lhs: TensorIr, out: TensorIr) -> OperationIr {
    let rhs = ScalarIr::Float(1.0);
    number(NumericOperationIr::AddScalar(ScalarOpIr { lhs, rhs, out }))
}

impl Program {
    /// Executes the op that `op` makes of a picked tensor and an output of the shape
    /// `shape(rows, columns)`.
    fn unary(
        &mut self,
        at: usize,
        last: bool,
        shape: impl FnOnce(usize, usize) -> (usize, usize),
        op: impl FnOnce(TensorIr, TensorIr) -> OperationIr,
    ) -> Option<()> {
        let input = self.pick(at, last)?;
        let (rows, columns) = shape(input.shape[0], input.shape[1]);
        let out = self.out(rows, columns);
        self.run(op(input, out.clone()), out);
        Some(())
    }

    fn slice(&mut self, at: usize, last: bool, rows: usize) -> Option<()> {
        let shape = |all: usize, columns| (rows.min(all), columns);
        self.unary(at, last, shape, |tensor, out| {
            let ranges = vec![Slice::from(0..out.shape[0]), Slice::from(0..out.shape[1])];
            float(BaseOperationIr::Slice(SliceOpIr {
                tensor,
                ranges,
                out,
            }))
        })
    }

    /// Drops `tensor`.
    fn discard(&mut self, tensor: TensorIr) {
        let used = TensorIr {
            status: TensorStatus::ReadWrite,
            ..tensor
        };
        self.interpreter.run(Box::new(OperationIr::Drop(used)));
    }

    /// Executes a step, if there is a tensor for it.
    pub(super) fn step(&mut self, step: ProgramStep, last: bool) -> Option<()> {
        let same = |rows, columns| (rows, columns);
        match step {
            ProgramStep::Slice(at, rows) => self.slice(at, last, rows),
            ProgramStep::Reshape(at) => {
                let flat = |rows, columns| (1, rows * columns);
                let reshape = |input, out| BaseOperationIr::Reshape(ShapeOpIr { input, out });
                self.unary(at, last, flat, |input, out| float(reshape(input, out)))
            }
            ProgramStep::Swap(at) => {
                let (dim1, dim2) = (0, 1);
                let swapped = |rows, columns| (columns, rows);
                self.unary(at, last, swapped, |input, out| {
                    float(BaseOperationIr::SwapDims(SwapDimsOpIr {
                        input,
                        out,
                        dim1,
                        dim2,
                    }))
                })
            }
            ProgramStep::Flip(at) => self.unary(at, last, same, |input, out| {
                let axes = vec![0];
                float(BaseOperationIr::Flip(FlipOpIr { input, out, axes }))
            }),
            ProgramStep::Expand(at) => {
                self.slice(at, false, 1)?;
                let row = self.live.len().checked_sub(1)?;
                let four = |rows, columns| (4 * rows, columns);
                let expand = |input, out| BaseOperationIr::Expand(ShapeOpIr { input, out });
                self.unary(row, last, four, |input, out| float(expand(input, out)))
            }
            ProgramStep::Repeat(at, times) => {
                let repeated = |rows, columns| (times * rows, columns);
                self.unary(at, last, repeated, |tensor, out| {
                    let dim = 0;
                    float(BaseOperationIr::RepeatDim(RepeatDimOpIr {
                        tensor,
                        dim,
                        times,
                        out,
                    }))
                })
            }
            ProgramStep::CatOne(at) => self.unary(at, last, same, |tensor, out| {
                let (tensors, dim) = (vec![tensor], 0);
                float(BaseOperationIr::Cat(CatOpIr { tensors, dim, out }))
            }),
            ProgramStep::AddScalar(at) => self.unary(at, last, same, add_one),
            ProgramStep::Add(at) => self.unary(at, false, same, |rhs, out| {
                let lhs = rhs.clone();
                number(NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out }))
            }),
            ProgramStep::Mismatch(at) => {
                let shape = Shape::new([7]);
                self.unary(
                    at,
                    last,
                    |_, _| (7, 1),
                    |lhs, out| add_one(TensorIr { shape, ..lhs }, out),
                )
            }
            other => self.other_step(other, last),
        }
    }

    /// Executes a step that is not one op on one tensor of rank 2.
    fn other_step(&mut self, step: ProgramStep, last: bool) -> Option<()> {
        match step {
            ProgramStep::Full(rows) => {
                let out = self.out(rows, COLUMNS);
                let value = ScalarIr::Float(1.0);
                let op = FullOpIr {
                    out: out.clone(),
                    value,
                };
                self.run(number(NumericOperationIr::Full(op)), out);
            }
            ProgramStep::Sum(at) => {
                let input = self.pick(at, last)?;
                let out = TensorIr {
                    shape: Shape::new([1]),
                    ..self.out(1, 1)
                };
                let op = ReduceOpIr {
                    input,
                    out: out.clone(),
                };
                self.interpreter
                    .run(Box::new(number(NumericOperationIr::Sum(op))));
                // The other steps need tensors of rank 2.
                self.discard(out);
            }
            ProgramStep::Alias(at) => {
                let source = self.pick(at, false)?;
                let out = self.out(source.shape[0], source.shape[1]);
                self.interpreter.alias(out.id, source.id);
                self.note(out);
            }
            ProgramStep::Read(at) => self.read(at, last)?,
            ProgramStep::Forget(at) => {
                let at = at % self.held_replies.len().max(1);
                self.held_replies.get(at)?;
                drop(self.held_replies.swap_remove(at));
            }
            ProgramStep::Drop(at) => {
                let used = match last {
                    true => self.poisoned.pop(),
                    false => self.pick(at, true),
                }?;
                self.discard(used);
            }
            other => unreachable!("{other:?} is an op on one tensor"),
        }
        Some(())
    }

    fn read(&mut self, at: usize, last: bool) -> Option<()> {
        let tensor = self.pick(at, last)?;
        let bytes = tensor_bytes(&tensor.shape, tensor.dtype).unwrap();
        let is_whole = self.interpreter.tensors.store().is_host_readable(&tensor);
        let storage = self.interpreter.tensors.store().storage(&tensor).unwrap();
        let Reply::Value { result, .. } = self.interpreter.read(1, tensor) else {
            panic!("Flex has its values at hand");
        };
        // An error means that there was no room for a copy. Small values are copied into
        // a frame.
        if let Ok(data) = result
            && bytes > INLINE_BYTES
        {
            self.held_replies.push(match is_whole {
                true => HeldReply::Storage {
                    id: storage.id,
                    bytes: storage.bytes,
                    _data: data,
                },
                false => HeldReply::Copy {
                    bytes: bytes as u64,
                    _data: data,
                },
            });
        }
        Some(())
    }
}
