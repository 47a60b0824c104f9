//! Real training data: 1,797 hand-written digits, in a fixed order.

use std::io::Read;

use burn::tensor::{Device, Int, Tensor, TensorData};
use tensord_client::data;

/// Number of digits for training: 22 steps of 64, a batch that 1, 2, 4 and 8 devices can
/// split.
pub const TRAIN: usize = 1_408;

static CSV_GZ: &[u8] = include_bytes!("../../data/digits.csv.gz");

/// A digit: the 64 pixels of its image, then its label.
#[derive(Clone, Debug)]
pub struct Digit([u8; 65]);

/// Returns the training digits and the test digits.
///
/// # Panics
///
/// If the file is damaged.
pub fn split() -> (Vec<Digit>, Vec<Digit>) {
    let mut csv = String::new();
    flate2::read::GzDecoder::new(CSV_GZ)
        .read_to_string(&mut csv)
        .expect("the file is gzipped text");
    // The file is sorted by writer. Taking every seventh line mixes the writers.
    let lines = (0..7).flat_map(|first| csv.lines().skip(first).step_by(7));
    let digit = |line: &str| {
        let numbers: Result<Vec<u8>, _> = line.split(',').map(str::parse).collect();
        let numbers = numbers.expect("a line has numbers");
        Digit(numbers.try_into().expect("a line has 65 numbers"))
    };
    let mut train: Vec<_> = lines.map(digit).collect();
    let test = train.split_off(TRAIN);
    (train, test)
}

/// Uploads `digits` to `device`: images of shape `[count, 8, 8]` with values from 0 to 1,
/// and labels of shape `[count]`.
pub fn batch(digits: &[Digit], device: &Device) -> (Tensor<3>, Tensor<1, Int>) {
    let count = digits.len();
    let pixels = digits.iter().flat_map(|Digit(numbers)| &numbers[..64]);
    let pixels: Vec<f32> = pixels.map(|&pixel| f32::from(pixel) / 16.0).collect();
    let labels = digits.iter().map(|Digit(numbers)| i32::from(numbers[64]));
    let labels: Vec<i32> = labels.collect();
    (
        data::from_data(TensorData::new(pixels, [count, 8, 8]), device),
        data::from_data(TensorData::new(labels, [count]), device),
    )
}
