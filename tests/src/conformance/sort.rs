//! Sorting and related ops. Inputs have no ties where their order is unspecified.

use burn::tensor::{Device, Tensor};

use super::case::Case;
use super::data::{floats, ints, whole};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::exact("sort.sort", |d| [0, 1, 2].map(|dim| x(d).sort(dim))),
        Case::exact("sort.sort/ties", |d| whole(d, [3, 11], 1).sort(1)),
        Case::exact("sort.sort/int", |d| ints(d, [3, 7], 1, -9, 10).sort(1)),
        Case::exact("sort.sort/negative_dim", |d| x(d).sort(-2)),
        Case::exact("sort.sort/infinities", |d| {
            let inf = f32::INFINITY;
            Tensor::<1>::from_floats([1.0, -inf, 0.0, inf, -3.5], d).sort(0)
        }),
        Case::exact("sort.sort_descending", |d| {
            [0, 1, 2].map(|dim| x(d).sort_descending(dim))
        }),
        Case::exact("sort.sort_descending/int", |d| {
            ints(d, [3, 7], 1, -9, 10).sort_descending(0)
        }),
        Case::exact("sort.sort_with_indices", |d| {
            [0, 1, 2].map(|dim| x(d).sort_with_indices(dim))
        }),
        Case::exact("sort.sort_with_indices/int", |d| {
            distinct(d).sort_with_indices(0)
        }),
        Case::exact("sort.sort_descending_with_indices", |d| {
            x(d).sort_descending_with_indices(1)
        }),
        Case::exact("sort.argsort", |d| [0, 1, 2].map(|dim| x(d).argsort(dim))),
        Case::exact("sort.argsort/int", |d| distinct(d).argsort(0)),
        Case::exact("sort.argsort_descending", |d| x(d).argsort_descending(2)),
        Case::exact("sort.topk", |d| (x(d).topk(2, 1), distinct(d).topk(4, 0))),
        Case::exact("sort.topk_with_indices", |d| {
            (
                x(d).topk_with_indices(3, 2),
                distinct(d).topk_with_indices(2, 0),
            )
        }),
        Case::exact("sort.argtopk", |d| {
            (x(d).argtopk(2, 0), distinct(d).argtopk(3, 0))
        }),
    ]
}

fn x(device: &Device) -> Tensor<3> {
    floats(device, [3, 4, 5], 1)
}

fn distinct(device: &Device) -> Tensor<1, burn::tensor::Int> {
    Tensor::from_ints([5, -3, 8, 0, 12, -7, 4], device)
}
