//! Sends the snapshots of a lease to its keeper, another worker that goes on with the lease if
//! this one is lost.

mod sent_snapshots;
pub(super) mod wire;

use std::{
    collections::VecDeque,
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use tensord_proto::{
    ids::{PartId, SessionId, WorkerId},
    text::{MESSAGE_CHARS, sanitize},
    v1::{Ping, SnapshotId, SnapshotStored, SnapshotsEnded, frame::Body},
};
use tensord_transport::{Link, tls::Fingerprint};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout},
};
use tracing::{debug, info, warn};

use self::{
    sent_snapshots::SentSnapshots,
    wire::{connect, frames, send, stored},
};
use super::{
    Supervisor,
    copy_progress::CopyProgress,
    copy_queue::{CopyQueue, Outgoing},
    pending_marks::PendingMarks,
    snapshots::KeptSnapshot,
};
use crate::{locks::lock, process_message::SnapshotKept};

/// Interval of pings to the keeper.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(20);

/// Limit for an attempt to connect, and for the keeper's first reply.
pub(super) const CONNECT_DEADLINE: Duration = Duration::from_secs(3);

/// Pause between attempts to connect.
pub(super) const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The worker that keeps the snapshots of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Keeper {
    pub(super) id: WorkerId,
    pub(super) name: String,
    pub(super) address: String,
    pub(super) certificate: Fingerprint,
}

/// The queues between the run of a lease and its link to the keeper.
pub(super) struct KeeperQueues {
    queue: CopyQueue<WorkerId>,
    keeper: watch::Receiver<Option<Keeper>>,
}

impl KeeperQueues {
    /// Has a session's new snapshot sent to the keeper. Returns `false` if there is no keeper, or
    /// it does not keep up: the snapshot counts as kept.
    pub(super) fn send(&self, session: SessionId, mark: u64) -> bool {
        let has_keeper = self.keeper.borrow().is_some();
        if !has_keeper {
            self.queue.count_as_kept(session, mark);
        }
        has_keeper && self.queue.send(session, mark)
    }

    /// Returns the next snapshot that counts as kept. Cancel safe.
    pub(super) async fn kept(&mut self) -> Option<SnapshotKept> {
        self.queue.kept.recv().await
    }

    /// Has the keeper drop the snapshots of a session. If the queue is full, they are dropped with
    /// the lease.
    pub(super) fn end_session(&self, session: SessionId) {
        self.queue.end_session(session);
    }
}

/// The link of a lease to its keeper.
pub(super) struct KeeperLink {
    supervisor: Arc<Supervisor>,
    part: PartId,
    keeper: watch::Receiver<Option<Keeper>>,
    outgoing: mpsc::Receiver<Outgoing>,
    /// Messages that were taken from `outgoing` while a snapshot was sent; at most as many as
    /// `outgoing` has room for.
    waiting: VecDeque<Outgoing>,
    marks: PendingMarks<WorkerId>,
    /// Number of connections to the keeper that have ended or failed, one after the other.
    failures: u32,
    has_warned: bool,
}

impl KeeperLink {
    pub(super) fn new(
        supervisor: Arc<Supervisor>,
        part: PartId,
        devices: usize,
        keeper: watch::Receiver<Option<Keeper>>,
        progress: Arc<Mutex<CopyProgress<WorkerId>>>,
    ) -> (Self, KeeperQueues) {
        let (queue, outgoing, kept) = CopyQueue::new(devices, progress.clone());
        let queues = KeeperQueues {
            queue,
            keeper: keeper.clone(),
        };
        let link = Self {
            supervisor,
            part,
            keeper,
            outgoing,
            waiting: VecDeque::new(),
            marks: PendingMarks::new(progress, kept),
            failures: 0,
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
            self.marks.disconnected();
            let Some(reason) = ended else {
                return;
            };
            if self.keeper.borrow().as_ref() != Some(&keeper) {
                continue;
            }
            self.failures += 1;
            // Once is no reason to worry: the keeper may drop a lease that has ended before this worker does.
            if self.failures > 1 && !std::mem::replace(&mut self.has_warned, true) {
                warn!(lease = %self.part.lease, "worker {} does not keep the snapshots of the lease, which ends if this worker is lost: {reason}", keeper.name);
            } else {
                debug!(lease = %self.part.lease, "the link to worker {} ended: {reason}", keeper.name);
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
            let deadline = self.marks.next_deadline();
            tokio::select! {
                () = &mut pause, if delay.is_some() => return true,
                changed = self.keeper.changed() => return changed.is_ok(),
                message = next_message(&mut self.waiting, &mut self.outgoing) => match message {
                    Some(Outgoing::Snapshot { session, mark, .. }) => match delay {
                        Some(_) => self.marks.give_up_soon(session, mark),
                        None => self.marks.count_as_kept(session, mark).await,
                    },
                    Some(Outgoing::SessionEnded(session)) => self.marks.forget(session),
                    None => return false,
                },
                () = sleep_until(deadline), if !self.marks.is_empty() => {
                    self.marks.give_up_due(Instant::now()).await;
                }
            }
        }
    }

    /// Connects to the keeper, and sends it snapshots until the connection ends. Returns the
    /// reason, or `None` if the lease has ended.
    async fn connect_and_serve(&mut self, keeper: &Keeper) -> Option<String> {
        let identity = self.supervisor.settings.identity.clone();
        let connecting = connect(identity, self.part, keeper);
        let (mut link, kept) = match timeout(CONNECT_DEADLINE, connecting).await {
            Ok(Ok(connected)) => connected,
            Ok(Err(reason)) => return Some(reason),
            Err(_) => return Some("it did not answer".into()),
        };
        info!(lease = %self.part.lease, "worker {} keeps the snapshots of the lease, too", keeper.name);
        let mut sent = SentSnapshots::default();
        let present = lock(&self.supervisor.snapshots).of(self.part.lease);
        self.marks.connected(keeper.id);
        for id in kept {
            // A keeper may send anything.
            let is_of_session = |it: &&KeptSnapshot| it.info.session_id == id.session_id;
            if let Some(latest) = present.iter().rfind(is_of_session) {
                sent.record(id, latest.info.committed);
                self.record_stored(id, &mut sent);
            }
        }
        for snapshot in present {
            if sent.is_new(snapshot.id())
                && let Err(reason) = self.send_snapshot(&mut link, &snapshot, &mut sent).await
            {
                return Some(reason);
            }
        }
        (self.failures, self.has_warned) = (0, false);
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
            let deadline = self.marks.next_deadline();
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
                () = sleep_until(deadline), if !self.marks.is_empty() => {
                    self.marks.give_up_due(Instant::now()).await;
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
                self.marks.forget(session);
                sent.forget(session);
                let session_id = session.0;
                return send(link, Body::SnapshotsEnded(SnapshotsEnded { session_id })).await;
            }
        };
        let latest = lock(&self.supervisor.snapshots).latest(self.part.lease, session);
        // A later snapshot than the queued one has a message of its own, or none is left.
        let latest = latest.filter(|latest| latest.info.mark == mark);
        let Some(latest) = latest.filter(|latest| !sent.is_stored(latest.id())) else {
            self.marks.count_as_kept(session, mark).await;
            return Ok(());
        };
        self.marks.expect(session, mark, queued_at);
        if !sent.is_new(latest.id()) {
            return Ok(());
        }
        self.send_snapshot(link, &latest, sent).await
    }

    /// Sends a snapshot in parts, and gives up pending ones in between whose time is over.
    async fn send_snapshot(
        &mut self,
        link: &mut Link,
        snapshot: &KeptSnapshot,
        sent: &mut SentSnapshots,
    ) -> Result<(), String> {
        let (id, committed) = (snapshot.id(), snapshot.info.committed);
        let has_base = sent.has_base_of(id, committed);
        sent.record(id, committed);
        for body in frames(snapshot, has_base) {
            send(link, body.map_err(|e| e.to_string())?).await?;
            self.take_messages();
            self.marks.give_up_due(Instant::now()).await;
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
                self.marks.expect(session, mark, queued_at);
            }
            self.waiting.push_back(message);
        }
    }

    /// Records that the keeper has a snapshot, if it was sent.
    fn record_stored(&self, id: SnapshotId, sent: &mut SentSnapshots) {
        let session = SessionId(id.session_id);
        if let Some(stored) = sent.stored(id)
            && self.marks.stored(session, stored)
        {
            // The lease may be able to move now.
            self.supervisor.reports.notify_one();
        }
    }

    async fn on_stored(&mut self, stored: SnapshotStored, sent: &mut SentSnapshots) {
        let id = stored.id.unwrap_or_default();
        let session = SessionId(id.session_id);
        let is_pending = self.marks.is_pending(session, id.mark);
        if stored.error.is_empty() {
            self.record_stored(id, sent);
            if is_pending {
                self.marks.count_as_kept(session, id.mark).await;
            }
            return;
        }
        sent.refused(session);
        if self.marks.refused() {
            // Another worker may have room.
            self.supervisor.reports.notify_one();
        }
        if is_pending {
            self.marks.give_up_soon(session, id.mark);
        }
        if !std::mem::replace(&mut self.has_warned, true) {
            let reason = sanitize(&stored.error, MESSAGE_CHARS);
            warn!(lease = %self.part.lease, "the keeper has not kept a snapshot of the lease: {reason}");
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
