//! What administrators see of leases, and how they move, suspend, resume and end them.

use tensord_proto::{
    ids::LeaseId,
    v1::{
        DrainedWorker, EndedLease, LeaseInfo, LeaseList, LeasePlace, PrioritySet, ResumedLease,
        SuspendedLease,
    },
};
use tensord_scheduler::{Event, LeaseSnapshot, LeasedDevice, Suspender, SuspensionSnapshot};

use super::Driver;

impl Driver {
    /// Returns all leases, in the order of their ids.
    pub(super) fn list_leases(&self) -> LeaseList {
        let ids = self.engine.lease_ids();
        let leases = ids.filter_map(|id| self.lease_info(id));
        LeaseList {
            leases: leases.collect(),
        }
    }

    /// Drains the worker of this name, or no longer. Returns `None` if it is not in the pool.
    pub(super) fn drain_worker(&mut self, name: &str, is_drained: bool) -> Option<DrainedWorker> {
        let worker = self.engine.worker_named(name)?;
        let leases = self.engine.leases_at(worker);
        self.apply(Event::Drain { worker, is_drained });
        let leases = leases.into_iter().filter_map(|id| self.lease_info(id));
        Some(DrainedWorker {
            leases: leases.collect(),
        })
    }

    /// Moves a lease to the worker that keeps its snapshots, and returns that one's name.
    ///
    /// # Errors
    ///
    /// Why the lease cannot move.
    pub(super) fn move_lease(&mut self, lease: LeaseId) -> Result<String, String> {
        let worker = self.engine.check_move(lease);
        let worker = worker.map_err(|reason| format!("lease {lease} cannot move: {reason}"))?;
        self.apply(Event::MoveLease { lease });
        Ok(worker)
    }

    /// Ends a lease, or has a request refused that waits.
    ///
    /// # Errors
    ///
    /// If there is neither.
    pub(super) fn end_lease(&mut self, lease: LeaseId) -> Result<EndedLease, String> {
        let is_lease = self.engine.lease(lease).is_some();
        if !is_lease && self.engine.waiting(lease).is_none() {
            return Err(format!(
                "the pool has no lease or request {lease}; `tensord lease list` and `tensord queue` show all"
            ));
        }
        self.apply(Event::EndLease { lease });
        Ok(EndedLease {
            was_request: !is_lease,
        })
    }

    /// Changes the priority of a request that waits.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub(super) fn set_priority(
        &mut self,
        lease: LeaseId,
        priority: i32,
    ) -> Result<PrioritySet, String> {
        let is_lease = self.engine.lease(lease).is_some();
        if is_lease || self.engine.waiting(lease).is_none() {
            return Err(format!(
                "no request {lease} waits for devices; `tensord queue` shows those that do"
            ));
        }
        self.apply(Event::SetPriority { lease, priority });
        let mut waiting = (1..).zip(self.engine.waiting_ids());
        let position = waiting.find(|(_, id)| *id == lease);
        Ok(PrioritySet {
            position: position.map_or(0, |(position, _)| position),
        })
    }

    /// Suspends a lease.
    ///
    /// # Errors
    ///
    /// Why the lease cannot be suspended.
    pub(super) fn suspend_lease(
        &mut self,
        lease: LeaseId,
        by: Suspender,
    ) -> Result<SuspendedLease, String> {
        let checked = self.engine.check_suspend(lease, by);
        checked.map_err(|reason| format!("lease {lease} cannot be suspended: {reason}"))?;
        self.apply(Event::SuspendLease { lease, by });
        let workers = self.suspension(lease);
        let workers = workers.map_or_else(Vec::new, |suspension| suspension.holders);
        Ok(SuspendedLease { workers })
    }

    /// Lets a suspended lease go on.
    ///
    /// # Errors
    ///
    /// Why the lease cannot be resumed.
    pub(super) fn resume_lease(
        &mut self,
        lease: LeaseId,
        by: Suspender,
    ) -> Result<ResumedLease, String> {
        let checked = self.engine.check_resume(lease, by);
        checked.map_err(|reason| format!("lease {lease} cannot be resumed: {reason}"))?;
        self.apply(Event::ResumeLease { lease, by });
        if let Some(suspension) = self.suspension(lease) {
            return Ok(ResumedLease {
                workers: Vec::new(),
                waits_for: suspension.holders,
                needs_all: suspension.needs_all,
            });
        }
        let devices = self.engine.lease(lease).and_then(|lease| lease.devices);
        let places = places(&devices.unwrap_or_default());
        let mut workers: Vec<_> = places.into_iter().map(|place| place.worker).collect();
        workers.dedup();
        Ok(ResumedLease {
            workers,
            ..ResumedLease::default()
        })
    }

    fn suspension(&self, lease: LeaseId) -> Option<SuspensionSnapshot> {
        self.engine.lease(lease)?.suspension
    }

    pub(super) fn lease_info(&self, id: LeaseId) -> Option<LeaseInfo> {
        let lease = self.engine.lease(id)?;
        let LeaseSnapshot {
            owner,
            devices,
            epoch,
            waits,
            suspension,
            move_to,
            is_stored,
            ..
        } = lease;
        let by = suspension.as_ref().and_then(|it| it.by);
        let (suspended_at, needs_all, resumed) = match suspension {
            Some(it) => (it.holders, it.needs_all, it.is_resumed),
            None => (Vec::new(), false, false),
        };
        let (tenant, token) = self.holder_names(owner);
        let (move_to, cannot_move) = match move_to {
            Ok(worker) => (worker, String::new()),
            Err(reason) => (String::new(), reason.to_string()),
        };
        Some(LeaseInfo {
            lease_id: id.0,
            client_id: owner.map_or(0, |client| client.0),
            tenant,
            token,
            places: places(&devices.unwrap_or_default()),
            moves: epoch,
            waits: waits.map_or_else(String::new, |reason| reason.to_string()),
            move_to,
            cannot_move,
            suspended_at,
            resumed,
            needs_all,
            in_store: is_stored,
            idle: by == Some(Suspender::Idleness),
        })
    }
}

/// Groups devices, of which those of one worker are next to each other, by worker and kind.
fn places(devices: &[LeasedDevice]) -> Vec<LeasePlace> {
    let is_same = |a: &LeasedDevice, b: &LeasedDevice| {
        a.device_ref.worker == b.device_ref.worker && a.device.kind == b.device.kind
    };
    let place = |devices: &[LeasedDevice]| LeasePlace {
        worker: devices[0].worker.name.clone(),
        kind: devices[0].device.kind.clone(),
        device_indices: devices.iter().map(|it| it.device_ref.index).collect(),
        share_permille: devices[0].share.map_or(0, |share| share.permille),
        share_memory_bytes: devices[0].share.map_or(0, |share| share.memory_bytes),
    };
    devices.chunk_by(is_same).map(place).collect()
}
