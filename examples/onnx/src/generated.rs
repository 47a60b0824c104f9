//! What `burn-onnx` 0.22.0 made of `models/cnn.onnx` and `models/encoder.onnx`, unchanged: their
//! code, and their weights beside it. `generate/` makes both again.

// The code has no documentation of its own.
#![allow(missing_docs)]

/// Classifies images of digits.
#[rustfmt::skip]
pub mod cnn;
/// Makes a vector of a sequence of tokens.
#[rustfmt::skip]
pub mod encoder;
