//! Uploads and reads of tensors.
//!
//! All peers use the same calls. No other module of this crate calls `Tensor::from_data` or
//! reads a tensor.

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

/// The API that uploads or reads a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Upload {
    /// The client's helpers, which fall back to Burn's own API on devices that are not
    /// tensord's.
    Helper,
    /// `Tensor::from_data` and `Tensor::try_into_data`.
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

/// Reads a tensor and waits for its data.
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

/// Reads the only value of `tensor`.
pub(crate) fn scalar(tensor: Tensor<1>) -> Result<f32> {
    let data = into_data(tensor, Upload::Helper)?;
    value(&data)
}

fn value(data: &TensorData) -> Result<f32> {
    let values = data.as_slice::<f32>();
    let values = values.map_err(|e| anyhow::anyhow!("the tensor does not contain floats: {e}"))?;
    values.first().copied().context("the tensor is empty")
}

type Reading = MaybeDone<Pin<Box<dyn Future<Output = Result<TensorData, ExecutionError>> + Send>>>;

/// A read that was requested and has not been awaited.
pub(crate) struct PendingRead(Pin<Box<Reading>>);

/// The event that starts a read on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadStart {
    /// The call: tensord sends the request shortly after it.
    Call,
    /// The first poll, as for Burn's own reads.
    Poll,
}

/// Requests a tensor. Later work in this thread does not delay the read.
pub(crate) fn start_read<const D: usize, K: Kind + 'static>(
    tensor: Tensor<D, K>,
    start: ReadStart,
) -> PendingRead {
    let reading: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(data::into_data_async(tensor));
    let mut reading = Box::pin(maybe_done(reading));
    if start == ReadStart::Poll {
        // The poll in `wait` brings its own waker.
        let _ = reading
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()));
    }
    PendingRead(reading)
}

impl PendingRead {
    /// Waits for the tensor.
    ///
    /// # Errors
    ///
    /// If the read fails.
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
    /// If the read fails.
    pub(crate) fn scalar(self) -> Result<f32> {
        value(&self.wait()?)
    }
}
