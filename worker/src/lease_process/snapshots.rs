//! Sends snapshots of sessions to the worker, and has those of earlier processes.
//!
//! A snapshot is copied to sealed memory, which the worker keeps when this process dies. Threads
//! that may block make it of what the session has captured, and copy it, while ops run.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read, Seek, Write},
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tensord_backend::panic_message;
use tensord_proto::{ids::SessionId, v1::Mark};
use tokio::{runtime::Handle, sync::mpsc, task::block_in_place};

use crate::{
    locks::lock,
    memory_file::{SEALS, unnamed_memory},
    process_message::{SnapshotInfo, SnapshotKept},
    registry::StoredSnapshots,
    session::{
        Captured, KeepingTime, KeptCallback, SnapshotKeeper,
        sealed_snapshot::{
            OpeningReader, SealedContent, SealingWriter, SnapshotKey, SnapshotName, sealed_size,
        },
        snapshot::Snapshot,
    },
};

/// Number of messages that wait to be sent to the worker. Each session has one snapshot at most.
const QUEUE: usize = 64;

/// Why a session's snapshot is not kept while another one of it is being kept.
const STILL_KEEPING: &str = "the previous snapshot is still being kept";

/// Why the snapshot of a session is not kept that has ended meanwhile.
const SESSION_ENDED: &str = "the session has ended";

/// A message about snapshots for the worker.
pub(super) enum SnapshotMessage {
    /// A snapshot, with its base if that is new.
    Snapshot(SnapshotInfo, SealedFiles),
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
    /// The last snapshot of each session that the worker has kept.
    kept: Mutex<HashMap<SessionId, KeptSizes>>,
}

/// A snapshot that the worker keeps.
#[derive(Clone, Copy, Default)]
struct KeptSizes {
    mark: u64,
    /// Size without the base.
    size_bytes: u64,
    base_bytes: u64,
}

/// A snapshot that is being kept.
struct PendingSnapshot {
    sizes: KeptSizes,
    /// How long it took to copy.
    copying: Duration,
    /// `None` if the session has ended.
    kept: Option<KeptCallback>,
    /// The snapshot's part of `copying_bytes`: at first what the device has copied, and also the rest once the size is
    /// known. Held until the worker replies, as it may be slow to receive the copy.
    bytes: Vec<CopyingBytes>,
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

    /// Processes the worker's reply to a snapshot. Returns whether the worker keeps a snapshot that this
    /// process has taken. The reply may be to a snapshot of an earlier process of the lease.
    pub(super) fn on_kept(&self, kept: SnapshotKept) -> bool {
        let SnapshotKept {
            session_id,
            mark,
            error,
            sending_us,
        } = kept;
        let result = match error.is_empty() {
            true => Ok(()),
            false => Err(error),
        };
        let sending = Duration::from_micros(sending_us);
        self.finish(SessionId(session_id), mark, sending, result)
    }

    /// Ends the keeping of a session's snapshot, if it is the one of this mark. Returns whether the
    /// worker keeps it.
    fn finish(
        &self,
        session: SessionId,
        mark: u64,
        sending: Duration,
        result: Result<(), String>,
    ) -> bool {
        let mut pending = lock(&self.pending);
        let snapshot = match pending.get(&session) {
            Some(snapshot) if snapshot.sizes.mark == mark => pending.remove(&session),
            _ => None,
        };
        drop(pending);
        let Some(snapshot) = snapshot else {
            return false;
        };
        let is_kept = result.is_ok();
        match snapshot.kept {
            Some(kept) => {
                if is_kept {
                    lock(&self.kept).insert(session, snapshot.sizes);
                }
                let copying = snapshot.copying;
                kept(KeepingTime { copying, sending }, result);
            }
            None => self.send_session_ended(session),
        }
        is_kept
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
    fn begin_copy(self: &Arc<Self>, size_bytes: u64) -> Result<CopyingBytes, String> {
        let max_bytes = self.max_bytes;
        if size_bytes > max_bytes {
            return Err(format!(
                "the snapshot has {size_bytes} bytes, and the worker's limit is {max_bytes} bytes"
            ));
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

    /// Makes a snapshot, copies it, and queues it for the worker.
    ///
    /// # Errors
    ///
    /// Why the snapshot is not kept.
    fn copy_and_send(
        self: &Arc<Self>,
        session: SessionId,
        mark: Mark,
        captured: Captured,
        key: &SnapshotKey,
    ) -> Result<(), String> {
        let (began, copied_bytes) = (Instant::now(), captured.copied_bytes());
        let snapshot = captured.into_snapshot().map_err(|e| e.to_string())?;
        let sizes = KeptSizes {
            mark: mark.mark,
            size_bytes: sealed_size(snapshot.size_bytes()),
            base_bytes: snapshot.base_bytes().map_or(0, sealed_size),
        };
        let new_base = snapshot.new_base_bytes().map_or(0, sealed_size);
        let bytes = self.begin_copy((sizes.size_bytes + new_base).saturating_sub(copied_bytes))?;
        let is_needed = self.with_pending(session, mark, |pending| {
            pending.sizes = sizes;
            pending.bytes.push(bytes);
            pending.kept.is_some()
        });
        if !is_needed {
            return Err(SESSION_ENDED.into());
        }
        let info = SnapshotInfo::new(session, mark, sizes.size_bytes, snapshot.base_id());
        let files = copy(&snapshot, key, info);
        // Before the worker replies, so that the tensors' memory is not held any longer.
        drop(snapshot);
        let is_needed = self.with_pending(session, mark, |pending| {
            pending.copying = began.elapsed();
            pending.kept.is_some()
        });
        let files = files.map_err(|e| format!("cannot copy the snapshot to shared memory: {e}"))?;
        if !is_needed {
            return Err(SESSION_ENDED.into());
        }
        let message = SnapshotMessage::Snapshot(info, files);
        let sent = self.messages.blocking_send(message);
        sent.map_err(|_| "the lease is ending".to_owned())
    }

    /// Returns what `call` returns for the snapshot of a session at a mark that is being kept; `false` if there is none:
    /// the worker may already have it from an earlier process.
    fn with_pending(
        &self,
        session: SessionId,
        mark: Mark,
        call: impl FnOnce(&mut PendingSnapshot) -> bool,
    ) -> bool {
        let mut pending = lock(&self.pending);
        let snapshot = pending.get_mut(&session);
        snapshot
            .filter(|it| it.sizes.mark == mark.mark)
            .is_some_and(call)
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
        let stay = kept.iter().map(|(of, sizes)| {
            let stays = *of != session || sizes.mark == mark.committed;
            sizes.base_bytes + if stays { sizes.size_bytes } else { 0 }
        });
        let stay_bytes: u64 = stay.sum();
        let copying_bytes = self.copying_bytes.load(Ordering::Relaxed);
        Ok(self
            .max_bytes
            .saturating_sub(stay_bytes.saturating_add(copying_bytes)))
    }

    fn keep(
        self: Arc<Self>,
        session: SessionId,
        mark: Mark,
        captured: Box<Captured>,
        key: SnapshotKey,
        kept: KeptCallback,
    ) {
        // All snapshots of a session are kept by the one thread that executes its ops at a time.
        if lock(&self.pending).contains_key(&session) {
            return kept(KeepingTime::default(), Err(STILL_KEEPING.into()));
        }
        let bytes = match self.begin_copy(captured.copied_bytes()) {
            Ok(bytes) => bytes,
            Err(reason) => return kept(KeepingTime::default(), Err(reason)),
        };
        let pending = PendingSnapshot {
            sizes: KeptSizes {
                mark: mark.mark,
                ..KeptSizes::default()
            },
            copying: Duration::ZERO,
            kept: Some(kept),
            bytes: vec![bytes],
        };
        lock(&self.pending).insert(session, pending);
        let runtime = self.runtime.clone();
        runtime.spawn_blocking(move || {
            // A panic must not keep the session from later snapshots.
            let send = || self.copy_and_send(session, mark, *captured, &key);
            let sent = catch_unwind(AssertUnwindSafe(send));
            let sent = sent.unwrap_or_else(|panic| Err(panic_message(panic.as_ref())));
            if let Err(reason) = sent {
                self.finish(session, mark.mark, Duration::ZERO, Err(reason));
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

/// A snapshot in memory that nobody can change, and its base if that is new.
pub(crate) struct SealedFiles {
    pub(crate) snapshot: File,
    pub(crate) base: Option<File>,
}

/// Copies a snapshot, encrypted, into memory that nobody can change.
pub(crate) fn copy(
    snapshot: &Snapshot,
    key: &SnapshotKey,
    info: SnapshotInfo,
) -> io::Result<SealedFiles> {
    let session = SessionId(info.session_id);
    let sealing = |content| {
        let file = unnamed_memory("tensord-snapshot")?;
        let name = SnapshotName { session, content };
        SealingWriter::new(file, key, name, rand::random())
    };
    let base = match snapshot.new_base_bytes() {
        Some(_) => {
            let mut sealing = sealing(SealedContent::Base(info.base_id))?;
            snapshot.write_base(&mut sealing)?;
            Some(seal_file(sealing.finish()?)?)
        }
        None => None,
    };
    let mut sealing = sealing(SealedContent::Mark(info.mark))?;
    snapshot.write(&mut sealing)?;
    let snapshot = seal_file(sealing.finish()?)?;
    Ok(SealedFiles { snapshot, base })
}

fn seal_file(mut file: File) -> io::Result<File> {
    file.flush()?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// The snapshots that earlier processes of the lease have left.
#[derive(Default)]
pub(crate) struct LeftSnapshots {
    /// By session and mark.
    snapshots: Mutex<HashMap<(SessionId, u64), File>>,
    /// By session and id.
    bases: Mutex<HashMap<(SessionId, u64), File>>,
}

impl LeftSnapshots {
    /// Adds a snapshot that the worker has passed on.
    pub(crate) fn add(&self, info: SnapshotInfo, file: OwnedFd) {
        let key = (SessionId(info.session_id), info.mark);
        lock(&self.snapshots).insert(key, file.into());
    }

    /// Adds the base of a snapshot that the worker has passed on.
    pub(crate) fn add_base(&self, info: SnapshotInfo, file: OwnedFd) {
        let key = (SessionId(info.session_id), info.base_id);
        lock(&self.bases).insert(key, file.into());
    }

    /// Drops the snapshots of a session, which has ended or of which the worker has a later one.
    pub(crate) fn forget(&self, session: SessionId) {
        lock(&self.snapshots).retain(|(of, _), _| *of != session);
        lock(&self.bases).retain(|(of, _), _| *of != session);
    }

    /// Returns the sessions that have snapshots.
    pub(crate) fn sessions(&self) -> Vec<SessionId> {
        let snapshots = lock(&self.snapshots);
        let mut sessions: Vec<_> = snapshots.keys().map(|(session, _)| *session).collect();
        sessions.sort_unstable();
        sessions.dedup();
        sessions
    }
}

impl StoredSnapshots for LeftSnapshots {
    fn has(&self, session: SessionId, mark: u64) -> bool {
        lock(&self.snapshots).contains_key(&(session, mark))
    }

    fn read(
        &self,
        session: SessionId,
        mark: u64,
        key: &SnapshotKey,
        max_bytes: u64,
    ) -> Result<Snapshot, String> {
        let copy_of = |files: &Mutex<HashMap<_, File>>, number| {
            let file = lock(files).get(&(session, number)).map(File::try_clone);
            file.unwrap_or_else(|| {
                let reason = format!(
                    "the worker has no snapshot of session {session} at mark {mark}, or not the base that this needs"
                );
                Err(io::Error::new(io::ErrorKind::NotFound, reason))
            })
        };
        let open = |file: io::Result<File>, content| {
            let mut file = file?;
            let size_bytes = file.metadata()?.len();
            file.rewind()?;
            OpeningReader::new(file, size_bytes, key, SnapshotName { session, content })
        };
        let read = || {
            let file = copy_of(&self.snapshots, mark);
            let mut opening = open(file, SealedContent::Mark(mark))?;
            let open_base = |id| open(copy_of(&self.bases, id), SealedContent::Base(id));
            Snapshot::read(&mut opening as &mut dyn Read, open_base, max_bytes)
        };
        block_in_place(read).map_err(|e| e.to_string())
    }
}
