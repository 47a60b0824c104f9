//! Durable leases in the simulated world: what their commands do, and what must hold of them.

use std::collections::BTreeSet;

use super::world::{KnownWorker, SimWorker, World, can_replace, memory_of, store_of};
use super::*;
use crate::device::Requirement;
use crate::engine::assignment::tests::is_possible;
use crate::lease::{Keeper, Lease, Standing, SuspendedPart};

impl World {
    /// A lease whose worker was lost goes on at its keeper.
    pub(super) fn move_lease(
        &mut self,
        client: ClientId,
        lease: LeaseId,
        epoch: u64,
        devices: &[LeasedDevice],
        load_stored: &BTreeSet<WorkerId>,
    ) {
        let device_refs: Vec<_> = devices.iter().map(|leased| leased.device_ref).collect();
        let client = self.attached_client(client);
        let token = &self.clients[client].tokens[&lease];
        assert!(token.durability.is_durable() && token.lease_devices.len() == devices.len());
        for (leased, own) in devices.iter().zip(&token.granted) {
            let is_replaced = can_replace(token.durability, own, &leased.device);
            assert!(is_replaced || token.has_changed);
            assert!(memory_of(leased) >= token.memory_bytes);
        }
        if epoch == token.epoch {
            // The worker is back.
            return assert_eq!(token.lease_devices, device_refs);
        }
        assert!(epoch > token.epoch);
        devices.iter().for_each(|it| self.take_device(lease, it));
        self.moved
            .extend(devices.iter().map(|it| it.device.clone()));
        for worker in &mut self.workers {
            worker.idle.remove(&lease);
        }
        let is_cut_off = self.is_cut_off(client, lease);
        let memory_bytes = devices.iter().map(memory_of);
        let memory_bytes = memory_bytes.min().unwrap_or_default();
        if let Some(leases) = &mut self.leases {
            let moved = leases.get_mut(&lease).unwrap();
            let old = moved.lease_devices.first();
            let old = old.map(|device_ref| &self.workers[device_ref.worker.0 as usize]);
            let stays = |known: &KnownWorker| known.connected && !known.is_draining();
            let stays = old.is_some_and(|old| old.known.as_ref().is_some_and(stays));
            assert!(
                !stays || is_cut_off || self.commanded == Some(lease),
                "{lease} moves, and its worker is there"
            );
            moved.lost_until = None;
            let have_snapshots = match moved.is_suspended {
                // It was suspended in this event, and goes on elsewhere at once.
                true if moved.parts.is_empty() => true,
                true => are_at_holders(&device_refs, &moved.parts, load_stored),
                false => {
                    let keeper = moved.keepers.values().next().map(|keeper| keeper.worker);
                    let store = moved.stored.values().next().copied();
                    let has_them = |worker: WorkerId| match load_stored.contains(&worker) {
                        true => store.is_some() && store == store_of(worker),
                        false => Some(worker) == keeper,
                    };
                    device_refs.iter().all(|it| has_them(it.worker))
                }
            };
            assert!(have_snapshots, "{lease}");
            moved.is_suspended = false;
            moved.lose_devices(self.now);
            moved.running_since = self.now;
            moved.lease_devices = device_refs.clone();
            moved.memory_bytes = memory_bytes;
        }
        let token = self.clients[client].tokens.get_mut(&lease).unwrap();
        (token.lease_devices, token.epoch) = (device_refs, epoch);
    }

    /// Returns whether a client has said for long that it cannot reach the worker of a lease.
    fn is_cut_off(&self, client: usize, lease: LeaseId) -> bool {
        let reports = self.reports.get(&(client, lease));
        reports.is_some_and(|(since, latest)| *latest == self.now && self.now - since >= 10_000)
    }

    /// The client of a lease learns that the lease waits only after its worker was lost.
    pub(super) fn check_interrupted(&self, client: ClientId, lease: LeaseId) {
        let client = self.attached_client(client);
        assert!(self.clients[client].leases.contains(&lease));
        if let Some(leases) = &self.leases {
            assert!(leases[&lease].lost_until.is_some(), "{lease} was not lost");
        }
    }

    /// The client of a lease learns that the lease has no devices only after it was suspended.
    pub(super) fn check_suspended(&self, client: ClientId, lease: LeaseId) {
        let client = self.attached_client(client);
        assert!(self.clients[client].leases.contains(&lease));
        // If two workers are lost at once, the lease may be suspended because of the one and end because of
        // the other; the client then learns both.
        let known = self.leases.as_ref().and_then(|leases| leases.get(&lease));
        assert!(
            known.is_none_or(|known| known.is_suspended),
            "{lease} was not suspended"
        );
    }

    /// The keeper of a lease's snapshots is another worker.
    pub(super) fn check_keeper(&self, part: PartId, source: &Peer, keeper: &Peer) {
        assert_ne!(source.worker, keeper.worker);
        let known = self.engine.leases().get(part.lease).unwrap();
        let workers = match known.is_suspended() {
            // It hands its snapshots over.
            true => known.parts[part.index as usize]
                .holders
                .iter()
                .copied()
                .collect(),
            false => known.workers(),
        };
        assert!(workers.contains(&source.worker));
        for peer in [source, keeper] {
            self.connected_worker(peer.worker);
            assert_eq!(peer.endpoint, endpoint(peer.worker.0));
        }
    }

    /// Every durable lease has a keeper for each of its workers, if there is another worker that stays; one
    /// that has as many such devices, if there is one. A lease that is lost can move, or its keeper has too few free
    /// devices, or its client is away.
    pub(super) fn check_keepers(&self) {
        for (id, lease) in self.engine.leases().iter() {
            let share = lease.share();
            let free = self.available(&|_| share, id);
            self.check_held_back(id, lease, &free);
            self.check_resuming(id, lease, &free);
            self.check_handover(id, lease);
            if !lease.durability.is_durable() {
                assert!(lease.keepers.is_empty() && lease.lost().is_none(), "{id}");
                continue;
            }
            let parts = lease.devices_by_worker();
            assert!(lease.lost().is_none() || parts.len() == 1, "{id}");
            for (own, devices) in &parts {
                self.check_keeper_of(id, lease, *own, devices);
            }
            let attached = |id: ClientId| self.clients.iter().any(|c| c.attached && c.id == id.0);
            if let (Some(requirement), true) = (
                lease.requirement_elsewhere(),
                lease.owner.is_some_and(attached),
            ) {
                let keeper = lease.only_keeper();
                let store = lease.only_stored().map(|stored| stored.store);
                // The store has what a keeper may lack.
                let keeper = keeper.filter(|keeper| keeper.is_kept || store.is_none());
                let places = keeper.map(|keeper| keeper.worker).into_iter();
                let mut places = places.chain(self.with_store(store));
                let fits_at = |free: &&DeviceRef, worker: WorkerId| {
                    let accepts = requirement.accepts(self.device(**free));
                    free.worker == worker && accepts
                };
                let has_room = places.any(|worker| {
                    let ends = self.workers[worker.0 as usize].unanswered.contains(&id);
                    let fitting = free.iter().filter(|it| fits_at(it, worker)).count();
                    let is_own = Some(worker) == lease.only_worker();
                    !is_own && !ends && fitting >= lease.lease_devices.len()
                });
                let own = lease.only_worker().unwrap();
                let own = self.workers.iter().find(|worker| worker.id == own.0);
                let own = own.and_then(|worker| worker.known.as_ref());
                let is_draining = own.is_some_and(KnownWorker::is_draining);
                // A spot lease waits for the requests of its tenant that come before it.
                let may_go_on = lease.lost().is_some() && !self.is_over_limit_with_requests(lease);
                let must_move = may_go_on || lease.is_movable() && is_draining;
                assert!(!must_move || !has_room, "{id} could move");
                let kept_at = lease.only_keeper().filter(|keeper| keeper.is_kept);
                let kept_at = kept_at.map(|keeper| &self.workers[keeper.worker.0 as usize]);
                let known = kept_at.and_then(|worker| worker.known.as_ref());
                let can_send = known.is_some_and(|it| it.connected);
                let is_free_at = |worker: &SimWorker| {
                    let ends = worker.unanswered.contains(&id);
                    let fitting = free.iter();
                    let fitting = fitting.filter(|it| fits_at(it, WorkerId(worker.id)));
                    !ends && fitting.count() >= lease.lease_devices.len()
                };
                let is_anywhere = self.workers.iter().any(is_free_at);
                let waits_in_vain = may_go_on && can_send && is_anywhere;
                assert!(!waits_in_vain, "{id} could go on elsewhere");
                let keeper_leaves = known.is_some_and(KnownWorker::is_draining);
                let stays = lease.lost().is_some() && can_send && keeper_leaves;
                assert!(!stays, "the keeper of {id} does not hand it over");
            }
        }
    }

    /// Returns the workers that have a stream, stay, and have this store open.
    fn with_store(&self, store: Option<StoreId>) -> impl Iterator<Item = WorkerId> {
        let is_there = |worker: &&SimWorker| {
            let known = worker.known.as_ref();
            known.is_some_and(|known| known.connected && !known.is_draining())
        };
        let there = self.workers.iter().filter(is_there);
        let there = there.map(|worker| WorkerId(worker.id));
        there.filter(move |worker| store.is_some() && store_of(*worker) == store)
    }

    fn check_keeper_of(&self, id: LeaseId, lease: &Lease, own: WorkerId, devices: &[DeviceRef]) {
        let own_devices = devices.iter().map(|it| self.known_device(*it));
        let own_devices: Vec<_> = own_devices.collect();
        let first = own_devices.first().copied().flatten();
        let can_share = |other: &DeviceSpec| other.takes_shares || lease.share().is_none();
        let is_like = |other: &DeviceSpec| {
            let can_replace = first.is_some_and(|own| can_replace(lease.durability, own, other));
            can_replace && can_share(other)
        };
        let known = own_devices.iter().flatten();
        let largest = known.map(|device| device.memory_bytes).max();
        let share = lease.share().map(|share| share.memory_bytes);
        let memory_bytes = share.or(largest).unwrap_or_default();
        let workers = lease.workers();
        let can_keep = |worker: &SimWorker| {
            let known = worker.known.as_ref();
            let stays = known.is_some_and(|it| !it.is_draining());
            // The engine knows nothing of leases of a worker that has come back without the devices that these had.
            let has_device = |index: u32| known.is_some_and(|it| it.devices.len() > index as usize);
            let busy = worker.busy.iter().filter(|(lease, _)| *lease == id);
            let mut busy = busy.map(|(_, index)| *index).peekable();
            let is_known = busy.peek().is_none() && has_device(0) || busy.any(has_device);
            let is_ending = is_known && worker.unanswered.contains(&id);
            worker.id != own.0 && stays && !is_ending
        };
        let can_run = |worker: &SimWorker| {
            let known = worker.known.as_ref().filter(|known| !known.is_draining());
            let devices = known.into_iter().flat_map(|known| &known.devices);
            let equal = devices.filter(|d| is_like(d) && d.memory_bytes >= memory_bytes);
            let is_of_lease = workers.contains(&WorkerId(worker.id));
            !is_of_lease && equal.count() >= own_devices.len()
        };
        let keepers: Vec<_> = self.workers.iter().filter(|w| can_keep(w)).collect();
        let keeper = lease.keepers.get(&own);
        let own_worker = self.workers.iter().find(|worker| worker.id == own.0);
        let own_worker = own_worker.and_then(|worker| worker.known.as_ref());
        // After a restart, the engine knows from its records who has the snapshots, and chooses another
        // keeper only when it knows the lease's worker.
        let is_restarted = self.leases.is_none();
        let own_may_join = is_restarted && own_worker.is_none();
        if let Some(Keeper { worker: keeper, .. }) = keeper {
            let known = self.workers[keeper.0 as usize].known.as_ref();
            let may_join = own_may_join || is_restarted && known.is_none();
            // One that drains stays until there is another one that could get the snapshots.
            let own_is_away = own_worker.is_none_or(|own| !own.connected);
            let is_connected =
                |worker: &&&SimWorker| worker.known.as_ref().is_some_and(|it| it.connected);
            let has_other = keepers.iter().any(|it| is_connected(&it));
            let is_fine = own_is_away || !has_other || keepers.iter().any(|w| w.id == keeper.0);
            assert!(
                lease.lost().is_some() || may_join || is_fine,
                "{id} has keeper {keeper}"
            );
        }
        if lease.lost().is_none() {
            let is_possible = own_devices.iter().all(|it| it.is_some_and(is_like));
            let is_connected =
                |worker: &SimWorker| worker.known.as_ref().is_some_and(|it| it.connected);
            let mut connected = keepers.into_iter().filter(|it| is_connected(it));
            let is_good = |worker: &SimWorker| {
                let id = WorkerId(worker.id);
                let is_avoided =
                    self.engine.is_avoided(lease, id) || self.engine.is_excluded(lease, id);
                can_run(worker) && !is_avoided
            };
            let is_better = connected.clone().any(is_good);
            let knows_own = own_worker.is_some_and(|it| it.connected);
            // One from a record may yet join.
            let is_worse = keeper.is_some_and(|it| {
                let keeper = &self.workers[it.worker.0 as usize];
                keeper.known.is_some() && !can_run(keeper)
            });
            assert!(
                !is_worse || !is_better || !knows_own,
                "another worker is better for {id}"
            );
            let is_expected = is_possible && knows_own && connected.next().is_some();
            assert!(keeper.is_some() || !is_expected, "{id} has no keeper");
            assert!(
                keeper.is_none() || own_may_join || is_possible,
                "{id} has a keeper"
            );
        }
    }

    /// A suspended lease all of whose holders drain has another worker that takes its snapshots, if
    /// there is one. So has a lease that was resumed, if it could go on with the snapshots elsewhere.
    fn check_handover(&self, id: LeaseId, lease: &Lease) {
        if !lease.is_suspended() {
            return;
        }
        let known = |worker: &WorkerId| self.workers[worker.0 as usize].known.as_ref();
        let destinations = self.check_destinations(id, lease);
        for (source, keeper) in &lease.keepers {
            let part = &lease.parts[keeper.part as usize];
            let drains = known(source).is_some_and(KnownWorker::is_draining);
            let stays = known(&keeper.worker).is_some_and(|it| !it.is_draining());
            let is_away_briefly = self.is_away_briefly(keeper.worker);
            // One that waits for a request of its tenant may get its snapshots where it could go on after that.
            let is_early = self.is_over_limit_with_requests(lease);
            let is_destination = destinations.contains(&keeper.worker) || is_early;
            let is_needed = drains || is_destination || is_away_briefly;
            assert!(
                self.leases.is_none() || is_needed && stays,
                "{id} hands over"
            );
            assert!(part.holders.contains(source), "{id}");
        }
        for (index, part) in (0..).zip(&lease.parts) {
            let mut holders = part.holders.iter();
            let all_drain = holders.all(|it| known(it).is_some_and(KnownWorker::is_draining));
            let source = part.holders.first().filter(|_| all_drain);
            let Some(source) = source.filter(|_| part.store.is_none()) else {
                continue;
            };
            let is_there = known(source).is_some_and(|known| known.connected);
            let source_worker = &self.workers[source.0 as usize];
            if !is_there || source_worker.unanswered.contains(&id) {
                continue;
            }
            let could_hold = |worker: &SimWorker| {
                let Some(known) = worker.known.as_ref() else {
                    return false;
                };
                known.connected
                    && !known.is_draining()
                    && !worker.unanswered.contains(&id)
                    && worker.id != source.0
            };
            // It may hand another part over first.
            let has_keeper = lease.keepers.contains_key(source)
                || lease.keepers.values().any(|keeper| keeper.part == index);
            let is_possible = self.workers.iter().any(could_hold);
            assert!(has_keeper || !is_possible, "{id} is not handed over");
        }
    }

    /// A lease that was resumed and could go on if its snapshots were elsewhere has devices held back for
    /// all its parts, and a holder sends the snapshots to a worker that lacks them. Returns the workers
    /// whose devices are held back for it.
    fn check_destinations(&self, id: LeaseId, lease: &Lease) -> BTreeSet<WorkerId> {
        let held_back = self.held_for(id);
        let workers: BTreeSet<_> = held_back.iter().map(|it| it.worker).collect();
        if !matches!(lease.standing, Standing::Resuming { .. }) {
            return BTreeSet::new();
        }
        let share = lease.share();
        let free = self.available(&|_| share, id);
        let is_there = |holder: &WorkerId| {
            let worker = &self.workers[holder.0 as usize];
            let is_connected = worker.known.as_ref().is_some_and(|known| known.connected);
            is_connected && !worker.unanswered.contains(&id)
        };
        let candidates = lease.parts.iter().map(|part| {
            let fits = |worker: &WorkerId| {
                let fitting = free.iter().filter(|free| {
                    free.worker == *worker && part.requirement.accepts(self.device(**free))
                });
                let ends = self.workers[worker.0 as usize].unanswered.contains(&id);
                let has_snapshots = part.holders.contains(worker)
                    || part.store.is_some() && part.store == store_of(*worker);
                let can_be_sent = part.holders.iter().any(is_there);
                let can_have =
                    has_snapshots || can_be_sent && !self.engine.is_avoided(lease, *worker);
                let is_excluded = self.engine.is_excluded(lease, *worker);
                !ends && fitting.count() >= part.devices && can_have && !is_excluded
            };
            let workers = self.workers.iter().map(|worker| WorkerId(worker.id));
            workers.filter(fits).collect()
        });
        let candidates: Vec<Vec<_>> = candidates.collect();
        let mut receivers = lease.keepers.values();
        if receivers.any(|keeper| self.is_away_briefly(keeper.worker)) {
            return workers;
        }
        if self.is_over_limit(lease) {
            // Its tenant may have got more since they were held back.
            let is_now = self.granted.is_empty();
            assert!(held_back.is_empty() || !is_now, "{id} may not go on now");
        } else if is_possible(&candidates) && !self.is_over_limit_with_requests(lease) {
            let needed: usize = lease.parts.iter().map(|part| part.devices).sum();
            assert_eq!(held_back.len(), needed, "{id} could go on elsewhere");
            let lacks = |part: &&SuspendedPart| {
                let mut with_snapshots = part
                    .holders
                    .iter()
                    .copied()
                    .chain(self.with_store(part.store));
                !with_snapshots.any(|it| workers.contains(&it))
            };
            let missing = lease.parts.iter().filter(lacks).count();
            assert!(
                missing == 0 || !lease.keepers.is_empty(),
                "{id} is not handed over"
            );
        }
        workers
    }

    /// A lease that was resumed can go on, or its holders have too few free devices, or its client is
    /// away.
    fn check_resuming(&self, id: LeaseId, lease: &Lease, free: &BTreeSet<DeviceRef>) {
        assert_eq!(lease.parts.is_empty(), !lease.is_suspended(), "{id}");
        let attached = |id: ClientId| self.clients.iter().any(|c| c.attached && c.id == id.0);
        let is_resumed = matches!(lease.standing, Standing::Resuming { .. });
        if !is_resumed || !lease.owner.is_some_and(attached) {
            return;
        }
        let can_go_on_at = |holder: &WorkerId, part: &SuspendedPart| {
            let fits = |free: &&DeviceRef| {
                free.worker == *holder && part.requirement.accepts(self.device(**free))
            };
            let ends = self.workers[holder.0 as usize].unanswered.contains(&id);
            let is_excluded = self.engine.is_excluded(lease, *holder);
            !ends && !is_excluded && free.iter().filter(fits).count() >= part.devices
        };
        let is_ending = |holder: &WorkerId| {
            let worker = &self.workers[holder.0 as usize];
            let known = worker.known.as_ref();
            known.is_some_and(|known| known.connected) && worker.unanswered.contains(&id)
        };
        let has_old_process = lease.parts.len() > 1 && lease.holders().iter().any(is_ending);
        let candidates = lease.parts.iter().map(|part| {
            let candidates = part
                .holders
                .iter()
                .copied()
                .chain(self.with_store(part.store));
            candidates.filter(|it| can_go_on_at(it, part)).collect()
        });
        let candidates: Vec<Vec<_>> = candidates.collect();
        let all_can = is_possible(&candidates);
        let is_over_limit = self.is_over_limit(lease) || self.is_over_limit_with_requests(lease);
        assert!(
            has_old_process || is_over_limit || !all_can,
            "{id} could go on"
        );
    }

    /// Only devices of workers that have its snapshots, or are to get them, are held back for a lease
    /// without devices: free ones, and fewer than it needs, unless its client is away, or it waits for
    /// snapshots.
    fn check_held_back(&self, id: LeaseId, lease: &Lease, free: &BTreeSet<DeviceRef>) {
        let held_back = self.held_for(id);
        let is_attached = self
            .clients
            .iter()
            .any(|client| client.attached && lease.owner == Some(ClientId(client.id)));
        let parts = lease.parts.iter().map(|part| part.devices);
        let needed = lease.lease_devices.len() + parts.sum::<usize>();
        let is_resumed = matches!(lease.standing, Standing::Resuming { .. });
        // Spot leases may have yet to make room of what is held back.
        let is_beside_spot = self.engine.has_spot() && !lease.is_spot;
        let can_be_all = !is_attached || is_resumed || is_beside_spot;
        let most = needed.saturating_sub(usize::from(!can_be_all));
        assert!(held_back.len() <= most, "{id}");
        for device_ref in held_back {
            let accepts = |it: &Requirement| it.accepts(self.device(device_ref));
            let parts = lease.parts.iter().map(|part| &part.requirement);
            let keepers = lease.keepers.values().map(|keeper| &keeper.requirement);
            let stored = lease.stored.values().map(|stored| &stored.requirement);
            let mut requirements = parts.chain(keepers).chain(stored);
            assert!(lease.standing != Standing::Running && requirements.any(accepts));
            let keepers = lease.keepers.values().map(|keeper| keeper.worker);
            let mut places = keepers.chain(lease.holders());
            let mut stores = lease.stored.values().map(|stored| stored.store);
            let worker = device_ref.worker;
            let has_snapshots = places.any(|it| it == worker)
                || stores.any(|store| store_of(worker) == Some(store));
            // Others can get them, unless spot leases are to make room.
            let is_free = free.contains(&device_ref) && (has_snapshots || is_resumed);
            assert!(is_free || is_beside_spot);
        }
    }

    /// Returns whether a worker has no stream since a moment. A handover to it need not begin anew, although
    /// its devices cannot be held back meanwhile.
    fn is_away_briefly(&self, worker: WorkerId) -> bool {
        let known = self.workers[worker.0 as usize].known.as_ref();
        known.is_some_and(|it| !it.connected && self.now - it.last_beat < 2_000)
    }

    /// Returns the devices that are held back for a lease, or of which shares are.
    fn held_for(&self, lease: LeaseId) -> Vec<DeviceRef> {
        let devices = self.engine.held_back().keys().copied();
        devices.filter(|it| self.is_held_for(lease, *it)).collect()
    }

    /// Returns whether a client knows already where a lease has gone on.
    pub(super) fn knows_move(&self, lease: LeaseId, epoch: u64) -> bool {
        let mut tokens = self.clients.iter().filter_map(|it| it.tokens.get(&lease));
        tokens.any(|token| token.epoch == epoch)
    }

    fn known_device(&self, device_ref: DeviceRef) -> Option<&DeviceSpec> {
        let worker = self.workers.iter();
        let worker = worker.filter(|worker| worker.id == device_ref.worker.0);
        let known = worker.filter_map(|worker| worker.known.as_ref()).next()?;
        known.devices.get(device_ref.index as usize)
    }
}

/// Returns whether each part of a lease has its devices, in order, at one of its holders, or at a worker
/// with its store, which loads the snapshots.
fn are_at_holders(
    devices: &[DeviceRef],
    parts: &[SuspendedPart],
    load_stored: &BTreeSet<WorkerId>,
) -> bool {
    let mut rest = devices;
    let mut is_at_holder = |part: &SuspendedPart| {
        let Some((here, others)) = rest.split_at_checked(part.devices) else {
            return false;
        };
        rest = others;
        let worker = here[0].worker;
        let has_snapshots = match load_stored.contains(&worker) {
            true => part.store.is_some() && part.store == store_of(worker),
            false => part.holders.contains(&worker),
        };
        has_snapshots && here.iter().all(|it| it.worker == worker)
    };
    parts.iter().all(&mut is_at_holder) && rest.is_empty()
}
