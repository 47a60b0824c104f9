//! Deformable convolutions, whose kernels are displaced by offsets.

use burn_ir::{DeformConv2dBackwardOpIr, DeformConv2dOpIr, DeformableConv2dOptionsIr, TensorIr};

use super::{
    OpCheckResult, RuleViolation,
    conv::{COLUMN_BYTES, ConvGeometry, check_bias, check_gradient},
    rules::{
        check_dims, check_same_as_input, dims_of_rank, format_dims, has_groups, must, product,
        same_dtype,
    },
    scratch::{elements, saturating_product, saturating_sum, threads},
};

/// Most elements of a kernel.
const MAX_KERNEL: usize = 1024;

pub(super) fn forward(op: &DeformConv2dOpIr) -> OpCheckResult {
    let geometry = geometry(&op.options);
    let plain = geometry.forward(&op.x, &op.weight, op.bias.as_ref(), &op.out)?;
    let out = op.out.shape.as_slice();
    check_offsets(
        &op.options,
        &op.x,
        &op.weight,
        &op.offset,
        op.mask.as_ref(),
        out,
    )?;
    Ok(saturating_sum(&[
        plain,
        offset_scratch_bytes(&op.x, &op.weight, &op.offset, out),
    ]))
}

pub(super) fn backward(op: &DeformConv2dBackwardOpIr) -> OpCheckResult {
    let out = geometry(&op.options).dims(&op.x, &op.weight)?;
    check_gradient(&op.x, &op.out_grad, &out)?;
    check_bias(&op.x, op.bias.as_ref(), out[1])?;
    check_offsets(
        &op.options,
        &op.x,
        &op.weight,
        &op.offset,
        op.mask.as_ref(),
        &out,
    )?;
    check_same_as_input(&op.input_grad, &op.x)?;
    check_same_as_input(&op.offset_grad, &op.offset)?;
    check_same_as_input(&op.weight_grad, &op.weight)?;
    for (grad, of) in [(&op.mask_grad, &op.mask), (&op.bias_grad, &op.bias)] {
        match (grad, of) {
            (Some(grad), Some(of)) => {
                check_same_as_input(grad, of)?;
            }
            (None, None) => {}
            (Some(_), None) | (None, Some(_)) => {
                must!(
                    false,
                    "an optional input and its gradient must both be present or both be absent"
                );
            }
        }
    }
    Ok(offset_scratch_bytes(&op.x, &op.weight, &op.offset, &out).saturating_mul(2))
}

fn geometry(options: &DeformableConv2dOptionsIr) -> ConvGeometry<2> {
    ConvGeometry {
        stride: options.stride,
        padding: options.padding.map(|padding| (padding, padding)),
        dilation: options.dilation,
        groups: options.weight_groups,
    }
}

/// Checks that the offsets, and the mask if there is one, have values for each position of
/// the output and of the kernel.
fn check_offsets(
    options: &DeformableConv2dOptionsIr,
    x: &TensorIr,
    weight: &TensorIr,
    offset: &TensorIr,
    mask: Option<&TensorIr>,
    out: &[usize],
) -> Result<(), RuleViolation> {
    let (x_dims, weight) = (
        dims_of_rank("the input", x, 4)?,
        dims_of_rank("the weight", weight, 4)?,
    );
    let groups = options.offset_groups;
    must!(
        has_groups(x_dims[1], groups),
        "{groups} groups of offsets do not fit an input {}",
        format_dims(x_dims)
    );
    // CubeCL repeats the body of its kernel for each of these when it compiles it.
    let kernel = product(&weight[2..])?;
    must!(
        kernel <= MAX_KERNEL,
        "a kernel of {} and {} has more than {MAX_KERNEL} elements",
        weight[2],
        weight[3]
    );
    let positions = product(&[groups, kernel])?;
    same_dtype(x, offset)?;
    let [batch, height, width] = [out[0], out[2], out[3]];
    check_dims(
        "the offset",
        offset,
        &[batch, product(&[positions, 2])?, height, width],
    )?;
    if let Some(mask) = mask {
        same_dtype(x, mask)?;
        check_dims("the mask", mask, &[batch, positions, height, width])?;
    }
    Ok(())
}

/// Returns the bytes of the columns of each image, and of wider copies of each tensor.
fn offset_scratch_bytes(x: &TensorIr, weight: &TensorIr, offset: &TensorIr, out: &[usize]) -> u64 {
    let images = threads().max(out[0] as u64);
    // Of all groups at once.
    let kernel = saturating_product(&weight.shape.as_slice()[2..]);
    let column = kernel
        .saturating_mul(x.shape[1] as u64)
        .saturating_mul(saturating_product(&out[2..]));
    let wide = saturating_sum(&[
        column.saturating_mul(images),
        elements(x),
        elements(weight),
        elements(offset).saturating_mul(2),
        saturating_product(out).saturating_mul(2),
    ]);
    wide.saturating_mul(COLUMN_BYTES)
}
