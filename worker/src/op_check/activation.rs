//! Activations.

use burn_ir::ActivationOperationIr;

use super::{
    OpCheckResult,
    rules::{Kind, axis, broadcast, check_dims, check_same_as_input, has_dtype, same_dtype},
    scratch::{bytes, f32_copy_bytes, saturating_sum},
};

pub(super) fn check(op: &ActivationOperationIr) -> OpCheckResult {
    use ActivationOperationIr as Op;
    match op {
        Op::Relu(op) | Op::Gelu(op) | Op::Sigmoid(op) | Op::LogSigmoid(op) => {
            Kind::Float.of(&op.input)?;
            check_same_as_input(&op.out, &op.input)
        }
        Op::LeakyRelu(op) => {
            Kind::Float.of(&op.lhs)?;
            check_same_as_input(&op.out, &op.lhs)
        }
        Op::HardSigmoid(op) => {
            Kind::Float.of(&op.tensor)?;
            check_same_as_input(&op.out, &op.tensor)
        }
        // The gradient has one value for each element.
        Op::ReluBackward(op)
        | Op::GeluBackward(op)
        | Op::SigmoidBackward(op)
        | Op::LogSigmoidBackward(op) => {
            Kind::Float.of(&op.lhs)?;
            same_dtype(&op.lhs, &op.rhs)?;
            check_dims("the gradient", &op.rhs, op.lhs.shape.as_slice())?;
            check_same_as_input(&op.out, &op.lhs)
        }
        Op::PRelu(op) => {
            Kind::Float.of(&op.lhs)?;
            same_dtype(&op.lhs, &op.rhs)?;
            has_dtype(&op.out, op.lhs.dtype)?;
            broadcast(&op.out, &[&op.lhs, &op.rhs])?;
            Ok(0)
        }
        Op::Softmax(op) | Op::LogSoftmax(op) | Op::Softmin(op) => {
            Kind::Float.of(&op.input)?;
            axis(&op.input, op.axis)?;
            check_same_as_input(&op.out, &op.input)?;
            Ok(saturating_sum(&[
                bytes(&op.input),
                f32_copy_bytes(&op.input),
            ]))
        }
    }
}
