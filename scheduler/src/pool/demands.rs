//! Which devices a request could get: now, once others are released, or in an idle pool.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::{LeaseId, WorkerId};

use super::worker::{Usage, Worker};
use super::{DeviceClass, Feasibility, Pool, Room};
use crate::device::{Demand, DeviceSpec};
use crate::event::DeviceRef;
use crate::placement::{self, Candidate};
use crate::tenants::Amounts;

impl Pool {
    /// Returns whether a demand can be met, which is to become `lease`, and with which devices: now only with
    /// those that `may_have` allows.
    pub(crate) fn assess(
        &self,
        lease: LeaseId,
        demand: &Demand,
        may_have: impl Fn(&DeviceSpec) -> bool,
    ) -> Feasibility {
        let wanted = demand.devices as usize;
        let accepts = |device: &DeviceSpec| demand.accepts(device) && may_have(device);
        let mut held_back = self.held_back_for(lease);
        let shared = self.with_room_for(demand, &may_have);
        let own = held_back.iter().copied();
        let share_of =
            |device: &DeviceSpec| demand.share_of(Some(device).filter(|it| accepts(it))?);
        let mut own = own.filter(|it| self.has_room(lease, *it, share_of));
        if let Some(shared) = shared.or_else(|| own.next()) {
            return Feasibility::Fits(vec![shared]);
        }
        held_back.retain(|it| self.is_free(*it));
        let is_allowed = |device_ref: &DeviceRef| self.device(*device_ref).is_some_and(accepts);
        if held_back.len() == wanted && held_back.iter().all(is_allowed) {
            return Feasibility::Fits(held_back);
        }
        let own = held_back.iter().filter(|it| is_allowed(it)).count();
        // Any `wanted` devices are enough.
        if self.index().free().count(accepts) + own >= wanted {
            let candidates = self.candidates(lease, &held_back, wanted, &accepts);
            if let Some(lease_devices) = placement::choose(candidates, wanted) {
                return Feasibility::Fits(lease_devices);
            }
        }
        match self.offers(demand, |_| true) >= wanted {
            true => Feasibility::Busy,
            false => Feasibility::Never,
        }
    }

    /// Chooses `wanted` of these devices for a lease; `None` if there are too few.
    pub(crate) fn choose(&self, devices: &[DeviceRef], wanted: usize) -> Option<Vec<DeviceRef>> {
        let mut by_worker = BTreeMap::<WorkerId, Vec<(u64, u32)>>::new();
        for device_ref in devices {
            if let Some(device) = self.device(*device_ref) {
                let here = by_worker.entry(device_ref.worker).or_default();
                here.push((device.memory_bytes, device_ref.index));
            }
        }
        let candidates = by_worker
            .into_iter()
            .map(|(worker, devices)| Candidate::new(worker, devices));
        placement::choose(candidates.collect(), wanted)
    }

    /// Returns whether nothing has a device, and a lease may get it now.
    pub(crate) fn is_free(&self, device_ref: DeviceRef) -> bool {
        let worker = self.get(device_ref.worker);
        worker.is_some_and(|worker| worker.usage(device_ref.index) == Usage::Free)
    }

    /// Returns the number of devices that leases may get now or later, and `demand` and `may_have` accept.
    pub(crate) fn offers(&self, demand: &Demand, may_have: impl Fn(&DeviceSpec) -> bool) -> usize {
        let accepts = |device: &DeviceSpec| demand.accepts(device) && may_have(device);
        self.index().offered().count(accepts)
    }

    /// Returns the number of devices that any lease may get now, and `demand` and `may_have` accept. Those that
    /// leases share count as one if one of them has room for the share that is demanded.
    pub(crate) fn free_for(
        &self,
        demand: &Demand,
        may_have: impl Fn(&DeviceSpec) -> bool,
    ) -> usize {
        let shared = self.with_room_for(demand, &may_have);
        let accepts = |device: &DeviceSpec| demand.accepts(device) && may_have(device);
        self.index().free().count(accepts) + usize::from(shared.is_some())
    }

    /// Returns a device that leases share with room for the share that is demanded, if it is one: of the devices
    /// with the least memory, the one with the least room.
    fn with_room_for(
        &self,
        demand: &Demand,
        may_have: impl Fn(&DeviceSpec) -> bool,
    ) -> Option<DeviceRef> {
        demand.share_permille?;
        let accepts = |device: &&DeviceSpec| demand.accepts(device) && may_have(device);
        let share_of = |device: &DeviceSpec| demand.share_of(Some(device).filter(accepts)?);
        self.index().with_room(share_of).next()
    }

    /// Returns the classes of the devices that leases may get now or later.
    pub(crate) fn classes(&self) -> impl Iterator<Item = &DeviceClass> {
        self.index().offered().iter().map(|(class, _)| class)
    }

    /// Returns the kinds of devices that a demand could get, each with the most that one of these devices would count
    /// as, in thousandths.
    pub(crate) fn kinds_for(&self, demand: &Demand) -> BTreeMap<&str, u64> {
        let offered = self.index().offered().iter();
        let mut kinds = BTreeMap::<&str, u64>::new();
        for (device, _) in offered.filter(|(device, _)| demand.accepts(device)) {
            let most = kinds.entry(&device.kind).or_default();
            *most = demand.counted_permille(device).max(*most);
        }
        kinds
    }

    /// Returns the devices that are free and not held back, or will be free once they are released; each
    /// with whether it is free now.
    pub(crate) fn free_or_ending(&self) -> BTreeMap<DeviceRef, bool> {
        let devices = self.usages_at(self.index.with_unused());
        let devices = devices.filter(|(device_ref, _, usage)| {
            let is_wanted = matches!(usage, Usage::Free | Usage::Ending);
            is_wanted && self.held_back.for_others(*device_ref, None).is_nothing()
        });
        devices
            .map(|(device_ref, _, usage)| (device_ref, usage == Usage::Free))
            .collect()
    }

    /// Returns what leases could get of the devices that others have shares of, or of which shares are held back,
    /// once these are released by ended leases: nothing, or less, if more is held back than is left.
    pub(crate) fn coming_rooms(&self) -> BTreeMap<DeviceRef, Room> {
        let devices = self.usages_at(self.index.with_shared());
        let devices = devices.map(|(device_ref, ..)| device_ref);
        let rooms = devices.filter_map(|it| Some((it, self.room_for(None, it, false)?)));
        rooms.collect()
    }

    /// Returns the accepted devices that are in use, or free, of workers that stay: a new lease could get
    /// them if they were free.
    pub(crate) fn usable(&self, accepts: impl Fn(&DeviceSpec) -> bool) -> BTreeSet<DeviceRef> {
        let usable = self.usages().filter(|(device_ref, device, usage)| {
            let is_usable = matches!(usage, Usage::Free | Usage::Leased | Usage::Ending);
            is_usable && self.is_connected(device_ref.worker) && accepts(device)
        });
        usable.map(|(device_ref, ..)| device_ref).collect()
    }

    /// Returns the class of a device that is in use, or free, of a worker that stays.
    pub(crate) fn usable_class(&self, device_ref: DeviceRef) -> Option<&DeviceClass> {
        let worker = self.get(device_ref.worker)?;
        let usage = worker.usage(device_ref.index);
        let is_usable = matches!(usage, Usage::Free | Usage::Leased | Usage::Ending);
        let class = worker.class(device_ref.index)?;
        (is_usable && worker.stream.is_some()).then_some(class)
    }

    /// Returns the class of a device, if its worker has joined.
    pub(crate) fn class(&self, device_ref: DeviceRef) -> Option<&DeviceClass> {
        self.get(device_ref.worker)?.class(device_ref.index)
    }

    /// Returns all devices, each with how it is used.
    fn usages(&self) -> impl Iterator<Item = (DeviceRef, &DeviceSpec, Usage)> {
        self.workers().flat_map(|(worker, known)| {
            let devices = known.devices();
            devices.map(move |(index, device, usage)| (DeviceRef { worker, index }, device, usage))
        })
    }

    /// Returns the devices of these workers, each with how it is used.
    fn usages_at<'a>(
        &'a self,
        workers: &'a BTreeSet<WorkerId>,
    ) -> impl Iterator<Item = (DeviceRef, &'a DeviceSpec, Usage)> {
        let known = workers.iter().filter_map(|id| Some((*id, self.get(*id)?)));
        known.flat_map(|(worker, known)| {
            let devices = known.devices();
            devices.map(move |(index, device, usage)| (DeviceRef { worker, index }, device, usage))
        })
    }

    /// Returns the devices that leases may get now or later.
    pub(crate) fn amounts(&self) -> Amounts {
        let mut amounts = Amounts::default();
        for (device, count) in self.index().offered().iter() {
            amounts.add_devices(Some(&device.kind), count as u64, device.memory_bytes);
        }
        amounts
    }

    /// Returns the workers of which a lease of `wanted` devices may get some, for which these are held back.
    /// Of those that are alike, these are as many as it could need, with the lowest ids: the others would
    /// not be chosen.
    fn candidates(
        &self,
        lease: LeaseId,
        held_back: &[DeviceRef],
        wanted: usize,
        accepts: &impl Fn(&DeviceSpec) -> bool,
    ) -> Vec<Candidate> {
        let own: BTreeSet<_> = held_back.iter().map(|it| it.worker).collect();
        let groups = self.index().groups().flat_map(|(key, group)| {
            let free = key.free.count(accepts);
            let enough = wanted.checked_div(free).map_or(0, |whole| whole + 1);
            let others = group.by_id().filter(|worker| !own.contains(worker));
            others.take(enough)
        });
        let workers = groups.chain(own.iter().copied());
        let candidates = workers.filter_map(|id| {
            let grantable = self.grantable(lease, id, self.get(id)?, accepts);
            Some(Candidate::new(id, grantable.collect()))
        });
        candidates.collect()
    }

    /// Returns memory and index of each device of a worker that a new lease may get now.
    fn grantable(
        &self,
        lease: LeaseId,
        id: WorkerId,
        worker: &Worker,
        accepts: &impl Fn(&DeviceSpec) -> bool,
    ) -> impl Iterator<Item = (u64, u32)> {
        worker.free(accepts).filter(move |(_, index)| {
            let (worker, index) = (id, *index);
            self.is_held_for_none_but(lease, DeviceRef { worker, index })
        })
    }
}
