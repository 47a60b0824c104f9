//! Copies of snapshots for the keepers of a lease, and handovers of snapshots of suspended leases.

use std::{
    collections::VecDeque,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use tensord_proto::{
    ids::PartId,
    v1::{SnapshotStored, SnapshotsEnded, frame::Body},
};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use super::SimulatedWorker;
use crate::{
    locks::lock,
    supervisor::{
        copy_queue::Outgoing,
        handover::HandoverState,
        keeper::connection::SourceConnection,
        keeper_link::{Keeper, stream::SnapshotStream, wire::frames},
        snapshots::KeptSnapshot,
    },
};

/// What sends the snapshots of a part of a lease to its keeper.
pub(super) struct Copying {
    part: PartId,
    stream: SnapshotStream,
    outgoing: mpsc::Receiver<Outgoing>,
    keeper: watch::Receiver<Option<Keeper>>,
    connection: Option<KeeperConnection>,
}

/// A connection to a keeper.
struct KeeperConnection {
    keeper: Keeper,
    end: SourceConnection,
    /// Snapshots on their way, each in its frames.
    snapshots: VecDeque<Vec<Body>>,
    replies: VecDeque<SnapshotStored>,
}

impl Copying {
    /// Creates what sends the snapshots of a part, without a connection.
    pub(super) fn new(
        part: PartId,
        stream: SnapshotStream,
        outgoing: mpsc::Receiver<Outgoing>,
        keeper: watch::Receiver<Option<Keeper>>,
    ) -> Self {
        Self {
            part,
            stream,
            outgoing,
            keeper,
            connection: None,
        }
    }

    fn disconnect(&mut self, now: Instant) {
        if self.connection.take().is_some() {
            self.stream.marks.disconnected(now);
        }
    }

    /// Disconnects from a worker that is not the keeper any more.
    fn follow_keeper(&mut self, now: Instant) {
        let connection = self.connection.as_ref();
        if connection.is_some_and(|it| self.keeper.borrow().as_ref() != Some(&it.keeper)) {
            self.disconnect(now);
        }
    }

    fn send(&mut self, now: Instant, snapshot: &KeptSnapshot) {
        let frames = self.stream.begin(now, snapshot);
        let frames = frames.map(|body| body.expect("the snapshot can be read"));
        if let Some(connection) = &mut self.connection {
            connection.snapshots.push_back(frames.collect());
        }
    }

    fn take_message(&mut self, now: Instant, message: Outgoing) {
        let has_keeper = self.keeper.borrow().is_some();
        match message {
            Outgoing::Snapshot { session, mark, .. } => {
                match (self.connection.is_some(), has_keeper) {
                    (true, _) => {
                        let snapshot = self.stream.next_to_send(session, mark, now);
                        if let Some(snapshot) = done(snapshot) {
                            self.send(now, &snapshot);
                        }
                    }
                    (false, true) => self.stream.marks.give_up(now, session, mark),
                    (false, false) => done(self.stream.marks.count_as_kept(session, mark)),
                }
            }
            Outgoing::SessionEnded(session) => {
                self.stream.forget(session);
                let session_id = session.0;
                let ended = Body::SnapshotsEnded(SnapshotsEnded { session_id });
                if let Some(connection) = &mut self.connection {
                    connection.snapshots.push_back(vec![ended]);
                }
            }
        }
    }
}

impl SimulatedWorker {
    /// Returns the id of the worker to which the process's snapshots are to be copied, if there is one.
    pub fn keeper(&self) -> Option<u64> {
        let copying = &self.run.as_ref()?.copying;
        copying
            .keeper
            .borrow()
            .as_ref()
            .map(|keeper| keeper.assignment.keeper.0)
    }

    /// Connects to the keeper, unless there is a connection. The keeper may refuse that.
    pub fn connect_to_keeper(&mut self, now: std::time::Instant, keeper: &Self) {
        let certificate = self.supervisor.settings.identity.fingerprint();
        let Some(run) = &mut self.run else {
            return;
        };
        let copying = &mut run.copying;
        copying.follow_keeper(now.into());
        let wanted = copying.keeper.borrow().clone();
        let wanted =
            wanted.filter(|wanted| wanted.assignment.keeper.0 == keeper.settings.worker_id);
        let (Some(wanted), None) = (wanted, &copying.connection) else {
            return;
        };
        let assignment = wanted.assignment;
        let (keeper, number) = (&keeper.supervisor, assignment.number);
        let end = SourceConnection::new(keeper, copying.part, Some(certificate), number);
        let Some(end) = end else {
            return;
        };
        let kept = end.kept();
        copying.connection = Some(KeeperConnection {
            keeper: wanted,
            end,
            snapshots: VecDeque::new(),
            replies: VecDeque::new(),
        });
        for snapshot in copying.stream.connected(assignment, kept) {
            if copying.stream.is_new(&snapshot) {
                copying.send(now.into(), &snapshot);
            }
        }
    }

    /// Takes the next snapshot that is to be copied, if there is one.
    pub fn take_copy(&mut self, now: std::time::Instant) {
        let Some(run) = &mut self.run else {
            return;
        };
        run.copying.follow_keeper(now.into());
        if let Ok(message) = run.copying.outgoing.try_recv() {
            run.copying.take_message(now.into(), message);
        }
    }

    /// Lets the next copy on the connection arrive at the keeper. If `is_whole` is false, only its first
    /// frame arrives, and then the connection ends. Returns whether there was one.
    ///
    /// # Panics
    ///
    /// If the keeper finds that this worker has broken a rule.
    pub fn deliver_copy(&mut self, now: std::time::Instant, is_whole: bool) -> bool {
        let Some(run) = &mut self.run else {
            return false;
        };
        let Some(connection) = &mut run.copying.connection else {
            return false;
        };
        let Some(bodies) = connection.snapshots.pop_front() else {
            return false;
        };
        let mut receiving = None;
        let count = if is_whole { bodies.len() } else { 1 };
        for body in bodies.into_iter().take(count) {
            match connection.end.on_frame(body, &mut receiving) {
                Ok(reply) => connection.replies.extend(reply),
                Err(reason) => {
                    assert!(!reason.contains("broke the protocol"), "{reason}");
                    drop(receiving);
                    run.copying.disconnect(now.into());
                    return true;
                }
            }
        }
        drop(receiving);
        if !is_whole {
            run.copying.disconnect(now.into());
        }
        true
    }

    /// Lets a reply of the keeper arrive.
    pub fn deliver_copy_reply(&mut self, now: std::time::Instant) {
        let Some(run) = &mut self.run else {
            return;
        };
        let connection = run.copying.connection.as_mut();
        let reply = connection.and_then(|connection| connection.replies.pop_front());
        if let Some(reply) = reply {
            done(run.copying.stream.on_stored(now.into(), reply));
        }
    }

    /// Ends the connection to the keeper, if it is this worker. Returns whether there was one.
    pub fn disconnect_from_keeper(&mut self, now: std::time::Instant, keeper: u64) -> bool {
        let Some(run) = &mut self.run else {
            return false;
        };
        let connection = run.copying.connection.as_ref();
        let is_there = connection.is_some_and(|it| it.keeper.assignment.keeper.0 == keeper);
        if is_there {
            run.copying.disconnect(now.into());
        }
        is_there
    }

    /// Gives up the marks whose snapshots the keeper has not stored in time, and lets those count as kept
    /// that were given up before.
    pub fn give_up_copies(&mut self, now: std::time::Instant) {
        if let Some(run) = &mut self.run {
            done(run.copying.stream.marks.give_up_due(now.into()));
        }
    }

    /// Returns the worker to which the next snapshots are to be handed over.
    pub fn handover_to(&self) -> Option<u64> {
        self.handovers
            .front()
            .map(|(.., keeper)| keeper.assignment.keeper.0)
    }

    /// Hands snapshots over, all at once; or fails to do so, if the keeper is `None`.
    pub fn hand_over(&mut self, keeper: Option<&Self>) {
        let Some((part, Keeper { assignment, .. })) = self.handovers.pop_front() else {
            return;
        };
        if !lock(&self.supervisor.handovers).is_latest(part, assignment) {
            return;
        }
        let snapshots = lock(&self.supervisor.kept_for_others).snapshots_of(part);
        let state = match keeper {
            _ if snapshots.is_empty() => HandoverState::Missing,
            Some(keeper) if self.send_all(part, assignment.number, keeper, &snapshots) => {
                HandoverState::Done
            }
            _ => HandoverState::Failed,
        };
        self.supervisor.finish_handover(part, assignment, state);
    }

    /// Sends a keeper the snapshots of a part that it lacks. Returns whether it has all then.
    fn send_all(
        &self,
        part: PartId,
        assignment: u64,
        keeper: &Self,
        snapshots: &[KeptSnapshot],
    ) -> bool {
        let certificate = self.supervisor.settings.identity.fingerprint();
        let keeper: &Arc<_> = &keeper.supervisor;
        let Some(end) = SourceConnection::new(keeper, part, Some(certificate), assignment) else {
            return false;
        };
        let mut kept = end.kept();
        for snapshot in snapshots {
            let id = snapshot.id();
            if kept.contains(&id) {
                continue;
            }
            let mut receiving = None;
            for body in frames(snapshot, snapshot.has_base_among(&kept)) {
                let body = body.expect("the snapshot can be read");
                match end.on_frame(body, &mut receiving) {
                    Ok(Some(reply)) if !reply.error.is_empty() => return false,
                    Ok(_) => {}
                    Err(_) => return false,
                }
            }
            kept.push(id);
        }
        true
    }
}

/// Returns the result of a future that need not wait: queues have room.
fn done<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("a queue is full"),
    }
}
