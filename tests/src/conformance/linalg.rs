//! Products of vectors, matrices and batches of them.

use burn::tensor::{Int, Tensor, einsum};

use super::case::Case;
use super::data::{floats, ints};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = matmul();
    cases.extend(products());
    cases
}

fn matmul() -> Vec<Case> {
    vec![
        Case::approx("linalg.matmul", |d| {
            floats(d, [3, 5], 1).matmul(floats(d, [5, 4], 2))
        }),
        Case::approx("linalg.matmul/batch", |d| {
            floats(d, [2, 3, 4, 5], 1).matmul(floats(d, [2, 3, 5, 2], 2))
        }),
        Case::approx("linalg.matmul/broadcast_left", |d| {
            floats(d, [1, 4, 5], 1).matmul(floats(d, [3, 5, 2], 2))
        }),
        Case::approx("linalg.matmul/broadcast_both", |d| {
            floats(d, [2, 1, 4, 3], 1).matmul(floats(d, [1, 3, 3, 2], 2))
        }),
        Case::approx("linalg.matmul/transposed", |d| {
            let (a, b) = (floats(d, [5, 3], 1), floats(d, [4, 5], 2));
            a.transpose().matmul(b.transpose())
        }),
        Case::approx("linalg.matmul/vectors", |d| {
            let (row, column) = (floats(d, [1, 7], 1), floats(d, [7, 1], 2));
            (row.clone().matmul(column.clone()), column.matmul(row))
        }),
        Case::approx("linalg.matmul/large", |d| {
            floats(d, [67, 129], 1).matmul(floats(d, [129, 71], 2))
        }),
        Case::exact("linalg.matmul/int", |d| {
            ints(d, [3, 4], 1, -9, 10).matmul(ints(d, [4, 2], 2, -9, 10))
        }),
    ]
}

fn products() -> Vec<Case> {
    vec![
        Case::approx("linalg.dot", |d| floats(d, [9], 1).dot(floats(d, [9], 2))),
        Case::exact("linalg.dot/int", |d| {
            let int: Tensor<1, Int> = ints(d, [9], 1, -9, 10);
            int.dot(ints(d, [9], 2, -9, 10))
        }),
        Case::approx("linalg.cross", |d| {
            let (a, b) = (floats(d, [2, 3, 4], 1), floats(d, [2, 3, 4], 2));
            a.cross(b, 1)
        }),
        Case::approx("linalg.cov", |d| {
            let x = floats(d, [4, 6], 1);
            (x.clone().cov(1, 1), x.cov(0, 0))
        }),
        Case::approx("linalg.einsum", |d| {
            let (a, b) = (floats(d, [2, 3, 4], 1), floats(d, [2, 4, 5], 2));
            let y: Tensor<3> = einsum!("bij,bjk->kbi", a, b);
            y
        }),
        Case::approx("linalg.einsum/diagonal", |d| {
            let x = floats(d, [4, 4], 1);
            let diagonal: Tensor<1> = einsum!("ii->i", &x);
            let trace: Tensor<1> = einsum!("ii->", x);
            (diagonal, trace)
        }),
        Case::approx("linalg.outer", |d| {
            let (a, b) = (floats(d, [3], 1), floats(d, [5], 2));
            a.unsqueeze_dim::<2>(1) * b.unsqueeze_dim::<2>(0)
        }),
    ]
}
