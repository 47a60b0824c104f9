//! Convolutions: forward, and the gradients of input, weight and bias.
//!
//! Sizes, strides and paddings differ between axes, so that the suite detects a
//! swap of two axes.

use burn::nn::conv::{
    Conv1dConfig, Conv2dConfig, Conv3dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
    ConvTranspose3dConfig, DeformConv2dConfig,
};
use burn::nn::{PaddingConfig1d, PaddingConfig2d, PaddingConfig3d};
use burn::tensor::module::*;
use burn::tensor::ops::{ConvOptions, ConvTransposeOptions, DeformConvOptions};
use burn::tensor::{Device, TensorData};

use super::autodiff::{backward, fill, grad_of, grad3, leaf, module, param_grads};
use super::case::Case;
use super::data::floats;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = functions();
    cases.extend(functions_of_unusual_shapes());
    cases.extend(transposed());
    cases.extend(deformed());
    cases.extend(modules());
    cases
}

fn functions() -> Vec<Case> {
    vec![
        Case::approx("conv.conv1d", |d| {
            grad3(d, [2, 3, 9], [4, 3, 3], [4], |x, w, b| {
                conv1d(x, w, Some(b), ConvOptions::new([2], [1], [1], 1))
            })
        }),
        Case::approx("conv.conv1d/groups_dilation", |d| {
            grad3(d, [2, 4, 11], [6, 2, 3], [6], |x, w, b| {
                conv1d(x, w, Some(b), ConvOptions::new([1], [2], [3], 2))
            })
        }),
        Case::approx("conv.conv2d", |d| {
            grad3(d, [2, 3, 7, 6], [4, 3, 3, 2], [4], |x, w, b| {
                conv2d(x, w, Some(b), ConvOptions::new([2, 1], [1, 0], [1, 1], 1))
            })
        }),
        Case::approx("conv.conv2d/groups", |d| {
            grad3(d, [2, 4, 6, 5], [6, 2, 2, 3], [6], |x, w, b| {
                conv2d(x, w, Some(b), ConvOptions::new([1, 2], [0, 1], [1, 1], 2))
            })
        }),
        Case::approx("conv.conv2d/depthwise", |d| {
            grad3(d, [1, 4, 6, 5], [4, 1, 3, 2], [4], |x, w, b| {
                conv2d(x, w, Some(b), ConvOptions::new([1, 1], [1, 1], [1, 1], 4))
            })
        }),
        Case::approx("conv.conv2d/dilation", |d| {
            grad3(d, [1, 2, 9, 8], [3, 2, 3, 2], [3], |x, w, b| {
                conv2d(x, w, Some(b), ConvOptions::new([1, 2], [2, 1], [2, 3], 1))
            })
        }),
    ]
}

fn functions_of_unusual_shapes() -> Vec<Case> {
    vec![
        Case::approx("conv.conv2d/one_by_one", |d| {
            grad3(d, [2, 5, 3, 4], [2, 5, 1, 1], [2], |x, w, b| {
                conv2d(x, w, Some(b), ConvOptions::new([1, 1], [0, 0], [1, 1], 1))
            })
        }),
        Case::approx("conv.conv2d/asymmetric_padding", |d| {
            let padding = [(0, 2), (1, 0)];
            grad3(d, [1, 2, 5, 6], [3, 2, 3, 2], [3], move |x, w, b| {
                conv2d(
                    x,
                    w,
                    Some(b),
                    ConvOptions::new_with_padding([1, 1], padding, [1, 1], 1),
                )
            })
        }),
        Case::approx("conv.conv2d/large", |d| {
            let options = ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
            conv2d(
                floats(d, [4, 16, 17, 19], 1),
                floats(d, [24, 16, 3, 3], 2),
                None,
                options,
            )
        }),
        Case::approx("conv.conv3d", |d| {
            grad3(d, [1, 2, 4, 5, 6], [3, 2, 2, 3, 2], [3], |x, w, b| {
                conv3d(
                    x,
                    w,
                    Some(b),
                    ConvOptions::new([1, 2, 1], [1, 0, 1], [1, 1, 2], 1),
                )
            })
        }),
        Case::approx("conv.conv2d_weight_backward", |d| {
            let options = ConvOptions::new([2, 1], [1, 0], [1, 1], 1);
            let (x, w) = (floats(d, [2, 3, 7, 6], 1), floats(d, [4, 3, 3, 2], 2));
            conv2d_weight_backward(x, w, floats(d, [2, 4, 4, 5], 3), options)
        }),
    ]
}

fn transposed() -> Vec<Case> {
    vec![
        Case::approx("conv.conv_transpose1d", |d| {
            grad3(d, [2, 3, 6], [3, 4, 3], [4], |x, w, b| {
                let options = ConvTransposeOptions::new([2], [1], [1], [1], 1);
                conv_transpose1d(x, w, Some(b), options)
            })
        }),
        Case::approx("conv.conv_transpose2d", |d| {
            grad3(d, [2, 3, 4, 5], [3, 2, 3, 2], [2], |x, w, b| {
                let options = ConvTransposeOptions::new([2, 1], [1, 0], [1, 0], [1, 2], 1);
                conv_transpose2d(x, w, Some(b), options)
            })
        }),
        Case::approx("conv.conv_transpose2d/groups", |d| {
            grad3(d, [1, 4, 3, 5], [4, 3, 2, 3], [6], |x, w, b| {
                let options = ConvTransposeOptions::new([1, 2], [0, 1], [0, 1], [1, 1], 2);
                conv_transpose2d(x, w, Some(b), options)
            })
        }),
        Case::approx("conv.conv_transpose3d", |d| {
            grad3(d, [1, 2, 3, 2, 4], [2, 3, 2, 3, 2], [3], |x, w, b| {
                let options =
                    ConvTransposeOptions::new([1, 2, 1], [0, 1, 0], [0, 1, 0], [1, 1, 1], 1);
                conv_transpose3d(x, w, Some(b), options)
            })
        }),
    ]
}

/// Deformable convolution with all five inputs tracked.
fn deform(device: &Device, weight_groups: usize, offset_groups: usize) -> Vec<TensorData> {
    let x = leaf(device, [1, 4, 5, 6], 1);
    let offset = leaf(device, [1, offset_groups * 2 * 3 * 2, 5, 5], 2);
    let weight = leaf(device, [6, 4 / weight_groups, 3, 2], 3);
    let mask = leaf(device, [1, offset_groups * 3 * 2, 5, 5], 4);
    let bias = leaf(device, [6], 5);
    let y = deform_conv2d(
        x.clone(),
        offset.clone() * 0.7,
        weight.clone(),
        Some(mask.clone()),
        Some(bias.clone()),
        DeformConvOptions::new([1, 1], [1, 0], [1, 1], weight_groups, offset_groups),
    );
    let grads = backward(&y);
    let leaves = [&x, &offset, &weight, &mask].map(|leaf| grad_of(leaf, &grads));
    let mut outputs = vec![y.into_data(), grad_of(&bias, &grads)];
    outputs.extend(leaves);
    outputs
}

fn deformed() -> Vec<Case> {
    vec![
        Case::approx("conv.deform_conv2d", |d| deform(d, 1, 1)),
        Case::approx("conv.deform_conv2d/groups", |d| deform(d, 2, 2)),
        Case::approx("nn.deform_conv2d", |d| {
            let x = leaf(d, [1, 2, 5, 6], 1);
            let offset = leaf(d, [1, 18, 5, 6], 2);
            let config = DeformConv2dConfig::new([2, 3], [3, 3]);
            let config = config.with_padding(PaddingConfig2d::Same);
            let module = fill(config.init(&x.device()));
            let y = module.forward(x.clone(), offset.clone(), None);
            let grads = backward(&y);
            let mut outputs = vec![y.into_data(), grad_of(&x, &grads), grad_of(&offset, &grads)];
            outputs.extend(param_grads(&module, &grads));
            outputs
        }),
    ]
}

fn modules() -> Vec<Case> {
    vec![
        Case::approx("nn.conv1d", |d| {
            let config = || Conv1dConfig::new(3, 4, 3).with_padding(PaddingConfig1d::Same);
            module(d, |d| config().init(d), [2, 3, 7], |m, x| m.forward(x))
        }),
        Case::approx("nn.conv1d/uneven_padding", |d| {
            let padding = PaddingConfig1d::Explicit(2, 1);
            let config = Conv1dConfig::new(2, 4, 3)
                .with_padding(padding)
                .with_bias(false);
            module(d, |d| config.init(d), [2, 2, 7], |m, x| m.forward(x))
        }),
        Case::approx("nn.conv2d", |d| {
            let config = Conv2dConfig::new([3, 4], [3, 2]).with_stride([2, 1]);
            module(d, |d| config.init(d), [2, 3, 7, 5], |m, x| m.forward(x))
        }),
        Case::approx("nn.conv2d/groups_same", |d| {
            let config = Conv2dConfig::new([4, 6], [3, 5])
                .with_groups(2)
                .with_padding(PaddingConfig2d::Same);
            module(d, |d| config.init(d), [1, 4, 6, 7], |m, x| m.forward(x))
        }),
        Case::approx("nn.conv3d", |d| {
            let config = Conv3dConfig::new([2, 3], [2, 3, 2])
                .with_padding(PaddingConfig3d::Explicit(1, 0, 1));
            module(d, |d| config.init(d), [1, 2, 3, 5, 4], |m, x| m.forward(x))
        }),
        Case::approx("nn.conv_transpose1d", |d| {
            let config = ConvTranspose1dConfig::new([3, 2], 4)
                .with_stride(3)
                .with_padding(1);
            module(d, |d| config.init(d), [2, 3, 5], |m, x| m.forward(x))
        }),
        Case::approx("nn.conv_transpose2d", |d| {
            let config = ConvTranspose2dConfig::new([3, 2], [2, 3]).with_stride([2, 1]);
            module(d, |d| config.init(d), [2, 3, 3, 5], |m, x| m.forward(x))
        }),
        Case::approx("nn.conv_transpose3d", |d| {
            let config = ConvTranspose3dConfig::new([2, 3], [2, 1, 3]).with_dilation([2, 1, 1]);
            module(d, |d| config.init(d), [1, 2, 3, 2, 4], |m, x| m.forward(x))
        }),
    ]
}
