//! Clamps indices, and ranges of slices, that kernels do not check, and finds biases whose layout they do not.
//!
//! CubeCL launches the kernels of `gather`, `scatter`, `select` and similar ops without
//! bounds checks, and only the device knows the values of the indices. So an op before the
//! one that uses the indices clamps them on the device. An index out of bounds, whose
//! effect Burn leaves undefined, then reaches another element of the same tensor.
//!
//! The kernel of `slice_assign` takes the start of each range as it is: a negative one, which
//! counts from the end, would be a position before the tensor. Ranges are numbers in the op, so they are
//! resolved before it.
//!
//! Other ops with integers or positions among their inputs are safe in `burn-cubecl`
//! 0.22.1: the backward pass of a pool only compares its indices and does not address
//! memory by them, and grid samples and deformable convolutions check or clamp each
//! position.

use burn_backend::{Backend, DType, Scalar, Slice, tensor::IntTensor};
use burn_ir::{BaseOperationIr, ModuleOperationIr, OperationIr, TensorIr};

/// Returns the biases of `op`, whose kernel reads them one after the other in memory.
///
/// The kernels of convolutions of `burn-cubecl` 0.22.1 do so (`kernel/conv/direct.rs`), whatever the strides: of a bias
/// that was expanded from one element, they read what comes after that.
pub(super) fn biases(op: &mut OperationIr) -> Vec<&mut TensorIr> {
    use ModuleOperationIr as Op;
    let OperationIr::Module(op) = op else {
        return Vec::new();
    };
    let bias = match op {
        Op::Conv1d(op) => &mut op.bias,
        Op::Conv2d(op) => &mut op.bias,
        Op::Conv3d(op) => &mut op.bias,
        Op::ConvTranspose1d(op) => &mut op.bias,
        Op::ConvTranspose2d(op) => &mut op.bias,
        Op::ConvTranspose3d(op) => &mut op.bias,
        _ => return Vec::new(),
    };
    bias.iter_mut().collect()
}

/// Returns whether elements of an output of `op` may share memory with each other, although those of its inputs do not.
pub(super) fn is_expansion(op: &OperationIr) -> bool {
    let (OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op)) = op
    else {
        return false;
    };
    matches!(
        op,
        BaseOperationIr::Expand(_) | BaseOperationIr::RepeatDim(_)
    )
}

/// Replaces each range of slices in `op` by one that selects the same elements, and starts and ends within its
/// dim; and the step of windows that is longer than their dim, which would be the stride of the view. The declarations of
/// `op` were checked before.
pub(super) fn resolve_ranges(op: &mut OperationIr) {
    use BaseOperationIr as Op;
    let (OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op)) = op
    else {
        return;
    };
    let (tensor, ranges) = match op {
        Op::Slice(op) => (&op.tensor, &mut op.ranges),
        Op::SliceAssign(op) => (&op.tensor, &mut op.ranges),
        Op::Unfold(op) => {
            // There is one window at most.
            op.step = op.step.min(dim(&op.input, op.dim).max(1));
            return;
        }
        _ => return,
    };
    for (range, &dim) in ranges.iter_mut().zip(tensor.shape.as_slice()) {
        *range = resolved(range, dim);
    }
}

/// See [`resolve_ranges`].
fn resolved(slice: &Slice, dim: usize) -> Slice {
    let range = slice.to_range(dim);
    let end = range.end.max(range.start);
    // A longer step selects one element, too.
    let longest = (end - range.start).max(1);
    let step = slice.step.unsigned_abs().min(longest) as isize;
    Slice {
        start: range.start as isize,
        end: Some(end as isize),
        step: step * slice.step.signum(),
    }
}

/// The values that a tensor of indices may have.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum IndexRange {
    /// From 0 up to and including this value.
    UpTo(usize),
    /// The last axis has tuples. Their n-th component is from 0 up to and including the n-th
    /// value here.
    Tuples(Vec<usize>),
}

/// Returns the tensors by whose values the kernel of `op` addresses memory, with the valid
/// range of values. The declarations of `op` were checked before.
pub(super) fn indices(op: &mut OperationIr) -> Vec<(&mut TensorIr, IndexRange)> {
    match op {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            base_op_indices(op)
        }
        OperationIr::Module(op) => module_op_indices(op),
        OperationIr::NumericFloat(..)
        | OperationIr::NumericInt(..)
        | OperationIr::Bool(_)
        | OperationIr::Int(_)
        | OperationIr::Float(..)
        | OperationIr::Activation(_)
        | OperationIr::Init(_)
        | OperationIr::Custom(_)
        | OperationIr::Drop(_)
        | OperationIr::Distributed(_) => Vec::new(),
    }
}

fn base_op_indices(op: &mut BaseOperationIr) -> Vec<(&mut TensorIr, IndexRange)> {
    use BaseOperationIr as Op;
    match op {
        Op::Gather(op) => vec![(&mut op.indices, axis_range(&op.tensor, op.dim))],
        Op::Scatter(op) => vec![(&mut op.indices, axis_range(&op.tensor, op.dim))],
        Op::Select(op) => vec![(&mut op.indices, axis_range(&op.tensor, op.dim))],
        Op::SelectAssign(op) => vec![(&mut op.indices, axis_range(&op.tensor, op.dim))],
        Op::GatherNd(op) => {
            let range = tuple_range(&op.data, &op.indices);
            vec![(&mut op.indices, range)]
        }
        Op::ScatterNd(op) => {
            let range = tuple_range(&op.data, &op.indices);
            vec![(&mut op.indices, range)]
        }
        Op::Reshape(_)
        | Op::SwapDims(_)
        | Op::Permute(_)
        | Op::Flip(_)
        | Op::Expand(_)
        | Op::Unfold(_)
        | Op::Slice(_)
        | Op::SliceAssign(_)
        | Op::MaskWhere(_)
        | Op::MaskFill(_)
        | Op::Equal(_)
        | Op::EqualElem(_)
        | Op::NotEqual(_)
        | Op::NotEqualElem(_)
        | Op::RepeatDim(_)
        | Op::Cat(_)
        | Op::Cast(_)
        | Op::Empty(_)
        | Op::Ones(_)
        | Op::Zeros(_)
        | Op::All(_)
        | Op::Any(_)
        | Op::AllDim(_)
        | Op::AnyDim(_) => Vec::new(),
    }
}

fn module_op_indices(op: &mut ModuleOperationIr) -> Vec<(&mut TensorIr, IndexRange)> {
    use ModuleOperationIr as Op;
    // A CTC loss uses its targets as indices of classes, and reads up to the given lengths.
    macro_rules! ctc {
        ($op:expr) => {{
            let steps = IndexRange::UpTo(dim(&$op.log_probs, 0));
            let labels = IndexRange::UpTo(dim(&$op.targets, 1));
            vec![
                (&mut $op.targets, axis_range(&$op.log_probs, 2)),
                (&mut $op.input_lengths, steps),
                (&mut $op.target_lengths, labels),
            ]
        }};
    }
    match op {
        Op::Embedding(op) => vec![(&mut op.indices, axis_range(&op.weights, 0))],
        Op::EmbeddingBackward(op) => vec![(&mut op.indices, axis_range(&op.weights, 0))],
        Op::CtcLoss(op) => ctc!(op),
        Op::CtcLossBackward(op) => ctc!(op),
        // The pools' backward passes only compare their indices.
        Op::MaxPool1dWithIndicesBackward(_) | Op::MaxPool2dWithIndicesBackward(_) => Vec::new(),
        Op::BatchNorm(_)
        | Op::LayerNorm(_)
        | Op::Linear(_)
        | Op::LinearXBackward(_)
        | Op::LinearWeightBackward(_)
        | Op::LinearBiasBackward(_)
        | Op::Conv1d(_)
        | Op::Conv1dXBackward(_)
        | Op::Conv1dWeightBackward(_)
        | Op::Conv1dBiasBackward(_)
        | Op::Conv2d(_)
        | Op::Conv2dXBackward(_)
        | Op::Conv2dWeightBackward(_)
        | Op::Conv2dBiasBackward(_)
        | Op::Conv3d(_)
        | Op::Conv3dXBackward(_)
        | Op::Conv3dWeightBackward(_)
        | Op::Conv3dBiasBackward(_)
        | Op::ConvTranspose1d(_)
        | Op::ConvTranspose2d(_)
        | Op::ConvTranspose3d(_)
        | Op::ConvTranspose1dWeightBackward(_)
        | Op::ConvTranspose1dBiasBackward(_)
        | Op::ConvTranspose2dWeightBackward(_)
        | Op::ConvTranspose2dBiasBackward(_)
        | Op::ConvTranspose3dWeightBackward(_)
        | Op::ConvTranspose3dBiasBackward(_)
        | Op::DeformableConv2d(_)
        | Op::DeformableConv2dBackward(_)
        | Op::AvgPool1d(_)
        | Op::AvgPool2d(_)
        | Op::AvgPool1dBackward(_)
        | Op::AvgPool2dBackward(_)
        | Op::AdaptiveAvgPool1d(_)
        | Op::AdaptiveAvgPool2d(_)
        | Op::AdaptiveAvgPool3d(_)
        | Op::AdaptiveAvgPool1dBackward(_)
        | Op::AdaptiveAvgPool2dBackward(_)
        | Op::AdaptiveAvgPool3dBackward(_)
        | Op::MaxPool1d(_)
        | Op::MaxPool2d(_)
        | Op::MaxPool1dWithIndices(_)
        | Op::MaxPool2dWithIndices(_)
        | Op::Interpolate(_)
        | Op::InterpolateBackward(_)
        | Op::Attention(_)
        | Op::Unfold4d(_) => Vec::new(),
    }
}

fn dim(tensor: &TensorIr, axis: usize) -> usize {
    tensor.shape.as_slice().get(axis).copied().unwrap_or(0)
}

/// Returns the positions along an axis, for an axis of at least one element: an op that
/// takes elements of an empty axis is refused before its indices are checked.
fn axis_range(tensor: &TensorIr, axis: usize) -> IndexRange {
    IndexRange::UpTo(dim(tensor, axis).saturating_sub(1))
}

fn tuple_range(data: &TensorIr, indices: &TensorIr) -> IndexRange {
    let length = indices.shape.as_slice().last().copied().unwrap_or(0);
    let most: Vec<_> = (0..length)
        .map(|axis| dim(data, axis).saturating_sub(1))
        .collect();
    match most.first() {
        Some(first) if most.iter().all(|each| each == first) => IndexRange::UpTo(*first),
        _ => IndexRange::Tuples(most),
    }
}

/// Returns `indices` with each value clamped to `range`.
pub(super) fn clamp_to_range<B: Backend>(
    indices: IntTensor<B>,
    declared: &TensorIr,
    range: &IndexRange,
) -> IntTensor<B> {
    let clamp =
        |values, most| B::int_clamp(values, Scalar::Int(0), upper_bound(declared.dtype, most));
    let most = match range {
        IndexRange::UpTo(most) => return clamp(indices, *most),
        IndexRange::Tuples(most) => most,
    };
    let dims = declared.shape.as_slice();
    let Some(last) = dims.len().checked_sub(1).filter(|_| !most.is_empty()) else {
        return indices; // Tuples without components.
    };
    let component = |(component, most): (usize, &usize)| {
        let mut part: Vec<Slice> = dims.iter().map(|&dim| Slice::from(0..dim)).collect();
        part[last] = Slice::from(component..component + 1);
        clamp(B::int_slice(indices.clone(), &part), *most)
    };
    B::int_cat(most.iter().enumerate().map(component).collect(), last)
}

/// Returns `most`, or the greatest value of `dtype` if that is less.
fn upper_bound(dtype: DType, most: usize) -> Scalar {
    let of_dtype = match dtype {
        DType::I8 => i64::from(i8::MAX),
        DType::U8 => i64::from(u8::MAX),
        DType::I16 => i64::from(i16::MAX),
        DType::U16 => i64::from(u16::MAX),
        DType::I32 => i64::from(i32::MAX),
        DType::U32 => i64::from(u32::MAX),
        _ => i64::MAX,
    };
    Scalar::Int(i64::try_from(most).map_or(of_dtype, |most| most.min(of_dtype)))
}

#[cfg(test)]
mod tests;
