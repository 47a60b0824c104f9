//! What leases use of the pool's devices, kept for accounts: by hour, tenant, user, lease and kind of
//! device.
//!
//! Workers count, and report with each heartbeat the sums since a device was granted
//! ([`GrantUsage`]). [`Accounts`] keeps the last report of each grant, so that what is new is counted
//! once, and a scheduler that restarts goes on where the last one was: both the sums and the last
//! reports are in `usage.redb`, and one transaction writes both. So a crash loses nothing that a worker
//! still knows, and counts nothing twice. A worker forgets a released grant when its final report is on
//! disk here. The memory of snapshots is the exception: workers report what it is at the moment, so a crash
//! loses what was counted of it since the last write.
//!
//! The devices' own count of their work, which knows no leases, is kept beside these sums, to check them.
//!
//! - `amount` has what is counted, and for whom.
//! - `accounts` decides what a report adds to which sums, and when a worker may forget a grant.
//! - `store` has the sums on disk: by hour at first, and later by day and without leases.
//! - `totals` sums up records for administrators.
//! - `writer` is the thread that writes and reads the store.

mod accounts;
mod amount;
mod store;
mod totals;
mod writer;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Duration,
};

use tensord_proto::{
    grant::{GrantNumber, number},
    ids::{LeaseId, WorkerId},
    v1::{DeviceGrant, GrantUsage},
};
use tensord_scheduler::LeasedDevice;
use tokio::sync::oneshot;

use self::{
    accounts::{AccountKey, Accounts, Reported},
    amount::Amount,
    store::Store,
    writer::{Question, Shared, Writer},
};
pub(super) use self::{
    amount::{Owner, Subject},
    totals::{Query, Totals},
};
use super::access::UnixMillis;
use crate::state::{StateDir, StateError};

/// The kind under which the memory of snapshots counts.
const SNAPSHOTS: &str = "snapshots";

/// The longest time between two heartbeats of a stream for which the memory of snapshots counts: a worker that is
/// silent for longer is cut off.
const MAX_SNAPSHOTS_SPAN_MS: u64 = 10_000;

/// More bytes of snapshots than a worker can have of a lease.
const MAX_SNAPSHOT_BYTES: u64 = 1 << 46;

/// Most grants of which one heartbeat may report: more than a worker has and remembers.
const MAX_REPORTED: usize = 8192;

/// Most grants that one heartbeat makes known. Others become known by the next one. So a heartbeat of
/// false grants, each of which is divided among the hours of a week, takes little time.
const MAX_NEW: usize = 64;

/// How long the end of the thread is awaited. A disk may hang.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Most questions of administrators that wait for the thread.
const MAX_QUERIES: usize = 16;

/// Why usage cannot be summed up.
#[derive(Debug, thiserror::Error)]
pub(super) enum UsageError {
    /// Many ask at the same time.
    #[error("{} other calls sum up usage; try again in a few seconds", MAX_QUERIES)]
    Busy,
    /// The file cannot be read.
    #[error("the file of usage cannot be read: {0}")]
    Unreadable(String),
    /// The process stops.
    #[error("the scheduler is shutting down")]
    Stopping,
}

/// The usage of a pool, and the thread that writes it. Dropping the last clone waits for a moment until
/// all is written, or writing has failed; [`written`](Self::written) waits for longer.
#[derive(Clone, Debug)]
pub(crate) struct UsageLog(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    /// Locked while changes are made and queued, so that they are queued in order.
    accounts: Mutex<Accounts>,
    /// Closed when the thread has ended.
    ended: Mutex<mpsc::Receiver<()>>,
}

/// What a worker reports.
pub(super) struct WorkerReport<'a> {
    pub(super) worker: WorkerId,
    /// The kind of each device.
    pub(super) kinds: &'a [String],
    /// How long each device has worked, by its own count, in microseconds.
    pub(super) devices_busy_us: Vec<u64>,
    pub(super) grants: &'a [GrantUsage],
}

impl WorkerReport<'_> {
    /// Returns the account of a grant, and the kind of its device. `None` if there is no such device, or
    /// the grant has no number.
    fn account_of(&self, grant: &DeviceGrant) -> Option<(AccountKey, &str)> {
        let kind = self.kinds.get(grant.device_index as usize)?;
        let key = AccountKey {
            worker: self.worker.0,
            device: grant.device_index,
            grant: number(grant.grant),
        };
        (key.grant > GrantNumber::ZERO).then_some((key, kind.as_str()))
    }
}

impl UsageLog {
    /// Opens the file in a state directory. If it is damaged, puts it aside and begins a new one.
    ///
    /// # Errors
    ///
    /// If the file cannot be created, or the thread cannot be started.
    pub(crate) fn open(state: &StateDir) -> Result<Self, StateError> {
        let (store, loaded) = Store::open_or_put_aside(state)?;
        let shared = Arc::new(Shared::new(loaded.batch));
        let path = store.path().to_owned();
        let writer = Writer::new(shared.clone(), store);
        let thread = thread::Builder::new().name("tensord-usage".into());
        let (ending, ended) = mpsc::channel();
        let spawned = thread.spawn(move || {
            writer.run();
            drop(ending);
        });
        spawned.map_err(|source| StateError::Io {
            what: "start a thread that writes",
            path,
            source,
        })?;
        Ok(Self(Arc::new(Inner {
            shared,
            accounts: Mutex::new(Accounts::new(loaded.accounts)),
            ended: Mutex::new(ended),
        })))
    }

    /// Records that a lease of `owner` has got devices. It is on disk within moments, so that a
    /// scheduler that starts then knows whose lease it is.
    pub(super) fn granted(
        &self,
        now: UnixMillis,
        lease: LeaseId,
        owner: &Owner,
        devices: &[LeasedDevice],
    ) {
        let mut accounts = self.accounts();
        let mut changes = self.0.shared.new_changes();
        for device in devices {
            let key = AccountKey {
                worker: device.device_ref.worker.0,
                device: device.device_ref.index,
                grant: device.grant,
            };
            let subject = Subject::Lease(owner.clone(), lease);
            accounts.begin(now, key, subject, &device.device.kind, &mut changes);
        }
        self.0.shared.queue(changes, true);
    }

    /// Counts what a worker reports. `owner_of` finds the owner of a lease that is not known from its
    /// grant. `may_be_granted` returns whether the scheduler can have given a grant. Returns the grants that
    /// the worker may forget.
    pub(super) fn reported(
        &self,
        now: UnixMillis,
        report: &WorkerReport<'_>,
        may_be_granted: impl Fn(&DeviceGrant) -> bool,
        owner_of: impl Fn(LeaseId, &DeviceGrant) -> Option<Owner>,
    ) -> Vec<DeviceGrant> {
        let worker = report.worker.0;
        let mut released = BTreeMap::new();
        let mut has_ended = false;
        let mut new = 0;
        let mut accounts = self.accounts();
        let mut changes = self.0.shared.new_changes();
        for usage in report.grants.iter().take(MAX_REPORTED) {
            let (Some(grant), Some(used)) = (&usage.grant, &usage.used) else {
                continue;
            };
            let Some((key, kind)) = report.account_of(grant) else {
                continue;
            };
            let is_known = accounts.contains(&key);
            if !is_known && (new >= MAX_NEW || !may_be_granted(grant)) {
                continue;
            }
            let lease = LeaseId(usage.lease_id);
            let subject = || Some(Subject::Lease(owner_of(lease, grant)?, lease));
            let reported = Reported {
                amount: Amount::from(used),
                is_final: usage.released,
            };
            has_ended |= accounts.observe(now, key, reported, kind, subject, &mut changes);
            new += usize::from(!is_known && accounts.contains(&key));
            if usage.released {
                released.insert(key, *grant);
            }
        }
        let devices = (0..).zip(&report.devices_busy_us).zip(report.kinds);
        for ((device, busy_us), kind) in devices {
            let key = AccountKey::of_device(worker, device);
            let reported = Reported {
                amount: Amount::of_device(*busy_us),
                is_final: false,
            };
            let subject = || Some(Subject::Devices);
            accounts.observe(now, key, reported, kind, subject, &mut changes);
        }
        let written = self.0.shared.written();
        accounts.forget_released(worker, &released, written, &mut changes);
        accounts.expire(now, &mut changes);
        self.0.shared.queue(changes, has_ended);
        let recorded = accounts.recorded(&released, written);
        recorded.copied().collect()
    }

    /// Adds the memory of snapshots at a worker since `from`, under the kind [`SNAPSHOTS`]. `snapshots` has the owner and the
    /// bytes of each lease. Time without reports is not counted, and a crash loses what is not on disk yet.
    pub(super) fn snapshots_kept(
        &self,
        from: UnixMillis,
        now: UnixMillis,
        snapshots: BTreeMap<LeaseId, (Owner, u64)>,
    ) {
        let from_ms = from.0.max(now.0.saturating_sub(MAX_SNAPSHOTS_SPAN_MS));
        let elapsed_ms = u128::from(now.0.saturating_sub(from_ms));
        if elapsed_ms == 0 {
            return;
        }
        // Locked so that changes are queued in the order of their numbers.
        let _accounts = self.accounts();
        let mut changes = self.0.shared.new_changes();
        let kind: Arc<str> = SNAPSHOTS.into();
        for (lease, (owner, bytes)) in snapshots {
            let bytes = u128::from(bytes.min(MAX_SNAPSHOT_BYTES));
            let amount = Amount {
                byte_seconds: bytes * elapsed_ms / 1000,
                ..Amount::default()
            };
            let subject = Subject::Lease(owner, lease);
            changes.add(&subject, &kind, from_ms..now.0, &amount);
        }
        self.0.shared.queue(changes, false);
    }

    /// Sums up what was used, all reports so far included.
    pub(super) async fn sum(&self, query: Query) -> Result<Totals, UsageError> {
        let (reply, replied) = oneshot::channel();
        self.0.shared.ask(Question::Sum(query, reply))?;
        replied.await.map_err(|_| UsageError::Stopping)?
    }

    /// Waits until all reports so far are on disk, or writing them has failed.
    pub(super) async fn written(&self) -> Result<(), UsageError> {
        let (reply, replied) = oneshot::channel();
        self.0.shared.ask(Question::Written(reply))?;
        replied.await.map_err(|_| UsageError::Stopping)
    }

    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        // No code panics while it holds the lock.
        let accounts = &self.0.accounts;
        accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.close();
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Nothing is sent; the channel is closed when the thread ends.
        let _ = ended.recv_timeout(CLOSE_TIMEOUT);
    }
}

#[cfg(test)]
mod tests;
