//! Makes the code and weights of the example, by `burn-onnx`, from its ONNX models.
//!
//! Run it in this folder with `cargo run` after `models/make.py`. It writes the models of the
//! program to `src/generated/` and those of its tests to `tests/generated/`.

use std::path::Path;

use anyhow::{Context, Result};
use burn_onnx::ModelGen;

fn main() -> Result<()> {
    // The code has the paths that are given here, so they are relative.
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::env::set_current_dir(&example)
        .with_context(|| format!("cannot change to {}", example.display()))?;
    ModelGen::new()
        .input("models/cnn.onnx")
        .input("models/encoder.onnx")
        .out_dir("src/generated")
        .run_from_cli();
    ModelGen::new()
        .input("models/cast.onnx")
        .input("models/integers.onnx")
        .input("models/quantized.onnx")
        .out_dir("tests/generated")
        .run_from_cli();
    Ok(())
}
