//! A cohort: the sessions of a lease that were opened together, as one worker sees them. It
//! has this worker's own members, the other workers, and the groups and transfers between
//! them.
//!
//! An [`Algorithm`] and [`Transfers`] make the decisions. This module executes them: it
//! delivers results to sessions, and queues frames on links. It holds none of its locks
//! while it calls a session or a link.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use tensord_proto::{
    ids::{LeaseId, WorkerId},
    v1::{Fault, FaultKind, frame::Body},
};
use tensord_transport::Identity;
use tokio::{runtime::Handle, sync::watch};
use tracing::warn;

use super::{
    algorithm::{Arrival, Failure},
    group::{Group, GroupEffects},
    link,
    members::{LeaseMembers, Members},
    peer::{FrameSource, Peer},
    peer_frame::{GroupFrame, PeerFrame, PeerFrameError},
    peers::Peers,
    sessions::{Member, Outcome, ReceivedValue, Sessions},
    transfer::{Capability, Offer, Take, TransferAction, Transfers},
};
use crate::locks::lock;

/// Bytes of all-reduces in a bucket (those that are started together) until the links are
/// measured.
const INITIAL_BUCKET_BYTES: usize = 1 << 20;

/// Maximum number of groups of a cohort; programs have one or a few.
const MAX_GROUPS: usize = 1024;

/// An all-reduce that a session has reached.
#[derive(Debug)]
pub(crate) struct AllReduceCall {
    pub(crate) members: Members,
    pub(crate) ticket: u64,
    pub(crate) arrival: Arrival,
    pub(crate) bytes: Bytes,
}

/// The settings of all cohorts of a worker.
#[derive(Clone)]
pub(crate) struct CollectiveSettings {
    /// How long a rank may keep the others waiting.
    pub(crate) deadline: Duration,
    /// Bytes of all-reduces that are started together. `None`: derived from the measured
    /// rate of the links.
    pub(crate) bucket_bytes: Option<usize>,
    pub(crate) runtime: Handle,
    /// This worker's key and certificate, with which it dials others; leases pin the certificate.
    /// `None` in a simulation, which has no network.
    pub(crate) identity: Option<Arc<Identity>>,
}

pub(crate) struct Cohort {
    pub(crate) id: u64,
    pub(crate) lease: LeaseId,
    lease_members: Arc<LeaseMembers>,
    /// The lease's token, which this worker presents to the other workers.
    lease_token: Bytes,
    settings: CollectiveSettings,
    sessions: Sessions,
    groups: Mutex<HashMap<Members, Arc<Group>>>,
    transfers: Mutex<Transfers>,
    peers: Peers,
    bucket_bytes: Arc<AtomicUsize>,
    /// Whether nothing is sent to other workers any more.
    is_silent: AtomicBool,
    /// Dropped with the cohort, which ends the links that others dialled.
    alive: watch::Sender<()>,
}

impl Cohort {
    pub(crate) fn new(
        id: u64,
        lease: LeaseId,
        lease_members: LeaseMembers,
        lease_token: Bytes,
        settings: CollectiveSettings,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            lease,
            peers: Peers::new(&lease_members),
            lease_members: Arc::new(lease_members),
            lease_token,
            bucket_bytes: Arc::new(settings.bucket_bytes.unwrap_or(INITIAL_BUCKET_BYTES).into()),
            settings,
            sessions: Sessions::default(),
            groups: Mutex::default(),
            transfers: Mutex::default(),
            is_silent: AtomicBool::new(false),
            alive: watch::Sender::new(()),
        })
    }

    /// Returns the devices of the lease.
    pub(crate) fn lease_members(&self) -> &Arc<LeaseMembers> {
        &self.lease_members
    }

    /// Returns the lease rank of a device of this worker.
    pub(crate) fn lease_rank(&self, device_index: u32) -> Option<u32> {
        self.lease_members
            .lease_rank(self.lease_members.me(), device_index)
    }

    /// Returns the number of bytes at which a session's bucket of all-reduces is full and must
    /// be started. The value is shared, and [`tick`](Self::tick) updates it.
    pub(crate) fn bucket_bytes(&self) -> Arc<AtomicUsize> {
        self.bucket_bytes.clone()
    }

    /// Returns the token that proves to another worker that both belong to the lease.
    pub(crate) fn lease_token(&self) -> Bytes {
        self.lease_token.clone()
    }

    /// Returns a receiver that is closed when the cohort is dropped.
    pub(crate) fn alive(&self) -> watch::Receiver<()> {
        self.alive.subscribe()
    }

    /// Registers the session at `lease_rank` of this worker. Returns false if another
    /// session is registered there.
    pub(crate) fn enter(&self, lease_rank: u32, member: Weak<dyn Member>) -> bool {
        // Locked as in `leave`, so that the two are one after the other.
        let mut transfers = lock(&self.transfers);
        let has_entered = self.sessions.enter(lease_rank, member);
        if has_entered {
            transfers.enter(lease_rank);
        }
        has_entered
    }

    /// Has nothing new sent to other workers any more, not even that sessions here have ended.
    pub(crate) fn silence(&self) {
        self.is_silent.store(true, Ordering::Relaxed);
    }

    /// Removes the session `member` at `lease_rank`, which has ended for `reason`, and ends its
    /// groups and transfers. Does nothing if another session is registered there.
    pub(crate) fn leave(&self, lease_rank: u32, member: &Weak<dyn Member>, reason: &str) {
        let mut transfers = lock(&self.transfers);
        if !self.sessions.leave(lease_rank, member) {
            return;
        }
        // Ending the groups and transfers would send faults to the other workers.
        if self.is_silent.load(Ordering::Relaxed) {
            return;
        }
        let fault = Arc::new(self.end_of_session(lease_rank, reason));
        let actions = transfers.leave(lease_rank, &fault);
        drop(transfers);
        self.execute_all(actions);
        let groups: Vec<Arc<Group>> = lock(&self.groups).values().cloned().collect();
        for group in groups {
            let Some(rank) = group.members().rank(lease_rank) else {
                continue;
            };
            let what = self.lease_members.describe(lease_rank);
            let reason = format!("the session of rank {rank} ({what}) has ended: {reason}");
            let ((), changed) = group.change(|group| group.abort(&reason));
            self.apply_changes(&group, changed);
        }
    }

    /// Returns the fault of what would be taken from a session that has ended for `reason`.
    fn end_of_session(&self, lease_rank: u32, reason: &str) -> Fault {
        let share = self.lease_members.share(lease_rank);
        Fault {
            kind: FaultKind::Peer.into(),
            op_name: "Offer".into(),
            worker: share.map_or_else(String::new, |share| share.worker.clone()),
            reason: format!("the session that has the tensor has ended: {reason}"),
            ..Fault::default()
        }
    }

    /// Starts all-reduces that the session at `lease_rank` has reached, in this order.
    pub(crate) fn call(self: &Arc<Self>, lease_rank: u32, calls: Vec<AllReduceCall>) {
        let now = Instant::now();
        let mut calls = calls.into_iter().peekable();
        while let Some(call) = calls.next() {
            let members = call.members.clone();
            let Some(rank) = members.rank(lease_rank) else {
                continue;
            };
            let Some(group) = self.group(&members) else {
                let why = format!("the lease already has {MAX_GROUPS} groups, which is the limit");
                self.deliver(
                    lease_rank,
                    call.ticket,
                    Err(Failure::New(FaultKind::OutOfMemory, why)),
                );
                continue;
            };
            self.request_links(&group);
            let ((), changed) = group.change(|group| {
                let mut next = Some(call);
                while let Some(call) = next {
                    group.arrive(rank, call.ticket, call.arrival, call.bytes, now);
                    next = calls.next_if(|call| call.members == members);
                }
            });
            self.apply_changes(&group, changed);
        }
    }

    /// Offers a value of the session at `offer.from`.
    pub(crate) fn offer(self: &Arc<Self>, capability: Capability, offer: Offer) {
        if let Some(worker) = self.lease_members.worker(offer.to) {
            self.request_link_to(worker);
        }
        let action = lock(&self.transfers).offer(capability, offer);
        self.execute_all(action);
    }

    /// Takes a value for the session at `take.to`.
    pub(crate) fn take(self: &Arc<Self>, capability: Capability, take: Take) {
        if let Some(worker) = self.lease_members.worker(take.from) {
            self.request_link_to(worker);
        }
        let from = take.from;
        let action = lock(&self.transfers).take(capability, take, &self.lease_members);
        self.execute_all(action);
        if let Some(peer) = self.lease_members.worker(from).and_then(|w| self.peer(w))
            && let Some(violation) = peer.violation()
        {
            self.fail_transfers_from(peer, &violation);
        }
    }

    /// Fails the transfers from another worker.
    fn fail_transfers_from(&self, peer: &Peer, why: &str) {
        let actions =
            lock(&self.transfers).fail_transfers_from(peer.worker, why, &self.lease_members);
        self.execute_all(actions);
    }

    /// Records that another worker broke a `rule`. Its groups and transfers fail, and its
    /// link is not connected again: a frame was left out, so the ones after it would be
    /// misread.
    pub(crate) fn on_violation(&self, worker: WorkerId, rule: &str) {
        let Some(peer) = self.peer(worker) else {
            return;
        };
        let (name, at) = (&peer.share.worker, &peer.share.address);
        let violation = format!("worker {name} at {at} broke the protocol between workers: {rule}");
        if !peer.record_violation(violation.as_str().into()) {
            return;
        }
        warn!(lease = %self.lease, "{violation}");
        let groups: Vec<Arc<Group>> = lock(&self.groups).values().cloned().collect();
        for group in groups {
            self.abort_if_violated(&group);
        }
        self.fail_transfers_from(peer, &violation);
    }

    /// Ends the group if one of its workers broke a rule.
    fn abort_if_violated(&self, group: &Arc<Group>) {
        if let Some(violation) = self.peers.violation_in(group) {
            let ((), changed) = group.change(|group| group.abort(&violation));
            self.apply_changes(group, changed);
        }
    }

    /// Returns the peer for `worker`, if that worker is part of the lease.
    pub(crate) fn peer(&self, worker: WorkerId) -> Option<&Arc<Peer>> {
        self.peers.get(worker)
    }

    /// Handles a frame of another worker.
    pub(crate) fn on_frame(
        self: &Arc<Self>,
        worker: WorkerId,
        body: Body,
    ) -> Result<(), PeerFrameError> {
        match PeerFrame::decode(body)? {
            PeerFrame::Ping => Ok(()),
            PeerFrame::Group(lease_ranks, frame) => self.on_group_frame(lease_ranks, worker, frame),
            PeerFrame::Fetch {
                capability,
                from,
                to,
            } => {
                let mut transfers = lock(&self.transfers);
                let action = transfers.fetch(worker, capability, from, to, &self.lease_members)?;
                drop(transfers);
                self.execute_all(action);
                Ok(())
            }
            PeerFrame::Fetched(capability, part) => {
                let mut transfers = lock(&self.transfers);
                let action = transfers.fetched(worker, capability, part, &self.lease_members)?;
                drop(transfers);
                self.execute_all(action);
                Ok(())
            }
        }
    }

    fn on_group_frame(
        self: &Arc<Self>,
        lease_ranks: Vec<u32>,
        worker: WorkerId,
        frame: GroupFrame,
    ) -> Result<(), PeerFrameError> {
        let members =
            Members::new(lease_ranks, &self.lease_members).map_err(PeerFrameError::Rule)?;
        let many = || {
            PeerFrameError::Rule(format!(
                "the lease already has {MAX_GROUPS} groups, which is the limit"
            ))
        };
        let group = self.group(&members).ok_or_else(many)?;
        let not_a_member =
            || PeerFrameError::Rule("the group does not include both workers of the link".into());
        let worker_index = group.worker_index(worker).ok_or_else(not_a_member)?;
        group
            .worker_index(self.lease_members.me())
            .ok_or_else(not_a_member)?;
        let now = Instant::now();
        let (changed, what) = group.change(|group| match frame {
            GroupFrame::Arrivals(arrivals) => arrivals
                .into_iter()
                .try_for_each(|(rank, arrival)| group.on_arrival(worker_index, rank, arrival, now)),
            GroupFrame::Piece(piece) => group.piece(worker_index, piece, now),
            GroupFrame::Abort(reason) => {
                group.aborted(worker_index, &reason);
                Ok(())
            }
        });
        self.apply_changes(&group, what);
        Ok(changed?)
    }

    /// Returns the workers that this one has dialled in vain for a while at `now`.
    pub(crate) fn missing_peers(&self, now: Instant) -> impl Iterator<Item = WorkerId> {
        self.peers.missing(now)
    }

    /// Fails collectives and transfers that have waited longer than the deadline, and
    /// updates what depends on the measured links.
    pub(crate) fn tick(&self, now: Instant) {
        if self.settings.bucket_bytes.is_none()
            && let Some(bytes) = self.peers.bucket_bytes()
        {
            self.bucket_bytes.store(bytes, Ordering::Relaxed);
        }
        let ring_bytes = self.peers.ring_bytes();
        let deadline = self.settings.deadline;
        let silent = self.peers.silent(now);
        let groups: Vec<Arc<Group>> = lock(&self.groups).values().cloned().collect();
        for group in groups {
            let silent: Vec<usize> = silent
                .iter()
                .filter_map(|w| group.worker_index(*w))
                .collect();
            let ((), changed) = group.change(|group| {
                group.set_ring_bytes(ring_bytes);
                group.tick(now, deadline, &silent);
            });
            self.apply_changes(&group, changed);
        }
        for peer in self.peers.unreachable(now, deadline) {
            let (name, at) = (&peer.share.worker, &peer.share.address);
            let why = format!("worker {name} at {at} has been unreachable for {deadline:?}");
            self.fail_transfers_from(peer, &why);
        }
    }

    /// Returns the group of `members`, which is created on first use, or `None` at the
    /// limit of groups.
    fn group(&self, members: &Members) -> Option<Arc<Group>> {
        let mut groups = lock(&self.groups);
        if let Some(group) = groups.get(members) {
            return Some(group.clone());
        }
        if groups.len() >= MAX_GROUPS {
            return None;
        }
        let group = Arc::new(Group::new(members.clone(), &self.lease_members));
        groups.insert(members.clone(), group.clone());
        drop(groups);
        self.abort_if_violated(&group);
        Some(group)
    }

    fn request_links(self: &Arc<Self>, group: &Group) {
        for lease_rank in group.members().lease_ranks() {
            if let Some(worker) = self.lease_members.worker(*lease_rank) {
                self.request_link_to(worker);
            }
        }
    }

    /// Requests a link to `worker`. The first request dials the worker, unless `worker` is the
    /// side that dials.
    fn request_link_to(self: &Arc<Self>, worker: WorkerId) {
        if let Some(peer) = self.peer(worker)
            && peer.request_link()
            && self.lease_members.dials(worker)
            && let Some(identity) = self.settings.identity.clone()
        {
            let dial_tasks = link::dial(Arc::downgrade(self), self.lease, peer.clone(), identity);
            self.peers.spawn_link(dial_tasks, &self.settings.runtime);
        }
    }

    /// Notifies links and delivers results after a change of a group.
    fn apply_changes(&self, group: &Arc<Group>, changed: GroupEffects) {
        for worker_index in changed.with_messages {
            self.send(
                group.worker(worker_index),
                FrameSource::Group(group.clone(), worker_index),
            );
        }
        for done in changed.done {
            if let Err(Failure::New(FaultKind::Peer, reason)) = &done.result
                && group.announce_end()
            {
                warn!(lease = %self.lease, "a group has failed: {reason}");
            }
            let lease_rank = group.members().lease_ranks()[done.rank];
            let outcome = done.result.map(ReceivedValue::Reduced);
            self.deliver(lease_rank, done.ticket, outcome);
        }
    }

    fn execute_all(&self, actions: impl IntoIterator<Item = TransferAction>) {
        for action in actions {
            match action {
                TransferAction::Deliver {
                    to,
                    ticket,
                    outcome,
                } => self.deliver(to, ticket, outcome.map(ReceivedValue::Taken)),
                TransferAction::Fetch {
                    worker,
                    capability,
                    from,
                    to,
                } => self.send(worker, FrameSource::fetch(capability, from, to)),
                TransferAction::Send {
                    worker,
                    capability,
                    value,
                } => self.send(worker, FrameSource::fetched(capability, value)),
            }
        }
    }

    fn send(&self, worker: WorkerId, source: FrameSource) {
        if !self.is_silent.load(Ordering::Relaxed)
            && let Some(peer) = self.peer(worker)
        {
            peer.add_source(source);
        }
    }

    fn deliver(&self, lease_rank: u32, ticket: u64, outcome: Outcome) {
        self.sessions
            .deliver(self.lease, lease_rank, ticket, outcome);
    }
}
