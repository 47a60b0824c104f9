//! Offers the kept uploads of a session to the tenant's later sessions while the session runs, as a
//! sync of the client requests.
//!
//! The uploads are shared in rounds, one at a time. A round has the uploads that no earlier round has
//! had. They are copied and hashed elsewhere, and meanwhile the session goes on. Syncs that come during
//! a round get their replies after the next one. So a client that requests more and more costs one round
//! at a time, and the uploads that it has sent bound what all rounds copy.

use std::{
    mem::take,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tensord_proto::v1::Fault;
use tokio::time::timeout;
use tracing::debug;

use super::{Session, runner::Runner};
use crate::blobs::Keeping;

/// How long a round may take until its syncs are answered all the same. Copying and hashing a GiB
/// takes a second or two.
const ROUND_TIMEOUT: Duration = Duration::from_secs(30);

/// The reply to a sync: its request id and its fault.
pub(super) type Synced = (u64, Option<Arc<Fault>>);

/// The syncs that wait for uploads to be shared.
#[derive(Default)]
pub(super) struct UploadSharing(Mutex<Rounds>);

#[derive(Default)]
struct Rounds {
    is_active: bool,
    /// The replies after the present round, and those after the next one. Their number is bounded
    /// by that of reads in flight, as each counts as one.
    present: Vec<Synced>,
    next: Vec<Synced>,
}

impl UploadSharing {
    /// Adds a sync. Returns whether the caller must begin a round.
    fn add(&self, synced: Synced) -> bool {
        let mut rounds = self.lock();
        match rounds.is_active {
            true => rounds.next.push(synced),
            false => rounds.present.push(synced),
        }
        !std::mem::replace(&mut rounds.is_active, true)
    }

    /// Ends the present round. Returns its syncs, and whether the caller must begin another round.
    fn end_round(&self) -> (Vec<Synced>, bool) {
        let mut rounds = self.lock();
        let next = take(&mut rounds.next);
        rounds.is_active = !next.is_empty();
        let ended = std::mem::replace(&mut rounds.present, next);
        (ended, rounds.is_active)
    }

    fn lock(&self) -> MutexGuard<'_, Rounds> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    /// Replies to a sync when the kept uploads are shared. `take_unshared` returns those that are not.
    pub(super) fn reply_when_shared(
        self: &Arc<Self>,
        synced: Synced,
        take_unshared: impl FnOnce() -> Vec<Bytes>,
    ) {
        self.work_queue.begin_read(0);
        if self.upload_sharing.add(synced) {
            self.share(take_unshared());
        }
    }

    /// Shares `contents` in a round, which ends in the background.
    pub(super) fn share(self: &Arc<Self>, contents: Vec<Bytes>) {
        if contents.is_empty() {
            return self.end_round();
        }
        let kept = self.keep_blobs(contents);
        let session = self.clone();
        self.device_context.runtime.spawn(async move {
            if timeout(ROUND_TIMEOUT, kept).await.is_err() {
                debug!(session = %session.id, "sharing kept uploads takes more than {ROUND_TIMEOUT:?}; the session does not wait any longer");
            }
            session.end_round();
        });
    }

    /// Drops the runner, and passes its kept uploads on to later sessions, unless they were shared before.
    pub(super) fn keep_uploads(&self, mut runner: Runner) {
        let kept = runner.take_unshared();
        drop(runner);
        if !kept.is_empty() {
            self.keep_blobs(kept);
        }
    }

    /// Passes uploads of this session to the store from which later sessions get them.
    fn keep_blobs(&self, contents: Vec<Bytes>) -> Keeping {
        let (blobs, runtime) = (&self.device_context.blobs, &self.device_context.runtime);
        let tenant = self.grant.tenant.clone();
        blobs.clone().keep(runtime, tenant, contents)
    }

    fn end_round(self: &Arc<Self>) {
        let (ended, has_next) = self.upload_sharing.end_round();
        if has_next {
            // Only the executor has the runner, which has the uploads.
            self.schedule(self.work_queue.push_sharing());
        }
        for (request, fault) in ended {
            // No reply may follow `Closed`.
            if !self.has_ended() {
                self.outbound.queue_synced(request, fault);
            }
            self.schedule(self.work_queue.end_read(0));
        }
        self.outbound.wake_writer();
    }
}
