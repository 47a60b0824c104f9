//! Reductions and scans, over all elements, one axis or several.

use burn::tensor::{Device, Int, Tensor};

use super::case::Case;
use super::data::{between, bools, floats, ints, whole};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = sums();
    cases.extend(extremes());
    cases.extend(statistics());
    cases.extend(scans());
    cases.extend(ints_and_bools());
    cases
}

fn x(device: &Device) -> Tensor<3> {
    floats(device, [3, 4, 5], 1)
}

fn n(device: &Device) -> Tensor<3, Int> {
    ints(device, [3, 4, 5], 1, -9, 10)
}

/// A reduction along each axis in turn.
fn each<T>(reduce: impl Fn(usize) -> T) -> [T; 3] {
    [0, 1, 2].map(reduce)
}

fn sums() -> Vec<Case> {
    vec![
        Case::approx("reduce.sum", |d| x(d).sum()),
        Case::approx("reduce.sum/large", |d| floats(d, [131, 257], 1).sum()),
        Case::approx("reduce.sum_dim", |d| each(|dim| x(d).sum_dim(dim))),
        Case::approx("reduce.sum_dim/non_contiguous", |d| {
            each(|dim| x(d).permute([2, 0, 1]).sum_dim(dim))
        }),
        Case::approx("reduce.sum_dims", |d| x(d).sum_dims(&[0, 2])),
        Case::approx("reduce.sum_dims_squeeze", |d| {
            x(d).sum_dims_squeeze::<1, _>(&[2, 0])
        }),
        Case::approx("reduce.mean", |d| x(d).mean()),
        Case::approx("reduce.mean_dim", |d| each(|dim| x(d).mean_dim(dim))),
        Case::approx("reduce.mean_dims", |d| x(d).mean_dims(&[1, 2])),
        Case::approx("reduce.prod", |d| x(d).prod()),
        Case::approx("reduce.prod_dim", |d| each(|dim| x(d).prod_dim(dim))),
        Case::approx("reduce.prod_dims", |d| x(d).prod_dims(&[0, 1])),
    ]
}

fn extremes() -> Vec<Case> {
    vec![
        Case::exact("reduce.max", |d| x(d).max()),
        Case::exact("reduce.max_dim", |d| each(|dim| x(d).max_dim(dim))),
        Case::exact("reduce.max_dims", |d| x(d).max_dims(&[0, 2])),
        Case::exact("reduce.max_dim_with_indices", |d| {
            each(|dim| x(d).max_dim_with_indices(dim))
        }),
        Case::exact("reduce.max_abs", |d| x(d).max_abs()),
        Case::exact("reduce.max_abs_dim", |d| each(|dim| x(d).max_abs_dim(dim))),
        Case::exact("reduce.max_abs_dims", |d| x(d).max_abs_dims(&[1, 2])),
        Case::exact("reduce.min", |d| x(d).min()),
        Case::exact("reduce.min_dim", |d| each(|dim| x(d).min_dim(dim))),
        Case::exact("reduce.min_dims", |d| x(d).min_dims(&[0, 1])),
        Case::exact("reduce.min_dim_with_indices", |d| {
            each(|dim| x(d).min_dim_with_indices(dim))
        }),
        Case::exact("reduce.argmax", |d| each(|dim| x(d).argmax(dim))),
        Case::exact("reduce.argmax/ties", |d| whole(d, [4, 9], 1).argmax(1)),
        Case::exact("reduce.argmin", |d| each(|dim| x(d).argmin(dim))),
        Case::exact("reduce.max_dim/nan", |d| {
            let x = Tensor::<2>::from_floats([[1.0, f32::NAN, 3.0], [-1.0, -2.0, -3.0]], d);
            (x.clone().max_dim(1), x.min_dim(1))
        }),
    ]
}

fn statistics() -> Vec<Case> {
    vec![
        Case::approx("reduce.var", |d| each(|dim| x(d).var(dim))),
        Case::approx("reduce.var_bias", |d| each(|dim| x(d).var_bias(dim))),
        Case::approx("reduce.var_mean", |d| each(|dim| x(d).var_mean(dim))),
        Case::approx("reduce.var_mean_bias", |d| {
            each(|dim| x(d).var_mean_bias(dim))
        }),
        Case::exact("reduce.median", |d| each(|dim| x(d).median(dim))),
        Case::exact("reduce.median_with_indices", |d| {
            x(d).median_with_indices(2)
        }),
    ]
}

fn scans() -> Vec<Case> {
    vec![
        Case::approx("reduce.cumsum", |d| each(|dim| x(d).cumsum(dim))),
        Case::approx("reduce.cumprod", |d| each(|dim| x(d).cumprod(dim))),
        Case::exact("reduce.cummax", |d| each(|dim| x(d).cummax(dim))),
        Case::exact("reduce.cummin", |d| each(|dim| x(d).cummin(dim))),
    ]
}

fn ints_and_bools() -> Vec<Case> {
    vec![
        Case::exact("reduce.sum/int", |d| {
            (n(d).sum(), n(d).sum_dim(1), n(d).sum_dims(&[0, 2]))
        }),
        Case::exact("reduce.mean/int", |d| (n(d).mean(), n(d).mean_dim(2))),
        Case::exact("reduce.prod/int", |d| {
            let small = ints(d, [3, 4], 1, 1, 5);
            (small.clone().prod(), small.prod_dim(0))
        }),
        Case::exact("reduce.max/int", |d| {
            (n(d).max(), n(d).max_dim(1), n(d).max_dim_with_indices(2))
        }),
        Case::exact("reduce.min/int", |d| {
            (n(d).min(), n(d).min_dim(2), n(d).min_dim_with_indices(0))
        }),
        Case::exact("reduce.max_abs/int", |d| {
            (n(d).max_abs(), n(d).max_abs_dim(2))
        }),
        Case::exact("reduce.argmax/int", |d| (n(d).argmax(2), n(d).argmin(0))),
        Case::exact("reduce.cumsum/int", |d| {
            (n(d).cumsum(1), n(d).cummax(2), n(d).cummin(0))
        }),
        Case::exact("reduce.cumprod/int", |d| {
            ints(d, [3, 4], 2, -3, 4).cumprod(1)
        }),
        Case::exact("reduce.any", |d| {
            let none = between(d, [2, 3], 1, 1.0, 2.0).lower_scalar(0.0);
            (bools(d, [2, 3], 1).any(), none.any())
        }),
        Case::exact("reduce.any_dim", |d| {
            let sparse = floats(d, [4, 3], 1).greater_scalar(1.7);
            (sparse.clone().any_dim(0), sparse.any_dim(1))
        }),
        Case::exact("reduce.all", |d| {
            let all = between(d, [2, 3], 1, 1.0, 2.0).greater_scalar(0.0);
            (bools(d, [2, 3], 1).all(), all.all())
        }),
        Case::exact("reduce.all_dim", |d| {
            let dense = floats(d, [4, 3], 1).greater_scalar(-1.2);
            (dense.clone().all_dim(0), dense.all_dim(1))
        }),
        Case::exact("reduce.any/numbers", |d| {
            let (x, n) = (whole(d, [4, 3], 1), ints(d, [4, 3], 2, -1, 2));
            let floats = (
                x.clone().any(),
                x.clone().all(),
                x.clone().any_dim(0),
                x.all_dim(1),
            );
            (
                floats,
                n.clone().any(),
                n.clone().all(),
                (n.clone().any_dim(1), n.all_dim(0)),
            )
        }),
    ]
}
