//! The audit log: who was let in, given devices, turned away or cut off, from where, and
//! why. One JSON object a line, in files of the state directory that only their owner
//! can read ([`file`](mod@file)).
//!
//! Whoever has something to record never waits: entries go through a bounded queue to a
//! thread that writes them. What finds the queue full is counted, and so are denials that
//! come faster than ten a second of a cause; the counts are entries, too.

mod file;

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
use tensord_proto::text::{MESSAGE_CHARS, NAME_CHARS, foreign};
use tracing::warn;

use self::file::Files;
use crate::rate::{Limiter, SECOND, Verdict};

/// Entries that wait to be written: what a busy pool says in a second, and no more than
/// a few hundred kilobytes.
const QUEUE: usize = 1024;

/// Where the log is and how much is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The directory of its files.
    pub(crate) directory: PathBuf,
    /// The size of one file; 0 keeps no log.
    pub(crate) file_bytes: u64,
    /// How many files there are, the one that is written included.
    pub(crate) files: u32,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Event {
    /// A client or a worker was let in.
    Admitted,
    /// A client was given a lease.
    Granted,
    /// A call, a hello or a request was refused.
    Denied,
    /// A token or a lease was taken back.
    Revoked,
    /// A lease ended, or a client or worker is gone.
    Ended,
    /// Entries were lost, as they came faster than they could be written.
    Lost,
}

/// One line. What does not apply is left out.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Entry {
    time_ms: u64,
    event: Event,
    /// The name of the token that was shown.
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
    /// What a worker calls itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// Where the peer's connection comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    devices: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// How many such events this line stands for, if not one.
    #[serde(skip_serializing_if = "Option::is_none")]
    count: Option<u64>,
}

impl Entry {
    /// An entry of now.
    pub(crate) fn new(event: Event) -> Self {
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

    /// Whose token was shown, and what it is for.
    pub(crate) fn token(mut self, name: &str, role: &'static str, tenant: &str) -> Self {
        self.token = Some(foreign(name, NAME_CHARS).to_string());
        self.role = Some(role);
        self.tenant = Some(foreign(tenant, NAME_CHARS).to_string());
        self
    }

    /// What the caller wants to be.
    pub(crate) fn role(mut self, role: &'static str) -> Self {
        self.role = Some(role);
        self
    }

    /// The client it is about.
    pub(crate) fn client(mut self, id: impl ToString) -> Self {
        self.client = Some(id.to_string());
        self
    }

    /// What the worker is called that it is about, if that is all that is known.
    pub(crate) fn name(mut self, name: &str) -> Self {
        self.name = Some(foreign(name, NAME_CHARS).to_string());
        self
    }

    /// The worker it is about.
    pub(crate) fn worker(mut self, id: impl ToString, name: &str) -> Self {
        self.worker = Some(id.to_string());
        self.name = Some(foreign(name, NAME_CHARS).to_string());
        self
    }

    /// Where the peer is.
    pub(crate) fn address(mut self, address: SocketAddr) -> Self {
        self.address = Some(address);
        self
    }

    /// The lease it is about.
    pub(crate) fn lease(mut self, id: impl ToString) -> Self {
        self.lease = Some(id.to_string());
        self
    }

    /// How many devices the lease has.
    pub(crate) fn devices(mut self, devices: usize) -> Self {
        self.devices = Some(devices);
        self
    }

    /// Why it happened.
    pub(crate) fn reason(mut self, reason: impl ToString) -> Self {
        self.reason = Some(foreign(&reason.to_string(), MESSAGE_CHARS).to_string());
        self
    }

    fn count(mut self, count: u64) -> Self {
        self.count = Some(count);
        self
    }
}

/// Takes entries for the log. Cheap to clone; the thread that writes ends with the last.
#[derive(Clone)]
pub(crate) struct Audit(Option<Arc<Inner>>);

impl std::fmt::Debug for Audit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Audit")
    }
}

struct Inner {
    /// Taken when dropped.
    entries: Option<SyncSender<Entry>>,
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    lost: AtomicU64,
    denials: Mutex<Limiter<&'static str>>,
}

impl Shared {
    fn denials(&self) -> MutexGuard<'_, Limiter<&'static str>> {
        self.denials.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Audit {
    /// A log that takes entries and keeps none.
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// Opens the log, or none if `settings` ask for none.
    ///
    /// # Errors
    ///
    /// When its file cannot be written, or the system gives no thread.
    pub(crate) fn open(settings: Settings) -> std::io::Result<Self> {
        if settings.file_bytes == 0 {
            return Ok(Self::none());
        }
        let mut files = Files::open(settings)?;
        let (sender, entries) = sync_channel(QUEUE);
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

    /// Records an entry.
    pub(crate) fn record(&self, entry: Entry) {
        let Some(inner) = &self.0 else {
            return;
        };
        let entries = inner.entries.as_ref().expect("only taken when dropped");
        if entries.try_send(entry).is_err() {
            inner.shared.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records a denial, if there are not too many of the same `cause`.
    pub(crate) fn deny(&self, cause: &'static str, entry: impl FnOnce() -> Entry) {
        let Some(inner) = &self.0 else {
            return;
        };
        let now = Instant::now();
        let verdict = inner.shared.denials().line(cause, now, || cause.into());
        if verdict == Verdict::Write {
            self.record(entry());
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        drop(self.entries.take());
        if let Some(writer) = self.writer.take() {
            // An error means that it panicked; what it wrote is on disk.
            let _ = writer.join();
        }
    }
}

/// Writes what comes until nobody has anything to record any more.
fn write(entries: &Receiver<Entry>, shared: &Shared, files: &mut Files) {
    let mut failing = false;
    let mut put = |entry: &Entry| match files.put(entry) {
        Ok(()) => failing = false,
        Err(e) => {
            if !std::mem::replace(&mut failing, true) {
                warn!("the audit log cannot be written: {e}");
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
        // At the end, whatever was counted is told of.
        let until = if over { now + SECOND } else { now };
        let skipped = shared.denials().skipped(until);
        for (count, cause) in skipped {
            put(&Entry::new(Event::Denied).reason(cause).count(count));
        }
        match shared.lost.swap(0, Ordering::Relaxed) {
            0 => {}
            lost => put(&Entry::new(Event::Lost).count(lost)),
        }
        if over {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
