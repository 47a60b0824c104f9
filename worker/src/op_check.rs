//! The checks that an op must pass before a backend may run it.
//!
//! Burn's kernels leave much unchecked: that batches are compatible, that an axis exists,
//! that a window fits its input. The client's own checks ensure this in an honest program,
//! but a program that writes its own ops has no checks. So every op is checked here, and
//! the shapes and dtypes of its outputs are derived here: an output that is declared
//! differently is refused. Arithmetic on an op's arguments is always checked for overflow.
//!
//! There is one file per family of ops, each with an exhaustive `match` without a wildcard:
//! a variant without a rule does not compile. The values of indices are data, which these
//! checks cannot see. Flex's kernels check each index; for CubeCL's kernels, indices are
//! clamped on the device (`tensord-backend`).
//!
//! The checks are pure: they use no backend and no state. Most allocate nothing on success.

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
mod random;
mod resize;
mod rules;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod samples;
mod scratch;
mod sequence;
#[cfg(test)]
mod tests;

use burn_ir::{CustomOpIr, ModuleOperationIr, OperationIr, TensorIr};
use tensord_proto::{collective_op::CollectiveOp, v1::FaultKind};

use self::rules::{Kind, check_same_as_input, check_volume, unsupported};

/// The rule that an op breaks, because of which it must not run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RuleViolation {
    pub(crate) kind: FaultKind,
    /// A message that names the rule and the values.
    pub(crate) reason: String,
}

/// The most bytes that an op's kernel allocates in addition to its inputs and outputs while
/// it runs, or the rule that the op breaks.
pub(crate) type OpCheckResult = Result<u64, RuleViolation>;

/// Checks whether a backend may run `op`. The caller has verified that the declared inputs
/// match the actual tensors.
///
/// # Errors
///
/// If `op` breaks a rule: the rule.
pub(crate) fn check(op: &OperationIr) -> OpCheckResult {
    match op {
        OperationIr::BaseFloat(op) => base::check(op, Kind::Float),
        OperationIr::BaseInt(op) => base::check(op, Kind::Int),
        OperationIr::BaseBool(op) => base::check(op, Kind::Bool),
        // The dtype beside the op repeats that of the tensors; no backend reads it.
        OperationIr::NumericFloat(_, op) => numeric::check(op, Kind::Float),
        OperationIr::NumericInt(_, op) => numeric::check(op, Kind::Int),
        OperationIr::Bool(op) => self::bool::check(op),
        OperationIr::Int(op) => int::check(op),
        OperationIr::Float(_, op) => float::check(op),
        OperationIr::Module(op) => module::check(op),
        // Uploads arrive separately, with the bytes of the tensor.
        OperationIr::Init(_) => unsupported("an upload without contents"),
        OperationIr::Custom(op) => custom(op),
        // A drop computes nothing.
        OperationIr::Drop(_) => Ok(0),
        OperationIr::Distributed(_) => collective(op),
        OperationIr::Activation(op) => activation::check(op),
    }
}

/// Returns the bytes that the kernels of `op` allocate on a GPU in addition to what [`check`] has returned, which
/// follows Flex's kernels.
pub(crate) fn additional_gpu_bytes(op: &OperationIr) -> u64 {
    match op {
        OperationIr::Module(ModuleOperationIr::Attention(op)) => sequence::all_scores_bytes(op),
        _ => 0,
    }
}

/// Checks whether a tensor that is not the output of an op may be created as declared: an
/// upload, or a value from another session.
///
/// # Errors
///
/// If the tensor breaks a rule: the rule.
pub(crate) fn check_tensor(tensor: &TensorIr) -> Result<(), RuleViolation> {
    if matches!(tensor.dtype, burn_backend::DType::QFloat(_)) {
        return unsupported("quantized tensors are not supported by Burn's router");
    }
    check_volume(tensor)
}

/// Checks a custom op. Only its handler knows what the op makes; the tensor store compares
/// the outputs with the declaration after it has run.
fn custom(op: &CustomOpIr) -> OpCheckResult {
    op.outputs.iter().try_for_each(check_tensor)?;
    Ok(0)
}

fn collective(op: &OperationIr) -> OpCheckResult {
    match CollectiveOp::of(op) {
        Some(CollectiveOp::AllReduce(op)) => {
            Kind::Float.of(&op.tensor)?;
            check_same_as_input(&op.out, &op.tensor)
        }
        Some(CollectiveOp::Sync) | None => Ok(0),
    }
}
