//! Ops that give the same bits each time, for builds without the feature `tuning`.
//!
//! Such a build chooses each kernel by the device, the shapes and the layouts, and executes the queue of ops to be fused
//! after each op, so that what is fused does not depend on what ran before. The threads of some kernels add up with
//! atomics, in any order: those of sums of all elements, and of scatter-add on floats. These ops are put together here
//! from other kernels. An op for which that is not possible is refused.

use burn_backend::tensor::{FloatTensor, IndexingUpdateOp, IntTensor};
use burn_backend::{Backend, DType, FloatDType, Scalar, Shape, Slice, TensorMetadata};
use burn_cubecl::Cube;
use burn_ir::{
    BaseOperationIr, HandleKind, ModuleOperationIr, NumericOperationIr, OperationIr, ScatterOpIr,
    TensorIr,
};
use burn_router::TensorInterpreter;

use super::execute_queue;

/// Number of elements that one row of a sum has. Each row is added up by one thread.
const ROW_ELEMENTS: usize = 256;

/// Largest number of values of a scatter-add along its dimension. Each takes some kernels over the whole output.
const MAX_SCATTERED: usize = 1024;

/// Returns the error message if `op` cannot give the same bits each time.
pub(super) fn unsupported(op: &OperationIr) -> Option<String> {
    let what = match op {
        OperationIr::BaseFloat(BaseOperationIr::ScatterNd(_))
        | OperationIr::BaseInt(BaseOperationIr::ScatterNd(_)) => {
            "scatter_nd, several values of which may be for one element"
        }
        OperationIr::BaseFloat(BaseOperationIr::Scatter(scatter)) if adds(scatter) => {
            // The op has not been checked yet, so it may name a dimension that does not exist.
            let count = scatter.value.shape.get(scatter.dim).copied();
            let count = count.unwrap_or_default();
            let text = format!(
                "scatter-add of {count} values along a dimension (it has up to {MAX_SCATTERED})"
            );
            return (count > MAX_SCATTERED).then(|| message(&text));
        }
        OperationIr::Module(ModuleOperationIr::DeformableConv2dBackward(_)) => {
            "the gradients of deform_conv2d, whose kernels add up in any order"
        }
        OperationIr::Module(ModuleOperationIr::CtcLossBackward(_)) => {
            "the gradients of a CTC loss, whose kernels add up in any order"
        }
        _ => return None,
    };
    Some(message(what))
}

fn message(what: &str) -> String {
    format!("this worker's build gives the same bits each time, so it does not have {what}")
}

fn adds(scatter: &ScatterOpIr) -> bool {
    scatter.update == IndexingUpdateOp::Add
}

/// Executes `op` if Burn's own kernel would add up in any order. Returns `false` if the op must still be executed.
pub(super) fn execute(interpreter: &mut TensorInterpreter<Cube>, op: &OperationIr) -> bool {
    match op {
        OperationIr::NumericFloat(_, NumericOperationIr::Sum(reduce)) => {
            let input = float(interpreter, &reduce.input);
            register(interpreter, &reduce.out, sum::<Cube>(input, &execute_queue));
        }
        OperationIr::NumericFloat(_, NumericOperationIr::Mean(reduce)) => {
            let input = float(interpreter, &reduce.input);
            register(
                interpreter,
                &reduce.out,
                mean::<Cube>(input, &execute_queue),
            );
        }
        OperationIr::BaseFloat(BaseOperationIr::Scatter(scatter)) if adds(scatter) => {
            let out = scatter_float(interpreter, scatter);
            register(interpreter, &scatter.out, out);
        }
        _ => return false,
    }
    true
}

fn float(interpreter: &mut TensorInterpreter<Cube>, tensor: &TensorIr) -> FloatTensor<Cube> {
    match interpreter.get_tensor(tensor) {
        HandleKind::Float(tensor) => tensor,
        _ => unreachable!("an op on floats has a float tensor"),
    }
}

fn register(interpreter: &mut TensorInterpreter<Cube>, out: &TensorIr, tensor: FloatTensor<Cube>) {
    interpreter.register_tensor_to_device(out.id, HandleKind::Float(tensor));
}

fn scatter_float(
    interpreter: &mut TensorInterpreter<Cube>,
    scatter: &ScatterOpIr,
) -> FloatTensor<Cube> {
    let tensor = float(interpreter, &scatter.tensor);
    let HandleKind::Int(indices) = interpreter.get_tensor(&scatter.indices) else {
        unreachable!("indices that are not integers are refused");
    };
    let value = float(interpreter, &scatter.value);
    scatter_add::<Cube>(scatter.dim, tensor, indices, value, &execute_queue)
}

/// Returns the sum of all elements, of shape `[1]`: rows are added up, and then their sums. Calls `finish` after each
/// kernel, so that none is fused with another.
fn sum<B: Backend>(tensor: FloatTensor<B>, finish: &dyn Fn(&B::Device)) -> FloatTensor<B> {
    let dtype = tensor.dtype();
    cast::<B>(sum_rows::<B>(as_f32::<B>(tensor), finish), dtype)
}

/// Returns the mean of all elements, of shape `[1]`, as [`sum`] does.
fn mean<B: Backend>(tensor: FloatTensor<B>, finish: &dyn Fn(&B::Device)) -> FloatTensor<B> {
    let (dtype, count) = (tensor.dtype(), tensor.shape().num_elements());
    let sum = sum_rows::<B>(as_f32::<B>(tensor), finish);
    cast::<B>(B::float_div_scalar(sum, Scalar::from(count as f64)), dtype)
}

/// Sums of half types are sums of `f32`, as partial ones would lose bits.
fn as_f32<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => B::float_cast(tensor, FloatDType::F32),
        _ => tensor,
    }
}

fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    match tensor.dtype() == dtype {
        true => tensor,
        false => B::float_cast(tensor, FloatDType::from(dtype)),
    }
}

fn sum_rows<B: Backend>(tensor: FloatTensor<B>, finish: &dyn Fn(&B::Device)) -> FloatTensor<B> {
    let (device, count) = (tensor.device(), tensor.shape().num_elements());
    let finished = |tensor: FloatTensor<B>| {
        finish(&device);
        tensor
    };
    let flat = finished(B::float_reshape(tensor, Shape::new([count])));
    if count <= ROW_ELEMENTS {
        return finished(B::float_sum_dim(flat, 0));
    }
    let rows = count / ROW_ELEMENTS;
    let whole = B::float_slice(flat.clone(), &[Slice::from(0..rows * ROW_ELEMENTS)]);
    let whole = finished(B::float_reshape(whole, Shape::new([rows, ROW_ELEMENTS])));
    let sums = finished(B::float_sum_dim(whole, 1));
    let sums = B::float_reshape(sums, Shape::new([rows]));
    if rows * ROW_ELEMENTS == count {
        return sum_rows::<B>(sums, finish);
    }
    let rest = finished(B::float_slice(
        flat,
        &[Slice::from(rows * ROW_ELEMENTS..count)],
    ));
    let rest = finished(B::float_sum_dim(rest, 0));
    sum_rows::<B>(finished(B::float_cat(vec![sums, rest], 0)), finish)
}

/// Adds values to the elements of `tensor` at these indices along a dimension. The values at one position of the
/// dimension are added at a time, as no two of these are for the same element. Calls `finish` after each position, so
/// that the copies for no more than one are in memory.
fn scatter_add<B: Backend>(
    dim: usize,
    tensor: FloatTensor<B>,
    indices: IntTensor<B>,
    value: FloatTensor<B>,
    finish: &dyn Fn(&B::Device),
) -> FloatTensor<B> {
    let (shape, dtype, device) = (tensor.shape(), tensor.dtype(), tensor.device());
    let sizes = value.shape();
    (0..sizes[dim]).fold(tensor, |sum, at| {
        let slices: Vec<_> = (0..sizes.num_dims())
            .map(|axis| match axis == dim {
                true => Slice::from(at..at + 1),
                false => Slice::from(0..sizes[axis]),
            })
            .collect();
        let zeros = B::float_zeros(shape.clone(), &device, FloatDType::from(dtype));
        let indices = B::int_slice(indices.clone(), &slices);
        let value = B::float_slice(value.clone(), &slices);
        let added = B::float_scatter(dim, zeros, indices, value, IndexingUpdateOp::Assign);
        let sum = B::float_add(sum, added);
        finish(&device);
        sum
    })
}

#[cfg(test)]
mod tests {
    use burn_backend::TensorData;
    use burn_backend::ops::FloatTensorOps;
    use burn_flex::{Flex, FlexDevice, FlexTensor};
    use burn_ir::{TensorId, TensorStatus};

    use super::*;

    fn values(shape: &[usize]) -> FlexTensor {
        let count: usize = shape.iter().product();
        let values: Vec<_> = (0..count).map(|at| (at % 7) as f32 - 3.0).collect();
        FlexTensor::from_data(TensorData::new(values, shape.to_vec()))
    }

    fn floats(tensor: FlexTensor) -> Vec<f32> {
        let tensor = Flex::float_cast(tensor, FloatDType::F32);
        burn_std::future::block_on(Flex::float_into_data(tensor))
            .unwrap()
            .try_into_vec()
            .unwrap()
    }

    /// The values are small integers, so that every order gives the same sum.
    #[test]
    fn sums_are_those_of_the_backend() {
        let sizes: [&[usize]; 6] = [
            &[ROW_ELEMENTS * ROW_ELEMENTS + 1],
            &[1],
            &[3, 5],
            &[ROW_ELEMENTS],
            &[2, ROW_ELEMENTS],
            &[3, ROW_ELEMENTS - 1, 2],
        ];
        for shape in sizes {
            let expected = floats(Flex::float_sum(values(shape)));
            assert_eq!(
                floats(sum::<Flex>(values(shape), &|_| ())),
                expected,
                "{shape:?}"
            );
            let expected = floats(Flex::float_mean(values(shape)));
            assert_eq!(
                floats(mean::<Flex>(values(shape), &|_| ())),
                expected,
                "{shape:?}"
            );
        }
    }

    /// The sum of 70,000 ones is beyond the range of `f16`, their mean is not.
    #[test]
    fn sums_of_half_types_are_sums_of_f32() {
        let ones = || Flex::float_ones(Shape::new([70_000]), &FlexDevice, FloatDType::F16);
        assert_eq!(floats(mean::<Flex>(ones(), &|_| ())), [1.0]);
        assert_eq!(floats(sum::<Flex>(ones(), &|_| ())), [f32::INFINITY]);
        assert_eq!(mean::<Flex>(ones(), &|_| ()).dtype(), DType::F16);
    }

    #[test]
    fn values_for_one_element_are_all_added() {
        for (dim, shape) in [(0, [3, 3]), (1, [2, 3])] {
            let indices = [0_i64, 2, 2, 1, 0, 0];
            let indices = || FlexTensor::from_data(TensorData::new(indices.to_vec(), [2, 3]));
            let (tensor, value) = (|| values(&shape), || values(&[2, 3]));
            let expected =
                Flex::float_scatter(dim, tensor(), indices(), value(), IndexingUpdateOp::Add);
            let found = scatter_add::<Flex>(dim, tensor(), indices(), value(), &|_| ());
            assert_eq!(floats(found), floats(expected), "dimension {dim}");
        }
    }

    /// The worker calls [`unsupported`] before it checks an op, so the dimension may not exist.
    #[test]
    fn a_scatter_along_no_dimension_is_left_to_the_check() {
        let tensor = |id| TensorIr {
            id: TensorId::new(id),
            shape: Shape::new([2]),
            status: TensorStatus::ReadOnly,
            dtype: DType::F32,
        };
        let scatter = |dim, update| {
            let op = BaseOperationIr::Scatter(ScatterOpIr {
                tensor: tensor(1),
                dim,
                indices: tensor(2),
                value: TensorIr {
                    shape: Shape::new([MAX_SCATTERED + 1]),
                    ..tensor(3)
                },
                update,
                out: tensor(4),
            });
            unsupported(&OperationIr::BaseFloat(op))
        };
        assert_eq!(scatter(9, IndexingUpdateOp::Add), None);
        assert_eq!(scatter(0, IndexingUpdateOp::Assign), None);
        let refused = scatter(0, IndexingUpdateOp::Add).unwrap();
        assert!(refused.contains("1025 values"), "{refused}");
    }
}
