//! The one place where tensors are uploaded and read.
//!
//! Every peer takes the same calls. Nothing else in this crate calls
//! `Tensor::from_data` or reads a tensor.

use std::{
    pin::Pin,
    task::{Context, Waker},
};

use anyhow::{Context as _, Result};
use burn::tensor::{Device, Tensor, TensorData};
use burn_backend::ExecutionError;
use futures::future::{MaybeDone, maybe_done};
use serde::{Deserialize, Serialize};
use tensord_client::data::{self, Kind};

/// How a tensor gets to its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Upload {
    /// By the client's helpers, which fall back to Burn's own way on devices
    /// that are not tensord's.
    Helper,
    /// By `Tensor::from_data`.
    Plain,
}

/// Uploads `data`.
pub(crate) fn from_data<const D: usize, K: Kind>(
    data: TensorData,
    device: &Device,
    upload: Upload,
) -> Tensor<D, K> {
    match upload {
        Upload::Helper => data::from_data(data, device),
        Upload::Plain => Tensor::from_data(data, device),
    }
}

/// Reads a tensor, waiting for it.
pub(crate) fn into_data<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    way: Upload,
) -> Result<TensorData> {
    let data = match way {
        Upload::Helper => data::into_data(tensor),
        Upload::Plain => tensor.try_into_data(),
    };
    data.context("cannot read a tensor")
}

/// The one value of `tensor`.
pub(crate) fn scalar(tensor: Tensor<1>) -> Result<f32> {
    let data = into_data(tensor, Upload::Helper)?;
    value(&data)
}

fn value(data: &TensorData) -> Result<f32> {
    let values = data.as_slice::<f32>();
    let values = values.map_err(|e| anyhow::anyhow!("not a float: {e}"))?;
    values.first().copied().context("an empty tensor")
}

type Reading = MaybeDone<Pin<Box<dyn Future<Output = Result<TensorData, ExecutionError>> + Send>>>;

/// A read that was asked for and not yet waited for.
pub(crate) struct Pending(Pin<Box<Reading>>);

/// What starts a read of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// The call: tensord's reads are on their way a moment later.
    Call,
    /// The first poll, as of Burn's own reads.
    Poll,
}

/// Asks for a tensor. Whatever runs after this call does not hold it up.
pub(crate) fn start_read<const D: usize, K: Kind + 'static>(
    tensor: Tensor<D, K>,
    start: Start,
) -> Pending {
    let reading: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(data::into_data_async(tensor));
    let mut reading = Box::pin(maybe_done(reading));
    if start == Start::Poll {
        // The poll in `wait` brings a waker of its own.
        let _ = reading
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()));
    }
    Pending(reading)
}

impl Pending {
    /// Waits for the tensor.
    ///
    /// # Errors
    ///
    /// When it cannot be had.
    pub(crate) fn wait(mut self) -> Result<TensorData> {
        burn_std::future::block_on(self.0.as_mut());
        let data = self.0.as_mut().take_output();
        data.context("a read ended without a result")?
            .context("cannot read a tensor")
    }

    /// Waits for a tensor that has one value.
    ///
    /// # Errors
    ///
    /// When it cannot be had.
    pub(crate) fn scalar(self) -> Result<f32> {
        value(&self.wait()?)
    }
}
