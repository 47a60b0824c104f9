//! Arrays of the crate `ndarray`, from and to leased devices.

use burn::{
    backend::ExecutionError,
    tensor::{DType, Element, Tensor, TensorCreationOptions, TensorData},
};
use ndarray::{Array, ArrayBase, Data, Dim, Dimension, Ix, OwnedRepr};

use super::{Kind, from_data, into_data};

/// Why a tensor could not be given as an array.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArrayError {
    /// The tensor could not be read.
    #[error(transparent)]
    Read(#[from] ExecutionError),
    /// The array's elements have another type than the tensor's.
    #[error(
        "a tensor of {} cannot be given as an array of {}: cast the tensor, or take an array of {}",
        .tensor.name(), .array.name(), .tensor.name()
    )]
    ElementType {
        /// The tensor's type.
        tensor: DType,
        /// The array's type.
        array: DType,
    },
    /// The values that were read are no elements of a tensor of this shape.
    #[error("the values of a tensor of {shape:?} cannot be given as an array: {reason}")]
    Values {
        /// The tensor's shape.
        shape: Vec<usize>,
        /// Why not.
        reason: String,
    },
}

/// Makes a tensor of an array on a device, as [`from_data`] does.
///
/// The tensor has the device's default element type unless the options name another one. The elements
/// of an array that has this type and owns them are not copied, if they are in the standard (row-major)
/// order without gaps. The elements of any other array are: of a view, as the upload goes on after
/// this call, of an array that is shared, and of one in another order, such as a transposed one.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use burn::tensor::Tensor;
/// use ndarray::{Array2, Axis};
/// use tensord_client::{LeaseRequest, Pool, data};
///
/// let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
/// let device = &lease.devices()[0];
/// let table = Array2::<f32>::zeros([64, 784]);
/// let rows: Tensor<2> = data::from_array(table.view(), device); // Copied.
/// let all: Tensor<2> = data::from_array(table, device); // Not copied.
/// let sums = data::into_array::<f32, 2, _>((rows + all).sum_dim(1))?;
/// println!("{}", sums.index_axis(Axis(1), 0));
/// # Ok(()) }
/// ```
///
/// # Panics
///
/// As [`from_data`]: when the array does not have `D` dimensions.
pub fn from_array<const D: usize, K: Kind>(
    array: ArrayBase<impl Data<Elem = impl Element>, impl Dimension>,
    options: impl Into<TensorCreationOptions>,
) -> Tensor<D, K> {
    let shape = array.shape().to_vec();
    // Moves the elements of an array that owns them.
    let values = elements(array.into_owned());
    from_data(TensorData::new(values, shape), options)
}

/// Reads a tensor as an array, as [`into_data`] does. The array's elements must have the tensor's
/// element type. They are copied once, from where they were received, unless they can be moved.
///
/// # Errors
///
/// As [`into_data`], and an error that names both types when they differ.
pub fn into_array<A: Element, const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
) -> Result<Array<A, Dim<[Ix; D]>>, ArrayError>
where
    Dim<[Ix; D]>: Dimension,
{
    check_type::<A>(tensor.dtype())?;
    array_of(into_data(tensor)?)
}

/// Booleans have a layout that depends on their device, and are converted.
fn check_type<A: Element>(tensor: DType) -> Result<(), ArrayError> {
    let array = A::dtype();
    let fits = tensor == array || (tensor.is_bool() && array.is_bool());
    match fits {
        true => Ok(()),
        false => Err(ArrayError::ElementType { tensor, array }),
    }
}

fn array_of<A: Element, const D: usize>(
    data: TensorData,
) -> Result<Array<A, Dim<[Ix; D]>>, ArrayError>
where
    Dim<[Ix; D]>: Dimension,
{
    let shape = data.shape().as_slice().to_vec();
    let unusable = |reason: String| ArrayError::Values {
        shape: shape.clone(),
        reason,
    };
    let dims: [Ix; D] = shape
        .as_slice()
        .try_into()
        .map_err(|_| unusable(format!("they do not have {D} dimensions")))?;
    let values = data.try_into_vec_as::<A>();
    let values = values.map_err(|e| unusable(e.to_string()))?;
    let mut array_dims = Dim::<[Ix; D]>::zeros(D);
    array_dims.slice_mut().copy_from_slice(&dims);
    Array::from_shape_vec(array_dims, values).map_err(|e| unusable(e.to_string()))
}

/// Returns the elements in row-major order.
fn elements<A: Element, Dims: Dimension>(array: ArrayBase<OwnedRepr<A>, Dims>) -> Vec<A> {
    let count = array.len();
    if !array.is_standard_layout() {
        return array.iter().copied().collect();
    }
    let (values, start) = array.into_raw_vec_and_offset();
    let start = start.unwrap_or(0);
    match (start, values.len()) {
        (0, len) if len == count => values,
        // The array was a part of another one.
        _ => values[start..start + count].to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::BoolStore;
    use ndarray::{Array1, Array2, Array3, Axis, s};
    use proptest::prelude::*;

    use super::*;

    fn counted(rows: usize, columns: usize) -> Array2<i32> {
        Array2::from_shape_fn([rows, columns], |(row, column)| {
            (row * columns + column) as i32
        })
    }

    #[test]
    fn owned_elements_in_order_are_moved() {
        let array = counted(3, 4);
        let start = array.as_ptr();
        let values = elements(array);
        assert_eq!(values.as_ptr(), start);
        assert_eq!(values, (0..12).collect::<Vec<_>>());
    }

    #[test]
    fn any_other_elements_are_put_in_order() {
        let rows = |array: Array2<i32>| elements(array);
        assert_eq!(rows(counted(2, 3).reversed_axes()), [0, 3, 1, 4, 2, 5]);
        let mut flipped = counted(2, 3);
        flipped.invert_axis(Axis(0));
        assert_eq!(rows(flipped), [3, 4, 5, 0, 1, 2]);
        assert_eq!(rows(counted(3, 2).slice_move(s![1.., ..])), [2, 3, 4, 5]);
        assert_eq!(rows(counted(3, 2).slice_move(s![..2, ..])), [0, 1, 2, 3]);
        assert_eq!(rows(counted(3, 2).slice_move(s![.., 1..])), [1, 3, 5]);
        assert!(rows(Array2::zeros([0, 3])).is_empty());
        let broadcast = Array1::from_vec(vec![7, 8]);
        let broadcast = broadcast.broadcast([2, 2]).unwrap().into_owned();
        assert_eq!(rows(broadcast), [7, 8, 7, 8]);
    }

    proptest! {
        #[test]
        fn parts_keep_their_order(
            shape in [1usize..5, 1..5, 1..5],
            steps in [1isize..3, -2..0, 1..3],
            axes in Just(vec![0usize, 1, 2]).prop_shuffle(),
        ) {
            let array = Array3::from_shape_fn(shape, |(i, j, k)| (100 * i + 10 * j + k) as i64);
            let part = array
                .slice_move(s![..;steps[0], ..;steps[1], ..;steps[2]])
                .permuted_axes([axes[0], axes[1], axes[2]]);
            let expected: Vec<_> = part.iter().copied().collect();
            let shape = part.shape().to_vec();
            let data = TensorData::new(elements(part.clone()), shape);
            prop_assert_eq!(data.as_slice::<i64>().unwrap(), expected);
            prop_assert_eq!(array_of::<i64, 3>(data).unwrap(), part);
        }
    }

    #[test]
    fn types_that_differ_are_named() {
        let error = check_type::<i64>(DType::F32).unwrap_err().to_string();
        assert!(
            error.starts_with("a tensor of f32 cannot be given as an array of i64"),
            "{error}"
        );
        for store in [BoolStore::Native, BoolStore::U8, BoolStore::U32] {
            check_type::<bool>(DType::Bool(store)).unwrap();
        }
        let error = array_of::<f32, 3>(TensorData::from([[1.0f32]])).unwrap_err();
        assert!(
            error.to_string().contains("do not have 3 dimensions"),
            "{error}"
        );
    }
}
