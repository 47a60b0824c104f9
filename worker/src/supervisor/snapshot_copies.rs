//! Where a lease's snapshots are copied to: its keeper, and the worker's snapshot store if it has one.
//!
//! A mark counts as kept when it does at both. If its worker is lost, the lease can then go on from
//! either of them.

use std::collections::HashMap;

use tensord_proto::ids::{SessionId, StoreId};

use super::{copy_queue::CopyQueue, keeper_link::KeeperQueues};
use crate::process_message::SnapshotKept;

/// The queues between the run of a lease and what copies its snapshots.
pub(super) struct SnapshotCopies {
    keeper: KeeperQueues,
    store: Option<CopyQueue<StoreId>>,
    /// The last mark of each session that does not count as kept at both.
    pending: HashMap<SessionId, PendingCopies>,
}

/// A mark, and where it does not count as kept yet.
struct PendingCopies {
    mark: u64,
    awaits_keeper: bool,
    awaits_store: bool,
    /// The longest time for which the snapshot was sent to one of them.
    sending_us: u64,
}

impl SnapshotCopies {
    pub(super) fn new(keeper: KeeperQueues, store: Option<CopyQueue<StoreId>>) -> Self {
        Self {
            keeper,
            store,
            pending: HashMap::new(),
        }
    }

    /// Has a session's new snapshot copied. Returns `false` if it counts as kept already.
    pub(super) fn send(&mut self, session: SessionId, mark: u64) -> bool {
        let awaits_keeper = self.keeper.send(session, mark);
        let store = self.store.as_ref();
        let awaits_store = store.is_some_and(|store| store.send(session, mark));
        let is_pending = awaits_keeper || awaits_store;
        match is_pending {
            true => {
                let pending = PendingCopies {
                    mark,
                    awaits_keeper,
                    awaits_store,
                    sending_us: 0,
                };
                self.pending.insert(session, pending);
            }
            false => drop(self.pending.remove(&session)),
        }
        is_pending
    }

    /// Returns the next snapshot that counts as kept at both. Cancel safe. Never returns if the lease has
    /// ended.
    pub(super) async fn kept(&mut self) -> SnapshotKept {
        loop {
            let (kept, is_keeper) = tokio::select! {
                Some(kept) = self.keeper.kept() => (kept, true),
                Some(kept) = next_stored(&mut self.store) => (kept, false),
                else => std::future::pending().await,
            };
            let session = SessionId(kept.session_id);
            let pending = self.pending.get_mut(&session);
            let Some(pending) = pending.filter(|pending| pending.mark == kept.mark) else {
                continue;
            };
            match is_keeper {
                true => pending.awaits_keeper = false,
                false => pending.awaits_store = false,
            }
            pending.sending_us = pending.sending_us.max(kept.sending_us);
            if !pending.awaits_keeper && !pending.awaits_store {
                let sending_us = pending.sending_us;
                self.pending.remove(&session);
                return SnapshotKept { sending_us, ..kept };
            }
        }
    }

    /// Forgets the snapshots of a process that has died. The next one comes to the same marks again, and a
    /// copy of the earlier snapshot must not count for its own.
    pub(super) fn process_died(&mut self) {
        self.pending.clear();
    }

    /// Has the copies of a session's snapshots dropped.
    pub(super) fn end_session(&mut self, session: SessionId) {
        self.pending.remove(&session);
        self.keeper.end_session(session);
        if let Some(store) = &self.store {
            store.end_session(session);
        }
    }
}

/// Returns the next snapshot that counts as kept in the store. Cancel safe.
async fn next_stored(store: &mut Option<CopyQueue<StoreId>>) -> Option<SnapshotKept> {
    store.as_mut()?.kept.recv().await
}
