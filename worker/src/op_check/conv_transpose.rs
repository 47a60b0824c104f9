//! Transposed convolutions of one, two and three dims.

use burn_ir::{
    ConvTranspose1dOptionsIr, ConvTranspose2dOptionsIr, ConvTranspose3dOptionsIr, TensorIr,
};

use super::{
    Broken, Checked,
    conv::{COLUMN_BYTES, biased, columns, extent, graded},
    rules::{Kind, makes, must, product, ranked, same_dtype, show, sum},
    scratch::{bytes, elements, threads, times, total, widened},
};

/// The options of a transposed convolution over `N` dims.
pub(super) struct Spread<const N: usize> {
    stride: [usize; N],
    padding: [usize; N],
    padding_out: [usize; N],
    dilation: [usize; N],
    groups: usize,
}

macro_rules! spread_from {
    ($dims:literal, $options:ty) => {
        impl From<&$options> for Spread<$dims> {
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
spread_from!(1, ConvTranspose1dOptionsIr);
spread_from!(2, ConvTranspose2dOptionsIr);
spread_from!(3, ConvTranspose3dOptionsIr);

impl<const N: usize> Spread<N> {
    /// Derives the dims of the output.
    fn spread(&self, x: &TensorIr, weight: &TensorIr) -> Result<Vec<usize>, Broken> {
        Kind::Float.of(x)?;
        same_dtype(x, weight)?;
        let (x, weight) = (
            ranked("the input", x, N + 2)?,
            ranked("the weight", weight, N + 2)?,
        );
        let groups = self.groups;
        must!(
            groups >= 1 && weight[0] == x[1] && x[1].is_multiple_of(groups),
            "a weight {} in {groups} groups does not fit an input {}",
            show(weight),
            show(x)
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
            out.push(whole - cut);
        }
        Ok(out)
    }

    pub(super) fn forward(
        &self,
        x: &TensorIr,
        weight: &TensorIr,
        bias: Option<&TensorIr>,
        out: &TensorIr,
    ) -> Checked {
        let derived = self.spread(x, weight)?;
        biased(x, bias, derived[1])?;
        makes(out, &derived, x.dtype)?;
        Ok(total(&[
            columns(weight, elements(x)),
            bytes(x),
            bytes(weight),
            widened(x),
            widened(weight),
            widened(out),
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
    ) -> Checked {
        let derived = self.spread(x, weight)?;
        graded(x, grad, &derived)?;
        makes(out, weight.shape.as_slice(), x.dtype)?;
        let mut places = 1u64;
        for i in 0..N {
            let kernel = weight.shape[i + 2].saturating_add(self.padding_out[i]);
            places = places.saturating_mul(kernel as u64);
        }
        let uncut = times(&weight.shape.as_slice()[..2]).saturating_mul(places);
        let column = elements(x).saturating_add(elements(weight));
        let tiles = column
            .saturating_mul(places.min(512))
            .saturating_mul(threads());
        Ok(total(&[
            uncut.saturating_add(tiles).saturating_mul(COLUMN_BYTES),
            bytes(x).saturating_mul(3),
            bytes(grad).saturating_mul(3),
            widened(x),
            widened(grad),
        ]))
    }
}
