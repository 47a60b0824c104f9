//! Clients in the driver: attaches, messages, replies and ends of streams.

use std::{collections::BTreeSet, time::Instant};

use futures::FutureExt as _;
use tensord_proto::{
    credential::CredentialHash,
    ids::{ClientId, LeaseId, RequestId, WorkerId},
    v1::{ChangeStanding, ClientMessage, Error, ErrorCode, PoolMessage, client_message},
};
use tensord_scheduler::{
    Claim, ClientEvent, EndReason, Engine, Event, LeasedDevice, RefuseReason, StreamId, Suspender,
    Timestamp, WaitReason,
};
use tracing::{debug, info};

use super::{Driver, Input, MAX_UNRECORDED, Peer, Recorded};
use crate::{
    audit::{self, Entry},
    scheduler::{
        access::{AuthContext, DEFAULT_TENANT},
        convert,
        stream::{self, AcceptedStream, OpenStream},
    },
};

fn event(client: ClientId, stream: StreamId, event: ClientEvent) -> Event {
    Event::Client {
        client,
        stream,
        event,
    }
}

/// Returns whether a client that attaches at `now` comes back to a lease: it has one, or claims one that nobody has, or
/// that the engine may take over because it has not been running for long. Old tokens of ended leases prove nothing.
fn comes_back(engine: &Engine, client: ClientId, claims: &[Claim], now: Timestamp) -> bool {
    let may_adopt = u128::from(now.as_millis()) < engine.options().adoption_window.as_millis();
    let has_no_owner = |claim: &Claim| {
        let known = engine.lease(claim.lease);
        known.is_some_and(|lease| lease.owner.is_none())
    };
    let mut claims = claims.iter();
    !engine.leases_of(client).is_empty() || claims.any(|claim| may_adopt || has_no_owner(claim))
}

impl Driver {
    /// Creates an audit entry about a client, with its address and token if they are known.
    pub(super) fn client_entry(&self, event: audit::EntryKind, client: ClientId) -> Entry {
        let mut entry = Entry::new(event).client(client);
        if let Some(open) = self.clients.get(&client) {
            entry = entry.address(open.peer);
        }
        if let Some(auth) = self.holders.auth(client) {
            entry = entry.token(&auth.token, auth.role.name(), &auth.tenant);
        }
        entry
    }

    /// Records in `holders` that a client attaches, with valid claims of leases.
    ///
    /// # Errors
    ///
    /// If the client may not attach; nothing has changed then.
    pub(super) fn admit(
        &mut self,
        client: ClientId,
        credential: CredentialHash,
        auth: AuthContext,
        claims: &[Claim],
    ) -> Result<(), Error> {
        // The token may have ended since the call began.
        self.access.check_may_attach(&auth, !claims.is_empty())?;
        let (engine, now) = (&self.engine, self.now());
        let comes_back = || comes_back(engine, client, claims, now);
        self.holders
            .attach(client, credential, auth, comes_back, Instant::now())
    }

    /// Attaches a client, which `holders` has recorded already, on the new stream `opened`.
    /// The client's previous stream, if any, ends.
    pub(super) fn attach(
        &mut self,
        client: ClientId,
        held: convert::ClaimedLeases,
        opened: AcceptedStream<ClientMessage, PoolMessage>,
    ) {
        let id = self.new_stream_id();
        let wrap = move |message| Input::FromClient(client, id, message);
        let reading = stream::read(opened.incoming, None, self.sender.clone(), wrap);
        let reader = self.readers.spawn(reading);
        self.read_by.insert(reader.id(), Peer::Client(client, id));
        let open = OpenStream::new(id, opened.peer, opened.outgoing, reader);
        let convert::ClaimedLeases { claims, invalid } = held;
        debug!(%client, leases = claims.len(), "client attached");
        if let Some(replaced) = self.clients.insert(client, open) {
            let words = "a later stream of the same client replaced this one";
            replaced.end(Some(&Error::new(ErrorCode::Cancelled, words)));
        }
        let admitted = self.client_entry(audit::EntryKind::Admitted, client);
        self.audit.record(admitted);
        // `holders` has recorded the client.
        let tenant = self.holders.tenant(client).unwrap_or(DEFAULT_TENANT);
        let tenant = tenant.into();
        self.apply(event(client, id, ClientEvent::Attach { tenant, claims }));
        for lease in invalid {
            if let Some(gone) = self.send_lease_ended(client, lease, &EndReason::Unknown) {
                self.apply(gone);
            }
        }
        self.renew_all_of(client);
    }

    pub(super) fn on_client_message(
        &mut self,
        client: ClientId,
        id: StreamId,
        message: ClientMessage,
    ) {
        if self.clients.get(&client).is_none_or(|open| open.id != id) {
            return; // The message is from a stream that was cut off or replaced.
        }
        if let Some(client_message::Body::ChangeStanding(change)) = message.body {
            return self.change_standing(client, id, &change);
        }
        if let Some(client_message::Body::MarkPlaced(placed)) = message.body {
            return self.on_mark_placed(client, LeaseId(placed.lease_id));
        }
        if let Some(client_message::Body::ExplainWait(explain)) = &message.body {
            return self.explain_wait(client, id, explain);
        }
        if let Some((request, error)) = convert::share_refusal(&message) {
            if let Some(gone) = self.send(client, convert::refused(request, error)) {
                self.apply(gone);
            }
            return;
        }
        let lease = self.new_lease_id();
        match convert::client_event(message, lease) {
            Ok(ClientEvent::Request { request, .. }) if self.lease_refusal(client).is_some() => {
                if let Some(gone) = self.refuse_request(client, request) {
                    self.apply(gone);
                }
            }
            Ok(message) => {
                debug!(%client, "client sent {message:?}");
                self.apply(event(client, id, message));
            }
            Err(error) => self.on_client_disconnected(client, id, Some(&error)),
        }
    }

    /// Suspends, resumes or moves a lease of a client, and replies once that is recorded.
    fn change_standing(&mut self, client: ClientId, stream: StreamId, change: &ChangeStanding) {
        let lease = LeaseId(change.lease_id);
        let owner = self.engine.lease(lease).and_then(|lease| lease.owner);
        let by = match change.only_if_idle {
            true => Suspender::Idleness,
            false => Suspender::Client,
        };
        let changed = match (owner == Some(client), change.suspend, change.elsewhere) {
            (false, ..) => Err("this client has no such lease".into()),
            (true, true, true) => Err("a lease that is suspended cannot move".into()),
            (true, true, false) => self.suspend_lease(lease, Suspender::Client).map(drop),
            (true, false, true) => self.move_lease(lease).map(drop),
            (true, false, false) => self.resume_lease(lease, by).map(drop),
        };
        debug!(%client, %lease, "client requests {change:?}: {changed:?}");
        let is_changed = changed.is_ok();
        let reply = convert::standing_changed(change.request_id, changed.err());
        if !is_changed || self.unrecorded.len() >= MAX_UNRECORDED {
            return self.reply(client, stream, reply);
        }
        let Recorded { reply, written } = self.recorded(reply);
        let replied = written.map(move |()| (client, stream, reply));
        self.unrecorded.push(replied.boxed());
    }

    /// Replies to a client, unless the stream on which it has asked has ended.
    pub(super) fn reply(&mut self, client: ClientId, stream: StreamId, reply: PoolMessage) {
        let open = self.clients.get(&client);
        if open.is_some_and(|open| open.id == stream)
            && let Some(gone) = self.send(client, reply)
        {
            self.apply(gone);
        }
    }

    /// Handles the end of a client's stream, whether the client or the scheduler ended it.
    pub(super) fn on_client_disconnected(
        &mut self,
        client: ClientId,
        id: StreamId,
        error: Option<&Error>,
    ) {
        if let Some(gone) = self.cut_off_client(client, id, error) {
            self.apply(gone);
        }
    }

    fn cut_off_client(
        &mut self,
        client: ClientId,
        id: StreamId,
        error: Option<&Error>,
    ) -> Option<Event> {
        if self.clients.get(&client)?.id != id {
            return None;
        }
        let mut gone = self.client_entry(audit::EntryKind::Ended, client);
        match error {
            Some(error) => {
                info!(%client, "client was cut off: {error}");
                gone = gone.reason(error);
            }
            None => debug!(%client, "client detached"),
        }
        self.audit.record(gone);
        self.clients.remove(&client)?.end(error);
        self.holders.detach(client, Instant::now());
        Some(event(client, id, ClientEvent::Disconnected))
    }

    /// Forgets a client whose stream has ended, once the engine has handled that, if it has no leases to come back to.
    pub(super) fn forget_without_leases(&mut self, client: ClientId) {
        if !self.clients.contains_key(&client) && self.engine.leases_of(client).is_empty() {
            self.holders.remove(client);
        }
    }

    /// Ends the streams and leases of all clients that presented the token of this name.
    /// Returns the number of these clients.
    pub(super) fn revoke_clients(&mut self, token: &str) -> u32 {
        let clients = self.holders.with_token(token);
        let count = u32::try_from(clients.len()).unwrap_or(u32::MAX);
        for client in clients {
            // Evict before the stream is closed, so that the ends of the leases are sent on
            // it.
            self.apply(Event::Evict { client });
            let gone = self.client_entry(audit::EntryKind::Ended, client);
            self.audit.record(gone.reason("its token was revoked"));
            self.holders.remove(client);
            if let Some(open) = self.clients.remove(&client) {
                info!(%client, "client was cut off: its token {token} was revoked");
                let words = format!("the token {token:?} was revoked");
                open.end(Some(&Error::new(ErrorCode::Token, words)));
            }
        }
        count
    }

    /// Returns the reason why this client currently gets no leases, or `None` if it may get
    /// some or is unknown.
    fn lease_refusal(&self, client: ClientId) -> Option<Error> {
        if !self.granting {
            let words = "the scheduler is shutting down and grants no leases; try again when it has restarted";
            return Some(Error::new(ErrorCode::Draining, words));
        }
        self.access.check_may_open(self.holders.auth(client)?).err()
    }

    /// Refuses a request of a client that currently gets no leases. Returns the result of
    /// [`send`](Self::send).
    fn refuse_request(&mut self, client: ClientId, request: RequestId) -> Option<Event> {
        let error = self.lease_refusal(client)?;
        self.send(client, convert::refused(request, error))
    }

    /// Queues a message to a client. If the queue is full or closed, cuts the client off and
    /// returns the event that reports this to the engine.
    pub(super) fn send(&mut self, client: ClientId, message: PoolMessage) -> Option<Event> {
        let open = self.clients.get(&client)?;
        let (id, sent) = (open.id, open.send(message));
        self.cut_off_client(client, id, Some(&sent.err()?))
    }

    pub(super) fn send_queued(
        &mut self,
        client: ClientId,
        request: RequestId,
        position: u32,
        reason: WaitReason,
    ) -> Option<Event> {
        // Other clients' requests move this one as often as they like. A later position will do.
        let is_busy = self.clients.get(&client).is_some_and(OpenStream::is_busy);
        match is_busy {
            true => None,
            false => self.send(client, convert::queued(request, position, reason)),
        }
    }

    /// Sends a granted lease to its client. If the client currently gets no leases, refuses
    /// the request and returns an event that releases the lease.
    pub(super) fn send_granted(
        &mut self,
        client: ClientId,
        request: RequestId,
        lease: LeaseId,
        devices: Vec<LeasedDevice>,
    ) -> Option<Event> {
        if self.lease_refusal(client).is_some() {
            let id = self.clients.get(&client)?.id;
            let gone = self.refuse_request(client, request);
            return gone.or(Some(event(client, id, ClientEvent::Release { lease })));
        }
        info!(%client, %lease, devices = devices.len(), "lease granted");
        let granted = self.client_entry(audit::EntryKind::Granted, client);
        self.audit
            .record(granted.lease(lease).devices(devices.len()));
        let tenant = self.holders.tenant(client)?;
        self.announce_lease(lease, &devices, tenant, 0, &BTreeSet::new());
        self.count_granted(client, lease, &devices);
        let token = self.sign(client, lease, &devices)?;
        self.send(client, convert::granted(request, lease, devices, token))
    }

    /// Sends the client of a lease the devices on which the lease goes on, whose workers start it.
    pub(super) fn send_moved(
        &mut self,
        client: ClientId,
        lease: LeaseId,
        epoch: u64,
        devices: Vec<LeasedDevice>,
        load_stored: &BTreeSet<WorkerId>,
    ) -> Option<Event> {
        let mut workers: Vec<_> = devices.iter().map(|it| it.worker.name.as_str()).collect();
        workers.dedup();
        let workers = workers.join(", ");
        info!(%client, %lease, epoch, "lease goes on at {workers}");
        let moved = self.client_entry(audit::EntryKind::Granted, client);
        let moved = moved.lease(lease).devices(devices.len());
        self.audit
            .record(moved.reason("it was granted devices to go on"));
        let tenant = self.holders.tenant(client)?;
        self.announce_lease(lease, &devices, tenant, epoch, load_stored);
        self.count_granted(client, lease, &devices);
        let token = self.sign(client, lease, &devices)?;
        self.send(client, convert::moved(lease, devices, token))
    }

    pub(super) fn send_refused(
        &mut self,
        client: ClientId,
        request: RequestId,
        reason: &RefuseReason,
    ) -> Option<Event> {
        debug!(%client, "request refused: {reason}");
        self.audit.deny("request refused", || {
            self.client_entry(audit::EntryKind::Denied, client)
                .reason(reason)
        });
        self.send(
            client,
            convert::refused(request, convert::refuse_error(reason)),
        )
    }

    pub(super) fn send_lease_ended(
        &mut self,
        client: ClientId,
        lease: LeaseId,
        reason: &EndReason,
    ) -> Option<Event> {
        info!(%client, %lease, "lease ended: {reason}");
        let ended = self.client_entry(audit::EntryKind::Ended, client);
        self.audit.record(ended.lease(lease).reason(reason));
        self.send(client, convert::lease_ended(lease, reason))
    }
}
