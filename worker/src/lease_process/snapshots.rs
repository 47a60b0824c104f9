//! Sends snapshots of sessions to the worker, and has those of earlier processes.
//!
//! A snapshot is copied to sealed memory, which the worker keeps when this process dies. Threads
//! that may block copy it while ops run.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read, Seek, Write},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tensord_proto::{ids::SessionId, v1::Mark};
use tokio::{runtime::Handle, sync::mpsc, task::block_in_place};

use crate::{
    blobs::shared::{SEALS, unnamed_memory},
    locks::lock,
    process_message::{SnapshotInfo, SnapshotKept},
    registry::StoredSnapshots,
    session::{
        KeptCallback, SnapshotKeeper,
        sealed_snapshot::{OpeningReader, SealingWriter, SnapshotKey, SnapshotName, sealed_size},
        snapshot::Snapshot,
    },
};

/// Number of messages that wait to be sent to the worker. Each session has one snapshot at most.
const QUEUE: usize = 64;

/// Why a session's snapshot is not kept while another one of it is being kept.
const STILL_KEEPING: &str = "the previous snapshot is still being kept";

/// A message about snapshots for the worker.
pub(super) enum SnapshotMessage {
    Snapshot(SnapshotInfo, File),
    SessionEnded(SessionId),
}

/// Sends snapshots to the worker.
pub(super) struct SnapshotSender {
    /// Maximum size of a snapshot, and of all that are being copied.
    max_bytes: u64,
    /// Bytes of the snapshots that are being copied, which hold the memory of tensors.
    copying_bytes: AtomicU64,
    runtime: Handle,
    messages: mpsc::Sender<SnapshotMessage>,
    /// The sessions whose snapshot is being kept.
    pending: Mutex<HashMap<SessionId, PendingSnapshot>>,
    /// The mark and the size of the last snapshot of each session that the worker has kept.
    kept: Mutex<HashMap<SessionId, (u64, u64)>>,
}

/// A snapshot that is being kept.
struct PendingSnapshot {
    mark: u64,
    /// How long it took to copy.
    copying: Duration,
    /// `None` if the session has ended.
    kept: Option<KeptCallback>,
    /// Taken until the worker has replied, as the worker may be slow to receive the copy.
    bytes: CopyingBytes,
}

impl SnapshotSender {
    /// Creates a sender for snapshots of up to `max_bytes`. The receiver yields what the process must
    /// send to the worker.
    pub(super) fn new(
        max_bytes: u64,
        runtime: Handle,
    ) -> (Arc<Self>, mpsc::Receiver<SnapshotMessage>) {
        let (messages, queued) = mpsc::channel(QUEUE);
        let sender = Self {
            max_bytes,
            copying_bytes: AtomicU64::new(0),
            runtime,
            messages,
            pending: Mutex::default(),
            kept: Mutex::default(),
        };
        (Arc::new(sender), queued)
    }

    /// Processes the worker's reply to a snapshot.
    pub(super) fn on_kept(&self, kept: SnapshotKept) {
        let SnapshotKept {
            session_id,
            mark,
            error,
        } = kept;
        let result = match error.is_empty() {
            true => Ok(()),
            false => Err(error),
        };
        self.finish(SessionId(session_id), mark, result);
    }

    fn finish(&self, session: SessionId, mark: u64, result: Result<(), String>) {
        let mut pending = lock(&self.pending);
        if pending.get(&session).is_some_and(|it| it.mark == mark)
            && let Some(snapshot) = pending.remove(&session)
        {
            drop(pending);
            if result.is_ok() && snapshot.kept.is_some() {
                let CopyingBytes(_, size_bytes) = snapshot.bytes;
                lock(&self.kept).insert(session, (mark, size_bytes));
            }
            match snapshot.kept {
                Some(kept) => kept(snapshot.copying, result),
                None => self.send_session_ended(session),
            }
        }
    }

    /// Has the worker drop the snapshots of a session that has ended.
    fn send_session_ended(&self, session: SessionId) {
        let messages = self.messages.clone();
        self.runtime.spawn(async move {
            // An error means that the lease ends, and its snapshots with it.
            let ended = SnapshotMessage::SessionEnded(session);
            let _ = messages.send(ended).await;
        });
    }

    /// Takes `size_bytes` for a copy of a snapshot, until the result is dropped.
    ///
    /// # Errors
    ///
    /// Why the snapshot is not kept.
    fn begin_copy(
        self: &Arc<Self>,
        session: SessionId,
        size_bytes: u64,
    ) -> Result<CopyingBytes, String> {
        let max_bytes = self.max_bytes;
        if size_bytes > max_bytes {
            return Err(format!(
                "the snapshot has {size_bytes} bytes, and the worker's limit is {max_bytes} bytes"
            ));
        }
        if lock(&self.pending).contains_key(&session) {
            return Err(STILL_KEEPING.into());
        }
        let order = Ordering::Relaxed;
        let fits = |bytes: u64| {
            bytes
                .checked_add(size_bytes)
                .filter(|sum| *sum <= max_bytes)
        };
        match self.copying_bytes.fetch_update(order, order, fits) {
            Ok(_) => Ok(CopyingBytes(self.clone(), size_bytes)),
            Err(_) => Err("other snapshots are being copied".into()),
        }
    }

    /// Copies a snapshot, and queues it for the worker.
    ///
    /// # Errors
    ///
    /// Why the snapshot is not kept.
    fn copy_and_send(
        &self,
        info: SnapshotInfo,
        snapshot: &Snapshot,
        key: &SnapshotKey,
    ) -> Result<(), String> {
        let began = Instant::now();
        let file = copy(snapshot, key, name_of(info));
        let is_needed = self.copied(SessionId(info.session_id), began.elapsed());
        let file = file.map_err(|e| format!("cannot copy the snapshot to shared memory: {e}"))?;
        if !is_needed {
            return Err("the session has ended".into());
        }
        let message = SnapshotMessage::Snapshot(info, file);
        let sent = self.messages.blocking_send(message);
        sent.map_err(|_| "the lease is ending".to_owned())
    }

    /// Records how long a snapshot took to copy. Returns `false` if the session has ended.
    fn copied(&self, session: SessionId, copying: Duration) -> bool {
        match lock(&self.pending).get_mut(&session) {
            Some(pending) => {
                pending.copying = copying;
                pending.kept.is_some()
            }
            None => false,
        }
    }
}

/// Bytes of a snapshot that is being copied, until this is dropped.
struct CopyingBytes(Arc<SnapshotSender>, u64);

impl Drop for CopyingBytes {
    fn drop(&mut self) {
        let Self(sender, bytes) = self;
        sender.copying_bytes.fetch_sub(*bytes, Ordering::Relaxed);
    }
}

impl SnapshotKeeper for SnapshotSender {
    fn copy_limit(&self, session: SessionId, mark: Mark) -> Result<u64, String> {
        if lock(&self.pending).contains_key(&session) {
            return Err(STILL_KEEPING.into());
        }
        // The worker drops the session's last snapshot for this one, unless the client has committed
        // that one's mark.
        let kept = lock(&self.kept);
        let stay = kept
            .iter()
            .filter(|(of, (kept_mark, _))| **of != session || *kept_mark == mark.committed);
        let stay_bytes: u64 = stay.map(|(_, (_, size_bytes))| size_bytes).sum();
        let copying_bytes = self.copying_bytes.load(Ordering::Relaxed);
        Ok(self
            .max_bytes
            .saturating_sub(stay_bytes.saturating_add(copying_bytes)))
    }

    fn keep(
        self: Arc<Self>,
        session: SessionId,
        mark: Mark,
        snapshot: Box<Snapshot>,
        key: SnapshotKey,
        kept: KeptCallback,
    ) {
        let size_bytes = sealed_size(snapshot.size_bytes());
        let bytes = match self.begin_copy(session, size_bytes) {
            Ok(bytes) => bytes,
            Err(reason) => return kept(Duration::ZERO, Err(reason)),
        };
        let pending = PendingSnapshot {
            mark: mark.mark,
            copying: Duration::ZERO,
            kept: Some(kept),
            bytes,
        };
        // All snapshots of a session are kept by the one thread that executes its ops at a time.
        lock(&self.pending).insert(session, pending);
        let info = SnapshotInfo::new(session, mark, size_bytes);
        let runtime = self.runtime.clone();
        runtime.spawn_blocking(move || {
            let sent = self.copy_and_send(info, &snapshot, &key);
            // Before the reply, so that the tensors' memory is not held any longer.
            drop(snapshot);
            if let Err(reason) = sent {
                self.finish(session, mark.mark, Err(reason));
            }
        });
    }

    fn forget(self: Arc<Self>, session: SessionId) {
        lock(&self.kept).remove(&session);
        let callback = match lock(&self.pending).get_mut(&session) {
            // The worker must not get the snapshot after the end of its session.
            Some(pending) => pending.kept.take(),
            None => {
                self.send_session_ended(session);
                None
            }
        };
        // Not under the lock, as this may drop the session.
        drop(callback);
    }
}

/// Returns which snapshot `info` is about.
pub(crate) fn name_of(info: SnapshotInfo) -> SnapshotName {
    SnapshotName {
        session: SessionId(info.session_id),
        mark: info.mark,
    }
}

/// Copies a snapshot, encrypted, into memory that nobody can change.
pub(crate) fn copy(snapshot: &Snapshot, key: &SnapshotKey, name: SnapshotName) -> io::Result<File> {
    let file = unnamed_memory("tensord-snapshot")?;
    let mut sealing = SealingWriter::new(file, key, name, rand::random())?;
    snapshot.write(&mut sealing)?;
    let mut file = sealing.finish()?;
    file.flush()?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// The snapshots that earlier processes of the lease have left.
#[derive(Default)]
pub(crate) struct LeftSnapshots(Mutex<HashMap<(SessionId, u64), File>>);

impl LeftSnapshots {
    /// Adds a snapshot that the worker has passed on.
    pub(crate) fn add(&self, info: SnapshotInfo, file: OwnedFd) {
        let key = (SessionId(info.session_id), info.mark);
        lock(&self.0).insert(key, file.into());
    }

    /// Drops the snapshots of a session, which has ended or of which the worker has a later one.
    pub(crate) fn forget(&self, session: SessionId) {
        lock(&self.0).retain(|(of, _), _| *of != session);
    }

    /// Returns the sessions that have snapshots.
    pub(crate) fn sessions(&self) -> Vec<SessionId> {
        let mut sessions: Vec<_> = lock(&self.0).keys().map(|(session, _)| *session).collect();
        sessions.sort_unstable();
        sessions.dedup();
        sessions
    }
}

impl StoredSnapshots for LeftSnapshots {
    fn has(&self, session: SessionId, mark: u64) -> bool {
        lock(&self.0).contains_key(&(session, mark))
    }

    fn read(
        &self,
        session: SessionId,
        mark: u64,
        key: &SnapshotKey,
        max_bytes: u64,
    ) -> Result<Snapshot, String> {
        let file = lock(&self.0).get(&(session, mark)).map(File::try_clone);
        let file = file.ok_or_else(|| format!("the worker has no snapshot of mark {mark}"))?;
        let read = || {
            let mut file = file?;
            let size_bytes = file.metadata()?.len();
            file.rewind()?;
            let name = SnapshotName { session, mark };
            let mut opening = OpeningReader::new(file, size_bytes, key, name)?;
            Snapshot::read(&mut opening as &mut dyn Read, max_bytes)
        };
        block_in_place(read).map_err(|e| e.to_string())
    }
}
