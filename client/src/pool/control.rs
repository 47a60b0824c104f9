//! The task that exchanges messages with the scheduler.
//!
//! It owns the one control stream of this client, opens a new one when the stream is lost,
//! and then claims its leases and repeats its pending requests. Leases and sessions go on
//! while the scheduler cannot be reached.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak, mpsc as blocking},
    time::Duration,
};

use bytes::Bytes;
use tensord_proto::{
    credential::ClientCredential,
    ids::{LeaseId, RequestId},
    text::{MESSAGE_CHARS, sanitize},
    v1::{
        CancelRequest, ClientHello, ClientMessage, Error, ErrorCode, Granted, LeaseRequest,
        PoolMessage, ReleaseLease, Renewed, StatusReply, StatusRequest, client_message,
        pool_client::PoolClient, pool_message,
    },
    version,
};
use tensord_transport::{PoolUrl, control};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Streaming, metadata::MetadataValue, transport::Channel};
use tracing::{info, warn};

use crate::{error::ConnectError, session::Session};

/// How long the scheduler may take to reply.
const DEADLINE: Duration = Duration::from_millis(3500);

/// A stream on which nothing is received for this long is lost; schedulers send at least a
/// ping each second.
const SILENCE: Duration = Duration::from_secs(5);

/// Pause between attempts to reconnect.
const RETRY: Duration = Duration::from_millis(500);

/// Capacity of the queue of messages to the scheduler.
const QUEUE: usize = 64;

/// A request of the rest of the client to this task.
pub(crate) enum ControlRequest {
    Lease {
        request: LeaseRequest,
        replies: RequestReplies,
    },
    Cancel(RequestId),
    Release(LeaseId),
    /// Leaves the pool; the sender is used when the client has left.
    Leave(blocking::SyncSender<()>),
}

/// Where this task reports what happens to a request for a lease.
pub(crate) struct RequestReplies {
    /// The position in the queue, 1 being next.
    pub(crate) position: watch::Sender<u32>,
    pub(crate) outcome: oneshot::Sender<RequestOutcome>,
}

/// What becomes of a request for a lease.
pub(crate) enum RequestOutcome {
    Granted(Granted, LeaseWatch),
    Refused(Error),
}

/// What the pool reports about a lease.
#[derive(Clone, Default)]
pub(crate) struct LeaseWatch(Arc<Mutex<LeaseStatus>>);

#[derive(Default)]
struct LeaseStatus {
    ended: Option<String>,
    sessions: Vec<Weak<Session>>,
}

impl LeaseWatch {
    pub(crate) fn ended(&self) -> Option<String> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .ended
            .clone()
    }

    /// Registers `session`, which fails when the lease ends.
    pub(crate) fn add(&self, session: &Arc<Session>) {
        let mut watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watched.sessions.push(Arc::downgrade(session));
        if let Some(reason) = &watched.ended {
            session.fail(reason.clone());
        }
    }

    fn end(&self, reason: &str) {
        let mut watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watched.ended = Some(reason.to_owned());
        let sessions = watched.sessions.iter().filter_map(Weak::upgrade);
        sessions.for_each(|session| session.fail(reason));
    }
}

struct PendingRequest {
    request: LeaseRequest,
    replies: RequestReplies,
}

struct HeldLease {
    token: Bytes,
    watch: LeaseWatch,
    /// The lease was dropped, and is released as soon as there is a stream. Until then it is
    /// still claimed: a scheduler that restarted needs the claim before the release.
    released: bool,
}

pub(crate) struct Control {
    url: PoolUrl,
    /// The credential of which this client's id is the hash.
    credential: ClientCredential,
    requests: mpsc::Receiver<ControlRequest>,
    pending: HashMap<RequestId, PendingRequest>,
    leases: HashMap<LeaseId, HeldLease>,
}

struct ControlStream {
    outbound: mpsc::Sender<ClientMessage>,
    inbound: Streaming<PoolMessage>,
}

/// Why a stream is no longer used.
enum StreamEnd {
    Lost(String),
    Left,
}

impl Control {
    pub(crate) fn new(
        url: PoolUrl,
        credential: ClientCredential,
        requests: mpsc::Receiver<ControlRequest>,
    ) -> Self {
        Self {
            url,
            credential,
            requests,
            pending: HashMap::new(),
            leases: HashMap::new(),
        }
    }

    /// Runs until the client leaves. `connected` receives the result of the first attempt.
    pub(crate) async fn run(mut self, connected: blocking::SyncSender<Result<(), ConnectError>>) {
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
                }
            }
            stream = loop {
                match self.attach().await {
                    Ok(stream) => break stream,
                    Err(_) if self.pause_and_serve().await => return,
                    Err(_) => {}
                }
            };
            info!("reconnected to the scheduler at {}", self.url.authority());
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
        // The queue is still empty, so this does not wait.
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
        Ok(ControlStream { outbound, inbound })
    }

    /// Returns the messages that release dropped leases.
    fn release_messages(&mut self) -> Vec<client_message::Body> {
        let released = self.leases.extract_if(|_, held_lease| held_lease.released);
        let release = |lease: LeaseId| ReleaseLease { lease_id: lease.0 };
        released
            .map(|(lease, _)| client_message::Body::Release(release(lease)))
            .collect()
    }

    async fn serve(&mut self, mut stream: ControlStream) -> StreamEnd {
        loop {
            for body in self.release_messages() {
                if stream.outbound.send(message(body)).await.is_err() {
                    return StreamEnd::Lost("the stream to the pool ended".into());
                }
            }
            tokio::select! {
                received = timeout(SILENCE, stream.inbound.message()) => match received {
                    Ok(Ok(Some(received))) => self.on_message(received),
                    Ok(Ok(None)) => return StreamEnd::Lost("the pool closed the connection".into()),
                    Ok(Err(status)) => return StreamEnd::Lost(sanitize(status.message(), MESSAGE_CHARS).to_string()),
                    Err(_) => return StreamEnd::Lost(format!("the pool sent nothing for {SILENCE:?}")),
                },
                control_request = self.requests.recv() => match self.on_request(control_request) {
                    Ok(Some(body)) => {
                        if stream.outbound.send(message(body)).await.is_err() {
                            return StreamEnd::Lost("the stream to the pool ended".into());
                        }
                    }
                    Ok(None) => {}
                    Err(left) => {
                        leave(stream).await;
                        // The receiver may have given up waiting.
                        let _ = left.map(|left| left.send(()));
                        return StreamEnd::Left;
                    }
                },
            }
        }
    }

    /// Handles `control_request`. Returns the messages to send for it, or the sender to use
    /// when the client has left.
    fn on_request(
        &mut self,
        control_request: Option<ControlRequest>,
    ) -> Result<Option<client_message::Body>, Option<blocking::SyncSender<()>>> {
        Ok(match control_request {
            None => return Err(None),
            Some(ControlRequest::Leave(left)) => return Err(Some(left)),
            Some(ControlRequest::Lease { request, replies }) => {
                let id = RequestId(request.request_id);
                self.pending.insert(
                    id,
                    PendingRequest {
                        request: request.clone(),
                        replies,
                    },
                );
                Some(client_message::Body::Request(request))
            }
            Some(ControlRequest::Cancel(RequestId(request_id))) => {
                self.pending.remove(&RequestId(request_id));
                Some(client_message::Body::Cancel(CancelRequest { request_id }))
            }
            Some(ControlRequest::Release(lease)) => {
                // A lease that is not in the table has ended already.
                if let Some(held_lease) = self.leases.get_mut(&lease) {
                    held_lease.released = true;
                }
                None
            }
        })
    }

    /// Handles requests during the pause between two attempts. Returns whether the client
    /// left.
    async fn pause_and_serve(&mut self) -> bool {
        let pause = sleep(RETRY);
        tokio::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => return false,
                control_request = self.requests.recv() => {
                    if let Err(left) = self.on_request(control_request) {
                        let _ = left.map(|left| left.send(()));
                        return true;
                    }
                }
            }
        }
    }

    /// Handles a message of the pool.
    fn on_message(&mut self, message: PoolMessage) {
        match message.body {
            Some(pool_message::Body::Queued(queued)) => {
                if let Some(pending) = self.pending.get(&RequestId(queued.request_id)) {
                    pending.replies.position.send_replace(queued.position);
                }
            }
            Some(pool_message::Body::Granted(granted)) => self.granted(granted),
            Some(pool_message::Body::Renewed(renewed)) => self.renewed(renewed),
            Some(pool_message::Body::Refused(refused)) => {
                if let Some(pending) = self.pending.remove(&RequestId(refused.request_id)) {
                    let error = refused.error.unwrap_or_default();
                    let refused = RequestOutcome::Refused(error);
                    // The request may have been dropped meanwhile.
                    let _ = pending.replies.outcome.send(refused);
                }
            }
            Some(pool_message::Body::Ended(ended)) => {
                if let Some(held_lease) = self.leases.remove(&LeaseId(ended.lease_id)) {
                    let error = ended
                        .error
                        .unwrap_or_else(|| Error::new(ErrorCode::Lease, "the pool gave no reason"));
                    warn!("lease {} ended: {error}", LeaseId(ended.lease_id));
                    held_lease.watch.end(&format!("the lease ended: {error}"));
                }
            }
            Some(pool_message::Body::Hello(_) | pool_message::Body::Beat(_)) | None => {}
        }
    }

    /// Stores a lease's new token. Open sessions do not need it.
    fn renewed(&mut self, renewed: Renewed) {
        if let Some(held_lease) = self.leases.get_mut(&LeaseId(renewed.lease_id)) {
            held_lease.token = renewed.token;
        }
    }

    fn granted(&mut self, granted: Granted) {
        let lease = LeaseId(granted.lease_id);
        let token = granted.token.clone();
        let watch = LeaseWatch::default();
        let pending = self.pending.remove(&RequestId(granted.request_id));
        let outcome = RequestOutcome::Granted(granted, watch.clone());
        let taken = pending.is_some_and(|pending| pending.replies.outcome.send(outcome).is_ok());
        // A request that was cancelled meanwhile has its lease released.
        let released = !taken;
        let held_lease = HeldLease {
            token,
            watch,
            released,
        };
        self.leases.insert(lease, held_lease);
    }
}

/// Finishes the stream, so that the scheduler receives all messages sent before.
async fn leave(stream: ControlStream) {
    drop(stream.outbound);
    let mut inbound = stream.inbound;
    while let Ok(Some(_)) = inbound.message().await {}
}

async fn connect(url: &PoolUrl) -> Result<PoolClient<Channel>, ConnectError> {
    let channel = control::connect(&url.host, url.port, &url.trust).await?;
    Ok(PoolClient::new(channel))
}

fn authorised<T>(body: T, url: &PoolUrl) -> Result<Request<T>, ConnectError> {
    let token = url.token.as_ref().map_or("", |token| token.reveal());
    let bearer = MetadataValue::try_from(format!("Bearer {token}"));
    let mut bearer = bearer.map_err(|_| ConnectError::Token {
        pool: url.authority(),
        reason: "the token contains characters that a token cannot have".into(),
    })?;
    bearer.set_sensitive(true);
    let mut request = Request::new(body);
    request.metadata_mut().insert("authorization", bearer);
    Ok(request)
}

/// Requests the status of the pool at `url`.
pub(super) async fn status(url: &PoolUrl) -> Result<StatusReply, ConnectError> {
    let mut client = connect(url).await?;
    let reply = client.status(authorised(StatusRequest {}, url)?).await;
    let reply = reply.map_err(|status| ConnectError::from_status(&url.authority(), &status))?;
    Ok(reply.into_inner())
}

fn message(body: client_message::Body) -> ClientMessage {
    ClientMessage { body: Some(body) }
}
