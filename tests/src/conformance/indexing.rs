//! Reading and writing parts of a tensor: slices, indices, masks.

use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor, s};

use super::case::Case;
use super::data::{bools, floats, ints};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = slices();
    cases.extend(selections());
    cases.extend(scatters());
    cases.extend(masks());
    cases
}

fn x(device: &Device) -> Tensor<3> {
    floats(device, [3, 4, 5], 1)
}

fn n(device: &Device) -> Tensor<3, Int> {
    ints(device, [3, 4, 5], 1, -99, 99)
}

fn slices() -> Vec<Case> {
    vec![
        Case::exact("index.slice", |d| {
            (x(d).slice([1..3, 0..2]), x(d).slice(s![.., 2.., 1..4]))
        }),
        Case::exact("index.slice/steps", |d| {
            x(d).slice(s![0..3;2, 0..4;-1, ..;3])
        }),
        Case::exact("index.slice/negative", |d| {
            x(d).slice(s![-2.., ..-1, -3..-1])
        }),
        Case::exact("index.slice/int_bool", |d| {
            (
                n(d).slice(s![1, 1..3, ..;2]),
                bools(d, [4, 5], 1).slice(s![1..3, ..;-2]),
            )
        }),
        Case::exact("index.slice_assign", |d| {
            x(d).slice_assign(s![1..3, 0..2, 2..4], floats(d, [2, 2, 2], 2))
        }),
        Case::exact("index.slice_assign/steps", |d| {
            x(d).slice_assign(s![.., 0..4;2, ..;-1], floats(d, [3, 2, 5], 2))
        }),
        Case::exact("index.slice_assign/int_bool", |d| {
            let int = n(d).slice_assign(s![0..1, 1..3, 0..5], ints(d, [1, 2, 5], 2, 200, 300));
            let bool = bools(d, [4, 5], 1).slice_assign(s![1..3, 2..4], bools(d, [2, 2], 9));
            (int, bool)
        }),
        Case::exact("index.slice_fill", |d| {
            (
                x(d).slice_fill(s![1, .., 1..3], -7.5),
                n(d).slice_fill(s![.., 2..], 1234),
            )
        }),
        Case::exact("index.slice_dim", |d| {
            (x(d).slice_dim(1, 1..3), x(d).slice_dim(2, s![..;2]))
        }),
        Case::exact("index.select_dim", |d| {
            (x(d).select_dim::<2>(1, 2), x(d).select_dim::<2>(0, -1))
        }),
    ]
}

fn rows(device: &Device) -> Tensor<1, Int> {
    Tensor::from_ints([2, 0, 2, 1], device)
}

fn selections() -> Vec<Case> {
    vec![
        Case::exact("index.select", |d| {
            [0, 1, 2].map(|dim| x(d).select(dim, rows(d)))
        }),
        Case::exact("index.select/int_bool", |d| {
            (
                n(d).select(1, rows(d)),
                // Compared as integers, because Flex labels elements selected from booleans
                // as bytes.
                bools(d, [3, 4], 1).select(0, rows(d)).int(),
            )
        }),
        Case::exact("index.take", |d| {
            let indices = Tensor::<2, Int>::from_ints([[3, 1, 0], [2, 2, 1]], d);
            x(d).take::<2, 4>(1, indices)
        }),
        Case::exact("index.gather", |d| {
            let along = |dim, shape| x(d).gather(dim, ints(d, shape, 3, 0, 3));
            [
                along(0, [2, 4, 5]),
                along(1, [3, 6, 5]),
                along(2, [3, 4, 1]),
            ]
        }),
        Case::exact("index.gather/int_bool", |d| {
            let at = ints(d, [3, 6], 3, 0, 4);
            (
                ints(d, [3, 4], 1, -99, 99).gather(1, at.clone()),
                bools(d, [3, 4], 1).gather(1, at).int(),
            )
        }),
        Case::exact("index.gather_nd", |d| {
            let at = Tensor::<2, Int>::from_ints([[2, 1], [0, 3], [2, 0]], d);
            x(d).gather_nd::<2, 2>(at)
        }),
        Case::exact("index.gather_nd/int", |d| {
            let at = Tensor::<2, Int>::from_ints([[2, 1, 4], [0, 3, 0]], d);
            n(d).gather_nd::<2, 1>(at)
        }),
    ]
}

fn scatters() -> Vec<Case> {
    use IndexingUpdateOp::{Add, Assign, Max, Min, Mul};
    vec![
        // Some rows occur twice, and their updates must add up.
        Case::approx("index.select_assign", |d| {
            x(d).select_assign(0, rows(d), floats(d, [4, 4, 5], 2), Add)
        }),
        Case::exact("index.select_assign/int", |d| {
            n(d).select_assign(1, rows(d), ints(d, [3, 4, 5], 2, -9, 9), Add)
        }),
        Case::exact("index.select_assign/bool", |d| {
            bools(d, [3, 4], 1).select_assign(0, rows(d), bools(d, [4, 4], 2), Add)
        }),
        Case::approx("index.scatter", |d| {
            x(d).scatter(2, ints(d, [3, 4, 6], 3, 0, 5), floats(d, [3, 4, 6], 2), Add)
        }),
        Case::exact("index.scatter/int", |d| {
            n(d).scatter(
                0,
                ints(d, [2, 4, 5], 3, 0, 3),
                ints(d, [2, 4, 5], 2, -9, 9),
                Add,
            )
        }),
        Case::exact("index.scatter/bool", |d| {
            bools(d, [3, 4], 1).scatter(1, ints(d, [3, 2], 3, 0, 4), bools(d, [3, 2], 2), Add)
        }),
        Case::exact("index.scatter/assign", |d| {
            let at = Tensor::<2, Int>::from_ints([[3, 0], [1, 2], [0, 1]], d);
            floats(d, [3, 4], 1).scatter(1, at, floats(d, [3, 2], 2), Assign)
        }),
        Case::approx("index.scatter_nd", |d| {
            let at = Tensor::<2, Int>::from_ints([[2, 1], [0, 3], [2, 1]], d);
            x(d).scatter_nd::<2, 2>(at, floats(d, [3, 5], 2), Add)
        }),
        Case::approx("index.scatter_nd/updates", |d| {
            let at = || Tensor::<2, Int>::from_ints([[2, 1], [0, 3]], d);
            let update = |op| x(d).scatter_nd::<2, 2>(at(), floats(d, [2, 5], 2), op);
            [Assign, Mul, Min, Max].map(update)
        }),
        Case::exact("index.scatter_nd/int", |d| {
            let at = Tensor::<2, Int>::from_ints([[1], [0], [1]], d);
            n(d).scatter_nd::<2, 3>(at, ints(d, [3, 4, 5], 2, -9, 9), Add)
        }),
    ]
}

fn masks() -> Vec<Case> {
    vec![
        Case::exact("index.mask_where", |d| {
            let mask = bools(d, [3, 4, 5], 5);
            let int = n(d).mask_where(mask.clone(), ints(d, [3, 4, 5], 2, 200, 300));
            (x(d).mask_where(mask, floats(d, [3, 4, 5], 2)), int)
        }),
        Case::exact("index.mask_where/broadcast", |d| {
            x(d).mask_where(
                bools(d, [3, 4, 1], 5).expand([3, 4, 5]),
                floats(d, [3, 4, 5], 2),
            )
        }),
        Case::exact("index.mask_where/bool", |d| {
            bools(d, [3, 4], 1).mask_where(bools(d, [3, 4], 2), bools(d, [3, 4], 3))
        }),
        Case::exact("index.mask_fill", |d| {
            let mask = bools(d, [3, 4, 5], 5);
            (
                x(d).mask_fill(mask.clone(), f32::NEG_INFINITY),
                n(d).mask_fill(mask, -1000),
            )
        }),
        Case::exact("index.mask_fill/bool", |d| {
            bools(d, [3, 4], 1).mask_fill(bools(d, [3, 4], 2), true)
        }),
        // The result shape of these ops depends on the values.
        Case::exact("index.mask_select", |d| {
            let mask = bools(d, [3, 4, 5], 5);
            (x(d).mask_select(mask.clone()), n(d).mask_select(mask))
        }),
        Case::exact("index.nonzero", |d| bools(d, [3, 4], 5).nonzero()),
        Case::exact("index.argwhere", |d| x(d).greater_scalar(0.8).argwhere()),
    ]
}
