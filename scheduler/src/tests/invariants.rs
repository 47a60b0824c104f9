//! The invariants that must hold after every event. Where the engine computes a result, the
//! checks count or try all possibilities.

use std::collections::{BTreeMap, BTreeSet};

use super::reservation_model::RESERVE_AFTER;
use super::share_model::needs_of;
use super::world::{
    MAX_WAITING, MAX_WAITING_PER_CLIENT, SimLease, SimRequest, SimWorker, World, meets_demand,
    tenant_of,
};
use super::*;
use crate::lease::Standing;

impl World {
    pub(super) fn check_invariants(&self) {
        self.engine.check_indexes();
        self.check_workers();
        self.check_devices();
        self.check_sharing();
        self.check_ending();
        self.check_waiting();
        self.check_views();
        self.check_deadlines();
        self.check_keepers();
        self.check_charges();
        self.check_reclaims();
        self.check_guaranteed();
        self.check_room_is_held_back();
        self.check_reservations();
        self.check_spot();
        self.check_spot_for_leases();
        self.check_own_spot();
        self.check_idle();
        if let Some(expected) = &self.leases {
            let leases = self.engine.leases().iter().map(|(id, lease)| {
                (
                    id,
                    (
                        lease.owner.unwrap(),
                        lease.lease_devices.keys().copied().collect::<Vec<_>>(),
                    ),
                )
            });
            let expected = expected.iter().map(|(id, lease)| {
                (
                    *id,
                    (
                        ClientId(self.clients[lease.client].id),
                        lease.lease_devices.clone(),
                    ),
                )
            });
            assert_eq!(leases.collect::<BTreeMap<_, _>>(), expected.collect());
        }
    }

    /// The engine has exactly the expected workers.
    fn check_workers(&self) {
        let snapshot = self.snapshot.workers.iter().map(|worker| {
            let devices = worker.devices.iter().map(|device| device.device.clone());
            let devices: Vec<_> = devices.collect();
            let flags = (worker.connected, worker.draining);
            let last_beat = worker.last_beat.as_millis();
            (worker.worker.0, devices, flags, last_beat)
        });
        let expected = self.workers.iter().filter_map(|worker| {
            let known = worker.known.as_ref()?;
            let flags = (known.connected, known.is_draining());
            Some((worker.id, known.devices.clone(), flags, known.last_beat))
        });
        assert_eq!(snapshot.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        for worker in &self.snapshot.workers {
            let devices = worker.devices.iter();
            let leases = devices.flat_map(|device| device.leases.iter().map(|(lease, _)| *lease));
            assert_eq!(self.engine.leases_at(worker.worker), leases.collect());
            let named = self.engine.worker_named(&worker.name);
            assert_eq!(named, Some(worker.worker));
        }
    }

    /// Each leased device belongs to exactly one lease, and each device of a lease exists
    /// if its worker has joined.
    fn check_devices(&self) {
        let snapshot = &self.snapshot;
        assert_eq!(snapshot.leases, self.engine.leases().len());
        let mut leased = BTreeSet::new();
        let mut here = BTreeSet::new();
        for worker in &snapshot.workers {
            here.insert(worker.worker);
            for (index, device) in (0..).zip(&worker.devices) {
                let leases = device.leases.iter();
                let here = device_ref(worker.worker.0, index);
                leased.extend(leases.map(|(lease, share)| (here, *lease, *share)));
            }
        }
        for (id, lease) in self.engine.leases().iter() {
            assert_eq!(lease.lease_devices.is_empty(), lease.is_suspended(), "{id}");
            let known = lease.lease_devices.iter();
            for (device_ref, granted) in known.filter(|(it, _)| here.contains(&it.worker)) {
                assert!(
                    leased.remove(&(*device_ref, id, granted.share)),
                    "{device_ref:?} of {id} is leased twice, or not at all"
                );
            }
        }
        assert_eq!(leased, BTreeSet::new(), "leased, but to whom?");
    }

    /// A device that its worker has not released is ending, and not for ever: the worker
    /// has received `EndLease`, and the device is free once the worker has replied. The
    /// devices out of service are exactly the broken ones.
    fn check_ending(&self) {
        for worker in &self.snapshot.workers {
            let real = &self.workers[worker.worker.0 as usize];
            for (index, device) in (0..).zip(&worker.devices) {
                let is_busy = real.busy.iter().any(|(_, busy)| *busy == index);
                if worker.connected {
                    assert!(!is_busy || device.ending, "{index} of {}", real.id);
                    let is_broken = real.broken.contains(&index);
                    assert_eq!(device.out_of_service.is_some(), is_broken);
                }
                let is_asked = !worker.connected || !real.unanswered.is_empty();
                assert!(!device.ending || is_asked, "{index} of {}", real.id);
            }
        }
    }

    /// No pending request fits, can never fit, or has ended, and every client has received
    /// its current positions.
    fn check_waiting(&self) {
        assert_eq!(self.snapshot.waiting_requests, self.waiting.len());
        assert!(self.waiting.len() <= MAX_WAITING);
        for client in 0..self.clients.len() {
            let waiting = self
                .waiting
                .iter()
                .filter(|waiting| waiting.client == client);
            assert!(waiting.count() <= MAX_WAITING_PER_CLIENT);
        }
        let shown = self.engine.waiting_ids().into_iter();
        let shown = shown.map(|id| self.engine.waiting(id).expect("it waits"));
        let shown = shown.filter(|it| matches!(it.waiter, Waiter::Request { .. }));
        let shown: Vec<_> = shown.collect();
        assert_eq!(shown.len(), self.waiting.len());
        for (position, (index, is_guaranteed)) in (1..).zip(self.order.iter().copied()) {
            let waiting = &self.waiting[index];
            let (reported, reason) = waiting.reported.expect("it was reported");
            // Otherwise positions are reported with the next event that puts the requests in order.
            let is_ordered = !self.engine.is_past_newer_than_order();
            assert!(
                !is_ordered || reported == position,
                "{reported}, not {position}"
            );
            let wanted = waiting.demand.devices as usize;
            let free = self.grantable_to(waiting);
            let suitable = free.iter().map(|device_ref| self.device(*device_ref));
            let suitable = suitable.filter(|device| meets_demand(device, &waiting.demand));
            let allowed = suitable
                .clone()
                .filter(|device| self.is_allowed(waiting, device, true))
                .filter(|device| is_guaranteed || self.may_pass(waiting, device));
            let (fit, allowed) = (suitable.count(), allowed.count());
            let may_be_held_up = self.could_be_over_limit_with_others(waiting);
            let has_reason = allowed < wanted || may_be_held_up;
            assert!(has_reason, "{} waits, and fits", waiting.demand);
            let shown = &shown[position as usize - 1];
            assert_eq!(shown.lease, waiting.lease);
            assert_eq!(shown.needs[0].suitable.free, fit, "{}", waiting.demand);
            let offered = self.offered().filter(|device| {
                meets_demand(device, &waiting.demand) && self.is_allowed(waiting, device, true)
            });
            let is_at_limit = offered.count() < wanted || may_be_held_up && shown.is_at_limit;
            assert_eq!(shown.is_at_limit, is_at_limit, "{}", waiting.demand);
            let Waiter::Request {
                is_guaranteed: shown,
                has_reservation,
                reserved_for,
                ..
            } = shown.waiter
            else {
                panic!("{} is no request", waiting.lease);
            };
            assert_eq!(shown, is_guaranteed, "{}", waiting.demand);
            let expected = match (is_at_limit, is_guaranteed, has_reservation, reserved_for) {
                (true, ..) => WaitReason::TenantLimit,
                (_, true, ..) => WaitReason::Guaranteed,
                (.., true, _) => WaitReason::HasReservation,
                (.., Some(_)) => WaitReason::Reserved,
                _ => WaitReason::TooFewFree,
            };
            assert!(!waiting.is_reported_now || reason == expected, "{reason}");
            assert!(
                self.could_ever_fit(waiting),
                "{} waits in vain",
                waiting.demand
            );
        }
    }

    /// An attached client and the engine agree on the client's leases, and every session on
    /// a connected worker belongs to a lease.
    fn check_views(&self) {
        for client in self.clients.iter().filter(|client| client.attached) {
            let owned = self.engine.leases().owned_by(ClientId(client.id));
            assert_eq!(
                client.leases,
                owned.into_iter().collect(),
                "leases of {}",
                client.id
            );
        }
        for worker in &self.workers {
            if worker.known.as_ref().is_some_and(|known| known.connected) {
                for (lease, index) in &worker.held {
                    let known = self.engine.leases().get(*lease);
                    let rightly = known.is_some_and(|l| {
                        l.lease_devices.contains_key(&device_ref(worker.id, *index))
                    });
                    assert!(rightly, "{lease} runs on {}, device {index}", worker.id);
                }
            }
        }
    }

    /// A lease has a deadline exactly if its client or a worker is missing.
    fn check_deadlines(&self) {
        for (id, lease) in self.engine.leases().iter() {
            let attached = |id: ClientId| self.clients.iter().any(|c| c.attached && c.id == id.0);
            let client_here = lease.owner.is_some_and(attached);
            assert_eq!(lease.expires_at.is_none(), client_here, "{id}");
            let known = |id: WorkerId| {
                self.workers
                    .iter()
                    .any(|w| w.known.is_some() && w.id == id.0)
            };
            let workers_here = lease.workers().into_iter().all(known);
            let is_interrupted =
                matches!(lease.standing, Standing::Resuming { cause: Some(_), .. });
            let has_all = workers_here && !is_interrupted;
            assert_eq!(lease.rejoin_by.is_none(), has_all, "{id}");
        }
        if let Some(leases) = &self.leases {
            let away = self.workers.iter().filter_map(SimWorker::lost_at);
            let absent = leases.values().filter_map(|lease| lease.absent_since);
            let lost = leases.values().filter_map(|lease| lease.lost_until);
            let over = leases.values().filter_map(SimLease::time_over_at);
            let ends = absent.map(|since| since + 30_000).chain(lost).chain(over);
            let next = away.chain(ends).min();
            let reclaim_at = self.engine.reclaim_at().map(|at| at.as_millis());
            // Otherwise it would be done.
            assert!(reclaim_at.is_none_or(|at| at > self.now));
            let idle_at = self.engine.idle_at().map(|at| at.as_millis());
            assert!(idle_at.is_none_or(|at| at > self.now));
            let next = next.into_iter().chain(reclaim_at).chain(idle_at).min();
            assert_eq!(self.engine.next_deadline(), next.map(at));
        }
    }

    /// Once all workers and clients have gone, no state is left.
    pub(super) fn check_nothing_left(&self) {
        let snapshot = &self.snapshot;
        assert_eq!(
            (
                &snapshot.workers,
                snapshot.leases,
                snapshot.waiting_requests
            ),
            (&vec![], 0, 0)
        );
        assert_eq!(self.engine.attached_clients(), 0);
        assert_eq!(self.engine.leases().adoption_window().recorded(), (0, 0));
        assert_eq!(self.engine.next_deadline(), None);
    }
}

/// Checks of single commands.
impl World {
    /// No grant takes a device that is not free, and each grant uses as few workers as
    /// possible at that moment.
    pub(super) fn check_grants(&self, commands: &[Command]) {
        // Devices become free only before the first grant, so undoing the grants in reverse
        // order from the current free set gives the free set at each grant.
        let mut free = self.free();
        for command in commands.iter().rev() {
            let (request, devices) = match command {
                Command::Granted {
                    request, devices, ..
                } => (Some(request), devices),
                Command::Moved {
                    lease,
                    epoch,
                    devices,
                    ..
                } if !self.knows_move(*lease, *epoch) => (None, devices),
                _ => continue,
            };
            let taken: BTreeSet<_> = devices.iter().map(|device| device.device_ref).collect();
            assert_eq!(taken.len(), devices.len(), "a device twice in one lease");
            assert!(free.is_disjoint(&taken), "a device is free and leased");
            if devices.iter().any(|device| device.share.is_some()) {
                // It was free before if it is the first of those that share it now.
                let first = taken.iter().copied();
                let first = first.filter(|it| self.is_first_grant(commands, command, *it));
                free.extend(first);
                continue;
            }
            free.extend(taken.iter().copied());
            let Some(request) = request else {
                continue;
            };
            let waiting = self
                .waiting
                .iter()
                .find(|waiting| waiting.request == *request);
            let used: BTreeSet<_> = taken.iter().map(|device_ref| device_ref.worker).collect();
            let held_back = self.engine.held_back();
            let grantable = free.iter().filter(|free| !held_back.contains_key(free));
            let grantable: BTreeSet<_> = grantable.copied().collect();
            assert!(taken.is_subset(&grantable), "a device is held back");
            let waiting = waiting.unwrap();
            self.check_limit(waiting, &taken);
            let allowed = grantable.into_iter().filter(|device_ref| {
                // What else a tenant with a limit might have got at that moment is not known, nor is what was
                // reserved.
                let tenant = tenant_of(waiting.client);
                let mut others = self.waiting.iter();
                let is_due = others.any(|it| self.now >= it.since + RESERVE_AFTER);
                !(is_due || self.policy.contains_key(&tenant)) || taken.contains(device_ref)
            });
            let fewest = self.fewest_workers(&allowed.collect(), &waiting.demand);
            // Devices may have been held back then for a request before spot leases.
            let may_be_held = self.engine.has_spot_or_requests();
            assert!(may_be_held || Some(used.len() as u32) == fewest);
        }
    }

    /// Returns whether a device that leases share had none before a command has granted it.
    fn is_first_grant(&self, commands: &[Command], grant: &Command, device_ref: DeviceRef) -> bool {
        let later = commands.iter().skip_while(|command| *command != grant);
        let later = later.filter_map(|command| match command {
            Command::Granted { lease, devices, .. } | Command::Moved { lease, devices, .. } => {
                let mut devices = devices.iter();
                devices
                    .any(|it| it.device_ref == device_ref)
                    .then_some(*lease)
            }
            _ => None,
        });
        let is_ending = !self.engine.ending_shares(device_ref).is_empty();
        !is_ending && self.has_only(device_ref, &later.collect())
    }

    pub(super) fn check_refusal(&self, event: &Event, refused: usize, reason: &RefuseReason) {
        let waiting = &self.waiting[refused];
        // Excludes the refused request, which was never queued.
        let others = self.waiting.len() - 1;
        let of_client = self
            .waiting
            .iter()
            .filter(|other| other.client == waiting.client);
        match reason {
            RefuseReason::NoDevices => assert_eq!(waiting.demand.devices, 0),
            RefuseReason::Unsatisfiable { demand, .. } => {
                assert_eq!(*demand, waiting.demand);
                let offered = self.offered().filter(|it| meets_demand(it, demand));
                assert!(offered.count() < demand.devices as usize, "{demand}");
            }
            RefuseReason::TenantLimit { demand, limit } => {
                assert_eq!(*demand, waiting.demand);
                let policy = &self.policy[&tenant_of(waiting.client)];
                assert_eq!(*limit, policy.limit);
                assert!(!self.could_ever_fit(waiting), "{demand} could be granted");
            }
            RefuseReason::TenantQueueLimit { waiting: count } => {
                let tenant = tenant_of(waiting.client);
                let mut own = self.waiting.iter();
                let own = own.by_ref().filter(|it| tenant_of(it.client) == tenant);
                assert_eq!(own.count() - 1, *count);
                assert!(*count >= 3 * (MAX_WAITING - others));
            }
            RefuseReason::PoolLimit { max } => assert_eq!((*max, others), (MAX_WAITING, *max)),
            RefuseReason::ClientLimit { max } => {
                assert_eq!(
                    (*max, of_client.count() - 1),
                    (MAX_WAITING_PER_CLIENT, *max)
                );
            }
            RefuseReason::ByAdministrator => {
                let lease = waiting.lease;
                assert_eq!(*event, Event::EndLease { lease });
            }
            RefuseReason::Cancelled => {
                let cancelled = ClientEvent::Cancel {
                    request: waiting.request,
                };
                assert!(matches!(event, Event::Client { event, .. } if *event == cancelled));
            }
        }
    }

    /// Returns the devices that a lease could get now.
    pub(super) fn free(&self) -> BTreeSet<DeviceRef> {
        let workers = self.snapshot.workers.iter();
        let workers = workers.filter(|worker| worker.connected && !worker.draining);
        workers
            .flat_map(|worker| {
                let free = (0..).zip(&worker.devices).filter(|(_, device)| {
                    device.leases.is_empty() && !device.ending && device.out_of_service.is_none()
                });
                free.map(move |(index, _)| DeviceRef {
                    worker: worker.worker,
                    index,
                })
            })
            .collect()
    }

    /// Returns the devices that a request could get now.
    pub(super) fn grantable_to(&self, waiting: &SimRequest) -> BTreeSet<DeviceRef> {
        self.available(&needs_of(waiting), waiting.lease)
    }

    /// Returns whether a request could be granted if nothing were leased.
    fn could_ever_fit(&self, waiting: &SimRequest) -> bool {
        let fitting = self.offered().filter(|device| {
            meets_demand(device, &waiting.demand) && self.is_allowed(waiting, device, false)
        });
        fitting.count() >= waiting.demand.devices as usize
    }

    pub(super) fn device(&self, device_ref: DeviceRef) -> &DeviceSpec {
        let worker = self
            .workers
            .iter()
            .find(|worker| worker.id == device_ref.worker.0)
            .unwrap();
        &worker.known.as_ref().unwrap().devices[device_ref.index as usize]
    }

    /// Returns the size of the smallest set of workers that can meet the demand, by trying
    /// all sets.
    fn fewest_workers(&self, free: &BTreeSet<DeviceRef>, demand: &Demand) -> Option<u32> {
        let fit: Vec<_> = free
            .iter()
            .filter(|device_ref| meets_demand(self.device(**device_ref), demand))
            .collect();
        let enough = |set: &u32| {
            let in_set = |device_ref: &&&DeviceRef| set >> device_ref.worker.0 & 1 == 1;
            fit.iter().filter(in_set).count() >= demand.devices as usize
        };
        let sets = 0..1_u32 << self.workers.len();
        sets.filter(enough).map(u32::count_ones).min()
    }
}
