//! Events from workers: join, beat, release, outages, leave, and the end of a stream.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::{LeaseId, WorkerId};

use super::Engine;
use crate::event::{GrantedDevice, HeldDevice, Registration, StreamId, WorkerEvent};
use crate::lease::Lease;
use crate::leases::Reporter;
use crate::reason::EndReason;

impl Engine {
    pub(super) fn worker_event(&mut self, worker: WorkerId, stream: StreamId, event: WorkerEvent) {
        match event {
            WorkerEvent::Join {
                registration,
                held,
                ended,
                suspended,
                out_of_service,
                leaving,
            } => {
                self.join(worker, stream, registration);
                self.pool.record_ended(worker, &ended);
                let (over, held): (Vec<_>, Vec<_>) = held.into_iter().partition(|held| held.ended);
                self.resume_ended(worker, over);
                let running: BTreeSet<_> = held.iter().map(|held| held.lease).collect();
                self.resume_held(worker, held);
                self.resume_claimed(worker);
                self.renew_stored(worker);
                self.settle_holder(worker, &suspended, &running);
                self.pool.set_out_of_service(worker, out_of_service);
                if leaving {
                    self.pool.leave(worker);
                }
            }
            // An event from a stream that was replaced.
            _ if !self.pool.is_current_stream(worker, stream) => {}
            WorkerEvent::Heartbeat => self.pool.beat(worker, self.now),
            WorkerEvent::SnapshotsKept {
                at_keepers,
                refused,
                handed_over,
                here,
                in_store,
            } => {
                self.set_kept(worker, &at_keepers, &here);
                self.avoid_refusing(worker, &refused);
                self.on_handed_over(worker, &handed_over);
                self.set_stored(worker, &here, &in_store);
            }
            WorkerEvent::Idle { leases } => self.on_idle(worker, &leases),
            WorkerEvent::PeersMissing { missing } => self.on_peers_missing(worker, missing),
            WorkerEvent::StoredLeases { leases } => self.drop_unknown_stored(worker, leases),
            WorkerEvent::Interrupted { leases } => self.on_interrupted(worker, leases),
            WorkerEvent::Released { lease, busy } => {
                self.pool.release(worker, lease, &busy);
                self.leases.touch(lease);
            }
            WorkerEvent::OutOfService { devices } => {
                self.pool.set_out_of_service(worker, devices);
            }
            WorkerEvent::Leaving => self.pool.leave(worker),
            WorkerEvent::Left => self.remove_lost_worker(worker),
            WorkerEvent::Disconnected => self.pool.disconnect(worker),
        }
    }

    fn join(&mut self, worker: WorkerId, stream: StreamId, registration: Registration) {
        let known = self.pool.get(worker);
        if known.is_some_and(|known| known.is_registered_as(&registration)) {
            self.pool.reconnect(worker, stream, self.now);
        } else {
            self.remove_lost_worker(worker);
            self.pool.insert(worker, registration, stream, self.now);
        }
        self.forget_announced(worker);
        // What it has reported may have changed while it had no stream.
        self.idle.forget(worker);
    }

    /// Records the ended leases that the worker reports as not released, and sends
    /// `EndLease` again for every lease that it is not known to have released: the previous
    /// reply may have been lost with the old stream.
    fn resume_ended(&mut self, worker: WorkerId, ended: Vec<HeldDevice>) {
        let ended = ended.iter();
        let ended = ended.map(|held| (held.lease, held.granted_at(worker)));
        self.pool.record_ending(worker, ended);
        for (lease, grants) in self.pool.ending(worker) {
            self.send_end(worker, lease, grants);
        }
    }

    /// Removes a worker, if it is known, and ends the leases that use it.
    pub(super) fn remove_lost_worker(&mut self, id: WorkerId) {
        let Some(worker) = self.pool.remove(id) else {
            return;
        };
        self.idle.forget(id);
        let name = || worker.name().to_owned();
        for lease in worker.leases() {
            let reason = match worker.is_leaving() {
                true => EndReason::WorkerLeft {
                    worker: id,
                    name: name(),
                },
                false => EndReason::WorkerLost {
                    worker: id,
                    name: name(),
                },
            };
            if !self.outlives_worker(lease, &reason) {
                let keeper_gone = self.leases.get(lease).and_then(|it| it.keeper_gone.clone());
                let reason = match keeper_gone {
                    Some(gone) => EndReason::nothing_left(reason, gone),
                    None => reason,
                };
                self.end_lease(lease, Some(reason));
            }
        }
        let (worker, name) = (id, name());
        let gone = EndReason::SnapshotsLost { worker, name };
        self.on_keeper_lost(id, &gone);
        self.on_holder_lost(id, &gone);
    }

    /// Resumes, adopts or ends each lease that a worker reports as still running.
    fn resume_held(&mut self, worker: WorkerId, held: Vec<HeldDevice>) {
        let granted = held.iter().map(|held| held.granted_at(worker));
        self.pool.record_grants(worker, granted);
        let mut held_by_lease = BTreeMap::<LeaseId, Vec<GrantedDevice>>::new();
        for held in held {
            let lease_devices = held_by_lease.entry(held.lease).or_default();
            lease_devices.push(held.granted_at(worker));
        }
        // If a worker runs two leases on one device, or on one lane of it, the one that the engine knows stays.
        let (known, unknown): (Vec<_>, Vec<_>) = held_by_lease
            .into_iter()
            .partition(|(id, _)| self.leases.get(*id).is_some());
        for (lease, lease_devices) in known.into_iter().chain(unknown) {
            self.resume(worker, lease, &lease_devices);
        }
    }

    fn resume(&mut self, worker: WorkerId, id: LeaseId, lease_devices: &[GrantedDevice]) {
        let has_all = |lease: &Lease| {
            let mut devices = lease_devices.iter().map(|granted| granted.device_ref);
            devices.all(|device_ref| {
                let device = self.pool.device(device_ref);
                lease.lease_devices.contains_key(&device_ref) && lease.may_resume_at(device)
            })
        };
        let mut granted = lease_devices.iter();
        // Otherwise the report is false, and no reason to believe that the lease exists, or to end it elsewhere.
        let may_be_valid = granted.all(|granted| self.pool.may_be_valid(*granted));
        match self.leases.get(id) {
            // No client has claimed the lease yet, so these may be further devices of it.
            Some(lease) if lease.owner.is_none() && may_be_valid => {
                if let Some(mut lease) = self.leases.get_mut(id) {
                    lease.add(lease_devices);
                }
                self.reserve(id);
            }
            Some(lease) if lease.owner.is_some() && has_all(lease) => self.reserve(id),
            None if may_be_valid => self.adopt_reported(worker, id, lease_devices),
            // The lease ended, or has no right to these devices.
            Some(_) | None => self.end_reported(worker, id, lease_devices),
        }
    }

    /// Adopts a lease that the engine does not know, and that a worker reports as running on these devices, or ends
    /// it there.
    fn adopt_reported(&mut self, worker: WorkerId, id: LeaseId, lease_devices: &[GrantedDevice]) {
        let joined = self.pool.get(worker);
        let reporter = joined.map(|it| Reporter::Worker(it.endpoint().certificate_sha256));
        let reporter = reporter.filter(|it| self.may_adopt(id, lease_devices, it));
        let Some(reporter) = reporter else {
            return self.end_reported(worker, id, lease_devices);
        };
        let expires_at = Some(self.now + self.options.lease_expiry);
        let mut lease = Lease {
            expires_at,
            ..Lease::default()
        };
        lease.add(lease_devices);
        self.adopt(id, lease, reporter);
    }

    /// Has a worker end a lease on devices on which it reports it as running, without a right to them.
    fn end_reported(&mut self, worker: WorkerId, id: LeaseId, lease_devices: &[GrantedDevice]) {
        let ending = lease_devices.iter().map(|granted| (id, *granted));
        self.pool.record_ending(worker, ending);
        let grants = lease_devices.iter().map(GrantedDevice::device_grant);
        self.send_end(worker, id, grants.collect());
    }

    /// Takes the worker's devices for leases that clients claimed before the worker joined.
    fn resume_claimed(&mut self, worker: WorkerId) {
        let is_claimed = |id: &LeaseId| {
            let lease = self.leases.get(*id);
            lease.is_some_and(|it| it.rejoin_by.is_some() && it.workers().contains(&worker))
        };
        let named = self.leases.index().of_worker(worker);
        for id in named.filter(is_claimed).collect::<Vec<_>>() {
            self.reserve(id);
        }
    }
}
