//! The declared outputs of an op must match the derived ones.

use burn_backend::DType;
use burn_ir::{IrVisitorMut, OperationIr, TensorIr, TensorStatus};

use super::{super::samples, assert_accepted, assert_refused};

/// Changes one of an op's outputs.
struct OutputChange<F> {
    /// Number of outputs to skip.
    skip: usize,
    change: F,
}

impl<F: Fn(&mut TensorIr)> IrVisitorMut for OutputChange<F> {
    fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
        if tensor.status != TensorStatus::NotInit {
            return;
        }
        if self.skip == 0 {
            (self.change)(tensor);
        }
        self.skip = self.skip.wrapping_sub(1);
    }
}

fn with_output_changed(
    op: &OperationIr,
    skip: usize,
    change: impl Fn(&mut TensorIr),
) -> OperationIr {
    let mut op = op.clone();
    op.visit_mut(&mut OutputChange { skip, change });
    op
}

/// Returns whether the shape of the output is an argument of the op; `arguments` tests
/// invalid ones.
fn shape_is_argument(op: &OperationIr) -> bool {
    use burn_ir::BaseOperationIr as Base;
    match op {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            matches!(op, Base::Reshape(_) | Base::Expand(_))
        }
        _ => false,
    }
}

/// Returns whether the op's output may have any shape or dtype, so that there is no rule to
/// break.
fn output_is_unconstrained(op: &OperationIr) -> bool {
    use burn_ir::{BaseOperationIr as Base, FloatOperationIr as Float, NumericOperationIr as Num};
    match op {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            matches!(op, Base::Empty(_) | Base::Ones(_) | Base::Zeros(_))
        }
        OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => {
            matches!(op, Num::Full(_) | Num::IntRandom(_))
        }
        OperationIr::Float(_, op) => matches!(op, Float::Random(_)),
        OperationIr::Custom(_) => true,
        _ => false,
    }
}

#[test]
fn an_output_of_another_shape_is_refused() {
    let of_one_shape = |op: &&OperationIr| !output_is_unconstrained(op) && !shape_is_argument(op);
    for op in samples::ops().iter().filter(of_one_shape) {
        for skip in 0..op.outputs().count() {
            let longer = with_output_changed(op, skip, |out| out.shape.push(1));
            let larger = with_output_changed(op, skip, |out| {
                let last = out.shape.rank() - 1;
                out.shape[last] += 1;
            });
            for bad in [longer, larger] {
                if bad != *op {
                    assert_refused(&bad);
                }
            }
        }
    }
}

#[test]
fn an_output_of_another_kind_is_refused() {
    for op in samples::ops()
        .iter()
        .filter(|op| !output_is_unconstrained(op))
    {
        for skip in 0..op.outputs().count() {
            let other = |dtype: DType| match dtype {
                dtype if dtype.is_float() => DType::I64,
                dtype if dtype.is_bool() => DType::F32,
                _ => super::BOOL,
            };
            let bad = with_output_changed(op, skip, |out| out.dtype = other(out.dtype));
            if bad != *op {
                assert_refused(&bad);
            }
        }
    }
}

#[test]
fn outputs_beyond_any_device_are_refused() {
    for op in samples::ops()
        .iter()
        .filter(|op| output_is_unconstrained(op))
    {
        assert_accepted(op);
        let huge = with_output_changed(op, 0, |out| out.shape = [usize::MAX, 2].into());
        let hollow = with_output_changed(op, 0, |out| out.shape = [1usize << 40, 0].into());
        for bad in [huge, hollow] {
            assert!(assert_refused(&bad).contains("too large for any device"));
        }
    }
}
