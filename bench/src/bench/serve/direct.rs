//! The model without a server.

use std::time::Instant;

use anyhow::{Context as _, Result};
use burn::tensor::{Device, TensorData};
use tensord_client::Lease;
use tensord_testkit::models::{Classifier as _, Cnn, ModelSize};

use crate::{
    data::{self, Upload},
    models::SIDE,
};

/// The same model on a lease, without a server.
pub(super) struct Direct {
    device: Device,
    network: Cnn,
}

impl Direct {
    pub(super) fn new(lease: &Lease) -> Result<Self> {
        let device = lease
            .devices()
            .first()
            .context("the lease has no device")?
            .clone();
        let network = Cnn::new(&ModelSize::MEDIUM, &device);
        Ok(Self { device, network })
    }

    fn compute(&self, rows: usize, number: usize) -> Result<()> {
        // Other pixels each time, as requests of a service have.
        let pixels = (0..rows * SIDE * SIDE).map(|it| ((it + number) % 251) as f32 / 251.0);
        let images = TensorData::new(pixels.collect::<Vec<_>>(), [rows, SIDE, SIDE]);
        let images = data::from_data(images, &self.device, Upload::Helper);
        data::into_data(self.network.forward(images), Upload::Helper)?;
        Ok(())
    }

    /// Returns how many batches of so many rows it computes per second.
    pub(super) fn rate(&self, rows: usize, seconds: f64) -> Result<f64> {
        let started = Instant::now();
        let mut batches = 0;
        while started.elapsed().as_secs_f64() < seconds {
            self.compute(rows, batches)?;
            batches += 1;
        }
        Ok(batches as f64 / started.elapsed().as_secs_f64())
    }

    /// Returns the median time for one image, in ms.
    pub(super) fn latency(&self, seconds: f64) -> Result<f64> {
        let started = Instant::now();
        let mut times = Vec::new();
        while started.elapsed().as_secs_f64() < seconds {
            let begun = Instant::now();
            self.compute(1, times.len())?;
            times.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        let summary = crate::stats::Summary::of(&times);
        Ok(summary.context("nothing was computed")?.median)
    }
}
