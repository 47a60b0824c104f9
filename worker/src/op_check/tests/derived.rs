//! The derived outputs are those that Burn derives, for all arguments that Burn accepts.

use burn_backend::{Shape, Slice};
use burn_ir::*;
use proptest::prelude::*;

use super::*;

fn dims(rank: std::ops::Range<usize>) -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(0usize..5, rank)
}

fn tensor(dims: &[usize]) -> TensorIr {
    TensorIr {
        shape: Shape::from(dims.to_vec()),
        ..float([])
    }
}

/// Checks that `op` is accepted with the output that Burn derives, and refused with
/// another.
fn check_derived_output(op: impl Fn(TensorIr) -> OperationIr, derived: &Shape, other: usize) {
    let out = as_output(tensor(derived.as_slice()));
    assert_accepted(&op(out.clone()));
    let mut shape = derived.clone();
    let Some(first) = shape.as_mut_slice().first_mut() else {
        return;
    };
    if *first != other {
        *first = other;
        assert_refused(&op(TensorIr { shape, ..out }));
    }
}

proptest! {
    #[test]
    fn broadcasts(
        pairs in proptest::collection::vec((0usize..4, 0usize..4), 1..5),
        other in 0usize..6,
    ) {
        let (lhs, rhs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let (lhs, rhs) = (tensor(&lhs), tensor(&rhs));
        let op = |out: TensorIr| {
            let (lhs, rhs) = (lhs.clone(), rhs.clone());
            numeric(NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out }))
        };
        match lhs.shape.broadcast(&rhs.shape) {
            Ok(derived) => check_derived_output(op, &derived, other),
            Err(_) => {
                assert_refused(&op(as_output(lhs.clone())));
            }
        }
    }

    #[test]
    fn slices(
        dim in 0usize..7,
        start in -9isize..9,
        end in proptest::option::of(-9isize..9),
        step in prop_oneof![-4isize..0, 1isize..5],
        other in 0usize..9,
    ) {
        let slice = Slice { start, end, step };
        let derived = Shape::from(vec![slice.output_size(dim), 2]);
        let op = |out| {
            let (tensor, ranges) = (tensor(&[dim, 2]), vec![slice]);
            OperationIr::BaseFloat(BaseOperationIr::Slice(SliceOpIr { tensor, ranges, out }))
        };
        check_derived_output(op, &derived, other);
    }

    #[test]
    fn windows(
        (dim, size, step) in (0usize..9, 1usize..9, 1usize..9),
        other in 0usize..9,
    ) {
        let input = tensor(&[dim, 2]);
        let derived = UnfoldOpIr::create(input.clone(), 0, size, step, id).out.shape;
        let op = |out| {
            let input = input.clone();
            let unfold = UnfoldOpIr { input, out, dim: 0, size, step };
            OperationIr::BaseFloat(BaseOperationIr::Unfold(unfold))
        };
        check_derived_output(op, &derived, other);
    }

    #[test]
    fn products(
        (batch, m, k, n) in (dims(0..3), 0usize..4, 0usize..4, 0usize..4),
        ones in any::<[bool; 3]>(),
        other in 0usize..6,
    ) {
        let lhs: Vec<usize> = batch.iter().zip(ones).map(|(&b, one)| if one { 1 } else { b })
            .chain([m, k]).collect();
        let batch_sizes = batch.clone();
        let rhs: Vec<usize> = batch.into_iter().chain([k, n]).collect();
        let (lhs, rhs) = (tensor(&lhs), tensor(&rhs));
        let derived = MatmulOpIr::create(lhs.clone(), rhs.clone(), id).out.shape;
        let op = |out| {
            let matmul = MatmulOpIr { lhs: lhs.clone(), rhs: rhs.clone(), out };
            OperationIr::Float(DType::F32, FloatOperationIr::Matmul(matmul))
        };
        // Flex would read memory that is not there for an empty batch times a broadcast
        // one.
        match batch_sizes.iter().zip(ones).any(|(&size, one)| one && size == 0) {
            true => drop(assert_refused(&op(as_output(tensor(derived.as_slice()))))),
            false => check_derived_output(op, &derived, other),
        }
    }

    #[test]
    fn convolutions(
        (size, kernel, stride, dilation) in (0usize..9, 1usize..4, 1usize..4, 1usize..4),
        padding in (0usize..3, 0usize..3),
        (channels, groups) in (1usize..3, 1usize..3),
        other in 0usize..9,
    ) {
        let (x, weight) = (
            tensor(&[2, channels * groups, size]),
            tensor(&[2 * groups, channels, kernel]),
        );
        let options = Conv1dOptionsIr {
            stride: [stride],
            padding: [padding],
            dilation: [dilation],
            groups,
        };
        let op = |out| {
            let (x, weight, options) = (x.clone(), weight.clone(), options.clone());
            let conv = Conv1dOpIr { x, weight, bias: None, options, out };
            OperationIr::Module(ModuleOperationIr::Conv1d(conv))
        };
        if size + padding.0 + padding.1 < dilation * (kernel - 1) + 1 {
            assert_refused(&op(as_output(tensor(&[2, 2 * groups, 1]))));
        } else {
            let (x, weight) = (x.clone(), weight.clone());
            let derived = Conv1dOpIr::create(x, weight, None, options.clone(), id).out.shape;
            check_derived_output(op, &derived, other);
        }
    }

    #[test]
    fn transposed_convolutions(
        (size, kernel, stride, dilation) in (1usize..9, 1usize..4, 1usize..4, 1usize..4),
        (padding, padding_out) in (0usize..4, 0usize..3),
        other in 0usize..9,
    ) {
        let (x, weight) = (tensor(&[2, 4, size]), tensor(&[4, 3, kernel]));
        let options = ConvTranspose1dOptionsIr {
            stride: [stride],
            padding: [padding],
            padding_out: [padding_out],
            dilation: [dilation],
            groups: 2,
        };
        let op = |out| {
            let (x, weight, options) = (x.clone(), weight.clone(), options.clone());
            let conv = ConvTranspose1dOpIr { x, weight, bias: None, options, out };
            OperationIr::Module(ModuleOperationIr::ConvTranspose1d(conv))
        };
        if (size - 1) * stride + dilation * (kernel - 1) + 1 + padding_out < 2 * padding {
            assert_refused(&op(as_output(tensor(&[2, 6, 1]))));
        } else {
            let (x, weight) = (x.clone(), weight.clone());
            let derived = ConvTranspose1dOpIr::create(x, weight, None, options.clone(), id);
            check_derived_output(op, &derived.out.shape, other);
        }
    }

    #[test]
    fn pools(
        (size, kernel, stride, dilation) in (0usize..9, 1usize..5, 1usize..4, 1usize..3),
        (padding, ceil_mode) in (0usize..3, any::<bool>()),
        other in 0usize..9,
    ) {
        let x = tensor(&[2, 3, size]);
        let op = |out| {
            OperationIr::Module(ModuleOperationIr::MaxPool1d(MaxPool1dOpIr {
                x: x.clone(),
                kernel_size: kernel,
                stride,
                padding,
                dilation,
                ceil_mode,
                out,
            }))
        };
        let room = size + 2 * padding + if ceil_mode { stride - 1 } else { 0 };
        if room < dilation * (kernel - 1) + 1 {
            assert_refused(&op(as_output(tensor(&[2, 3, 1]))));
        } else {
            let x = x.clone();
            let pool = MaxPool1dOpIr::create(x, kernel, stride, padding, dilation, ceil_mode, id);
            check_derived_output(op, &pool.out.shape, other);
        }
    }
}
