//! Sends the snapshots of a lease to its keeper, another worker that goes on with the lease if
//! this one is lost.
//!
//! A mark counts as kept when the keeper has its snapshot, or some time after it is clear that the
//! keeper will not have it soon: the lease then survives the death of its process, but not that of
//! this worker.

mod sent_snapshots;
mod wire;

use std::{
    collections::{HashMap, VecDeque},
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use tensord_proto::{
    ids::{LeaseId, SessionId, WorkerId},
    text::{MESSAGE_CHARS, sanitize},
    v1::{
        Ping, SnapshotBegin, SnapshotId, SnapshotPart, SnapshotStored, SnapshotsEnded, frame::Body,
    },
};
use tensord_transport::{Link, tls::Fingerprint};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout},
};
use tracing::{debug, info, warn};

use self::{
    sent_snapshots::SentSnapshots,
    wire::{connect, read_part, send, stored},
};
use super::{Supervisor, keeper_progress::KeeperProgress, snapshots::KeptSnapshot};
use crate::{locks::lock, process_message::SnapshotKept};

/// Interval of pings to the keeper.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(20);

/// Limit for an attempt to connect, and for the keeper's first reply.
const CONNECT_DEADLINE: Duration = Duration::from_secs(3);

/// Pause between attempts to connect.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// How long a snapshot may take to be stored by the keeper, and how long the keeper may read
/// nothing. The client keeps its journal meanwhile, which has a bound.
const STORE_DEADLINE: Duration = Duration::from_secs(8);

/// A mark whose snapshot the keeper will not have soon counts as kept after this time: longer than
/// the interval of heartbeats, so that the scheduler no longer takes the lease for one that could
/// move. If the lease moves, it ends here meanwhile, and its client goes on from an earlier mark.
const GIVE_UP_DELAY: Duration = Duration::from_millis(1500);

/// Bytes of a snapshot in one frame.
const PART_BYTES: usize = 1 << 20;

/// Number of messages that wait to be sent, for each device of the lease.
const QUEUE_PER_DEVICE: usize = 32;

/// The worker that keeps the snapshots of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Keeper {
    pub(super) id: WorkerId,
    pub(super) name: String,
    pub(super) address: String,
    pub(super) certificate: Fingerprint,
}

/// A message for the keeper.
enum Outgoing {
    /// A session has a new snapshot, of this mark. The link sends the latest one.
    Snapshot {
        session: SessionId,
        mark: u64,
        queued_at: Instant,
    },
    SessionEnded(SessionId),
}

/// The queues between the run of a lease and its link to the keeper.
pub(super) struct KeeperQueues {
    outgoing: mpsc::Sender<Outgoing>,
    /// Yields the snapshots that count as kept.
    pub(super) stored: mpsc::Receiver<SnapshotKept>,
    keeper: watch::Receiver<Option<Keeper>>,
    progress: Arc<Mutex<KeeperProgress>>,
}

impl KeeperQueues {
    /// Has a session's new snapshot sent to the keeper. Returns `false` if there is no keeper, or
    /// it does not keep up: the snapshot counts as kept.
    pub(super) fn send(&self, session: SessionId, mark: u64) -> bool {
        let message = Outgoing::Snapshot {
            session,
            mark,
            queued_at: Instant::now(),
        };
        let has_keeper = self.keeper.borrow().is_some();
        let is_queued = has_keeper && self.outgoing.try_send(message).is_ok();
        if !is_queued {
            lock(&self.progress).counted(session, mark);
        }
        is_queued
    }

    /// Has the keeper drop the snapshots of a session. If the queue is full, they are dropped with
    /// the lease.
    pub(super) fn end_session(&self, session: SessionId) {
        if self
            .outgoing
            .try_send(Outgoing::SessionEnded(session))
            .is_err()
        {
            // Messages about the session that are still queued would count for it.
            lock(&self.progress).set_unknown();
        }
    }
}

/// A mark whose snapshot the keeper is to have.
struct PendingMark {
    mark: u64,
    /// Until when the keeper must have the snapshot; or, if that is given up, when the mark counts as
    /// kept without it.
    until: Instant,
    is_given_up: bool,
}

/// The link of a lease to its keeper.
pub(super) struct KeeperLink {
    supervisor: Arc<Supervisor>,
    lease: LeaseId,
    keeper: watch::Receiver<Option<Keeper>>,
    outgoing: mpsc::Receiver<Outgoing>,
    /// Messages that were taken from `outgoing` while a snapshot was sent; at most as many as
    /// `outgoing` has room for.
    waiting: VecDeque<Outgoing>,
    stored: mpsc::Sender<SnapshotKept>,
    /// The marks that count as kept when the keeper has their snapshots, by session.
    pending: HashMap<SessionId, PendingMark>,
    progress: Arc<Mutex<KeeperProgress>>,
    has_warned: bool,
}

impl KeeperLink {
    pub(super) fn new(
        supervisor: Arc<Supervisor>,
        lease: LeaseId,
        devices: usize,
        keeper: watch::Receiver<Option<Keeper>>,
        progress: Arc<Mutex<KeeperProgress>>,
    ) -> (Self, KeeperQueues) {
        let queue = QUEUE_PER_DEVICE * devices.max(1);
        let (outgoing, queued) = mpsc::channel(queue);
        let (stored, stored_receiver) = mpsc::channel(queue);
        let queues = KeeperQueues {
            outgoing,
            stored: stored_receiver,
            keeper: keeper.clone(),
            progress: progress.clone(),
        };
        let link = Self {
            supervisor,
            lease,
            keeper,
            outgoing: queued,
            waiting: VecDeque::new(),
            stored,
            pending: HashMap::new(),
            progress,
            has_warned: false,
        };
        (link, queues)
    }

    /// Sends snapshots until the lease has ended.
    pub(super) async fn run(mut self) {
        loop {
            let keeper = self.keeper.borrow_and_update().clone();
            let Some(keeper) = keeper else {
                match self.wait(None).await {
                    true => continue,
                    false => return,
                }
            };
            let ended = self.connect_and_serve(&keeper).await;
            lock(&self.progress).disconnected();
            let Some(reason) = ended else {
                return;
            };
            for (session, mark) in self.pending_marks() {
                self.give_up_soon(session, mark);
            }
            if self.keeper.borrow().as_ref() != Some(&keeper) {
                continue;
            }
            if !std::mem::replace(&mut self.has_warned, true) {
                warn!(lease = %self.lease, "worker {} does not keep the snapshots of the lease, which ends if this worker is lost: {reason}", keeper.name);
            } else {
                debug!(lease = %self.lease, "the link to worker {} ended: {reason}", keeper.name);
            }
            if !self.wait(Some(RETRY_DELAY)).await {
                return;
            }
        }
    }

    /// Waits for `delay`, or, if it is `None`, until there is a keeper. Returns `false` if the lease
    /// has ended.
    async fn wait(&mut self, delay: Option<Duration>) -> bool {
        let mut pause = pin!(sleep(delay.unwrap_or_default()));
        loop {
            let deadline = self.next_deadline();
            tokio::select! {
                () = &mut pause, if delay.is_some() => return true,
                changed = self.keeper.changed() => return changed.is_ok(),
                message = next_message(&mut self.waiting, &mut self.outgoing) => match message {
                    Some(Outgoing::Snapshot { session, mark, .. }) => match delay {
                        Some(_) => self.give_up_soon(session, mark),
                        None => self.count_as_kept(session, mark).await,
                    },
                    Some(Outgoing::SessionEnded(session)) => self.forget(session),
                    None => return false,
                },
                () = sleep_until(deadline), if !self.pending.is_empty() => {
                    self.give_up_pending(Instant::now()).await;
                }
            }
        }
    }

    fn forget(&mut self, session: SessionId) {
        self.pending.remove(&session);
        lock(&self.progress).end_session(session);
    }

    fn pending_marks(&self) -> Vec<(SessionId, u64)> {
        let pending = self.pending.iter();
        pending.map(|(session, it)| (*session, it.mark)).collect()
    }

    /// Returns when the next pending mark is given up, or counts as kept.
    fn next_deadline(&self) -> Instant {
        let deadlines = self.pending.values().map(|it| it.until);
        deadlines.min().unwrap_or_else(Instant::now)
    }

    /// Waits for the keeper to have the snapshot of a mark that was queued at `queued_at`.
    fn expect(&mut self, session: SessionId, mark: u64, queued_at: Instant) {
        let expected = PendingMark {
            mark,
            until: queued_at + STORE_DEADLINE,
            is_given_up: false,
        };
        let known = self.pending.get(&session);
        if known.is_none_or(|known| known.mark < mark) {
            self.pending.insert(session, expected);
        }
    }

    /// Lets a mark count as kept after [`GIVE_UP_DELAY`]; from now on the lease cannot move.
    fn give_up_soon(&mut self, session: SessionId, mark: u64) {
        lock(&self.progress).counted(session, mark);
        let until = Instant::now() + GIVE_UP_DELAY;
        let given_up = PendingMark {
            mark,
            until,
            is_given_up: true,
        };
        let known = self.pending.get(&session);
        if known.is_none_or(|known| known.mark < mark || known.mark == mark && !known.is_given_up) {
            self.pending.insert(session, given_up);
        }
    }

    async fn count_as_kept(&self, session: SessionId, mark: u64) {
        lock(&self.progress).counted(session, mark);
        let kept = SnapshotKept {
            session_id: session.0,
            mark,
            error: String::new(),
        };
        // An error means that the lease has ended.
        let _ = self.stored.send(kept).await;
    }

    /// Gives up pending marks whose time was over at `now`, and lets those count as kept that were
    /// given up before.
    async fn give_up_pending(&mut self, now: Instant) {
        let over = self.pending.extract_if(|_, it| it.until <= now);
        for (session, it) in over.collect::<Vec<_>>() {
            match it.is_given_up {
                true => self.count_as_kept(session, it.mark).await,
                false => self.give_up_soon(session, it.mark),
            }
        }
    }

    /// Connects to the keeper, and sends it snapshots until the connection ends. Returns the
    /// reason, or `None` if the lease has ended.
    async fn connect_and_serve(&mut self, keeper: &Keeper) -> Option<String> {
        let identity = self.supervisor.settings.identity.clone();
        let connecting = connect(identity, self.lease, keeper);
        let (mut link, kept) = match timeout(CONNECT_DEADLINE, connecting).await {
            Ok(Ok(connected)) => connected,
            Ok(Err(reason)) => return Some(reason),
            Err(_) => return Some("it did not answer".into()),
        };
        info!(lease = %self.lease, "worker {} keeps the snapshots of the lease, too", keeper.name);
        let mut sent = SentSnapshots::default();
        let present = lock(&self.supervisor.snapshots).of(self.lease);
        lock(&self.progress).connected(keeper.id);
        for id in kept {
            // A keeper may send anything.
            let is_of_session = |it: &&KeptSnapshot| it.info.session_id == id.session_id;
            if let Some(latest) = present.iter().rfind(is_of_session) {
                sent.record(id, latest.info.committed);
                self.record_stored(id, &mut sent);
            }
        }
        for snapshot in present {
            if sent.is_new(snapshot.id()) {
                sent.record(snapshot.id(), snapshot.info.committed);
                if let Err(reason) = self.send_snapshot(&mut link, &snapshot).await {
                    return Some(reason);
                }
            }
        }
        self.has_warned = false;
        self.serve(&mut link, keeper, sent).await
    }

    async fn serve(
        &mut self,
        link: &mut Link,
        keeper: &Keeper,
        mut sent: SentSnapshots,
    ) -> Option<String> {
        let mut pings = interval(PING_INTERVAL);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while self.keeper.borrow().as_ref() == Some(keeper) {
            let deadline = self.next_deadline();
            let done = tokio::select! {
                message = next_message(&mut self.waiting, &mut self.outgoing) => match message {
                    Some(message) => self.send_message(link, message, &mut sent).await,
                    None => return None,
                },
                frame = link.receiver.recv() => match stored(frame) {
                    Ok(stored) => {
                        self.on_stored(stored, &mut sent).await;
                        Ok(())
                    }
                    Err(reason) => Err(reason),
                },
                _ = pings.tick() => send(link, Body::Ping(Ping::default())).await,
                () = sleep_until(deadline), if !self.pending.is_empty() => {
                    self.give_up_pending(Instant::now()).await;
                    Ok(())
                }
                changed = self.keeper.changed() => match changed {
                    Ok(()) => Ok(()),
                    Err(_) => return None,
                },
            };
            if let Err(reason) = done {
                return Some(reason);
            }
        }
        Some("another worker is the keeper".into())
    }

    async fn send_message(
        &mut self,
        link: &mut Link,
        message: Outgoing,
        sent: &mut SentSnapshots,
    ) -> Result<(), String> {
        let (session, mark, queued_at) = match message {
            Outgoing::Snapshot {
                session,
                mark,
                queued_at,
            } => (session, mark, queued_at),
            Outgoing::SessionEnded(session) => {
                self.forget(session);
                sent.forget(session);
                let session_id = session.0;
                return send(link, Body::SnapshotsEnded(SnapshotsEnded { session_id })).await;
            }
        };
        let latest = lock(&self.supervisor.snapshots).latest(self.lease, session);
        // A later snapshot than the queued one has a message of its own, or none is left.
        let latest = latest.filter(|latest| latest.info.mark == mark);
        let Some(latest) = latest.filter(|latest| !sent.is_stored(latest.id())) else {
            self.count_as_kept(session, mark).await;
            return Ok(());
        };
        self.expect(session, mark, queued_at);
        if !sent.is_new(latest.id()) {
            return Ok(());
        }
        sent.record(latest.id(), latest.info.committed);
        self.send_snapshot(link, &latest).await
    }

    /// Sends a snapshot in parts, and gives up pending ones in between whose time is over.
    async fn send_snapshot(
        &mut self,
        link: &mut Link,
        snapshot: &KeptSnapshot,
    ) -> Result<(), String> {
        let size_bytes = snapshot.info.size_bytes;
        let begin = SnapshotBegin {
            id: Some(snapshot.id()),
            committed: snapshot.info.committed,
            size_bytes,
        };
        send(link, Body::SnapshotBegin(begin)).await?;
        let mut at = 0;
        while at < size_bytes {
            let length = (size_bytes - at).min(PART_BYTES as u64) as usize;
            let data = read_part(&snapshot.file, at, length).map_err(|e| e.to_string())?;
            send(link, Body::SnapshotPart(SnapshotPart { data: data.into() })).await?;
            at += length as u64;
            self.take_messages();
            self.give_up_pending(Instant::now()).await;
        }
        Ok(())
    }

    /// Takes queued messages, so that the time of their marks is not over unnoticed while a snapshot
    /// is sent.
    fn take_messages(&mut self) {
        while self.waiting.len() < self.outgoing.max_capacity()
            && let Ok(message) = self.outgoing.try_recv()
        {
            if let Outgoing::Snapshot {
                session,
                mark,
                queued_at,
            } = message
            {
                self.expect(session, mark, queued_at);
            }
            self.waiting.push_back(message);
        }
    }

    /// Records that the keeper has a snapshot, if it was sent.
    fn record_stored(&self, id: SnapshotId, sent: &mut SentSnapshots) {
        let session = SessionId(id.session_id);
        if let Some(stored) = sent.stored(id)
            && lock(&self.progress).stored(session, stored)
        {
            // The lease may be able to move now.
            self.supervisor.reports.notify_one();
        }
    }

    async fn on_stored(&mut self, stored: SnapshotStored, sent: &mut SentSnapshots) {
        let id = stored.id.unwrap_or_default();
        let session = SessionId(id.session_id);
        let pending = self.pending.get(&session);
        let is_pending = pending.is_some_and(|it| it.mark == id.mark);
        if stored.error.is_empty() {
            self.record_stored(id, sent);
            if is_pending {
                self.pending.remove(&session);
                self.count_as_kept(session, id.mark).await;
            }
            return;
        }
        if is_pending {
            self.give_up_soon(session, id.mark);
        }
        if !std::mem::replace(&mut self.has_warned, true) {
            let reason = sanitize(&stored.error, MESSAGE_CHARS);
            warn!(lease = %self.lease, "the keeper has not kept a snapshot of the lease: {reason}");
        }
    }
}

/// Returns the next message, or `None` if the lease has ended. Cancel safe.
async fn next_message(
    waiting: &mut VecDeque<Outgoing>,
    outgoing: &mut mpsc::Receiver<Outgoing>,
) -> Option<Outgoing> {
    match waiting.pop_front() {
        Some(message) => Some(message),
        None => outgoing.recv().await,
    }
}
