//! The records of durable leases on disk, with which a restarted scheduler goes on with leases that are
//! suspended, or whose worker was lost.
//!
//! A thread writes the records, so that the driver never waits for the disk. Only the latest record of a
//! lease counts, so a slow disk makes no queue grow beyond one record a lease. What was not written
//! before a crash is settled by what clients and workers report (`tensord_scheduler`).

mod format;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use redb::{
    Builder, Database, ReadableDatabase, ReadableTable, TableDefinition, backends::FileBackend,
};
use tensord_proto::ids::LeaseId;
use tensord_scheduler::LeaseRecord;
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::state::{StateDir, StateError};

/// The records, as JSON, by lease id.
const LEASES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("leases");

/// Name of the file in the state directory.
const FILE: &str = "leases.redb";

/// Memory for pages of the file. A few hundred bytes a lease are read once, at the start.
const CACHE_BYTES: usize = 1 << 20;

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
    /// Notified when `pending` has changed.
    changed: Condvar,
}

/// The records of leases as they are on disk.
type StoredRecords = Vec<(LeaseId, Vec<u8>)>;

/// The changes that are not on disk yet.
#[derive(Debug, Default)]
struct Pending {
    changes: BTreeMap<LeaseId, Option<LeaseRecord>>,
    /// The number of changes that were ever queued.
    queued: u64,
    is_closed: bool,
}

/// The reason why records could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct RecordError(Box<redb::Error>);

impl RecordError {
    /// Returns whether the content of the file is wrong, rather than the file in use or the disk at
    /// fault.
    fn is_damage(&self) -> bool {
        match &*self.0 {
            redb::Error::Corrupted(_) | redb::Error::UpgradeRequired(_) => true,
            redb::Error::Io(error) => matches!(
                error.kind(),
                io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
            ),
            _ => false,
        }
    }
}

impl<E: Into<redb::Error>> From<E> for RecordError {
    fn from(error: E) -> Self {
        Self(Box::new(error.into()))
    }
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
        let opened = match open_database(state.private_file(FILE)?) {
            Ok(opened) => Ok(opened),
            Err(error) if !error.is_damage() => Err(error),
            Err(reason) => {
                let aside = put_aside(&path)?;
                error!(
                    "{} cannot be read ({reason}), so leases that were suspended or waited for devices end; the file is now {}",
                    path.display(),
                    aside.display()
                );
                open_database(state.private_file(FILE)?)
            }
        };
        let (database, records) = opened.map_err(|error| StateError::Records {
            path,
            reason: error.to_string(),
        })?;
        let known: Vec<_> = records
            .into_iter()
            .filter_map(|(lease, bytes)| match format::decode(&bytes) {
                Ok(record) => Some((lease, record)),
                Err(reason) => {
                    warn!(%lease, "the record of a lease is not used: {reason}");
                    None
                }
            })
            .collect();
        if !known.is_empty() {
            info!(
                leases = known.len(),
                "durable leases from before the restart are known"
            );
        }
        let shared = Arc::<Shared>::default();
        let (written_sender, written) = watch::channel(0);
        let writer = thread::Builder::new().name("tensord-leases".into()).spawn({
            let shared = shared.clone();
            move || write_all(&shared, &database, &written_sender)
        });
        let writer = Some(writer.map_err(|source| StateError::Io {
            what: "start a thread that writes",
            path: state.path().join(FILE),
            source,
        })?);
        Ok(OpenRecords {
            records: Self {
                shared,
                written,
                writer,
            },
            known,
        })
    }

    /// Has records written: for each lease its new record, or `None` if it needs none any more. Does not
    /// wait.
    pub(crate) fn queue(&self, changes: Vec<(LeaseId, Option<LeaseRecord>)>) {
        if changes.is_empty() {
            return;
        }
        let mut pending = self.shared.lock();
        pending.queued += 1;
        pending.changes.extend(changes);
        drop(pending);
        self.shared.changed.notify_one();
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

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        // No code panics while it holds the lock.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for changes, and takes them with their number. `None` once there are none and never will
    /// be.
    fn take(&self) -> Option<(BTreeMap<LeaseId, Option<LeaseRecord>>, u64)> {
        let pending = self.lock();
        let is_idle = |pending: &mut Pending| pending.changes.is_empty() && !pending.is_closed;
        let pending = self.changed.wait_while(pending, is_idle);
        let mut pending = pending.unwrap_or_else(PoisonError::into_inner);
        let changes = std::mem::take(&mut pending.changes);
        (!changes.is_empty()).then_some((changes, pending.queued))
    }

    /// Puts changes back that could not be written, unless later ones have replaced them. Returns whether
    /// to try again.
    fn put_back(&self, changes: BTreeMap<LeaseId, Option<LeaseRecord>>) -> bool {
        let mut pending = self.lock();
        for (lease, record) in changes {
            pending.changes.entry(lease).or_insert(record);
        }
        !pending.is_closed
    }
}

/// Writes changes until there will be no more.
fn write_all(shared: &Shared, database: &Database, written: &watch::Sender<u64>) {
    let mut has_failed = false;
    while let Some((changes, number)) = shared.take() {
        match write(database, &changes) {
            Ok(()) => {
                if has_failed {
                    info!("the records of durable leases are written again");
                }
                has_failed = false;
                written.send_replace(number);
            }
            Err(reason) => {
                if !has_failed {
                    error!(
                        "the records of durable leases cannot be written, and are tried again: {reason}; if the scheduler restarts now, leases that are suspended or wait for devices may end"
                    );
                }
                has_failed = true;
                if !shared.put_back(changes) {
                    return;
                }
                thread::sleep(RETRY_DELAY);
            }
        }
    }
}

fn write(
    database: &Database,
    changes: &BTreeMap<LeaseId, Option<LeaseRecord>>,
) -> Result<(), RecordError> {
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
fn open_database(file: File) -> Result<(Database, StoredRecords), RecordError> {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    // Without the check, a damaged file could make later reads panic.
    builder.set_check_integrity_on_open(true);
    let database = builder.create_with_backend(FileBackend::new(file)?)?;
    // Creates the table, which reads would miss otherwise.
    let transaction = database.begin_write()?;
    transaction.open_table(LEASES)?;
    transaction.commit()?;
    let table = database.begin_read()?.open_table(LEASES)?;
    let mut records = Vec::new();
    for entry in table.iter()? {
        let (lease, bytes) = entry?;
        records.push((LeaseId(lease.value()), bytes.value().to_vec()));
    }
    Ok((database, records))
}

/// Renames a damaged file, and returns its new path.
fn put_aside(path: &Path) -> Result<PathBuf, StateError> {
    let aside = path.with_extension("redb.damaged");
    let renamed: io::Result<()> = fs::rename(path, &aside);
    renamed.map_err(|source| StateError::Io {
        what: "rename",
        path: path.into(),
        source,
    })?;
    Ok(aside)
}

#[cfg(test)]
mod tests;
