//! Each variant of Burn's ops once, as clients send it, made by Burn's own constructors.
//!
//! The tests of the rules use these ops, and the fuzzer starts from them.

mod modules;

use std::cell::Cell;

use burn_backend::{BoolStore, DType, Distribution, Slice, tensor::IndexingUpdateOp};
use burn_ir::*;
use tensord_proto::collective_op::{AllReduce, CollectiveOp};

pub(super) const BOOL: DType = DType::Bool(BoolStore::Native);

thread_local! {
    static IDS: Cell<u64> = const { Cell::new(0) };
}

/// Returns an id that no other tensor of the thread has.
pub(super) fn id() -> TensorId {
    IDS.set(IDS.get() + 1);
    TensorId::new(IDS.get())
}

pub(super) fn typed<const N: usize>(dims: [usize; N], dtype: DType) -> TensorIr {
    TensorIr {
        id: id(),
        shape: dims.into(),
        status: TensorStatus::ReadOnly,
        dtype,
    }
}

pub(super) fn float<const N: usize>(dims: [usize; N]) -> TensorIr {
    typed(dims, DType::F32)
}

pub(super) fn int<const N: usize>(dims: [usize; N]) -> TensorIr {
    typed(dims, DType::I64)
}

pub(super) fn boolean<const N: usize>(dims: [usize; N]) -> TensorIr {
    typed(dims, BOOL)
}

/// Marks a tensor as an output of an op.
pub(super) fn as_output(tensor: TensorIr) -> TensorIr {
    TensorIr {
        status: TensorStatus::NotInit,
        ..tensor
    }
}

pub(super) fn numeric(op: NumericOperationIr) -> OperationIr {
    OperationIr::NumericFloat(DType::F32, op)
}

/// Returns all variants except those that no client sends.
pub(crate) fn ops() -> Vec<OperationIr> {
    let mut ops = Vec::new();
    let float_base = base(DType::F32)
        .into_iter()
        .chain(base_of_numbers(DType::F32));
    ops.extend(float_base.map(OperationIr::BaseFloat));
    let cast = CastOpIr::create(float([2, 3]), DType::F16, id);
    ops.push(OperationIr::BaseFloat(BaseOperationIr::Cast(cast)));
    let int_base = base(DType::I32)
        .into_iter()
        .chain(base_of_numbers(DType::I32));
    ops.extend(int_base.map(OperationIr::BaseInt));
    let cast = CastOpIr::create(int([2, 3]), DType::I64, id);
    ops.push(OperationIr::BaseInt(BaseOperationIr::Cast(cast)));
    ops.extend(base(BOOL).into_iter().map(OperationIr::BaseBool));
    ops.extend(numbers(DType::F32).into_iter().map(numeric));
    let ints = numbers(DType::I32).into_iter();
    ops.extend(ints.map(|op| OperationIr::NumericInt(DType::I32, op)));
    let drawn = RandomOpIr::create([4].into(), DType::I32, Distribution::Uniform(0.0, 9.0), id);
    let drawn = NumericOperationIr::IntRandom(drawn);
    ops.push(OperationIr::NumericInt(DType::I32, drawn));
    ops.extend(
        floats()
            .into_iter()
            .map(|op| OperationIr::Float(DType::F32, op)),
    );
    ops.extend(booleans().into_iter().map(OperationIr::Bool));
    ops.extend(integers().into_iter().map(OperationIr::Int));
    ops.extend(modules::modules().into_iter().map(OperationIr::Module));
    ops.extend(activations().into_iter().map(OperationIr::Activation));
    let custom = CustomOpIr::new("swish", &[float([3])], &[as_output(float([3]))]);
    ops.push(OperationIr::Custom(custom));
    ops.push(OperationIr::Drop(float([3])));
    let reduced = AllReduce {
        tensor: float([3]),
        out: as_output(float([3])),
        mean: false,
        lease_ranks: Vec::new(),
    };
    ops.push(CollectiveOp::AllReduce(reduced).into());
    ops.push(CollectiveOp::Sync.into());
    ops
}

fn base(dtype: DType) -> Vec<BaseOperationIr> {
    let ops = base_of_parts(dtype).into_iter();
    ops.chain(base_of_wholes(dtype)).collect()
}

/// Returns the base ops that move or select elements.
fn base_of_parts(dtype: DType) -> Vec<BaseOperationIr> {
    use BaseOperationIr as Op;
    let t = || typed([2, 3, 4], dtype);
    let part = [
        Slice::new(0, None, 1),
        Slice::new(-2, None, 1),
        Slice::new(0, Some(4), 2),
    ];
    let at = int([5]);
    vec![
        Op::Reshape(ShapeOpIr::reshape(t(), [6, 1, 4].into(), id)),
        Op::SwapDims(SwapDimsOpIr::create(t(), 0, 2, id)),
        Op::Permute(PermuteOpIr::create(t(), vec![2, 0, 1], id)),
        Op::Flip(FlipOpIr::create(t(), vec![0, 2], id)),
        Op::Expand(ShapeOpIr::expand(
            typed([3, 1], dtype),
            [2, 3, 4].into(),
            id,
        )),
        Op::Unfold(UnfoldOpIr::create(t(), 2, 3, 1, id)),
        Op::Slice(SliceOpIr::create(t(), part.to_vec(), id)),
        Op::SliceAssign(SliceAssignOpIr::create(
            t(),
            part.to_vec(),
            typed([2, 2, 2], dtype),
            id,
        )),
        Op::Select(SelectOpIr::create(t(), 1, at.clone(), id)),
        Op::SelectAssign(SelectAssignOpIr::create(
            t(),
            1,
            at,
            typed([2, 5, 4], dtype),
            IndexingUpdateOp::Add,
            id,
        )),
        Op::MaskWhere(MaskWhereOpIr::create(
            t(),
            boolean([2, 1, 4]),
            typed([1, 3, 1], dtype),
            id,
        )),
        Op::MaskFill(MaskFillOpIr::create(
            t(),
            boolean([2, 3, 1]),
            ScalarIr::Int(1),
            id,
        )),
        Op::Gather(GatherOpIr::create(t(), 1, int([2, 7, 4]), id)),
        Op::Scatter(ScatterOpIr::create(
            t(),
            1,
            int([2, 7, 4]),
            typed([2, 7, 4], dtype),
            IndexingUpdateOp::Add,
            id,
        )),
    ]
}

/// Returns the base ops that compare, repeat, create or reduce tensors.
fn base_of_wholes(dtype: DType) -> Vec<BaseOperationIr> {
    use BaseOperationIr as Op;
    let t = || typed([2, 3, 4], dtype);
    let answer = |dtype: DType| if dtype == BOOL { dtype } else { BOOL };
    vec![
        Op::Equal(BinaryOpIr::create_comparison(
            t(),
            typed([1, 3, 4], dtype),
            answer(dtype),
            id,
        )),
        Op::NotEqual(BinaryOpIr::create_comparison(t(), t(), answer(dtype), id)),
        Op::EqualElem(ScalarOpIr::create_comparison(
            t(),
            ScalarIr::Int(1),
            answer(dtype),
            id,
        )),
        Op::NotEqualElem(ScalarOpIr::create_comparison(
            t(),
            ScalarIr::Int(1),
            answer(dtype),
            id,
        )),
        Op::RepeatDim(RepeatDimOpIr::create(t(), 1, 5, id)),
        Op::Cat(CatOpIr::create(vec![t(), typed([2, 1, 4], dtype)], 1, id)),
        Op::Empty(CreationOpIr::create([2, 0].into(), dtype, id)),
        Op::Ones(CreationOpIr::create([2].into(), dtype, id)),
        Op::Zeros(CreationOpIr::create([2].into(), dtype, id)),
        Op::All(ReduceOpIr::create_bool(t(), answer(dtype), id)),
        Op::Any(ReduceOpIr::create_bool(t(), answer(dtype), id)),
        Op::AllDim(ReduceDimOpIr::create_bool(t(), 1, 1, answer(dtype), id)),
        Op::AnyDim(ReduceDimOpIr::create_bool(t(), 1, 1, answer(dtype), id)),
    ]
}

/// Returns the base ops that do not exist for booleans.
fn base_of_numbers(dtype: DType) -> Vec<BaseOperationIr> {
    use BaseOperationIr as Op;
    vec![
        Op::GatherNd(GatherNdOpIr::create(
            typed([2, 3, 4], dtype),
            int([5, 2]),
            id,
        )),
        Op::ScatterNd(ScatterNdOpIr::create(
            typed([2, 3, 4], dtype),
            int([5, 2]),
            typed([5, 4], dtype),
            IndexingUpdateOp::Mul,
            id,
        )),
    ]
}

fn numbers(dtype: DType) -> Vec<NumericOperationIr> {
    let ops = numbers_by_element(dtype).into_iter();
    ops.chain(numbers_by_dim(dtype)).collect()
}

/// Returns the ops that make one element for each element.
fn numbers_by_element(dtype: DType) -> Vec<NumericOperationIr> {
    use NumericOperationIr as Op;
    let t = || typed([2, 3, 4], dtype);
    let two = || BinaryOpIr::create(t(), typed([2, 1, 4], dtype), id);
    let one = || UnaryOpIr::create(t(), id);
    let with = || ScalarOpIr::create(t(), ScalarIr::Int(2), id);
    let compared = || BinaryOpIr::create_comparison(t(), t(), BOOL, id);
    let compared_with = || ScalarOpIr::create_comparison(t(), ScalarIr::Int(2), BOOL, id);
    let power = match dtype {
        DType::F32 => BinaryOpIr {
            lhs: t(),
            rhs: int([2, 3, 1]),
            out: as_output(t()),
        },
        _ => two(),
    };
    vec![
        Op::Add(two()),
        Op::Sub(two()),
        Op::Div(two()),
        Op::Rem(two()),
        Op::Mul(two()),
        Op::AddScalar(with()),
        Op::SubScalar(with()),
        Op::DivScalar(with()),
        Op::RemScalar(with()),
        Op::MulScalar(with()),
        Op::PowiScalar(with()),
        Op::ClampMin(with()),
        Op::ClampMax(with()),
        Op::Abs(one()),
        Op::Neg(one()),
        Op::Sign(one()),
        Op::Full(FullOpIr::create([2, 3].into(), dtype, ScalarIr::Int(1), id)),
        Op::Greater(compared()),
        Op::GreaterEqual(compared()),
        Op::Lower(compared()),
        Op::LowerEqual(compared()),
        Op::GreaterElem(compared_with()),
        Op::GreaterEqualElem(compared_with()),
        Op::LowerElem(compared_with()),
        Op::LowerEqualElem(compared_with()),
        Op::Clamp(ClampOpIr::create(
            t(),
            ScalarIr::Int(0),
            ScalarIr::Int(1),
            id,
        )),
        Op::Powi(power),
    ]
}

/// Returns the ops that reduce, sort or pad along dims.
fn numbers_by_dim(dtype: DType) -> Vec<NumericOperationIr> {
    use NumericOperationIr as Op;
    let t = || typed([2, 3, 4], dtype);
    let all = || ReduceOpIr::create(t(), id);
    let along = |len| ReduceDimOpIr::create(t(), 1, len, id);
    let places = |len| ReduceDimOpIr::create_arg(t(), 1, len, DType::I64, id);
    let dim = || DimOpIr::create(t(), 2, id);
    let picked = || ReduceDimWithIndicesOpIr::create(t(), 0, DType::I32, id);
    vec![
        Op::Mean(all()),
        Op::Sum(all()),
        Op::Prod(all()),
        Op::Max(all()),
        Op::Min(all()),
        Op::MaxAbs(all()),
        Op::MeanDim(along(1)),
        Op::SumDim(along(1)),
        Op::ProdDim(along(1)),
        Op::MaxDim(along(1)),
        Op::MinDim(along(1)),
        Op::MaxAbsDim(along(1)),
        Op::TopK(along(2)),
        Op::ArgMax(places(1)),
        Op::ArgMin(places(1)),
        Op::ArgTopK(places(2)),
        Op::SumDims(ReduceDimsOpIr::create(t(), vec![0, 2], id)),
        Op::TopKWithIndices(TopKWithIndicesOpIr::create(t(), 2, 3, DType::I64, id)),
        Op::MaxDimWithIndices(picked()),
        Op::MinDimWithIndices(picked()),
        Op::CumSum(dim()),
        Op::CumProd(dim()),
        Op::CumMin(dim()),
        Op::CumMax(dim()),
        Op::Sort(SortOpIr::create(t(), 1, true, id)),
        Op::ArgSort(SortOpIr::create_arg(t(), 1, false, DType::I64, id)),
        Op::SortWithIndices(SortWithIndicesOpIr::create(t(), 1, true, DType::I64, id)),
        Op::Pad(PadOpIr::create(
            t(),
            vec![(1, 0), (2, 2), (0, 3)],
            PadModeIr::Reflect,
            id,
        )),
    ]
}

fn floats() -> Vec<FloatOperationIr> {
    use FloatOperationIr as Op;
    let t = || float([2, 3]);
    let one = || UnaryOpIr::create(t(), id);
    let two = || BinaryOpIr::create(t(), float([1, 3]), id);
    let answer = || UnaryOpIr::create_comparison(t(), BOOL, id);
    let options = GridSampleOptionsIr {
        mode: InterpolateModeIr::Bilinear,
        padding_mode: GridSamplePaddingModeIr::Zeros,
        align_corners: false,
    };
    let grid = GridSample2dOpIr::create(float([2, 3, 5, 5]), float([2, 4, 6, 2]), options, id);
    vec![
        Op::Exp(one()),
        Op::Log(one()),
        Op::Log1p(one()),
        Op::Erf(one()),
        Op::PowfScalar(ScalarOpIr::create(t(), ScalarIr::Float(0.5), id)),
        Op::Sqrt(one()),
        Op::Cos(one()),
        Op::Cosh(one()),
        Op::Sin(one()),
        Op::Sinh(one()),
        Op::Tan(one()),
        Op::Tanh(one()),
        Op::ArcCos(one()),
        Op::ArcCosh(one()),
        Op::ArcSin(one()),
        Op::ArcSinh(one()),
        Op::ArcTan(one()),
        Op::ArcTanh(one()),
        Op::ArcTan2(two()),
        Op::Round(one()),
        Op::Floor(one()),
        Op::Ceil(one()),
        Op::Trunc(one()),
        Op::IntoInt(CastOpIr::create(t(), DType::I32, id)),
        Op::Matmul(MatmulOpIr::create(
            float([4, 1, 2, 3]),
            float([1, 5, 3, 6]),
            id,
        )),
        Op::Cross(CrossOpIr::create(t(), float([1, 3]), 1, id)),
        Op::Random(RandomOpIr::create(
            [3].into(),
            DType::F32,
            Distribution::Default,
            id,
        )),
        Op::Recip(one()),
        Op::IsNan(answer()),
        Op::IsInf(answer()),
        Op::GridSample2d(grid),
        Op::Powf(two()),
        Op::Hypot(two()),
    ]
}

fn booleans() -> Vec<BoolOperationIr> {
    use BoolOperationIr as Op;
    let two = || BinaryOpIr::create(boolean([2, 3]), boolean([2, 1]), id);
    vec![
        Op::IntoFloat(CastOpIr::create(boolean([2]), DType::F16, id)),
        Op::IntoInt(CastOpIr::create(boolean([2]), DType::I32, id)),
        Op::Not(UnaryOpIr::create(boolean([2]), id)),
        Op::And(two()),
        Op::Or(two()),
        Op::Xor(two()),
    ]
}

fn integers() -> Vec<IntOperationIr> {
    use IntOperationIr as Op;
    let two = || BinaryOpIr::create(int([2, 3]), int([2, 1]), id);
    let with = || ScalarOpIr::create(int([2, 3]), ScalarIr::Int(3), id);
    vec![
        Op::IntoFloat(CastOpIr::create(int([2]), DType::F64, id)),
        Op::BitwiseAnd(two()),
        Op::BitwiseAndScalar(with()),
        Op::BitwiseOr(two()),
        Op::BitwiseOrScalar(with()),
        Op::BitwiseXor(two()),
        Op::BitwiseXorScalar(with()),
        Op::BitwiseNot(UnaryOpIr::create(int([2]), id)),
        Op::BitwiseLeftShift(two()),
        Op::BitwiseLeftShiftScalar(with()),
        Op::BitwiseRightShift(two()),
        Op::BitwiseRightShiftScalar(with()),
        Op::Matmul(MatmulOpIr::create(int([2, 3]), int([3, 4]), id)),
    ]
}

fn activations() -> Vec<ActivationOperationIr> {
    use ActivationOperationIr as Op;
    let t = || float([2, 3]);
    let one = || UnaryOpIr::create(t(), id);
    let two = || BinaryOpIr::create(t(), t(), id);
    let dim = || DimOpIr::create(t(), 0, id);
    let half = ScalarIr::Float(0.5);
    vec![
        Op::Relu(one()),
        Op::ReluBackward(two()),
        Op::LeakyRelu(ScalarOpIr::create(t(), half, id)),
        Op::PRelu(BinaryOpIr::create(t(), float([1, 3]), id)),
        Op::Gelu(one()),
        Op::GeluBackward(two()),
        Op::Sigmoid(one()),
        Op::SigmoidBackward(two()),
        Op::HardSigmoid(HardSigmoidOpIr::create(t(), half, half, id)),
        Op::LogSigmoid(one()),
        Op::LogSigmoidBackward(two()),
        Op::Softmax(dim()),
        Op::LogSoftmax(dim()),
        Op::Softmin(dim()),
    ]
}
