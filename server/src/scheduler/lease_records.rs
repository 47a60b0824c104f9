//! The records of durable leases on disk, with which a restarted scheduler goes on with leases that are
//! suspended, or whose worker was lost.
//!
//! A thread writes the records. The driver waits for it only if a lease has got other devices or lost
//! them, and only for a moment: with the earlier record, a scheduler could not go on with such a lease.
//! Only the latest record of a lease counts, so a slow disk makes no queue grow.

mod format;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use tensord_proto::ids::LeaseId;
use tensord_scheduler::{LeaseRecord, RecordChange};
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::{
    state::{
        StateDir, StateError,
        database::{self, DatabaseError},
    },
    time_budget::TimeBudget,
};

/// The records, as JSON, by lease id.
const LEASES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("leases");

/// Name of the file in the state directory.
const FILE: &str = "leases.redb";

/// How long the driver waits for the record of a lease that has got other devices or lost them: a disk
/// that works takes some milliseconds.
const URGENT_TIMEOUT: Duration = Duration::from_millis(100);

/// The driver waits for at most one part in this many of the time, as it handles no other input meanwhile: a program can
/// suspend and resume its lease again and again, and each time changes a record that is urgent.
const WAIT_PART: u32 = 10;

/// The most time to wait that can be saved up: enough for a hundred waits of 5 ms in a row, as when a worker drains.
const MAX_WAIT_MS: u64 = 500;

/// How long the driver may wait for the disk.
type WaitBudget = TimeBudget<WAIT_PART, MAX_WAIT_MS>;

/// Pause before records that could not be written are tried again.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The records of a pool's durable leases, and the thread that writes them. Dropping this waits until all
/// are written, or writing has failed.
#[derive(Debug)]
pub(crate) struct LeaseRecords {
    shared: Arc<Shared>,
    written: watch::Receiver<u64>,
    writer: Option<JoinHandle<()>>,
}

/// What [`LeaseRecords::open`] returns.
pub(crate) struct OpenRecords {
    /// The records, to write more.
    pub(crate) records: LeaseRecords,
    /// Those of an earlier scheduler.
    pub(crate) known: Vec<(LeaseId, LeaseRecord)>,
}

#[derive(Debug, Default)]
struct Shared {
    pending: Mutex<Pending>,
    /// Notified when there are changes to write, or will be no more.
    changed: Condvar,
    /// Notified when changes were written, or could not be.
    settled: Condvar,
}

/// The records of leases as they are on disk.
type StoredRecords = Vec<(LeaseId, Vec<u8>)>;

/// For each lease its new record, or `None` if it needs none any more.
type Changes = BTreeMap<LeaseId, Option<LeaseRecord>>;

/// The changes that are not on disk yet.
#[derive(Debug, Default)]
struct Pending {
    changes: Changes,
    /// The leases that may have a record on disk. Nothing is written of the end of another one.
    recorded: BTreeSet<LeaseId>,
    /// How often changes were queued so far.
    queued: u64,
    /// The changes that are written: up to this number.
    written: u64,
    /// Whether the last attempt to write has failed or takes long.
    is_slow: bool,
    /// How long the driver may wait for changes to be written.
    wait_budget: WaitBudget,
    is_closed: bool,
}

impl LeaseRecords {
    /// Opens the records in a state directory, and returns those that there are. If the file is damaged,
    /// puts it aside and begins a new one: only the leases that it had are lost.
    ///
    /// # Errors
    ///
    /// If the file cannot be created, or the thread cannot be started.
    pub(crate) fn open(state: &StateDir) -> Result<OpenRecords, StateError> {
        let path = state.path().join(FILE);
        let loss = "leases that were suspended or waited for devices end";
        let (database, records) = database::open_or_put_aside(state, FILE, loss, open_database)?;
        let mut pending = Pending::default();
        let mut known = Vec::new();
        for (lease, bytes) in records {
            pending.recorded.insert(lease);
            match format::decode(&bytes) {
                Ok(record) => known.push((lease, record)),
                Err(reason) => {
                    warn!(%lease, "the record of a lease is dropped, as this version cannot read it: {reason}");
                    pending.add(lease, None);
                }
            }
        }
        if !known.is_empty() {
            let leases = known.len();
            info!(leases, "durable leases from before the restart are known");
        }
        let shared = Arc::new(Shared {
            pending: Mutex::new(pending),
            ..Shared::default()
        });
        let (written_sender, written) = watch::channel(0);
        let writer = Writer {
            shared: shared.clone(),
            path: path.clone(),
            database: Some(database),
            written: written_sender,
        };
        let thread = thread::Builder::new().name("tensord-leases".into());
        let writer = thread.spawn(|| writer.run());
        let writer = Some(writer.map_err(|source| StateError::Io {
            what: "start a thread that writes",
            path,
            source,
        })?);
        let records = Self {
            shared,
            written,
            writer,
        };
        Ok(OpenRecords { records, known })
    }

    /// Queues records to be written. If a change is urgent and the disk works, waits until they are written, for at
    /// most [`URGENT_TIMEOUT`] and what [`WaitBudget`] allows.
    pub(crate) fn queue(&self, changes: Vec<RecordChange>) {
        let is_urgent = changes.iter().any(|change| change.is_urgent);
        let mut pending = self.shared.lock();
        let mut is_changed = false;
        for RecordChange { lease, record, .. } in changes {
            is_changed |= pending.add(lease, record);
        }
        if !is_changed {
            return;
        }
        pending.queued += 1;
        self.shared.changed.notify_one();
        if is_urgent && !pending.is_slow {
            self.wait_for_disk(pending);
        }
    }

    /// Waits until everything that was queued is on disk, or for as long as the driver may.
    fn wait_for_disk(&self, mut pending: MutexGuard<'_, Pending>) {
        let start = Instant::now();
        let limit = pending.wait_budget.available(start).min(URGENT_TIMEOUT);
        let queued = pending.queued;
        let is_unwritten = |pending: &mut Pending| pending.written < queued && !pending.is_slow;
        let settled = &self.shared.settled;
        let waited = settled.wait_timeout_while(pending, limit, is_unwritten);
        // An error means that a thread has panicked with the lock, which none does.
        if let Ok((mut pending, waited)) = waited {
            pending.wait_budget.spend(start.elapsed());
            // The next urgent change does not wait for such a disk.
            pending.is_slow |= waited.timed_out() && limit == URGENT_TIMEOUT;
        }
    }

    /// Returns a future that ends when everything that was queued by now is on disk.
    pub(crate) fn written(&self) -> impl Future<Output = ()> + Send + use<> {
        let queued = self.shared.lock().queued;
        let mut written = self.written.clone();
        async move {
            // An error means that the thread has ended, as the process does.
            let _ = written.wait_for(|written| *written >= queued).await;
        }
    }
}

impl Drop for LeaseRecords {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_one();
        if let Some(writer) = self.writer.take() {
            // An error means that the thread has panicked, which the panic hook has logged.
            let _ = writer.join();
        }
    }
}

impl Pending {
    /// Adds the change of a record. Returns whether there is something to write.
    fn add(&mut self, lease: LeaseId, record: Option<LeaseRecord>) -> bool {
        if record.is_none() && !self.recorded.contains(&lease) {
            return false;
        }
        self.recorded.insert(lease);
        self.changes.insert(lease, record);
        true
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        // No code panics while it holds the lock.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for changes, and takes them with their number. `None` once there are none and never will
    /// be.
    fn take(&self) -> Option<(Changes, u64)> {
        let pending = self.lock();
        let is_idle = |pending: &mut Pending| pending.changes.is_empty() && !pending.is_closed;
        let pending = self.changed.wait_while(pending, is_idle);
        let mut pending = pending.unwrap_or_else(PoisonError::into_inner);
        let changes = std::mem::take(&mut pending.changes);
        (!changes.is_empty()).then_some((changes, pending.queued))
    }

    /// Records that changes are written.
    fn settle(&self, changes: &Changes, number: u64) {
        let mut pending = self.lock();
        (pending.written, pending.is_slow) = (number, false);
        for (lease, _) in changes.iter().filter(|(_, record)| record.is_none()) {
            if !pending.changes.contains_key(lease) {
                pending.recorded.remove(lease);
            }
        }
        self.settled.notify_all();
    }

    /// Puts changes back that could not be written, unless later ones have replaced them, and waits for
    /// [`RETRY_DELAY`]. Returns whether to try again: not if there were to be no more changes by then.
    fn put_back(&self, changes: Changes) -> bool {
        let mut pending = self.lock();
        let was_closed = pending.is_closed;
        for (lease, record) in changes {
            pending.changes.entry(lease).or_insert(record);
        }
        pending.is_slow = true;
        self.settled.notify_all();
        let until = Instant::now() + RETRY_DELAY;
        let is_early = |pending: &mut Pending| !pending.is_closed && Instant::now() < until;
        let changed = &self.changed;
        // An error means that a thread has panicked with the lock, which none does.
        let _ = changed.wait_timeout_while(pending, RETRY_DELAY, is_early);
        !was_closed
    }
}

/// The thread that writes.
struct Writer {
    shared: Arc<Shared>,
    path: PathBuf,
    /// `None` after an error: redb refuses all writes until the file is opened again.
    database: Option<Database>,
    written: watch::Sender<u64>,
}

impl Writer {
    /// Writes changes until there will be no more.
    fn run(mut self) {
        let mut has_failed = false;
        while let Some((changes, number)) = self.shared.take() {
            let Err(reason) = self.write(&changes) else {
                if std::mem::take(&mut has_failed) {
                    info!("the records of durable leases are written again");
                }
                self.shared.settle(&changes, number);
                self.written.send_replace(number);
                continue;
            };
            self.database = None;
            if !std::mem::replace(&mut has_failed, true) {
                error!(
                    "the records of durable leases cannot be written, and are tried again: {reason}; if the scheduler restarts before that, leases that were suspended or have moved meanwhile may end"
                );
            }
            if !self.shared.put_back(changes) {
                return;
            }
        }
    }

    fn write(&mut self, changes: &Changes) -> Result<(), DatabaseError> {
        let database = match self.database.take() {
            Some(database) => database,
            None => open_database(File::options().read(true).write(true).open(&self.path)?)?.0,
        };
        let database = self.database.insert(database);
        write(database, changes)
    }
}

fn write(database: &Database, changes: &Changes) -> Result<(), DatabaseError> {
    let transaction = database.begin_write()?;
    {
        let mut table = transaction.open_table(LEASES)?;
        for (lease, record) in changes {
            match record {
                Some(record) => table.insert(lease.0, &*format::encode(record))?,
                None => table.remove(lease.0)?,
            };
        }
    }
    transaction.commit()?;
    Ok(())
}

/// Opens the database in a file, and returns it with the bytes of its records.
fn open_database(file: File) -> Result<(Database, StoredRecords), DatabaseError> {
    let database = database::open(file, LEASES)?;
    let table = database.begin_read()?.open_table(LEASES)?;
    let mut records = Vec::new();
    for entry in table.iter()? {
        let (lease, bytes) = entry?;
        records.push((LeaseId(lease.value()), bytes.value().to_vec()));
    }
    Ok((database, records))
}

#[cfg(test)]
mod tests;
