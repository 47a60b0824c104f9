//! Idle leases, which have nothing to do while others wait for their devices: they are suspended, and their
//! clients resume them when the programs use them again.
//!
//! Workers report which leases are idle there, and for how long. A lease is idle if it is so at all its
//! workers. It is suspended if it has been idle for [`Options::idle_timeout`](crate::Options::idle_timeout),
//! could go on later, and a request or another lease waits for devices that it has. Either as many are suspended
//! as what waits needs in addition to what is free or will be, or none: the fewest, and of those that do equally
//! well, the one that has been idle for longest.
//!
//! What waits is taken in the order in which it gets devices. What may not have more devices, because of the
//! limit of its tenant, needs none. This comes before devices are reclaimed: an idle lease loses less than one
//! that is borrowed.
//!
//! A lease that was suspended and goes on must be idle for as long again before it is suspended again. So two
//! leases take turns at most that often.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tensord_proto::ids::{LeaseId, WorkerId};

use super::Engine;
use super::coming::Coming;
use super::holds::MayHave;
use super::waiting::WaitingPart;
use crate::device::{DeviceSpec, Share};
use crate::event::{DeviceRef, Suspender};
use crate::lease::{Lease, Standing};
use crate::tenants::{Amounts, NOTHING, TenantName};
use crate::time::Timestamp;

/// Since when leases have been idle, as each of their workers has reported on its current stream.
#[derive(Default)]
pub(super) struct IdleLeases(BTreeMap<WorkerId, BTreeMap<LeaseId, Timestamp>>);

impl IdleLeases {
    /// Replaces what a worker has reported. Returns whether there is a lease whose time is to be awaited anew: it
    /// was not idle before, or had been since `limit` or longer, and has had something to do since.
    fn set(
        &mut self,
        worker: WorkerId,
        since: BTreeMap<LeaseId, Timestamp>,
        limit: Timestamp,
    ) -> bool {
        let earlier = self.0.remove(&worker).unwrap_or_default();
        let is_new = |(lease, since): (&LeaseId, &Timestamp)| {
            let earlier = earlier.get(lease);
            earlier.is_none_or(|earlier| *earlier <= limit && *since > limit)
        };
        let is_changed = since.iter().any(is_new);
        if !since.is_empty() {
            self.0.insert(worker, since);
        }
        is_changed
    }

    /// Forgets what a worker has reported.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.0.remove(&worker);
    }

    /// Forgets what workers have reported of a lease, which has been elsewhere since.
    pub(super) fn forget_lease(&mut self, lease: LeaseId) {
        for leases in self.0.values_mut() {
            leases.remove(&lease);
        }
    }

    /// Returns the leases that are idle at some worker.
    fn leases(&self) -> BTreeSet<LeaseId> {
        let leases = self.0.values().flat_map(BTreeMap::keys);
        leases.copied().collect()
    }

    /// Returns since when a lease has been idle, if it is.
    fn since(&self, id: LeaseId, lease: &Lease) -> Option<Timestamp> {
        let mut since = lease.running_since;
        for worker in lease.workers() {
            since = since.max(*self.0.get(&worker)?.get(&id)?);
        }
        Some(since)
    }
}

/// A lease that has been idle for long enough.
struct IdleLease {
    lease: LeaseId,
    since: Timestamp,
    devices: BTreeSet<DeviceRef>,
}

/// The devices that a request needs which waits, or a part of a lease.
struct Need {
    /// The number.
    devices: usize,
    /// Those that it could get if they were free.
    suitable: BTreeSet<DeviceRef>,
}

/// A request or a lease that waits, and what it needs: for each of its parts one of the alternatives, each on
/// another worker.
struct Waiter {
    lease: LeaseId,
    tenant: Option<TenantName>,
    parts: Vec<Vec<Need>>,
}

/// How the needs of something that waits can be met.
#[derive(Default)]
struct Chosen {
    /// Devices that are free, or will be.
    coming: Vec<DeviceRef>,
    /// Devices of the leases that are to be suspended for it.
    freed: Vec<DeviceRef>,
    victims: Vec<LeaseId>,
}

/// An idle lease that has devices which something could get.
#[derive(Clone, Copy)]
struct Candidate {
    lease: LeaseId,
    since: Timestamp,
    /// The number of these devices.
    useful: usize,
}

impl Engine {
    /// Records which leases are idle on a worker, and for how long.
    pub(super) fn on_idle(&mut self, worker: WorkerId, leases: &BTreeMap<LeaseId, Duration>) {
        let running = self.pool.get(worker).map(|worker| worker.leases());
        let running: BTreeSet<_> = running.into_iter().flatten().collect();
        let here = leases.iter().filter(|(lease, _)| running.contains(lease));
        let since = here.map(|(lease, idle_for)| (*lease, self.now.saturating_sub(*idle_for)));
        let limit = self.now.saturating_sub(self.options.idle_timeout);
        if self.idle.set(worker, since.collect(), limit) {
            self.settled_until = None;
        }
    }

    /// Suspends leases that have been idle for long enough, for others that wait for devices. Returns whether
    /// it has suspended some.
    pub(super) fn suspend_idle(&mut self) -> bool {
        self.idle_at = None;
        if self.options.idle_timeout.is_zero() || !self.has_waiting() {
            return false;
        }
        let mut idle = self.idle_leases();
        // To put all that waits in order takes longer.
        if !self.is_wanted(&idle) {
            return false;
        }
        let mut with_rooms = Coming::of(&self.pool, self.queue.shapes().map(|shape| &**shape));
        let mut coming: BTreeSet<_> = with_rooms.devices.keys().copied().collect();
        let mut used = self.used_by_tenants().clone();
        let mut in_vain = BTreeSet::new();
        let mut has_suspended = false;
        for id in self.waiting_ids() {
            let kind = self
                .queue
                .get(id)
                .map(|it| (it.tenant.clone(), it.demand.clone()));
            if kind.as_ref().is_some_and(|kind| in_vain.contains(kind)) {
                continue;
            }
            if self.take_coming_room(id, &used, &mut with_rooms) {
                continue;
            }
            let waiter = self.waiter(id, &used);
            let Some(chosen) = waiter
                .as_ref()
                .and_then(|it| self.choose_idle(it, &coming, &idle))
            else {
                in_vain.extend(kind);
                continue;
            };
            coming.retain(|device_ref| !chosen.coming.contains(device_ref));
            for victim in idle.extract_if(.., |it| chosen.victims.contains(&it.lease)) {
                if self.suspend_for_idleness(victim.lease) {
                    has_suspended = true;
                    // The next one may use what this one does not need.
                    coming.extend(victim.devices);
                }
            }
            coming.retain(|device_ref| !chosen.freed.contains(device_ref));
            if let Some(tenant) = waiter.and_then(|waiter| waiter.tenant) {
                let used = used.entry(tenant).or_default();
                for device_ref in chosen.coming.iter().chain(&chosen.freed) {
                    if let Some(device) = self.pool.device(*device_ref) {
                        used.add_share(device, self.share_that_waits(id, device));
                    }
                }
            }
        }
        has_suspended
    }

    /// Returns the part of a device that a request or lease needs which waits; `None` for all of it.
    fn share_that_waits(&self, id: LeaseId, device: &DeviceSpec) -> Option<Share> {
        match self.queue.get(id) {
            Some(request) => request.demand.share_of(device),
            None => self.leases.get(id)?.share(),
        }
    }

    /// Takes the room that there will be for a request, whose tenant has `used`, beside leases that have shares of
    /// a device. Returns whether there is some.
    fn take_coming_room(
        &self,
        id: LeaseId,
        used: &BTreeMap<TenantName, Amounts>,
        coming: &mut Coming,
    ) -> bool {
        let Some(request) = self
            .queue
            .get(id)
            .filter(|it| it.demand.share_permille.is_some())
        else {
            return false;
        };
        let used = used.get(&request.tenant).unwrap_or(&NOTHING);
        let usable = MayHave::Devices(self.usable_by(request, used));
        coming.add_held_devices(&self.pool, id);
        coming.add_held_shares(&self.pool, [id].into_iter());
        let has_room = coming.take_room(&self.pool, &request.demand, &usable);
        if !has_room {
            coming.remove_held(&self.pool, id);
        }
        has_room
    }

    /// Returns whether a request or a lease waits for devices.
    fn has_waiting(&self) -> bool {
        !self.queue.is_empty() || self.has_waiting_lease()
    }

    /// Returns whether a lease waits for devices.
    pub(super) fn has_waiting_lease(&self) -> bool {
        self.leases.index().unsettled().any(|id| {
            let lease = self.leases.get(id);
            lease.is_some_and(|lease| match lease.standing {
                Standing::Lost(_) | Standing::Resuming { .. } => true,
                Standing::Running | Standing::Suspended { .. } => false,
            })
        })
    }

    /// Returns whether these leases have devices like those that a request waits for, or may have some for a
    /// lease.
    fn is_wanted(&self, idle: &[IdleLease]) -> bool {
        let devices = idle.iter().flat_map(|it| &it.devices);
        let mut devices = devices.filter_map(|device_ref| self.pool.device(*device_ref));
        let accepts = |device| self.queue.shapes().any(|shape| shape.accepts(device));
        let may_be_any = self.has_waiting_lease();
        devices.any(|device| may_be_any || accepts(device))
    }

    /// Returns the leases that have been idle for long enough and could be suspended. Sets the time at which
    /// the next one will have been.
    fn idle_leases(&mut self) -> Vec<IdleLease> {
        let mut due = Vec::new();
        let mut next = None;
        for id in self.idle.leases() {
            let known = self.leases.get(id).filter(|lease| lease.runs());
            // The time of a share goes to the others of the device, as long as the lease needs none.
            let known = known.filter(|lease| lease.share().is_none());
            let since = known.and_then(|lease| Some((lease, self.idle.since(id, lease)?)));
            let Some((lease, since)) = since else {
                continue;
            };
            let due_at = since + self.options.idle_timeout;
            if due_at > self.now {
                next = next.into_iter().chain([due_at]).min();
            } else if self.check_suspend(id, Suspender::Idleness).is_ok() {
                due.push(IdleLease {
                    lease: id,
                    since,
                    devices: lease.lease_devices.keys().copied().collect(),
                });
            }
        }
        self.idle_at = next;
        due
    }

    /// Returns what a request or lease that waits needs; `None` if it would get no devices now, however many
    /// are free.
    fn waiter(&self, id: LeaseId, used: &BTreeMap<TenantName, Amounts>) -> Option<Waiter> {
        if let Some(request) = self.queue.get(id) {
            let used = used.get(&request.tenant).unwrap_or(&NOTHING);
            let need = Need {
                devices: request.demand.devices as usize,
                suitable: self.usable_by(request, used),
            };
            return Some(Waiter {
                lease: id,
                tenant: Some(request.tenant.clone()),
                parts: vec![vec![need]],
            });
        }
        self.attached_owner(id)?;
        let lease = self.leases.get(id)?;
        let parts = self.parts_that_wait(id, lease);
        let parts = parts.iter().map(|part| self.needs_of_part(id, part));
        let parts: Vec<_> = parts.collect();
        let is_possible = !parts.is_empty() && !self.is_over_limit(id);
        is_possible.then(|| Waiter {
            lease: id,
            tenant: lease.tenant.clone(),
            parts,
        })
    }

    /// Returns the alternatives of a part of a lease: the devices of each worker at which it could go on.
    fn needs_of_part(&self, id: LeaseId, part: &WaitingPart<'_>) -> Vec<Need> {
        let (devices, requirement) = (part.devices, &part.requirement);
        let mut by_worker = BTreeMap::<WorkerId, BTreeSet<DeviceRef>>::new();
        for device_ref in self.pool.usable(|device| requirement.accepts(device)) {
            let here = by_worker.entry(device_ref.worker).or_default();
            here.insert(device_ref);
        }
        by_worker.retain(|worker, _| {
            // A worker could not start the lease before it has released it.
            (part.can_run_at)(*worker) && !self.pool.is_ending(*worker, id)
        });
        let need = |suitable| Need { devices, suitable };
        by_worker.into_values().map(need).collect()
    }

    /// Returns how the needs of something that waits can be met by devices that are free or will be, and by
    /// those of the fewest idle leases for each part.
    fn choose_idle(
        &self,
        waiter: &Waiter,
        coming: &BTreeSet<DeviceRef>,
        idle: &[IdleLease],
    ) -> Option<Chosen> {
        let mut all = Chosen::default();
        let mut coming = coming.clone();
        coming.extend(self.pool.held_and_coming(waiter.lease));
        let mut workers = BTreeSet::new();
        for alternatives in &waiter.parts {
            let is_taken = |need: &&Need| {
                let is_of_lease = self.queue.get(waiter.lease).is_none();
                let mut devices = need.suitable.iter();
                is_of_lease && devices.any(|it| workers.contains(&it.worker))
            };
            let possible = alternatives.iter().filter(|need| !is_taken(need));
            let possible = possible.filter_map(|need| need.meet(&coming, idle, &all.victims));
            let Chosen {
                coming: provided,
                freed,
                victims,
            } = possible.min_by_key(|chosen| chosen.victims.len())?;
            workers.extend(provided.iter().chain(&freed).map(|it| it.worker));
            coming.retain(|device_ref| !provided.contains(device_ref));
            all.coming.extend(provided);
            all.freed.extend(freed);
            all.victims.extend(victims);
        }
        Some(all)
    }

    /// Suspends an idle lease. Returns whether that is done: the snapshots of another one may have taken the
    /// room for its own.
    fn suspend_for_idleness(&mut self, id: LeaseId) -> bool {
        if self.check_suspend(id, Suspender::Idleness).is_err() {
            return false;
        }
        self.suspend(id, Suspender::Idleness);
        self.report_standing(id);
        true
    }
}

impl Need {
    /// Returns how the need can be met by `coming` devices and those of the fewest idle leases that are not
    /// `taken`; `None` if these are too few.
    fn meet(
        &self,
        coming: &BTreeSet<DeviceRef>,
        idle: &[IdleLease],
        taken: &[LeaseId],
    ) -> Option<Chosen> {
        let provided = coming.intersection(&self.suitable).copied();
        let provided: Vec<_> = provided.take(self.devices).collect();
        let missing = self.devices - provided.len();
        let useful = |idle: &IdleLease| idle.devices.intersection(&self.suitable).count();
        let candidates = idle.iter().filter(|it| !taken.contains(&it.lease));
        let candidates = candidates.map(|it| Candidate {
            lease: it.lease,
            since: it.since,
            useful: useful(it),
        });
        let candidates = candidates.filter(|candidate| candidate.useful > 0);
        let victims = fewest(candidates.collect(), missing)?;
        let freed = idle.iter().filter(|it| victims.contains(&it.lease));
        let freed = freed.flat_map(|it| it.devices.intersection(&self.suitable));
        Some(Chosen {
            coming: provided,
            freed: freed.copied().take(missing).collect(),
            victims,
        })
    }
}

/// Returns the fewest of these leases that have `missing` useful devices together; of all such sets, that with the
/// lease which has been idle for longest, then that with the next, and so on. `None` if all together have fewer.
fn fewest(mut candidates: Vec<Candidate>, missing: usize) -> Option<Vec<LeaseId>> {
    candidates.sort_by_key(|candidate| (candidate.since, candidate.lease));
    let needed = |count: &usize| most_useful(&candidates, *count) >= missing;
    let mut count = (0..=candidates.len()).find(needed)?;
    let (mut chosen, mut left) = (Vec::new(), missing);
    for (at, candidate) in candidates.iter().enumerate() {
        if count == 0 {
            break;
        }
        let others = most_useful(&candidates[at + 1..], count - 1);
        if candidate.useful + others >= left {
            chosen.push(candidate.lease);
            left = left.saturating_sub(candidate.useful);
            count -= 1;
        }
    }
    Some(chosen)
}

/// Returns the number of useful devices of those `count` leases that have the most.
fn most_useful(candidates: &[Candidate], count: usize) -> usize {
    let useful = candidates.iter().map(|candidate| candidate.useful);
    let mut useful: Vec<_> = useful.collect();
    useful.sort_unstable_by_key(|useful| Reverse(*useful));
    useful.iter().take(count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::at;

    /// Asserts which leases are suspended. `idle` have the number of devices, of which all are useful, and the
    /// time since when each is idle; its number is the lease's.
    #[track_caller]
    fn check(idle: &[(usize, u64)], missing: usize, expected: Option<&[u64]>) {
        let candidates = (0..).zip(idle).map(|(id, (useful, since))| Candidate {
            lease: LeaseId(id),
            since: at(*since),
            useful: *useful,
        });
        let chosen = fewest(candidates.collect(), missing);
        let chosen = chosen.map(|chosen| chosen.iter().map(|lease| lease.0).collect::<Vec<_>>());
        assert_eq!(chosen.as_deref(), expected);
    }

    #[test]
    fn the_fewest_leases_are_suspended() {
        check(&[(1, 0), (2, 1), (4, 2)], 4, Some(&[2]));
        check(&[(1, 0), (2, 1), (4, 2)], 5, Some(&[0, 2]));
        check(&[(1, 0), (2, 1), (4, 2)], 7, Some(&[0, 1, 2]));
        check(&[(3, 5), (3, 4), (2, 0)], 5, Some(&[2, 1]));
        check(&[(1, 0), (2, 1)], 4, None);
        check(&[], 0, Some(&[]));
        check(&[], 1, None);
    }

    #[test]
    fn the_longest_idle_goes_first() {
        check(&[(1, 3), (1, 1), (1, 2)], 1, Some(&[1]));
        check(&[(1, 3), (1, 1), (1, 2)], 2, Some(&[1, 2]));
        // A larger one is not better if the others are enough.
        check(&[(3, 9), (2, 1), (2, 0)], 4, Some(&[2, 1]));
        // Its other devices are idle, too.
        check(&[(1, 3), (8, 1)], 1, Some(&[1]));
        check(&[(1, 3), (1, 3)], 1, Some(&[0]));
    }
}
