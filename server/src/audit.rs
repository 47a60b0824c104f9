//! The audit log: who was admitted, granted devices, denied or cut off, from which
//! address, and why. Each line is one JSON object, in files of the state directory that
//! only their owner can read ([`file`](mod@file)).
//!
//! Recording never blocks: entries go through a bounded queue to a thread that writes
//! them. Entries that find the queue full are counted instead, and so are denials beyond
//! ten a second for one cause, and other entries that one tenant or worker causes too fast
//! ([`flood_limit`]). The counts are written as entries, too.

mod file;
mod flood_limit;

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Instant, SystemTime},
};

use serde::Serialize;
use tensord_proto::text::{MESSAGE_CHARS, NAME_CHARS, sanitize};
use tracing::warn;

use self::{
    file::Files,
    flood_limit::{Actor, FloodLimit},
};
use crate::rate::{Decision, Limiter, SECOND};

/// Capacity of the queue of entries to write: as many as a busy pool records in a second,
/// in at most a few hundred kilobytes.
const QUEUE_CAPACITY: usize = 1024;

/// The log's location, and how much of it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The directory of the log's files.
    pub(crate) directory: PathBuf,
    /// The largest size of one file, in bytes; 0 turns the log off.
    pub(crate) file_bytes: u64,
    /// Maximum number of files to keep, including the current one.
    pub(crate) files: u32,
}

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EntryKind {
    /// A client or a worker was admitted.
    Admitted,
    /// A client was granted a lease.
    Granted,
    /// A call, a hello or a request was refused.
    Denied,
    /// A token or a lease was revoked.
    Revoked,
    /// A lease ended, or a client or worker is gone.
    Ended,
    /// Entries were lost because the queue was full, or because the tenant or worker has
    /// caused too many.
    Lost,
}

/// One line of the log, with a field for each of its columns. Those that do not apply are left out.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Entry {
    time_ms: u64,
    event: EntryKind,
    /// The name of the token that the peer sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    client: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker: Option<String>,
    /// The worker's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// The address that the peer's connection comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    devices: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// The number of events that this line stands for, if not one.
    #[serde(skip_serializing_if = "Option::is_none")]
    count: Option<u64>,
}

impl Entry {
    /// Creates an entry with the current time.
    pub(crate) fn new(event: EntryKind) -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let millis = since.unwrap_or_default().as_millis();
        Self {
            time_ms: u64::try_from(millis).unwrap_or(u64::MAX),
            event,
            token: None,
            role: None,
            tenant: None,
            client: None,
            worker: None,
            name: None,
            address: None,
            lease: None,
            devices: None,
            reason: None,
            count: None,
        }
    }

    /// Sets the name, role and tenant of the token that the peer sent.
    pub(crate) fn token(mut self, name: &str, role: &'static str, tenant: &str) -> Self {
        self.token = Some(sanitize(name, NAME_CHARS).to_string());
        self.role = Some(role);
        self.tenant = Some(sanitize(tenant, NAME_CHARS).to_string());
        self
    }

    /// Sets the role that the call requires.
    pub(crate) fn role(mut self, role: &'static str) -> Self {
        self.role = Some(role);
        self
    }

    /// Sets the client's id.
    pub(crate) fn client(mut self, id: impl ToString) -> Self {
        self.client = Some(id.to_string());
        self
    }

    /// Sets the worker's name alone, where its id is not known.
    pub(crate) fn name(mut self, name: &str) -> Self {
        self.name = Some(sanitize(name, NAME_CHARS).to_string());
        self
    }

    /// Sets the worker's id and name.
    pub(crate) fn worker(mut self, id: impl ToString, name: &str) -> Self {
        self.worker = Some(id.to_string());
        self.name = Some(sanitize(name, NAME_CHARS).to_string());
        self
    }

    /// Sets the peer's address.
    pub(crate) fn address(mut self, address: SocketAddr) -> Self {
        self.address = Some(address);
        self
    }

    /// Sets the lease's id.
    pub(crate) fn lease(mut self, id: impl ToString) -> Self {
        self.lease = Some(id.to_string());
        self
    }

    /// Sets the number of the lease's devices.
    pub(crate) fn devices(mut self, devices: usize) -> Self {
        self.devices = Some(devices);
        self
    }

    /// Sets the reason.
    pub(crate) fn reason(mut self, reason: impl ToString) -> Self {
        self.reason = Some(sanitize(&reason.to_string(), MESSAGE_CHARS).to_string());
        self
    }

    /// Creates the entry that stands for `count` entries of `actor` that were not written.
    fn skipped(actor: Actor, count: u64) -> Self {
        let mut entry = Self::new(EntryKind::Lost);
        match actor {
            Actor::Tenant(tenant) => entry.tenant = Some(tenant),
            Actor::Worker(name) => entry.name = Some(name),
        }
        entry.reason("too many entries").count(count)
    }

    /// Returns whose [`FloodLimit`] holds for the entry; `None` if none does.
    fn limited_actor(&self) -> Option<Actor> {
        let is_limited = match self.event {
            EntryKind::Admitted | EntryKind::Granted | EntryKind::Ended => true,
            EntryKind::Denied | EntryKind::Revoked | EntryKind::Lost => false,
        };
        let worker = self.name.clone().map(Actor::Worker);
        let actor = worker.or_else(|| self.tenant.clone().map(Actor::Tenant));
        actor.filter(|_| is_limited)
    }

    fn count(mut self, count: u64) -> Self {
        self.count = Some(count);
        self
    }
}

/// Handle that records entries. Cheap to clone; the writer thread ends when the last clone
/// is dropped.
#[derive(Clone)]
pub(crate) struct Audit(Option<Arc<Inner>>);

impl std::fmt::Debug for Audit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Audit")
    }
}

struct Inner {
    /// `None` only while `Inner` is being dropped.
    entries: Option<SyncSender<Entry>>,
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    lost: AtomicU64,
    denials: Mutex<Limiter<&'static str>>,
    floods: Mutex<FloodLimit>,
}

impl Shared {
    fn denials(&self) -> MutexGuard<'_, Limiter<&'static str>> {
        self.denials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn floods(&self) -> MutexGuard<'_, FloodLimit> {
        self.floods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Audit {
    /// Returns a log that discards every entry.
    pub(crate) fn disabled() -> Self {
        Self(None)
    }

    /// Opens the log, or returns one that discards entries if `file_bytes` is 0.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened, or the thread cannot be started.
    pub(crate) fn open(settings: Settings) -> std::io::Result<Self> {
        if settings.file_bytes == 0 {
            return Ok(Self::disabled());
        }
        let mut files = Files::open(settings)?;
        let (sender, entries) = sync_channel(QUEUE_CAPACITY);
        let shared = Arc::<Shared>::default();
        let counts = shared.clone();
        let thread = thread::Builder::new().name("tensord-audit".into());
        let writer = thread.spawn(move || write(&entries, &counts, &mut files))?;
        Ok(Self(Some(Arc::new(Inner {
            entries: Some(sender),
            shared,
            writer: Some(writer),
        }))))
    }

    /// Queues an entry; counts it as lost if the queue is full, or its tenant or worker has
    /// caused too many.
    pub(crate) fn record(&self, entry: Entry) {
        let Some(inner) = &self.0 else {
            return;
        };
        if let Some(actor) = entry.limited_actor()
            && !inner.shared.floods().admit(actor, Instant::now())
        {
            return;
        }
        let entries = inner
            .entries
            .as_ref()
            .expect("`entries` is taken only on drop");
        if entries.try_send(entry).is_err() {
            inner.shared.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records a denial; only counts it if `cause` has reached its limit for this second.
    pub(crate) fn deny(&self, cause: &'static str, entry: impl FnOnce() -> Entry) {
        let Some(inner) = &self.0 else {
            return;
        };
        let now = Instant::now();
        let verdict = inner.shared.denials().line(cause, now, || cause.into());
        if verdict == Decision::Write {
            self.record(entry());
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        drop(self.entries.take());
        if let Some(writer) = self.writer.take() {
            // An error means that the thread panicked; the lines it wrote stay in the file.
            let _ = writer.join();
        }
    }
}

/// Writes entries, and each second the counts, until every [`Audit`] is dropped.
fn write(entries: &Receiver<Entry>, shared: &Shared, files: &mut Files) {
    let mut failing = false;
    let mut put = |entry: &Entry| match files.put(entry) {
        Ok(()) => failing = false,
        Err(e) => {
            // An entry of the kind `Lost` stands for as many as it counts.
            let lost = match entry.event {
                EntryKind::Lost => entry.count.unwrap_or(1),
                _ => 1,
            };
            shared.lost.fetch_add(lost, Ordering::Relaxed);
            if !std::mem::replace(&mut failing, true) {
                warn!("cannot write the audit log: {e}");
            }
        }
    };
    let mut last_write = Instant::now();
    loop {
        let next = entries.recv_timeout(SECOND);
        if let Ok(entry) = &next {
            put(entry);
        }
        let over = matches!(next, Err(RecvTimeoutError::Disconnected));
        let now = Instant::now();
        if !over && now < last_write + SECOND {
            continue;
        }
        last_write = now;
        // At the end, the counts of the current second are written, too.
        let until = if over { now + SECOND } else { now };
        let skipped = shared.denials().skipped(until);
        for (count, cause) in skipped {
            put(&Entry::new(EntryKind::Denied).reason(cause).count(count));
        }
        let skipped = shared.floods().take_skipped();
        for (actor, count) in skipped {
            put(&Entry::skipped(actor, count));
        }
        match shared.lost.swap(0, Ordering::Relaxed) {
            0 => {}
            lost => put(&Entry::new(EntryKind::Lost).count(lost)),
        }
        if over {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
