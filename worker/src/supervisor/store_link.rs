//! Writes the snapshots of a lease to the worker's snapshot store.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use tensord_proto::{
    ids::{LeaseId, SessionId, StoreId},
    text::{MESSAGE_CHARS, sanitize},
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, sleep_until},
};
use tracing::{debug, warn};

use super::{
    Supervisor,
    copy_progress::{CopyProgress, StoredMarks},
    copy_queue::{CopyQueue, Outgoing},
    pending_marks::{PendingMarks, STORE_DEADLINE},
    snapshot_store::{Listed, StoredBase, StoredName, StoredPart, is_needed},
    snapshots::{KeptSnapshot, order},
};
use crate::locks::lock;

/// Pause after an operation on the store has failed.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Why the link stops.
enum Stop {
    LeaseEnded,
    /// An operation on the store has failed.
    Failed(String),
}

/// Writes the snapshots of a lease to the store.
pub(super) struct StoreLink {
    supervisor: Arc<Supervisor>,
    lease: LeaseId,
    part: StoredPart,
    outgoing: mpsc::Receiver<Outgoing>,
    /// Messages that were taken from `outgoing` during an operation; at most as many as `outgoing`
    /// has room for.
    waiting: VecDeque<Outgoing>,
    marks: PendingMarks<StoreId>,
    /// What the store has of each session, in ascending [`order`].
    stored: HashMap<SessionId, Vec<StoredName>>,
    /// What the store has of later processes of the lease, at other workers.
    later: Vec<StoredName>,
    /// The bases that the store has.
    bases: BTreeSet<StoredBase>,
    has_warned: bool,
}

impl StoreLink {
    pub(super) fn new(
        supervisor: Arc<Supervisor>,
        lease: LeaseId,
        devices: usize,
        part: StoredPart,
        progress: Arc<Mutex<CopyProgress<StoreId>>>,
    ) -> (Self, CopyQueue<StoreId>) {
        let (queue, outgoing, kept) = CopyQueue::new(devices, progress.clone());
        let link = Self {
            supervisor,
            lease,
            part,
            outgoing,
            waiting: VecDeque::new(),
            marks: PendingMarks::new(progress, kept),
            stored: HashMap::new(),
            later: Vec::new(),
            bases: BTreeSet::new(),
            has_warned: false,
        };
        (link, queue)
    }

    /// Writes snapshots until the lease has ended.
    pub(super) async fn run(mut self) {
        while let Err(Stop::Failed(reason)) = self.write_all().await {
            self.marks.disconnected(Instant::now());
            let reason = sanitize(&reason, MESSAGE_CHARS);
            if !std::mem::replace(&mut self.has_warned, true) {
                warn!(lease = %self.lease, "the snapshots of the lease are not stored in {}: {reason}", self.part.store);
            } else {
                debug!(lease = %self.lease, "the snapshots of the lease are not stored: {reason}");
            }
            if self.pause().await.is_err() {
                return;
            }
        }
    }

    /// Waits before the next attempt. New marks are given up meanwhile.
    async fn pause(&mut self) -> Result<(), Stop> {
        let mut pause = pin!(sleep(RETRY_DELAY));
        loop {
            while let Some(message) = self.waiting.pop_front() {
                match message {
                    Outgoing::Snapshot { session, mark, .. } => {
                        self.marks.give_up(Instant::now(), session, mark);
                    }
                    Outgoing::SessionEnded(session) => self.marks.forget(session),
                }
            }
            tokio::select! {
                () = &mut pause => return Ok(()),
                message = self.outgoing.recv() => {
                    self.waiting.push_back(message.ok_or(Stop::LeaseEnded)?);
                }
                () = sleep_until(self.marks.next_deadline()), if !self.marks.is_empty() => {
                    self.marks.give_up_due(Instant::now()).await;
                }
            }
        }
    }

    /// Brings the store up to date, and then writes each new snapshot.
    async fn write_all(&mut self) -> Result<(), Stop> {
        let part = self.part.clone();
        let Listed { snapshots, bases } = self.wait_for(part.list()).await?;
        self.bases = bases.keys().copied().collect();
        let present = lock(&self.supervisor.snapshots).of(self.lease);
        let is_present = |name: &StoredName| present.iter().any(|it| StoredName::of(it) == *name);
        let (known, others): (Vec<_>, Vec<_>) = snapshots
            .into_iter()
            .partition(|(name, _)| is_present(name));
        self.stored.clear();
        for (name, _) in known {
            let session = SessionId(name.id.session_id);
            self.stored.entry(session).or_default().push(name);
        }
        self.marks.connected(part.store.id());
        for session in self.stored.keys().copied().collect::<Vec<_>>() {
            self.report(session);
        }
        for snapshot in &present {
            self.put(snapshot).await?;
        }
        // Those of a later process are of another worker, to which the lease has moved.
        let epoch = present.iter().map(|snapshot| snapshot.id().epoch).max();
        let is_old = |name: &StoredName| epoch.is_some_and(|epoch| name.id.epoch <= epoch);
        let others = others.into_iter().map(|(name, _)| name);
        let (old, later): (Vec<_>, Vec<_>) = others.partition(is_old);
        self.later = later;
        self.delete(&old).await?;
        let abandoned = bases.iter().filter(|(_, stored)| stored.is_old());
        self.delete_unneeded(abandoned.map(|(base, _)| *base).collect())
            .await?;
        self.wait_for(part.delete_incomplete()).await?;
        self.has_warned = false;
        loop {
            let message = match self.waiting.pop_front() {
                Some(message) => message,
                None => tokio::select! {
                    message = self.outgoing.recv() => message.ok_or(Stop::LeaseEnded)?,
                    () = sleep_until(self.marks.next_deadline()), if !self.marks.is_empty() => {
                        self.marks.give_up_due(Instant::now()).await;
                        continue;
                    }
                },
            };
            self.on_message(message).await?;
        }
    }

    /// Waits for an operation on the store. The time of marks is not over unnoticed meanwhile.
    async fn wait_for<T>(
        &mut self,
        operation: impl Future<Output = Result<T, String>>,
    ) -> Result<T, Stop> {
        let mut operation = pin!(operation);
        loop {
            let has_room = self.waiting.len() < self.outgoing.max_capacity();
            tokio::select! {
                done = &mut operation => return done.map_err(Stop::Failed),
                message = self.outgoing.recv(), if has_room => {
                    let message = message.ok_or(Stop::LeaseEnded)?;
                    if let Outgoing::Snapshot { session, mark, queued_at } = message {
                        self.marks.expect(session, mark, queued_at);
                    }
                    self.waiting.push_back(message);
                }
                () = sleep_until(self.marks.next_deadline()), if !self.marks.is_empty() => {
                    if self.marks.give_up_due(Instant::now()).await
                        && !std::mem::replace(&mut self.has_warned, true)
                    {
                        warn!(lease = %self.lease, "{} has not stored a snapshot of the lease within {STORE_DEADLINE:?}, and is waited for", self.part.store);
                    }
                }
            }
        }
    }

    async fn on_message(&mut self, message: Outgoing) -> Result<(), Stop> {
        let (session, mark, queued_at) = match message {
            Outgoing::Snapshot {
                session,
                mark,
                queued_at,
            } => (session, mark, queued_at),
            Outgoing::SessionEnded(session) => {
                self.marks.forget(session);
                let ended = self.stored.remove(&session).unwrap_or_default();
                if !self.is_certain_to_have_the_lease() {
                    return Ok(());
                }
                return self.delete(&ended).await;
            }
        };
        let latest = lock(&self.supervisor.snapshots).latest(self.lease, session);
        // A later snapshot than the queued one has a message of its own, or none is left.
        if let Some(latest) = latest.filter(|latest| latest.info.mark == mark) {
            self.marks.expect(session, mark, queued_at);
            self.put(&latest).await?;
            let after = lock(&self.supervisor.snapshots).latest(self.lease, session);
            if after.is_some_and(|after| after.info.mark == mark && after.id() != latest.id()) {
                // Meanwhile a restored process has taken another snapshot at the mark, which has a
                // message of its own.
                return Ok(());
            }
        }
        self.marks.count_as_kept(session, mark).await;
        Ok(())
    }

    /// Returns whether the lease runs here as far as the scheduler knows. If not, a session may have ended
    /// here because it goes on elsewhere, from these snapshots.
    fn is_certain_to_have_the_lease(&self) -> bool {
        let has_scheduler = lock(&self.supervisor.scheduler).time_ms.is_some();
        has_scheduler && lock(&self.supervisor.table).is_running(self.lease)
    }

    /// Writes a snapshot, unless it is stored, and deletes those that it replaces.
    async fn put(&mut self, snapshot: &KeptSnapshot) -> Result<(), Stop> {
        let name = StoredName::of(snapshot);
        let session = SessionId(name.id.session_id);
        let stored = self.stored.entry(session).or_default();
        if stored.contains(&name) {
            return Ok(());
        }
        let part = self.part.clone();
        if let (Some(base), Some(kept)) = (name.base(), &snapshot.base)
            && !self.bases.contains(&base)
        {
            self.wait_for(part.put_base(&base, &kept.file)).await?;
            self.bases.insert(base);
        }
        self.wait_for(part.put(snapshot)).await?;
        let stored = self.stored.entry(session).or_default();
        stored.push(name);
        stored.sort_by_key(|name| order(name.id));
        let replaced = take_replaced(stored);
        self.report(session);
        self.delete(&replaced).await
    }

    /// Deletes snapshots, and their bases unless another snapshot needs them.
    async fn delete(&mut self, snapshots: &[StoredName]) -> Result<(), Stop> {
        let part = self.part.clone();
        for name in snapshots {
            self.wait_for(part.delete(name)).await?;
        }
        let bases = snapshots.iter().filter_map(StoredName::base);
        self.delete_unneeded(bases.collect()).await
    }

    /// Deletes those of `bases` that no snapshot needs.
    async fn delete_unneeded(&mut self, bases: BTreeSet<StoredBase>) -> Result<(), Stop> {
        let part = self.part.clone();
        let known = self.stored.values().flatten().chain(&self.later);
        let needed: BTreeSet<_> = known.filter_map(StoredName::base).collect();
        for base in bases.difference(&needed) {
            self.wait_for(part.delete(base)).await?;
            self.bases.remove(base);
        }
        Ok(())
    }

    /// Reports what the store has of a session.
    fn report(&self, session: SessionId) {
        let stored = self.stored.get(&session).map_or(&[][..], Vec::as_slice);
        let Some(last) = stored.last() else {
            return;
        };
        let stored = StoredMarks {
            marks: stored.iter().map(|name| name.id.mark).collect(),
            committed: last.committed,
        };
        if self.marks.stored(session, stored) {
            // The lease may be able to go on elsewhere now.
            self.supervisor.reports.notify_one();
        }
    }
}

/// Removes and returns the snapshots of a session from which its client cannot go on any more.
fn take_replaced(stored: &mut Vec<StoredName>) -> Vec<StoredName> {
    let all = std::mem::take(stored);
    let (needed, replaced) = all.iter().partition(|name| is_needed(name, &all));
    *stored = needed;
    replaced
}

#[cfg(test)]
mod tests {
    use tensord_proto::v1::SnapshotId;

    use super::*;

    fn name(epoch: u64, mark: u64, committed: u64) -> StoredName {
        let id = SnapshotId {
            session_id: 1,
            mark,
            epoch,
            base_id: 0,
        };
        StoredName { id, committed }
    }

    #[test]
    fn last_and_committed_snapshot_stay() {
        let mut stored = vec![name(0, 1, 0), name(0, 2, 1), name(0, 3, 2)];
        assert_eq!(take_replaced(&mut stored), [name(0, 1, 0)]);
        assert_eq!(stored, [name(0, 2, 1), name(0, 3, 2)]);
        // Another process has come to mark 3 again, and then to mark 4.
        stored.extend([name(1, 3, 2), name(1, 4, 3)]);
        assert_eq!(take_replaced(&mut stored), [name(0, 2, 1), name(0, 3, 2)]);
        assert_eq!(take_replaced(&mut Vec::new()), []);
    }
}
