//! The data set of the demo: 1,797 hand-written digits, embedded in the binary.
//!
//! The file is small enough to embed (56 KB gzipped), so the demo runs offline and trains
//! on the same real data everywhere. It has one line per digit: 64 pixels from 0 to 16,
//! then the label. Source and licence: `data/README.md`.

use std::io::Read;

use burn::data::dataloader::batcher::Batcher;
use burn::tensor::{Device, Int, Tensor, TensorData};
use flate2::read::GzDecoder;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use tensord_client::data;

/// Number of rows of an image, and of columns.
pub(crate) const SIDE: usize = 8;
/// Number of pixels of an image.
pub(crate) const PIXELS: usize = SIDE * SIDE;
/// Number of classes: the digits 0 to 9.
pub(crate) const CLASSES: usize = 10;

/// Number of digits in the training set; the other 389 are the test set.
///
/// This is exactly 22 steps of 64 digits, so every step has the same shapes. It is also 11
/// times a power of two, so several devices get parts of the same size.
const TRAIN: usize = 1_408;
/// The largest value of a pixel in the file.
const PIXEL_MAX: f32 = 16.0;

static CSV_GZ: &[u8] = include_bytes!("../data/digits.csv.gz");

/// One image and its label.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Digit {
    /// The pixels, row by row, from 0 (paper) to 1 (ink).
    pub(crate) pixels: [f32; PIXELS],
    /// The digit that the image shows, from 0 to 9.
    pub(crate) label: u8,
}

/// The digits, shuffled by a seed and divided into two sets.
pub(crate) struct Digits {
    /// The training set.
    pub(crate) train: Vec<Digit>,
    /// The test set, which the model is never trained on.
    pub(crate) test: Vec<Digit>,
}

impl Digits {
    /// Splits the data set; the same seed gives the same split.
    pub(crate) fn split(seed: u64) -> Self {
        let mut train = read_embedded();
        train.shuffle(&mut StdRng::seed_from_u64(seed));
        let test = train.split_off(TRAIN);
        Self { train, test }
    }
}

/// Reads every digit, in the order of the file.
fn read_embedded() -> Vec<Digit> {
    let mut csv = String::new();
    GzDecoder::new(CSV_GZ)
        .read_to_string(&mut csv)
        .expect("the embedded digits are gzipped text");
    csv.lines()
        .map(|line| parse(line).expect("every embedded line has 64 pixels and a label"))
        .collect()
}

/// Parses one line. Returns `None` unless it has exactly 64 pixels and a label, each in its
/// range.
fn parse(line: &str) -> Option<Digit> {
    let values: Vec<u8> = line
        .split(',')
        .map(|value| value.trim().parse().ok())
        .collect::<Option<_>>()?;
    let (&label, pixels) = values.split_last()?;
    let in_range = usize::from(label) < CLASSES && pixels.iter().all(|&p| p <= PIXEL_MAX as u8);
    let pixels: [u8; PIXELS] = pixels.try_into().ok()?;
    in_range.then(|| Digit {
        pixels: pixels.map(|pixel| f32::from(pixel) / PIXEL_MAX),
        label,
    })
}

/// A batch of digits as tensors on a device.
#[derive(Clone, Debug)]
pub(crate) struct DigitBatch {
    /// Shape `[batch, SIDE, SIDE]`.
    pub(crate) images: Tensor<3>,
    /// Shape `[batch]`.
    pub(crate) labels: Tensor<1, Int>,
}

/// Builds a [`DigitBatch`]. Each takes two uploads, whatever the batch size.
#[derive(Clone, Debug)]
pub(crate) struct DigitBatcher;

impl Batcher<Digit, DigitBatch> for DigitBatcher {
    fn batch(&self, items: Vec<Digit>, device: &Device) -> DigitBatch {
        let pixels: Vec<f32> = items.iter().flat_map(|digit| digit.pixels).collect();
        let labels: Vec<i32> = items.iter().map(|digit| i32::from(digit.label)).collect();
        let count = items.len();
        DigitBatch {
            images: data::from_data(TensorData::new(pixels, [count, SIDE, SIDE]), device),
            labels: data::from_data(TensorData::new(labels, [count]), device),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_file_has_every_digit() {
        let digits = read_embedded();
        assert_eq!(digits.len(), 1_797);

        let mut count = [0; CLASSES];
        for digit in &digits {
            count[usize::from(digit.label)] += 1;
        }
        assert!(count.iter().all(|&n| n >= 170), "{count:?}");

        let pixels = || digits.iter().flat_map(|digit| digit.pixels);
        assert_eq!(pixels().reduce(f32::min), Some(0.0));
        assert_eq!(pixels().reduce(f32::max), Some(1.0));
    }

    #[test]
    fn the_first_line_reads_as_a_zero() {
        let first = &read_embedded()[0];
        assert_eq!(first.label, 0);
        assert_eq!(
            first.pixels[..SIDE].to_vec(),
            [0., 0., 5., 13., 9., 1., 0., 0.]
                .map(|p: f32| p / 16.)
                .to_vec()
        );
    }

    #[test]
    fn a_bad_line_is_refused() {
        let good = ["3"; PIXELS + 1].join(",");
        assert!(parse(&good).is_some());
        let bad = [
            String::new(),
            "words".to_owned(),
            ["3"; PIXELS].join(","),
            ["3"; PIXELS + 2].join(","),
            good.replacen('3', "17", 1),
            good.replacen('3', "-1", 1),
            format!("{},10", ["3"; PIXELS].join(",")),
        ];
        for line in bad {
            assert_eq!(parse(&line), None, "{line}");
        }
    }

    #[test]
    fn the_split_is_a_partition() {
        let Digits { train, test } = Digits::split(7);
        assert_eq!((train.len(), test.len()), (TRAIN, 389));

        // No image occurs twice in the file, so its bits identify it.
        let key = |digit: &Digit| (digit.pixels.map(f32::to_bits), digit.label);
        let mut split: Vec<_> = train.iter().chain(&test).map(key).collect();
        let mut file: Vec<_> = read_embedded().iter().map(key).collect();
        split.sort_unstable();
        file.sort_unstable();
        assert_eq!(split, file);
        file.dedup();
        assert_eq!(file.len(), split.len());
    }

    #[test]
    fn the_seed_alone_decides_the_split() {
        let order = |seed| Digits::split(seed).test;
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }

    #[test]
    fn a_batch_keeps_the_order_of_its_items() {
        let items = Digits::split(0).test[..3].to_vec();
        let batch = DigitBatcher.batch(items.clone(), &Device::flex());

        assert_eq!(batch.images.dims(), [3, SIDE, SIDE]);
        let pixels: Vec<f32> = items.iter().flat_map(|digit| digit.pixels).collect();
        let labels: Vec<i64> = items.iter().map(|digit| i64::from(digit.label)).collect();
        batch
            .images
            .into_data()
            .assert_eq(&TensorData::new(pixels, [3, SIDE, SIDE]), true);
        batch
            .labels
            .into_data()
            .assert_eq(&TensorData::new(labels, [3]), false);
    }
}
