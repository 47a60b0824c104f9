//! The devices at which leases could go on that run, or have run, elsewhere.

use std::collections::BTreeSet;

use tensord_proto::ids::{LeaseId, WorkerId};

use super::Pool;
use super::worker::Worker;
use crate::device::{DeviceSpec, Requirement, Share};
use crate::event::DeviceRef;

impl Pool {
    /// Returns whether a worker will stay, and has `count` devices that meet `requirement`.
    pub(crate) fn can_run(
        &self,
        worker: WorkerId,
        requirement: &Requirement,
        count: usize,
    ) -> bool {
        let Some(worker) = self.get(worker) else {
            return false;
        };
        let accepted = worker.offers().filter(|device| requirement.accepts(device));
        accepted.count() >= count
    }

    /// Returns `count` free devices of a worker that meet `requirement`, if it has as many for `lease`.
    pub(crate) fn free_fitting(
        &self,
        worker: WorkerId,
        lease: LeaseId,
        requirement: &Requirement,
        count: usize,
    ) -> Option<Vec<DeviceRef>> {
        let fitting = self.fitting(worker, lease, requirement, count);
        (fitting.len() == count).then_some(fitting)
    }

    /// Returns whether a worker has `count` free devices for `lease` that meet `requirement`.
    pub(crate) fn has_free(
        &self,
        worker: WorkerId,
        lease: LeaseId,
        requirement: &Requirement,
        count: usize,
    ) -> bool {
        self.fitting(worker, lease, requirement, count).len() == count
    }

    /// Returns the workers that have `count` free devices for `lease` that meet `requirement`.
    pub(crate) fn with_free(
        &self,
        lease: LeaseId,
        requirement: &Requirement,
        count: usize,
    ) -> BTreeSet<WorkerId> {
        let groups = self.index.groups().filter(|(key, _)| {
            let free = key.free.count(|device| requirement.accepts(device));
            free >= count
        });
        let with_room = self.with_room(lease, requirement).into_iter();
        let with_room = with_room.map(|it| it.worker);
        let own = self.held_back_for(lease).into_iter();
        let own = own.map(|device_ref| device_ref.worker);
        let own = own.filter(|worker| self.has_free(*worker, lease, requirement, count));
        groups
            .flat_map(|(_, group)| group.by_id())
            .chain(with_room)
            .chain(own)
            .collect()
    }

    /// Returns the workers that offer `count` devices that meet `requirement`, now or later: of those that
    /// are alike, the first `enough` that `is_wanted` accepts.
    pub(crate) fn offering(
        &self,
        requirement: &Requirement,
        count: usize,
        enough: usize,
        is_wanted: impl Fn(WorkerId) -> bool,
    ) -> BTreeSet<WorkerId> {
        let groups = self.index.groups().filter(|(key, _)| {
            let offered = key.offered.count(|device| requirement.accepts(device));
            offered >= count
        });
        let first = groups.flat_map(|(_, group)| {
            let wanted = group.by_id().filter(|worker| is_wanted(*worker));
            wanted.take(enough)
        });
        first.collect()
    }

    /// Returns whether a worker has `count` devices that meet `requirement` and have the fingerprint
    /// of the lease's devices.
    pub(crate) fn has_equal(
        &self,
        worker: WorkerId,
        requirement: &Requirement,
        count: usize,
    ) -> bool {
        let offers = self.get(worker).into_iter().flat_map(Worker::offers);
        let equal = offers.filter(|it| requirement.accepts(it) && requirement.is_equal(it));
        equal.count() >= count
    }

    /// Returns the devices with room for the share that a requirement needs, and that are not held back for
    /// another lease than this one.
    fn with_room(&self, lease: LeaseId, requirement: &Requirement) -> Vec<DeviceRef> {
        if requirement.share.is_none() {
            return Vec::new();
        }
        let share_of =
            |device: &DeviceSpec| requirement.share.filter(|_| requirement.accepts(device));
        let held_back = self.held_back_for(lease).into_iter();
        let held_back = held_back.filter(|it| self.has_room(lease, *it, share_of));
        self.index.with_room(share_of).chain(held_back).collect()
    }

    /// Returns whether a device that leases share, or of which shares are held back for others than this one, has
    /// room for the share of it that `share_of` returns.
    pub(super) fn has_room(
        &self,
        lease: LeaseId,
        device_ref: DeviceRef,
        share_of: impl Fn(&DeviceSpec) -> Option<Share>,
    ) -> bool {
        let share = self.device(device_ref).and_then(share_of);
        share.is_some_and(|share| {
            let room = self.room_for(Some(lease), device_ref, true);
            room.is_some_and(|room| room.has_room(share))
        })
    }

    /// Returns free devices of a worker that meet `requirement`, and are not held back for another
    /// lease: at most `count`, those first that have the fingerprint of the lease's devices, and of these those
    /// that other leases have shares of, if that is enough.
    pub(crate) fn fitting(
        &self,
        worker: WorkerId,
        lease: LeaseId,
        requirement: &Requirement,
        count: usize,
    ) -> Vec<DeviceRef> {
        let accepts = |device: &DeviceSpec| requirement.accepts(device);
        let share_of =
            |device: &DeviceSpec| requirement.share.filter(|_| requirement.accepts(device));
        let devices = self.get(worker).into_iter().flat_map(Worker::devices);
        let devices = devices.map(|(index, ..)| DeviceRef { worker, index });
        let with_room = devices.filter(|it| self.has_room(lease, *it, share_of));
        let known = self.get(worker).into_iter();
        let free = known.flat_map(|known| known.free(&accepts));
        let free = free.map(|(_, index)| DeviceRef { worker, index });
        let free = free.filter(|it| self.is_held_for_none_but(lease, *it));
        let mut fitting: Vec<_> = with_room.chain(free).collect();
        let is_equal = |device_ref: &DeviceRef| {
            let device = self.device(*device_ref);
            device.is_some_and(|device| requirement.is_equal(device))
        };
        fitting.sort_by_key(|device_ref| !is_equal(device_ref));
        fitting.truncate(count);
        fitting
    }
}
