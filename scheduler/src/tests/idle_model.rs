//! The test's own model of idle leases: it tries all sets of leases, where the engine chooses one.

use std::collections::BTreeSet;

use super::world::{IDLE_TIMEOUT_MS, SimLease, SimRequest, World, meets_demand, tenant_of};
use super::*;
use crate::lease::Standing;

impl World {
    /// Some of the leases have something to do at a worker.
    pub(super) fn work(&mut self, i: usize, leases: u32) {
        let now = self.now;
        let worker = &mut self.workers[i];
        let here: BTreeSet<_> = worker.held.iter().map(|(lease, _)| *lease).collect();
        let busy = (0..32).zip(here).filter(|(at, _)| leases >> at & 1 == 1);
        worker.worked.extend(busy.map(|(_, lease)| (lease, now)));
    }

    /// A worker reports which leases have been idle for a second.
    pub(super) fn report_idle(&mut self, i: usize) {
        let now = self.now;
        let worker = &mut self.workers[i];
        let here: BTreeSet<_> = worker.held.iter().map(|(lease, _)| *lease).collect();
        let since = here.into_iter().map(|lease| {
            let worked = worker.worked.get(&lease).copied();
            (lease, worked.unwrap_or_default())
        });
        let since: BTreeMap<_, _> = since.filter(|(_, since)| now - since >= 1_000).collect();
        if worker.known.as_ref().is_some_and(|known| known.connected) {
            worker.idle.clone_from(&since);
        }
        let idle_for = |since: u64| Duration::from_millis(now - since);
        let leases = since
            .into_iter()
            .map(|(lease, since)| (lease, idle_for(since)));
        let leases = leases.collect();
        self.send_worker(i, WorkerEvent::Idle { leases });
    }

    /// Returns since when a lease has been idle, as far as its workers have reported.
    fn idle_since(&self, id: LeaseId, lease: &SimLease) -> Option<u64> {
        let reported = lease.lease_devices.iter().map(|device_ref| {
            let worker = &self.workers[device_ref.worker.0 as usize];
            worker.idle.get(&id).copied()
        });
        let reported = reported.collect::<Option<Vec<_>>>()?;
        reported.into_iter().chain([lease.running_since]).max()
    }

    /// The engine has suspended a lease because it was idle.
    pub(super) fn make_room(&mut self, id: LeaseId) {
        let known = self.leases.as_ref().and_then(|leases| leases.get(&id));
        // Otherwise its client has come back.
        if let Some(lease) = known.filter(|lease| !lease.is_suspended).cloned() {
            let since = self.idle_since(id, &lease);
            let is_due = since.is_some_and(|since| since + IDLE_TIMEOUT_MS <= self.now);
            assert!(is_due, "{id} is idle since {since:?} at {}", self.now);
            self.made_room.push((id, lease));
        }
        let leases = self.leases.as_mut();
        if let Some(lease) = leases.and_then(|leases| leases.get_mut(&id)) {
            lease.lose_devices(self.now);
            lease.is_suspended = true;
        }
    }

    /// Returns the leases that have been idle for long enough, or will have been, and could be suspended; each
    /// with since when.
    fn idle(&self) -> Vec<(u64, LeaseId, &SimLease)> {
        let idle = self.leases.iter().flatten().filter_map(|(id, lease)| {
            let known = self.engine.leases().get(*id)?;
            let is_running = known.runs();
            let checked = self.engine.check_suspend(*id, Suspender::Idleness);
            let since = self.idle_since(*id, lease)?;
            let is_possible = !lease.is_suspended && !lease.has_share;
            let is_idle = is_possible && is_running && checked.is_ok();
            is_idle.then_some((since, *id, lease))
        });
        idle.collect()
    }

    /// Leases that are idle make room if that is enough for something that waits, and only then.
    pub(super) fn check_idle(&self) {
        if self.leases.is_none() {
            return;
        }
        self.check_that_room_is_needed();
        let waits = |lease: &crate::lease::Lease| {
            matches!(
                lease.standing,
                Standing::Lost(_) | Standing::Resuming { .. }
            )
        };
        let has_leases = self.engine.leases().iter().any(|(_, lease)| waits(lease));
        let idle_at = self.engine.idle_at().map(|at| at.as_millis());
        if !self.waiting.is_empty() || has_leases {
            for (since, id, _) in self.idle() {
                let due_at = since + IDLE_TIMEOUT_MS;
                let is_awaited = idle_at.is_some_and(|at| at <= due_at);
                assert!(
                    due_at <= self.now || is_awaited,
                    "{id} is idle: {idle_at:?}"
                );
            }
        }
        let first = self.order.first().copied();
        let is_whole = |at: usize| self.waiting[at].demand.share_permille.is_none();
        if let Some((first, _)) = first.filter(|(at, _)| !has_leases && is_whole(*at)) {
            self.check_first_request(&self.waiting[first]);
        }
    }

    /// The first request that waits would have too few devices with those of all idle leases, or has enough to
    /// come. If it is the only one, and leases were suspended for it, no better choice was possible.
    fn check_first_request(&self, first: &SimRequest) {
        let wanted = first.demand.devices as usize;
        let order = &self.order;
        let is_guaranteed = order
            .iter()
            .any(|(at, is_guaranteed)| *is_guaranteed && self.waiting[*at].lease == first.lease);
        let may_get = |it: DeviceRef| {
            let may_pass = is_guaranteed || self.may_pass(first, self.device(it));
            may_pass && self.could_get(first, it)
        };
        let useful = |lease: &SimLease| {
            let devices = lease.lease_devices.iter();
            let useful = devices.filter(|it| self.is_usable(**it) && may_get(**it));
            useful.count()
        };
        let due = self.idle().into_iter().filter_map(|(since, id, lease)| {
            let is_due = since + IDLE_TIMEOUT_MS <= self.now;
            is_due.then(|| (since, id, useful(lease)))
        });
        let due: Vec<_> = due.filter(|(.., useful)| *useful > 0).collect();
        let all: usize = due.iter().map(|(.., useful)| useful).sum();
        let coming = self
            .coming_for(first)
            .into_iter()
            .filter(|it| may_get(*it))
            .count();
        assert!(
            coming >= wanted || coming + all < wanted,
            "{} waits, with {coming} devices to come and {all} of idle leases",
            first.demand
        );
        // What a tenant with a limit might have got before is not known if it has less now.
        let tenant = tenant_of(first.client);
        let mut of_tenant = self.made_room.iter();
        let has_less = of_tenant.any(|(_, lease)| tenant_of(lease.client) == tenant);
        let is_limited = self.policy.contains_key(&tenant) && has_less;
        // They may have been suspended for another request, which was granted since.
        let may_be_for_other = self.waiting.len() > 1 || !self.granted.is_empty();
        if self.made_room.is_empty() || may_be_for_other || is_limited {
            return;
        }
        let freed = self.made_room.iter().map(|(id, lease)| {
            let since = self.idle_since_before(*id, lease);
            (since, *id, useful(lease))
        });
        let mut chosen: Vec<_> = freed.collect();
        chosen.sort_unstable();
        let freed: BTreeSet<_> = self.freed().collect();
        let before = self.coming_for(first);
        let before = before
            .iter()
            .filter(|it| !freed.contains(it) && may_get(**it));
        let before = before.count();
        let possible = [due, chosen.clone()].concat();
        let best = best_choice(&possible, wanted.saturating_sub(before));
        assert_eq!(best, Some(chosen), "for {}", first.demand);
    }

    /// Each lease that was suspended has devices that something could use which waits.
    fn check_that_room_is_needed(&self) {
        for (id, lease) in &self.made_room {
            let devices = || lease.lease_devices.iter().copied();
            let mut requests = self.waiting.iter();
            let has_others = !self.granted.is_empty() || !self.moved.is_empty();
            let could_get = |waiting: &SimRequest, it: DeviceRef| {
                // Its tenant may have less room now, as something else has got devices since.
                let device = self.device(it);
                let could_before = meets_demand(device, &waiting.demand)
                    && self.is_allowed(waiting, device, false);
                self.could_get(waiting, it) || has_others && could_before
            };
            let is_for_request = requests.any(|waiting| devices().any(|it| could_get(waiting, it)));
            // Its own tenant may have been at the limit.
            let mut granted = self.granted.iter();
            let is_for_granted =
                granted.any(|demand| devices().any(|it| meets_demand(self.device(it), demand)));
            // What it was suspended for may have gone on elsewhere since.
            let mut moved = self.moved.iter();
            let is_for_moved =
                moved.any(|moved| devices().any(|it| self.device(it).kind == moved.kind));
            let mut leases = self.engine.leases().iter();
            let is_for_lease = leases.any(|(_, waiting)| {
                let is_waiting = matches!(
                    waiting.standing,
                    Standing::Lost(_) | Standing::Resuming { .. }
                );
                let parts = waiting.parts.iter().map(|part| part.requirement.clone());
                let lost = waiting.lost().and_then(|_| waiting.requirement_elsewhere());
                let mut needed = parts.chain(lost);
                let is_needed =
                    needed.any(|needed| devices().any(|it| needed.accepts(self.device(it))));
                is_waiting && is_needed
            });
            assert!(
                is_for_request || is_for_granted || is_for_moved || is_for_lease,
                "{id} makes room for nothing"
            );
        }
    }

    fn idle_since_before(&self, id: LeaseId, lease: &SimLease) -> u64 {
        let since = self.idle_since(id, lease);
        since.expect("it was idle when it was suspended")
    }

    /// Returns the devices of the leases that were suspended.
    fn freed(&self) -> impl Iterator<Item = DeviceRef> {
        let leases = self.made_room.iter();
        leases.flat_map(|(_, lease)| lease.lease_devices.iter().copied())
    }

    fn could_get(&self, waiting: &SimRequest, device_ref: DeviceRef) -> bool {
        let device = self.device(device_ref);
        meets_demand(device, &waiting.demand) && self.is_allowed(waiting, device, true)
    }

    /// Returns the devices that are free or will be, and that a request could get.
    fn coming_for(&self, waiting: &SimRequest) -> Vec<DeviceRef> {
        let coming = self.coming().into_iter().filter(|device_ref| {
            let is_own = self.is_held_for_none_but(waiting.lease, *device_ref);
            is_own && self.could_get(waiting, *device_ref)
        });
        coming.collect()
    }
}

/// Returns the best of the sets of leases that have `missing` useful devices together, by trying all: the
/// smallest, then that which has been idle for longest.
fn best_choice(
    leases: &[(u64, LeaseId, usize)],
    missing: usize,
) -> Option<Vec<(u64, LeaseId, usize)>> {
    let sets = (0..1_u32 << leases.len()).filter_map(|set| {
        let chosen = leases
            .iter()
            .enumerate()
            .filter(|(at, _)| set >> at & 1 == 1);
        let mut chosen: Vec<_> = chosen.map(|(_, lease)| *lease).collect();
        chosen.sort_unstable();
        let useful: usize = chosen.iter().map(|(.., useful)| useful).sum();
        (useful >= missing).then_some(chosen)
    });
    sets.min_by_key(|chosen| (chosen.len(), chosen.clone()))
}
