//! Norms and linear layers.

use burn_ir::{
    BatchNormOpIr, LayerNormOpIr, LinearBiasBackwardOpIr, LinearOpIr, LinearWeightBackwardOpIr,
    LinearXBackwardOpIr, TensorIr,
};

use super::{
    OpCheckResult, RuleViolation,
    conv::check_bias,
    rules::{
        Kind, check_dims, check_dims_except, check_output, check_same_as_input, dims, dims_of_rank,
        format_dims, has_dtype, must, same_dtype,
    },
    scratch::{bytes, f32_copy_bytes, saturating_sum},
};

pub(super) fn batch_norm(op: &BatchNormOpIr) -> OpCheckResult {
    Kind::Float.of(&op.x)?;
    let x = dims(&op.x);
    must!(
        x.len() >= 2,
        "an input {} has no axis of channels",
        format_dims(x)
    );
    for (what, tensor) in [
        ("gamma", &op.gamma),
        ("beta", &op.beta),
        ("the mean", &op.mean),
        ("the variance", &op.variance),
    ] {
        same_dtype(&op.x, tensor)?;
        check_dims(what, tensor, &[x[1]])?;
    }
    check_same_as_input(&op.out, &op.x)?;
    Ok(bytes(&op.x).saturating_mul(2))
}

pub(super) fn layer_norm(op: &LayerNormOpIr) -> OpCheckResult {
    Kind::Float.of(&op.input)?;
    let (width, _) = last_axis(&op.input)?;
    same_dtype(&op.input, &op.gamma)?;
    check_dims("gamma", &op.gamma, &[width])?;
    check_bias(&op.input, op.beta.as_ref(), width)?;
    check_same_as_input(&op.out, &op.input)?;
    Ok(bytes(&op.input)
        .saturating_mul(2)
        .saturating_add(f32_copy_bytes(&op.input)))
}

/// Returns the size and the index of a tensor's last axis.
fn last_axis(tensor: &TensorIr) -> Result<(usize, usize), RuleViolation> {
    let dims = dims(tensor);
    must!(!dims.is_empty(), "a tensor has no dims");
    Ok((dims[dims.len() - 1], dims.len() - 1))
}

/// Checks that no batch is empty where batches of rows are multiplied with a weight without
/// batches. Flex would take an empty batch for one of size 1, and read memory that is not
/// there.
fn check_no_empty_batch(rows: &TensorIr) -> Result<(), RuleViolation> {
    let dims = dims(rows);
    let batches = &dims[..dims.len().saturating_sub(2)];
    must!(
        !batches.contains(&0),
        "batches {} of {} cannot be multiplied with one weight",
        format_dims(batches),
        format_dims(dims)
    );
    Ok(())
}

/// Checks that a weight has two dims, and returns them: `[inputs, outputs]`.
fn weight(weight: &TensorIr) -> Result<[usize; 2], RuleViolation> {
    Kind::Float.of(weight)?;
    let dims = dims_of_rank("the weight", weight, 2)?;
    Ok([dims[0], dims[1]])
}

pub(super) fn linear(op: &LinearOpIr) -> OpCheckResult {
    let [inputs, outputs] = weight(&op.weight)?;
    let (width, along) = last_axis(&op.x)?;
    same_dtype(&op.x, &op.weight)?;
    must!(
        width == inputs,
        "rows of {width} do not fit a weight with {inputs} inputs"
    );
    check_no_empty_batch(&op.x)?;
    check_bias(&op.x, op.bias.as_ref(), outputs)?;
    has_dtype(&op.out, op.x.dtype)?;
    check_dims_except(&op.out, &op.x, along, outputs)?;
    Ok(matmul_bytes([&op.x, &op.weight, &op.out]))
}

pub(super) fn linear_x_backward(op: &LinearXBackwardOpIr) -> OpCheckResult {
    let [inputs, outputs] = weight(&op.weight)?;
    let (width, along) = last_axis(&op.output_grad)?;
    same_dtype(&op.output_grad, &op.weight)?;
    must!(
        width == outputs,
        "rows of {width} do not fit a weight with {outputs} outputs"
    );
    check_no_empty_batch(&op.output_grad)?;
    has_dtype(&op.out, op.output_grad.dtype)?;
    check_dims_except(&op.out, &op.output_grad, along, inputs)?;
    Ok(matmul_bytes([&op.output_grad, &op.weight, &op.out]))
}

pub(super) fn linear_weight_backward(op: &LinearWeightBackwardOpIr) -> OpCheckResult {
    Kind::Float.of(&op.x)?;
    same_dtype(&op.x, &op.output_grad)?;
    let ((inputs, along), (outputs, of)) = (last_axis(&op.x)?, last_axis(&op.output_grad)?);
    must!(
        dims(&op.x)[..along] == dims(&op.output_grad)[..of],
        "a gradient {} does not fit an input {}",
        format_dims(dims(&op.output_grad)),
        format_dims(dims(&op.x))
    );
    check_output(&op.out, &[inputs, outputs], op.output_grad.dtype)?;
    Ok(matmul_bytes([&op.x, &op.output_grad, &op.out]))
}

pub(super) fn linear_bias_backward(op: &LinearBiasBackwardOpIr) -> OpCheckResult {
    Kind::Float.of(&op.output_grad)?;
    let (outputs, _) = last_axis(&op.output_grad)?;
    check_output(&op.out, &[outputs], op.output_grad.dtype)?;
    Ok(bytes(&op.output_grad))
}

/// Returns the bytes of contiguous copies of the operands, and of `f32` copies of half
/// types.
fn matmul_bytes(tensors: [&TensorIr; 3]) -> u64 {
    saturating_sum(&tensors.map(|tensor| bytes(tensor).saturating_add(f32_copy_bytes(tensor))))
}
