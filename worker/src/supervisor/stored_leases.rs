//! What the worker's snapshot store has of leases: loading what goes on here, and deleting what is over.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tensord_proto::{MAX_STORED_LEASES, ids::LeaseId, v1::LeaseGranted};
use tokio::time::timeout;
use tracing::{debug, info, warn};

use super::{
    Job, Supervisor,
    lease_queues::{LeaseQueues, killed},
    snapshot_store::StoredPart,
    snapshots::order,
};
use crate::locks::lock;

/// How long it may take to load the snapshots of a lease. The clients of its sessions try to reach this
/// worker for 60 s.
const LOAD_DEADLINE: Duration = Duration::from_secs(50);

/// Interval of reports to the scheduler of which leases the store has snapshots, so that those of leases
/// that are over are deleted.
const REPORT_INTERVAL: Duration = Duration::from_secs(600);

/// What is known of the leases in the store.
#[derive(Default)]
pub(super) struct StoredLeases {
    /// When the store was last listed.
    listed_at: Option<Instant>,
    /// Leases to report to the scheduler.
    found: Vec<LeaseId>,
    /// The leases that could go on from the store when the worker ended all of them, as it stops.
    at_stop: Option<Vec<LeaseId>>,
}

impl StoredLeases {
    /// Records that the worker has joined the pool: the scheduler may know of no lease in the store.
    pub(super) fn joined(&mut self) {
        self.listed_at = None;
    }

    /// Records that the worker is about to end all leases, of which these could go on from the store.
    pub(super) fn stopping(&mut self, in_store: Vec<LeaseId>) {
        self.at_stop.get_or_insert(in_store);
    }

    /// Returns the leases that could go on from the store when the worker ended all of them, if it has.
    pub(super) fn at_stop(&self) -> Option<Vec<LeaseId>> {
        self.at_stop.clone()
    }
}

impl Supervisor {
    /// Returns where the store has the snapshots of a lease, if there is a store.
    pub(super) fn stored_part(&self, lease: LeaseId, granted: &LeaseGranted) -> Option<StoredPart> {
        let store = self.settings.store.as_ref()?;
        let key = lock(&self.scheduler).lease_key.clone()?;
        Some(store.part(&key, lease, granted.part))
    }

    /// Loads the snapshots with which a lease goes on from the store, if the scheduler has said so.
    ///
    /// # Errors
    ///
    /// Why they cannot be loaded.
    pub(super) async fn load_stored(
        &self,
        lease: LeaseId,
        queues: &mut LeaseQueues,
    ) -> Result<(), String> {
        if !queues.granted.load_stored {
            return Ok(());
        }
        let Some(part) = self.stored_part(lease, &queues.granted) else {
            return Err("it is to go on from a snapshot store, and the worker has none".into());
        };
        let devices = self.granted_devices(&queues.granted);
        let per_device = self.settings.process_settings.snapshot_bytes;
        let bytes = self.snapshot_bytes(per_device, &devices);
        let began = Instant::now();
        let loading = timeout(LOAD_DEADLINE, part.load(bytes));
        let loaded = tokio::select! {
            loaded = loading => loaded,
            _ = killed(&mut queues.kill) => return Err("it was ended while its snapshots were loaded".into()),
        };
        let store = &part.store;
        let loaded = loaded
            .unwrap_or_else(|_| Err(format!("it did not answer within {LOAD_DEADLINE:?}")))
            .map_err(|reason| format!("its snapshots cannot be loaded from {store}: {reason}"));
        let mut loaded = match loaded {
            Ok(loaded) => loaded,
            // The client may be able to go on from those.
            Err(reason) if lock(&self.snapshots).has(lease) => {
                warn!(%lease, "the lease goes on from the snapshots in memory alone, as {reason}");
                return Ok(());
            }
            Err(reason) => return Err(reason),
        };
        let mut snapshots = lock(&self.snapshots);
        let in_memory = snapshots.of(lease);
        loaded.retain(|stored| {
            let (session_id, at) = (stored.info.session_id, order(stored.id()));
            let mut others = in_memory.iter();
            !others.any(|it| it.info.session_id == session_id && order(it.id()) >= at)
        });
        if loaded.is_empty() && in_memory.is_empty() {
            return Err(format!("{store} has no snapshots of it"));
        }
        let count = loaded.len();
        snapshots.adopt(lease, loaded);
        let took = began.elapsed();
        info!(%lease, "the lease goes on from {count} snapshots in {store}, which took {took:?} to load");
        Ok(())
    }

    /// Has the store listed if that is due.
    pub(super) fn list_stored_if_due(&self) {
        if self.settings.store.is_none() || lock(&self.scheduler).lease_key.is_none() {
            return;
        }
        let now = Instant::now();
        let mut stored = lock(&self.stored_leases);
        let is_due = |at: Instant| now.saturating_duration_since(at) >= REPORT_INTERVAL;
        if stored.listed_at.is_none_or(is_due) {
            stored.listed_at = Some(now);
            self.queue(Job::ListStored);
        }
    }

    /// Finds out of which leases that do not run here the store has snapshots, for the next report.
    pub(super) async fn list_stored(self: Arc<Self>) {
        let key = lock(&self.scheduler).lease_key.clone();
        let (Some(store), Some(key)) = (&self.settings.store, key) else {
            return;
        };
        match store.leases(&key).await {
            Ok(mut found) => {
                found.retain(|lease| !lock(&self.leases).contains_key(lease));
                found.truncate(MAX_STORED_LEASES);
                if !found.is_empty() {
                    lock(&self.stored_leases).found = found;
                    self.reports.notify_one();
                }
            }
            Err(reason) => debug!("the leases in {store} cannot be listed: {reason}"),
        }
    }

    /// Removes and returns leases to report to the scheduler.
    pub(super) fn take_found(&self) -> Vec<LeaseId> {
        std::mem::take(&mut lock(&self.stored_leases).found)
    }

    /// Deletes the stored snapshots of leases that are over. If a lease still has a process here, they are deleted once
    /// that has exited.
    pub(super) fn drop_stored_leases(&self, mut over: Vec<LeaseId>) {
        let mut leases = lock(&self.leases);
        over.retain(|lease| match leases.get_mut(lease) {
            Some(running) => {
                running.is_over = true;
                false
            }
            None => true,
        });
        drop(leases);
        if !over.is_empty() {
            self.queue(Job::DropStored(over));
        }
    }

    /// Deletes what the store has of these leases.
    pub(super) async fn delete_stored(self: Arc<Self>, leases: Vec<LeaseId>) {
        let key = lock(&self.scheduler).lease_key.clone();
        let (Some(store), Some(key)) = (&self.settings.store, key) else {
            return;
        };
        for lease in leases {
            match store.delete_lease(&key, lease).await {
                Ok(()) => debug!(%lease, "the snapshots of the lease in {store} are deleted"),
                Err(reason) => {
                    warn!(%lease, "the snapshots of the lease in {store} cannot be deleted: {reason}");
                }
            }
        }
    }
}
