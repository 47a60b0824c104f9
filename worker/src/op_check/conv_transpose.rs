//! Transposed convolutions of one, two and three dims.

use burn_ir::{
    ConvTranspose1dOptionsIr, ConvTranspose2dOptionsIr, ConvTranspose3dOptionsIr, TensorIr,
};

use super::{
    OpCheckResult, RuleViolation,
    conv::{COLUMN_BYTES, check_bias, check_gradient, column_bytes, extent},
    rules::{
        Kind, check_fits_kernels, check_output, dims_of_rank, format_dims, has_groups, must,
        product, same_dtype, sum,
    },
    scratch::{bytes, elements, f32_copy_bytes, saturating_product, saturating_sum, threads},
};

/// The options of a transposed convolution over `N` dims.
pub(super) struct TransposedConvGeometry<const N: usize> {
    stride: [usize; N],
    padding: [usize; N],
    padding_out: [usize; N],
    dilation: [usize; N],
    groups: usize,
}

macro_rules! impl_from_options {
    ($dims:literal, $options:ty) => {
        impl From<&$options> for TransposedConvGeometry<$dims> {
            fn from(options: &$options) -> Self {
                Self {
                    stride: options.stride,
                    padding: options.padding,
                    padding_out: options.padding_out,
                    dilation: options.dilation,
                    groups: options.groups,
                }
            }
        }
    };
}
impl_from_options!(1, ConvTranspose1dOptionsIr);
impl_from_options!(2, ConvTranspose2dOptionsIr);
impl_from_options!(3, ConvTranspose3dOptionsIr);

impl<const N: usize> TransposedConvGeometry<N> {
    /// Derives the dims of the output.
    fn output_dims(&self, x: &TensorIr, weight: &TensorIr) -> Result<Vec<usize>, RuleViolation> {
        Kind::Float.of(x)?;
        same_dtype(x, weight)?;
        let (x, weight) = (
            dims_of_rank("the input", x, N + 2)?,
            dims_of_rank("the weight", weight, N + 2)?,
        );
        let groups = self.groups;
        must!(
            has_groups(x[1], groups) && weight[0] == x[1],
            "a weight {} in {groups} groups does not fit an input {}",
            format_dims(weight),
            format_dims(x)
        );
        let mut out = vec![x[0], product(&[weight[1], groups])?];
        for i in 0..N {
            let (size, stride, padding) = (x[i + 2], self.stride[i], self.padding[i]);
            must!(
                size >= 1 && stride >= 1,
                "a stride of {stride} and an axis of {size} must both be at least 1"
            );
            let kernel = extent(weight[i + 2], self.dilation[i])?;
            let whole = sum(&[product(&[size - 1, stride])?, kernel, self.padding_out[i]])?;
            // Kernels add the padding to the size of the output, which must not overflow.
            let cut = product(&[padding, 2])?;
            sum(&[whole, cut])?;
            must!(
                cut <= whole,
                "a padding of {padding} is too large for an axis of {whole}"
            );
            check_fits_kernels("whole axis", &[whole])?;
            out.push(whole - cut);
        }
        check_fits_kernels("stride", &self.stride)?;
        check_fits_kernels("dilation", &self.dilation)?;
        check_fits_kernels("padding", &self.padding)?;
        check_fits_kernels("padding of the output", &self.padding_out)?;
        Ok(out)
    }

    pub(super) fn forward(
        &self,
        x: &TensorIr,
        weight: &TensorIr,
        bias: Option<&TensorIr>,
        out: &TensorIr,
    ) -> OpCheckResult {
        let derived = self.output_dims(x, weight)?;
        check_bias(x, bias, derived[1])?;
        check_output(out, &derived, x.dtype)?;
        Ok(saturating_sum(&[
            column_bytes(weight, elements(x)),
            bytes(x),
            bytes(weight),
            f32_copy_bytes(x),
            f32_copy_bytes(weight),
            f32_copy_bytes(out),
        ]))
    }

    /// Checks the gradient of the weight. Flex computes it by a convolution of the gradient
    /// with the input, and crops the result to the weight.
    pub(super) fn weight_backward(
        &self,
        x: &TensorIr,
        weight: &TensorIr,
        grad: &TensorIr,
        out: &TensorIr,
    ) -> OpCheckResult {
        let derived = self.output_dims(x, weight)?;
        check_gradient(x, grad, &derived)?;
        check_output(out, weight.shape.as_slice(), x.dtype)?;
        let mut positions = 1u64;
        for i in 0..N {
            let kernel = weight.shape[i + 2].saturating_add(self.padding_out[i]);
            positions = positions.saturating_mul(kernel as u64);
        }
        let uncropped = saturating_product(&weight.shape.as_slice()[..2]).saturating_mul(positions);
        let column = elements(x).saturating_add(elements(weight));
        let tiles = column
            .saturating_mul(positions.min(512))
            .saturating_mul(threads());
        Ok(saturating_sum(&[
            uncropped.saturating_add(tiles).saturating_mul(COLUMN_BYTES),
            bytes(x).saturating_mul(3),
            bytes(grad).saturating_mul(3),
            f32_copy_bytes(x),
            f32_copy_bytes(grad),
        ]))
    }
}
