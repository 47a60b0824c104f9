//! Uploads of tensors: an op in the stream, and the bytes, unless the worker has them.

use std::sync::atomic::Ordering;

use burn_backend::TensorData;
use burn_ir::{TensorId, TensorIr};
use bytes::Bytes;
use tensord_proto::{
    bulk::{INLINE_BYTES, chunks, shared},
    content::{Content, Entry, hash},
    v1::frame::Body,
};

use super::{Session, State, op_buffer::Item, upload_cache::UploadSource};

impl Session {
    /// Makes a tensor of `data` on the device.
    pub(crate) fn upload(&self, id: TensorId, data: TensorData) {
        let out = TensorIr::uninit(id, data.shape().clone(), data.dtype());
        let bytes = shared(data.into_bytes());
        let hashed = self.lock().upload_cache.is_cacheable(bytes.len());
        let hash = hashed.then(|| hash(&bytes));
        let mut state = self.lock();
        if state.end.is_some() {
            return;
        }
        let source = match hash {
            Some(hash) => state.upload_cache.source(hash, bytes.len()),
            None => UploadSource::New {
                keep: None,
                forget: Vec::new(),
            },
        };
        let entries = self.send(&mut state, source, bytes);
        self.append(state, Item::Upload(out, entries));
    }

    /// Returns the entries that describe an upload's bytes, and queues the bytes on the bulk
    /// track if they are new and large.
    fn send(&self, state: &mut State, source: UploadSource, bytes: Bytes) -> Vec<Entry> {
        let mut entries = Vec::new();
        let content = match source {
            UploadSource::Slot(slot) => Content::Slot(slot),
            UploadSource::Held(index) => Content::Held(index),
            UploadSource::New { keep, forget } => {
                entries.extend(forget.into_iter().map(Entry::Forget));
                let counter = &self.counters.tensors_up;
                counter.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                match bytes.len() {
                    0..=INLINE_BYTES => Content::Inline { bytes, keep },
                    _ => {
                        // The chunks share the tensor's memory until they are
                        // acknowledged.
                        chunks(bytes).for_each(|chunk| state.bulk.push(Body::Chunk(chunk)));
                        self.want_bulk(state);
                        Content::Payload { keep }
                    }
                }
            }
        };
        entries.push(Entry::Upload(content));
        entries
    }

    /// Has the bulk track opened, or its driver woken.
    pub(super) fn want_bulk(&self, state: &mut State) {
        state.has_bulk = true;
        self.wake_bulk.notify_one();
    }
}
