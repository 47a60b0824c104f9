//! Boolean tensors, and the comparisons that produce them.

use burn::tensor::{Device, FloatDType, Int, IntDType, Tensor};

use super::case::Case;
use super::data::{bools, ints, whole};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = logic();
    cases.extend(comparisons());
    cases
}

fn logic() -> Vec<Case> {
    let a = |d: &Device| bools(d, [3, 5], 1);
    let b = |d: &Device| bools(d, [3, 5], 2);
    vec![
        Case::exact("bool.not", move |d| (a(d).bool_not(), !b(d))),
        Case::exact("bool.and", move |d| (a(d).bool_and(b(d)), a(d) & b(d))),
        Case::exact("bool.or", move |d| (a(d).bool_or(b(d)), a(d) | b(d))),
        Case::exact("bool.xor", move |d| (a(d).bool_xor(b(d)), a(d) ^ b(d))),
        Case::exact("bool.equal", move |d| {
            (a(d).equal(b(d)), a(d).not_equal(b(d)))
        }),
        Case::exact("bool.equal_scalar", move |d| {
            (a(d).equal_scalar(false), a(d).not_equal_scalar(true))
        }),
        Case::exact("bool.int", move |d| (a(d).int(), a(d).transpose().int())),
        Case::exact("bool.float", move |d| a(d).float()),
        Case::exact("bool.cast", move |d| {
            (a(d).cast(IntDType::I32), a(d).cast(FloatDType::F32))
        }),
    ]
}

fn small(device: &Device, seed: u32) -> Tensor<2, Int> {
    ints(device, [4, 6], seed, -2, 3)
}

/// Float and int operands with many equal pairs.
fn pairs(device: &Device) -> [(Tensor<2>, Tensor<2, Int>); 2] {
    [1, 2].map(|seed| (small(device, seed).float(), small(device, seed + 2)))
}

/// One comparison, of floats and of ints, with a tensor and with a scalar.
macro_rules! comparison {
    ($name:literal, $op:ident, $scalar:ident) => {
        Case::exact($name, |d| {
            let [(x, n), (y, m)] = pairs(d);
            let scalars = (x.clone().$scalar(1.0), n.clone().$scalar(1));
            (x.$op(y), n.$op(m), scalars)
        })
    };
}

fn comparisons() -> Vec<Case> {
    vec![
        comparison!("compare.equal", equal, equal_scalar),
        comparison!("compare.not_equal", not_equal, not_equal_scalar),
        comparison!("compare.greater", greater, greater_scalar),
        comparison!("compare.greater_equal", greater_equal, greater_equal_scalar),
        comparison!("compare.lower", lower, lower_scalar),
        comparison!("compare.lower_equal", lower_equal, lower_equal_scalar),
        Case::exact("compare.equal/nan", |d| {
            let x = Tensor::<1>::from_floats([f32::NAN, 0.0, -0.0, f32::INFINITY], d);
            (
                x.clone().equal(x.clone()),
                x.clone().equal_scalar(0.0),
                x.greater_scalar(f32::NAN),
            )
        }),
        Case::exact("compare.equal/broadcast", |d| {
            whole(d, [6, 1], 1).equal(whole(d, [1, 9], 2))
        }),
        Case::exact("compare.bool", |d| {
            (whole(d, [3, 4], 1).bool(), ints(d, [6], 1, -1, 2).bool())
        }),
    ]
}
