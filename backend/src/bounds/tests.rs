//! Tests of the ranges of indices, and of clamping.

use burn_backend::{TensorData, ops::IntTensorOps, tensor::IndexingUpdateOp};
use burn_flex::{Flex, FlexDevice};
use burn_ir::{GatherNdOpIr, ScatterOpIr, TensorId, TensorStatus, UnfoldOpIr};

use super::*;

fn tensor(id: u64, dims: &[usize], dtype: DType) -> TensorIr {
    TensorIr {
        id: TensorId::new(id),
        shape: dims.to_vec().into(),
        status: TensorStatus::ReadOnly,
        dtype,
    }
}

fn float(id: u64, dims: &[usize]) -> TensorIr {
    tensor(id, dims, DType::F32)
}

fn int(id: u64, dims: &[usize]) -> TensorIr {
    tensor(id, dims, DType::I64)
}

#[track_caller]
fn check(mut op: OperationIr, expected: &[(u64, IndexRange)]) {
    let found = indices(&mut op).into_iter();
    let found: Vec<_> = found.map(|(at, range)| (at.id.value(), range)).collect();
    assert_eq!(found, expected);
}

#[test]
fn indices_are_below_the_dim_they_point_into() {
    let scatter = ScatterOpIr {
        tensor: float(1, &[4, 6]),
        dim: 1,
        indices: int(2, &[4, 9]),
        value: float(3, &[4, 9]),
        update: IndexingUpdateOp::Add,
        out: float(4, &[4, 6]),
    };
    let op = OperationIr::BaseFloat(BaseOperationIr::Scatter(scatter));
    check(op, &[(2, IndexRange::UpTo(5))]);
}

#[test]
fn each_tuple_component_has_its_own_dim() {
    let gather = |dims: &[usize], at: &[usize]| {
        OperationIr::BaseInt(BaseOperationIr::GatherNd(GatherNdOpIr {
            data: int(1, dims),
            indices: int(2, at),
            out: int(3, &[]),
        }))
    };
    let tuples = IndexRange::Tuples(vec![3, 5]);
    check(gather(&[4, 6, 7], &[9, 2]), &[(2, tuples)]);
    check(gather(&[4, 4, 7], &[9, 2]), &[(2, IndexRange::UpTo(3))]);
    check(gather(&[4, 4], &[9, 0]), &[(2, IndexRange::Tuples(vec![]))]);
}

#[test]
fn ctc_loss_bounds_classes_and_lengths() {
    let loss = burn_ir::CtcLossOpIr {
        log_probs: float(1, &[10, 2, 5]),
        targets: int(2, &[2, 3]),
        input_lengths: int(3, &[2]),
        target_lengths: int(4, &[2]),
        blank: 0,
        out: float(5, &[2]),
    };
    let ranges = [(2, 4), (3, 10), (4, 3)].map(|(id, most)| (id, IndexRange::UpTo(most)));
    check(
        OperationIr::Module(ModuleOperationIr::CtcLoss(loss)),
        &ranges,
    );
}

fn clamp(data: TensorData, range: &IndexRange) -> TensorData {
    let declared = tensor(1, data.shape().as_slice(), data.dtype());
    let at = Flex::int_from_data(data, &FlexDevice);
    let clamped = clamp_to_range::<Flex>(at, &declared, range);
    let read = Flex::int_into_data(clamped);
    ready_value(read)
}

/// Returns the result of a read, which is ready at once on Flex.
fn ready_value<T, E: std::fmt::Debug>(read: impl Future<Output = Result<T, E>>) -> T {
    let mut read = std::pin::pin!(read);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match read.as_mut().poll(&mut context) {
        std::task::Poll::Ready(read) => read.unwrap(),
        std::task::Poll::Pending => panic!("Flex waits for nothing"),
    }
}

#[test]
fn values_outside_a_range_are_clamped_to_its_ends() {
    let far = TensorData::from([i64::MIN, -1, 0, 3, 4, i64::MAX]);
    let near = TensorData::from([0i64, 0, 0, 3, 3, 3]);
    assert_eq!(clamp(far, &IndexRange::UpTo(3)), near);
    // The limit exceeds the dtype, so no value of the dtype is too large.
    let small = TensorData::from([-128i8, 100, 127]);
    let near = TensorData::from([0i8, 100, 127]);
    assert_eq!(clamp(small, &IndexRange::UpTo(299)), near);
}

#[test]
fn tuple_components_are_clamped_to_their_ranges() {
    let far = TensorData::from([[-7i64, 9], [1, 1], [9, -7]]);
    let near = TensorData::from([[0i64, 5], [1, 1], [3, 0]]);
    assert_eq!(clamp(far, &IndexRange::Tuples(vec![3, 5])), near);
}

/// Returns the positions that a slice selects of an axis of `dim` elements, in order.
fn selected(slice: &Slice, dim: usize) -> Vec<usize> {
    let (range, step) = (slice.to_range(dim), slice.step.unsigned_abs());
    let count = range.end.saturating_sub(range.start).div_ceil(step);
    let position = |at: usize| match slice.step > 0 {
        true => range.start + at * step,
        false => range.end - 1 - at * step,
    };
    (0..count).map(position).collect()
}

#[test]
fn resolved_slices_select_the_same_elements() {
    let bounds = || (-7..=7).chain([isize::MIN, isize::MAX]);
    let ends = || bounds().map(Some).chain([None]);
    let steps = || bounds().filter(|step| *step != 0);
    for dim in 0..6 {
        for (start, end) in bounds().flat_map(|start| ends().map(move |end| (start, end))) {
            for step in steps() {
                let slice = Slice { start, end, step };
                let resolved = resolved(&slice, dim);
                assert_eq!(selected(&resolved, dim), selected(&slice, dim), "{slice:?}");
                let (start, end) = (resolved.start, resolved.end.unwrap());
                assert!(
                    0 <= start && start <= end && end <= dim as isize,
                    "{resolved:?}"
                );
                assert!(resolved.step.unsigned_abs() <= dim.max(1), "{resolved:?}");
            }
        }
    }
}

#[test]
fn step_of_windows_is_at_most_their_dim() {
    let resolved = |dim: usize, step| {
        let mut op = OperationIr::BaseFloat(BaseOperationIr::Unfold(UnfoldOpIr {
            input: float(1, &[3, dim]),
            out: float(2, &[3, 1, dim]),
            dim: 1,
            size: dim,
            step,
        }));
        resolve_ranges(&mut op);
        match op {
            OperationIr::BaseFloat(BaseOperationIr::Unfold(op)) => op.step,
            _ => unreachable!("it is the same op"),
        }
    };
    assert_eq!((resolved(5, 2), resolved(5, 1 << 40)), (2, 5));
    assert_eq!(resolved(0, 7), 1);
}
