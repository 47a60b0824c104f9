//! Hands the snapshots of suspended leases over to other workers, as the scheduler requests when this
//! worker drains.
//!
//! The scheduler names a keeper for such a lease, as it does for leases that run. When the keeper has
//! all snapshots, this worker reports that, and the scheduler has it drop its own.

use std::{collections::BTreeMap, sync::Arc};

use tensord_proto::{
    ids::{LeaseId, PartId, WorkerId},
    text::{MESSAGE_CHARS, sanitize},
    v1::KeptLease,
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

/// The parts of suspended leases whose snapshots are handed over.
#[derive(Debug, Default)]
pub(super) struct Handovers {
    parts: BTreeMap<PartId, Handover>,
    /// Number of requests so far.
    requests: u64,
}

#[derive(Debug)]
struct Handover {
    /// Different for each request of the scheduler: the keeper may have dropped what it got before.
    number: u64,
    keeper: WorkerId,
    /// Whether the keeper has all snapshots.
    is_done: bool,
}

impl Handovers {
    /// Begins to hand a part over to `keeper`, instead of what was requested before. Returns the number
    /// of the request.
    fn begin(&mut self, part: PartId, keeper: WorkerId) -> u64 {
        self.requests += 1;
        let handover = Handover {
            number: self.requests,
            keeper,
            is_done: false,
        };
        self.parts.insert(part, handover);
        self.requests
    }

    /// Returns whether a request is the latest one for its part.
    fn is_latest(&self, part: PartId, number: u64) -> bool {
        let latest = self.parts.get(&part);
        latest.is_some_and(|handover| handover.number == number)
    }

    /// Records that the keeper of a request has all snapshots.
    fn done(&mut self, part: PartId, number: u64) {
        if let Some(handover) = self.parts.get_mut(&part) {
            handover.is_done |= handover.number == number;
        }
    }

    /// Ends the handover of a part.
    pub(super) fn end_part(&mut self, part: PartId) {
        self.parts.remove(&part);
    }

    /// Ends the handovers of all parts of a lease.
    pub(super) fn end(&mut self, lease: LeaseId) {
        let all = self.parts.extract_if(PartId::range_of(lease), |_, _| true);
        all.for_each(drop);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the parts of which a keeper has all snapshots.
    pub(super) fn done_leases(&self) -> impl Iterator<Item = KeptLease> {
        let done = self.parts.iter().filter(|(_, handover)| handover.is_done);
        done.map(|(part, handover)| KeptLease {
            lease_id: part.lease.0,
            keeper_id: handover.keeper.0,
            without_room: false,
            part: part.index,
        })
    }
}

impl Supervisor {
    /// Begins to hand the snapshots of a part of a suspended lease over to `keeper`, if they are held
    /// here.
    pub(super) fn begin_handover(&self, part: PartId, keeper: Keeper) {
        let is_held = lock(&self.kept_for_others).held().contains(&part.lease);
        if is_held {
            let number = lock(&self.handovers).begin(part, keeper.id);
            self.queue(Job::HandOver(part, number, Box::new(keeper)));
        }
    }

    /// Hands the snapshots of a part of a suspended lease over to `keeper`, until that has them or the
    /// scheduler has requested something else.
    pub(super) async fn hand_over(self: Arc<Self>, part: PartId, number: u64, keeper: Keeper) {
        let lease = part.lease;
        let mut has_warned = false;
        while lock(&self.handovers).is_latest(part, number) {
            let snapshots = lock(&self.kept_for_others).snapshots_of(part);
            let Err(reason) = self.send_all(part, &keeper, &snapshots).await else {
                info!(%lease, "worker {} holds the snapshots of the suspended lease, too", keeper.name);
                lock(&self.handovers).done(part, number);
                return self.reports.notify_one();
            };
            let reason = sanitize(&reason, MESSAGE_CHARS);
            if !std::mem::replace(&mut has_warned, true) {
                warn!(%lease, "cannot hand the snapshots of the suspended lease over to worker {}: {reason}", keeper.name);
            } else {
                debug!(%lease, "cannot hand over to worker {}: {reason}", keeper.name);
            }
            sleep(RETRY_DELAY).await;
        }
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
        for snapshot in snapshots {
            if kept.contains(&snapshot.id()) {
                continue;
            }
            for body in frames(snapshot) {
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
        let done = |handovers: &Handovers| -> Vec<u64> {
            handovers.done_leases().map(|kept| kept.keeper_id).collect()
        };
        let first = handovers.begin(part, WorkerId(1));
        let second = handovers.begin(part, WorkerId(2));
        assert!(!handovers.is_latest(part, first) && handovers.is_latest(part, second));
        handovers.done(part, first);
        assert!(done(&handovers).is_empty());
        handovers.done(part, second);
        assert_eq!(done(&handovers), [2]);
        // The scheduler requests the same again, as the keeper may have dropped them meanwhile.
        let third = handovers.begin(part, WorkerId(2));
        assert!(done(&handovers).is_empty());
        handovers.done(part, second);
        assert!(done(&handovers).is_empty());
        handovers.done(part, third);
        assert_eq!(done(&handovers), [2]);
        handovers.end_part(other);
        assert_eq!(done(&handovers), [2]);
        handovers.end(lease);
        assert!(handovers.is_empty() && done(&handovers).is_empty());
    }
}
