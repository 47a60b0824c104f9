//! The sessions of a lease that were opened together, as one worker sees them:
//! its own members, the other workers, the groups and the transfers between them.
//!
//! Nothing here decides anything: an [`Algorithm`] and [`Transfers`] do. This carries out what they say: hands results to sessions,
//! and frames to links. No lock of another's is held while a session or a link is
//! called.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use tensord_proto::{
    codec::{CodecError, decode_type},
    ids::{LeaseId, WorkerId},
    v1::{self, Fault, FaultKind, PieceKind, frame::Body},
};
use tensord_transport::Identity;
use tokio::{runtime::Handle, sync::watch, task::JoinSet};
use tracing::{debug, warn};

use super::{
    algorithm::{Algorithm, Arrival, Broke, Failure, Piece},
    cell::{Cell, Changed, decode},
    link,
    members::{Members, Roster},
    meter::Egress,
    peer::{Peer, Speaker},
    transfer::{Act, Capability, Offer, Part, Take, Transfers, Value},
};
use crate::locks::lock;

/// Bytes of all-reduces that are begun together until the links were measured.
const FIRST_BUCKET: usize = 1 << 20;

/// A worker of which nothing is heard for so long is out of order; it beats each second.
const SILENCE: Duration = Duration::from_secs(2);

/// Groups that a cohort may have: programs have one or a few.
const MAX_GROUPS: usize = 1024;

/// A session, as far as its cohort knows it.
pub(crate) trait Member: Send + Sync {
    /// Gets the outcome of what it called `ticket`. Returns at once.
    fn deliver(self: Arc<Self>, ticket: u64, outcome: Outcome);
}

/// What comes of an all-reduce or a transfer.
pub(crate) type Outcome = Result<Arrived, Failure>;

/// What a session waited for.
#[derive(Debug)]
pub(crate) enum Arrived {
    /// The bytes of an all-reduce's result, whose type the session knows.
    Reduced(Bytes),
    /// A value that was taken.
    Taken(Value),
}

/// An all-reduce that a session has come to.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) members: Members,
    pub(crate) ticket: u64,
    pub(crate) arrival: Arrival,
    pub(crate) bytes: Bytes,
}

/// What every cohort of a worker needs.
#[derive(Clone)]
pub(crate) struct Settings {
    /// How long a rank may keep the others waiting.
    pub(crate) deadline: Duration,
    /// Bytes of all-reduces that are begun together. None: by what the links carry.
    pub(crate) bucket_bytes: Option<usize>,
    pub(crate) runtime: Handle,
    /// What this worker shows to others: the leases pin its certificate.
    pub(crate) identity: Arc<Identity>,
}

pub(crate) struct Cohort {
    pub(crate) id: u64,
    pub(crate) lease: LeaseId,
    roster: Arc<Roster>,
    /// Shown to the other workers.
    lease_token: Bytes,
    settings: Settings,
    members: Mutex<HashMap<u32, Weak<dyn Member>>>,
    groups: Mutex<HashMap<Members, Arc<Cell>>>,
    transfers: Mutex<Transfers>,
    peers: Vec<Arc<Peer>>,
    /// What is sent to all of them.
    egress: Arc<Mutex<Egress>>,
    bucket_bytes: Arc<AtomicUsize>,
    /// Links to workers that this one dials.
    dialling: Mutex<JoinSet<()>>,
    /// Gone with the cohort, for the links that others dialled.
    alive: watch::Sender<()>,
}

/// A rule that another worker broke; the link to it is of no more use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HeardError {
    #[error(transparent)]
    Broke(#[from] Broke),
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error("{0}")]
    Rule(String),
}

impl Cohort {
    pub(crate) fn new(
        id: u64,
        lease: LeaseId,
        roster: Roster,
        lease_token: Bytes,
        settings: Settings,
    ) -> Arc<Self> {
        let egress = Arc::default();
        let links = roster.others().count();
        let peers = roster.others().cloned();
        let peers = peers.map(|share| Arc::new(Peer::new(share, links, Arc::clone(&egress))));
        Arc::new(Self {
            id,
            lease,
            peers: peers.collect(),
            egress,
            roster: Arc::new(roster),
            lease_token,
            bucket_bytes: Arc::new(settings.bucket_bytes.unwrap_or(FIRST_BUCKET).into()),
            settings,
            members: Mutex::default(),
            groups: Mutex::default(),
            transfers: Mutex::default(),
            dialling: Mutex::default(),
            alive: watch::Sender::new(()),
        })
    }

    /// The devices of the lease.
    pub(crate) fn roster(&self) -> &Arc<Roster> {
        &self.roster
    }

    /// The place of a device of this worker.
    pub(crate) fn place(&self, device_index: u32) -> Option<u32> {
        self.roster.place(self.roster.me(), device_index)
    }

    /// Bytes of all-reduces from which on sessions should not hold them back.
    pub(crate) fn bucket_bytes(&self) -> Arc<AtomicUsize> {
        self.bucket_bytes.clone()
    }

    /// Fits the buckets to what the links carry.
    fn fit_buckets(&self) {
        let measured = self.peers.iter().filter_map(|peer| peer.bucket_bytes());
        if self.settings.bucket_bytes.is_none()
            && let Some(bytes) = measured.max()
        {
            self.bucket_bytes.store(bytes, Ordering::Relaxed);
        }
    }

    /// Bytes of a slice from which on it better goes round a ring.
    fn ring_bytes(&self) -> Option<u64> {
        let round_trips = self.peers.iter().filter_map(|peer| peer.round_trip());
        // Asked first: a link holds its own lock when it takes this one.
        let longest = round_trips.max()?;
        lock(&self.egress).ring_bytes(longest)
    }

    /// What says "we are of one lease" to another worker.
    pub(crate) fn lease_token(&self) -> Bytes {
        self.lease_token.clone()
    }

    /// Ends when the cohort is gone.
    pub(crate) fn alive(&self) -> watch::Receiver<()> {
        self.alive.subscribe()
    }

    /// The session at `place` of this worker takes part from now on. False: there
    /// is one already.
    pub(crate) fn enter(&self, place: u32, member: Weak<dyn Member>) -> bool {
        let mut members = lock(&self.members);
        if members.get(&place).is_some_and(|m| m.strong_count() > 0) {
            return false;
        }
        members.insert(place, member);
        true
    }

    /// The session at `place` is over, for `reason`.
    pub(crate) fn leave(&self, place: u32, reason: &str) {
        lock(&self.members).remove(&place);
        let cells: Vec<Arc<Cell>> = lock(&self.groups).values().cloned().collect();
        for cell in cells {
            let Some(rank) = cell.members().rank(place) else {
                continue;
            };
            let what = self.roster.describe(place);
            let reason = format!("the session of rank {rank} ({what}) is over: {reason}");
            let ((), changed) = cell.change(|group| group.abort(&reason));
            self.act(&cell, changed);
        }
        let fault = Fault {
            kind: FaultKind::Peer.into(),
            op_name: "Offer".into(),
            worker: self
                .roster
                .share(place)
                .map_or_else(String::new, |s| s.worker.clone()),
            reason: format!("the session that the tensor is on is over: {reason}"),
            ..Fault::default()
        };
        let acts = lock(&self.transfers).leave(place, &Arc::new(fault));
        self.act_all(acts);
    }

    /// The session at `place` has come to some all-reduces, in this order.
    pub(crate) fn call(self: &Arc<Self>, place: u32, calls: Vec<Call>) {
        let now = Instant::now();
        let mut calls = calls.into_iter().peekable();
        while let Some(call) = calls.next() {
            let members = call.members.clone();
            let Some(rank) = members.rank(place) else {
                continue;
            };
            let Some(cell) = self.cell(&members) else {
                let why = format!("the lease has {MAX_GROUPS} groups already, the limit");
                self.deliver(
                    place,
                    call.ticket,
                    Err(Failure::New(FaultKind::OutOfMemory, why)),
                );
                continue;
            };
            self.want(&cell);
            let ((), changed) = cell.change(|group| {
                let mut next = Some(call);
                while let Some(call) = next {
                    group.arrive(rank, call.ticket, call.arrival, call.bytes, now);
                    next = calls.next_if(|call| call.members == members);
                }
            });
            self.act(&cell, changed);
        }
    }

    /// The session at `offer.from` offers a value.
    pub(crate) fn offer(self: &Arc<Self>, capability: Capability, offer: Offer) {
        if let Some(worker) = self.roster.worker(offer.to) {
            self.want_worker(worker);
        }
        let act = lock(&self.transfers).offer(capability, offer);
        self.act_all(act);
    }

    /// The session at `take.to` takes a value.
    pub(crate) fn take(self: &Arc<Self>, capability: Capability, take: Take) {
        if let Some(worker) = self.roster.worker(take.from) {
            self.want_worker(worker);
        }
        let from = take.from;
        let act = lock(&self.transfers).take(capability, take, &self.roster);
        self.act_all(act);
        if let Some(peer) = self.roster.worker(from).and_then(|w| self.peer(w))
            && let Some(offence) = peer.offence()
        {
            self.lose(peer, &offence);
        }
    }

    /// Ends the transfers from another worker.
    fn lose(&self, peer: &Peer, why: &str) {
        let acts = lock(&self.transfers).lose(peer.worker, why, &self.roster);
        self.act_all(acts);
    }

    /// Another worker broke a `rule`. Its groups and transfers end, and its link is not made
    /// again: the frames after one that was left out would be misread.
    pub(crate) fn offended(&self, worker: WorkerId, rule: &str) {
        let Some(peer) = self.peer(worker) else {
            return;
        };
        let (name, at) = (&peer.share.worker, &peer.share.address);
        let offence = format!("worker {name} at {at} broke a rule between workers: {rule}");
        if !peer.offend(offence.as_str().into()) {
            return;
        }
        warn!(lease = %self.lease, "{offence}");
        let cells: Vec<Arc<Cell>> = lock(&self.groups).values().cloned().collect();
        for cell in cells {
            self.exclude(&cell);
        }
        self.lose(peer, &offence);
    }

    /// Ends a group that has a worker which broke a rule.
    fn exclude(&self, cell: &Arc<Cell>) {
        let is_of = |peer: &&Arc<Peer>| cell.node(peer.worker).is_some();
        let offence = self.peers.iter().filter(is_of).find_map(|p| p.offence());
        if let Some(offence) = offence {
            let ((), changed) = cell.change(|group| group.abort(&offence));
            self.act(cell, changed);
        }
    }

    /// The link to `worker`, if it is of the lease.
    pub(crate) fn peer(&self, worker: WorkerId) -> Option<&Arc<Peer>> {
        self.peers.iter().find(|peer| peer.worker == worker)
    }

    /// Another worker says something.
    pub(crate) fn heard(self: &Arc<Self>, worker: WorkerId, body: Body) -> Result<(), HeardError> {
        match body {
            Body::Ping(_) => Ok(()),
            Body::Arrivals(arrivals) => {
                let decoded = arrivals.arrivals.into_iter().map(decode);
                let decoded: Vec<_> = decoded.collect::<Result<_, _>>()?;
                self.heard_in_group(arrivals.group, worker, |group, node, now| {
                    let mut arrivals = decoded.into_iter();
                    arrivals.try_for_each(|(rank, a)| group.heard(node, rank, a, now))
                })
            }
            Body::Piece(v1::Piece { group, kind, bytes }) => {
                let unknown = |_| HeardError::Rule(format!("a piece of the unknown kind {kind}"));
                let kind = PieceKind::try_from(kind).map_err(unknown)?;
                let piece = Piece { kind, bytes };
                self.heard_in_group(group, worker, |group, node, now| {
                    group.piece(node, piece, now)
                })
            }
            Body::Abort(abort) => self.heard_in_group(abort.group, worker, |group, node, _| {
                group.aborted(node, &abort.reason);
                Ok(())
            }),
            Body::Fetch(fetch) => self.heard_fetch(worker, &fetch),
            Body::Fetched(fetched) => self.heard_fetched(worker, fetched),
            _ => Err(HeardError::Rule(
                "a frame that workers do not send each other".into(),
            )),
        }
    }

    fn heard_in_group(
        self: &Arc<Self>,
        places: Vec<u32>,
        worker: WorkerId,
        change: impl FnOnce(&mut dyn Algorithm, usize, Instant) -> Result<(), Broke>,
    ) -> Result<(), HeardError> {
        let members = Members::new(places, &self.roster).map_err(HeardError::Rule)?;
        let many = || HeardError::Rule(format!("more than {MAX_GROUPS} groups"));
        let cell = self.cell(&members).ok_or_else(many)?;
        let stranger = || HeardError::Rule("a group that it or this worker is not of".into());
        let node = cell.node(worker).ok_or_else(stranger)?;
        cell.node(self.roster.me()).ok_or_else(stranger)?;
        let (changed, what) = cell.change(|group| change(group, node, Instant::now()));
        self.act(&cell, what);
        Ok(changed?)
    }

    fn heard_fetch(&self, worker: WorkerId, fetch: &v1::Fetch) -> Result<(), HeardError> {
        let capability = capability(&fetch.capability)?;
        let mut transfers = lock(&self.transfers);
        let act = transfers.fetch(worker, capability, fetch.from, fetch.to, &self.roster)?;
        drop(transfers);
        self.act_all(act);
        Ok(())
    }

    fn heard_fetched(&self, worker: WorkerId, fetched: v1::Fetched) -> Result<(), HeardError> {
        let capability = capability(&fetched.capability)?;
        let part = match (fetched.fault, fetched.r#type) {
            (Some(fault), _) => Part::Fault(Arc::new(fault)),
            (None, Some(kind)) => {
                let (shape, dtype, _) = decode_type(Some(&kind))?;
                Part::Bytes(Some((shape, dtype)), fetched.bytes)
            }
            (None, None) => Part::Bytes(None, fetched.bytes),
        };
        let act = lock(&self.transfers).fetched(worker, capability, part, &self.roster)?;
        self.act_all(act);
        Ok(())
    }

    /// Ends what has waited for too long.
    pub(crate) fn tick(&self, now: Instant) {
        self.fit_buckets();
        let ring_bytes = self.ring_bytes();
        let deadline = self.settings.deadline;
        let is_silent = |peer: &&Arc<Peer>| peer.is_silent(now, SILENCE);
        let silent: Vec<WorkerId> = self
            .peers
            .iter()
            .filter(is_silent)
            .map(|p| p.worker)
            .collect();
        let cells: Vec<Arc<Cell>> = lock(&self.groups).values().cloned().collect();
        for cell in cells {
            let silent: Vec<usize> = silent.iter().filter_map(|w| cell.node(*w)).collect();
            let ((), changed) = cell.change(|group| {
                group.set_ring_bytes(ring_bytes);
                group.tick(now, deadline, &silent);
            });
            self.act(&cell, changed);
        }
        for peer in &self.peers {
            let missing = peer.missing();
            if missing.is_some_and(|since| now.saturating_duration_since(since) >= deadline) {
                let (name, at) = (&peer.share.worker, &peer.share.address);
                let why = format!("worker {name} at {at} is out of reach since {deadline:?}");
                self.lose(peer, &why);
            }
        }
    }

    /// The group of `members`, which is made when it is first named.
    fn cell(&self, members: &Members) -> Option<Arc<Cell>> {
        let mut groups = lock(&self.groups);
        if let Some(cell) = groups.get(members) {
            return Some(cell.clone());
        }
        if groups.len() >= MAX_GROUPS {
            return None;
        }
        let cell = Arc::new(Cell::new(members.clone(), &self.roster));
        groups.insert(members.clone(), cell.clone());
        drop(groups);
        self.exclude(&cell);
        Some(cell)
    }

    fn want(self: &Arc<Self>, cell: &Cell) {
        for place in cell.members().places() {
            if let Some(worker) = self.roster.worker(*place) {
                self.want_worker(worker);
            }
        }
    }

    /// Sees to it that there will be a link to `worker`.
    fn want_worker(self: &Arc<Self>, worker: WorkerId) {
        if let Some(peer) = self.peer(worker)
            && peer.want()
            && self.roster.dials(worker)
        {
            let identity = self.settings.identity.clone();
            let dialling = link::dial(Arc::downgrade(self), peer.clone(), identity);
            lock(&self.dialling).spawn_on(dialling, &self.settings.runtime);
        }
    }

    /// Does what came of a change of a group.
    fn act(&self, cell: &Arc<Cell>, changed: Changed) {
        for node in changed.news_for {
            if let Some(peer) = self.peer(cell.worker(node)) {
                peer.say(Speaker::Group(cell.clone(), node));
            }
        }
        for done in changed.done {
            if let Err(Failure::New(FaultKind::Peer, reason)) = &done.result
                && cell.is_news()
            {
                warn!(lease = %self.lease, "a group is over: {reason}");
            }
            let place = cell.members().places()[done.rank];
            self.deliver(place, done.ticket, done.result.map(Arrived::Reduced));
        }
    }

    fn act_all(&self, acts: impl IntoIterator<Item = Act>) {
        for act in acts {
            match act {
                Act::Deliver {
                    to,
                    ticket,
                    outcome,
                } => self.deliver(to, ticket, outcome.map(Arrived::Taken)),
                Act::Fetch {
                    worker,
                    capability,
                    from,
                    to,
                } => {
                    let capability = capability.to_vec().into();
                    let fetch = Body::Fetch(v1::Fetch {
                        capability,
                        from,
                        to,
                    });
                    self.say(worker, Speaker::Once(fetch));
                }
                Act::Send {
                    worker,
                    capability,
                    value: Ok(value),
                } => self.say(worker, Speaker::value(capability, value)),
                Act::Send {
                    worker,
                    capability,
                    value: Err(fault),
                } => {
                    let fetched = Body::Fetched(v1::Fetched {
                        capability: capability.to_vec().into(),
                        fault: Some(Fault::clone(&fault)),
                        ..v1::Fetched::default()
                    });
                    self.say(worker, Speaker::Once(fetched));
                }
            }
        }
    }

    fn say(&self, worker: WorkerId, speaker: Speaker) {
        if let Some(peer) = self.peer(worker) {
            peer.say(speaker);
        }
    }

    fn deliver(&self, place: u32, ticket: u64, outcome: Outcome) {
        let member = lock(&self.members).get(&place).and_then(Weak::upgrade);
        match member {
            Some(member) => member.deliver(ticket, outcome),
            None => debug!(lease = %self.lease, place, "an outcome for a session that is over"),
        }
    }
}

fn capability(bytes: &[u8]) -> Result<Capability, HeardError> {
    let size = bytes.len();
    let wrong = |_| HeardError::Rule(format!("a capability of {size} bytes, not 16"));
    bytes.try_into().map_err(wrong)
}
