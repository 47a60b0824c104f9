//! The snapshots that this worker keeps for leases that other workers run, and those of suspended
//! leases.
//!
//! The scheduler allows another worker to send the snapshots of a lease, and names the worker's
//! certificate. If that worker is lost, the scheduler grants devices of this one to the lease,
//! and the lease's process starts with these snapshots.

pub(super) mod connection;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeSet, HashMap},
    time::{Duration, Instant},
};

use tensord_proto::ids::{LeaseId, SessionId};
use tensord_transport::tls::Fingerprint;

use super::snapshots::{KeptSnapshot, SnapshotBounds, Snapshots};

/// How long the snapshots of a lease are kept after the connection from its worker has ended: longer
/// than the scheduler lets a lost lease wait (its recovery timeout).
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(1800);

/// Maximum number of suspended leases: the scheduler sends a command for each of them when this worker
/// joins again, and queues at most 1024.
const MAX_HELD: usize = 512;

/// Maximum number of leases of other workers.
const MAX_SOURCES: usize = 1 << 16;

/// The snapshots that this worker keeps for other workers.
#[derive(Debug)]
pub(super) struct KeptForOthers {
    /// Bounds of all snapshots, with those that are being received. The number of devices is that of
    /// this worker: a lease that could move here has no more.
    bounds: SnapshotBounds,
    receiving_bytes: u64,
    snapshots: Snapshots,
    sources: HashMap<LeaseId, Source>,
    /// The suspended leases whose snapshots are held.
    held: BTreeSet<LeaseId>,
    /// Number of sources so far.
    allowed: u64,
}

/// A worker that may send snapshots of a lease.
#[derive(Debug)]
struct Source {
    /// Different for each source, so that a connection of an earlier one counts for no other.
    number: u64,
    name: String,
    certificate: Fingerprint,
    /// Number of its connections for the lease.
    connections: usize,
    /// When it was allowed, or its last connection ended.
    last_seen: Instant,
}

impl KeptForOthers {
    pub(super) fn new(bounds: SnapshotBounds) -> Self {
        Self {
            bounds,
            receiving_bytes: 0,
            snapshots: Snapshots::default(),
            sources: HashMap::new(),
            held: BTreeSet::new(),
            allowed: 0,
        }
    }

    /// Allows the worker with this certificate to send the snapshots of a lease. No other may send
    /// any.
    pub(super) fn allow(
        &mut self,
        now: Instant,
        lease: LeaseId,
        name: String,
        certificate: Fingerprint,
    ) {
        let known = self.sources.get(&lease);
        if known.is_some_and(|source| source.certificate == certificate) {
            return;
        }
        self.forget(lease);
        if self.sources.len() >= MAX_SOURCES {
            return;
        }
        self.allowed += 1;
        let source = Source {
            number: self.allowed,
            name,
            certificate,
            connections: 0,
            last_seen: now,
        };
        self.sources.insert(lease, source);
    }

    /// Drops all that is kept of a lease. Its worker may send no more.
    pub(super) fn forget(&mut self, lease: LeaseId) {
        self.sources.remove(&lease);
        self.held.remove(&lease);
        self.snapshots.forget_lease(lease);
    }

    /// Holds the snapshots of a suspended lease until they are dropped or taken, if there are any. No
    /// worker may send more.
    pub(super) fn hold(&mut self, lease: LeaseId) {
        if self.held.len() >= MAX_HELD || self.snapshots.size_of(lease).0 == 0 {
            return self.forget(lease);
        }
        self.sources.remove(&lease);
        self.held.insert(lease);
    }

    /// Holds the snapshots of a suspended lease that has run here.
    pub(super) fn hold_own(&mut self, lease: LeaseId, own: Vec<KeptSnapshot>) {
        self.forget(lease);
        self.snapshots.adopt(lease, own);
        self.hold(lease);
    }

    /// Returns the suspended leases whose snapshots are held.
    pub(super) fn held(&self) -> Vec<LeaseId> {
        self.held.iter().copied().collect()
    }

    /// Returns the bytes for which there is room.
    pub(super) fn free_bytes(&self) -> u64 {
        let used_bytes = self.snapshots.used_bytes() + self.receiving_bytes;
        self.bounds.max_bytes.saturating_sub(used_bytes)
    }

    /// Removes and returns the snapshots of a lease that starts here. Its old worker may send no
    /// more.
    pub(super) fn take(&mut self, lease: LeaseId) -> Vec<KeptSnapshot> {
        let kept = self.snapshots.of(lease);
        self.forget(lease);
        kept
    }

    /// Drops the snapshots of leases whose worker has had no connection for long. The worker may
    /// still send others.
    pub(super) fn expire(&mut self, now: Instant) {
        let is_orphan = |source: &Source| {
            source.connections == 0 && now.duration_since(source.last_seen) >= ORPHAN_TIMEOUT
        };
        let orphans = self.sources.iter().filter(|(_, source)| is_orphan(source));
        for lease in orphans.map(|(lease, _)| *lease).collect::<Vec<_>>() {
            self.snapshots.forget_lease(lease);
        }
    }

    /// Returns the worker that may send snapshots of a lease, if it has this certificate.
    fn source(&mut self, lease: LeaseId, certificate: Option<Fingerprint>) -> Option<&mut Source> {
        let source = self.sources.get_mut(&lease)?;
        (Some(source.certificate) == certificate).then_some(source)
    }

    /// Returns the worker with this number, if it may still send snapshots of a lease.
    fn numbered_source(&mut self, lease: LeaseId, number: u64) -> Option<&mut Source> {
        let source = self.sources.get_mut(&lease)?;
        (source.number == number).then_some(source)
    }

    /// Takes memory for a snapshot that is to be received, and drops those of its session that are
    /// not needed any more, as its client has committed a later mark.
    fn reserve(
        &mut self,
        lease: LeaseId,
        session: SessionId,
        committed: u64,
        size_bytes: u64,
    ) -> Result<(), String> {
        self.snapshots.forget_before(lease, session, committed);
        let used_bytes = self.snapshots.used_bytes() + self.receiving_bytes;
        if used_bytes.saturating_add(size_bytes) > self.bounds.max_bytes {
            return Err(format!(
                "the snapshot has {size_bytes} bytes, and {used_bytes} of {} bytes for snapshots of other workers' leases are in use",
                self.bounds.max_bytes
            ));
        }
        self.receiving_bytes += size_bytes;
        Ok(())
    }

    fn release(&mut self, size_bytes: u64) {
        self.receiving_bytes -= size_bytes;
    }
}
