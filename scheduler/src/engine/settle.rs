//! What follows from an event: who gets devices, keepers and snapshots now.

use super::Engine;
use super::durable::RECORDED_KEEPER_TIMEOUT;
use super::requests::RANK_INTERVAL;
use crate::command::Command;
use crate::time::Timestamp;

impl Engine {
    /// Has leases go on and requests granted, as far as there are devices, and takes devices back for those
    /// that are entitled to them, and from idle leases.
    pub(super) fn place(&mut self) {
        let mut has_held_anew = false;
        loop {
            self.move_leases();
            let (granted, commands) = (self.granted, self.commands.len());
            let reserved = self.reserved_devices();
            self.process_queue();
            // Devices were held back for a request that comes after one with a reservation of these now. Once is enough:
            // what is held back then may make a difference for the reservations again.
            let has_other_reservations = !has_held_anew && self.reserved_devices() != reserved;
            has_held_anew |= has_other_reservations;
            // A request that is refused may have been the first within a guarantee, and a request that is granted may
            // bring another within. The next request is entitled now, and devices may have to be held back for it.
            let mut commands = self.commands.iter().skip(commands);
            let has_refused = commands.any(|it| matches!(it, Command::Refused { .. }));
            let is_next_entitled =
                has_refused || has_other_reservations || self.queue.has_newly_guaranteed();
            let is_next_entitled = is_next_entitled && !self.queue.is_empty();
            // A lease may go on beside one that has got a share of a device, or with what a request did not need of what
            // was held back for it. A grant may bring a tenant beyond its guarantee, and a reclaim may bring one within it.
            let has_new_room = self.pool.take_new_room();
            let may_move = self.has_waiting_lease() || !self.pool.index().draining().is_empty();
            let has_new_room = has_new_room && may_move;
            // A spot lease waits for requests that would exceed the limit of its tenant, which may have got less now.
            let may_go_on = self.granted != granted && self.has_limited_spot_that_waits();
            if !has_new_room
                && !may_go_on
                && !is_next_entitled
                && !self.drop_stale_holds()
                && !self.suspend_idle()
                && !self.reclaim()
            {
                break;
            }
        }
        self.settled_until = Some(self.next_change());
    }

    /// Returns whether nothing has changed since [`place`](Self::place) on which its result depends.
    pub(super) fn is_settled(&self) -> bool {
        let is_soon = self.settled_until.is_some_and(|until| self.now < until);
        is_soon && !self.leases.has_touched()
    }

    /// Returns the time from which [`place`](Self::place) may have another result although nothing else has
    /// changed.
    fn next_change(&self) -> Timestamp {
        let index = self.leases.index();
        // The others avoid no worker.
        let waiting = index.restless().filter_map(|id| self.leases.get(id));
        let avoided = waiting.flat_map(|lease| lease.avoids_until());
        let silent = self.pool.index().disconnected().iter();
        let silent = silent.filter_map(|worker| self.gives_way_at(*worker));
        let times = avoided.chain(silent);
        let times = times.chain([
            self.started + RECORDED_KEEPER_TIMEOUT,
            self.ranked_at + RANK_INTERVAL,
        ]);
        let times = times.chain(self.reclaim_at).chain(self.idle_at);
        let times = times.chain(self.next_reservation_at());
        let times = times.filter(|at| *at > self.now);
        let never = Timestamp::from_millis(u64::MAX);
        times.min().unwrap_or(never)
    }

    /// Records what tenants have, gives durable leases keepers, and has snapshots of suspended leases handed
    /// over, as far as something has changed on which these depend. `is_settled` is whether [`place`](Self::place) would
    /// have had the same result as before.
    pub(super) fn settle(&mut self, is_settled: bool) {
        let changed_workers = self.pool.take_changed_workers();
        let mut changed = self.leases.take_touched();
        for worker in &changed_workers {
            let kept = self.leases.index().kept(*worker);
            self.pool.set_kept(*worker, kept);
            let of_worker: Vec<_> = self.leases.index().of_worker(*worker).collect();
            for id in of_worker {
                self.leases.uncheck(id);
                changed.insert(id);
            }
        }
        if !changed_workers.is_empty() {
            changed.extend(self.unstable_keepers.depending_on_workers());
        }
        self.record_shares(!changed_workers.is_empty());
        self.assign_keepers(&changed);
        self.assign_handovers(&changed, is_settled);
        self.count_kept();
        if !self.leases.take_touched().is_empty() {
            self.settled_until = None;
        }
    }
}
