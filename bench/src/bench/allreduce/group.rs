//! The ranks of an all-reduce, as one program has them: a device and a tensor each.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use burn::tensor::{
    Device, Tensor,
    distributed::{ReduceOperation, all_reduce},
};

use crate::data::{Upload, into_data};

/// A tensor on each device, to be reduced.
pub(super) struct Group<'a> {
    devices: &'a [Device],
    tensors: Vec<Tensor<1>>,
}

impl<'a> Group<'a> {
    /// Tensors of `elements`, all ones on the first device, all twos on the second.
    pub(super) fn new(devices: &'a [Device], elements: usize) -> Self {
        let tensors = devices.iter().zip(1u32..);
        let tensors = tensors.map(|(device, rank)| Tensor::full([elements], rank, device));
        Self {
            devices,
            tensors: tensors.collect(),
        }
    }

    /// Reduces `tensors`. Nothing is waited for.
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

    /// Sees that the sums are right.
    ///
    /// # Errors
    ///
    /// When one is not, or cannot be had.
    pub(super) fn check(&self) -> Result<()> {
        let expected = (1..=self.devices.len()).sum::<usize>() as f32;
        for (rank, sum) in self.reduce(self.tensors.clone()).into_iter().enumerate() {
            let range = Tensor::cat(vec![sum.clone().min(), sum.max()], 0);
            let data = into_data(range, Upload::Helper)?;
            let range = data.as_slice::<f32>();
            let range = range.map_err(|e| anyhow::anyhow!("no floats: {e}"))?;
            ensure!(
                range == [expected; 2],
                "the sum on rank {rank} is {range:?}, not {expected}"
            );
        }
        Ok(())
    }

    /// The time of `repetitions` all-reduces, each on the result of the one before.
    ///
    /// # Errors
    ///
    /// When one fails.
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
