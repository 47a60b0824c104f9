//! What a session needs to go on in another process.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tensord_proto::{
    ids::SessionId,
    v1::{Mark, Marked},
};

use super::{
    InboundError, Session,
    inbound::Item,
    runner::{Captured, Work},
    sealed_snapshot::SnapshotKey,
    snapshot::SnapshotError,
    snapshot_base::MIN_BASE_BYTES,
};

/// Keeps snapshots of sessions where they outlive this process.
pub(crate) trait SnapshotKeeper: Send + Sync {
    /// Returns the maximum size of a snapshot of this session at this mark that could be kept now.
    ///
    /// # Errors
    ///
    /// Why none could be kept.
    fn copy_limit(&self, session: SessionId, mark: Mark) -> Result<u64, String>;

    /// Makes a snapshot and keeps it, sealed with `key`, in the background, and then calls `kept`, with the
    /// reason if it is not kept. Snapshots of this session from before the committed mark are
    /// dropped.
    fn keep(
        self: Arc<Self>,
        session: SessionId,
        mark: Mark,
        captured: Box<Captured>,
        key: SnapshotKey,
        kept: KeptCallback,
    );

    /// Drops all snapshots of a session, which has ended.
    fn forget(self: Arc<Self>, session: SessionId);

    /// Returns how many bytes the contents that snapshots share must have at least.
    fn min_base_bytes(&self) -> u64 {
        MIN_BASE_BYTES
    }
}

/// How long it took to keep a snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct KeepingTime {
    /// Until it was copied.
    pub(crate) copying: Duration,
    /// For how long it was sent to another worker.
    pub(crate) sending: Duration,
}

/// Is called with how long it took to keep a snapshot, and with the reason if it is not kept.
pub(crate) type KeptCallback = Box<dyn FnOnce(KeepingTime, Result<(), String>) + Send>;

impl Session {
    /// Returns the number of the mark from which the session went on, or 0.
    pub(crate) fn restored_at(&self) -> u64 {
        self.restored_at
    }

    /// Checks the numbers of a mark. The caller has locked out other readers.
    pub(super) fn check_mark(&self, item: &Item) -> Result<(), InboundError> {
        let Item::Work(Work::Mark(Mark { mark, committed }), _) = item else {
            return Ok(());
        };
        let last = self.last_mark.swap(*mark, Ordering::Relaxed);
        match *mark > last && committed < mark {
            true => Ok(()),
            false => Err(InboundError::Violation(format!(
                "mark {mark} follows mark {last}, and mark {committed} is committed"
            ))),
        }
    }

    /// Replies to a mark, once the session's state there is kept outside of this process.
    pub(super) fn keep_snapshot(
        self: &Arc<Self>,
        mark: Mark,
        captured: Result<Box<Captured>, SnapshotError>,
        cost: Duration,
    ) {
        let session = self.clone();
        let outcome = captured.as_ref().ok().map(|captured| captured.outcome());
        let reply = move |time: KeepingTime, kept: Result<(), String>| {
            if let Some(outcome) = outcome {
                // It is set once.
                let _ = outcome.set(kept.is_ok());
            }
            session.outbound.queue_marked(Marked {
                mark: mark.mark,
                error: kept.err().unwrap_or_default(),
                cost_us: (cost + time.copying).as_micros() as u64,
                sending_us: match session.uses_network() {
                    true => time.sending.as_micros() as u64,
                    false => 0,
                },
            });
            session.outbound.wake_writer();
        };
        let (Some(snapshots), Some(key)) = (&self.device_context.snapshots, &self.snapshot_key)
        else {
            let reason = match &self.snapshot_key {
                Some(_) => "the worker keeps no snapshots",
                None => "the session was opened without snapshots",
            };
            return reply(KeepingTime::default(), Err(reason.into()));
        };
        match captured {
            Ok(mut captured) => {
                captured.set_held(&self.offered);
                let (snapshots, key) = (snapshots.clone(), key.clone());
                snapshots.keep(self.id, mark, captured, key, Box::new(reply));
            }
            Err(e) => reply(KeepingTime::default(), Err(e.to_string())),
        }
    }

    /// Returns whether all-reduces of the session's lease use the network between workers.
    fn uses_network(&self) -> bool {
        self.cohort.lease_members().others().next().is_some()
    }

    /// Returns whether the first frame that the session sends lists the kept uploads that it was offered.
    pub(crate) fn begins_with_held(&self) -> bool {
        self.restored_at == 0 && !self.offered.is_empty()
    }

    /// Returns whether the session can go on in another process.
    pub(crate) fn is_durable(&self) -> bool {
        self.device_context.snapshots.is_some() && self.snapshot_key.is_some()
    }
}
