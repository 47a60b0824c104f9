//! Sums of many numbers whose bits do not depend on how threads share the work.
//!
//! Flex 0.22.1 sums 4 Mi numbers or more in chunks, and adds up the sums of the chunks in the order
//! in which rayon happens to have split them (`burn-flex`, `src/ops/reduce.rs`,
//! `sum_f32_parallel`). The same sum then has other last bits from run to run. Here, contiguous
//! tensors are cut into the same chunks and others along their largest axis, and the sums of the
//! chunks are added up in order.

use burn_backend::{DType, FloatDType, Shape, TensorData, ops::FloatTensorOps};
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

/// Number of elements from which on Flex splits a sum.
pub(super) const SPLIT_FROM_ELEMENTS: usize = 4 << 20;

/// Number of elements of a chunk of a contiguous tensor, as in Flex.
const CHUNK_ELEMENTS: usize = 64 << 10;

/// Returns the sum of all elements of a float tensor, of shape `[1]`.
pub(super) fn sum(tensor: FlexTensor) -> FlexTensor {
    match tensor.dtype() {
        DType::F32 => scalar(sum_f32(&tensor)),
        // Flex adds up elements of all other dtypes one after the other.
        _ => Flex::float_sum(tensor),
    }
}

/// Returns the mean of all elements of a float tensor, of shape `[1]`.
pub(super) fn mean(tensor: FlexTensor) -> FlexTensor {
    let count = tensor.layout().num_elements();
    let mean_f32 = |tensor: &FlexTensor| scalar(sum_f32(tensor) / count as f32);
    match tensor.dtype() {
        DType::F32 => mean_f32(&tensor),
        // As Flex does: the sum may exceed the range of the dtype.
        DType::F16 | DType::BF16 => {
            let dtype = FloatDType::from(tensor.dtype());
            let mean = mean_f32(&Flex::float_cast(tensor, FloatDType::F32));
            Flex::float_cast(mean, dtype)
        }
        _ => Flex::float_mean(tensor),
    }
}

fn scalar(value: f32) -> FlexTensor {
    FlexTensor::from_data(TensorData::from([value]))
}

fn sum_f32(tensor: &FlexTensor) -> f32 {
    let count = tensor.layout().num_elements();
    if count < SPLIT_FROM_ELEMENTS {
        return first(&Flex::float_sum(tensor.clone()));
    }
    let flat;
    let tensor = match tensor.is_contiguous() {
        true => {
            flat = tensor.reshape(Shape::new([count]));
            &flat
        }
        false => tensor,
    };
    // Chunks are views, so that nothing is copied.
    let shape = tensor.layout().shape();
    let sizes = (0..shape.num_dims()).map(|axis| shape[axis]);
    let (axis, size) = sizes
        .enumerate()
        .max_by_key(|(_, size)| *size)
        .unwrap_or_default();
    let rows = (CHUNK_ELEMENTS / (count / size)).max(1);
    let chunks = (0..size.div_ceil(rows)).into_par_iter();
    let sums: Vec<f32> = chunks
        .map(|chunk| {
            let start = chunk * rows;
            sum_f32(&tensor.narrow(axis, start, rows.min(size - start)))
        })
        .collect();
    let chunks = sums.len();
    sum_f32(&FlexTensor::from_data(TensorData::new(sums, [chunks])))
}

/// Returns the only element of a tensor.
fn first(tensor: &FlexTensor) -> f32 {
    tensor.storage()[tensor.layout().start_offset()]
}

#[cfg(test)]
mod tests {
    use burn_backend::Slice;
    use rayon::ThreadPoolBuilder;

    use super::*;

    /// A bit more than what Flex splits, in numbers of very different sizes.
    const SHAPE: [usize; 2] = [2053, 2069];

    fn numbers() -> FlexTensor {
        let mut state = 1u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 65_536.0 - 128.0
        };
        let values = (0..SHAPE[0] * SHAPE[1]).map(|_| next()).collect();
        FlexTensor::from_data(TensorData::new::<f32, _>(values, SHAPE))
    }

    /// Returns the bits of `run`'s result on pools of different sizes, several times each.
    fn bits(run: impl Fn() -> FlexTensor + Sync) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        for threads in [1, 2, 3, 7] {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build();
            let pool = pool.unwrap();
            all.extend((0..8).map(|_| pool.install(&run).bytes().to_vec()));
        }
        all
    }

    #[test]
    fn sums_have_the_same_bits_on_any_number_of_threads() {
        let whole = numbers();
        let views = [
            whole.clone(),
            whole.transpose(0, 1),
            whole.narrow(1, 1, SHAPE[1] - 1),
            Flex::float_flip(whole.clone(), &[0]),
            Flex::float_slice(whole.clone(), &[Slice::from(..), Slice::new(0, None, 1)]),
        ];
        for view in views {
            for run in [sum, mean] {
                let all = bits(|| run(view.clone()));
                assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{view:?}");
            }
        }
    }

    #[test]
    fn sums_are_those_of_the_numbers() {
        let whole = numbers();
        let exact: f64 = whole.storage::<f32>().iter().map(|&v| f64::from(v)).sum();
        for view in [whole.clone(), whole.transpose(0, 1)] {
            let made = first(&sum(view.clone()));
            let error = (f64::from(made) - exact).abs();
            assert!(error < 1.0 + exact.abs() * 1e-4, "{made} {exact}");
            let count = (SHAPE[0] * SHAPE[1]) as f32;
            assert_eq!(first(&mean(view)).to_bits(), (made / count).to_bits());
        }
    }

    #[test]
    fn small_sums_are_burns() {
        let small = numbers().narrow(0, 0, 100);
        let bits = |tensor: FlexTensor| first(&tensor).to_bits();
        assert_eq!(
            bits(sum(small.clone())),
            bits(Flex::float_sum(small.clone()))
        );
        assert_eq!(bits(mean(small.clone())), bits(Flex::float_mean(small)));
    }

    #[test]
    fn means_of_halves_do_not_overflow() {
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let ones = FlexTensor::from_data(TensorData::new(vec![1f32; 5 << 20], [5 << 20]));
            let made = mean(Flex::float_cast(ones, dtype));
            assert_eq!(FloatDType::from(made.dtype()), dtype);
            assert_eq!(first(&Flex::float_cast(made, FloatDType::F32)), 1.0);
        }
    }
}
