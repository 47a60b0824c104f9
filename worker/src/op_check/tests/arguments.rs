//! Arguments that kernels do not check, and the reason for refusing each.

use burn_backend::{BoolStore, Distribution, Slice, tensor::IndexingUpdateOp};
use burn_ir::*;

use super::*;

fn base(op: BaseOperationIr) -> OperationIr {
    OperationIr::BaseFloat(op)
}

fn matmul<const N: usize>(lhs: [usize; N], rhs: [usize; N], out: [usize; N]) -> OperationIr {
    let (lhs, rhs, out) = (float(lhs), float(rhs), as_output(float(out)));
    OperationIr::Float(
        DType::F32,
        FloatOperationIr::Matmul(MatmulOpIr { lhs, rhs, out }),
    )
}

#[test]
fn products_of_matrices() {
    assert_refused_with(
        matmul([4, 1, 1], [2, 1, 9], [4, 1, 9]),
        "batches of 4 and 2",
    );
    assert_refused_with(
        matmul([4, 1, 3], [4, 2, 9], [4, 1, 9]),
        "cannot be multiplied",
    );
    assert_refused_with(matmul([3], [3], [1]), "cannot be multiplied");
    // Flex reads memory that an empty batch does not have.
    assert_refused_with(
        matmul([0, 6, 3], [1, 3, 4], [0, 6, 4]),
        "batches of 0 and 1",
    );
    assert_refused_with(
        matmul([1, 6, 3], [0, 3, 4], [0, 6, 4]),
        "batches of 1 and 0",
    );
    assert_accepted(&matmul([0, 6, 3], [0, 3, 4], [0, 6, 4]));
    let linear = |x, weight, out| {
        let (bias, out) = (None, as_output(out));
        let op = LinearOpIr {
            x,
            weight,
            bias,
            out,
        };
        OperationIr::Module(ModuleOperationIr::Linear(op))
    };
    assert_refused_with(
        linear(float([0, 2, 3]), float([3, 5]), float([0, 2, 5])),
        "batches [0] of [0, 2, 3]",
    );
    assert_accepted(&linear(float([0, 3]), float([3, 5]), float([0, 5])));
    assert_refused_with(
        matmul([2, 3], [3, 4], [2, 5]),
        "the op makes [2, 4], but declares [2, 5]",
    );
    // Batches of size 1 broadcast to the other side's dims.
    assert_accepted(&matmul([1, 2, 3], [5, 3, 4], [5, 2, 4]));
    assert_refused_with(
        matmul([1, 2, 3], [5, 3, 4], [1, 2, 4]),
        "the op makes [5, 2, 4]",
    );
}

fn repeat(times: usize, dims: [usize; 1], out: [usize; 1]) -> OperationIr {
    base(BaseOperationIr::RepeatDim(RepeatDimOpIr {
        tensor: float(dims),
        dim: 0,
        times,
        out: as_output(float(out)),
    }))
}

#[test]
fn repeats() {
    assert_refused_with(repeat(1 << 44, [4], [4]), "declares [4]");
    assert_refused_with(repeat(usize::MAX, [4], [4]), "cannot be addressed");
    // Repeating nothing this often would take practically forever.
    assert_refused_with(repeat(1 << 44, [0], [0]), "too large for any device");
    assert_accepted(&repeat(0, [4], [0]));
    assert_accepted(&repeat(1000, [0], [0]));
}

#[test]
fn axes() {
    let t = || float([2, 3]);
    let flip = |axes: &[usize]| {
        base(BaseOperationIr::Flip(FlipOpIr {
            input: t(),
            out: as_output(t()),
            axes: axes.to_vec(),
        }))
    };
    assert_refused_with(flip(&[0, 0]), "axis 0 is given twice");
    assert_refused_with(flip(&[2]), "axis 2 of a tensor of 2 dims");
    let permute = |axes: &[usize]| {
        base(BaseOperationIr::Permute(PermuteOpIr {
            input: t(),
            out: as_output(t()),
            axes: axes.to_vec(),
        }))
    };
    assert_refused_with(permute(&[1, 1]), "axis 1 is given twice");
    assert_refused_with(permute(&[0]), "1 axes are given");
    assert_refused_with(permute(&[0, usize::MAX]), "of a tensor of 2 dims");
    let swap = SwapDimsOpIr {
        input: t(),
        out: as_output(t()),
        dim1: 0,
        dim2: 7,
    };
    assert_refused_with(base(BaseOperationIr::SwapDims(swap)), "axis 7");
    let sum = |axis, accumulator_len, out| {
        numeric(NumericOperationIr::SumDim(ReduceDimOpIr {
            input: t(),
            out: as_output(out),
            axis,
            accumulator_len,
        }))
    };
    assert_refused_with(sum(2, 1, float([2, 1])), "axis 2");
    assert_refused_with(sum(1, 2, float([2, 2])), "a reduction to 2");
    let cumulative = DimOpIr {
        input: t(),
        out: as_output(t()),
        axis: 2,
    };
    assert_refused_with(
        numeric(NumericOperationIr::CumSum(cumulative.clone())),
        "axis 2",
    );
    let softmax = ActivationOperationIr::Softmax(cumulative);
    assert_refused_with(OperationIr::Activation(softmax), "axis 2");
    let top = TopKWithIndicesOpIr::create(t(), 1, 4, DType::I64, id);
    let top = NumericOperationIr::TopKWithIndices(top);
    assert_refused_with(
        numeric(top),
        "the first 4 elements were requested of an axis of 3",
    );
}

fn slice(slice: Slice, out: usize) -> OperationIr {
    base(BaseOperationIr::Slice(SliceOpIr {
        tensor: float([5]),
        ranges: vec![slice],
        out: as_output(float([out])),
    }))
}

#[test]
fn slices() {
    assert_refused_with(slice(raw_slice(0, None, 0), 5), "a step of 0");
    assert_refused_with(
        slice(raw_slice(0, None, isize::MAX), 1),
        "a slice cannot have a step",
    );
    assert_refused_with(
        slice(raw_slice(0, None, isize::MIN), 1),
        "a slice cannot have a step",
    );
    // A kernel would take this step for a negative one.
    let long = OperationIr::BaseInt(BaseOperationIr::Slice(SliceOpIr {
        tensor: typed([3 << 30], DType::U8),
        ranges: vec![raw_slice(0, None, (1 << 31) + 1)],
        out: as_output(typed([2], DType::U8)),
    }));
    assert_refused_with(
        long,
        "a slice of 3221225472 elements cannot have a step of 2147483649",
    );
    assert_refused_with(slice(raw_slice(0, Some(9), 1), 9), "takes 5");
    assert_refused_with(slice(raw_slice(3, Some(1), 1), 2), "takes 0");
    assert_accepted(&slice(raw_slice(isize::MIN, Some(isize::MAX), -2), 3));
    let two = SliceOpIr {
        tensor: float([5]),
        ranges: vec![raw_slice(0, None, 1); 2],
        out: as_output(float([5])),
    };
    assert_refused_with(base(BaseOperationIr::Slice(two)), "2 slices of [5]");
    let assign = SliceAssignOpIr::create(float([5]), vec![Slice::from(0..3)], float([4]), id);
    assert_refused_with(base(BaseOperationIr::SliceAssign(assign)), "takes 3");
    let unfold = |size, step, out| {
        base(BaseOperationIr::Unfold(UnfoldOpIr {
            input: float([5]),
            out: as_output(out),
            dim: 0,
            size,
            step,
        }))
    };
    assert_refused_with(unfold(0, 1, float([6, 0])), "a window size of 0");
    assert_refused_with(unfold(2, 0, float([4, 2])), "a step of 0");
    assert_refused_with(unfold(2, usize::MAX, float([1, 2])), "cannot be addressed");
    assert_refused_with(unfold(9, 1, float([1, 9])), "the op makes [0, 9]");
}

#[test]
fn copies_of_views_are_charged() {
    let bytes = |op: &OperationIr| assert_accepted(op);
    let wide = || typed([1000], DType::F64);
    let is_nan = UnaryOpIr {
        input: wide(),
        out: as_output(boolean([1000])),
    };
    let into_int = CastOpIr {
        input: wide(),
        out: as_output(typed([1000], DType::I8)),
    };
    let cast = CastOpIr {
        input: wide(),
        out: as_output(typed([1000], DType::F16)),
    };
    let float = |op| OperationIr::Float(DType::F64, op);
    let converted = [
        float(FloatOperationIr::IsNan(is_nan.clone())),
        float(FloatOperationIr::IsInf(is_nan)),
        float(FloatOperationIr::IntoInt(into_int)),
        base(BaseOperationIr::Cast(cast)),
    ];
    for op in &converted {
        assert_eq!(bytes(op), 8000, "{op:?}");
    }
    let cumulative = |input: TensorIr| {
        let out = as_output(input.clone());
        let axis = 0;
        let op = NumericOperationIr::CumProd(DimOpIr { input, out, axis });
        bytes(&OperationIr::NumericFloat(DType::F64, op))
    };
    // A row of numbers is kept even if there is none to add.
    assert_eq!(cumulative(typed([0, 1 << 30], DType::F64)), 8 << 30);
    assert_eq!(cumulative(typed([3, 10], DType::F16)), 40 + 60);
    let mean = ReduceOpIr {
        input: typed([1000], DType::F16),
        out: as_output(typed([1], DType::F16)),
    };
    let mean = OperationIr::NumericFloat(DType::F16, NumericOperationIr::Mean(mean));
    assert!(bytes(&mean) >= 6000, "a view is copied in order and as f32");
}

/// A slice with any fields, as a frame may have.
fn raw_slice(start: isize, end: Option<isize>, step: isize) -> Slice {
    Slice { start, end, step }
}

#[test]
fn indices() {
    let t = || float([2, 3]);
    let gather = |indices: TensorIr, dim| {
        let out = as_output(TensorIr {
            dtype: DType::F32,
            ..indices.clone()
        });
        base(BaseOperationIr::Gather(GatherOpIr {
            tensor: t(),
            dim,
            indices,
            out,
        }))
    };
    assert_refused_with(
        gather(int([3, 3]), 1),
        "indices [3, 3] do not fit axis 1 of [2, 3]",
    );
    assert_refused_with(gather(int([2]), 0), "indices [2]");
    assert_refused_with(gather(int([2, 3]), 2), "axis 2");
    assert_refused_with(gather(float([2, 3]), 1), "must be Int");
    let add = IndexingUpdateOp::Add;
    let scatter = ScatterOpIr::create(t(), 1, int([2, 5]), float([2, 4]), add, id);
    assert_refused_with(base(BaseOperationIr::Scatter(scatter)), "the value [2, 4]");
    let select = SelectOpIr::create(t(), 0, int([4, 1]), id);
    assert_refused_with(
        base(BaseOperationIr::Select(select)),
        "the list of indices [4, 1]",
    );
    let assign = SelectAssignOpIr::create(t(), 0, int([4]), float([3, 3]), add, id);
    assert_refused_with(
        base(BaseOperationIr::SelectAssign(assign)),
        "the op makes [4, 3]",
    );
    let nd = |indices: TensorIr| {
        base(BaseOperationIr::GatherNd(GatherNdOpIr {
            data: t(),
            indices,
            out: as_output(t()),
        }))
    };
    assert_refused_with(nd(int([2, 3])), "indices [2, 3] into [2, 3]");
    assert_refused_with(nd(int([])), "indices [] into");
    let put = ScatterNdOpIr::create(t(), int([4, 1]), float([4, 4]), add, id);
    assert_refused_with(base(BaseOperationIr::ScatterNd(put)), "values [4, 4]");
    let embedding = EmbeddingOpIr {
        weights: float([9]),
        indices: int([2, 2]),
        out: as_output(float([2, 2, 9])),
    };
    let embedding = ModuleOperationIr::Embedding(embedding);
    assert_refused_with(
        OperationIr::Module(embedding),
        "the weights [9] must have 2 dims",
    );
}

#[test]
fn shapes_and_dtypes_of_both_sides() {
    let add = |lhs: TensorIr, rhs: TensorIr| {
        let out = as_output(lhs.clone());
        numeric(NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out }))
    };
    assert_refused_with(add(float([2, 3]), float([2, 2])), "do not broadcast");
    assert_refused_with(add(float([2, 3]), float([3])), "the same number of dims");
    assert_refused_with(add(float([3]), typed([3], DType::F64)), "must be the same");
    assert_refused_with(add(int([3]), int([3])), "must be Float");
    let relu = BinaryOpIr {
        lhs: float([4]),
        rhs: float([1]),
        out: as_output(float([4])),
    };
    let relu = ActivationOperationIr::ReluBackward(relu);
    assert_refused_with(
        OperationIr::Activation(relu),
        "the gradient [1] must be [4]",
    );
    let mask = MaskFillOpIr::create(float([3]), int([3]), ScalarIr::Int(0), id);
    assert_refused_with(base(BaseOperationIr::MaskFill(mask)), "must be Bool");
    let reshape = ShapeOpIr {
        input: float([6]),
        out: as_output(float([5])),
    };
    assert_refused_with(base(BaseOperationIr::Reshape(reshape)), "different numbers");
    let expand = ShapeOpIr {
        input: float([3]),
        out: as_output(float([2, 4])),
    };
    assert_refused_with(base(BaseOperationIr::Expand(expand)), "does not expand");
    let cat = CatOpIr {
        tensors: vec![float([2, 3]), float([3, 3])],
        dim: 1,
        out: as_output(float([2, 6])),
    };
    assert_refused_with(
        base(BaseOperationIr::Cat(cat)),
        "differ in an axis other than 1",
    );
    let none = CatOpIr {
        tensors: Vec::new(),
        dim: 0,
        out: as_output(float([0])),
    };
    assert_refused_with(
        base(BaseOperationIr::Cat(none)),
        "a concatenation of no tensors",
    );
    let cross = CrossOpIr::create(float([2]), float([2]), 0, id);
    let cross = FloatOperationIr::Cross(cross);
    assert_refused_with(OperationIr::Float(DType::F32, cross), "needs 3 elements");
}

#[test]
fn distributions() {
    let random = |distribution| {
        let op = RandomOpIr::create([3].into(), DType::F32, distribution, id);
        OperationIr::Float(DType::F32, FloatOperationIr::Random(op))
    };
    for bad in [
        Distribution::Bernoulli(1.5),
        Distribution::Bernoulli(f64::NAN),
        Distribution::Uniform(2.0, 1.0),
        Distribution::Uniform(0.0, f64::INFINITY),
        Distribution::Normal(0.0, -1.0),
        Distribution::Normal(f64::NAN, 1.0),
    ] {
        assert_refused_with(random(bad), "is not a valid distribution");
    }
}

#[test]
fn ops_that_no_client_sends_are_refused() {
    let init = InitOperationIr { out: float([3]) };
    assert_refused_with(OperationIr::Init(init), "an upload without contents");
    let cast = CastOpIr::create(boolean([3]), DType::Bool(BoolStore::U8), id);
    let cast = BaseOperationIr::Cast(cast);
    assert_refused_with(OperationIr::BaseBool(cast), "a cast between booleans");
    let random = RandomOpIr::create([3].into(), DType::F32, Distribution::Default, id);
    assert_refused_with(numeric(NumericOperationIr::IntRandom(random)), "as floats");
    let many = ShapeOpIr {
        input: float([1]),
        out: as_output(float([1; 40])),
    };
    assert_refused_with(base(BaseOperationIr::Reshape(many)), "a tensor of 40 dims");
}
