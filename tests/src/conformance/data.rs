//! Inputs computed by formula. They are the same on every device, and so irregular that a
//! swapped axis, a wrong offset or a missing element changes the result.

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

/// Returns `len` pseudo-random values in `[0, 1)`, exact in 24 bits.
fn fractions(len: usize, seed: u32) -> impl Iterator<Item = f32> {
    (0..len as u32).map(move |i| {
        let mut hash = i
            .wrapping_mul(0x9e37_79b9)
            .wrapping_add(seed.wrapping_mul(0x85eb_ca6b) ^ 0x27d4_eb2f);
        hash = (hash ^ (hash >> 15)).wrapping_mul(0x2c1b_3c6d);
        hash = (hash ^ (hash >> 12)).wrapping_mul(0x297a_2d39);
        ((hash ^ (hash >> 15)) >> 8) as f32 / (1 << 24) as f32
    })
}

fn count<const D: usize>(shape: [usize; D]) -> usize {
    shape.iter().product()
}

/// Returns host values in `[low, high)`.
pub(super) fn values(shape: &[usize], seed: u32, low: f32, high: f32) -> TensorData {
    let len = shape.iter().product();
    let values: Vec<f32> = fractions(len, seed)
        .map(|x| low + x * (high - low))
        .collect();
    TensorData::new(values, shape)
}

/// Returns floats in `[low, high)`.
pub(super) fn between<const D: usize>(
    device: &Device,
    shape: [usize; D],
    seed: u32,
    low: f32,
    high: f32,
) -> Tensor<D> {
    Tensor::from_data(values(&shape, seed, low, high), device)
}

/// Returns floats in `[-2, 2)`.
pub(super) fn floats<const D: usize>(device: &Device, shape: [usize; D], seed: u32) -> Tensor<D> {
    between(device, shape, seed, -2.0, 2.0)
}

/// Returns floats in `[0.1, 2.1)`.
pub(super) fn positive<const D: usize>(device: &Device, shape: [usize; D], seed: u32) -> Tensor<D> {
    between(device, shape, seed, 0.1, 2.1)
}

/// Returns integers in `[low, high)`, of the device's default type.
pub(super) fn ints<const D: usize>(
    device: &Device,
    shape: [usize; D],
    seed: u32,
    low: i32,
    high: i32,
) -> Tensor<D, Int> {
    let width = (high - low) as f32;
    let values: Vec<i32> = fractions(count(shape), seed)
        .map(|x| low + (x * width) as i32)
        .collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Returns booleans, about half of which are true.
pub(super) fn bools<const D: usize>(
    device: &Device,
    shape: [usize; D],
    seed: u32,
) -> Tensor<D, Bool> {
    let values: Vec<bool> = fractions(count(shape), seed).map(|x| x < 0.5).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Returns small whole numbers as floats, with repeats, for ops that must handle ties.
pub(super) fn whole<const D: usize>(device: &Device, shape: [usize; D], seed: u32) -> Tensor<D> {
    ints(device, shape, seed, -4, 5).float()
}
