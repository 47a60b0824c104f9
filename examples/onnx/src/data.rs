//! What the models are tried on.

use std::io::Read;

use anyhow::{Context, Result};
use flate2::read::GzDecoder;
use serde::Deserialize;

/// 1,797 hand-written digits, gzipped: lines of 64 pixels, 0 to 16, and a label.
static DIGITS: &[u8] = include_bytes!("../../../data/digits.csv.gz");
/// The first digits, on which the CNN was trained.
const TRAINED: usize = 1_408;

/// Digits that the CNN was not trained on.
pub struct Digits {
    /// 64 values of each digit, from 0 to 1.
    pub pixels: Vec<f32>,
    /// What each digit is.
    pub labels: Vec<i64>,
}

impl Digits {
    /// Reads the digits.
    ///
    /// # Errors
    ///
    /// If the file that is compiled in is damaged.
    pub fn for_tests() -> Result<Self> {
        let mut csv = String::new();
        GzDecoder::new(DIGITS)
            .read_to_string(&mut csv)
            .context("the digits are not gzipped text")?;
        // The file is sorted by writer; taking every seventh line mixes the writers.
        let lines = (0..7).flat_map(|first| csv.lines().skip(first).step_by(7));
        let mut digits = Self {
            pixels: Vec::new(),
            labels: Vec::new(),
        };
        for line in lines.skip(TRAINED) {
            let (pixels, label) = line.rsplit_once(',').context("a line has no label")?;
            digits.labels.push(label.parse()?);
            for pixel in pixels.split(',') {
                digits.pixels.push(pixel.parse::<f32>()? / 16.0);
            }
        }
        Ok(digits)
    }
}

/// What the ONNX models give for some inputs, computed by ONNX's reference implementation.
#[derive(Deserialize)]
pub struct Expected {
    /// The outputs of the CNN for the first digits of [`Digits::for_tests`].
    pub logits: Vec<Vec<f32>>,
    /// Sequences of tokens, all of one length.
    pub ids: Vec<Vec<i64>>,
    /// 1 for each token, 0 for padding.
    pub mask: Vec<Vec<i64>>,
    /// The outputs of the encoder for these sequences.
    pub pooled: Vec<Vec<f32>>,
}

impl Expected {
    /// Reads the values, which `models/make.py` has written.
    ///
    /// # Errors
    ///
    /// If the file that is compiled in is damaged.
    pub fn read() -> Result<Self> {
        serde_json::from_str(include_str!("../models/expected.json"))
            .context("models/expected.json is damaged; models/make.py writes it")
    }
}
