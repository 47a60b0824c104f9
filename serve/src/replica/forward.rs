//! What runs the code of a model and reads its outputs. A panic of that code is a failure of the model.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

use burn::{
    backend::ExecutionError,
    tensor::{Device, TensorData},
};

use crate::{model::Runner, served::Served, signature::Reading};

/// Loads the model onto a device.
pub(super) fn load(served: &Served, device: &Device) -> Result<Runner, String> {
    let load = || (served.model.load)(device);
    match catch_unwind(AssertUnwindSafe(load)) {
        Ok(Ok(runner)) => Ok(runner),
        Ok(Err(error)) => Err(format!("cannot load the model: {error}")),
        Err(panic) => Err(format!(
            "loading the model panicked: {}",
            panic_text(&*panic)
        )),
    }
}

/// The outputs of a batch as they are read, or why there are none.
pub(super) type Outputs = Result<Vec<TensorData>, Failure>;

/// Why a batch has no outputs.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// The model's function panicked, or returned something else than it declares.
    #[error("{0}")]
    Model(String),
    /// The outputs could not be read.
    #[error("the device failed: {0}")]
    Device(ExecutionError),
}

/// Reads outputs, which all travel at once.
pub(super) async fn read(readings: Vec<Reading>) -> Outputs {
    let mut outputs = Vec::with_capacity(readings.len());
    for reading in readings {
        let output = reading.await;
        outputs.push(output.map_err(Failure::Device)?);
    }
    Ok(outputs)
}

/// Runs something that depends on the model's function, of which a panic is a failure.
pub(super) fn caught<T>(run: impl FnOnce() -> T) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let text = panic_text(&*panic);
        Failure::Model(format!("the model panicked: {text}"))
    })
}

/// Returns the text of a panic.
pub(super) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no reason is known").into()
}
