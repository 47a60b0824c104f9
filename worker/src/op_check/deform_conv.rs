//! Deformable convolutions, whose kernels are displaced by offsets.

use burn_ir::{DeformConv2dBackwardOpIr, DeformConv2dOpIr, DeformableConv2dOptionsIr, TensorIr};

use super::{
    Broken, Checked,
    conv::{COLUMN_BYTES, Sliding, biased, graded},
    rules::{alike, must, product, ranked, same_dtype, shaped, show},
    scratch::{elements, threads, times, total},
};

pub(super) fn forward(op: &DeformConv2dOpIr) -> Checked {
    let sliding = sliding(&op.options);
    let plain = sliding.forward(&op.x, &op.weight, op.bias.as_ref(), &op.out)?;
    let out = op.out.shape.as_slice();
    bent(
        &op.options,
        &op.x,
        &op.weight,
        &op.offset,
        op.mask.as_ref(),
        out,
    )?;
    Ok(total(&[
        plain,
        bent_bytes(&op.x, &op.weight, &op.offset, out),
    ]))
}

pub(super) fn backward(op: &DeformConv2dBackwardOpIr) -> Checked {
    let out = sliding(&op.options).dims(&op.x, &op.weight)?;
    graded(&op.x, &op.out_grad, &out)?;
    biased(&op.x, op.bias.as_ref(), out[1])?;
    bent(
        &op.options,
        &op.x,
        &op.weight,
        &op.offset,
        op.mask.as_ref(),
        &out,
    )?;
    alike(&op.input_grad, &op.x)?;
    alike(&op.offset_grad, &op.offset)?;
    alike(&op.weight_grad, &op.weight)?;
    for (grad, of) in [(&op.mask_grad, &op.mask), (&op.bias_grad, &op.bias)] {
        match (grad, of) {
            (Some(grad), Some(of)) => {
                alike(grad, of)?;
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
    Ok(bent_bytes(&op.x, &op.weight, &op.offset, &out).saturating_mul(2))
}

fn sliding(options: &DeformableConv2dOptionsIr) -> Sliding<2> {
    Sliding {
        stride: options.stride,
        padding: options.padding.map(|padding| (padding, padding)),
        dilation: options.dilation,
        groups: options.weight_groups,
    }
}

/// Checks that there is an offset, and a mask if any, for each position of the output and
/// of the kernel.
fn bent(
    options: &DeformableConv2dOptionsIr,
    x: &TensorIr,
    weight: &TensorIr,
    offset: &TensorIr,
    mask: Option<&TensorIr>,
    out: &[usize],
) -> Result<(), Broken> {
    let (x_dims, weight) = (ranked("the input", x, 4)?, ranked("the weight", weight, 4)?);
    let groups = options.offset_groups;
    must!(
        groups >= 1 && x_dims[1].is_multiple_of(groups),
        "{groups} groups of offsets do not fit an input {}",
        show(x_dims)
    );
    let places = product(&[groups, weight[2], weight[3]])?;
    same_dtype(x, offset)?;
    let [batch, height, width] = [out[0], out[2], out[3]];
    shaped(
        "the offset",
        offset,
        &[batch, product(&[places, 2])?, height, width],
    )?;
    if let Some(mask) = mask {
        same_dtype(x, mask)?;
        shaped("the mask", mask, &[batch, places, height, width])?;
    }
    Ok(())
}

/// Returns the bytes of the columns of each image, and of wider copies of each tensor.
fn bent_bytes(x: &TensorIr, weight: &TensorIr, offset: &TensorIr, out: &[usize]) -> u64 {
    let images = threads().max(out[0] as u64);
    let column = times(&weight.shape.as_slice()[1..]).saturating_mul(times(&out[2..]));
    let wide = total(&[
        column.saturating_mul(images),
        elements(x),
        elements(weight),
        elements(offset).saturating_mul(2),
        times(out).saturating_mul(2),
    ]);
    wide.saturating_mul(COLUMN_BYTES)
}
