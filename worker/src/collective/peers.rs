//! The other workers of a cohort, and what is measured of all links to them.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tensord_proto::ids::WorkerId;
use tokio::{runtime::Handle, task::JoinSet};

use super::{group::Group, members::LeaseMembers, meter::Egress, peer::Peer};
use crate::locks::lock;

/// A worker from which nothing is received for this long counts as silent. A live worker sends
/// a ping every 0.5 s.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(2);

/// A worker that was dialled in vain for this long is missing. One that starts again is usually there sooner.
const MISSING_AFTER: Duration = Duration::from_secs(1);

/// The other workers of a lease.
pub(super) struct Peers {
    peers: Vec<Arc<Peer>>,
    /// Measures what is sent to all other workers together.
    egress: Arc<Mutex<Egress>>,
    /// The tasks of links that this worker dials.
    dial_tasks: Mutex<JoinSet<()>>,
}

impl Peers {
    pub(super) fn new(lease_members: &LeaseMembers) -> Self {
        let egress = Arc::default();
        let links = lease_members.others().count();
        let peers = lease_members.others().cloned();
        let peers = peers.map(|share| Arc::new(Peer::new(share, links, Arc::clone(&egress))));
        Self {
            peers: peers.collect(),
            egress,
            dial_tasks: Mutex::default(),
        }
    }

    /// Returns the peer for `worker`, if that worker is part of the lease.
    pub(super) fn get(&self, worker: WorkerId) -> Option<&Arc<Peer>> {
        self.peers.iter().find(|peer| peer.worker == worker)
    }

    /// Returns the size in bytes that a bucket of all-reduces should have, or `None` before
    /// the links are measured.
    pub(super) fn bucket_bytes(&self) -> Option<usize> {
        let measured = self.peers.iter().filter_map(|peer| peer.bucket_bytes());
        measured.max()
    }

    /// Returns the smallest slice, in bytes, that is faster on a ring, or `None` if no slice
    /// is known to be.
    pub(super) fn ring_bytes(&self) -> Option<u64> {
        let round_trips = self.peers.iter().filter_map(|peer| peer.round_trip());
        // The round trips are read before `egress` is locked, as a `Peer` locks `egress` while
        // it holds its own lock.
        let longest = round_trips.max()?;
        lock(&self.egress).ring_bytes(longest)
    }

    /// Returns the workers that are silent at `now`.
    pub(super) fn silent(&self, now: Instant) -> Vec<WorkerId> {
        let is_silent = |peer: &&Arc<Peer>| peer.is_silent(now, SILENCE_TIMEOUT);
        let silent = self.peers.iter().filter(is_silent);
        silent.map(|peer| peer.worker).collect()
    }

    /// Returns the workers that this one has dialled in vain for a while at `now`. Of two workers, one dials the other.
    pub(super) fn missing(&self, now: Instant) -> impl Iterator<Item = WorkerId> {
        let is_missing = move |peer: &&Arc<Peer>| {
            let since = peer.unreached_since();
            since.is_some_and(|since| now.saturating_duration_since(since) >= MISSING_AFTER)
        };
        self.peers.iter().filter(is_missing).map(|peer| peer.worker)
    }

    /// Returns the workers that have been disconnected for `deadline` at `now`.
    pub(super) fn unreachable(
        &self,
        now: Instant,
        deadline: Duration,
    ) -> impl Iterator<Item = &Arc<Peer>> {
        let is_unreachable = move |peer: &&Arc<Peer>| {
            let since = peer.disconnected_since();
            since.is_some_and(|since| now.saturating_duration_since(since) >= deadline)
        };
        self.peers.iter().filter(is_unreachable)
    }

    /// Returns the violation of a worker of `group` that broke a rule, if there is one.
    pub(super) fn violation_in(&self, group: &Group) -> Option<Arc<str>> {
        let is_of = |peer: &&Arc<Peer>| group.worker_index(peer.worker).is_some();
        self.peers
            .iter()
            .filter(is_of)
            .find_map(|peer| peer.violation())
    }

    /// Spawns the task of a link that this worker dials. The task ends with the cohort.
    pub(super) fn spawn_link(
        &self,
        link: impl Future<Output = ()> + Send + 'static,
        runtime: &Handle,
    ) {
        lock(&self.dial_tasks).spawn_on(link, runtime);
    }
}
