//! Norms and linear layers.

use burn_ir::{
    BatchNormOpIr, LayerNormOpIr, LinearBiasBackwardOpIr, LinearOpIr, LinearWeightBackwardOpIr,
    LinearXBackwardOpIr, TensorIr,
};

use super::{
    Broken, Checked,
    conv::biased,
    rules::{
        Kind, alike, but_axis, dims, has_dtype, makes, must, ranked, same_dtype, shaped, show,
    },
    scratch::{bytes, total, widened},
};

pub(super) fn batch_norm(op: &BatchNormOpIr) -> Checked {
    Kind::Float.of(&op.x)?;
    let x = dims(&op.x);
    must!(x.len() >= 2, "an input {} has no axis of channels", show(x));
    for (what, tensor) in [
        ("gamma", &op.gamma),
        ("beta", &op.beta),
        ("the mean", &op.mean),
        ("the variance", &op.variance),
    ] {
        same_dtype(&op.x, tensor)?;
        shaped(what, tensor, &[x[1]])?;
    }
    alike(&op.out, &op.x)?;
    Ok(bytes(&op.x).saturating_mul(2))
}

pub(super) fn layer_norm(op: &LayerNormOpIr) -> Checked {
    Kind::Float.of(&op.input)?;
    let (width, _) = last(&op.input)?;
    same_dtype(&op.input, &op.gamma)?;
    shaped("gamma", &op.gamma, &[width])?;
    biased(&op.input, op.beta.as_ref(), width)?;
    alike(&op.out, &op.input)?;
    Ok(bytes(&op.input)
        .saturating_mul(2)
        .saturating_add(widened(&op.input)))
}

/// Returns the size and the index of a tensor's last axis.
fn last(tensor: &TensorIr) -> Result<(usize, usize), Broken> {
    let dims = dims(tensor);
    must!(!dims.is_empty(), "a tensor has no dims");
    Ok((dims[dims.len() - 1], dims.len() - 1))
}

/// Checks that no batch is empty where batches of rows are multiplied with a weight without
/// batches. Flex would take an empty batch for one of size 1, and read memory that is not
/// there.
fn in_batches(rows: &TensorIr) -> Result<(), Broken> {
    let dims = dims(rows);
    let batches = &dims[..dims.len().saturating_sub(2)];
    must!(
        !batches.contains(&0),
        "batches {} of {} cannot be multiplied with one weight",
        show(batches),
        show(dims)
    );
    Ok(())
}

/// Checks that a weight has two dims, and returns them: `[inputs, outputs]`.
fn weight(weight: &TensorIr) -> Result<[usize; 2], Broken> {
    Kind::Float.of(weight)?;
    let dims = ranked("the weight", weight, 2)?;
    Ok([dims[0], dims[1]])
}

pub(super) fn linear(op: &LinearOpIr) -> Checked {
    let [inputs, outputs] = weight(&op.weight)?;
    let (width, along) = last(&op.x)?;
    same_dtype(&op.x, &op.weight)?;
    must!(
        width == inputs,
        "rows of {width} do not fit a weight with {inputs} inputs"
    );
    in_batches(&op.x)?;
    biased(&op.x, op.bias.as_ref(), outputs)?;
    has_dtype(&op.out, op.x.dtype)?;
    but_axis(&op.out, &op.x, along, outputs)?;
    Ok(multiplied([&op.x, &op.weight, &op.out]))
}

pub(super) fn linear_x_backward(op: &LinearXBackwardOpIr) -> Checked {
    let [inputs, outputs] = weight(&op.weight)?;
    let (width, along) = last(&op.output_grad)?;
    same_dtype(&op.output_grad, &op.weight)?;
    must!(
        width == outputs,
        "rows of {width} do not fit a weight with {outputs} outputs"
    );
    in_batches(&op.output_grad)?;
    has_dtype(&op.out, op.output_grad.dtype)?;
    but_axis(&op.out, &op.output_grad, along, inputs)?;
    Ok(multiplied([&op.output_grad, &op.weight, &op.out]))
}

pub(super) fn linear_weight_backward(op: &LinearWeightBackwardOpIr) -> Checked {
    Kind::Float.of(&op.x)?;
    same_dtype(&op.x, &op.output_grad)?;
    let ((inputs, along), (outputs, of)) = (last(&op.x)?, last(&op.output_grad)?);
    must!(
        dims(&op.x)[..along] == dims(&op.output_grad)[..of],
        "a gradient {} does not fit an input {}",
        show(dims(&op.output_grad)),
        show(dims(&op.x))
    );
    makes(&op.out, &[inputs, outputs], op.output_grad.dtype)?;
    Ok(multiplied([&op.x, &op.output_grad, &op.out]))
}

pub(super) fn linear_bias_backward(op: &LinearBiasBackwardOpIr) -> Checked {
    Kind::Float.of(&op.output_grad)?;
    let (outputs, _) = last(&op.output_grad)?;
    makes(&op.out, &[outputs], op.output_grad.dtype)?;
    Ok(bytes(&op.output_grad))
}

/// Returns the bytes of contiguous copies of the operands, and of `f32` copies of half
/// types.
fn multiplied(tensors: [&TensorIr; 3]) -> u64 {
    total(&tensors.map(|tensor| bytes(tensor).saturating_add(widened(tensor))))
}
