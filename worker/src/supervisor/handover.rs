//! Hands the snapshots of suspended leases over to other workers, as the scheduler requests when this
//! worker drains.
//!
//! The scheduler names a keeper for such a lease, as it does for leases that run. When the keeper has
//! all snapshots, this worker reports that, and the scheduler has it drop its own.

use std::{collections::HashMap, sync::Arc};

use tensord_proto::{
    ids::{LeaseId, WorkerId},
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

/// The suspended leases whose snapshots are handed over.
#[derive(Debug, Default)]
pub(super) struct Handovers {
    leases: HashMap<LeaseId, Handover>,
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
    /// Begins to hand a lease over to `keeper`, instead of what was requested before. Returns the
    /// number of the request.
    fn begin(&mut self, lease: LeaseId, keeper: WorkerId) -> u64 {
        self.requests += 1;
        let handover = Handover {
            number: self.requests,
            keeper,
            is_done: false,
        };
        self.leases.insert(lease, handover);
        self.requests
    }

    /// Returns whether a request is the latest one for its lease.
    fn is_latest(&self, lease: LeaseId, number: u64) -> bool {
        let latest = self.leases.get(&lease);
        latest.is_some_and(|handover| handover.number == number)
    }

    /// Records that the keeper of a request has all snapshots.
    fn done(&mut self, lease: LeaseId, number: u64) {
        if let Some(handover) = self.leases.get_mut(&lease) {
            handover.is_done |= handover.number == number;
        }
    }

    /// Ends the handover of a lease.
    pub(super) fn end(&mut self, lease: LeaseId) {
        self.leases.remove(&lease);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Returns the leases of which a keeper has all snapshots.
    pub(super) fn done_leases(&self) -> impl Iterator<Item = KeptLease> {
        let done = self.leases.iter().filter(|(_, handover)| handover.is_done);
        done.map(|(lease, handover)| KeptLease {
            lease_id: lease.0,
            keeper_id: handover.keeper.0,
            without_room: false,
        })
    }
}

impl Supervisor {
    /// Begins to hand the snapshots of a suspended lease over to `keeper`, if they are held here.
    pub(super) fn begin_handover(&self, lease: LeaseId, keeper: Keeper) {
        let is_held = lock(&self.kept_for_others).held().contains(&lease);
        if is_held {
            let number = lock(&self.handovers).begin(lease, keeper.id);
            self.queue(Job::HandOver(lease, number, Box::new(keeper)));
        }
    }

    /// Hands the snapshots of a suspended lease over to `keeper`, until that has them or the scheduler
    /// has requested something else.
    pub(super) async fn hand_over(self: Arc<Self>, lease: LeaseId, number: u64, keeper: Keeper) {
        let mut has_warned = false;
        while lock(&self.handovers).is_latest(lease, number) {
            let snapshots = lock(&self.kept_for_others).snapshots_of(lease);
            let Err(reason) = self.send_all(lease, &keeper, &snapshots).await else {
                info!(%lease, "worker {} holds the snapshots of the suspended lease, too", keeper.name);
                lock(&self.handovers).done(lease, number);
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

    /// Sends a keeper the snapshots of a lease that it lacks, and waits until it has stored them.
    async fn send_all(
        &self,
        lease: LeaseId,
        keeper: &Keeper,
        snapshots: &[KeptSnapshot],
    ) -> Result<(), String> {
        let connecting = connect(self.settings.identity.clone(), lease, keeper);
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
    fn only_the_latest_request_for_a_lease_counts() {
        let lease = LeaseId(7);
        let mut handovers = Handovers::default();
        let done = |handovers: &Handovers| -> Vec<u64> {
            handovers.done_leases().map(|kept| kept.keeper_id).collect()
        };
        let first = handovers.begin(lease, WorkerId(1));
        let second = handovers.begin(lease, WorkerId(2));
        assert!(!handovers.is_latest(lease, first) && handovers.is_latest(lease, second));
        handovers.done(lease, first);
        assert!(done(&handovers).is_empty());
        handovers.done(lease, second);
        assert_eq!(done(&handovers), [2]);
        // The scheduler requests the same again, as the keeper may have dropped them meanwhile.
        let third = handovers.begin(lease, WorkerId(2));
        assert!(done(&handovers).is_empty());
        handovers.done(lease, second);
        assert!(done(&handovers).is_empty());
        handovers.done(lease, third);
        assert_eq!(done(&handovers), [2]);
        handovers.end(lease);
        assert!(handovers.is_empty() && done(&handovers).is_empty());
    }
}
