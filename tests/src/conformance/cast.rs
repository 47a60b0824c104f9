//! Changes of element type, and arithmetic in types other than the default.

use burn::tensor::quantization::{QuantScheme, QuantStore};
use burn::tensor::{DType, Device, FloatDType, Int, IntDType, Tensor, activation};

use super::case::{Case, Tolerance};
use super::data::{floats, ints, positive};

/// `burn-router` 0.22.1, which also serves every Remote device, treats a cast from one
/// integer type to another as unreachable code and ends the session.
const INT_CAST: &str = "burn-router 0.22.1 panics on BaseInt(Cast)";
const QUANTIZED: &str = "burn-router 0.22.1 has no quantized tensors";

pub(super) fn cases() -> Vec<Case> {
    let mut cases = conversions();
    cases.extend(int_casts());
    cases.extend(quantized());
    cases.extend(float_types());
    cases
}

fn conversions() -> Vec<Case> {
    vec![
        Case::exact("cast.int", |d| {
            let x = Tensor::<1>::from_floats([-2.9, -0.5, 0.5, 2.9, 1e6, -123456.7], d);
            x.int()
        }),
        Case::exact("cast.float", |d| ints(d, [3, 4], 1, -999, 999).float()),
        Case::exact("cast.f16", |d| floats(d, [3, 4], 1).cast(FloatDType::F16))
            .needs(&[DType::F16]),
        Case::exact("cast.f16/overflow", |d| {
            Tensor::<1>::from_floats([65504.0, 65520.0, 1e-8, -7e4], d).cast(FloatDType::F16)
        })
        .needs(&[DType::F16]),
        Case::exact("cast.bf16", |d| floats(d, [3, 4], 1).cast(FloatDType::BF16))
            .needs(&[DType::BF16]),
        Case::exact("cast.f64", |d| floats(d, [3, 4], 1).cast(FloatDType::F64))
            .needs(&[DType::F64]),
        Case::exact("cast.f32", |d| {
            let half = floats(d, [3, 4], 1).cast(FloatDType::F16);
            let double = floats(d, [3, 4], 1).cast(FloatDType::F64) / 3.0;
            (half.cast(FloatDType::F32), double.cast(FloatDType::F32))
        })
        .needs(&[DType::F16, DType::F64]),
        Case::exact("cast.float_to_int", |d| {
            (floats(d, [9], 1) * 50.0).cast(IntDType::I64)
        })
        .needs(&[DType::I64]),
        Case::exact("cast.int_to_float", |d| {
            ints(d, [9], 1, -999, 999).cast(FloatDType::F64)
        })
        .needs(&[DType::F64]),
    ]
}

fn int_casts() -> Vec<Case> {
    let cases = [
        Case::exact("cast.i64", |d| {
            (ints(d, [5], 1, -99, 99) * 7).cast(IntDType::I64)
        }),
        Case::exact("cast.i32", |d| {
            Tensor::<1, Int>::from_data([-5i64, 1 << 20], (d, DType::I64)).cast(IntDType::I32)
        }),
        Case::exact("cast.u8", |d| ints(d, [9], 1, 0, 256).cast(IntDType::U8)),
        Case::exact("cast.i8", |d| ints(d, [9], 1, -128, 128).cast(IntDType::I8)),
    ];
    let dtypes = &[DType::I64, DType::U8, DType::I8];
    cases.map(|case| case.needs(dtypes).gap(INT_CAST)).into()
}

fn quantized() -> Vec<Case> {
    let scheme = || QuantScheme::default().with_store(QuantStore::Native);
    vec![
        Case::approx("cast.quantize_dynamic", move |d| {
            floats(d, [4, 32], 1)
                .quantize_dynamic(&scheme())
                .dequantize()
        })
        .gap(QUANTIZED),
        Case::approx("cast.quantized_matmul", move |d| {
            let weights = floats(d, [32, 4], 1).quantize_dynamic(&scheme());
            floats(d, [3, 32], 2).matmul(weights)
        })
        .gap(QUANTIZED),
    ]
}

/// The usual ops in one float type.
fn sampler(device: &Device, dtype: FloatDType) -> Vec<Tensor<2>> {
    let x = floats(device, [4, 6], 1).cast(dtype);
    let p = positive(device, [4, 6], 2).cast(dtype);
    let w = floats(device, [6, 3], 3).cast(dtype);
    vec![
        x.clone() + p.clone() * 0.3,
        x.clone() / p.clone(),
        x.clone().exp(),
        p.clone().log(),
        p.sqrt(),
        x.clone().matmul(w),
        x.clone().sum_dim(1),
        x.clone().mean_dim(0),
        x.clone().max_dim(1),
        x.clone().transpose().sort(1),
        x.clone().slice([1..3, 2..5]),
        activation::softmax(x.clone(), 1),
        activation::gelu(x),
    ]
}

fn float_types() -> Vec<Case> {
    vec![
        Case::approx("cast.arithmetic/f16", |d| sampler(d, FloatDType::F16)).needs(&[DType::F16]),
        Case::approx("cast.arithmetic/bf16", |d| sampler(d, FloatDType::BF16))
            .needs(&[DType::BF16])
            .within(Tolerance::Relative(0.02)),
        Case::approx("cast.arithmetic/f64", |d| sampler(d, FloatDType::F64)).needs(&[DType::F64]),
        Case::approx("cast.mixed_chain", |d| {
            let half = floats(d, [3, 4], 1).cast(FloatDType::F16) * 3.0;
            half.cast(FloatDType::F32) + floats(d, [3, 4], 2)
        })
        .needs(&[DType::F16]),
    ]
}
