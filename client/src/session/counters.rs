//! The bytes that a session has sent and received.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use tensord_transport::channel::FrameParts;

/// Bytes sent and received.
#[derive(Debug, Default)]
pub(crate) struct ByteCounters {
    pub(crate) up: AtomicU64,
    pub(crate) down: AtomicU64,
    /// Bytes of tensors among those sent; `tensors_down` has those among the received.
    pub(crate) tensors_up: AtomicU64,
    pub(crate) tensors_down: AtomicU64,
}

impl ByteCounters {
    /// Counts the bytes of `frames` as sent.
    pub(super) fn add_sent(&self, frames: &[FrameParts]) {
        let bytes: usize = frames.as_flattened().iter().map(Bytes::len).sum();
        self.up.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}
