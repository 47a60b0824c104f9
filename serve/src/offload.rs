//! Work that takes long on a thread of its own, so that it does not hold up other connections.

use crate::error::InferError;

/// From so many bytes on, decoding and encoding take more than a fraction of a millisecond.
const LARGE_BYTES: usize = 256 << 10;

/// Runs work on so many bytes: here, or on another thread if it takes long.
///
/// # Errors
///
/// Those of the work, and if it panics.
pub(crate) async fn offload<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> Result<T, InferError> + Send + 'static,
) -> Result<T, InferError> {
    if bytes < LARGE_BYTES {
        return work();
    }
    let worked = tokio::task::spawn_blocking(work).await;
    worked.unwrap_or_else(|error| {
        Err(InferError::ModelFailed(format!(
            "the server failed at the request: {error}"
        )))
    })
}
