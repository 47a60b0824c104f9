//! The snapshot of a session on its way from the session to the worker.

use std::sync::{Arc, Mutex};

use tensord_proto::{ids::SessionId, v1::Mark};

use crate::{
    lease_process::snapshots::{SealedFiles, copy},
    locks::lock,
    process_message::SnapshotInfo,
    session::{
        Captured, KeepingTime, KeptCallback, SnapshotKeeper,
        sealed_snapshot::{SnapshotKey, sealed_size},
    },
};

/// The snapshot of a session that a process is keeping, if any.
#[derive(Default)]
pub(super) struct HeldSnapshot(Mutex<Option<Keeping>>);

/// How far a snapshot has got.
enum Keeping {
    /// The worker does not have it.
    Captured(SessionId, Mark, Box<Captured>, SnapshotKey, KeptCallback),
    /// The worker is to reply to it.
    Sent(u64, KeptCallback),
}

impl HeldSnapshot {
    /// Copies the snapshot if it was captured. Returns the copy for the worker, which is to reply to it.
    ///
    /// # Panics
    ///
    /// If the system has no memory.
    pub(super) fn copy(&self) -> Option<(SnapshotInfo, SealedFiles)> {
        let mut held = lock(&self.0);
        match held.take()? {
            Keeping::Captured(session, mark, captured, key, kept) => {
                let snapshot = captured.into_snapshot().expect("Flex captures all");
                let size_bytes = sealed_size(snapshot.size_bytes());
                let info = SnapshotInfo::new(session, mark, size_bytes, snapshot.base_id());
                let copied = copy(&snapshot, &key, info).expect("there is memory");
                *held = Some(Keeping::Sent(info.mark, kept));
                Some((info, copied))
            }
            sent => {
                *held = Some(sent);
                None
            }
        }
    }

    /// Ends the keeping of the snapshot of this mark, to which the worker has replied. Returns the callback for
    /// the reply, unless the snapshot is another one. As in a real process, one that is still being copied
    /// counts, too.
    pub(super) fn kept(&self, replied: u64) -> Option<KeptCallback> {
        let mut held = lock(&self.0);
        match held.take() {
            Some(
                Keeping::Captured(_, Mark { mark, .. }, _, _, kept) | Keeping::Sent(mark, kept),
            ) if mark == replied => Some(kept),
            other => {
                *held = other;
                None
            }
        }
    }
}

impl SnapshotKeeper for HeldSnapshot {
    fn copy_limit(&self, _: SessionId, _: Mark) -> Result<u64, String> {
        Ok(u64::MAX)
    }

    fn keep(
        self: Arc<Self>,
        session: SessionId,
        mark: Mark,
        captured: Box<Captured>,
        key: SnapshotKey,
        kept: KeptCallback,
    ) {
        let mut held = lock(&self.0);
        if held.is_some() {
            drop(held);
            let reason = "the previous snapshot is still being kept";
            return kept(KeepingTime::default(), Err(reason.into()));
        }
        *held = Some(Keeping::Captured(session, mark, captured, key, kept));
    }

    fn forget(self: Arc<Self>, _: SessionId) {
        // The programs keep their sessions until the end of their lease, which drops the snapshots.
    }

    fn min_base_bytes(&self) -> u64 {
        // The programs are small.
        64
    }
}
