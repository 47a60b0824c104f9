//! What an op must be before a backend may run it.
//!
//! Burn's kernels take much on trust: that batches fit each other, that an axis is one,
//! that a window fits what it slides over. The client's own checks see to it in an honest
//! program; a program that writes its own ops has none. So every op is checked here, and
//! what it makes is derived here: an output that is declared with another shape or dtype
//! is refused. Nothing is computed from an op's arguments without a check for overflow.
//!
//! One file a family, each an exhaustive `match` without a wildcard: a variant without a
//! rule does not compile. Index values are data and cannot be seen here. Flex's kernels
//! check each; for CubeCL's they are clamped on the device (`backend/bounds.rs`).
//!
//! Pure: no backend, no state. On success nothing is allocated.

mod activation;
mod base;
mod bool;
mod conv;
mod conv_transpose;
mod deform_conv;
mod float;
mod index;
mod int;
mod module;
mod norm;
mod numeric;
mod pool;
mod resize;
mod rules;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod samples;
mod scratch;
mod sequence;
#[cfg(test)]
mod tests;

use burn_ir::{CustomOpIr, DistributedOperationIr, OperationIr, TensorIr};
use tensord_proto::v1::FaultKind;

use self::rules::{Kind, alike, unsupported, volume};

/// An op breaks a rule: why it must not run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Broken {
    pub(crate) kind: FaultKind,
    /// Names the rule and the values.
    pub(crate) reason: String,
}

/// The bytes that an op's kernel takes beside its inputs and outputs while it runs, at
/// most, or the rule that the op breaks.
pub(crate) type Checked = Result<u64, Broken>;

/// Decides whether a backend may run `op`, whose inputs are what it takes them for.
///
/// # Errors
///
/// The rule that it breaks.
pub(crate) fn check(op: &OperationIr) -> Checked {
    match op {
        OperationIr::BaseFloat(op) => base::check(op, Kind::Float),
        OperationIr::BaseInt(op) => base::check(op, Kind::Int),
        OperationIr::BaseBool(op) => base::check(op, Kind::Bool),
        // The dtype beside the op is that of a tensor of it; no backend looks at it.
        OperationIr::NumericFloat(_, op) => numeric::check(op, Kind::Float),
        OperationIr::NumericInt(_, op) => numeric::check(op, Kind::Int),
        OperationIr::Bool(op) => self::bool::check(op),
        OperationIr::Int(op) => int::check(op),
        OperationIr::Float(_, op) => float::check(op),
        OperationIr::Module(op) => module::check(op),
        // Uploads come by a way of their own, which has a tensor's bytes.
        OperationIr::Init(_) => unsupported("an upload without contents"),
        OperationIr::Custom(op) => custom(op),
        // It computes nothing.
        OperationIr::Drop(_) => Ok(0),
        OperationIr::Distributed(op) => distributed(op),
        OperationIr::Activation(op) => activation::check(op),
    }
}

/// Decides whether a tensor may be made as declared, by what is no op: an upload, or a
/// value from another session.
///
/// # Errors
///
/// The rule that it breaks.
pub(crate) fn check_tensor(tensor: &TensorIr) -> Result<(), Broken> {
    if matches!(tensor.dtype, burn_backend::DType::QFloat(_)) {
        return unsupported("quantized tensors are not supported by Burn's router");
    }
    volume(tensor)
}

/// What it makes is the handler's to know; the engine compares it with what the op
/// declares once it ran.
fn custom(op: &CustomOpIr) -> Checked {
    op.outputs.iter().try_for_each(check_tensor)?;
    Ok(0)
}

fn distributed(op: &DistributedOperationIr) -> Checked {
    match op {
        DistributedOperationIr::AllReduce(op) => {
            Kind::Float.of(&op.tensor)?;
            alike(&op.out, &op.tensor)
        }
        DistributedOperationIr::SyncCollective => Ok(0),
    }
}
