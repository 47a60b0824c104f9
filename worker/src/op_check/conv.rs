//! Convolutions of one, two and three dims.

use burn_ir::{Conv1dOptionsIr, Conv2dOptionsIr, Conv3dOptionsIr, TensorIr};

use super::{
    Broken, Checked,
    rules::{Kind, dims, has_dims, makes, must, product, ranked, same_dtype, shaped, show, sum},
    scratch::{bytes, elements, threads, times, total, widened},
};

/// Output positions for which Flex builds columns at a time.
const TILE: usize = 512;

/// Bytes that Flex stores for each position along a kernel's axis: the range inside the
/// input.
const RANGE_BYTES: u64 = 16;

/// Size of an element in a column: that of `f64`, the widest type.
pub(super) const COLUMN_BYTES: u64 = 8;

/// How a kernel slides over `N` dims.
pub(super) struct Sliding<const N: usize> {
    pub(super) stride: [usize; N],
    pub(super) padding: [(usize, usize); N],
    pub(super) dilation: [usize; N],
    pub(super) groups: usize,
}

impl From<&Conv1dOptionsIr> for Sliding<1> {
    fn from(options: &Conv1dOptionsIr) -> Self {
        Self {
            stride: options.stride,
            padding: options.padding,
            dilation: options.dilation,
            groups: options.groups,
        }
    }
}

impl From<&Conv2dOptionsIr> for Sliding<2> {
    fn from(options: &Conv2dOptionsIr) -> Self {
        Self {
            stride: options.stride,
            padding: options.padding,
            dilation: options.dilation,
            groups: options.groups,
        }
    }
}

impl From<&Conv3dOptionsIr> for Sliding<3> {
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
struct Slid<'a> {
    x: &'a [usize],
    weight: &'a [usize],
    /// All dims of the output, and the padded input's dims without batch and channels.
    out: Vec<usize>,
    padded: Vec<usize>,
}

/// Returns the length of a kernel's axis including the gaps of a dilation.
pub(super) fn extent(kernel: usize, dilation: usize) -> Result<usize, Broken> {
    must!(
        kernel >= 1 && dilation >= 1,
        "a kernel of {kernel} and a dilation of {dilation} must both be at least 1"
    );
    sum(&[product(&[dilation, kernel - 1])?, 1])
}

impl<const N: usize> Sliding<N> {
    /// Derives the dims of the convolution, and checks that each axis of the weight fits
    /// the input.
    fn slide<'a>(&self, x: &'a TensorIr, weight: &'a TensorIr) -> Result<Slid<'a>, Broken> {
        Kind::Float.of(x)?;
        same_dtype(x, weight)?;
        let (x, weight) = (
            ranked("the input", x, N + 2)?,
            ranked("the weight", weight, N + 2)?,
        );
        self.grouped(x, weight)?;
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
        Ok(Slid {
            x,
            weight,
            out,
            padded,
        })
    }

    /// Returns the dims of the output.
    pub(super) fn dims(&self, x: &TensorIr, weight: &TensorIr) -> Result<Vec<usize>, Broken> {
        self.slide(x, weight).map(|slid| slid.out)
    }

    /// Checks the groups, as Flex multiplies the weight's channels with the input's through
    /// unchecked pointers.
    fn grouped(&self, x: &[usize], weight: &[usize]) -> Result<(), Broken> {
        let groups = self.groups;
        let channels = product(&[weight[1], groups])?;
        must!(
            groups >= 1 && channels == x[1] && weight[0].is_multiple_of(groups),
            "a weight {} in {groups} groups does not fit an input {}",
            show(weight),
            show(x)
        );
        Ok(())
    }

    pub(super) fn forward(
        &self,
        x: &TensorIr,
        weight: &TensorIr,
        bias: Option<&TensorIr>,
        out: &TensorIr,
    ) -> Checked {
        let slid = self.slide(x, weight)?;
        biased(x, bias, slid.weight[0])?;
        makes(out, &slid.out, x.dtype)?;
        let column = times(&slid.weight[1..]);
        let tile = times(&slid.out[2..]).min(TILE as u64);
        let channels = (slid.weight[0] / self.groups) as u64;
        let tiles = column
            .saturating_add(channels)
            .saturating_mul(tile)
            .saturating_mul(COLUMN_BYTES)
            .saturating_mul(threads());
        let ranges = total(
            &slid.weight[2..]
                .iter()
                .map(|&k| k as u64)
                .collect::<Vec<_>>(),
        );
        Ok(total(&[
            tiles,
            ranges.saturating_mul(RANGE_BYTES),
            // The padded input, and a copy with its channels last.
            self.padded_bytes(&slid, x).saturating_mul(2),
            bytes(weight),
            widened(x),
            widened(weight),
            widened(out),
        ]))
    }

    fn padded_bytes(&self, slid: &Slid<'_>, x: &TensorIr) -> u64 {
        let is_even = self.padding.iter().all(|(before, after)| before == after);
        if is_even {
            return bytes(x);
        }
        let planes = times(&slid.x[..2]).saturating_mul(x.dtype.size() as u64);
        planes.saturating_mul(times(&slid.padded))
    }

    /// Checks the gradient of the input. Flex computes it by a transposed convolution of
    /// the gradient.
    pub(super) fn x_backward(
        &self,
        x: &TensorIr,
        weight: &TensorIr,
        grad: &TensorIr,
        out: &TensorIr,
    ) -> Checked {
        let slid = self.slide(x, weight)?;
        graded(x, grad, &slid.out)?;
        makes(out, slid.x, x.dtype)?;
        Ok(total(&[
            columns(weight, elements(grad)),
            self.padded_bytes(&slid, x).saturating_mul(2),
            widened(weight),
            widened(grad),
            widened(out),
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
    ) -> Checked {
        let slid = self.slide(x, weight)?;
        graded(x, grad, &slid.out)?;
        makes(out, slid.weight, x.dtype)?;
        let mut uncut = times(&slid.weight[..2]);
        let mut places = 1u64;
        for i in 0..N {
            let reached = self.stride[i] * (slid.out[i + 2] - 1);
            let place = (slid.padded[i] - reached - 1) / self.dilation[i] + 1;
            places = places.saturating_mul(place as u64);
        }
        uncut = uncut.saturating_mul(places);
        let column = total(&[
            times(&[slid.x[0]]).saturating_mul(times(&slid.out[2..])),
            slid.weight[0] as u64,
        ]);
        let tiles = column
            .saturating_mul(places.min(TILE as u64))
            .saturating_mul(threads());
        Ok(total(&[
            uncut.saturating_add(tiles).saturating_mul(COLUMN_BYTES),
            self.padded_bytes(&slid, x).saturating_mul(3),
            bytes(grad).saturating_mul(3),
            widened(x),
            widened(grad),
        ]))
    }
}

/// Returns the bytes of the columns of a transposed convolution with `weight`. Each of
/// Flex's threads has its own: some MiB, or one position of all channels.
pub(super) fn columns(weight: &TensorIr, places: u64) -> u64 {
    /// The limit that Flex observes if one position fits.
    const COLUMNS_BYTES: u64 = 8 << 20;
    let column = times(&dims(weight)[1..]).saturating_mul(COLUMN_BYTES);
    let each = column.saturating_mul(places).min(column.max(COLUMNS_BYTES));
    each.saturating_mul(threads())
}

/// Checks that a bias has one number for each channel.
pub(super) fn biased(x: &TensorIr, bias: Option<&TensorIr>, channels: usize) -> Result<(), Broken> {
    let Some(bias) = bias else {
        return Ok(());
    };
    same_dtype(x, bias)?;
    shaped("the bias", bias, &[channels])
}

/// Checks that the gradient has the dims of the output.
pub(super) fn graded(x: &TensorIr, grad: &TensorIr, out: &[usize]) -> Result<(), Broken> {
    same_dtype(x, grad)?;
    shaped("the gradient", grad, out)
}

pub(super) fn bias_backward<const N: usize>(
    x: &TensorIr,
    bias: &TensorIr,
    grad: &TensorIr,
    out: &TensorIr,
) -> Checked {
    Kind::Float.of(x)?;
    same_dtype(x, grad)?;
    let (x_dims, of) = (
        ranked("the input", x, N + 2)?,
        ranked("the gradient", grad, N + 2)?,
    );
    must!(
        x_dims[0] == of[0],
        "a gradient {} does not fit an input {}",
        show(of),
        show(x_dims)
    );
    biased(x, Some(bias), of[1])?;
    has_dims(out, std::iter::once(of[1]))?;
    super::rules::has_dtype(out, x.dtype)?;
    Ok(bytes(grad).saturating_mul(2))
}
