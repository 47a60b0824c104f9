//! Reads and syncs that the worker has not replied to.

use std::collections::HashMap;

use burn_backend::{ExecutionError, TensorData};
use burn_ir::TensorIr;
use tensord_proto::v1::Synced;
use tokio::sync::oneshot;

use super::{
    answered::AnsweredReads,
    pending_reads::{BrokenRule, Delivery, PendingReads, unexpected},
};

/// The answer to a read or a sync.
pub type Answer<T> = oneshot::Sender<Result<T, ExecutionError>>;

/// The requests of a session that are pending.
#[derive(Default)]
pub struct Requests {
    /// Id of the last request.
    last: u64,
    pub(super) reads: PendingReads,
    syncs: HashMap<u64, Answer<()>>,
    /// Whether replies may be repeated, as the session went on in another process.
    is_repeated: bool,
}

impl Requests {
    /// If answers `may_differ`, a worker that goes on with the session may repeat others than the
    /// first ones.
    pub(super) fn new(may_differ: bool) -> Self {
        let mut requests = Self::default();
        requests.reads.answered = AnsweredReads::new(may_differ);
        requests
    }

    /// Returns the id of the last request.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// Returns the id of the first request without a reply.
    pub(super) fn first_pending(&self) -> Option<u64> {
        let syncs = self.syncs.keys().copied().min();
        let reads = self.reads.first_pending();
        syncs.into_iter().chain(reads).min()
    }

    /// Keeps replies, so that a process that repeats them can be checked.
    pub(super) fn begin_journal(&mut self) {
        self.reads.answered.keep(true);
    }

    /// Forgets the replies that were kept.
    pub(super) fn end_journal(&mut self) {
        self.reads.answered.keep(false);
    }

    /// Forgets the replies to requests up to `id`, which will not be repeated.
    pub(super) fn commit(&mut self, id: u64) {
        self.reads.answered.forget(id);
    }

    /// Prepares for another process, which repeats the replies since the last commit.
    pub(super) fn restored(&mut self) {
        self.is_repeated = true;
        self.reads.restored();
    }

    fn new_id(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Adds a read of `tensor` after so many ops. Returns its id, and whether its value comes as a payload.
    pub(super) fn add_read(
        &mut self,
        tensor: &TensorIr,
        after_ops: u64,
        answer: Answer<TensorData>,
    ) -> (u64, bool) {
        let id = self.new_id();
        (id, self.reads.expect(id, tensor, after_ops, answer))
    }

    /// Adds a sync, and returns its id.
    pub(super) fn add_sync(&mut self, answer: Answer<()>) -> u64 {
        let id = self.new_id();
        self.syncs.insert(id, answer);
        id
    }

    /// Processes the worker's reply to a sync.
    pub(super) fn on_synced(&mut self, synced: Synced) -> Result<Option<Delivery>, BrokenRule> {
        let request = synced.request_id;
        let Some(answer) = self.syncs.remove(&request) else {
            return match self.is_repeated && request <= self.last {
                true => Ok(None),
                false => Err(unexpected("sync", request)),
            };
        };
        let result = match synced.fault {
            None => Ok(()),
            Some(fault) => Err(ExecutionError::with_context(fault.to_string())),
        };
        Ok(Some(Delivery::Synced(answer, result)))
    }

    /// Fails all requests with `error`.
    pub fn fail(self, error: &ExecutionError) {
        // The receivers may have been dropped.
        for answer in self.reads.into_answers() {
            let _ = answer.send(Err(error.clone()));
        }
        for answer in self.syncs.into_values() {
            let _ = answer.send(Err(error.clone()));
        }
    }
}
