//! Convolutions of one, two and three dims.

use burn_ir::{Conv1dOptionsIr, Conv2dOptionsIr, Conv3dOptionsIr, TensorIr};

use super::{
    OpCheckResult, RuleViolation,
    rules::{
        Kind, check_dims, check_fits_kernels, check_output, dims, dims_of_rank, format_dims,
        has_dims, has_groups, must, product, same_dtype, sum,
    },
    scratch::{bytes, elements, f32_copy_bytes, saturating_product, saturating_sum, threads},
};

/// Number of output positions for which Flex builds columns at a time.
const TILE: usize = 512;

/// Bytes that Flex stores for each position along a kernel's axis: the range inside the
/// input.
const RANGE_BYTES: u64 = 16;

/// Size of an element in a column: that of `f64`, the widest type.
pub(super) const COLUMN_BYTES: u64 = 8;

/// How a kernel slides over `N` dims.
pub(super) struct ConvGeometry<const N: usize> {
    pub(super) stride: [usize; N],
    pub(super) padding: [(usize, usize); N],
    pub(super) dilation: [usize; N],
    pub(super) groups: usize,
}

impl From<&Conv1dOptionsIr> for ConvGeometry<1> {
    fn from(options: &Conv1dOptionsIr) -> Self {
        Self {
            stride: options.stride,
            padding: options.padding,
            dilation: options.dilation,
            groups: options.groups,
        }
    }
}

impl From<&Conv2dOptionsIr> for ConvGeometry<2> {
    fn from(options: &Conv2dOptionsIr) -> Self {
        Self {
            stride: options.stride,
            padding: options.padding,
            dilation: options.dilation,
            groups: options.groups,
        }
    }
}

impl From<&Conv3dOptionsIr> for ConvGeometry<3> {
    fn from(options: &Conv3dOptionsIr) -> Self {
        Self {
            stride: options.stride,
            padding: options.padding.map(|padding| (padding, padding)),
            dilation: options.dilation,
            groups: options.groups,
        }
    }
}

/// The derived dims of a convolution.
struct ConvDims<'a> {
    x: &'a [usize],
    weight: &'a [usize],
    /// All dims of the output, and the padded input's dims without batch and channels.
    out: Vec<usize>,
    padded: Vec<usize>,
}

/// Returns the length of a kernel's axis including the gaps of a dilation.
pub(super) fn extent(kernel: usize, dilation: usize) -> Result<usize, RuleViolation> {
    must!(
        kernel >= 1 && dilation >= 1,
        "a kernel of {kernel} and a dilation of {dilation} must both be at least 1"
    );
    sum(&[product(&[dilation, kernel - 1])?, 1])
}

impl<const N: usize> ConvGeometry<N> {
    /// Derives the dims of the convolution, and checks that each axis of the weight fits
    /// the input.
    fn derive_dims<'a>(
        &self,
        x: &'a TensorIr,
        weight: &'a TensorIr,
    ) -> Result<ConvDims<'a>, RuleViolation> {
        Kind::Float.of(x)?;
        same_dtype(x, weight)?;
        let (x, weight) = (
            dims_of_rank("the input", x, N + 2)?,
            dims_of_rank("the weight", weight, N + 2)?,
        );
        self.check_groups(x, weight)?;
        let (mut out, mut padded) = (vec![x[0], weight[0]], Vec::with_capacity(N));
        for i in 0..N {
            let (stride, (before, after)) = (self.stride[i], self.padding[i]);
            must!(stride >= 1, "a stride of {stride} must be at least 1");
            let size = sum(&[x[i + 2], before, after, stride])? - stride;
            let kernel = extent(weight[i + 2], self.dilation[i])?;
            must!(
                kernel <= size,
                "a kernel that spans {kernel} does not fit an axis of {size} (padding included)"
            );
            out.push((size - kernel) / stride + 1);
            padded.push(size);
        }
        check_fits_kernels("stride", &self.stride)?;
        check_fits_kernels("dilation", &self.dilation)?;
        check_fits_kernels("padded axis", &padded)?;
        Ok(ConvDims {
            x,
            weight,
            out,
            padded,
        })
    }

    /// Returns the dims of the output.
    pub(super) fn dims(
        &self,
        x: &TensorIr,
        weight: &TensorIr,
    ) -> Result<Vec<usize>, RuleViolation> {
        self.derive_dims(x, weight).map(|conv_dims| conv_dims.out)
    }

    /// Checks the groups, as Flex multiplies the weight's channels with the input's through
    /// unchecked pointers. Its backward passes loop over the groups even if there is no channel.
    fn check_groups(&self, x: &[usize], weight: &[usize]) -> Result<(), RuleViolation> {
        let groups = self.groups;
        let channels = product(&[weight[1], groups])?;
        must!(
            has_groups(weight[0], groups) && channels == x[1],
            "a weight {} in {groups} groups does not fit an input {}",
            format_dims(weight),
            format_dims(x)
        );
        Ok(())
    }

    pub(super) fn forward(
        &self,
        x: &TensorIr,
        weight: &TensorIr,
        bias: Option<&TensorIr>,
        out: &TensorIr,
    ) -> OpCheckResult {
        let conv_dims = self.derive_dims(x, weight)?;
        check_bias(x, bias, conv_dims.weight[0])?;
        check_output(out, &conv_dims.out, x.dtype)?;
        let column = saturating_product(&conv_dims.weight[1..]);
        let tile = saturating_product(&conv_dims.out[2..]).min(TILE as u64);
        let channels = (conv_dims.weight[0] / self.groups) as u64;
        let tiles = column
            .saturating_add(channels)
            .saturating_mul(tile)
            .saturating_mul(COLUMN_BYTES)
            .saturating_mul(threads());
        let ranges = saturating_sum(
            &conv_dims.weight[2..]
                .iter()
                .map(|&k| k as u64)
                .collect::<Vec<_>>(),
        );
        Ok(saturating_sum(&[
            tiles,
            ranges.saturating_mul(RANGE_BYTES),
            // The padded input, and a copy with its channels last.
            self.padded_bytes(&conv_dims, x).saturating_mul(2),
            bytes(weight),
            f32_copy_bytes(x),
            f32_copy_bytes(weight),
            f32_copy_bytes(out),
        ]))
    }

    fn padded_bytes(&self, conv_dims: &ConvDims<'_>, x: &TensorIr) -> u64 {
        let is_even = self.padding.iter().all(|(before, after)| before == after);
        if is_even {
            return bytes(x);
        }
        let planes = saturating_product(&conv_dims.x[..2]).saturating_mul(x.dtype.size() as u64);
        planes.saturating_mul(saturating_product(&conv_dims.padded))
    }

    /// Checks the gradient of the input. Flex computes it by a transposed convolution of
    /// the gradient.
    pub(super) fn x_backward(
        &self,
        x: &TensorIr,
        weight: &TensorIr,
        grad: &TensorIr,
        out: &TensorIr,
    ) -> OpCheckResult {
        let conv_dims = self.derive_dims(x, weight)?;
        check_gradient(x, grad, &conv_dims.out)?;
        check_output(out, conv_dims.x, x.dtype)?;
        Ok(saturating_sum(&[
            column_bytes(weight, elements(grad)),
            self.padded_bytes(&conv_dims, x).saturating_mul(2),
            f32_copy_bytes(weight),
            f32_copy_bytes(grad),
            f32_copy_bytes(out),
        ]))
    }

    /// Checks the gradient of the weight. Flex computes it by a convolution of the input
    /// with the gradient, and crops the result to the weight.
    pub(super) fn weight_backward(
        &self,
        x: &TensorIr,
        weight: &TensorIr,
        grad: &TensorIr,
        out: &TensorIr,
    ) -> OpCheckResult {
        let conv_dims = self.derive_dims(x, weight)?;
        check_gradient(x, grad, &conv_dims.out)?;
        check_output(out, conv_dims.weight, x.dtype)?;
        let mut uncropped = saturating_product(&conv_dims.weight[..2]);
        let mut positions = 1u64;
        for i in 0..N {
            let reached = self.stride[i] * (conv_dims.out[i + 2] - 1);
            let place = (conv_dims.padded[i] - reached - 1) / self.dilation[i] + 1;
            positions = positions.saturating_mul(place as u64);
        }
        uncropped = uncropped.saturating_mul(positions);
        let column = saturating_sum(&[
            saturating_product(&[conv_dims.x[0]])
                .saturating_mul(saturating_product(&conv_dims.out[2..])),
            conv_dims.weight[0] as u64,
        ]);
        let tiles = column
            .saturating_mul(positions.min(TILE as u64))
            .saturating_mul(threads());
        Ok(saturating_sum(&[
            uncropped.saturating_add(tiles).saturating_mul(COLUMN_BYTES),
            self.padded_bytes(&conv_dims, x).saturating_mul(3),
            bytes(grad).saturating_mul(3),
            f32_copy_bytes(x),
            f32_copy_bytes(grad),
        ]))
    }
}

/// Returns the bytes of the columns of a transposed convolution with `weight` over at most
/// `positions` positions. Each of Flex's threads has columns of its own: up to 8 MiB, or those
/// of one position if these are larger.
pub(super) fn column_bytes(weight: &TensorIr, positions: u64) -> u64 {
    /// The limit that Flex observes if the columns of one position fit.
    const COLUMNS_BYTES: u64 = 8 << 20;
    let column = saturating_product(&dims(weight)[1..]).saturating_mul(COLUMN_BYTES);
    let each = column
        .saturating_mul(positions)
        .min(column.max(COLUMNS_BYTES));
    each.saturating_mul(threads())
}

/// Checks that a bias has one number for each channel.
pub(super) fn check_bias(
    x: &TensorIr,
    bias: Option<&TensorIr>,
    channels: usize,
) -> Result<(), RuleViolation> {
    let Some(bias) = bias else {
        return Ok(());
    };
    same_dtype(x, bias)?;
    check_dims("the bias", bias, &[channels])
}

/// Checks that the gradient has the dims of the output.
pub(super) fn check_gradient(
    x: &TensorIr,
    grad: &TensorIr,
    out: &[usize],
) -> Result<(), RuleViolation> {
    same_dtype(x, grad)?;
    check_dims("the gradient", grad, out)
}

pub(super) fn bias_backward<const N: usize>(
    x: &TensorIr,
    bias: &TensorIr,
    grad: &TensorIr,
    out: &TensorIr,
) -> OpCheckResult {
    Kind::Float.of(x)?;
    same_dtype(x, grad)?;
    let (x_dims, of) = (
        dims_of_rank("the input", x, N + 2)?,
        dims_of_rank("the gradient", grad, N + 2)?,
    );
    must!(
        x_dims[0] == of[0],
        "a gradient {} does not fit an input {}",
        format_dims(of),
        format_dims(x_dims)
    );
    check_bias(x, Some(bias), of[1])?;
    has_dims(out, std::iter::once(of[1]))?;
    super::rules::has_dtype(out, x.dtype)?;
    Ok(bytes(grad).saturating_mul(2))
}
