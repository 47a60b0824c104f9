//! Changes of a worker, after which the index is updated.

use std::mem;
use std::ops::{Deref, DerefMut};

use tensord_proto::ids::WorkerId;

use super::Pool;
use super::held_back::HeldBack;
use super::index::{WorkerIndex, WorkerKeys};
use super::worker::Worker;
use crate::event::DeviceRef;

/// A worker, and its keys in the index.
pub(super) struct Entry {
    pub(super) worker: Worker,
    pub(super) keys: WorkerKeys,
}

/// A worker that is changed. When this is dropped, the index is updated.
pub(super) struct WorkerMut<'a> {
    id: WorkerId,
    entry: &'a mut Entry,
    index: &'a mut WorkerIndex,
    held_back: &'a HeldBack,
}

impl Deref for WorkerMut<'_> {
    type Target = Worker;

    fn deref(&self) -> &Worker {
        &self.entry.worker
    }
}

impl DerefMut for WorkerMut<'_> {
    fn deref_mut(&mut self) -> &mut Worker {
        &mut self.entry.worker
    }
}

impl Drop for WorkerMut<'_> {
    fn drop(&mut self) {
        let keys = keys_of(self.id, &self.entry.worker, self.held_back);
        if keys != self.entry.keys {
            let before = mem::replace(&mut self.entry.keys, keys);
            let keys = Some(&self.entry.keys);
            self.index.replace(self.id, Some(&before), keys);
        }
    }
}

/// Returns the keys of a worker in the index.
pub(super) fn keys_of(id: WorkerId, worker: &Worker, held_back: &HeldBack) -> WorkerKeys {
    worker.keys(|index| held_back.for_others(DeviceRef { worker: id, index }, None))
}

impl Pool {
    /// Returns a worker, to be changed.
    pub(super) fn worker_mut(&mut self, id: WorkerId) -> Option<WorkerMut<'_>> {
        let entry = self.workers.get_mut(&id)?;
        Some(WorkerMut {
            id,
            entry,
            index: &mut self.index,
            held_back: &self.held_back,
        })
    }
}
