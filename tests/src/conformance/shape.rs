//! Ops that move elements without computing anything.

use burn::tensor::ops::PadMode;
use burn::tensor::{Device, Tensor};

use super::case::Case;
use super::data::{bools, floats, ints};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = views();
    cases.extend(ranks());
    cases.extend(joins());
    cases.extend(borders());
    cases
}

fn x(device: &Device) -> Tensor<3> {
    floats(device, [2, 3, 4], 1)
}

fn views() -> Vec<Case> {
    vec![
        Case::exact("shape.reshape", |d| x(d).reshape([4, 6])),
        Case::exact("shape.reshape/inferred", |d| {
            (x(d).reshape([3, -1]), x(d).reshape([0, -1]))
        }),
        Case::exact("shape.reshape/non_contiguous", |d| {
            x(d).permute([2, 0, 1]).reshape([6, 4])
        }),
        Case::exact("shape.transpose", |d| {
            (
                x(d).transpose(),
                ints(d, [2, 5], 1, -9, 9).transpose(),
                bools(d, [3, 4], 1).transpose(),
            )
        }),
        Case::exact("shape.t", |d| floats(d, [2, 5], 1).t()),
        Case::exact("shape.swap_dims", |d| {
            (x(d).swap_dims(0, 2), x(d).swap_dims(-1, -2))
        }),
        Case::exact("shape.permute", |d| {
            (x(d).permute([2, 0, 1]), x(d).permute([1, 2, 0]))
        }),
        Case::exact("shape.permute/int_bool", |d| {
            let int = ints(d, [2, 3, 4], 1, -9, 9).permute([1, 0, 2]);
            (int, bools(d, [2, 3, 4], 1).permute([2, 1, 0]))
        }),
        Case::exact("shape.movedim", |d| {
            (x(d).movedim(0, 2), x(d).movedim(vec![0, 1], vec![1, 2]))
        }),
        Case::exact("shape.flip", |d| (x(d).flip([1]), x(d).flip([0, 2]))),
        Case::exact("shape.flip/int_bool", |d| {
            (
                ints(d, [2, 3], 1, -9, 9).flip([1]),
                bools(d, [3, 2], 1).flip([0, 1]),
            )
        }),
        Case::exact("shape.roll", |d| x(d).roll(&[1, -1], &[2, 1])),
        Case::exact("shape.roll_dim", |d| {
            (x(d).roll_dim(5, 1), x(d).roll_dim(-1, 0))
        }),
        Case::exact("shape.expand", |d| {
            let row = floats(d, [1, 3, 1], 1);
            (row.clone().expand([2, 3, 4]), row.expand([5, 2, 3, -1]))
        }),
        Case::exact("shape.expand/int_bool", |d| {
            (
                ints(d, [3, 1], 1, -9, 9).expand([3, 4]),
                bools(d, [1, 3], 1).expand([2, 3]),
            )
        }),
        Case::exact("shape.unfold", |d| {
            (
                x(d).unfold::<4, _>(2, 2, 1),
                ints(d, [7], 1, -9, 9).unfold::<2, _>(0, 3, 2),
                bools(d, [7], 1).unfold::<2, _>(0, 2, 3),
            )
        }),
    ]
}

fn ranks() -> Vec<Case> {
    vec![
        Case::exact("shape.flatten", |d| {
            (x(d).flatten::<1>(0, 2), x(d).flatten::<2>(1, 2))
        }),
        Case::exact("shape.squeeze", |d| floats(d, [1, 3, 1], 1).squeeze::<1>()),
        Case::exact("shape.squeeze_dim", |d| {
            floats(d, [2, 1, 3], 1).squeeze_dim::<2>(1)
        }),
        Case::exact("shape.squeeze_dims", |d| {
            floats(d, [1, 2, 1, 3], 1).squeeze_dims::<2>(&[0, 2])
        }),
        Case::exact("shape.unsqueeze", |d| floats(d, [2, 3], 1).unsqueeze::<4>()),
        Case::exact("shape.unsqueeze_dim", |d| {
            [0, 1, 2].map(|dim| floats(d, [2, 3], 1).unsqueeze_dim::<3>(dim))
        }),
        Case::exact("shape.unsqueeze_dims", |d| {
            floats(d, [2, 3], 1).unsqueeze_dims::<5>(&[0, 2, -1])
        }),
    ]
}

fn joins() -> Vec<Case> {
    vec![
        Case::exact("shape.cat", |d| {
            [0, 1].map(|dim| Tensor::cat(vec![floats(d, [2, 2], 1), floats(d, [2, 2], 2)], dim))
        }),
        Case::exact("shape.cat/uneven", |d| {
            let parts = [1, 3, 2].map(|len| floats(d, [2, len, 3], len as u32));
            Tensor::cat(parts.to_vec(), 1)
        }),
        Case::exact("shape.cat/int_bool", |d| {
            let int = Tensor::cat(
                vec![ints(d, [2, 2], 1, -9, 9), ints(d, [2, 1], 2, -9, 9)],
                1,
            );
            (
                int,
                Tensor::cat(vec![bools(d, [1, 3], 1), bools(d, [2, 3], 2)], 0),
            )
        }),
        Case::exact("shape.stack", |d| {
            let parts = || vec![floats(d, [2, 3], 1), floats(d, [2, 3], 2)];
            [0, 1, 2].map(|dim| Tensor::stack::<3>(parts(), dim))
        }),
        Case::exact("shape.repeat", |d| {
            (x(d).repeat(&[2, 1, 3]), bools(d, [2, 2], 1).repeat(&[1, 2]))
        }),
        Case::exact("shape.repeat_dim", |d| {
            (
                x(d).repeat_dim(1, 2),
                ints(d, [2, 3], 1, -9, 9).repeat_dim(0, 3),
            )
        }),
        Case::exact("shape.chunk", |d| floats(d, [3, 7], 1).chunk(3, 1)),
        Case::exact("shape.split", |d| floats(d, [3, 7], 1).split(3, 1)),
        Case::exact("shape.split_with_sizes", |d| {
            floats(d, [3, 7], 1).split_with_sizes(vec![1, 4, 2], 1)
        }),
        Case::exact("shape.narrow", |d| {
            (x(d).narrow(2, 1, 2), x(d).narrow(0, 1, 1))
        }),
        Case::exact("shape.iter_dim", |d| {
            x(d).iter_dim(1).rev().collect::<Vec<_>>()
        }),
    ]
}

fn borders() -> Vec<Case> {
    vec![
        Case::exact("shape.pad", |d| x(d).pad((1, 2, 0, 3), 1.5)),
        Case::exact("shape.pad/all_axes", |d| {
            x(d).pad([(1, 0), (0, 2), (3, 1)], PadMode::Constant(-2.0))
        }),
        Case::exact("shape.pad/reflect", |d| {
            x(d).pad([(1, 2), (3, 1)], PadMode::Reflect)
        }),
        Case::exact("shape.pad/edge", |d| {
            x(d).pad([(2, 1), (0, 3)], PadMode::Edge)
        }),
        Case::exact("shape.pad/int", |d| {
            ints(d, [2, 3], 1, -9, 9).pad((1, 1, 2, 0), 7)
        }),
        Case::exact("shape.triu", |d| {
            [-1, 0, 2].map(|diagonal| floats(d, [3, 4], 1).triu(diagonal))
        }),
        Case::exact("shape.tril", |d| {
            [-1, 0, 2].map(|diagonal| ints(d, [4, 3], 1, 1, 99).tril(diagonal))
        }),
    ]
}
