//! The cohorts of this worker's sessions.

use std::{
    collections::BTreeSet,
    sync::{Arc, Weak},
    time::Instant,
};

use bytes::Bytes;
use dashmap::DashMap;
use tensord_proto::{
    ids::{LeaseId, WorkerId},
    v1::{LeaseClaims, Open},
};

use crate::collective::{Cohort, CollectiveSettings, LeaseMembers};

/// The cohorts of this worker's sessions, by lease and by the number that the client gave the
/// cohort.
pub(super) struct Cohorts {
    worker_id: WorkerId,
    settings: CollectiveSettings,
    /// Kept alive by their sessions.
    cohorts: DashMap<(LeaseId, u64), Weak<Cohort>>,
}

impl Cohorts {
    pub(super) fn new(worker_id: WorkerId, settings: CollectiveSettings) -> Self {
        Self {
            worker_id,
            settings,
            cohorts: DashMap::new(),
        }
    }

    /// Returns the cohort `id` of `lease`, if it has a session on this worker.
    pub(super) fn get(&self, lease: LeaseId, id: u64) -> Option<Arc<Cohort>> {
        let cohort = self.cohorts.get(&(lease, id))?;
        cohort.upgrade()
    }

    /// Returns the cohort for a session of `lease`, which is created on first use.
    pub(super) fn get_or_create(
        &self,
        lease: LeaseId,
        open: &Open,
        claims: LeaseClaims,
    ) -> Arc<Cohort> {
        let mut known = self.cohorts.entry((lease, open.cohort)).or_default();
        if let Some(cohort) = known.upgrade() {
            return cohort;
        }
        let lease_members = LeaseMembers::new(claims.shares, self.worker_id);
        // Copied, as a slice would keep the whole frame alive.
        let token = Bytes::copy_from_slice(&open.lease_token);
        let cohort = Cohort::new(
            open.cohort,
            lease,
            lease_members,
            token,
            self.settings.clone(),
        );
        *known = Arc::downgrade(&cohort);
        cohort
    }

    /// Has no cohort send anything to other workers any more.
    pub(super) fn silence(&self) {
        let cohorts = self.cohorts.iter().filter_map(|cohort| cohort.upgrade());
        cohorts.for_each(|cohort| cohort.silence());
    }

    /// Returns the workers that cohorts have dialled in vain for a while at `now`.
    pub(super) fn missing_peers(&self, now: Instant) -> BTreeSet<WorkerId> {
        let cohorts = self.cohorts.iter().filter_map(|cohort| cohort.upgrade());
        let cohorts: Vec<_> = cohorts.collect();
        cohorts
            .iter()
            .flat_map(|cohort| cohort.missing_peers(now))
            .collect()
    }

    /// Forgets cohorts without sessions, and fails collectives and transfers that have
    /// exceeded their deadline.
    pub(super) fn tick(&self, now: Instant) {
        self.cohorts.retain(|_, cohort| cohort.strong_count() > 0);
        let cohorts: Vec<_> = self.cohorts.iter().filter_map(|c| c.upgrade()).collect();
        cohorts.iter().for_each(|cohort| cohort.tick(now));
    }
}
