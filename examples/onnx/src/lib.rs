//! Models that `burn-onnx` made from ONNX, on a leased device or any other.
//!
//! The generated code is unchanged. This library has the settings that it needs of a device,
//! and loads its weights with [`tensord_client::weights`].

pub mod data;
pub mod generated;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use burn::{
    module::Module,
    tensor::{Device, Int, IntDType, Tensor, TensorData},
};
use tensord_client::{data as transfer, weights};

use self::{
    data::{Digits, Expected},
    generated::{cnn, encoder},
};

/// Makes `I64` the element type that `device` gives integers by default, as ONNX has them. To
/// be called before anything else is done with the device.
///
/// Generated code casts the indices of `ArgMax` and similar ops to `I64`. Where they have this
/// type already, the cast does nothing. Where they have not, as by default on a leased device, it
/// ends the connection to the device, as all casts between integers do in Burn 0.22.1.
///
/// # Errors
///
/// If the device has no integers of 64 bits, or tensors already.
pub fn use_integers_of_onnx(device: &mut Device) -> Result<()> {
    device
        .configure(IntDType::I64)
        .context("cannot make I64 the default integer type of the device")
}

/// Returns the path of a file of weights that was generated.
fn weights_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("src/generated")
        .join(name)
}

/// Loads weights into a model that was made by its function `new`.
fn load<M: Module>(mut model: M, name: &str) -> Result<M> {
    weights::load(&mut model, weights_path(name))?;
    Ok(model)
}

/// The models, with their weights on a device.
pub struct Models {
    /// Classifies images of digits.
    pub cnn: cnn::Model,
    /// Makes a vector of a sequence of tokens.
    pub encoder: encoder::Model,
    device: Device,
}

impl Models {
    /// Loads the models onto `device`.
    ///
    /// # Errors
    ///
    /// If a file of weights is missing or does not fit its model.
    pub fn load(device: &Device) -> Result<Self> {
        Ok(Self {
            cnn: load(cnn::Model::new(device), "cnn.bpk")?,
            encoder: load(encoder::Model::new(device), "encoder.bpk")?,
            device: device.clone(),
        })
    }

    /// Loads the models by functions of the generated code, which use `burn-store`.
    ///
    /// # Panics
    ///
    /// If a file of weights is missing or does not fit its model.
    pub fn load_by_generated_code(device: &Device) -> Self {
        Self {
            cnn: cnn::Model::from_file(weights_path("cnn.bpk"), device),
            encoder: encoder::Model::from_file(weights_path("encoder.bpk"), device),
            device: device.clone(),
        }
    }

    /// Classifies digits. Returns the ten values of each, and the number of the largest.
    pub fn classify(&self, digits: &Digits) -> (Tensor<2>, Tensor<1, Int>) {
        let shape = [digits.labels.len(), 1, 8, 8];
        let images = TensorData::new(digits.pixels.clone(), shape);
        self.cnn.forward(transfer::from_data(images, &self.device))
    }

    /// Returns the vectors of the sequences in `expected`.
    pub fn encode(&self, expected: &Expected) -> Tensor<2> {
        let matrix = |rows: &[Vec<i64>]| {
            let columns = rows.first().map_or(0, Vec::len);
            let data = TensorData::new(rows.concat(), [rows.len(), columns]);
            transfer::from_data::<2, Int>(data, &self.device)
        };
        self.encoder
            .forward(matrix(&expected.ids), matrix(&expected.mask))
    }
}
