//! Ops on booleans only.

use burn_ir::BoolOperationIr;

use super::{
    OpCheckResult,
    rules::{Kind, broadcast, check_same_as_input, dims, has_dims, has_dtype, same_dtype},
    scratch::ordered_bytes,
};

pub(super) fn check(op: &BoolOperationIr) -> OpCheckResult {
    use BoolOperationIr as Op;
    match op {
        Op::IntoFloat(op) => {
            Kind::Bool.of(&op.input)?;
            Kind::Float.of(&op.out)?;
            has_dims(&op.out, dims(&op.input).iter().copied())?;
            return Ok(ordered_bytes(&op.input));
        }
        Op::IntoInt(op) => {
            Kind::Bool.of(&op.input)?;
            Kind::Int.of(&op.out)?;
            has_dims(&op.out, dims(&op.input).iter().copied())?;
            return Ok(ordered_bytes(&op.input));
        }
        Op::Not(op) => {
            Kind::Bool.of(&op.input)?;
            check_same_as_input(&op.out, &op.input)?;
        }
        Op::And(op) | Op::Or(op) | Op::Xor(op) => {
            Kind::Bool.of(&op.lhs)?;
            same_dtype(&op.lhs, &op.rhs)?;
            has_dtype(&op.out, op.lhs.dtype)?;
            broadcast(&op.out, &[&op.lhs, &op.rhs])?;
        }
    }
    Ok(0)
}
