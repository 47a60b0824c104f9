//! Each variant once, as clients send it.

use std::collections::BTreeSet;

use burn_backend::{
    Distribution, Slice,
    distributed::ReduceOperation,
    ops::{ConvOptions, ConvTransposeOptions, DeformConvOptions},
    tensor::IndexingUpdateOp,
};
use burn_ir::*;
use tensord_proto::codec::OpName;

use super::*;

/// Variants of Burn's ops, as its enums have them, but those that no client sends: an
/// `Init` is an upload, integers and booleans have no casts in Burn's interpreter, booleans
/// no tuples of indices, floats no random integers, and nothing is quantized.
const VARIANTS: usize = BASE + NUMERIC + (35 - 2) + 13 + 6 + 53 + 14 + 2 + 2;
const BASE: usize = 30 + (30 - 1) + (30 - 3);
const NUMERIC: usize = (56 - 1) + 56;

#[test]
fn each_variant_is_accepted_as_clients_send_it() {
    let ops = ops();
    let names: BTreeSet<String> = ops.iter().map(|op| OpName::of(op).to_string()).collect();
    assert_eq!(names.len(), ops.len(), "each once");
    assert_eq!(names.len(), VARIANTS, "all of them");
    for op in &ops {
        accepted(op);
    }
}

/// All of them.
pub(super) fn ops() -> Vec<OperationIr> {
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
    ops.extend(modules().into_iter().map(OperationIr::Module));
    ops.extend(activations().into_iter().map(OperationIr::Activation));
    let custom = CustomOpIr::new("swish", &[float([3])], &[made(float([3]))]);
    ops.push(OperationIr::Custom(custom));
    ops.push(OperationIr::Drop(float([3])));
    let reduced = AllReduceOpIr::create(float([3]), ReduceOperation::Sum, Vec::new(), id);
    let reduced = DistributedOperationIr::AllReduce(reduced);
    ops.push(OperationIr::Distributed(reduced));
    ops.push(OperationIr::Distributed(
        DistributedOperationIr::SyncCollective,
    ));
    ops
}

fn base(dtype: DType) -> Vec<BaseOperationIr> {
    use BaseOperationIr as Op;
    let t = || typed([2, 3, 4], dtype);
    let answer = |dtype: DType| if dtype == BOOL { dtype } else { BOOL };
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

/// Those that booleans lack.
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
    use NumericOperationIr as Op;
    let t = || typed([2, 3, 4], dtype);
    let two = || BinaryOpIr::create(t(), typed([2, 1, 4], dtype), id);
    let one = || UnaryOpIr::create(t(), id);
    let with = || ScalarOpIr::create(t(), ScalarIr::Int(2), id);
    let compared = || BinaryOpIr::create_comparison(t(), t(), BOOL, id);
    let compared_with = || ScalarOpIr::create_comparison(t(), ScalarIr::Int(2), BOOL, id);
    let all = || ReduceOpIr::create(t(), id);
    let along = |len| ReduceDimOpIr::create(t(), 1, len, id);
    let places = |len| ReduceDimOpIr::create_arg(t(), 1, len, DType::I64, id);
    let dim = || DimOpIr::create(t(), 2, id);
    let picked = || ReduceDimWithIndicesOpIr::create(t(), 0, DType::I32, id);
    let mut ops = vec![
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
        Op::Greater(compared()),
        Op::GreaterEqual(compared()),
        Op::Lower(compared()),
        Op::LowerEqual(compared()),
        Op::GreaterElem(compared_with()),
        Op::GreaterEqualElem(compared_with()),
        Op::LowerElem(compared_with()),
        Op::LowerEqualElem(compared_with()),
        Op::TopKWithIndices(TopKWithIndicesOpIr::create(t(), 2, 3, DType::I64, id)),
        Op::MaxDimWithIndices(picked()),
        Op::MinDimWithIndices(picked()),
        Op::Clamp(ClampOpIr::create(
            t(),
            ScalarIr::Int(0),
            ScalarIr::Int(1),
            id,
        )),
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
    ];
    let power = match dtype {
        DType::F32 => BinaryOpIr {
            lhs: t(),
            rhs: int([2, 3, 1]),
            out: made(t()),
        },
        _ => two(),
    };
    ops.push(Op::Powi(power));
    ops
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

fn modules() -> Vec<ModuleOperationIr> {
    let mut ops = norms();
    ops.extend(convolutions());
    ops.extend(transposed());
    ops.extend(pools());
    ops.extend(sizes());
    ops.extend(sequences());
    ops
}

fn norms() -> Vec<ModuleOperationIr> {
    use ModuleOperationIr as Op;
    let c = || float([3]);
    let x = || float([2, 3]);
    let w = || float([3, 5]);
    vec![
        Op::BatchNorm(BatchNormOpIr::create(
            float([2, 3, 4]),
            c(),
            c(),
            c(),
            c(),
            ScalarIr::Float(1e-5),
            id,
        )),
        Op::LayerNorm(LayerNormOpIr::create(x(), c(), Some(c()), 1e-5, id)),
        Op::Linear(LinearOpIr::create(
            float([4, 2, 3]),
            w(),
            Some(float([5])),
            id,
        )),
        Op::LinearXBackward(LinearXBackwardOpIr::create(w(), float([4, 2, 5]), id)),
        Op::LinearWeightBackward(LinearWeightBackwardOpIr::create(
            float([4, 2, 3]),
            float([4, 2, 5]),
            id,
        )),
        Op::LinearBiasBackward(LinearBiasBackwardOpIr::create(float([4, 2, 5]), id)),
    ]
}

/// `$op` with an input, a weight, a bias and options, and its three gradients.
macro_rules! convolved {
    ($x:expr, $w:expr, $options:expr, $bias:expr, $forward:ident($f:ident),
     $($of:ident($b:ident)),* ; $bias_of:ident($bb:ident)) => {{
        let (x, w, options) = ($x, $w, $options);
        let forward = $f::create(x.clone(), w.clone(), Some($bias), options.clone().into(), id);
        let grad = TensorIr { status: TensorStatus::ReadOnly, ..forward.out.clone() };
        vec![
            $(ModuleOperationIr::$of($b::create(
                x.clone(), w.clone(), grad.clone(), options.clone().into(), id,
            )),)*
            ModuleOperationIr::$bias_of($bb::create(x.clone(), $bias, grad.clone(), id)),
            ModuleOperationIr::$forward(forward),
        ]
    }};
}

fn convolutions() -> Vec<ModuleOperationIr> {
    let one = ConvOptions::new([2], [1], [1], 2);
    let two = ConvOptions::new([1, 2], [0, 1], [2, 1], 1);
    let three = ConvOptions::new([1; 3], [1; 3], [1; 3], 1);
    let mut ops = convolved!(
        float([2, 4, 9]), float([6, 2, 3]), one, float([6]), Conv1d(Conv1dOpIr),
        Conv1dXBackward(Conv1dXBackwardOpIr), Conv1dWeightBackward(Conv1dWeightBackwardOpIr);
        Conv1dBiasBackward(Conv1dBiasBackwardOpIr)
    );
    ops.extend(convolved!(
        float([2, 4, 9, 8]), float([6, 4, 3, 3]), two, float([6]), Conv2d(Conv2dOpIr),
        Conv2dXBackward(Conv2dXBackwardOpIr), Conv2dWeightBackward(Conv2dWeightBackwardOpIr);
        Conv2dBiasBackward(Conv2dBiasBackwardOpIr)
    ));
    ops.extend(convolved!(
        float([2, 4, 5, 5, 5]), float([6, 4, 3, 3, 3]), three, float([6]), Conv3d(Conv3dOpIr),
        Conv3dXBackward(Conv3dXBackwardOpIr), Conv3dWeightBackward(Conv3dWeightBackwardOpIr);
        Conv3dBiasBackward(Conv3dBiasBackwardOpIr)
    ));
    let options = DeformConvOptions::new([1, 1], [1, 1], [1, 1], 1, 2);
    let x = float([2, 4, 5, 5]);
    let (offset, weight) = (float([2, 36, 5, 5]), float([6, 4, 3, 3]));
    let (mask, bias) = (Some(float([2, 18, 5, 5])), Some(float([6])));
    let bent = DeformConv2dOpIr::create(
        x.clone(),
        offset.clone(),
        weight.clone(),
        mask.clone(),
        bias.clone(),
        options.clone().into(),
        id,
    );
    let grad = float([2, 6, 5, 5]);
    let options = options.into();
    let back = DeformConv2dBackwardOpIr::create(x, offset, weight, mask, bias, grad, options, id);
    ops.push(ModuleOperationIr::DeformableConv2d(Box::new(bent)));
    ops.push(ModuleOperationIr::DeformableConv2dBackward(Box::new(back)));
    ops
}

fn transposed() -> Vec<ModuleOperationIr> {
    let one = ConvTransposeOptions::new([2], [1], [1], [1], 2);
    let two = ConvTransposeOptions::new([1, 2], [0, 1], [0, 1], [2, 1], 1);
    let three = ConvTransposeOptions::new([1; 3], [1; 3], [0; 3], [1; 3], 1);
    let mut ops = convolved!(
        float([2, 4, 9]), float([4, 3, 3]), one, float([6]), ConvTranspose1d(ConvTranspose1dOpIr),
        ConvTranspose1dWeightBackward(ConvTranspose1dWeightBackwardOpIr);
        ConvTranspose1dBiasBackward(ConvTranspose1dBiasBackwardOpIr)
    );
    ops.extend(convolved!(
        float([2, 4, 9, 8]), float([4, 6, 3, 3]), two, float([6]),
        ConvTranspose2d(ConvTranspose2dOpIr),
        ConvTranspose2dWeightBackward(ConvTranspose2dWeightBackwardOpIr);
        ConvTranspose2dBiasBackward(ConvTranspose2dBiasBackwardOpIr)
    ));
    ops.extend(convolved!(
        float([2, 4, 5, 5, 5]), float([4, 6, 3, 3, 3]), three, float([6]),
        ConvTranspose3d(ConvTranspose3dOpIr),
        ConvTranspose3dWeightBackward(ConvTranspose3dWeightBackwardOpIr);
        ConvTranspose3dBiasBackward(ConvTranspose3dBiasBackwardOpIr)
    ));
    ops
}

fn pools() -> Vec<ModuleOperationIr> {
    use ModuleOperationIr as Op;
    let (x, y) = (|| float([2, 3, 8]), || float([2, 3, 8, 9]));
    let grad = |out: &TensorIr| TensorIr {
        status: TensorStatus::ReadOnly,
        ..out.clone()
    };
    let avg1 = AvgPool1dOpIr::create(x(), 3, 2, 1, true, true, id);
    let avg2 = AvgPool2dOpIr::create(y(), [3, 2], [2, 1], [1, 0], true, false, id);
    let max1 = MaxPool1dWithIndicesOpIr::create(x(), 3, 2, 1, 2, true, DType::I64, id);
    let max2 = MaxPool2dWithIndicesOpIr::create(
        y(),
        [3, 2],
        [2, 1],
        [1, 0],
        [1, 2],
        false,
        DType::I32,
        id,
    );
    vec![
        Op::AvgPool1dBackward(AvgPool1dBackwardOpIr::create(
            x(),
            grad(&avg1.out),
            3,
            2,
            1,
            true,
            true,
            id,
        )),
        Op::AvgPool2dBackward(AvgPool2dBackwardOpIr::create(
            y(),
            grad(&avg2.out),
            [3, 2],
            [2, 1],
            [1, 0],
            true,
            false,
            id,
        )),
        Op::AvgPool1d(avg1),
        Op::AvgPool2d(avg2),
        Op::MaxPool1d(MaxPool1dOpIr::create(x(), 3, 2, 1, 2, false, id)),
        Op::MaxPool2d(MaxPool2dOpIr::create(
            y(),
            [2; 2],
            [2; 2],
            [0; 2],
            [1; 2],
            true,
            id,
        )),
        Op::MaxPool1dWithIndicesBackward(MaxPool1dWithIndicesBackwardOpIr::create(
            x(),
            grad(&max1.out),
            grad(&max1.out_indices),
            3,
            2,
            1,
            2,
            true,
            id,
        )),
        Op::MaxPool2dWithIndicesBackward(MaxPool2dWithIndicesBackwardOpIr::create(
            y(),
            grad(&max2.out),
            grad(&max2.out_indices),
            [3, 2],
            [2, 1],
            [1, 0],
            [1, 2],
            false,
            id,
        )),
        Op::MaxPool1dWithIndices(max1),
        Op::MaxPool2dWithIndices(max2),
    ]
}

fn sizes() -> Vec<ModuleOperationIr> {
    use ModuleOperationIr as Op;
    let (x, y, z) = (
        || float([2, 3, 8]),
        || float([2, 3, 8, 9]),
        || float([2, 3, 8, 9, 4]),
    );
    let options = || InterpolateOptionsIr {
        mode: InterpolateModeIr::Bicubic,
        align_corners: true,
    };
    let windows = Unfold4dOptionsIr {
        stride: [2, 1],
        padding: [1, 0],
        dilation: [1, 2],
    };
    vec![
        Op::AdaptiveAvgPool1d(AdaptiveAvgPool1dOpIr::create(x(), 5, id)),
        Op::AdaptiveAvgPool2d(AdaptiveAvgPool2dOpIr::create(y(), [5, 4], id)),
        Op::AdaptiveAvgPool3d(AdaptiveAvgPool3dOpIr::create(z(), [5, 4, 2], id)),
        Op::AdaptiveAvgPool1dBackward(AdaptiveAvgPool1dBackwardOpIr::create(
            x(),
            float([2, 3, 5]),
            id,
        )),
        Op::AdaptiveAvgPool2dBackward(AdaptiveAvgPool2dBackwardOpIr::create(
            y(),
            float([2, 3, 5, 4]),
            id,
        )),
        Op::AdaptiveAvgPool3dBackward(AdaptiveAvgPool3dBackwardOpIr::create(
            z(),
            float([2, 3, 5, 4, 2]),
            id,
        )),
        Op::Interpolate(InterpolateOpIr::create(y(), [16, 3], options(), id)),
        Op::InterpolateBackward(InterpolateBackwardOpIr::create(
            y(),
            float([2, 3, 16, 3]),
            [16, 3],
            options(),
            id,
        )),
        Op::Unfold4d(Unfold4dOpIr::create(y(), [3, 2], windows, id)),
    ]
}

fn sequences() -> Vec<ModuleOperationIr> {
    use ModuleOperationIr as Op;
    let options = AttentionOptionsIr {
        scale: None,
        softcap: Some(ScalarIr::Float(30.0)),
        is_causal: true,
    };
    let (probs, targets) = (|| float([7, 2, 5]), || int([2, 3]));
    vec![
        Op::Embedding(EmbeddingOpIr::create(float([9, 4]), int([2, 6]), id)),
        Op::EmbeddingBackward(EmbeddingBackwardOpIr::create(
            float([9, 4]),
            float([2, 6, 4]),
            int([2, 6]),
            id,
        )),
        Op::Attention(AttentionOpIr::create(
            float([2, 4, 5, 8]),
            float([2, 2, 7, 8]),
            float([2, 2, 7, 6]),
            Some(boolean([2, 1, 5, 7])),
            Some(float([1, 4, 1, 7])),
            options,
            id,
        )),
        Op::CtcLoss(CtcLossOpIr::create(
            probs(),
            targets(),
            int([2]),
            int([2]),
            0,
            id,
        )),
        Op::CtcLossBackward(CtcLossBackwardOpIr::create(
            probs(),
            targets(),
            int([2]),
            int([2]),
            float([2]),
            0,
            id,
        )),
    ]
}
