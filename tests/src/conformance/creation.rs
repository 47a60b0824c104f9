//! Creating tensors by fill ops and from host data, and reading them back.

use burn::tensor::grid::{GridIndexing, GridSparsity, IndexPos, meshgrid, meshgrid_stack};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData, Transaction};

use super::case::Case;
use super::data::{bools, floats, ints, values};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = filled();
    cases.extend(filled_like_another());
    cases.extend(ranges());
    cases.extend(host_data());
    cases.extend(moved());
    cases
}

fn filled() -> Vec<Case> {
    vec![
        // The values of an empty tensor are unspecified; the case checks its shape.
        Case::exact("creation.empty", |d| {
            let int = Tensor::<1, Int>::empty([4], d).zeros_like();
            let bool = Tensor::<2, Bool>::empty([2, 3], d).zeros_like();
            (Tensor::<3>::empty([2, 1, 3], d).zeros_like(), int, bool)
        }),
        Case::exact("creation.empty_like", |d| {
            floats(d, [3, 2], 1).empty_like().ones_like()
        }),
        Case::exact("creation.empty/zero_elements", |d| {
            let none = Tensor::<2>::zeros([0, 3], d);
            Tensor::cat(vec![none, floats(d, [2, 3], 1)], 0)
        }),
        Case::exact("creation.zeros", |d| {
            let int = Tensor::<1, Int>::zeros([4], d);
            let bool = Tensor::<2, Bool>::zeros([2, 3], d);
            (Tensor::<2>::zeros([2, 3], d), int, bool)
        }),
        Case::exact("creation.ones", |d| {
            let int = Tensor::<1, Int>::ones([4], d);
            let bool = Tensor::<2, Bool>::ones([2, 3], d);
            (Tensor::<2>::ones([2, 3], d), int, bool)
        }),
        Case::exact("creation.full", |d| Tensor::<2>::full([3, 2], -1.625, d)),
        Case::exact("creation.full/int", |d| {
            Tensor::<2, Int>::full([3, 2], -77, d)
        }),
        Case::exact("creation.full/bool", |d| {
            Tensor::<2, Bool>::full([3, 2], true, d)
        }),
        Case::exact("creation.full/non_finite", |d| {
            let nan = Tensor::<1>::full([2], f32::NAN, d);
            (nan, Tensor::<1>::full([2], f32::NEG_INFINITY, d))
        }),
        Case::exact("creation.full/f64", |d| {
            Tensor::<1>::full([3], 0.1f64, (d, DType::F64))
        })
        .needs(&[DType::F64]),
    ]
}

fn filled_like_another() -> Vec<Case> {
    vec![
        Case::exact("creation.zeros_like", |d| {
            (
                floats(d, [2, 3], 1).zeros_like(),
                ints(d, [4], 1, 1, 9).zeros_like(),
            )
        }),
        Case::exact("creation.ones_like", |d| {
            (
                floats(d, [2, 3], 1).ones_like(),
                ints(d, [4], 1, 5, 9).ones_like(),
            )
        }),
        Case::exact("creation.full_like", |d| {
            (
                floats(d, [2, 3], 1).full_like(2.5),
                ints(d, [4], 1, 5, 9).full_like(-3),
            )
        }),
        Case::exact("creation.eye", |d| {
            (Tensor::<2>::eye(3, d), Tensor::<2, Int>::eye(4, d))
        }),
        Case::exact("creation.triu_mask", |d| {
            Tensor::<2, Bool>::triu_mask([3, 5], 1, d)
        }),
        Case::exact("creation.tril_mask", |d| {
            Tensor::<2, Bool>::tril_mask([4, 3], -1, d)
        }),
        Case::exact("creation.diag_mask", |d| {
            Tensor::<2, Bool>::diag_mask([4, 5], 2, d)
        }),
    ]
}

fn ranges() -> Vec<Case> {
    vec![
        Case::exact("creation.arange", |d| Tensor::<1, Int>::arange(-3..7, d)),
        Case::exact("creation.arange_step", |d| {
            Tensor::<1, Int>::arange_step(-5..12, 4, d)
        }),
        Case::exact("creation.cartesian_grid", |d| {
            Tensor::<2, Int>::cartesian_grid::<_, 3>([2, 3], d)
        }),
        Case::exact("creation.meshgrid", |d| {
            let [x, y] = [Tensor::arange(0..3, d), Tensor::arange(5..9, d)];
            let dense = meshgrid(&[x.clone(), y.clone()], GridIndexing::Matrix);
            let swapped = meshgrid(&[x.clone(), y.clone()], GridIndexing::Cartesian);
            (dense, swapped, meshgrid(&[x, y], GridSparsity::Sparse))
        }),
        Case::exact("creation.meshgrid_stack", |d| {
            let [x, y] = [floats(d, [3], 1), floats(d, [2], 2)];
            let first = meshgrid_stack::<2, 3, _>(&[x.clone(), y.clone()], IndexPos::First);
            (first, meshgrid_stack::<2, 3, _>(&[x, y], IndexPos::Last))
        }),
        Case::exact("creation.one_hot", |d| {
            let classes = Tensor::<1, Int>::from_ints([3, 0, 2, 2], d);
            (
                classes.clone().one_hot::<2>(5),
                classes.float().one_hot::<2>(4),
            )
        }),
        Case::exact("creation.one_hot_fill", |d| {
            let classes = Tensor::<2, Int>::from_ints([[2, 0, 1], [1, 1, 0]], d);
            classes.float().one_hot_fill::<3>(3, 5.0, -1.5, 1)
        }),
    ]
}

fn host_data() -> Vec<Case> {
    vec![
        Case::exact("creation.from_floats", |d| {
            Tensor::<2>::from_floats([[0.1, -2.5, 3e-30], [f32::MAX, f32::MIN_POSITIVE, -0.0]], d)
        }),
        Case::exact("creation.from_ints", |d| {
            Tensor::<2, Int>::from_ints([[i32::MIN, -1], [0, i32::MAX]], d)
        }),
        Case::exact("creation.from_bool", |d| {
            Tensor::<2, Bool>::from_bool(TensorData::from([[true, false], [false, false]]), d)
        }),
        Case::exact("creation.from_data", |d| {
            // The tensors get the device's default types, not the types of the data.
            let float = Tensor::<1>::from_data([1i64, -2, 300], d);
            (float, Tensor::<1, Int>::from_data([7u8, 200], d))
        }),
        Case::exact("creation.from_data/large", |d| {
            Tensor::<2>::from_data(values(&[257, 301], 1, -1.0, 1.0), d)
        }),
        Case::exact("creation.from_data/f16", |d| typed(d, DType::F16)).needs(&[DType::F16]),
        Case::exact("creation.from_data/bf16", |d| typed(d, DType::BF16)).needs(&[DType::BF16]),
        Case::exact("creation.from_data/f64", |d| typed(d, DType::F64)).needs(&[DType::F64]),
        Case::exact("creation.from_data/i64", |d| {
            Tensor::<1, Int>::from_data([i64::MIN, -1, i64::MAX], (d, DType::I64))
        })
        .needs(&[DType::I64]),
        Case::exact("creation.from_data/small_ints", |d| {
            let i8 = Tensor::<1, Int>::from_data([i8::MIN, i8::MAX], (d, DType::I8));
            let i16 = Tensor::<1, Int>::from_data([i16::MIN, i16::MAX], (d, DType::I16));
            (i8, i16)
        })
        .needs(&[DType::I8, DType::I16]),
        Case::exact("creation.from_data/unsigned", |d| {
            let u8 = Tensor::<1, Int>::from_data([0u8, u8::MAX], (d, DType::U8));
            let u32 = Tensor::<1, Int>::from_data([0u32, u32::MAX], (d, DType::U32));
            let u64 = Tensor::<1, Int>::from_data([0u64, u64::MAX], (d, DType::U64));
            (u8, u32, u64)
        })
        .needs(&[DType::U8, DType::U32, DType::U64]),
    ]
}

fn moved() -> Vec<Case> {
    vec![
        Case::exact("creation.to_data", |d| {
            let x = floats(d, [3, 2], 1);
            let before = x.to_data();
            let transposed = x.clone().transpose().to_data();
            vec![
                before,
                transposed,
                (x.clone() + 1.0).into_data(),
                x.into_data(),
            ]
        }),
        Case::exact("creation.to_device", |d| {
            (
                floats(d, [3, 2], 1).to_device(d),
                bools(d, [3], 1).to_device(d),
            )
        }),
        Case::exact("creation.transaction", |d| {
            Transaction::default()
                .register(floats(d, [3, 2], 1).transpose())
                .register(ints(d, [4], 2, -9, 9) * 3)
                .register(bools(d, [5], 3).bool_not())
                .execute()
        }),
        Case::exact("creation.inplace", |d| {
            let mut x = floats(d, [3, 2], 1);
            let kept = x.clone();
            x.inplace(|x| x * 2.0 + 1.0);
            (x, kept)
        }),
    ]
}

fn typed(device: &Device, dtype: DType) -> Tensor<2> {
    Tensor::from_data(values(&[3, 4], 1, -3.0, 3.0), (device, dtype))
}
