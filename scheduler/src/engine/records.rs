//! Durable leases that outlive the scheduler: what changes in their records, and how they are taken
//! over from these after a restart.
//!
//! A record can be older than what its client and its workers know, if it could not be written in time.
//! If the client's token has a later epoch, the token is right.

use std::collections::BTreeSet;
use std::time::Duration;

use tensord_proto::ids::{ClientId, LeaseId, WorkerId};

use super::Engine;
use crate::event::Claim;
use crate::lease::{Lease, Standing};
use crate::reason::EndReason;
use crate::record::{LeaseRecord, RecordChange};
use crate::tenants::TenantName;

impl Engine {
    /// Takes over the leases that an earlier scheduler of the pool has recorded. Must be called before
    /// the first event. Their clients and workers have as long to come back as those of other leases
    /// from before a restart.
    pub fn restore(&mut self, records: impl IntoIterator<Item = (LeaseId, LeaseRecord)>) {
        for (id, record) in records {
            self.leases.set_recorded(id, record.clone());
            let mut lease = record.into_lease(self.now);
            lease.expires_at = Some(self.now + self.options.lease_expiry);
            lease.rejoin_by = match lease.standing {
                Standing::Lost(_) | Standing::Resuming { cause: Some(_), .. } => {
                    Some(self.now + lease.recovery_timeout(&self.options))
                }
                Standing::Running => Some(self.now + self.options.lease_expiry),
                Standing::Suspended { .. } | Standing::Resuming { cause: None, .. } => None,
            };
            self.leases.insert(id, lease);
            self.awaits_recorded_workers = true;
        }
    }

    /// Takes over the average share that each tenant had this long ago, as an earlier scheduler of the pool has
    /// recorded. Must be called before the first event.
    pub fn restore_past(
        &mut self,
        shares: impl IntoIterator<Item = (TenantName, f64)>,
        age: Duration,
    ) {
        for (tenant, share) in shares {
            self.past.restore(&tenant, share, age, self.now);
        }
    }

    /// Returns how the records of leases have changed since the last call.
    pub fn take_record_changes(&mut self) -> Vec<RecordChange> {
        self.leases.take_record_changes()
    }

    /// Gives up the keepers and holders of restored leases that have not joined by now.
    pub(super) fn give_up_recorded_workers(&mut self) {
        if !self.awaits_recorded_workers || self.now < self.leases.adopt_until() {
            return;
        }
        self.awaits_recorded_workers = false;
        let leases = self.leases.iter();
        let named = leases.flat_map(|(_, lease)| lease.keepers_and_holders());
        let missing = named.filter(|worker| !self.pool.contains(*worker));
        for worker in missing.collect::<BTreeSet<_>>() {
            let gone = EndReason::HolderMissing { worker };
            self.on_keeper_lost(worker, &gone);
            self.on_holder_lost(worker, &gone);
        }
    }

    /// Returns whether a worker may yet join that a restored lease names.
    pub(super) fn may_yet_join(&self, worker: WorkerId) -> bool {
        self.awaits_recorded_workers && !self.pool.contains(worker)
    }

    /// Has a lease go on elsewhere of which a worker has not joined after a restart. Returns `false` if
    /// it cannot.
    pub(super) fn outlives_missing_worker(&mut self, id: LeaseId) -> bool {
        let lease = self.leases.get(id);
        let running = lease.filter(|lease| lease.standing == Standing::Running);
        match running.and_then(|lease| self.missing_worker(lease)) {
            Some(missing) => self.outlives_worker(id, &missing),
            None => false,
        }
    }

    /// Returns the reason that a worker of a lease has not joined, if that is so.
    pub(super) fn missing_worker(&self, lease: &Lease) -> Option<EndReason> {
        let mut workers = lease.workers().into_iter();
        let worker = workers.find(|worker| !self.pool.contains(*worker))?;
        Some(EndReason::WorkerMissing { worker })
    }

    /// Gives a lease the devices that its client has by a later token than the recorded one: the lease
    /// moved, and the record was not written any more.
    pub(super) fn adopt_later_claim(&mut self, client: ClientId, claim: Claim) {
        let (id, now) = (claim.lease, self.now);
        let Some(mut lease) = self.leases.get_mut(id) else {
            return;
        };
        let named = lease.keepers_and_holders();
        let later = Lease::owned(client, &[], claim.durability, claim.epoch);
        let outdated = std::mem::replace(&mut *lease, later);
        lease.lease_devices = outdated.lease_devices;
        lease.recover_within = outdated.recover_within;
        (lease.running_since, lease.time_left) = (now, claim.time_left);
        (lease.is_spot, lease.may_end) = (claim.is_spot, claim.may_end);
        (lease.tenant, lease.charge) = (outdated.tenant, outdated.charge);
        (lease.granted_at, lease.origin) = (outdated.granted_at, outdated.origin);
        let unclaimed = lease.set_devices(&claim.lease_devices);
        let workers = lease.workers();
        drop(lease);
        self.end_grants(id, unclaimed);
        for worker in named.difference(&workers) {
            self.drop_snapshots(*worker, id);
        }
        self.reserve(id);
    }
}
