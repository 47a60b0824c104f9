//! The task that exchanges messages with the scheduler.
//!
//! It owns the one control stream of this client, opens a new one when the stream is lost,
//! and then claims its leases and repeats its pending requests. Leases and sessions go on
//! while the scheduler cannot be reached.

mod calls;
mod explanations;
pub(crate) mod handle;
mod held_lease;
mod inbound;
pub(crate) mod lease_watch;
mod stream;
mod withdrawals;

use std::{
    collections::HashMap,
    sync::{Arc, mpsc as blocking},
    time::Duration,
};

use tensord_proto::{
    credential::ClientCredential,
    ids::{LeaseId, RequestId},
    text::{MESSAGE_CHARS, sanitize},
    v1::{
        CancelRequest, ChangeStanding, ClientHello, Error, ErrorCode, ReleaseLease,
        WorkerUnreachable, client_message, pool_message,
    },
    version,
};
use tensord_transport::PoolUrl;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};
use tokio_stream::wrappers::ReceiverStream;
use tracing::{info, warn};

pub(crate) use self::calls::{Call, LeaseCall, RequestOutcome, RequestReplies, StandingCall};
pub(crate) use self::stream::status;
use self::{
    explanations::{Explanations, Waiter},
    held_lease::HeldLease,
    stream::{ControlStream, StreamEnd, authorised, connect, leave, message},
    withdrawals::Withdrawals,
};
use crate::{
    error::{ConnectError, StandingError},
    session::{UnreachableWorkers, UsedLeases},
};

/// Limit for one attempt to connect to the scheduler, with its reply to the hello.
const DEADLINE: Duration = Duration::from_millis(3500);

/// A stream on which nothing is received for this long is lost; schedulers send at least a
/// ping each second.
const SILENCE: Duration = Duration::from_secs(5);

/// Interval of the checks whether leases could go on from snapshots.
const RESTORABLE_CHECK: Duration = Duration::from_millis(250);

/// How often it is checked whether requested marks are committed: a lease is about to move, and executes
/// again what follows the marks.
const MARK_CHECK: Duration = Duration::from_millis(5);

/// Pause between attempts to reconnect.
const RETRY: Duration = Duration::from_millis(500);

/// The id of requests whose replies nobody waits for. Those of the program begin at 1.
const UNAWAITED_REQUEST: u64 = 0;

/// Capacity of the queue of messages to the scheduler.
const QUEUE: usize = 64;

struct Control {
    url: PoolUrl,
    /// The credential. This client's id is a part of its hash.
    credential: ClientCredential,
    requests: mpsc::Receiver<Call>,
    withdrawals: Arc<Withdrawals>,
    unreachable: Arc<UnreachableWorkers>,
    /// The leases that the program uses, and that are suspended because they were idle.
    used: Arc<UsedLeases>,
    pending: HashMap<RequestId, LeaseCall>,
    /// The requests to suspend or resume leases that were sent on the present stream.
    standing_calls: HashMap<RequestId, StandingCall>,
    leases: HashMap<LeaseId, HeldLease>,
    /// What waits, and has a callback for events; not used if the pool explains nothing.
    explanations: Explanations,
}

impl Control {
    fn new(
        url: PoolUrl,
        credential: ClientCredential,
        requests: mpsc::Receiver<Call>,
        withdrawals: Arc<Withdrawals>,
    ) -> Self {
        Self {
            url,
            credential,
            requests,
            withdrawals,
            unreachable: Arc::default(),
            used: Arc::default(),
            pending: HashMap::new(),
            standing_calls: HashMap::new(),
            leases: HashMap::new(),
            explanations: Explanations::default(),
        }
    }

    /// Runs until the client leaves the pool, or the first attempt to connect fails.
    /// `connected` receives the result of that attempt.
    async fn run(mut self, connected: blocking::SyncSender<Result<(), ConnectError>>) {
        let mut stream = match self.attach().await {
            Ok(stream) => stream,
            Err(e) => {
                let _ = connected.send(Err(e));
                return;
            }
        };
        let _ = connected.send(Ok(()));
        drop(connected);
        loop {
            match self.serve(stream).await {
                StreamEnd::Left => return,
                StreamEnd::Lost(reason) => {
                    warn!(
                        "lost the connection to the scheduler at {} ({reason}); leases continue",
                        self.url.authority()
                    );
                    let leases = self.leases.values();
                    leases.for_each(|held_lease| held_lease.watch.pool_lost());
                    for (_, call) in self.standing_calls.drain() {
                        // An error means that the caller does not wait any more.
                        let _ = call.outcome.send(Err(StandingError::ConnectionLost));
                    }
                }
            }
            let mut logged = String::new();
            stream = loop {
                match self.attach().await {
                    Ok(stream) => break stream,
                    Err(error) => self.attach_failed(&error, &mut logged),
                }
                if self.pause_and_serve().await {
                    return;
                }
            };
            info!("reconnected to the scheduler at {}", self.url.authority());
            let leases = self.leases.values();
            leases.for_each(|held_lease| held_lease.watch.pool_back());
        }
    }

    /// Logs why there is no connection to the scheduler, if that is not what was `logged` last. If
    /// the scheduler refuses this client, fails all requests, which would wait for ever.
    fn attach_failed(&mut self, error: &ConnectError, logged: &mut String) {
        let reason = error.to_string();
        if *logged != reason {
            warn!("cannot reconnect to the scheduler: {reason}");
            logged.clone_from(&reason);
        }
        let code = match error {
            ConnectError::Token { .. } => ErrorCode::Token,
            ConnectError::Version { .. } => ErrorCode::Version,
            _ => return,
        };
        let pending: Vec<_> = self.pending.keys().copied().collect();
        for id in pending {
            if let Some(call) = self.remove_pending(id) {
                let refused = Error::new(code, reason.clone());
                // An error means that the caller does not wait any more.
                let _ = call.replies.outcome.send(RequestOutcome::Refused(refused));
            }
        }
    }

    async fn attach(&self) -> Result<ControlStream, ConnectError> {
        let attached = timeout(DEADLINE, self.try_attach()).await;
        attached.unwrap_or_else(|_| {
            let reason = format!("the pool did not answer within {DEADLINE:?}");
            Err(ConnectError::CallFailed {
                pool: self.url.authority(),
                reason,
            })
        })
    }

    async fn try_attach(&self) -> Result<ControlStream, ConnectError> {
        let pool = self.url.authority();
        let mut client = connect(&self.url).await?;
        let (outbound, messages) = mpsc::channel(QUEUE + self.pending.len());
        let hello = client_message::Body::Hello(ClientHello {
            hello: Some(version::hello()),
            client_id: self.credential.hash().client_id().0,
            credential: self.credential.reveal(),
            lease_tokens: self
                .leases
                .values()
                .map(|held_lease| held_lease.token.clone())
                .collect(),
        });
        // The queue is still empty and has room for all of these, so `try_send` cannot fail.
        let _ = outbound.try_send(message(hello));
        for pending in self.pending.values() {
            let _ = outbound.try_send(message(client_message::Body::Request(
                pending.request.clone(),
            )));
        }
        let request = authorised(ReceiverStream::new(messages), &self.url)?;
        let refused = |status: tonic::Status| ConnectError::from_status(&pool, &status);
        let mut inbound = client.attach(request).await.map_err(refused)?.into_inner();
        let first = inbound
            .message()
            .await
            .map_err(refused)?
            .and_then(|message| message.body);
        let Some(pool_message::Body::Hello(hello)) = first else {
            let reason = "the pool did not answer the hello".into();
            return Err(ConnectError::CallFailed { pool, reason });
        };
        version::negotiate(&version::hello(), &hello.hello.unwrap_or_default()).map_err(|e| {
            ConnectError::Version {
                pool,
                reason: e.message,
            }
        })?;
        let explains_waits = hello.explains_waits;
        Ok(ControlStream {
            outbound,
            inbound,
            explains_waits,
        })
    }

    /// Removes dropped leases from the table, and returns the messages that release them.
    fn release_messages(&mut self) -> Vec<client_message::Body> {
        let explanations = &mut self.explanations;
        let released = self.leases.extract_if(|lease, held_lease| {
            if held_lease.released {
                explanations.remove(Waiter::Lease(*lease));
            }
            held_lease.released
        });
        let release = |lease: LeaseId| ReleaseLease { lease_id: lease.0 };
        released
            .map(|(lease, _)| client_message::Body::Release(release(lease)))
            .collect()
    }

    /// Returns the messages that report the leases whose workers cannot be reached.
    fn unreachable_messages(&self) -> impl Iterator<Item = client_message::Body> + use<> {
        let workers = self.unreachable.take().into_iter();
        workers.map(|(lease, worker)| {
            client_message::Body::Unreachable(WorkerUnreachable {
                lease_id: lease.0,
                worker_id: Some(worker.0),
            })
        })
    }

    /// Returns the messages that resume the leases which the program uses although they are suspended, as they
    /// were idle. The pool refuses if somebody has suspended them for another reason meanwhile, which it
    /// reports: also if this program has, whose call may be under way.
    fn resume_messages(&self) -> impl Iterator<Item = client_message::Body> + use<> {
        let leases = self.used.take().into_iter();
        leases.map(|lease| {
            client_message::Body::ChangeStanding(ChangeStanding {
                request_id: UNAWAITED_REQUEST,
                lease_id: lease.0,
                suspend: false,
                only_if_idle: true,
                elsewhere: false,
            })
        })
    }

    /// Returns the messages about leases of which it has changed whether they could go on from
    /// snapshots.
    fn restorable_messages(&mut self) -> Vec<client_message::Body> {
        let leases = self.leases.values_mut();
        leases.filter_map(HeldLease::restorable_message).collect()
    }

    /// Returns the messages about leases whose requested marks are committed, or cannot be.
    fn mark_messages(&mut self) -> Vec<client_message::Body> {
        let (leases, now) = (self.leases.values_mut(), Instant::now());
        leases.filter_map(|lease| lease.mark_message(now)).collect()
    }

    /// Returns the questions why requests and leases wait that are due.
    fn questions(&mut self) -> Vec<client_message::Body> {
        let due = self.explanations.take_due(Instant::now()).into_iter();
        due.map(|waiter| client_message::Body::ExplainWait(waiter.question()))
            .collect()
    }

    async fn serve(&mut self, mut stream: ControlStream) -> StreamEnd {
        self.explanations.clear();
        for held_lease in self.leases.values_mut() {
            (
                held_lease.reported_restorable,
                held_lease.marks_awaited_until,
            ) = (false, None);
        }
        let mut silent_at = Instant::now() + SILENCE;
        loop {
            let (mut messages, left) = self.apply_withdrawals();
            messages.extend(self.release_messages());
            messages.extend(self.unreachable_messages());
            messages.extend(self.resume_messages());
            messages.extend(self.restorable_messages());
            messages.extend(self.mark_messages());
            if stream.explains_waits {
                messages.extend(self.questions());
            }
            let next_question = self
                .explanations
                .next_due()
                .filter(|_| stream.explains_waits);
            let mut held_leases = self.leases.values();
            let awaits_marks = held_leases.any(|lease| lease.marks_awaited_until.is_some());
            let check = match awaits_marks {
                true => MARK_CHECK,
                false => RESTORABLE_CHECK,
            };
            for body in messages {
                if let Err(lost) = stream.send(body).await {
                    return lost;
                }
            }
            if let Some(left) = left {
                leave(stream).await;
                // The receiver may have given up waiting.
                let _ = left.send(());
                return StreamEnd::Left;
            }
            tokio::select! {
                received = timeout_at(silent_at, stream.inbound.message()) => match received {
                    Ok(Ok(Some(received))) => {
                        silent_at = Instant::now() + SILENCE;
                        self.on_message(received);
                    }
                    Ok(Ok(None)) => return StreamEnd::Lost("the pool closed the connection".into()),
                    Ok(Err(status)) => return StreamEnd::Lost(sanitize(status.message(), MESSAGE_CHARS).to_string()),
                    Err(_) => return StreamEnd::Lost(format!("the pool sent nothing for {SILENCE:?}")),
                },
                call = self.requests.recv() => {
                    let Some(call) = call else {
                        leave(stream).await;
                        return StreamEnd::Left;
                    };
                    for body in self.on_call(call) {
                        if let Err(lost) = stream.send(body).await {
                            return lost;
                        }
                    }
                }
                () = self.withdrawals.added() => {}
                () = self.unreachable.added() => {}
                () = self.used.added() => {}
                () = sleep_until(next_question.unwrap_or(silent_at)), if next_question.is_some() => {}
                () = sleep(check), if !self.leases.is_empty() => {}
            }
        }
    }

    /// Makes a request pending. Returns the messages to send for it.
    fn on_call(&mut self, call: Call) -> Vec<client_message::Body> {
        match call {
            Call::Lease(call) => self.on_lease_call(call).into_iter().collect(),
            Call::Standing(call) => self.on_standing_call(call),
        }
    }

    /// Makes a request to suspend or resume a lease pending. Returns the messages to send for it.
    fn on_standing_call(&mut self, call: StandingCall) -> Vec<client_message::Body> {
        let change = call.change;
        // The caller may have given up.
        if call.outcome.is_closed() {
            return Vec::new();
        }
        // The pool must know whether the lease could go on.
        let mut messages = self.restorable_messages();
        self.standing_calls
            .retain(|_, call| !call.outcome.is_closed());
        self.standing_calls
            .insert(RequestId(change.request_id), call);
        messages.push(client_message::Body::ChangeStanding(change));
        messages
    }

    /// Makes a request for a lease pending. Returns the message to send for it, or `None` if
    /// the request was cancelled already.
    fn on_lease_call(&mut self, lease_call: LeaseCall) -> Option<client_message::Body> {
        // The request was cancelled while in the queue, where `apply_withdrawals` does not look.
        if lease_call.replies.outcome.is_closed() {
            return None;
        }
        let request = lease_call.request.clone();
        let id = RequestId(request.request_id);
        self.pending.insert(id, lease_call);
        Some(client_message::Body::Request(request))
    }

    /// Removes cancelled requests, and marks dropped leases as released. Returns the messages
    /// that cancel the requests, and, if the client is to leave the pool, the sender that must
    /// be notified once it has left.
    fn apply_withdrawals(
        &mut self,
    ) -> (Vec<client_message::Body>, Option<blocking::SyncSender<()>>) {
        let withdrawn = self.withdrawals.take();
        for lease in withdrawn.released {
            // A lease that is not in the table has ended already.
            if let Some(held_lease) = self.leases.get_mut(&lease) {
                held_lease.released = true;
            }
        }
        let cancelled = withdrawn.cancelled.into_iter().filter_map(|id| {
            self.remove_pending(id)?;
            Some(client_message::Body::Cancel(CancelRequest {
                request_id: id.0,
            }))
        });
        (cancelled.collect(), withdrawn.left)
    }

    /// Handles requests during the pause between two attempts. Returns whether the client
    /// left.
    async fn pause_and_serve(&mut self) -> bool {
        let pause = sleep(RETRY);
        tokio::pin!(pause);
        loop {
            // Cancelled requests need no message: the scheduler dropped all requests of this
            // client when the stream ended, and only pending ones are sent again.
            let (_, left) = self.apply_withdrawals();
            if let Some(left) = left {
                let _ = left.send(());
                return true;
            }
            tokio::select! {
                () = &mut pause => return false,
                call = self.requests.recv() => match call {
                    // The next hello is followed by all pending requests for leases.
                    Some(Call::Lease(call)) => drop(self.on_lease_call(call)),
                    Some(Call::Standing(call)) => {
                        let _ = call.outcome.send(Err(StandingError::Disconnected));
                    }
                    None => return true,
                },
                () = self.withdrawals.added() => {}
            }
        }
    }
}
