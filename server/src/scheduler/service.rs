//! The gRPC services: they check the caller's rights, the protocol version and the first
//! message of a stream. After that, the driver owns the stream.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use tensord_proto::{
    credential::{ClientCredential, CredentialHash},
    ids::ClientId,
    v1::{
        ClientHello, ClientMessage, Error, ErrorCode, Hello, PoolHello, PoolMessage, Register,
        Registered, StatusReply, StatusRequest, WorkerCommand, WorkerMessage, client_message,
        pool_message, pool_server::Pool, worker_command, worker_message, workers_server::Workers,
    },
    version,
};
use tensord_transport::{
    AdmissionLimitError,
    control::{self, ResponseStream},
};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tracing::warn;

use super::{
    Registries, Timing,
    access::{AuthContext, Role, UnixMillis},
    convert,
    driver::{Input, InputSender, JoiningWorker, credential_mismatch},
    enrolment::{Admitted, JoinRequest, Offer},
    stream::{self, AcceptedStream, OUTGOING_QUEUE},
    usage::UsageLog,
    worker_events,
};
use crate::{
    audit::{Audit, Entry, EntryKind},
    grpc_status,
};

/// The implementation of all services. Cheap to clone.
#[derive(Clone)]
pub(super) struct Service(pub(super) Arc<Shared>);

/// The state shared by the services.
pub(super) struct Shared {
    pub(super) registries: Registries,
    pub(super) timing: Timing,
    pub(super) lease_expiry: Duration,
    /// The public key that verifies lease tokens.
    pub(super) lease_key: Bytes,
    pub(super) driver: InputSender,
    pub(super) audit: Audit,
    pub(super) usage: Option<UsageLog>,
    /// Permits to make the reply to a status call, which goes through the whole pool: as many as [`STATUS_REPLIES`].
    pub(super) status_replies: Arc<Semaphore>,
}

/// How many replies to status calls are made at the same time, each on a thread of its own, so that they leave
/// processors to the driver.
pub(super) const STATUS_REPLIES: usize = 2;

impl Shared {
    /// Admits a call that presents a token of one of `roles`.
    pub(super) fn admit<T>(
        &self,
        roles: &[Role],
        request: &Request<T>,
    ) -> Result<AuthContext, Status> {
        let checked = self.registries.access.check(roles, request.metadata());
        checked.map_err(|error| self.refuse(roles[0], request, &error))
    }

    /// Admits a call of an administrator, whose token must be valid still: such a call begins something new.
    pub(super) fn admit_admin<T>(&self, request: &Request<T>) -> Result<AuthContext, Status> {
        let auth = self.admit(&[Role::Admin], request)?;
        let checked = self.registries.access.check_may_open(&auth);
        checked.map_err(|error| self.refuse(Role::Admin, request, &error))?;
        Ok(auth)
    }

    fn refuse<T>(&self, role: Role, request: &Request<T>, error: &Error) -> Status {
        let peer = control::peer(request);
        warn!(%peer, "call refused: {error}");
        self.deny("call refused", role, peer, error);
        grpc_status::status(error)
    }

    /// Records in the audit log that a peer was refused the role `role`.
    fn deny(&self, cause: &'static str, role: Role, peer: SocketAddr, error: &Error) {
        self.audit.deny(cause, || {
            let entry = Entry::new(EntryKind::Denied).role(role.name());
            entry.address(peer).reason(error)
        });
    }

    /// Returns an interceptor that refuses calls without a token of one of `roles` before any
    /// of their body is read, so that none of these calls stays open. Handlers check the token
    /// again to get the [`AuthContext`].
    pub(super) fn guard(
        self: &Arc<Self>,
        roles: &'static [Role],
    ) -> impl Fn(Request<()>) -> Result<Request<()>, Status> + Clone + use<> {
        let shared = self.clone();
        move |request| {
            shared.admit(roles, &request)?;
            // Administrators and workers use reserved places, so that they get through when
            // programs have filled the pool.
            let reserved = !roles.contains(&Role::Client);
            let full = |e: AdmissionLimitError| {
                grpc_status::status(&Error::new(ErrorCode::Limit, e.to_string()))
            };
            control::admit(&request, reserved).map_err(full)?;
            Ok(request)
        }
    }

    /// Like [`guard`](Self::guard), for workers: a worker that is enrolled proved its right
    /// in the handshake and needs no token.
    pub(super) fn guard_workers(
        self: &Arc<Self>,
    ) -> impl Fn(Request<()>) -> Result<Request<()>, Status> + Clone + use<> {
        let (shared, others) = (self.clone(), self.guard(&[Role::Worker]));
        move |request| {
            let shown = control::certificate(&request);
            if !shown.is_some_and(|shown| shared.registries.enrolment.is_enrolled(&shown)) {
                return others(request);
            }
            let full = |e: AdmissionLimitError| {
                grpc_status::status(&Error::new(ErrorCode::Limit, e.to_string()))
            };
            control::admit(&request, true).map_err(full)?;
            Ok(request)
        }
    }

    pub(super) async fn send_to_driver(&self, input: Input) -> Result<(), Status> {
        let words = "the scheduler is shutting down";
        let gone = |_| grpc_status::status(&Error::new(ErrorCode::Draining, words));
        self.driver.send(input.into()).await.map_err(gone)
    }
}

/// Returns the protocol version to use with a peer that sent `hello`.
fn negotiate(hello: Option<&Hello>) -> Result<u32, Error> {
    match hello {
        Some(hello) => version::negotiate(&version::hello(), hello),
        None => Err(Error::new(
            ErrorCode::Protocol,
            "the hello contains no protocol versions",
        )),
    }
}

/// Runs `work` on a thread that may block.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    let bug = |e| grpc_status::status(&Error::new(ErrorCode::Internal, format!("{e}")));
    tokio::task::spawn_blocking(work).await.map_err(bug)
}

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

#[tonic::async_trait]
impl Pool for Service {
    type AttachStream = ResponseStream<PoolMessage>;

    async fn attach(
        &self,
        request: Request<Streaming<ClientMessage>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let shared = &self.0;
        let auth = shared.admit(&[Role::Client], &request)?;
        let peer = control::peer(&request);
        let mut incoming = request.into_inner();
        let first = stream::read_first(&mut incoming, shared.timing.hello).await?;
        let refused = |error| {
            warn!(%peer, "client refused: {error}");
            shared.deny("client refused", Role::Client, peer, &error);
            grpc_status::status(&error)
        };
        let greeted = shared.check_client_hello(first, &auth).map_err(refused)?;
        let (outgoing, messages) = mpsc::channel(OUTGOING_QUEUE);
        let (reply_sender, decision) = oneshot::channel();
        let attach = Input::Attach {
            client: greeted.credential.client_id(),
            credential: greeted.credential,
            auth,
            held: greeted.held,
            opened: AcceptedStream::new(peer, incoming, outgoing, greeted.answer),
            reply_sender,
        };
        shared.send_to_driver(attach).await?;
        let gone = |_| Status::unavailable("the scheduler is shutting down");
        decision.await.map_err(gone)?.map_err(refused)?;
        Ok(Response::new(stream::with_beats(
            messages,
            shared.timing.beat,
        )))
    }

    async fn status(
        &self,
        request: Request<StatusRequest>,
    ) -> Result<Response<StatusReply>, Status> {
        let auth = self.0.admit(&[Role::Client, Role::Admin], &request)?;
        let may = self.0.registries.access.check_may_open(&auth);
        may.map_err(|error| grpc_status::status(&error))?;
        let (reply, replied) = oneshot::channel();
        self.0.send_to_driver(Input::Status(reply)).await?;
        let gone = |_| Status::unavailable("the scheduler is shutting down");
        let copy = replied.await.map_err(gone)?;
        // An error would mean that the semaphore is closed, which it never is.
        let permit = self.0.status_replies.clone().acquire_owned().await.ok();
        let reply = blocking(move || {
            let _permit = permit;
            copy.status(&auth)
        });
        reply.await.map(Response::new)
    }
}

/// A client whose hello has been checked.
struct CheckedHello {
    credential: CredentialHash,
    held: convert::ClaimedLeases,
    answer: PoolMessage,
}

impl Shared {
    /// Checks a client's hello. Returns its identity, the leases that it claims, and the
    /// reply.
    fn check_client_hello(
        &self,
        message: ClientMessage,
        auth: &AuthContext,
    ) -> Result<CheckedHello, Error> {
        let Some(client_message::Body::Hello(ClientHello {
            hello,
            client_id,
            lease_tokens,
            credential,
        })) = message.body
        else {
            let words = "the first message of a client's stream must be its hello";
            return Err(Error::new(ErrorCode::Protocol, words));
        };
        let protocol = negotiate(hello.as_ref())?;
        let client = ClientId(client_id);
        let Some(shown) = ClientCredential::from_bytes(&credential) else {
            let words = format!(
                "the client's credential has {} bytes; it must have {}",
                credential.len(),
                ClientCredential::BYTES
            );
            return Err(Error::new(ErrorCode::Protocol, words));
        };
        let credential = shown.hash();
        if credential.client_id() != client {
            return Err(credential_mismatch(client));
        }
        let tenant = &auth.tenant;
        let held = convert::claimed_leases(
            client,
            credential,
            tenant,
            &lease_tokens,
            &self.lease_key,
            UnixMillis::now(),
        )?;
        let answer = pool_message::Body::Hello(PoolHello {
            hello: Some(version::hello()),
            protocol,
            lease_expiry_ms: millis(self.lease_expiry),
            explains_waits: true,
        });
        Ok(CheckedHello {
            credential,
            held,
            answer: convert::pool_message(answer),
        })
    }

    /// Admits a worker that has proved its identity, on a thread that may block on the
    /// disk.
    async fn admit_worker(
        &self,
        joining: JoinRequest,
        auth: Result<AuthContext, Error>,
    ) -> Result<Admitted, Error> {
        let (access, enrolment) = (
            self.registries.access.clone(),
            self.registries.enrolment.clone(),
        );
        let admit = move || enrolment.admit(joining, auth, &access);
        let admitted = tokio::task::spawn_blocking(admit).await;
        admitted.unwrap_or_else(|bug| Err(Error::new(ErrorCode::Internal, bug.to_string())))
    }

    /// Checks a worker's first message. Returns its registration and the reply.
    fn check_registration(
        &self,
        message: WorkerMessage,
    ) -> Result<(Register, WorkerCommand), Error> {
        let Some(worker_message::Body::Register(register)) = message.body else {
            let words = "the first message of a worker's stream must be its registration";
            return Err(Error::new(ErrorCode::Protocol, words));
        };
        let protocol = negotiate(register.hello.as_ref())?;
        let answer = worker_command::Body::Registered(Registered {
            hello: Some(version::hello()),
            protocol,
            lease_key: self.lease_key.clone(),
            heartbeat_ms: millis(self.timing.heartbeat),
            time_ms: UnixMillis::now().0,
        });
        Ok((register, WorkerCommand { body: Some(answer) }))
    }
}

#[tonic::async_trait]
impl Workers for Service {
    type JoinStream = ResponseStream<WorkerCommand>;

    async fn join(
        &self,
        request: Request<Streaming<WorkerMessage>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let shared = &self.0;
        let (peer, shown) = (control::peer(&request), control::certificate(&request));
        let auth = shared
            .registries
            .access
            .check(&[Role::Worker], request.metadata());
        let mut incoming = request.into_inner();
        let first = stream::read_first(&mut incoming, shared.timing.hello).await?;
        let refused = |error| {
            warn!(%peer, "worker refused: {error}");
            shared.deny("worker refused", Role::Worker, peer, &error);
            grpc_status::status(&error)
        };
        let (register, answer) = shared.check_registration(first).map_err(refused)?;
        let proved = worker_events::verify_identity(&register, shown.as_ref());
        let leaving = register.leaving;
        let registered = worker_events::registration(register, peer.ip());
        let registration_report = registered.map_err(refused)?;
        let (worker, certificate) = proved.map_err(refused)?;
        let offer = Offer::of(&registration_report.registration.devices);
        let offer = offer.map_err(|e| refused(Error::new(ErrorCode::Enrolment, e)))?;
        let joining = JoinRequest {
            name: registration_report.registration.endpoint.name.clone(),
            certificate,
            offer,
        };
        let admitted = shared.admit_worker(joining, auth).await.map_err(refused)?;
        let (outgoing, messages) = mpsc::channel(OUTGOING_QUEUE);
        let joining_worker = JoiningWorker {
            worker,
            admitted,
            registration_report,
            leaving,
            answer,
        };
        let joined = Input::Join {
            joining_worker: Box::new(joining_worker),
            opened: AcceptedStream {
                incoming,
                outgoing,
                peer,
            },
        };
        shared.send_to_driver(joined).await?;
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }
}
