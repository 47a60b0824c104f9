//! Workers in the driver: joins, messages, commands and ends of streams.

use std::{collections::BTreeSet, sync::Arc};

use tensord_proto::{
    ids::{LeaseId, PartId, WorkerId},
    share::WHOLE_PERMILLE,
    v1::{
        DeviceUsage, Error, ErrorCode, Heartbeat, WorkerCommand, WorkerMessage,
        worker_message::Body,
    },
};
use tensord_scheduler::{DeviceGrant, Event, LeasedDevice, Outages, StreamId, WorkerEvent};
use tracing::{debug, info, warn};

use super::{Driver, Input, MAX_WORKERS, Peer};
use crate::{
    audit::{self, Entry},
    scheduler::{
        access::{DEFAULT_TENANT, Role, UnixMillis},
        enrolment::{self, Admitted},
        stream::{self, AcceptedStream, OpenStream},
        worker_commands::{self, LeasePart},
        worker_events,
    },
};

/// How much of a worker's memory for the snapshots of other workers' leases one tenant may use if the pool has several, in
/// thousandths. So copies of one tenant's running leases leave room for those of others.
const TENANT_SNAPSHOTS_PERMILLE: u32 = 500;

/// A worker that is joining. Its registration has been checked, and it is enrolled.
pub(in crate::scheduler) struct JoiningWorker {
    pub(in crate::scheduler) worker: WorkerId,
    pub(in crate::scheduler) admitted: Admitted,
    pub(in crate::scheduler) registration_report: worker_events::RegistrationReport,
    pub(in crate::scheduler) leaving: bool,
    /// The reply to the worker's registration.
    pub(in crate::scheduler) answer: WorkerCommand,
}

/// A worker whose stream is up.
pub(super) struct JoinedWorker {
    open: OpenStream<WorkerCommand>,
    name: String,
    /// The name of the token with which the worker enrolled.
    token: Arc<str>,
    /// The kind of each device.
    kinds: Vec<String>,
    /// The device usage that the worker last reported, by device index.
    usage: Vec<DeviceUsage>,
    /// The devices that the worker last reported as out of service.
    out_of_service: Outages,
    /// When the memory of snapshots at the worker was counted last.
    snapshots_counted_at: Option<UnixMillis>,
}

impl JoinedWorker {
    /// Returns the device usage that the worker last reported, by device index.
    pub(super) fn usage(&self) -> &[DeviceUsage] {
        &self.usage
    }

    /// Ends the stream with `error`, and waits until the connection has taken the error.
    pub(super) async fn end_and_flush(self, error: &Error) {
        self.open.end_and_flush(error).await;
    }
}

fn event(worker: WorkerId, stream: StreamId, event: WorkerEvent) -> Event {
    Event::Worker {
        worker,
        stream,
        event,
    }
}

impl Driver {
    /// Adds a worker to the pool, on the new stream `opened`. The worker's previous stream, if
    /// any, ends. If the worker may not join, ends the new stream with the reason instead.
    pub(super) fn join(
        &mut self,
        joining_worker: JoiningWorker,
        opened: AcceptedStream<WorkerMessage, WorkerCommand>,
    ) {
        let JoiningWorker {
            worker,
            admitted,
            registration_report,
            leaving,
            answer,
        } = joining_worker;
        let worker_events::RegistrationReport {
            registration,
            held,
            ended,
            suspended,
            out_of_service,
        } = registration_report;
        let id = self.new_stream_id();
        let wrap = move |message| Input::FromWorker(worker, id, message);
        let silence = Some(self.worker_silence);
        let reading = stream::read(opened.incoming, silence, self.sender.clone(), wrap);
        let reader = self.readers.spawn(reading);
        self.read_by.insert(reader.id(), Peer::Worker(worker, id));
        let open = OpenStream::new(id, opened.peer, opened.outgoing, reader);
        let name = registration.endpoint.name.clone();
        if let Err(error) = self.may_join(worker, &name, &admitted) {
            warn!(%worker, "worker {name} was refused: {error}");
            let (peer, role) = (open.peer, Role::Worker.name());
            self.audit.deny("worker refused", || {
                let entry = Entry::new(audit::EntryKind::Denied).role(role);
                entry.address(peer).reason(&error)
            });
            return open.end(Some(&error));
        }
        // The queue has room: nothing has been sent yet.
        let _ = open.send(answer);
        let permille = self.tenant_snapshots_permille();
        if permille < WHOLE_PERMILLE {
            // Other workers may send snapshots before the first reply to a heartbeat.
            let time = worker_commands::time(UnixMillis::now(), Vec::new(), permille);
            let _ = open.send(time);
        }
        let (address, devices) = (&registration.endpoint.address, registration.devices.len());
        let (held_count, is_new) = (held.len(), admitted.is_new);
        info!(%worker, %address, devices, held = held_count, leaving, is_new, "worker {name} joined");
        let joined = self.worker_entry(audit::EntryKind::Admitted, &admitted.token);
        let joined = joined.worker(worker, &name).address(open.peer);
        let joined = match is_new {
            true => joined.reason("enrolled"),
            false => joined,
        };
        self.audit.record(joined.devices(devices));
        self.enrolment.set_live(&name, true);
        let kinds = registration.devices.iter().map(|it| it.kind.clone());
        let member = JoinedWorker {
            open,
            name,
            token: admitted.token,
            kinds: kinds.collect(),
            usage: Vec::new(),
            out_of_service: out_of_service.clone(),
            snapshots_counted_at: None,
        };
        if let Some(replaced) = self.workers.insert(worker, member) {
            let words = "a later stream of the same worker replaced this one";
            replaced
                .open
                .end(Some(&Error::new(ErrorCode::Cancelled, words)));
        }
        let join = WorkerEvent::Join {
            registration,
            held,
            ended,
            suspended,
            out_of_service,
            leaving,
        };
        self.apply(event(worker, id, join));
    }

    /// Checks that an admitted worker can join: it is still enrolled, no other process uses
    /// its name, and the pool is not full.
    fn may_join(&self, worker: WorkerId, name: &str, admitted: &Admitted) -> Result<(), Error> {
        let registry = self.enrolment.registry();
        if registry.get(name, &admitted.certificate).is_none() {
            let words = enrolment::removed_message(name);
            return Err(Error::new(ErrorCode::Enrolment, words));
        }
        let mut others = self.workers.iter().filter(|(id, _)| **id != worker);
        if others.any(|(_, member)| member.name == name) {
            let words = format!(
                "another process with the same key is already in the pool as worker {name:?}; give this worker another --name, or try again in a few seconds if that process has just ended"
            );
            return Err(Error::new(ErrorCode::Enrolment, words));
        }
        if !self.workers.contains_key(&worker) && self.workers.len() >= MAX_WORKERS {
            let words =
                format!("{MAX_WORKERS} workers have joined, which is the limit of the pool");
            return Err(Error::new(ErrorCode::Limit, words));
        }
        Ok(())
    }

    /// Creates an audit entry about a worker that enrolled with the token of this name.
    fn worker_entry(&self, event: audit::EntryKind, token: &str) -> Entry {
        let tokens = self.access.tokens();
        let tenant = tokens.get(token).map(|token| token.tenant.as_str());
        Entry::new(event).token(token, Role::Worker.name(), tenant.unwrap_or(DEFAULT_TENANT))
    }

    pub(super) fn on_worker_message(
        &mut self,
        worker: WorkerId,
        id: StreamId,
        message: WorkerMessage,
    ) {
        let member = self.workers.get(&worker);
        let Some(member) = member.filter(|member| member.open.id == id) else {
            return; // The message is from a stream that was cut off or replaced.
        };
        let message = match message.body {
            Some(Body::Heartbeat(heartbeat)) => return self.on_heartbeat(worker, id, heartbeat),
            Some(Body::Released(released)) => {
                debug!(%worker, "worker {} released {released:?}", member.name);
                worker_events::released(released)
            }
            Some(Body::StoredLeases(stored)) => worker_events::stored_leases(stored),
            Some(Body::Leaving(_)) => {
                info!(%worker, "worker {} is leaving", member.name);
                WorkerEvent::Leaving
            }
            Some(Body::Left(_)) => {
                info!(%worker, "worker {} left", member.name);
                WorkerEvent::Left
            }
            Some(Body::Register(_)) | None => {
                let words = "the worker sent a second registration, or an empty or unknown message";
                let error = Error::new(ErrorCode::Protocol, words);
                return self.on_worker_disconnected(worker, id, Some(&error));
            }
        };
        self.apply(event(worker, id, message));
    }

    fn on_heartbeat(&mut self, worker: WorkerId, id: StreamId, heartbeat: Heartbeat) {
        let Some(member) = self.workers.get(&worker) else {
            return;
        };
        let recorded = self.count_reported(worker, &member.kinds, &heartbeat);
        let (now, permille) = (UnixMillis::now(), self.tenant_snapshots_permille());
        let time = worker_commands::time(now, recorded, permille);
        if let Err(error) = member.open.send(time) {
            return self.on_worker_disconnected(worker, id, Some(&error));
        }
        if let Some(member) = self.workers.get_mut(&worker) {
            member.usage = heartbeat.usage;
            let since = member.snapshots_counted_at.replace(now);
            self.count_snapshots(worker, since, now, &heartbeat.snapshots);
        }
        let devices = worker_events::outages(heartbeat.out_of_service);
        let kept = worker_events::kept(worker, &heartbeat.kept, &heartbeat.in_store);
        self.apply(event(worker, id, WorkerEvent::Heartbeat));
        self.apply(event(worker, id, kept));
        let idle = worker_events::idle_leases(&heartbeat.idle);
        self.apply(event(worker, id, idle));
        if !heartbeat.missing_peers.is_empty() {
            let missing = worker_events::missing_peers(&heartbeat.missing_peers);
            self.apply(event(worker, id, missing));
        }
        if !heartbeat.interrupted.is_empty() {
            let interrupted = worker_events::interrupted_leases(&heartbeat.interrupted);
            self.apply(event(worker, id, interrupted));
        }
        self.out_of_service(worker, id, devices);
    }

    /// Records which devices a worker cannot offer, and passes the set to the engine if it
    /// has changed.
    fn out_of_service(&mut self, worker: WorkerId, id: StreamId, devices: Outages) {
        let Some(member) = self.workers.get_mut(&worker) else {
            return;
        };
        if member.out_of_service == devices {
            return;
        }
        for (index, reason) in &devices {
            if member.out_of_service.get(index) != Some(reason) {
                let name = &member.name;
                warn!(%worker, "device {index} of worker {name} is out of service: {reason}");
            }
        }
        for index in member.out_of_service.keys() {
            if !devices.contains_key(index) {
                let name = &member.name;
                info!(%worker, "device {index} of worker {name} is in service again");
            }
        }
        member.out_of_service.clone_from(&devices);
        self.apply(event(worker, id, WorkerEvent::OutOfService { devices }));
    }

    /// Handles the end of a worker's stream, whether the worker or the scheduler ended it.
    pub(super) fn on_worker_disconnected(
        &mut self,
        worker: WorkerId,
        id: StreamId,
        error: Option<&Error>,
    ) {
        if let Some(gone) = self.cut_off_worker(worker, id, error) {
            self.apply(gone);
        }
    }

    fn cut_off_worker(
        &mut self,
        worker: WorkerId,
        id: StreamId,
        error: Option<&Error>,
    ) -> Option<Event> {
        if self.workers.get(&worker)?.open.id != id {
            return None;
        }
        let JoinedWorker { open, name, .. } = self.workers.remove(&worker)?;
        self.enrolment.set_live(&name, false);
        let mut gone = Entry::new(audit::EntryKind::Ended);
        match error {
            Some(error) => {
                warn!(%worker, "worker {name} was cut off: {error}");
                gone = gone.reason(error);
            }
            None => info!(%worker, "the connection of worker {name} ended"),
        }
        self.audit
            .record(gone.worker(worker, &name).address(open.peer));
        open.end(error);
        Some(event(worker, id, WorkerEvent::Disconnected))
    }

    /// Ends the streams and leases of all workers that enrolled with the token of this
    /// name. Returns the number of these workers.
    pub(super) fn revoke_workers(&mut self, token: &str) -> u32 {
        let words = format!("the token {token:?} that this worker enrolled with was revoked");
        let error = Error::new(ErrorCode::Token, words);
        self.end_workers(&error, |member| &*member.token == token)
    }

    /// Ends the stream and leases of the worker of this name. Returns whether it was in the
    /// pool.
    pub(super) fn remove_worker(&mut self, name: &str) -> bool {
        let error = Error::new(ErrorCode::Enrolment, enrolment::removed_message(name));
        self.end_workers(&error, |member| member.name == name) > 0
    }

    fn end_workers(&mut self, error: &Error, which: impl Fn(&JoinedWorker) -> bool) -> u32 {
        let members = self.workers.iter().filter(|(_, member)| which(member));
        let ended: Vec<_> = members.map(|(id, member)| (*id, member.open.id)).collect();
        for (worker, id) in &ended {
            // `Left` removes the worker at once, without the timeout of a lost one.
            self.apply(event(*worker, *id, WorkerEvent::Left));
            self.on_worker_disconnected(*worker, *id, Some(error));
        }
        u32::try_from(ended.len()).unwrap_or(u32::MAX)
    }

    /// Announces a new lease to its workers, so that they admit no session by an earlier
    /// grant and can prepare. A worker that does not read is cut off at the next command.
    pub(super) fn announce_lease(
        &self,
        lease: LeaseId,
        devices: &[LeasedDevice],
        tenant: &str,
        epoch: u64,
        load_stored: &BTreeSet<WorkerId>,
    ) {
        // Devices of one worker are next to each other.
        let parts = devices.chunk_by(|a, b| a.device_ref.worker == b.device_ref.worker);
        for (index, here) in (0..).zip(parts) {
            let worker = here[0].device_ref.worker;
            if let Some(member) = self.workers.get(&worker) {
                let part = LeasePart {
                    index,
                    has_other_workers: here.len() < devices.len(),
                    epoch,
                    load_stored: load_stored.contains(&worker),
                };
                let announced = worker_commands::lease_granted(lease, here, tenant, part);
                let _ = member.open.send(announced);
            }
        }
    }

    /// Commands a worker to end a lease's sessions, and to hold their snapshots if the lease is
    /// suspended. If its queue is full or closed, cuts the
    /// worker off and returns the event that reports this to the engine.
    pub(super) fn send_end_lease(
        &mut self,
        worker: WorkerId,
        lease: LeaseId,
        grants: &[DeviceGrant],
        hold_snapshots: bool,
    ) -> Option<Event> {
        let JoinedWorker { open, name, .. } = self.workers.get(&worker)?;
        let ended = Entry::new(audit::EntryKind::Ended).worker(worker, name);
        self.audit.record(ended.address(open.peer).lease(lease));
        self.send_to_worker(
            worker,
            worker_commands::end_lease(lease, grants, hold_snapshots),
        )
    }

    /// Commands the worker that runs a part of a lease to send its snapshots to the keeper, and the
    /// keeper to keep them.
    pub(super) fn send_keeper(
        &mut self,
        part: PartId,
        source: tensord_scheduler::Peer,
        keeper: tensord_scheduler::Peer,
        assignment: u64,
    ) -> Option<Event> {
        let lease = part.lease;
        debug!(%lease, "worker {} is to keep the snapshots that worker {} takes", keeper.endpoint.name, source.endpoint.name);
        let (to_source, to_keeper) = (source.worker, keeper.worker);
        // The keeper first: it must know the source before that connects. If the keeper is cut off, the source gets no
        // command, and the engine assigns the keeper again when that is back.
        let tenant = self.engine.tenant_of(lease).map(ToString::to_string);
        let tenant = tenant.unwrap_or_default();
        let handover = !self.engine.is_running(lease);
        let keep = worker_commands::keep_snapshots(part, source, assignment, tenant, handover);
        let gone = self.send_to_worker(to_keeper, keep);
        gone.or_else(|| {
            let send = worker_commands::send_snapshots(part, keeper, assignment);
            self.send_to_worker(to_source, send)
        })
    }

    /// Returns how much of a worker's memory for the snapshots of other workers' leases one tenant may use, in thousandths.
    fn tenant_snapshots_permille(&self) -> u32 {
        match self.has_several_tenants() {
            true => TENANT_SNAPSHOTS_PERMILLE,
            false => WHOLE_PERMILLE,
        }
    }

    /// Queues a command for a worker. If its queue is full or closed, cuts the worker off and
    /// returns the event that reports this to the engine.
    pub(super) fn send_to_worker(
        &mut self,
        worker: WorkerId,
        command: WorkerCommand,
    ) -> Option<Event> {
        let open = &self.workers.get(&worker)?.open;
        let (id, sent) = (open.id, open.send(command));
        self.cut_off_worker(worker, id, Some(&sent.err()?))
    }
}
