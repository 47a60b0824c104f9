//! The driver's side of workers: they join, beat, are told, and go.

use std::sync::Arc;

use tensord_proto::{
    ids::{LeaseId, WorkerId},
    v1::{DeviceUsage, Error, ErrorCode, WorkerCommand, WorkerMessage, worker_message::Body},
};
use tensord_scheduler::{DeviceGrant, Event, LeasedDevice, Outages, StreamId, WorkerEvent};
use tracing::{debug, info, warn};

use super::{Driver, Input, MAX_STREAMS, Peer};
use crate::{
    audit::{self, Entry},
    scheduler::{
        access::{Pass, UnixMillis},
        convert,
        stream::{self, Open, Opened},
    },
};

/// A worker whose stream is up.
pub(super) struct Member {
    open: Open<WorkerCommand>,
    name: String,
    /// The name of the token it showed.
    token: Arc<str>,
    /// What it last said, in the order of its devices.
    usage: Vec<DeviceUsage>,
    /// The devices that it last said it cannot offer.
    out_of_service: Outages,
}

impl Member {
    /// What the worker last said of its devices' use, in their order.
    pub(super) fn usage(&self) -> &[DeviceUsage] {
        &self.usage
    }

    /// Ends the stream with `error`, and waits until the connection took it.
    pub(super) async fn farewell(self, error: &Error) {
        self.open.farewell(error).await;
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
    /// Takes in the stream of a worker, which begins with `registering`. One it had before ends.
    pub(super) fn join(
        &mut self,
        worker: WorkerId,
        pass: &Pass,
        registering: convert::Registering,
        leaving: bool,
        opened: Opened<WorkerMessage, WorkerCommand>,
    ) {
        let convert::Registering {
            registration,
            held,
            ended,
            out_of_service,
        } = registering;
        let id = self.new_stream();
        let wrap = move |message| Input::FromWorker(worker, id, message);
        let silence = Some(self.worker_silence);
        let reading = stream::read(opened.incoming, silence, self.sender.clone(), wrap);
        let reader = self.readers.spawn(reading);
        self.read_by.insert(reader.id(), Peer::Worker(worker, id));
        let open = Open::new(id, opened.peer, opened.outgoing, reader);
        if !self.workers.contains_key(&worker) && self.workers.len() >= MAX_STREAMS {
            let words =
                format!("{MAX_STREAMS} workers have joined, which is the most there may be");
            return open.end(Some(&Error::new(ErrorCode::Limit, words)));
        }
        let endpoint = &registration.endpoint;
        let (name, devices) = (endpoint.name.clone(), registration.devices.len());
        let (address, held_count) = (&endpoint.address, held.len());
        info!(%worker, %address, devices, held = held_count, leaving, "worker {name} joined");
        let joined =
            Entry::new(audit::Event::Admitted).token(&pass.token, pass.role.name(), &pass.tenant);
        let joined = joined.worker(worker, &name).address(open.peer);
        self.audit.record(joined.devices(devices));
        let member = Member {
            open,
            name,
            token: pass.token.clone(),
            usage: Vec::new(),
            out_of_service: out_of_service.clone(),
        };
        if let Some(replaced) = self.workers.insert(worker, member) {
            let words = "another stream of the same worker took the place of this one";
            replaced
                .open
                .end(Some(&Error::new(ErrorCode::Cancelled, words)));
        }
        let join = WorkerEvent::Join {
            registration,
            held,
            ended,
            out_of_service,
            leaving,
        };
        self.apply(event(worker, id, join));
    }

    pub(super) fn worker_said(&mut self, worker: WorkerId, id: StreamId, message: WorkerMessage) {
        let member = self.workers.get_mut(&worker);
        let Some(member) = member.filter(|member| member.open.id == id) else {
            return; // It was cut off with this on the way.
        };
        let said = match message.body {
            Some(Body::Heartbeat(heartbeat)) => {
                member.usage = heartbeat.usage;
                if let Err(error) = member.open.send(convert::time(UnixMillis::now())) {
                    return self.worker_gone(worker, id, Some(&error));
                }
                let devices = convert::outages(heartbeat.out_of_service);
                self.apply(event(worker, id, WorkerEvent::Beat));
                return self.out_of_service(worker, id, devices);
            }
            Some(Body::Released(released)) => {
                debug!(%worker, "worker {} released {released:?}", member.name);
                convert::released(released)
            }
            Some(Body::Leaving(_)) => {
                info!(%worker, "worker {} is leaving", member.name);
                WorkerEvent::Leaving
            }
            Some(Body::Left(_)) => {
                info!(%worker, "worker {} left", member.name);
                WorkerEvent::Left
            }
            Some(Body::Register(_)) | None => {
                let words = "a second registration, or an empty or unknown message";
                let error = Error::new(ErrorCode::Protocol, words);
                return self.worker_gone(worker, id, Some(&error));
            }
        };
        self.apply(event(worker, id, said));
    }

    /// Notes which devices a worker cannot offer, if they are others than before.
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

    /// The worker's stream is over, by its own end or by ours.
    pub(super) fn worker_gone(&mut self, worker: WorkerId, id: StreamId, error: Option<&Error>) {
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
        let Member { open, name, .. } = self.workers.remove(&worker)?;
        let mut gone = Entry::new(audit::Event::Ended);
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
        Some(event(worker, id, WorkerEvent::Gone))
    }

    /// Ends the streams of every worker that showed the token of this name, with the
    /// leases on it, and returns how many that were.
    pub(super) fn revoke_workers(&mut self, token: &str) -> u32 {
        let members = self.workers.iter();
        let members = members.filter(|(_, member)| &*member.token == token);
        let revoked: Vec<_> = members.map(|(id, member)| (*id, member.open.id)).collect();
        let words = format!("the token {token:?} that this worker showed was revoked");
        let error = Error::new(ErrorCode::Token, words);
        for (worker, id) in &revoked {
            // Whoever has left is not waited for.
            self.apply(event(*worker, *id, WorkerEvent::Left));
            self.worker_gone(*worker, *id, Some(&error));
        }
        u32::try_from(revoked.len()).unwrap_or(u32::MAX)
    }

    /// Has a worker know that a device was granted anew, so that no earlier grant opens a
    /// session any more. One that does not read is cut off with the next command.
    pub(super) fn announce_grant(&self, device: &LeasedDevice) {
        if let Some(member) = self.workers.get(&device.share.worker) {
            let _ = member.open.send(convert::granted_anew(device));
        }
    }

    /// Has a worker end a lease's sessions. One that does not read is cut off.
    pub(super) fn tell_end_lease(
        &mut self,
        worker: WorkerId,
        lease: LeaseId,
        grants: &[DeviceGrant],
    ) -> Option<Event> {
        let Member { open, name, .. } = self.workers.get(&worker)?;
        let ended = Entry::new(audit::Event::Ended).worker(worker, name);
        self.audit.record(ended.address(open.peer).lease(lease));
        let (id, sent) = (open.id, open.send(convert::end_lease(lease, grants)));
        self.cut_off_worker(worker, id, Some(&sent.err()?))
    }
}
