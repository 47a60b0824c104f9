//! Reads and syncs that the worker has not replied to.

use std::collections::HashMap;

use burn_backend::{ExecutionError, TensorData};
use burn_ir::TensorIr;
use tensord_proto::v1::Synced;
use tokio::sync::oneshot;

use super::pending_reads::{BrokenRule, Delivery, PendingReads, unexpected};

/// The answer to a read or a sync.
pub(crate) type Answer<T> = oneshot::Sender<Result<T, ExecutionError>>;

/// The requests of a session that are pending.
#[derive(Default)]
pub(super) struct Requests {
    /// Id of the last request.
    last: u64,
    pub(super) reads: PendingReads,
    syncs: HashMap<u64, Answer<()>>,
}

impl Requests {
    fn new_id(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Adds a read of `tensor`. Returns its id, and whether its value comes as a payload.
    pub(super) fn add_read(
        &mut self,
        tensor: &TensorIr,
        answer: Answer<TensorData>,
    ) -> (u64, bool) {
        let id = self.new_id();
        (id, self.reads.expect(id, tensor, answer))
    }

    /// Adds a sync, and returns its id.
    pub(super) fn add_sync(&mut self, answer: Answer<()>) -> u64 {
        let id = self.new_id();
        self.syncs.insert(id, answer);
        id
    }

    /// Processes the worker's reply to a sync.
    pub(super) fn on_synced(&mut self, synced: Synced) -> Result<Delivery, BrokenRule> {
        let request = synced.request_id;
        let answer = self.syncs.remove(&request);
        let answer = answer.ok_or_else(|| unexpected("sync", request))?;
        let result = match synced.fault {
            None => Ok(()),
            Some(fault) => Err(ExecutionError::with_context(fault.to_string())),
        };
        Ok(Delivery::Synced(answer, result))
    }

    /// Fails all requests with `error`.
    pub(super) fn fail(self, error: &ExecutionError) {
        // The receivers may have been dropped.
        for answer in self.reads.into_answers() {
            let _ = answer.send(Err(error.clone()));
        }
        for answer in self.syncs.into_values() {
            let _ = answer.send(Err(error.clone()));
        }
    }
}
