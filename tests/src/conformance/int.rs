//! Integer arithmetic and bits.

use burn::tensor::{DType, Device, Int, Tensor};

use super::case::Case;
use super::data::ints;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = arithmetic();
    cases.extend(bitwise());
    cases.extend(widths());
    cases
}

fn a(device: &Device) -> Tensor<2, Int> {
    ints(device, [4, 5], 1, -30, 31)
}

fn b(device: &Device) -> Tensor<2, Int> {
    ints(device, [4, 5], 2, -30, 31)
}

/// Returns integers for use as divisors and shifts.
fn positive(device: &Device) -> Tensor<2, Int> {
    ints(device, [4, 5], 3, 1, 8)
}

fn arithmetic() -> Vec<Case> {
    vec![
        Case::exact("int.add", |d| {
            (a(d) + b(d), a(d) + ints(d, [1, 5], 4, -9, 9))
        }),
        Case::exact("int.add_scalar", |d| a(d) + 17),
        Case::exact("int.sub", |d| a(d) - b(d)),
        Case::exact("int.sub_scalar", |d| a(d) - 17),
        Case::exact("int.mul", |d| a(d) * b(d)),
        Case::exact("int.mul_scalar", |d| a(d) * -3),
        // With different signs, truncation and flooring give different results.
        Case::exact("int.div", |d| (a(d) / positive(d), a(d) / -positive(d))),
        Case::exact("int.div_scalar", |d| {
            (a(d).div_scalar(4), a(d).div_scalar(-7))
        }),
        Case::exact("int.remainder", |d| {
            (a(d) % positive(d), a(d) % -positive(d))
        }),
        Case::exact("int.remainder_scalar", |d| {
            (a(d).remainder_scalar(7), a(d) % -4)
        }),
        Case::exact("int.neg", |d| -a(d)),
        Case::exact("int.abs", |d| a(d).abs()),
        Case::exact("int.sign", |d| ints(d, [9], 1, -2, 3).sign()),
        Case::exact("int.square", |d| a(d).square()),
        Case::exact("int.powi", |d| ints(d, [4, 5], 1, -4, 5).powi(positive(d))),
        Case::exact("int.powi_scalar", |d| {
            (a(d).powi_scalar(3), a(d).powi_scalar(0))
        }),
        Case::exact("int.clamp", |d| {
            (a(d).clamp(-7, 11), a(d).clamp_min(-2), a(d).clamp_max(3))
        }),
        Case::exact("int.max_pair", |d| {
            (a(d).max_pair(b(d)), a(d).min_pair(b(d)))
        }),
        Case::exact("int.float", |d| a(d).float()),
    ]
}

fn bitwise() -> Vec<Case> {
    vec![
        Case::exact("int.bitwise_and", |d| a(d).bitwise_and(b(d))),
        Case::exact("int.bitwise_and_scalar", |d| a(d).bitwise_and_scalar(13)),
        Case::exact("int.bitwise_or", |d| a(d).bitwise_or(b(d))),
        Case::exact("int.bitwise_or_scalar", |d| a(d).bitwise_or_scalar(6)),
        Case::exact("int.bitwise_xor", |d| a(d).bitwise_xor(b(d))),
        Case::exact("int.bitwise_xor_scalar", |d| a(d).bitwise_xor_scalar(-11)),
        Case::exact("int.bitwise_not", |d| a(d).bitwise_not()),
        Case::exact("int.bitwise_left_shift", |d| {
            a(d).bitwise_left_shift(positive(d))
        }),
        Case::exact("int.bitwise_left_shift_scalar", |d| {
            a(d).bitwise_left_shift_scalar(3)
        }),
        Case::exact("int.bitwise_right_shift", |d| {
            a(d).bitwise_right_shift(positive(d))
        }),
        Case::exact("int.bitwise_right_shift_scalar", |d| {
            a(d).bitwise_right_shift_scalar(2)
        }),
    ]
}

/// Arithmetic whose results fit only in the wide type.
fn widths() -> Vec<Case> {
    fn wide(device: &Device, dtype: DType) -> Tensor<1, Int> {
        Tensor::from_data([3i64, 70_000, 1_000_003, 2_000_000_011], (device, dtype))
    }
    vec![
        Case::exact("int.mul/i64", |d| {
            let x = wide(d, DType::I64);
            (
                x.clone() * x.clone().flip([0]),
                x.clone().sum(),
                x * -4_000_000_007i64,
            )
        })
        .needs(&[DType::I64]),
        Case::exact("int.add/u32", |d| wide(d, DType::U32) + wide(d, DType::U32))
            .needs(&[DType::U32]),
        Case::exact("int.mul/u64", |d| {
            let x = wide(d, DType::U64);
            (x.clone() * x.clone(), x.max())
        })
        .needs(&[DType::U64]),
        Case::exact("int.add/u8", |d| {
            let x = Tensor::<1, Int>::from_data([3u8, 100, 120], (d, DType::U8));
            (
                x.clone() + x.clone(),
                x.clone().flip([0]) / 7u32,
                x.greater_scalar(99),
            )
        })
        .needs(&[DType::U8]),
        Case::exact("int.mul/i16", |d| {
            let x = Tensor::<1, Int>::from_data([-181i16, 7, 180], (d, DType::I16));
            (x.clone() * x.clone(), x.sort(0))
        })
        .needs(&[DType::I16]),
    ]
}
