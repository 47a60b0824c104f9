//! Activations.

use burn_ir::ActivationOperationIr;

use super::{
    Checked,
    rules::{Kind, alike, axis, broadcast, has_dtype, same_dtype, shaped},
    scratch::{bytes, total, widened},
};

pub(super) fn check(op: &ActivationOperationIr) -> Checked {
    use ActivationOperationIr as Op;
    match op {
        Op::Relu(op) | Op::Gelu(op) | Op::Sigmoid(op) | Op::LogSigmoid(op) => {
            Kind::Float.of(&op.input)?;
            alike(&op.out, &op.input)
        }
        Op::LeakyRelu(op) => {
            Kind::Float.of(&op.lhs)?;
            alike(&op.out, &op.lhs)
        }
        Op::HardSigmoid(op) => {
            Kind::Float.of(&op.tensor)?;
            alike(&op.out, &op.tensor)
        }
        // The gradient has one value for each element.
        Op::ReluBackward(op)
        | Op::GeluBackward(op)
        | Op::SigmoidBackward(op)
        | Op::LogSigmoidBackward(op) => {
            Kind::Float.of(&op.lhs)?;
            same_dtype(&op.lhs, &op.rhs)?;
            shaped("the gradient", &op.rhs, op.lhs.shape.as_slice())?;
            alike(&op.out, &op.lhs)
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
            alike(&op.out, &op.input)?;
            Ok(total(&[bytes(&op.input), widened(&op.input)]))
        }
    }
}
