//! Ops on integers only.

use burn_ir::IntOperationIr;

use super::{
    OpCheckResult,
    float::matmul,
    numeric::{binary, scalar, unary},
    rules::{Kind, dims, has_dims},
    scratch::ordered_bytes,
};

pub(super) fn check(op: &IntOperationIr) -> OpCheckResult {
    use IntOperationIr as Op;
    match op {
        Op::IntoFloat(op) => {
            Kind::Int.of(&op.input)?;
            Kind::Float.of(&op.out)?;
            has_dims(&op.out, dims(&op.input).iter().copied())?;
            Ok(ordered_bytes(&op.input))
        }
        Op::BitwiseAnd(op)
        | Op::BitwiseOr(op)
        | Op::BitwiseXor(op)
        | Op::BitwiseLeftShift(op)
        | Op::BitwiseRightShift(op) => binary(op, Kind::Int),
        Op::BitwiseAndScalar(op)
        | Op::BitwiseOrScalar(op)
        | Op::BitwiseXorScalar(op)
        | Op::BitwiseLeftShiftScalar(op)
        | Op::BitwiseRightShiftScalar(op) => scalar(op, Kind::Int),
        Op::BitwiseNot(op) => unary(op, Kind::Int),
        Op::Matmul(op) => matmul(op, Kind::Int),
    }
}
