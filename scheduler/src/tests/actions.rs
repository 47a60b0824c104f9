//! Actions of workers and clients in the simulated world, with the effect that each must
//! have on the scheduler.

use super::records::NEEDS_16_GIB;
use super::world::{
    KnownWorker, SimLease, SimRequest, SimWorker, World, can_replace, engine_at, store_of,
    tenant_of,
};
use super::*;
use crate::lease::{Keeper, KeptHere, Lease, SuspendedPart};

/// The records that a scheduler finds after a restart.
#[derive(Clone, Copy, Debug)]
pub(super) enum KeptRecords {
    /// All of them.
    All,
    /// Those from before the last event.
    Earlier,
    /// None.
    None,
}

impl World {
    pub(super) fn join(&mut self, i: usize, devices: Vec<DeviceSpec>) {
        let (stream, now) = (self.number(), self.now);
        let worker = &mut self.workers[i];
        worker.old_stream = std::mem::replace(&mut worker.stream, stream);
        let known_before = worker.known.take();
        let known = known_before.filter(|known| known.devices == devices);
        let drained = known.as_ref().is_some_and(|known| known.drained);
        let (is_new, leaving) = (known.is_none(), known.is_some_and(|known| known.leaving));
        let devices_known = devices.clone();
        let known = KnownWorker {
            devices: devices_known,
            connected: true,
            leaving,
            drained,
            last_beat: now,
        };
        let last_devices = std::mem::replace(&mut worker.last_devices, devices.clone());
        if self.leases.is_none() && !last_devices.is_empty() && last_devices != devices {
            let id = WorkerId(worker.id);
            let tokens = self
                .clients
                .iter_mut()
                .flat_map(|it| it.tokens.values_mut());
            for token in tokens {
                token.has_changed |= token.lease_devices.iter().any(|it| it.worker == id);
            }
        }
        worker.known = Some(known);
        worker.not_lost_before = 0;
        worker.idle.clear();
        let registration = Registration {
            endpoint: endpoint(worker.id),
            devices,
            store: store_of(WorkerId(worker.id)),
        };
        let held = |(uses, ended): (&BTreeSet<(LeaseId, u32)>, bool)| {
            let held = uses.iter().map(|&(lease, index)| HeldDevice {
                lease,
                index,
                grant: self.grants[&(lease, device_ref(worker.id, index))],
                ended,
                share: self
                    .shares
                    .get(&(lease, device_ref(worker.id, index)))
                    .copied(),
            });
            held.collect::<Vec<_>>()
        };
        let held = [(&worker.held, false), (&worker.busy, true)].map(held);
        let ended = worker.ended.iter();
        let ended = ended.map(|(&(index, lane), &grant)| DeviceGrant { index, lane, grant });
        let ended = ended.collect();
        worker.unanswered.clear();
        let out_of_service = worker.outages();
        if is_new {
            self.lose_leases_of(i);
        }
        self.resume_lost_leases_of(i);
        let join = WorkerEvent::Join {
            registration,
            held: held.concat(),
            ended,
            suspended: Vec::new(),
            out_of_service,
            leaving: false,
        };
        self.send_worker(i, join);
    }

    /// A worker joins and reports, on a device that no lease has or uses, a lease with the id of a request that waits. It
    /// ends that when it is told to.
    pub(super) fn join_falsely(&mut self, i: usize, devices: Vec<DeviceSpec>, nth: usize) {
        let waiting = self.waiting.get(nth % self.waiting.len().max(1));
        let worker = &self.workers[i];
        let uses = worker.held.iter().chain(&worker.busy);
        let mut used: BTreeSet<_> = uses.map(|(_, index)| *index).collect();
        // A false number would end the grant of a lease whose sessions have been closed.
        let leases = self.engine.leases().iter();
        let leased = leases.flat_map(|(_, lease)| lease.lease_devices.keys());
        let its = leased.filter(|device_ref| device_ref.worker.0 == worker.id);
        used.extend(its.map(|device_ref| device_ref.index));
        let mut unused = (0..devices.len() as u32).filter(|index| !used.contains(index));
        if let (Some(waiting), Some(index)) = (waiting, unused.next()) {
            let at = device_ref(worker.id, index);
            let latest = self.latest.get(&at).copied().unwrap_or_default();
            let lease = waiting.lease;
            self.grants.insert((lease, at), latest.next().unwrap());
            self.shares.remove(&(lease, at));
            self.workers[i].held.insert((lease, index));
        }
        self.join(i, devices);
        self.finish(i, |_| true);
    }

    pub(super) fn beat(&mut self, i: usize) {
        if let Some(known) = self.workers[i]
            .known
            .as_mut()
            .filter(|known| known.connected)
        {
            known.last_beat = self.now;
        }
        self.send_worker(i, WorkerEvent::Heartbeat);
    }

    /// A worker reports that the keepers of its leases have the snapshots of all leases, or of
    /// none.
    pub(super) fn snapshots_kept(&mut self, i: usize, all: bool) {
        let leases = || self.engine.leases().iter().filter(|_| all);
        let at_keepers = leases().flat_map(|(id, lease)| {
            let keepers = lease.keepers.values();
            keepers.map(move |keeper| keeper.assigned(id))
        });
        // Some worker has no room for some lease.
        let here = leases().map(|(id, _)| (id, !(id.0 + i as u64).is_multiple_of(5)));
        // And a store lacks some snapshot.
        let in_store = leases().filter(|(id, _)| !(id.0 + i as u64).is_multiple_of(3));
        let in_store: BTreeSet<_> = in_store.map(|(id, _)| id).collect();
        let suspended = self.engine.leases().iter();
        let suspended = suspended.filter(|(_, lease)| lease.is_suspended());
        let handed_over = suspended.flat_map(|(lease, known)| {
            known.keepers.values().map(move |keeper| HandedOver {
                to: keeper.assigned(lease),
                outcome: match all {
                    true => HandoverOutcome::Done,
                    false => HandoverOutcome::Failed,
                },
            })
        });
        let running = self.engine.leases().iter().filter(|_| !all);
        let running = running.filter(|(_, lease)| !lease.is_suspended());
        // Some worker has no room for some lease.
        let refused = running.flat_map(|(lease, known)| {
            let keepers = known.keepers.values();
            let refusing = keepers.filter(move |it| (lease.0 + it.worker.0).is_multiple_of(4));
            refusing.map(move |keeper| keeper.assigned(lease))
        });
        let kept = WorkerEvent::SnapshotsKept {
            refused: refused.collect(),
            handed_over: handed_over.collect(),
            at_keepers: at_keepers.collect(),
            here: here.collect(),
            in_store: in_store.clone(),
        };
        // A lease may go on in the same event at the worker that has got its snapshots, or at one that loads them.
        let source = WorkerId(self.workers[i].id);
        let known = self.workers[i].known.as_ref();
        let is_connected = known.is_some_and(|known| known.connected);
        for (id, lease) in self.leases.iter_mut().flatten().filter(|_| all) {
            if is_connected && lease.lease_devices.iter().any(|it| it.worker == source) {
                let store = store_of(source).filter(|_| in_store.contains(id));
                lease.stored.remove(&source);
                lease.stored.extend(store.map(|store| (source, store)));
            }
            let known = self.engine.leases().get(*id);
            let keeper = known.and_then(|known| known.keepers.get(&source));
            if let Some(keeper) = keeper.filter(|_| lease.is_suspended) {
                let part = lease.parts.get_mut(keeper.part as usize);
                part.unwrap().holders.push(keeper.worker);
            }
        }
        self.send_worker(i, kept);
    }

    /// Workers report that all snapshots are kept, and clients that they could go on from these.
    pub(super) fn all_kept(&mut self) {
        for i in 0..self.clients.len() {
            for lease in self.clients[i].leases.clone() {
                let is_restorable = true;
                let restorable = ClientEvent::Restorable {
                    lease,
                    is_restorable,
                };
                self.send_client(i, restorable);
            }
        }
        for i in 0..self.workers.len() {
            self.snapshots_kept(i, true);
        }
    }

    /// The processes of a worker die that run leases of several workers.
    pub(super) fn interrupt(&mut self, i: usize) {
        let here = WorkerId(self.workers[i].id);
        let is_connected = |known: &KnownWorker| known.connected;
        if !self.workers[i].known.as_ref().is_some_and(is_connected) {
            return;
        }
        let leases = self.engine.leases().iter();
        let interrupted = leases.filter(|(_, lease)| {
            let workers = lease.workers();
            workers.len() > 1 && workers.contains(&here)
        });
        let interrupted: Vec<_> = interrupted.map(|(id, _)| id).collect();
        let is_connected = |worker: WorkerId| {
            let known = self.workers[worker.0 as usize].known.as_ref();
            known.is_some_and(|known| known.connected)
        };
        let mut leases = self.leases.take();
        for id in &interrupted {
            let known = self.engine.leases().get(*id).unwrap();
            let is_known = |worker: WorkerId| {
                let has_reported = worker == here || known.kept_at.contains_key(&worker);
                is_connected(worker) && has_reported
            };
            let all_known = known.workers().into_iter().all(is_known);
            let since = known.interrupted_at.unwrap_or(at(self.now));
            let is_over = at(self.now).saturating_since(since) >= Duration::from_secs(3);
            let parts = self.parts_with_snapshots(known, None, Some(here));
            let goes_on = all_known && parts.is_some();
            let Some(leases) = &mut leases else {
                continue;
            };
            if goes_on {
                leases
                    .get_mut(id)
                    .unwrap()
                    .suspend_until(self.now, self.now + 3_600_000);
            } else if is_over && (all_known || !known.durability.is_durable()) {
                leases.remove(id);
            }
        }
        self.leases = leases;
        let leases = interrupted.into_iter().map(|id| (id, "it died".into()));
        let leases = leases.collect();
        self.send_worker(i, WorkerEvent::Interrupted { leases });
    }

    /// Returns the parts of a lease that runs, if the snapshots of each are in a store or at a worker that
    /// stays, and that is not `gone`. The worker where a process has `died` has those of its part.
    fn parts_with_snapshots(
        &self,
        lease: &Lease,
        gone: Option<WorkerId>,
        died: Option<WorkerId>,
    ) -> Option<Vec<SuspendedPart>> {
        let known = |worker: WorkerId| self.workers[worker.0 as usize].known.as_ref();
        let stays = |worker: WorkerId| {
            Some(worker) != gone && known(worker).is_some_and(|known| !known.is_draining())
        };
        let device = |device_ref: &DeviceRef| {
            let devices = &known(device_ref.worker)?.devices;
            devices.get(device_ref.index as usize)
        };
        let is_like = |first: &DeviceRef, other: &DeviceRef| {
            let devices = device(first).zip(device(other));
            devices.is_some_and(|(own, other)| can_replace(lease.durability, own, other))
        };
        let part = |(source, devices): (WorkerId, Vec<DeviceRef>)| {
            let keeper = lease.keepers.get(&source);
            let store = lease.stored.get(&source).map(|stored| stored.store);
            let lacks = lease.kept_at.get(&source) == Some(&KeptHere::Lacking);
            let is_kept = stays(source) && (Some(source) == died || !lacks);
            let is_connected = |id: WorkerId| known(id).is_some_and(|known| known.connected);
            let at_keeper = keeper.and_then(Keeper::with_snapshots);
            let at_keeper = at_keeper.filter(|it| stays(*it) && is_connected(*it));
            let own = is_kept.then_some(source).into_iter();
            let is_known = keeper.is_some()
                || store.is_some()
                || devices.iter().all(|it| is_like(&devices[0], it));
            is_known.then(|| SuspendedPart {
                source,
                devices: devices.len(),
                // The world takes it from the engine.
                requirement: NEEDS_16_GIB,
                holders: own.chain(at_keeper).collect(),
                store,
            })
        };
        let parts = lease.devices_by_worker().into_iter().map(part);
        let parts = parts.collect::<Option<Vec<_>>>()?;
        (lease.durability.is_durable() && can_go_on(&parts)).then_some(parts)
    }

    /// A lease on several workers is suspended, as one of these drains or cannot be reached.
    pub(super) fn suspend_for_worker(&mut self, id: LeaseId) {
        let until = self.now + 3_600_000;
        let leases = self.leases.as_mut();
        let lease = leases.and_then(|leases| leases.get_mut(&id));
        if let Some(lease) = lease.filter(|lease| !lease.is_suspended) {
            let first = lease.lease_devices[0].worker;
            let is_good = |it: &DeviceRef| {
                let known = self.workers[it.worker.0 as usize].known.as_ref();
                known.is_some_and(|known| known.connected && !known.is_draining())
            };
            assert!(lease.lease_devices.iter().any(|it| it.worker != first));
            assert!(
                !lease.lease_devices.iter().all(is_good),
                "{id} had all its workers"
            );
            lease.suspend_until(self.now, until);
        }
    }

    /// A lease whose worker was lost waits for that worker no more, as there are devices elsewhere.
    pub(super) fn leave_lost_worker(&mut self, id: LeaseId) {
        let leases = self.leases.as_mut();
        let lease = leases.and_then(|leases| leases.get_mut(&id));
        let lost_until = lease.as_ref().and_then(|lease| lease.lost_until);
        if let (Some(lease), Some(until)) = (lease, lost_until) {
            lease.suspend_until(self.now, until);
        }
    }

    pub(super) fn leaving(&mut self, i: usize) {
        if let Some(known) = self.workers[i]
            .known
            .as_mut()
            .filter(|known| known.connected)
        {
            known.leaving = true;
        }
        self.send_worker(i, WorkerEvent::Leaving);
    }

    /// An administrator drains a worker, or no longer.
    pub(super) fn drain(&mut self, i: usize, is_drained: bool) {
        let worker = WorkerId(self.workers[i].id);
        if let Some(known) = &mut self.workers[i].known {
            known.drained = is_drained;
        }
        self.send(Event::Drain { worker, is_drained });
    }

    /// Returns a lease that was granted at some time, to any client, or one that never was if there
    /// is none.
    fn lease_of_any_client(&self, nth: usize) -> LeaseId {
        let leases = self.clients.iter().flat_map(|client| client.tokens.keys());
        let leases: Vec<_> = leases.copied().collect();
        let lease = leases.get(nth % leases.len().max(1)).copied();
        lease.unwrap_or(LeaseId(0))
    }

    /// An administrator moves a lease that was granted at some time.
    pub(super) fn move_lease_by_command(&mut self, nth: usize) {
        let lease = self.lease_of_any_client(nth);
        self.commanded = Some(lease);
        self.send(Event::MoveLease { lease });
        self.commanded = None;
    }

    /// An administrator or the client suspends a lease that was granted at some time.
    pub(super) fn suspend_lease(&mut self, nth: usize, by: Suspender) {
        let lease = self.lease_of_any_client(nth);
        let is_possible = self.engine.check_suspend(lease, by).is_ok();
        let known = self
            .leases
            .as_mut()
            .and_then(|leases| leases.get_mut(&lease));
        if let Some(known) = known.filter(|_| is_possible) {
            known.lose_devices(self.now);
            known.is_suspended = true;
        }
        self.send(Event::SuspendLease { lease, by });
    }

    /// An administrator ends a lease that was granted at some time, or refuses a request that waits.
    pub(super) fn end_lease(&mut self, nth: usize) {
        let waiting = self.waiting.get(nth).map(|waiting| waiting.lease);
        let lease = waiting.unwrap_or_else(|| self.lease_of_any_client(nth));
        if let Some(leases) = &mut self.leases {
            leases.remove(&lease);
        }
        self.send(Event::EndLease { lease });
    }

    /// An administrator changes the priority of a request that waits.
    pub(super) fn set_priority(&mut self, nth: usize, priority: i32) {
        let waiting = self.waiting.get_mut(nth);
        let lease = waiting.map_or(LeaseId(0), |waiting| {
            waiting.priority = priority;
            waiting.lease
        });
        self.send(Event::SetPriority { lease, priority });
    }

    /// An administrator or the client resumes a lease that was granted at some time.
    pub(super) fn resume_lease(&mut self, nth: usize, by: Suspender) {
        let lease = self.lease_of_any_client(nth);
        self.send(Event::ResumeLease { lease, by });
    }

    pub(super) fn worker_left(&mut self, i: usize) {
        let known = &mut self.workers[i].known;
        if known.as_ref().is_some_and(|known| known.connected) {
            *known = None;
            self.lose_leases_of(i);
        }
        self.send_worker(i, WorkerEvent::Left);
    }

    pub(super) fn worker_disconnected(&mut self, i: usize) {
        if let Some(known) = &mut self.workers[i].known {
            known.connected = false;
        }
        self.send_worker(i, WorkerEvent::Disconnected);
    }

    /// A worker finishes ending leases on some devices, and reports so if it is connected.
    pub(super) fn finish(&mut self, i: usize, devices: impl Fn(u32) -> bool) {
        let worker = &mut self.workers[i];
        let is_connected = worker.known.as_ref().is_some_and(|known| known.connected);
        let reported = match is_connected {
            true => worker.unanswered.clone(),
            false => BTreeSet::new(),
        };
        let is_over = |(of, index): &(LeaseId, u32)| !reported.contains(of) && devices(*index);
        worker.busy.retain(|it| !is_over(it));
        for lease in reported.iter().copied() {
            let worker = &mut self.workers[i];
            // The engine knows nothing of the leases that are reported later.
            let is_over = |(of, index): &(LeaseId, u32)| *of == lease && devices(*index);
            worker.busy.retain(|it| !is_over(it));
            let busy = worker.busy.iter().filter(|(of, _)| *of == lease);
            let busy: BTreeSet<_> = busy.map(|(_, index)| *index).collect();
            if busy.is_empty() {
                worker.unanswered.remove(&lease);
            }
            self.send_worker(i, WorkerEvent::Released { lease, busy });
        }
    }

    /// Toggles a device between broken and working.
    pub(super) fn toggle_broken(&mut self, i: usize, device: u32) {
        let worker = &mut self.workers[i];
        if !worker.broken.insert(device) {
            worker.broken.remove(&device);
        }
        let devices = worker.outages();
        self.send_worker(i, WorkerEvent::OutOfService { devices });
    }

    /// Ends all sessions on a worker, as when clients close them.
    pub(super) fn close_sessions(&mut self, i: usize) {
        self.workers[i].held.clear();
    }

    /// Attaches a client with its leases, without the first `give_up`, and with `outdated`
    /// tokens that may be of leases that have ended.
    pub(super) fn attach(&mut self, i: usize, give_up: usize, outdated: usize) {
        let stream = self.number();
        let client = &mut self.clients[i];
        client.attached = true;
        client.old_stream = std::mem::replace(&mut client.stream, stream);
        let outdated = client.tokens.keys().rev().take(outdated).copied();
        client.leases = client
            .leases
            .iter()
            .skip(give_up)
            .copied()
            .chain(outdated)
            .collect();
        let claims = client.leases.iter().map(|&lease| {
            let token = &client.tokens[&lease];
            let lease_devices = token.lease_devices.iter().map(|&device_ref| GrantedDevice {
                device_ref,
                grant: self.grants[&(lease, device_ref)],
                share: self.shares.get(&(lease, device_ref)).copied(),
            });
            Claim {
                lease,
                lease_devices: lease_devices.collect(),
                durability: token.durability,
                epoch: token.epoch,
                time_left: None,
                is_spot: false,
                may_end: false,
            }
        });
        let claims = claims.collect();
        for (id, lease) in self
            .leases
            .iter_mut()
            .flatten()
            .filter(|(_, lease)| lease.client == i)
        {
            if client.leases.contains(id) {
                lease.absent_since = None;
            }
        }
        if let Some(leases) = &mut self.leases {
            leases.retain(|id, lease| lease.client != i || client.leases.contains(id));
        }
        self.waiting.retain(|waiting| waiting.client != i);
        self.send_client(
            i,
            ClientEvent::Attach {
                tenant: tenant_of(i),
                claims,
            },
        );
    }

    pub(super) fn client_disconnected(&mut self, i: usize) {
        let was_attached = std::mem::take(&mut self.clients[i].attached);
        for lease in self
            .leases
            .iter_mut()
            .flat_map(|leases| leases.values_mut())
        {
            if was_attached && lease.client == i {
                lease.absent_since = Some(self.now);
            }
        }
        self.waiting.retain(|waiting| waiting.client != i);
        self.send_client(i, ClientEvent::Disconnected);
    }

    pub(super) fn request(&mut self, i: usize, demand: Demand, priority: i32) {
        let (request, lease) = (RequestId(self.number()), LeaseId(self.number()));
        if self.clients[i].attached {
            let demand = demand.clone();
            self.waiting.push(SimRequest {
                client: i,
                request,
                lease,
                demand,
                priority,
                since: self.now,
                reported: None,
                is_reported_now: false,
            });
        }
        self.send_client(
            i,
            ClientEvent::Request {
                request,
                demand,
                priority,
                lease,
            },
        );
    }

    /// Changes the guarantees, limits and weights of the tenants.
    pub(super) fn set_policy(&mut self, policy: Policy) {
        self.policy.clone_from(&policy);
        self.send(Event::SetPolicy { policy });
    }

    /// Repeats a pending request, as a client may that is not sure whether it was received.
    pub(super) fn request_again(&mut self, i: usize) {
        if let Some(waiting) = self.waiting.iter().find(|waiting| waiting.client == i) {
            let (request, demand) = (waiting.request, waiting.demand.clone());
            let priority = waiting.priority;
            let lease = LeaseId(self.number());
            self.send_client(
                i,
                ClientEvent::Request {
                    request,
                    demand,
                    priority,
                    lease,
                },
            );
        }
    }

    /// Cancels a pending request, perhaps another client's.
    pub(super) fn cancel(&mut self, i: usize, nth: usize) {
        let request = match self.waiting.get(nth % self.waiting.len().max(1)) {
            Some(waiting) => waiting.request,
            None => RequestId(0),
        };
        self.send_client(i, ClientEvent::Cancel { request });
        assert!(
            !self.clients[i].attached
                || !self
                    .waiting
                    .iter()
                    .any(|w| w.client == i && w.request == request),
            "a request waits although it was cancelled",
        );
    }

    /// Reports whether a lease could go on from snapshots, perhaps another client's.
    pub(super) fn report_restorable(&mut self, i: usize, nth: usize, is_restorable: bool) {
        let event = ClientEvent::Restorable {
            lease: self.lease_of_any_client(nth),
            is_restorable,
        };
        self.send_client(i, event);
    }

    /// The client of a lease on several workers, or one of these, reports for some time that it cannot reach one.
    pub(super) fn report_missing(&mut self, nth: usize, which: usize, by: Option<usize>) {
        let lease = self.lease_of_any_client(nth);
        for _ in 0..6 {
            let known = self.engine.leases().get(lease);
            let workers = known
                .map(|it| Vec::from_iter(it.workers()))
                .unwrap_or_default();
            let owner = known.and_then(|it| it.owner);
            if workers.len() < 2 {
                return;
            }
            let worker = workers[which % workers.len()];
            let by = by.map(|by| workers[by % workers.len()]);
            let now = self.now;
            let (since, latest) = self
                .missing
                .entry((lease, by, worker))
                .or_insert((now, now));
            if now - *latest > 2_000 {
                *since = now;
            }
            *latest = now;
            match by {
                Some(by) => {
                    let missing = vec![(lease, worker)];
                    self.send_worker(by.0 as usize, WorkerEvent::PeersMissing { missing });
                }
                None => {
                    let client = self
                        .clients
                        .iter()
                        .position(|it| Some(ClientId(it.id)) == owner);
                    let worker = Some(worker);
                    let event = ClientEvent::Unreachable { lease, worker };
                    client
                        .into_iter()
                        .for_each(|client| self.send_client(client, event.clone()));
                }
            }
            self.wait(2_000);
        }
    }

    /// A lease on several workers is suspended, as one of these, or its client, could not reach a worker for long.
    pub(super) fn suspend_as_missed(
        &mut self,
        id: LeaseId,
        by: Option<WorkerId>,
        worker: WorkerId,
    ) {
        let leases = self.leases.as_mut();
        let lease = leases.and_then(|leases| leases.get_mut(&id));
        // A client that attaches learns again that its lease is suspended.
        if let Some(lease) = lease.filter(|lease| !lease.is_suspended) {
            let (since, latest) = self.missing[&(id, by, worker)];
            assert!(
                latest == self.now && latest - since >= 10_000,
                "{id} could go on"
            );
            lease.suspend_until(self.now, self.now + 3_600_000);
            self.apart.push((id, by, worker, self.now + 600_000));
        }
    }

    /// A lease does not go on at workers that cannot reach each other, or that its client cannot reach.
    pub(super) fn check_apart(&self, id: LeaseId, devices: &[LeasedDevice]) {
        let is_at = |worker| devices.iter().any(|it| it.device_ref.worker == worker);
        for (lease, by, worker, until) in &self.apart {
            let is_past = *lease != id || *until <= self.now;
            let all = is_at(*worker) && by.is_none_or(is_at);
            assert!(is_past || !all, "{id} goes on at {worker}");
        }
    }

    /// Reports that the worker of a lease cannot be reached, perhaps of another client's.
    pub(super) fn report_unreachable(&mut self, i: usize, nth: usize) {
        let lease = self.lease_of_any_client(nth);
        let now = self.now;
        let (since, latest) = self.reports.entry((i, lease)).or_insert((now, now));
        if now - *latest > 2_000 {
            *since = now;
        }
        *latest = now;
        self.send_client(
            i,
            ClientEvent::Unreachable {
                lease,
                worker: None,
            },
        );
    }

    /// Releases a lease that was granted at some time, perhaps to another client.
    pub(super) fn release(&mut self, i: usize, nth: usize) {
        let lease = self.lease_of_any_client(nth);
        if self.clients[i].attached {
            self.clients[i].leases.remove(&lease);
            if let Some(leases) = &mut self.leases {
                leases.retain(|id, held| *id != lease || held.client != i);
            }
        }
        self.send_client(i, ClientEvent::Release { lease });
    }

    /// Advances the time, with a tick at each deadline.
    pub(super) fn wait(&mut self, millis: u64) {
        let until = self.now + millis;
        while let Some(deadline) = self
            .engine
            .next_deadline()
            .filter(|next| *next <= at(until))
        {
            self.now = self.now.max(deadline.as_millis());
            self.tick();
            assert_ne!(
                self.engine.next_deadline(),
                Some(deadline),
                "a deadline that stays"
            );
        }
        self.now = until;
    }

    /// Advances the time with a single tick at the end, as if the driver was late.
    pub(super) fn oversleep(&mut self, millis: u64) {
        self.now += millis;
        self.tick();
    }

    /// Suspends the scheduler for a while, and reports the gap to the engine.
    pub(super) fn suspend(&mut self, millis: u64) {
        let since = at(self.now);
        self.now += millis;
        for worker in self.workers.iter_mut().filter(|w| w.known.is_some()) {
            worker.not_lost_before = self.now + 30_000;
        }
        for lease in self
            .leases
            .iter_mut()
            .flat_map(|leases| leases.values_mut())
        {
            lease.absent_since = lease.absent_since.map(|_| self.now);
            lease.lost_until = lease.lost_until.map(|at| at.max(self.now + 30_000));
        }
        self.send(Event::Gap { since });
    }

    fn tick(&mut self) {
        for i in 0..self.workers.len() {
            let lost_at = self.workers[i].lost_at();
            let known = &mut self.workers[i].known;
            if lost_at.is_some_and(|at| at <= self.now) {
                *known = None;
                self.lose_leases_of(i);
            }
        }
        let now = self.now;
        if let Some(leases) = &mut self.leases {
            leases.retain(|_, lease| {
                let absent_until = lease.absent_since.map(|since| since + 30_000);
                let mut ends = absent_until.into_iter().chain(lease.lost_until);
                ends.all(|at| now < at)
            });
        }
        self.send(Event::Tick);
    }

    /// Restarts the scheduler, which then has `kept` of its records. Workers and clients lose their
    /// streams and keep everything else, except for the sessions if `sessions_closed`.
    pub(super) fn restart(&mut self, sessions_closed: bool, kept: KeptRecords) {
        self.term += 1;
        self.engine = engine_at(self.now, self.term);
        match kept {
            KeptRecords::All => {}
            KeptRecords::Earlier => self.records.clone_from(&self.earlier_records),
            KeptRecords::None => self.records.clear(),
        }
        self.engine.restore(self.records.clone());
        let policy = self.policy.clone();
        self.engine
            .handle(Event::SetPolicy { policy }, at(self.now));
        self.snapshot = self.engine.snapshot();
        self.order.clear();
        self.reserved.clear();
        self.leases = None;
        self.waiting.clear();
        for worker in &mut self.workers {
            worker.known = None;
            worker.unanswered.clear();
            if sessions_closed {
                worker.held.clear();
                worker.busy.clear();
            }
        }
        for client in &mut self.clients {
            client.attached = false;
        }
    }

    /// A worker is lost or has left: its leases end, except for those whose snapshots another worker
    /// keeps, and so do leases that waited for it.
    fn lose_leases_of(&mut self, i: usize) {
        let id = WorkerId(self.workers[i].id);
        let lost_until = self.now + 3_600_000;
        let Some(mut leases) = self.leases.take() else {
            return;
        };
        leases.retain(|lease_id, lease| {
            let mut devices = lease.lease_devices.iter();
            let is_its = devices.any(|device_ref| device_ref.worker == id);
            let is_on_several = lease.lease_devices.iter().any(|it| it.worker != id);
            if lease.is_suspended {
                for part in &mut lease.parts {
                    part.holders.retain(|holder| *holder != id);
                }
                return can_go_on(&lease.parts);
            }
            if is_its && is_on_several {
                let known = self.engine.leases().get(*lease_id).unwrap();
                let parts = self.parts_with_snapshots(known, Some(id), None);
                lease.suspend_until(self.now, lost_until);
                // Another of these workers may be lost at the same time.
                lease.parts = parts.clone().unwrap_or_default();
                return parts.is_some();
            }
            for keeper in lease.keepers.values_mut() {
                keeper.previous = keeper.previous.filter(|previous| *previous != id);
                let is_lost = is_its && lease.lost_until.is_none();
                // The lease goes on where its snapshots are, and not where they were to be.
                if let Some(previous) = keeper.previous.take_if(|_| is_lost) {
                    keeper.worker = previous;
                }
            }
            if lease.keepers.values().any(|keeper| keeper.worker == id) {
                lease.keepers.retain(|_, keeper| keeper.worker != id);
                // The worker may keep the snapshots of one lease, and run another one.
                return lease.lost_until.is_none() || !lease.stored.is_empty();
            }
            if is_its && lease.lost_until.is_none() {
                lease.lost_until = Some(lost_until);
                return !lease.keepers.is_empty() || !lease.stored.is_empty();
            }
            true
        });
        self.leases = Some(leases);
    }

    /// A worker is back: leases that were lost with it go on there, if it still has such a device.
    fn resume_lost_leases_of(&mut self, i: usize) {
        let id = WorkerId(self.workers[i].id);
        let devices = &self.workers[i].known.as_ref().unwrap().devices;
        if let Some(leases) = &mut self.leases {
            leases.retain(|_, lease| {
                let first = lease.lease_devices.first();
                let is_its = first.is_some_and(|device_ref| device_ref.worker == id)
                    && lease.lost_until.is_some();
                if is_its {
                    lease.lost_until = None;
                }
                let own = lease.lease_devices.iter();
                let own = own.map(|device_ref| devices.get(device_ref.index as usize));
                let is_equal = |device: &&DeviceSpec| {
                    device.memory_bytes >= lease.memory_bytes
                        && (device.takes_shares || !lease.has_share)
                        && can_replace(lease.durability, &lease.granted[0], device)
                };
                let equal: Vec<_> = own.flatten().filter(is_equal).collect();
                let has_all = equal.len() == lease.lease_devices.len();
                if is_its && has_all && !lease.has_share {
                    // The sessions may use what the devices have now.
                    let memory_bytes = equal.iter().map(|device| device.memory_bytes);
                    lease.memory_bytes = memory_bytes.min().unwrap_or_default();
                }
                !is_its || has_all
            });
        }
    }
}

/// Returns whether each part of a lease is in a store, or at a worker.
fn can_go_on(parts: &[SuspendedPart]) -> bool {
    let mut lost = parts.iter();
    !lost.any(|part| part.store.is_none() && part.holders.is_empty())
}

impl SimLease {
    /// Something has happened to a lease that does not end for it, if it goes on by then.
    fn suspend_until(&mut self, now: u64, until: u64) {
        self.lose_devices(now);
        self.is_suspended = true;
        self.lost_until = Some(until);
    }
}

impl SimWorker {
    /// Returns the devices that the worker reports as out of service.
    fn outages(&self) -> Outages {
        let broken = self.broken.iter();
        broken.map(|index| (*index, "broken".into())).collect()
    }
}
