//! Element-wise float ops of one or two tensors.

use burn::tensor::{Device, Tensor, TensorData};

use super::case::Case;
use super::data::{between, floats, positive};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = exponential();
    cases.extend(trigonometric());
    cases.extend(rounding());
    cases.extend(arithmetic());
    cases.extend(classification());
    cases
}

/// Returns a float tensor whose axes have different sizes, so that swapped axes are
/// detected.
fn x(device: &Device) -> Tensor<3> {
    floats(device, [2, 3, 5], 1)
}

fn y(device: &Device) -> Tensor<3> {
    floats(device, [2, 3, 5], 2)
}

/// Returns values in the domain of logarithms and roots.
fn p(device: &Device) -> Tensor<3> {
    positive(device, [2, 3, 5], 3)
}

/// Returns values in `(-1, 1)`.
fn unit(device: &Device) -> Tensor<3> {
    between(device, [2, 3, 5], 4, -0.99, 0.99)
}

/// Returns special points of functions, and zeros of both signs.
fn edges(device: &Device) -> Tensor<1> {
    let inf = f32::INFINITY;
    Tensor::from_floats(
        [
            0.0,
            -0.0,
            1.0,
            -1.0,
            inf,
            -inf,
            f32::NAN,
            1e-38,
            88.9,
            -104.0,
        ],
        device,
    )
}

fn exponential() -> Vec<Case> {
    vec![
        Case::approx("math.exp", |d| (x(d).exp(), edges(d).exp())),
        Case::approx("math.log", |d| (p(d).log(), edges(d).log())),
        Case::approx("math.log1p", |d| (p(d).log1p(), edges(d).log1p())),
        Case::approx("math.sqrt", |d| (p(d).sqrt(), edges(d).sqrt())),
        Case::approx("math.square", |d| x(d).square()),
        Case::approx("math.recip", |d| (x(d).recip(), edges(d).recip())),
        Case::approx("math.erf", |d| x(d).erf()),
        Case::approx("math.powf", |d| p(d).powf(y(d))),
        Case::approx("math.powf_scalar", |d| {
            (p(d).powf_scalar(-1.7), p(d).powf_scalar(0.5))
        }),
        Case::approx("math.powi", |d| x(d).powi(y(d).floor())),
        Case::approx("math.powi_scalar", |d| {
            [0, 1, 2, 3, -1, -2].map(|power| x(d).powi_scalar(power))
        }),
        Case::approx("math.hypot", |d| x(d).hypot(y(d))),
    ]
}

fn trigonometric() -> Vec<Case> {
    vec![
        Case::approx("math.sin", |d| x(d).sin()),
        Case::approx("math.cos", |d| x(d).cos()),
        Case::approx("math.tan", |d| unit(d).tan()),
        Case::approx("math.sinh", |d| x(d).sinh()),
        Case::approx("math.cosh", |d| x(d).cosh()),
        Case::approx("math.tanh", |d| x(d).tanh()),
        Case::approx("math.asin", |d| unit(d).asin()),
        Case::approx("math.acos", |d| unit(d).acos()),
        Case::approx("math.atan", |d| x(d).atan()),
        Case::approx("math.asinh", |d| x(d).asinh()),
        Case::approx("math.acosh", |d| (p(d) + 1.0).acosh()),
        Case::approx("math.atanh", |d| unit(d).atanh()),
        Case::approx("math.atan2", |d| x(d).atan2(y(d))),
        Case::approx("math.deg2rad", |d| (x(d) * 90.0).deg2rad()),
        Case::approx("math.rad2deg", |d| x(d).rad2deg()),
    ]
}

/// Returns halves, where rounding modes differ, and other values.
fn halves(device: &Device) -> Tensor<1> {
    Tensor::from_floats([-2.5, -1.5, -0.5, -0.2, 0.5, 1.5, 2.5, 2.4999, 7.0], device)
}

fn rounding() -> Vec<Case> {
    vec![
        Case::exact("math.round", |d| halves(d).round()),
        Case::exact("math.floor", |d| halves(d).floor()),
        Case::exact("math.ceil", |d| halves(d).ceil()),
        Case::exact("math.trunc", |d| halves(d).trunc()),
        Case::exact("math.abs", |d| (x(d).abs(), edges(d).abs())),
        Case::exact("math.neg", |d| (x(d).neg(), -edges(d))),
        Case::exact("math.sign", |d| halves(d).sign()),
        Case::exact("math.clamp", |d| x(d).clamp(-0.75, 1.25)),
        Case::exact("math.clamp_min", |d| x(d).clamp_min(-0.25)),
        Case::exact("math.clamp_max", |d| x(d).clamp_max(0.5)),
        Case::exact("math.max_pair", |d| x(d).max_pair(y(d))),
        Case::exact("math.min_pair", |d| x(d).min_pair(y(d))),
    ]
}

fn arithmetic() -> Vec<Case> {
    vec![
        Case::approx("math.add", |d| x(d) + y(d)),
        Case::approx("math.add_scalar", |d| x(d) + 0.3),
        Case::approx("math.sub", |d| x(d) - y(d)),
        Case::approx("math.sub_scalar", |d| x(d) - 0.3),
        Case::approx("math.mul", |d| x(d) * y(d)),
        Case::approx("math.mul_scalar", |d| x(d) * -1.7),
        Case::approx("math.div", |d| (x(d) / p(d), edges(d) / edges(d).flip([0]))),
        Case::approx("math.div_scalar", |d| x(d) / 0.7),
        Case::approx("math.remainder", |d| (x(d) * 5.0).remainder(p(d))),
        Case::approx("math.remainder_scalar", |d| {
            (x(d) * 5.0).remainder_scalar(-1.5)
        }),
        Case::approx("math.fmod", |d| (x(d) * 5.0).fmod(p(d))),
        Case::approx("math.fmod_scalar", |d| (x(d) * 5.0).fmod_scalar(1.5)),
        Case::approx("math.broadcast", |d| {
            let row = floats(d, [1, 3, 1], 5);
            let column = floats(d, [4, 1, 2], 6);
            (
                row.clone() + column.clone(),
                row.clone() - column.clone(),
                column / row,
            )
        }),
        Case::approx("math.non_contiguous", |d| {
            let turned = x(d).permute([2, 0, 1]);
            let sliced = y(d).flip([1]).swap_dims(0, 2).swap_dims(1, 2);
            (turned.clone() * sliced.clone(), (turned - sliced).exp())
        }),
        // A long chain: the input of every op is the output of the previous one.
        Case::approx("math.chain", |d| {
            (0..40).fold(x(d), |x, _| x.clone() * 0.9 + x.sin() * 0.1)
        }),
    ]
}

fn classification() -> Vec<Case> {
    vec![
        Case::exact("math.is_nan", |d| edges(d).is_nan()),
        Case::exact("math.is_inf", |d| edges(d).is_inf()),
        Case::exact("math.is_finite", |d| edges(d).is_finite()),
        Case::exact("math.contains_nan", |d| {
            (edges(d).contains_nan(), x(d).contains_nan())
        }),
        Case::exact("math.is_close", |d| {
            let steps = Tensor::<3>::from_floats([[[0.0, 1e-7, 1e-3, 0.1, 1.0]]], d);
            let near = x(d) + steps;
            (
                x(d).is_close(near.clone(), None, None),
                x(d).is_close(near, Some(0.0), Some(0.2)),
            )
        }),
        Case::exact("math.all_close", |d| {
            let near = x(d) + 0.01;
            let verdicts = [None, Some(0.1)].map(|atol| x(d).all_close(near.clone(), None, atol));
            TensorData::from(verdicts)
        }),
    ]
}
