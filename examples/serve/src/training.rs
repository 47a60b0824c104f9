//! Trains the model on a leased device, as `examples/digits` does.

use std::{io::Read as _, path::Path};

use anyhow::Context as _;
use burn::{
    nn::loss::CrossEntropyLossConfig,
    optim::{AdamConfig, GradientsParams},
    prelude::*,
};
use tensord_client::{LeaseRequest, Pool, data, weights};

use crate::cnn::Cnn;

/// 1,797 hand-written digits, gzipped: lines of 64 pixels, 0 to 16, and a label.
static DIGITS: &[u8] = include_bytes!("../../../data/digits.csv.gz");

const EPOCHS: usize = 12;

/// Images and their labels.
type Batch = (Tensor<3>, Tensor<1, Int>);

/// Trains the model and writes its weights to a file.
pub(crate) fn train(pool: &Pool, path: &Path) -> anyhow::Result<()> {
    let lease = pool.lease(LeaseRequest::devices(1))?;
    let device = lease.devices()[0].clone().autodiff();
    device.seed(42);
    let mut model = Cnn::new(&device);
    let mut optimizer = AdamConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(&device);
    let batches = load(&device)?;
    for epoch in 1..=EPOCHS {
        let mut sum = Tensor::<1>::zeros([1], &device);
        for (images, labels) in batches.iter().cloned() {
            let loss = cross_entropy.forward(model.forward(images), labels);
            sum = sum + loss.clone().detach();
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(3e-3, model, gradients);
        }
        let loss = sum.try_into_scalar::<f32>()? / batches.len() as f32;
        eprintln!("epoch {epoch:>2} of {EPOCHS}  loss {loss:.3}");
    }
    weights::save(&model, path).with_context(|| format!("cannot write {}", path.display()))
}

/// Uploads all digits once and splits them, on the device, into batches of 64.
fn load(device: &Device) -> anyhow::Result<Vec<Batch>> {
    let mut csv = String::new();
    flate2::read::GzDecoder::new(DIGITS).read_to_string(&mut csv)?;
    // The file is sorted by writer; taking every seventh line mixes the writers.
    let lines = (0..7).flat_map(|first| csv.lines().skip(first).step_by(7));
    let numbers: Result<Vec<i32>, _> = lines.flat_map(|l| l.split(',').map(str::parse)).collect();
    let table = data::from_data::<2, Int>(TensorData::new(numbers?, [1_797, 65]), device);
    let images = table.clone().slice(s![.., ..64]).float() / 16.0;
    let images = images.reshape([-1, 8, 8]).split(64, 0);
    let labels = table.slice(s![.., 64..]).squeeze_dim(1).split(64, 0);
    Ok(images.into_iter().zip(labels).collect())
}
