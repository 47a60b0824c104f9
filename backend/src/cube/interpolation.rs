//! Gradients of interpolations, whose kernel computes rows and columns in the type of the tensor.
//!
//! The kernel of `burn-cubecl` 0.22.1 finds the rows of the gradient that belong to a row of the input by a product of
//! a position and a size, and does not check them. If that product is rounded, it may read a row beyond the last one. So
//! half types are computed as `f32`, and sizes whose products `f32` cannot hold exactly are refused.

use burn_backend::{
    DType, FloatDType,
    ops::{FloatTensorOps, ModuleOps},
};
use burn_cubecl::Cube;
use burn_ir::{HandleKind, InterpolateBackwardOpIr, ModuleOperationIr, OperationIr};
use burn_router::TensorInterpreter;

/// Integers up to this one are exact in `f32`.
const MAX_EXACT: usize = 1 << 24;

/// Returns the error message if `op` is a gradient whose kernel could round.
pub(super) fn unsupported(op: &OperationIr) -> Option<String> {
    let op = gradient(op)?;
    if op.x.dtype == DType::F64 {
        return None;
    }
    // The op has not been checked yet, so it may have any dims.
    let sizes = op.x.shape.iter().skip(2).zip(op.output_size);
    let mut sizes = sizes.map(|(from, to)| (*from, to));
    let (from, to) = sizes.find(|(from, to)| {
        let product = from.checked_mul(*to);
        product.is_none_or(|product| product > MAX_EXACT)
    })?;
    Some(format!(
        "this device has no gradient of an interpolation from {from} to {to}: the product of both is more than {MAX_EXACT}"
    ))
}

/// Executes `op` if it is a gradient in a half type. Returns `false` if the op must still be executed.
pub(super) fn execute(interpreter: &mut TensorInterpreter<Cube>, op: &OperationIr) -> bool {
    let half = gradient(op).filter(|op| matches!(op.x.dtype, DType::F16 | DType::BF16));
    let Some(op) = half else {
        return false;
    };
    let [x, grad] = [&op.x, &op.grad].map(|tensor| match interpreter.get_tensor(tensor) {
        HandleKind::Float(tensor) => Cube::float_cast(tensor, FloatDType::F32),
        _ => unreachable!("an interpolation that is not of floats is refused"),
    });
    let options = op.options.clone().into();
    let out = Cube::interpolate_backward(x, grad, op.output_size, options);
    let out = Cube::float_cast(out, FloatDType::from(op.out.dtype));
    interpreter.register_tensor_to_device(op.out.id, HandleKind::Float(out));
    true
}

fn gradient(op: &OperationIr) -> Option<&InterpolateBackwardOpIr> {
    match op {
        OperationIr::Module(ModuleOperationIr::InterpolateBackward(op)) => Some(op),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use burn_ir::{InterpolateModeIr, InterpolateOptionsIr, TensorId, TensorIr};

    use super::*;

    #[test]
    fn sizes_whose_product_is_rounded_are_refused() {
        let refused = |dtype, from: usize, to: usize| {
            let tensor =
                |id, dims: [usize; 4]| TensorIr::uninit(TensorId::new(id), dims.into(), dtype);
            let op = InterpolateBackwardOpIr {
                x: tensor(1, [1, 1, 2, from]),
                grad: tensor(2, [1, 1, 3, to]),
                output_size: [3, to],
                options: InterpolateOptionsIr {
                    mode: InterpolateModeIr::Nearest,
                    align_corners: false,
                },
                out: tensor(3, [1, 1, 2, from]),
            };
            let op = OperationIr::Module(ModuleOperationIr::InterpolateBackward(op));
            unsupported(&op).is_some()
        };
        for dtype in [DType::F32, DType::BF16] {
            assert!(!refused(dtype, 4096, 4096) && refused(dtype, 4096, 4097));
            assert!(refused(dtype, usize::MAX, 2));
        }
        assert!(!refused(DType::F64, 4001, 4195));
    }
}
