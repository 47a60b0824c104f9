//! Ops of neural-network layers.

use burn_ir::ModuleOperationIr;

use super::{
    OpCheckResult,
    conv::{self, ConvGeometry},
    conv_transpose::TransposedConvGeometry as Transposed,
    deform_conv, norm,
    pool::{self, Pool},
    resize::{self, adaptive_backward},
    sequence,
};

// The rules of convolutions. The ops for one, two and three dims have different types.
macro_rules! forward {
    ($op:expr, $options:ty) => {
        <$options>::from(&$op.options).forward(&$op.x, &$op.weight, $op.bias.as_ref(), &$op.out)
    };
}
macro_rules! backward {
    ($op:expr, $options:ty, $of:ident) => {
        <$options>::from(&$op.options).$of(&$op.x, &$op.weight, &$op.output_grad, &$op.out)
    };
}
macro_rules! bias {
    ($op:expr, $dims:literal) => {
        conv::bias_backward::<$dims>(&$op.x, &$op.bias, &$op.output_grad, &$op.out)
    };
}

// The windows of a pool over one dim, or over several.
macro_rules! window {
    ($op:expr, $dilation:expr) => {
        Pool {
            kernel: [$op.kernel_size],
            stride: [$op.stride],
            padding: [$op.padding],
            dilation: [$dilation],
            ceil_mode: $op.ceil_mode,
        }
    };
}
macro_rules! windows {
    ($op:expr, $dilation:expr) => {
        Pool {
            kernel: $op.kernel_size,
            stride: $op.stride,
            padding: $op.padding,
            dilation: $dilation,
            ceil_mode: $op.ceil_mode,
        }
    };
}

pub(super) fn check(op: &ModuleOperationIr) -> OpCheckResult {
    use ModuleOperationIr as Op;
    match op {
        Op::BatchNorm(op) => norm::batch_norm(op),
        Op::LayerNorm(op) => norm::layer_norm(op),
        Op::Embedding(op) => sequence::embedding(op),
        Op::EmbeddingBackward(op) => sequence::embedding_backward(op),
        Op::Attention(op) => sequence::attention(op),
        Op::CtcLoss(op) => sequence::ctc_loss(op),
        Op::CtcLossBackward(op) => sequence::ctc_loss_backward(op),
        Op::Linear(op) => norm::linear(op),
        Op::LinearXBackward(op) => norm::linear_x_backward(op),
        Op::LinearWeightBackward(op) => norm::linear_weight_backward(op),
        Op::LinearBiasBackward(op) => norm::linear_bias_backward(op),
        Op::Conv1d(op) => forward!(op, ConvGeometry<1>),
        Op::Conv2d(op) => forward!(op, ConvGeometry<2>),
        Op::Conv3d(op) => forward!(op, ConvGeometry<3>),
        Op::Conv1dXBackward(op) => backward!(op, ConvGeometry<1>, x_backward),
        Op::Conv2dXBackward(op) => backward!(op, ConvGeometry<2>, x_backward),
        Op::Conv3dXBackward(op) => backward!(op, ConvGeometry<3>, x_backward),
        Op::Conv1dWeightBackward(op) => backward!(op, ConvGeometry<1>, weight_backward),
        Op::Conv2dWeightBackward(op) => backward!(op, ConvGeometry<2>, weight_backward),
        Op::Conv3dWeightBackward(op) => backward!(op, ConvGeometry<3>, weight_backward),
        Op::Conv1dBiasBackward(op) => bias!(op, 1),
        Op::Conv2dBiasBackward(op) => bias!(op, 2),
        Op::Conv3dBiasBackward(op) => bias!(op, 3),
        Op::ConvTranspose1d(op) => forward!(op, Transposed<1>),
        Op::ConvTranspose2d(op) => forward!(op, Transposed<2>),
        Op::ConvTranspose3d(op) => forward!(op, Transposed<3>),
        Op::ConvTranspose1dWeightBackward(op) => backward!(op, Transposed<1>, weight_backward),
        Op::ConvTranspose2dWeightBackward(op) => backward!(op, Transposed<2>, weight_backward),
        Op::ConvTranspose3dWeightBackward(op) => backward!(op, Transposed<3>, weight_backward),
        Op::ConvTranspose1dBiasBackward(op) => bias!(op, 1),
        Op::ConvTranspose2dBiasBackward(op) => bias!(op, 2),
        Op::ConvTranspose3dBiasBackward(op) => bias!(op, 3),
        Op::DeformableConv2d(op) => deform_conv::forward(op),
        Op::DeformableConv2dBackward(op) => deform_conv::backward(op),
        Op::AvgPool1d(op) => pool::pool(&window!(op, 1), &op.x, &op.out),
        Op::AvgPool2d(op) => pool::pool(&windows!(op, [1; 2]), &op.x, &op.out),
        Op::AvgPool1dBackward(op) => pool::avg_backward(&window!(op, 1), &op.x, &op.grad, &op.out),
        Op::AvgPool2dBackward(op) => {
            pool::avg_backward(&windows!(op, [1; 2]), &op.x, &op.grad, &op.out)
        }
        Op::MaxPool1d(op) => pool::pool(&window!(op, op.dilation), &op.x, &op.out),
        Op::MaxPool2d(op) => pool::pool(&windows!(op, op.dilation), &op.x, &op.out),
        Op::MaxPool1dWithIndices(op) => {
            pool::max_with_indices(&window!(op, op.dilation), &op.x, &op.out, &op.out_indices)
        }
        Op::MaxPool2dWithIndices(op) => {
            pool::max_with_indices(&windows!(op, op.dilation), &op.x, &op.out, &op.out_indices)
        }
        Op::MaxPool1dWithIndicesBackward(op) => {
            let pool = window!(op, op.dilation);
            pool::max_backward(&pool, &op.x, &op.grad, &op.indices, &op.out)
        }
        Op::MaxPool2dWithIndicesBackward(op) => {
            let pool = windows!(op, op.dilation);
            pool::max_backward(&pool, &op.x, &op.grad, &op.indices, &op.out)
        }
        Op::AdaptiveAvgPool1d(op) => resize::adaptive(&op.x, &op.out, [op.output_size]),
        Op::AdaptiveAvgPool2d(op) => resize::adaptive(&op.x, &op.out, op.output_size),
        Op::AdaptiveAvgPool3d(op) => resize::adaptive(&op.x, &op.out, op.output_size),
        Op::AdaptiveAvgPool1dBackward(op) => adaptive_backward::<1>(&op.x, &op.grad, &op.out),
        Op::AdaptiveAvgPool2dBackward(op) => adaptive_backward::<2>(&op.x, &op.grad, &op.out),
        Op::AdaptiveAvgPool3dBackward(op) => adaptive_backward::<3>(&op.x, &op.grad, &op.out),
        Op::Interpolate(op) => resize::interpolate(op),
        Op::InterpolateBackward(op) => resize::interpolate_backward(op),
        Op::Unfold4d(op) => resize::unfold4d(op),
    }
}
