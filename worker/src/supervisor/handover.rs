//! Hands the snapshots of suspended leases over to other workers, as the scheduler requests: when this
//! worker drains, or when such a lease can go on only where its snapshots are not.
//!
//! The scheduler names a keeper for such a lease, as it does for leases that run. When the keeper has
//! all snapshots, this worker reports that; it reports as well if it gives up. If it drains, the scheduler
//! then has it drop its own.

use std::{collections::BTreeMap, sync::Arc};

use tensord_proto::{
    ids::{LeaseId, PartId},
    text::{MESSAGE_CHARS, sanitize},
    v1::KeptLease,
};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::{
    Job, Supervisor,
    keeper_link::{
        Assignment, CONNECT_DEADLINE, Keeper, RETRY_DELAY,
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
    /// Its number is different for each request of the scheduler.
    assignment: Assignment,
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
    /// Begins to hand a part over to a keeper, instead of what was requested before.
    fn begin(&mut self, part: PartId, assignment: Assignment) {
        let state = HandoverState::Pending;
        self.0.insert(part, Handover { assignment, state });
    }

    /// Returns whether a request is the latest one for its part.
    pub(super) fn is_latest(&self, part: PartId, assignment: Assignment) -> bool {
        let latest = self.0.get(&part);
        latest.is_some_and(|handover| handover.assignment == assignment)
    }

    /// Records what has become of a request, if it is the latest one for its part.
    fn finish(&mut self, part: PartId, assignment: Assignment, state: HandoverState) {
        let latest = self.0.get_mut(&part);
        if let Some(handover) = latest.filter(|handover| handover.assignment == assignment) {
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
            keeper_id: handover.assignment.keeper.0,
            part: part.index,
            handover: handover.assignment.number,
            failed: handover.state == HandoverState::Failed,
            missing: handover.state == HandoverState::Missing,
            ..KeptLease::default()
        })
    }
}

impl Supervisor {
    /// Begins to hand the snapshots of a part of a suspended lease over to `keeper`.
    pub(super) fn begin_handover(&self, part: PartId, keeper: Keeper) {
        lock(&self.handovers).begin(part, keeper.assignment);
        match lock(&self.kept_for_others).holds(part) {
            true => self.queue(Job::HandOver(part, Box::new(keeper))),
            false => self.finish_handover(part, keeper.assignment, HandoverState::Missing),
        }
    }

    /// Hands the snapshots of a part of a suspended lease over to `keeper`, until that has them, several
    /// attempts have failed, or the scheduler has requested something else.
    pub(super) async fn hand_over(self: Arc<Self>, part: PartId, keeper: Keeper) {
        let (lease, assignment) = (part.lease, keeper.assignment);
        for attempt in 1..=ATTEMPTS {
            if !lock(&self.handovers).is_latest(part, assignment) {
                return;
            }
            let snapshots = lock(&self.kept_for_others).snapshots_of(part);
            if snapshots.is_empty() {
                return self.finish_handover(part, assignment, HandoverState::Missing);
            }
            let Err(reason) = self.send_all(part, &keeper, &snapshots).await else {
                info!(%lease, "worker {} holds the snapshots of the suspended lease, too", keeper.name);
                return self.finish_handover(part, assignment, HandoverState::Done);
            };
            let reason = sanitize(&reason, MESSAGE_CHARS);
            if attempt == ATTEMPTS {
                warn!(%lease, "cannot hand the snapshots of the suspended lease over to worker {}: {reason}", keeper.name);
            } else {
                debug!(%lease, "cannot hand over to worker {}: {reason}", keeper.name);
                sleep(RETRY_DELAY).await;
            }
        }
        self.finish_handover(part, assignment, HandoverState::Failed);
    }

    pub(super) fn finish_handover(
        &self,
        part: PartId,
        assignment: Assignment,
        state: HandoverState,
    ) {
        lock(&self.handovers).finish(part, assignment, state);
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
        let (mut link, kept) =
            connected.map_err(|_| format!("it did not answer within {CONNECT_DEADLINE:?}"))??;
        let mut kept = kept;
        for snapshot in snapshots {
            let id = snapshot.id();
            if kept.contains(&id) {
                continue;
            }
            for body in frames(snapshot, snapshot.has_base_among(&kept)) {
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
    use tensord_proto::ids::WorkerId;

    use super::*;

    #[test]
    fn only_the_latest_request_for_a_part_counts() {
        let lease = LeaseId(7);
        let [part, other] = [0, 1].map(|index| PartId { lease, index });
        let assignment = |number, keeper| Assignment {
            keeper: WorkerId(keeper),
            number,
        };
        let mut handovers = Handovers::default();
        let ended = |handovers: &Handovers| -> Vec<(u64, u64, bool)> {
            let ended = handovers.ended();
            ended
                .map(|kept| (kept.keeper_id, kept.handover, kept.failed))
                .collect()
        };
        handovers.begin(part, assignment(1, 1));
        handovers.begin(part, assignment(2, 2));
        assert!(
            !handovers.is_latest(part, assignment(1, 1))
                && handovers.is_latest(part, assignment(2, 2))
        );
        handovers.finish(part, assignment(1, 1), HandoverState::Done);
        assert!(ended(&handovers).is_empty() && handovers.has_pending());
        handovers.finish(part, assignment(2, 2), HandoverState::Failed);
        assert_eq!(ended(&handovers), [(2, 2, true)]);
        assert!(handovers.has_pending());
        // The scheduler requests the same again, as the keeper may have dropped them meanwhile.
        handovers.begin(part, assignment(3, 2));
        assert!(ended(&handovers).is_empty());
        handovers.finish(part, assignment(2, 2), HandoverState::Done);
        assert!(ended(&handovers).is_empty());
        handovers.finish(part, assignment(3, 2), HandoverState::Done);
        handovers.begin(other, assignment(4, 3));
        assert_eq!(ended(&handovers), [(2, 3, false)]);
        handovers.end_part(other);
        assert!(!handovers.has_pending());
        handovers.end(lease);
        assert!(ended(&handovers).is_empty());
    }
}
