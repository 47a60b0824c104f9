//! Pooling, and the other ops that resample an image.

use burn::nn::interpolate::{
    Interpolate1dConfig, Interpolate2dConfig, InterpolateMode as ModuleMode,
};
use burn::nn::pool::{
    AdaptiveAvgPool1dConfig, AdaptiveAvgPool2dConfig, AdaptiveAvgPool3dConfig, AvgPool1dConfig,
    AvgPool2dConfig, MaxPool1dConfig, MaxPool2dConfig,
};
use burn::nn::{
    Fold4dConfig, PaddingConfig1d, PaddingConfig2d, PixelShuffleConfig, PixelUnshuffleConfig,
    Unfold4dConfig,
};
use burn::tensor::grid::affine_grid_2d;
use burn::tensor::module::*;
use burn::tensor::ops::{
    AvgPoolOptions, GridSampleOptions, GridSamplePaddingMode, InterpolateMode, InterpolateOptions,
    MaxPoolOptions, UnfoldOptions,
};
use burn::tensor::{Device, Tensor, TensorData};

use super::autodiff::{grad, grad2};
use super::case::Case;
use super::data::{between, floats};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = functions();
    cases.extend(functions_with_indices());
    cases.extend(modules());
    cases.extend(interpolation());
    cases.extend(windows());
    cases
}

const LINE: [usize; 3] = [2, 3, 9];
const IMAGE: [usize; 4] = [2, 3, 7, 6];
const VOLUME: [usize; 5] = [1, 2, 5, 4, 7];

fn avg() -> AvgPoolOptions<2> {
    AvgPoolOptions::new([3, 2])
        .with_stride([2, 1])
        .with_padding([1, 0])
}

fn max() -> MaxPoolOptions<2> {
    MaxPoolOptions::new([3, 2])
        .with_stride([1, 2])
        .with_padding([1, 1])
}

fn functions() -> Vec<Case> {
    vec![
        Case::approx("pool.avg_pool1d", |d| {
            let options = AvgPoolOptions::new([3]).with_stride([2]).with_padding([1]);
            grad(d, LINE, |x| avg_pool1d(x, options.clone()))
        }),
        Case::approx("pool.avg_pool2d", |d| {
            grad(d, IMAGE, |x| avg_pool2d(x, avg()))
        }),
        Case::approx("pool.avg_pool2d/exclude_padding", |d| {
            grad(d, IMAGE, |x| {
                avg_pool2d(x, avg().with_count_include_pad(false))
            })
        }),
        Case::approx("pool.avg_pool2d/ceil", |d| {
            grad(d, IMAGE, |x| {
                avg_pool2d(x, AvgPoolOptions::new([2, 4]).with_ceil_mode(true))
            })
        }),
        Case::approx("pool.max_pool1d", |d| {
            grad(d, LINE, |x| {
                max_pool1d(x, MaxPoolOptions::new([4]).with_stride([2]))
            })
        }),
        Case::approx("pool.max_pool2d", |d| {
            grad(d, IMAGE, |x| max_pool2d(x, max()))
        }),
        Case::approx("pool.max_pool2d/dilation_ceil", |d| {
            let options = max().with_dilation([2, 1]).with_ceil_mode(true);
            grad(d, IMAGE, |x| max_pool2d(x, options.clone()))
        }),
    ]
}

fn functions_with_indices() -> Vec<Case> {
    vec![
        Case::exact("pool.max_pool1d_with_indices", |d| {
            max_pool1d_with_indices(
                floats(d, LINE, 1),
                MaxPoolOptions::new([3]).with_padding([1]),
            )
        }),
        Case::exact("pool.max_pool2d_with_indices", |d| {
            max_pool2d_with_indices(floats(d, IMAGE, 1), max())
        }),
        Case::approx("pool.max_pool2d_with_indices_backward", |d| {
            let x = floats(d, IMAGE, 1);
            let options = MaxPoolOptions::new([2, 3]).with_stride([1, 2]);
            let (y, indices) = max_pool2d_with_indices(x.clone(), options);
            let grad = floats(d, y.dims(), 2);
            let (stride, none, one) = ([1, 2], [0, 0], [1, 1]);
            max_pool2d_with_indices_backward(x, [2, 3], stride, none, one, false, grad, indices)
        }),
        Case::approx("pool.avg_pool2d_backward", |d| {
            let grad = floats(d, [2, 3, 6, 2], 2);
            avg_pool2d_backward(
                floats(d, IMAGE, 1),
                grad,
                [2, 3],
                [1, 2],
                [0, 0],
                true,
                false,
            )
        }),
        Case::approx("pool.adaptive_avg_pool1d", |d| {
            grad(d, LINE, |x| adaptive_avg_pool1d(x, 4))
        }),
        Case::approx("pool.adaptive_avg_pool2d", |d| {
            grad(d, IMAGE, |x| adaptive_avg_pool2d(x, [3, 4]))
        }),
        Case::approx("pool.adaptive_avg_pool3d", |d| {
            grad(d, VOLUME, |x| adaptive_avg_pool3d(x, [2, 3, 5]))
        }),
    ]
}

fn modules() -> Vec<Case> {
    vec![
        Case::approx("nn.avg_pool1d", |d| {
            let pool = AvgPool1dConfig::new(3).with_stride(2).init();
            grad(d, LINE, |x| pool.forward(x))
        }),
        Case::approx("nn.avg_pool2d", |d| {
            let config = AvgPool2dConfig::new([3, 2]).with_strides([2, 1]);
            let pool = config
                .with_padding(PaddingConfig2d::Explicit(1, 0, 1, 0))
                .init();
            grad(d, IMAGE, |x| pool.forward(x))
        }),
        Case::approx("nn.max_pool1d", |d| {
            let pool = MaxPool1dConfig::new(3)
                .with_padding(PaddingConfig1d::Explicit(1, 1))
                .init();
            grad(d, LINE, |x| pool.forward(x))
        }),
        Case::approx("nn.max_pool2d", |d| {
            let pool = MaxPool2dConfig::new([3, 2]).with_strides([1, 2]).init();
            grad(d, IMAGE, |x| pool.forward(x))
        }),
        Case::approx("nn.adaptive_avg_pool1d", |d| {
            grad(d, LINE, |x| {
                AdaptiveAvgPool1dConfig::new(2).init().forward(x)
            })
        }),
        Case::approx("nn.adaptive_avg_pool2d", |d| {
            grad(d, IMAGE, |x| {
                AdaptiveAvgPool2dConfig::new([5, 2]).init().forward(x)
            })
        }),
        Case::approx("nn.adaptive_avg_pool3d", |d| {
            grad(d, VOLUME, |x| {
                AdaptiveAvgPool3dConfig::new([1, 2, 3]).init().forward(x)
            })
        }),
        Case::approx("nn.interpolate1d", |d| {
            let config = || Interpolate1dConfig::new().with_output_size(Some(13));
            let resize = config().with_mode(ModuleMode::Linear).init();
            grad(d, LINE, |x| resize.forward(x))
        }),
        Case::approx("nn.interpolate2d", |d| {
            let config = || Interpolate2dConfig::new().with_scale_factor(Some([1.5, 2.0]));
            let resize = config().with_mode(ModuleMode::Linear).init();
            grad(d, IMAGE, |x| resize.forward(x))
        }),
        Case::exact("nn.pixel_shuffle", |d| {
            grad(d, [2, 8, 3, 2], |x| {
                PixelShuffleConfig::new(2).init().forward(x)
            })
        }),
        Case::exact("nn.pixel_unshuffle", |d| {
            grad(d, [2, 2, 6, 4], |x| {
                PixelUnshuffleConfig::new(2).init().forward(x)
            })
        }),
    ]
}

/// Enlarges one axis and shrinks the other.
fn resize(device: &Device, mode: fn() -> InterpolateMode, align_corners: bool) -> Vec<TensorData> {
    grad(device, IMAGE, |x| {
        let options = InterpolateOptions::new(mode()).with_align_corners(align_corners);
        interpolate(x, options.with_output_size([11, 4]))
    })
}

/// Samples an image at points inside and outside it.
fn sample(device: &Device, options: fn() -> GridSampleOptions) -> Tensor<4> {
    let grid = between(device, [2, 4, 5, 2], 2, -1.3, 1.3);
    floats(device, IMAGE, 1).grid_sample_2d(grid, options())
}

fn interpolation() -> Vec<Case> {
    use InterpolateMode as Mode;
    vec![
        Case::approx("pool.interpolate/nearest", |d| {
            resize(d, || Mode::Nearest, false)
        }),
        Case::approx("pool.interpolate/bilinear", |d| {
            resize(d, || Mode::Bilinear, false)
        }),
        Case::approx("pool.interpolate/bilinear_aligned", |d| {
            resize(d, || Mode::Bilinear, true)
        }),
        Case::approx("pool.interpolate/bicubic", |d| {
            resize(d, || Mode::Bicubic, true)
        }),
        Case::approx("pool.interpolate/lanczos3", |d| {
            let options = InterpolateOptions::new(Mode::Lanczos3).with_output_size([11, 4]);
            interpolate(floats(d, IMAGE, 1), options)
        }),
        Case::approx("pool.grid_sample_2d/bilinear", |d| {
            sample(d, GridSampleOptions::default)
        }),
        Case::approx("pool.grid_sample_2d/border", |d| {
            sample(d, || {
                let options = GridSampleOptions::new(Mode::Bilinear).with_align_corners(true);
                options.with_padding_mode(GridSamplePaddingMode::Border)
            })
        }),
        Case::approx("pool.grid_sample_2d/reflection", |d| {
            sample(d, || {
                let options = GridSampleOptions::new(Mode::Bilinear);
                options.with_padding_mode(GridSamplePaddingMode::Reflection)
            })
        }),
        Case::approx("pool.grid_sample_2d/nearest", |d| {
            sample(d, || GridSampleOptions::new(Mode::Nearest))
        }),
        Case::approx("pool.affine_grid_2d", |d| {
            grad(d, [2, 2, 3], |transform| {
                affine_grid_2d(transform, [2, 3, 4, 5])
            })
        }),
        Case::approx("pool.grid_sample_2d/gradient", |d| {
            grad2(d, [1, 2, 4, 5], [1, 3, 4, 2], |x, grid| {
                x.grid_sample_2d(grid * 0.4, GridSampleOptions::default())
            })
        }),
    ]
}

fn windows() -> Vec<Case> {
    let options = || UnfoldOptions::new([2, 1], [1, 0], [1, 2]);
    vec![
        Case::approx("pool.unfold4d", move |d| {
            grad(d, IMAGE, |x| unfold4d(x, [3, 2], options()))
        }),
        Case::approx("pool.fold4d", move |d| {
            grad(d, [2, 18, 16], |x| fold4d(x, [7, 6], [3, 2], options()))
        }),
        Case::approx("nn.unfold4d", |d| {
            let unfold = Unfold4dConfig::new([2, 3]).with_stride([1, 2]).init();
            grad(d, IMAGE, |x| unfold.forward(x))
        }),
        Case::approx("nn.fold4d", |d| {
            let fold = Fold4dConfig::new([4, 5], [2, 2])
                .with_padding([1, 0])
                .init();
            grad(d, [1, 12, 20], |x| fold.forward(x))
        }),
    ]
}
