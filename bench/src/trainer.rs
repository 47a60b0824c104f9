//! Training steps on any device: upload a batch, forward, backward, Adam.

use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
};

use anyhow::{Context as _, Result, ensure};
use burn::{
    nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig},
    optim::{AdamConfig, GradientsParams, ModuleOptimizer},
    tensor::{Device, Int, Tensor, TensorData},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tensord_testkit::models::CLASSES;

use crate::{
    data::{self, Upload},
    models::{Model, Network, PIXELS, SIDE},
};

/// Images in a batch, unless a bench chooses another size.
pub(crate) const BATCH: usize = 64;

const LEARNING_RATE: f64 = 1e-3;

/// Images and their labels, in host memory.
#[derive(Debug, Clone)]
pub(crate) struct Batch {
    images: TensorData,
    labels: TensorData,
}

impl Batch {
    /// Returns `size` images of noise, the same for the same `seed`.
    pub(crate) fn noise(size: usize, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let pixels: Vec<f32> = (&mut random).random_iter().take(size * PIXELS).collect();
        let labels = (0..size).map(|_| random.random_range(0..CLASSES as i32));
        let labels: Vec<i32> = labels.collect();
        Self {
            images: TensorData::new(pixels, [size, SIDE, SIDE]),
            labels: TensorData::new(labels, [size]),
        }
    }

    /// Returns the shard of the batch for device `rank` of `world`. All shards have the
    /// same size.
    ///
    /// # Errors
    ///
    /// If `world` does not divide the batch's size.
    pub(crate) fn shard(&self, rank: usize, world: usize) -> Result<Self> {
        let size = self.labels.shape()[0];
        ensure!(
            size.is_multiple_of(world),
            "{size} images do not divide evenly among {world} ranks"
        );
        let part = size / world;
        let images = self.images.as_slice::<f32>().map_err(anyhow::Error::msg)?;
        let labels = self.labels.as_slice::<i32>().map_err(anyhow::Error::msg)?;
        let range = rank * part..(rank + 1) * part;
        let pixels = &images[range.start * PIXELS..range.end * PIXELS];
        Ok(Self {
            images: TensorData::new(pixels.to_vec(), [part, SIDE, SIDE]),
            labels: TensorData::new(labels[range].to_vec(), [part]),
        })
    }
}

static NEXT_SEED: AtomicU64 = AtomicU64::new(1 << 32);

/// Makes seeds of this process start at `first`, because another process has used those
/// before.
pub(crate) fn start_seeds_at(first: u64) {
    NEXT_SEED.store(first, Ordering::Relaxed);
}

/// Returns seeds for batches that no other part of this process has used, because a worker
/// may still hold any earlier upload, which then need not be sent again.
pub(crate) fn fresh_seeds(count: usize) -> Range<u64> {
    let first = NEXT_SEED.fetch_add(count as u64, Ordering::Relaxed);
    first..first + count as u64
}

/// A model in training on one device.
pub(crate) struct Trainer {
    network: Option<Network>,
    optimizer: ModuleOptimizer,
    criterion: CrossEntropyLoss,
    device: Device,
    upload: Upload,
    uploaded_bytes: u64,
}

impl Trainer {
    /// Creates a trainer of a new `model` on `device`.
    pub(crate) fn new(model: Model, device: &Device, upload: Upload) -> Self {
        let device = device.clone().autodiff();
        Self::with_network(Network::new(model, &device), &device, upload)
    }

    /// Creates a trainer of `network`, which is on `device`.
    pub(crate) fn with_network(network: Network, device: &Device, upload: Upload) -> Self {
        let device = device.clone().autodiff();
        Self {
            network: Some(network),
            optimizer: AdamConfig::new().init(),
            criterion: CrossEntropyLossConfig::new().init(&device),
            device,
            upload,
            uploaded_bytes: 0,
        }
    }

    /// Takes a step and returns its loss, which has not been read.
    ///
    /// # Errors
    ///
    /// If an earlier step panicked.
    pub(crate) fn step(&mut self, batch: Batch) -> Result<Tensor<1>> {
        let (images, labels) = self.upload(batch);
        self.step_on_device(images, labels)
    }

    /// Takes a step on a batch that is on the device, and returns its loss, which has not
    /// been read.
    ///
    /// # Errors
    ///
    /// If an earlier step panicked.
    pub(crate) fn step_on_device(
        &mut self,
        images: Tensor<3>,
        labels: Tensor<1, Int>,
    ) -> Result<Tensor<1>> {
        let network = self.network.take().context("a step failed before")?;
        let loss = self.criterion.forward(network.forward(images), labels);
        let message = loss.clone().detach();
        let gradients = GradientsParams::from_grads(loss.backward(), &network);
        self.network = Some(self.optimizer.step(LEARNING_RATE, network, gradients));
        Ok(message)
    }

    /// Uploads a batch to the device.
    pub(crate) fn upload(&mut self, batch: Batch) -> (Tensor<3>, Tensor<1, Int>) {
        let images: Tensor<3> = data::from_data(batch.images, &self.device, self.upload);
        let labels: Tensor<1, Int> = data::from_data(batch.labels, &self.device, self.upload);
        let bytes = |elements: usize, size: usize| (elements * size) as u64;
        self.uploaded_bytes += bytes(images.shape().num_elements(), images.dtype().size())
            + bytes(labels.shape().num_elements(), labels.dtype().size());
        (images, labels)
    }

    /// Takes a step for each batch and waits for the last loss.
    ///
    /// # Errors
    ///
    /// If a step or the read fails, or if there are no batches.
    pub(crate) fn steps(&mut self, batches: impl IntoIterator<Item = Batch>) -> Result<f32> {
        let mut last = None;
        for batch in batches {
            last = Some(self.step(batch)?);
        }
        data::scalar(last.context("the list of batches is empty")?)
    }

    /// Returns the network.
    ///
    /// # Errors
    ///
    /// If an earlier step panicked.
    pub(crate) fn network(&self) -> Result<&Network> {
        self.network.as_ref().context("a step failed before")
    }

    /// Returns the bytes of all uploaded batches, in the device's dtypes.
    pub(crate) fn uploaded_bytes(&self) -> u64 {
        self.uploaded_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_steps_have_the_same_losses() {
        let losses = |seed: u64| {
            let mut trainer = Trainer::new(Model::Mlp, &Device::flex(), Upload::Helper);
            let loss = trainer.steps((0..3).map(|step| Batch::noise(8, seed + step)));
            assert_eq!(trainer.uploaded_bytes() % 3, 0);
            loss.unwrap().to_bits()
        };
        assert_eq!(losses(1), losses(1));
        assert_ne!(losses(1), losses(2));
    }

    #[test]
    fn shards_are_the_whole_batch() {
        let batch = Batch::noise(6, 1);
        let shards: Vec<_> = (0..3).map(|rank| batch.shard(rank, 3).unwrap()).collect();
        let joined = |part: fn(&Batch) -> &TensorData| -> Vec<u8> {
            shards
                .iter()
                .flat_map(|shard| part(shard).as_bytes().to_vec())
                .collect()
        };
        assert_eq!(joined(|batch| &batch.images), batch.images.as_bytes());
        assert_eq!(joined(|batch| &batch.labels), batch.labels.as_bytes());
        assert!(batch.shard(0, 4).is_err());
    }

    #[test]
    fn fresh_seeds_are_never_reused() {
        let (a, b) = (fresh_seeds(3), fresh_seeds(2));
        assert_eq!((a.end - a.start, b.end - b.start), (3, 2));
        assert!(a.end <= b.start || b.end <= a.start);
    }

    #[test]
    fn no_steps_are_an_error() {
        let mut trainer = Trainer::new(Model::Mlp, &Device::flex(), Upload::Helper);
        assert!(trainer.steps([]).is_err());
    }
}
