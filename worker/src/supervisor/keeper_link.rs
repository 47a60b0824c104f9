//! Sends the snapshots of a lease to its keeper, another worker that goes on with the lease if
//! this one is lost. `stream` decides which ones; this module connects and sends.

mod sent_snapshots;
pub(super) mod stream;
pub(super) mod wire;

use std::{
    collections::VecDeque,
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use tensord_proto::{
    ids::{PartId, SessionId, WorkerId},
    v1::{Ping, SnapshotsEnded, frame::Body},
};
use tensord_transport::{Identity, Link, tls::Fingerprint};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout},
};
use tracing::{debug, info, warn};

use self::{
    stream::SnapshotStream,
    wire::{connect, send, stored},
};
use super::{
    Supervisor,
    copy_progress::CopyProgress,
    copy_queue::{CopyQueue, Outgoing},
    pending_marks::PendingMarks,
    snapshots::KeptSnapshot,
};
use crate::process_message::SnapshotKept;

/// Interval of pings to the keeper.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(20);

/// Limit for an attempt to connect, and for the keeper's first reply.
pub(super) const CONNECT_DEADLINE: Duration = Duration::from_secs(3);

/// Pause between attempts to connect.
pub(super) const RETRY_DELAY: Duration = Duration::from_secs(1);

/// A worker as the keeper of a part of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Assignment {
    pub(super) keeper: WorkerId,
    /// The scheduler's number of the assignment, which the keeper knows, too.
    pub(super) number: u64,
}

/// The worker that keeps the snapshots of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Keeper {
    pub(super) assignment: Assignment,
    pub(super) name: String,
    pub(super) address: String,
    pub(super) certificate: Fingerprint,
}

/// The queues between the run of a lease and its link to the keeper.
pub(super) struct KeeperQueues {
    queue: CopyQueue<Assignment>,
    keeper: watch::Receiver<Option<Keeper>>,
}

impl KeeperQueues {
    /// Creates the queues of a part of a lease that has this number of devices. Returns with them what
    /// sends the snapshots, and the messages for it.
    pub(super) fn new(
        supervisor: Arc<Supervisor>,
        part: PartId,
        devices: usize,
        keeper: watch::Receiver<Option<Keeper>>,
        progress: Arc<Mutex<CopyProgress<Assignment>>>,
    ) -> (SnapshotStream, mpsc::Receiver<Outgoing>, Self) {
        let (queue, outgoing, kept) = CopyQueue::new(devices, progress.clone());
        let marks = PendingMarks::new(progress, kept);
        let stream = SnapshotStream::new(supervisor, part, marks);
        (stream, outgoing, Self { queue, keeper })
    }

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
    stream: SnapshotStream,
    identity: Arc<Identity>,
    keeper: watch::Receiver<Option<Keeper>>,
    outgoing: mpsc::Receiver<Outgoing>,
    /// Messages that were taken from `outgoing` while a snapshot was sent; at most as many as
    /// `outgoing` has room for.
    waiting: VecDeque<Outgoing>,
    /// Number of connections to the keeper that have ended or failed, one after the other.
    failures: u32,
}

impl KeeperLink {
    pub(super) fn new(
        supervisor: Arc<Supervisor>,
        part: PartId,
        devices: usize,
        keeper: watch::Receiver<Option<Keeper>>,
        progress: Arc<Mutex<CopyProgress<Assignment>>>,
    ) -> (Self, KeeperQueues) {
        let identity = supervisor.settings.identity.clone();
        let (stream, outgoing, queues) =
            KeeperQueues::new(supervisor, part, devices, keeper.clone(), progress);
        let link = Self {
            stream,
            identity,
            keeper,
            outgoing,
            waiting: VecDeque::new(),
            failures: 0,
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
            self.stream.marks.disconnected(Instant::now());
            let Some(reason) = ended else {
                return;
            };
            if self.keeper.borrow().as_ref() != Some(&keeper) {
                continue;
            }
            self.failures += 1;
            // Once is no reason to worry: the keeper may drop a lease that has ended before this worker does.
            if self.failures > 1 && self.stream.take_warning() {
                warn!(lease = %self.stream.part.lease, "worker {} does not keep the snapshots of the lease, which ends if this worker is lost: {reason}", keeper.name);
            } else {
                debug!(lease = %self.stream.part.lease, "the link to worker {} ended: {reason}", keeper.name);
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
            let deadline = self.stream.marks.next_deadline();
            tokio::select! {
                () = &mut pause, if delay.is_some() => return true,
                changed = self.keeper.changed() => return changed.is_ok(),
                message = next_message(&mut self.waiting, &mut self.outgoing) => match message {
                    Some(Outgoing::Snapshot { session, mark, .. }) => match delay {
                        Some(_) => self.stream.marks.give_up(Instant::now(), session, mark),
                        None => self.stream.marks.count_as_kept(session, mark).await,
                    },
                    Some(Outgoing::SessionEnded(session)) => self.stream.marks.forget(session),
                    None => return false,
                },
                () = sleep_until(deadline), if !self.stream.marks.is_empty() => {
                    self.stream.marks.give_up_due(Instant::now()).await;
                }
            }
        }
    }

    /// Connects to the keeper, and sends it snapshots until the connection ends. Returns the
    /// reason, or `None` if the lease has ended.
    async fn connect_and_serve(&mut self, keeper: &Keeper) -> Option<String> {
        let connecting = connect(self.identity.clone(), self.stream.part, keeper);
        let (mut link, kept) = match timeout(CONNECT_DEADLINE, connecting).await {
            Ok(Ok(connected)) => connected,
            Ok(Err(reason)) => return Some(reason),
            Err(_) => return Some("it did not answer".into()),
        };
        info!(lease = %self.stream.part.lease, "worker {} keeps the snapshots of the lease, too", keeper.name);
        for snapshot in self.stream.connected(keeper.assignment, kept) {
            if self.stream.is_new(&snapshot)
                && let Err(reason) = self.send_snapshot(&mut link, &snapshot).await
            {
                return Some(reason);
            }
        }
        self.failures = 0;
        self.stream.worked();
        self.serve(&mut link, keeper).await
    }

    async fn serve(&mut self, link: &mut Link, keeper: &Keeper) -> Option<String> {
        let mut pings = interval(PING_INTERVAL);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while self.keeper.borrow().as_ref() == Some(keeper) {
            let deadline = self.stream.marks.next_deadline();
            let done = tokio::select! {
                message = next_message(&mut self.waiting, &mut self.outgoing) => match message {
                    Some(message) => self.send_message(link, message).await,
                    None => return None,
                },
                frame = link.receiver.recv() => match stored(frame) {
                    Ok(stored) => {
                        self.stream.on_stored(Instant::now(), stored).await;
                        Ok(())
                    }
                    Err(reason) => Err(reason),
                },
                _ = pings.tick() => send(link, Body::Ping(Ping::default())).await,
                () = sleep_until(deadline), if !self.stream.marks.is_empty() => {
                    self.stream.marks.give_up_due(Instant::now()).await;
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

    async fn send_message(&mut self, link: &mut Link, message: Outgoing) -> Result<(), String> {
        match message {
            Outgoing::Snapshot {
                session,
                mark,
                queued_at,
            } => match self.stream.next_to_send(session, mark, queued_at).await {
                Some(snapshot) => self.send_snapshot(link, &snapshot).await,
                None => Ok(()),
            },
            Outgoing::SessionEnded(session) => {
                self.stream.forget(session);
                let session_id = session.0;
                send(link, Body::SnapshotsEnded(SnapshotsEnded { session_id })).await
            }
        }
    }

    /// Sends a snapshot in parts, and gives up pending ones in between whose time is over.
    async fn send_snapshot(
        &mut self,
        link: &mut Link,
        snapshot: &KeptSnapshot,
    ) -> Result<(), String> {
        for body in self.stream.begin(Instant::now(), snapshot) {
            send(link, body.map_err(|e| e.to_string())?).await?;
            self.take_messages();
            self.stream.marks.give_up_due(Instant::now()).await;
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
                self.stream.marks.expect(session, mark, queued_at);
            }
            self.waiting.push_back(message);
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
