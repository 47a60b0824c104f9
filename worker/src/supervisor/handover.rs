//! Hands the snapshots of suspended leases over to other workers, as the scheduler requests: when this
//! worker drains, or when such a lease can go on only where its snapshots are not.
//!
//! The scheduler names a keeper for such a lease, as it does for leases that run. When the keeper has
//! all snapshots, this worker reports that; it reports as well if it gives up. If it drains, the scheduler
//! then has it drop its own.

use std::{collections::BTreeMap, sync::Arc};

use tensord_proto::{
    ids::{LeaseId, PartId, WorkerId},
    text::{MESSAGE_CHARS, sanitize},
    v1::{KeptLease, SnapshotId},
};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::{
    Job, Supervisor,
    keeper_link::{
        CONNECT_DEADLINE, Keeper, RETRY_DELAY,
        wire::{connect, frames, send, stored},
    },
    pending_marks::STORE_DEADLINE,
    snapshots::KeptSnapshot,
};
use crate::locks::lock;

/// How often a handover is tried. The keeper may not know of it yet, or may have a short break.
const ATTEMPTS: usize = 4;

/// The parts of suspended leases whose snapshots are handed over.
#[derive(Debug, Default)]
pub(super) struct Handovers(BTreeMap<PartId, Handover>);

#[derive(Debug)]
struct Handover {
    /// The scheduler's number of the request, different for each.
    number: u64,
    keeper: WorkerId,
    state: HandoverState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HandoverState {
    Pending,
    /// The keeper has all snapshots.
    Done,
    /// It does not, and will not get them.
    Failed,
    /// They are not here.
    Missing,
}

impl Handovers {
    /// Begins to hand a part over to `keeper`, instead of what was requested before.
    fn begin(&mut self, part: PartId, number: u64, keeper: WorkerId) {
        let state = HandoverState::Pending;
        let handover = Handover {
            number,
            keeper,
            state,
        };
        self.0.insert(part, handover);
    }

    /// Returns whether a request is the latest one for its part.
    pub(super) fn is_latest(&self, part: PartId, number: u64) -> bool {
        let latest = self.0.get(&part);
        latest.is_some_and(|handover| handover.number == number)
    }

    /// Records what has become of a request, if it is the latest one for its part.
    fn finish(&mut self, part: PartId, number: u64, state: HandoverState) {
        let latest = self.0.get_mut(&part);
        if let Some(handover) = latest.filter(|handover| handover.number == number) {
            handover.state = state;
        }
    }

    /// Ends the handover of a part.
    pub(super) fn end_part(&mut self, part: PartId) {
        self.0.remove(&part);
    }

    /// Ends the handovers of all parts of a lease.
    pub(super) fn end(&mut self, lease: LeaseId) {
        let all = self.0.extract_if(PartId::range_of(lease), |_, _| true);
        all.for_each(drop);
    }

    /// Returns whether a handover is not over. One that has failed will be requested again.
    pub(super) fn has_pending(&self) -> bool {
        let mut handovers = self.0.values();
        handovers.any(|it| matches!(it.state, HandoverState::Pending | HandoverState::Failed))
    }

    /// Returns the handovers that are over, for the scheduler.
    pub(super) fn ended(&self) -> impl Iterator<Item = KeptLease> {
        let ended = self.0.iter();
        let ended = ended.filter(|(_, handover)| handover.state != HandoverState::Pending);
        ended.map(|(part, handover)| KeptLease {
            lease_id: part.lease.0,
            keeper_id: handover.keeper.0,
            part: part.index,
            handover: handover.number,
            failed: handover.state == HandoverState::Failed,
            missing: handover.state == HandoverState::Missing,
            ..KeptLease::default()
        })
    }
}

impl Supervisor {
    /// Begins to hand the snapshots of a part of a suspended lease over to `keeper`. `number` is the
    /// scheduler's number of the request.
    pub(super) fn begin_handover(&self, part: PartId, number: u64, keeper: Keeper) {
        lock(&self.handovers).begin(part, number, keeper.id);
        match lock(&self.kept_for_others).holds(part) {
            true => self.queue(Job::HandOver(part, number, Box::new(keeper))),
            false => self.finish_handover(part, number, HandoverState::Missing),
        }
    }

    /// Hands the snapshots of a part of a suspended lease over to `keeper`, until that has them, several
    /// attempts have failed, or the scheduler has requested something else.
    pub(super) async fn hand_over(self: Arc<Self>, part: PartId, number: u64, keeper: Keeper) {
        let lease = part.lease;
        for attempt in 1..=ATTEMPTS {
            if !lock(&self.handovers).is_latest(part, number) {
                return;
            }
            let snapshots = lock(&self.kept_for_others).snapshots_of(part);
            if snapshots.is_empty() {
                return self.finish_handover(part, number, HandoverState::Missing);
            }
            let Err(reason) = self.send_all(part, &keeper, &snapshots).await else {
                info!(%lease, "worker {} holds the snapshots of the suspended lease, too", keeper.name);
                return self.finish_handover(part, number, HandoverState::Done);
            };
            let reason = sanitize(&reason, MESSAGE_CHARS);
            if attempt == ATTEMPTS {
                warn!(%lease, "cannot hand the snapshots of the suspended lease over to worker {}: {reason}", keeper.name);
            } else {
                debug!(%lease, "cannot hand over to worker {}: {reason}", keeper.name);
                sleep(RETRY_DELAY).await;
            }
        }
        self.finish_handover(part, number, HandoverState::Failed);
    }

    pub(super) fn finish_handover(&self, part: PartId, number: u64, state: HandoverState) {
        lock(&self.handovers).finish(part, number, state);
        self.reports.notify_one();
    }

    /// Sends a keeper the snapshots of a part that it lacks, and waits until it has stored them.
    async fn send_all(
        &self,
        part: PartId,
        keeper: &Keeper,
        snapshots: &[KeptSnapshot],
    ) -> Result<(), String> {
        let connecting = connect(self.settings.identity.clone(), part, keeper);
        let connected = timeout(CONNECT_DEADLINE, connecting).await;
        let (mut link, kept) = connected.map_err(|_| "it did not answer")??;
        let mut kept = kept;
        for snapshot in snapshots {
            let id = snapshot.id();
            if kept.contains(&id) {
                continue;
            }
            // The keeper has it with the one that it does not drop for this one, if it has that.
            let shares_base = |it: &SnapshotId| {
                it.session_id == id.session_id
                    && it.base_id == id.base_id
                    && it.mark >= snapshot.info.committed
            };
            let has_base = kept.iter().any(shares_base);
            for body in frames(snapshot, has_base) {
                send(&mut link, body.map_err(|e| e.to_string())?).await?;
            }
            let reply = timeout(STORE_DEADLINE, link.receiver.recv()).await;
            let reply = reply.map_err(|_| format!("it stored nothing for {STORE_DEADLINE:?}"))?;
            let reply = stored(reply)?;
            if reply.id != Some(snapshot.id()) {
                return Err("it replied to another snapshot".into());
            }
            if !reply.error.is_empty() {
                return Err(reply.error);
            }
            kept.push(id);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_latest_request_for_a_part_counts() {
        let lease = LeaseId(7);
        let [part, other] = [0, 1].map(|index| PartId { lease, index });
        let mut handovers = Handovers::default();
        let ended = |handovers: &Handovers| -> Vec<(u64, u64, bool)> {
            let ended = handovers.ended();
            ended
                .map(|kept| (kept.keeper_id, kept.handover, kept.failed))
                .collect()
        };
        handovers.begin(part, 1, WorkerId(1));
        handovers.begin(part, 2, WorkerId(2));
        assert!(!handovers.is_latest(part, 1) && handovers.is_latest(part, 2));
        handovers.finish(part, 1, HandoverState::Done);
        assert!(ended(&handovers).is_empty() && handovers.has_pending());
        handovers.finish(part, 2, HandoverState::Failed);
        assert_eq!(ended(&handovers), [(2, 2, true)]);
        assert!(handovers.has_pending());
        // The scheduler requests the same again, as the keeper may have dropped them meanwhile.
        handovers.begin(part, 3, WorkerId(2));
        assert!(ended(&handovers).is_empty());
        handovers.finish(part, 2, HandoverState::Done);
        assert!(ended(&handovers).is_empty());
        handovers.finish(part, 3, HandoverState::Done);
        handovers.begin(other, 4, WorkerId(3));
        assert_eq!(ended(&handovers), [(2, 3, false)]);
        handovers.end_part(other);
        assert!(!handovers.has_pending());
        handovers.end(lease);
        assert!(ended(&handovers).is_empty());
    }
}
