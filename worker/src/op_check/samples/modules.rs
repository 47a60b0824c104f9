//! Ops of neural-network layers.

use burn_backend::{
    DType,
    ops::{ConvOptions, ConvTransposeOptions, DeformConvOptions},
};
use burn_ir::*;

use super::{boolean, float, id, int};

pub(super) fn modules() -> Vec<ModuleOperationIr> {
    let mut ops = norms();
    ops.extend(convolutions());
    ops.extend(transposed());
    ops.extend(pools());
    ops.extend(sizes());
    ops.extend(sequences());
    ops
}

fn norms() -> Vec<ModuleOperationIr> {
    use ModuleOperationIr as Op;
    let c = || float([3]);
    let x = || float([2, 3]);
    let w = || float([3, 5]);
    vec![
        Op::BatchNorm(BatchNormOpIr::create(
            float([2, 3, 4]),
            c(),
            c(),
            c(),
            c(),
            ScalarIr::Float(1e-5),
            id,
        )),
        Op::LayerNorm(LayerNormOpIr::create(x(), c(), Some(c()), 1e-5, id)),
        Op::Linear(LinearOpIr::create(
            float([4, 2, 3]),
            w(),
            Some(float([5])),
            id,
        )),
        Op::LinearXBackward(LinearXBackwardOpIr::create(w(), float([4, 2, 5]), id)),
        Op::LinearWeightBackward(LinearWeightBackwardOpIr::create(
            float([4, 2, 3]),
            float([4, 2, 5]),
            id,
        )),
        Op::LinearBiasBackward(LinearBiasBackwardOpIr::create(float([4, 2, 5]), id)),
    ]
}

/// A convolution with an input, a weight, a bias and options, and its backward ops.
macro_rules! convolved {
    ($x:expr, $w:expr, $options:expr, $bias:expr, $forward:ident($f:ident),
     $($of:ident($b:ident)),* ; $bias_of:ident($bb:ident)) => {{
        let (x, w, options) = ($x, $w, $options);
        let forward = $f::create(x.clone(), w.clone(), Some($bias), options.clone().into(), id);
        let grad = TensorIr { status: TensorStatus::ReadOnly, ..forward.out.clone() };
        vec![
            $(ModuleOperationIr::$of($b::create(
                x.clone(), w.clone(), grad.clone(), options.clone().into(), id,
            )),)*
            ModuleOperationIr::$bias_of($bb::create(x.clone(), $bias, grad.clone(), id)),
            ModuleOperationIr::$forward(forward),
        ]
    }};
}

fn convolutions() -> Vec<ModuleOperationIr> {
    let one = ConvOptions::new([2], [1], [1], 2);
    let two = ConvOptions::new([1, 2], [0, 1], [2, 1], 1);
    let three = ConvOptions::new([1; 3], [1; 3], [1; 3], 1);
    let mut ops = convolved!(
        float([2, 4, 9]), float([6, 2, 3]), one, float([6]), Conv1d(Conv1dOpIr),
        Conv1dXBackward(Conv1dXBackwardOpIr), Conv1dWeightBackward(Conv1dWeightBackwardOpIr);
        Conv1dBiasBackward(Conv1dBiasBackwardOpIr)
    );
    ops.extend(convolved!(
        float([2, 4, 9, 8]), float([6, 4, 3, 3]), two, float([6]), Conv2d(Conv2dOpIr),
        Conv2dXBackward(Conv2dXBackwardOpIr), Conv2dWeightBackward(Conv2dWeightBackwardOpIr);
        Conv2dBiasBackward(Conv2dBiasBackwardOpIr)
    ));
    ops.extend(convolved!(
        float([2, 4, 5, 5, 5]), float([6, 4, 3, 3, 3]), three, float([6]), Conv3d(Conv3dOpIr),
        Conv3dXBackward(Conv3dXBackwardOpIr), Conv3dWeightBackward(Conv3dWeightBackwardOpIr);
        Conv3dBiasBackward(Conv3dBiasBackwardOpIr)
    ));
    let options = DeformConvOptions::new([1, 1], [1, 1], [1, 1], 1, 2);
    let x = float([2, 4, 5, 5]);
    let (offset, weight) = (float([2, 36, 5, 5]), float([6, 4, 3, 3]));
    let (mask, bias) = (Some(float([2, 18, 5, 5])), Some(float([6])));
    let bent = DeformConv2dOpIr::create(
        x.clone(),
        offset.clone(),
        weight.clone(),
        mask.clone(),
        bias.clone(),
        options.clone().into(),
        id,
    );
    let grad = float([2, 6, 5, 5]);
    let options = options.into();
    let back = DeformConv2dBackwardOpIr::create(x, offset, weight, mask, bias, grad, options, id);
    ops.push(ModuleOperationIr::DeformableConv2d(Box::new(bent)));
    ops.push(ModuleOperationIr::DeformableConv2dBackward(Box::new(back)));
    ops
}

fn transposed() -> Vec<ModuleOperationIr> {
    let one = ConvTransposeOptions::new([2], [1], [1], [1], 2);
    let two = ConvTransposeOptions::new([1, 2], [0, 1], [0, 1], [2, 1], 1);
    let three = ConvTransposeOptions::new([1; 3], [1; 3], [0; 3], [1; 3], 1);
    let mut ops = convolved!(
        float([2, 4, 9]), float([4, 3, 3]), one, float([6]), ConvTranspose1d(ConvTranspose1dOpIr),
        ConvTranspose1dWeightBackward(ConvTranspose1dWeightBackwardOpIr);
        ConvTranspose1dBiasBackward(ConvTranspose1dBiasBackwardOpIr)
    );
    ops.extend(convolved!(
        float([2, 4, 9, 8]), float([4, 6, 3, 3]), two, float([6]),
        ConvTranspose2d(ConvTranspose2dOpIr),
        ConvTranspose2dWeightBackward(ConvTranspose2dWeightBackwardOpIr);
        ConvTranspose2dBiasBackward(ConvTranspose2dBiasBackwardOpIr)
    ));
    ops.extend(convolved!(
        float([2, 4, 5, 5, 5]), float([4, 6, 3, 3, 3]), three, float([6]),
        ConvTranspose3d(ConvTranspose3dOpIr),
        ConvTranspose3dWeightBackward(ConvTranspose3dWeightBackwardOpIr);
        ConvTranspose3dBiasBackward(ConvTranspose3dBiasBackwardOpIr)
    ));
    ops
}

fn pools() -> Vec<ModuleOperationIr> {
    average_pools().into_iter().chain(max_pools()).collect()
}

/// Returns the output `out` as the gradient of a backward op.
fn grad(out: &TensorIr) -> TensorIr {
    TensorIr {
        status: TensorStatus::ReadOnly,
        ..out.clone()
    }
}

fn average_pools() -> Vec<ModuleOperationIr> {
    use ModuleOperationIr as Op;
    let (x, y) = (|| float([2, 3, 8]), || float([2, 3, 8, 9]));
    let avg1 = AvgPool1dOpIr::create(x(), 3, 2, 1, true, true, id);
    let avg2 = AvgPool2dOpIr::create(y(), [3, 2], [2, 1], [1, 0], true, false, id);
    vec![
        Op::AvgPool1dBackward(AvgPool1dBackwardOpIr::create(
            x(),
            grad(&avg1.out),
            3,
            2,
            1,
            true,
            true,
            id,
        )),
        Op::AvgPool2dBackward(AvgPool2dBackwardOpIr::create(
            y(),
            grad(&avg2.out),
            [3, 2],
            [2, 1],
            [1, 0],
            true,
            false,
            id,
        )),
        Op::AvgPool1d(avg1),
        Op::AvgPool2d(avg2),
    ]
}

fn max_pools() -> Vec<ModuleOperationIr> {
    use ModuleOperationIr as Op;
    let (x, y) = (|| float([2, 3, 8]), || float([2, 3, 8, 9]));
    let max1 = MaxPool1dWithIndicesOpIr::create(x(), 3, 2, 1, 2, true, DType::I64, id);
    let max2 = MaxPool2dWithIndicesOpIr::create(
        y(),
        [3, 2],
        [2, 1],
        [1, 0],
        [1, 2],
        false,
        DType::I32,
        id,
    );
    vec![
        Op::MaxPool1d(MaxPool1dOpIr::create(x(), 3, 2, 1, 2, false, id)),
        Op::MaxPool2d(MaxPool2dOpIr::create(
            y(),
            [2; 2],
            [2; 2],
            [0; 2],
            [1; 2],
            true,
            id,
        )),
        Op::MaxPool1dWithIndicesBackward(MaxPool1dWithIndicesBackwardOpIr::create(
            x(),
            grad(&max1.out),
            grad(&max1.out_indices),
            3,
            2,
            1,
            2,
            true,
            id,
        )),
        Op::MaxPool2dWithIndicesBackward(MaxPool2dWithIndicesBackwardOpIr::create(
            y(),
            grad(&max2.out),
            grad(&max2.out_indices),
            [3, 2],
            [2, 1],
            [1, 0],
            [1, 2],
            false,
            id,
        )),
        Op::MaxPool1dWithIndices(max1),
        Op::MaxPool2dWithIndices(max2),
    ]
}

fn sizes() -> Vec<ModuleOperationIr> {
    use ModuleOperationIr as Op;
    let (x, y, z) = (
        || float([2, 3, 8]),
        || float([2, 3, 8, 9]),
        || float([2, 3, 8, 9, 4]),
    );
    let options = || InterpolateOptionsIr {
        mode: InterpolateModeIr::Bicubic,
        align_corners: true,
    };
    let windows = Unfold4dOptionsIr {
        stride: [2, 1],
        padding: [1, 0],
        dilation: [1, 2],
    };
    vec![
        Op::AdaptiveAvgPool1d(AdaptiveAvgPool1dOpIr::create(x(), 5, id)),
        Op::AdaptiveAvgPool2d(AdaptiveAvgPool2dOpIr::create(y(), [5, 4], id)),
        Op::AdaptiveAvgPool3d(AdaptiveAvgPool3dOpIr::create(z(), [5, 4, 2], id)),
        Op::AdaptiveAvgPool1dBackward(AdaptiveAvgPool1dBackwardOpIr::create(
            x(),
            float([2, 3, 5]),
            id,
        )),
        Op::AdaptiveAvgPool2dBackward(AdaptiveAvgPool2dBackwardOpIr::create(
            y(),
            float([2, 3, 5, 4]),
            id,
        )),
        Op::AdaptiveAvgPool3dBackward(AdaptiveAvgPool3dBackwardOpIr::create(
            z(),
            float([2, 3, 5, 4, 2]),
            id,
        )),
        Op::Interpolate(InterpolateOpIr::create(y(), [16, 3], options(), id)),
        Op::InterpolateBackward(InterpolateBackwardOpIr::create(
            y(),
            float([2, 3, 16, 3]),
            [16, 3],
            options(),
            id,
        )),
        Op::Unfold4d(Unfold4dOpIr::create(y(), [3, 2], windows, id)),
    ]
}

fn sequences() -> Vec<ModuleOperationIr> {
    use ModuleOperationIr as Op;
    let options = AttentionOptionsIr {
        scale: None,
        softcap: Some(ScalarIr::Float(30.0)),
        is_causal: true,
    };
    let (probs, targets) = (|| float([7, 2, 5]), || int([2, 3]));
    vec![
        Op::Embedding(EmbeddingOpIr::create(float([9, 4]), int([2, 6]), id)),
        Op::EmbeddingBackward(EmbeddingBackwardOpIr::create(
            float([9, 4]),
            float([2, 6, 4]),
            int([2, 6]),
            id,
        )),
        Op::Attention(AttentionOpIr::create(
            float([2, 4, 5, 8]),
            float([2, 2, 7, 8]),
            float([2, 2, 7, 6]),
            Some(boolean([2, 1, 5, 7])),
            Some(float([1, 4, 1, 7])),
            options,
            id,
        )),
        Op::CtcLoss(CtcLossOpIr::create(
            probs(),
            targets(),
            int([2]),
            int([2]),
            0,
            id,
        )),
        Op::CtcLossBackward(CtcLossBackwardOpIr::create(
            probs(),
            targets(),
            int([2]),
            int([2]),
            float([2]),
            0,
            id,
        )),
    ]
}
