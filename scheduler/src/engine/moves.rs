//! The moves of durable leases to their keepers.
//!
//! While the worker of a durable lease is lost, the lease waits for a device of its keeper, or for
//! its worker to come back, until a deadline. It moves only while its client is attached, as nobody
//! else could open its sessions again.

use tensord_proto::ids::{ClientId, LeaseId};

use super::Engine;
use crate::command::Command;
use crate::event::GrantedDevice;
use crate::reason::EndReason;

impl Engine {
    /// Returns whether a lease goes on although its worker was lost, for `reason`. It then has
    /// until the recovery timeout to move to its keeper.
    pub(super) fn outlives_worker(&mut self, id: LeaseId, reason: &EndReason) -> bool {
        let EndReason::WorkerLost { worker, name } = reason else {
            return false;
        };
        let Some(lease) = self.leases.get(id) else {
            return false;
        };
        let keeper = lease.keeper.and_then(|keeper| self.pool.get(keeper));
        let Some(keeper) = keeper else {
            return false;
        };
        let lost = EndReason::NotReplaced {
            worker: *worker,
            name: name.clone(),
            keeper: keeper.name().to_owned(),
        };
        let rejoin_by = self.now + self.options.recovery_timeout;
        if let Some(lease) = self.leases.get_mut(id) {
            (lease.lost, lease.rejoin_by) = (Some(lost), Some(rejoin_by));
            (lease.is_keeper_announced, lease.is_loss_reported) = (false, false);
        }
        true
    }

    /// Moves a lease whose client cannot reach its worker, if the worker's stream is down, too, and
    /// its keeper has a free device. So a lease need not wait until the worker is considered lost.
    /// Neither sign alone is enough: a client may have lost its network, and a worker its way to
    /// the scheduler.
    pub(super) fn on_unreachable(&mut self, client: ClientId, id: LeaseId) {
        let lease = self.leases.get(id);
        let Some(lease) = lease.filter(|lease| lease.owner == Some(client)) else {
            return;
        };
        let Some(device_ref) = lease.only_device() else {
            return;
        };
        let is_down = !self.pool.is_connected(device_ref.worker);
        if is_down && lease.keeper.is_some() {
            self.try_move(id);
        }
    }

    /// Moves the leases whose worker was lost to their keepers, as far as these have devices.
    pub(super) fn move_lost_leases(&mut self) {
        let lost = self.leases.iter().filter(|(_, lease)| lease.lost.is_some());
        for id in lost.map(|(id, _)| id).collect::<Vec<_>>() {
            if !self.try_move(id) {
                self.report_interrupted(id);
            }
        }
    }

    /// Reports to the client of a lost lease that the lease waits, if the client does not know.
    fn report_interrupted(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.get_mut(id) else {
            return;
        };
        let attached = lease.owner.filter(|owner| self.clients.contains_key(owner));
        let unreported = lease.lost.clone().filter(|_| !lease.is_loss_reported);
        if let (Some(client), Some(reason)) = (attached, unreported) {
            lease.is_loss_reported = true;
            self.commands.push(Command::Interrupted {
                client,
                lease: id,
                reason,
            });
        }
    }

    /// Moves a lease to its keeper. Returns `false` if that has no free device, or the client of
    /// the lease is away.
    fn try_move(&mut self, id: LeaseId) -> bool {
        let Some(lease) = self.leases.get(id) else {
            return false;
        };
        let attached = lease.owner.filter(|owner| self.clients.contains_key(owner));
        let (Some(_), Some(keeper), Some(requirement)) =
            (attached, lease.keeper, lease.requirement)
        else {
            return false;
        };
        let Some(device_ref) = self.pool.free_equal(keeper, &requirement) else {
            return false;
        };
        // The worker may still be considered present; it learns of this when it is back.
        for worker in lease.workers() {
            let grants = lease.grants_on(worker);
            self.pool.end(worker, id, &grants);
        }
        let lease_devices = self.assign_grant_numbers(vec![device_ref]);
        for &GrantedDevice { device_ref, grant } in &lease_devices {
            let taken = self.pool.take(device_ref, id, grant);
            assert!(taken.is_ok(), "{device_ref:?} must be free");
        }
        if let Some(lease) = self.leases.get_mut(id) {
            lease.lease_devices.clear();
            lease.add(&lease_devices);
            lease.epoch += 1;
            (lease.lost, lease.rejoin_by, lease.keeper) = (None, None, None);
        }
        self.report_moved(id);
        true
    }

    /// Sends the client of a lease the lease's devices, unless the client is away or the worker is
    /// lost.
    pub(super) fn report_moved(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.get(id) else {
            return;
        };
        let attached = lease.owner.filter(|owner| self.clients.contains_key(owner));
        let (Some(client), epoch) = (attached, lease.epoch) else {
            return;
        };
        let device =
            |(&device_ref, &grant)| self.pool.leased_device(GrantedDevice { device_ref, grant });
        let devices = lease.lease_devices.iter().map(device);
        if let Some(devices) = devices.collect() {
            self.commands.push(Command::Moved {
                client,
                lease: id,
                epoch,
                devices,
            });
        }
    }
}
