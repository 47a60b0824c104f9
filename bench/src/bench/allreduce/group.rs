//! The ranks of an all-reduce, all in one program: a device and a tensor each.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use burn::tensor::{
    Device, Tensor,
    distributed::{ReduceOperation, all_reduce},
};

use crate::data::{Upload, into_data};

/// The devices, and a tensor on each to be reduced.
pub(super) struct Group<'a> {
    devices: &'a [Device],
    tensors: Vec<Tensor<1>>,
}

impl<'a> Group<'a> {
    /// Creates a group with tensors of `elements` elements: ones on the first device, twos
    /// on the second, and so on.
    pub(super) fn new(devices: &'a [Device], elements: usize) -> Self {
        let tensors = devices.iter().zip(1u32..);
        let tensors = tensors.map(|(device, rank)| Tensor::full([elements], rank, device));
        Self {
            devices,
            tensors: tensors.collect(),
        }
    }

    /// Requests an all-reduce of `tensors` without waiting for the result.
    fn reduce(&self, tensors: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
        let reduce =
            |tensor| all_reduce(tensor, ReduceOperation::Sum, self.devices.to_vec()).resolve();
        tensors.into_iter().map(reduce).collect()
    }

    fn sync(&self) -> Result<()> {
        self.devices
            .iter()
            .try_for_each(|device| device.sync().context("cannot sync"))
    }

    /// Checks that the sums are right.
    ///
    /// # Errors
    ///
    /// If a sum is wrong or cannot be read.
    pub(super) fn check(&self) -> Result<()> {
        let expected = (1..=self.devices.len()).sum::<usize>() as f32;
        for (rank, sum) in self.reduce(self.tensors.clone()).into_iter().enumerate() {
            let range = Tensor::cat(vec![sum.clone().min(), sum.max()], 0);
            let data = into_data(range, Upload::Helper)?;
            let range = data.as_slice::<f32>();
            let range =
                range.map_err(|e| anyhow::anyhow!("the tensor does not contain floats: {e}"))?;
            ensure!(
                range == [expected; 2],
                "the sum on rank {rank} is {range:?}, not {expected}"
            );
        }
        Ok(())
    }

    /// Returns the time of `repetitions` all-reduces, each on the result of the previous
    /// one.
    ///
    /// # Errors
    ///
    /// If an all-reduce fails.
    pub(super) fn time(&self, repetitions: usize) -> Result<Duration> {
        let mut tensors = self.tensors.clone();
        self.sync()?;
        let begun = Instant::now();
        for _ in 0..repetitions {
            tensors = self.reduce(tensors);
        }
        self.sync()?;
        Ok(begun.elapsed())
    }
}
