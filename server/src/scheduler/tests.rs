//! The services over real TLS on loopback, with hand-written messages.
//!
//! [`Rig`] is a scheduler with its state; [`TestClient`] and [`TestWorker`] are streams to
//! it. No test relies on a fixed delay: every wait is for a condition, and fails after
//! [`TIMEOUT`].

mod apply;
mod audit;
mod credentials;
mod enrolment;
mod explanations;
mod grants;
mod leases;
mod peers;
mod places;
mod refusals;
mod restart;
mod shares;
mod tenants;
mod tokens;
mod usage;

use std::{
    collections::HashMap,
    fmt::Debug,
    sync::{LazyLock, Mutex},
    time::Duration,
};

use prost::Message;
use tensord_proto::{
    credential::ClientCredential,
    v1::{
        ClientHello, ClientMessage, Device, DeviceUsage, Error, ErrorCode, Granted, Heartbeat,
        HeldDevice, LeaseClaims, LeaseRequest, PoolHello, PoolMessage, Register, Registered,
        ReleaseLease, Released, StatusReply, StatusRequest, WorkerCommand, WorkerMessage,
        client_message, pool_client::PoolClient, pool_message, worker_command, worker_message,
        workers_client::WorkersClient,
    },
    version,
};
use tensord_transport::{Identity, Secret, control, identity, tls::Trust};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status, Streaming, transport::Channel};

use self::peers::{TestClient, TestWorker};
use super::*;
use crate::{grpc_status, state::StateDir};

/// The time limit of waits that should take milliseconds.
const TIMEOUT: Duration = Duration::from_secs(10);

async fn with_timeout<T>(what: &str, future: impl Future<Output = T>) -> T {
    match timeout(TIMEOUT, future).await {
        Ok(value) => value,
        Err(_) => panic!("no {what} within {TIMEOUT:?}"),
    }
}

/// A scheduler with its own state directory.
struct Rig {
    directory: tempfile::TempDir,
    scheduler: Scheduler,
    trust: Trust,
    client_token: Secret,
    worker_token: Secret,
    admin_token: Secret,
}

/// Options with timeouts so long that no test hits them by accident.
fn options() -> Options {
    let mut options = Options::new("127.0.0.1:0".parse().unwrap(), 1);
    options.engine.worker_timeout = Duration::from_secs(3600);
    options.engine.lease_expiry = Duration::from_secs(3600);
    options
}

/// Opens the records of leases once an earlier scheduler, whose tasks may still be ending, has closed
/// them.
async fn open_records(state: &StateDir) -> OpenRecords {
    let opening = async {
        loop {
            match LeaseRecords::open(state) {
                Ok(records) => return records,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    };
    with_timeout("records of leases", opening).await
}

/// As [`open_records`], the tenants.
async fn open_tenants(state: &StateDir) -> RedbTenants {
    let opening = async {
        loop {
            match RedbTenants::open(state) {
                Ok(store) => return store,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    };
    with_timeout("records of tenants", opening).await
}

impl Rig {
    async fn start() -> Self {
        Self::with(options()).await
    }

    async fn with(options: Options) -> Self {
        Self::on(tempfile::tempdir().unwrap(), options).await
    }

    async fn on(directory: tempfile::TempDir, mut options: Options) -> Self {
        let state = StateDir::open(directory.path()).unwrap();
        let now = std::time::SystemTime::now();
        options.term = state.raise_grant_term(now).unwrap();
        options.past_use = Some(PastUseFile::open(&state).unwrap());
        let secrets = state.pool_secrets().unwrap();
        let records = open_records(&state).await;
        let store = open_tenants(&state).await;
        let access = Access::open(StateDir::open(directory.path()).unwrap(), &secrets).unwrap();
        let enrolment = Enrolment::open(&state, &access).unwrap();
        let tenants = Tenants::open(Box::new(store), &access).unwrap();
        let trust = Trust::Pin(secrets.identity.fingerprint());
        let (client_token, worker_token) =
            (secrets.client_token.clone(), secrets.worker_token.clone());
        let admin_token = secrets.admin_token.clone();
        let scheduler = Scheduler::start(options, secrets, access, enrolment, tenants, records)
            .await
            .unwrap();
        Self {
            directory,
            scheduler,
            trust,
            client_token,
            worker_token,
            admin_token,
        }
    }

    /// Drops this scheduler and starts another one with the same state.
    async fn restart(self) -> Self {
        let Self {
            directory,
            scheduler,
            ..
        } = self;
        drop(scheduler);
        Self::on(directory, options()).await
    }

    async fn channel(&self) -> Channel {
        let address = self.scheduler.address();
        let connecting = control::connect("127.0.0.1", address.port(), &self.trust);
        with_timeout("connection", connecting).await.unwrap()
    }

    async fn client(&self, id: u64) -> TestClient {
        self.client_holding(id, &[]).await
    }

    async fn client_holding(&self, id: u64, leases: &[&Granted]) -> TestClient {
        let lease_tokens = leases.iter().map(|lease| lease.token.clone()).collect();
        self.client_with_tokens(&self.client_token, id, lease_tokens)
            .await
            .unwrap()
    }

    /// Attaches with any pool token and these lease tokens.
    async fn client_with_tokens(
        &self,
        token: &Secret,
        id: u64,
        lease_tokens: Vec<bytes::Bytes>,
    ) -> Result<TestClient, Status> {
        let hello = ClientHello {
            lease_tokens,
            ..hello_of(id)
        };
        self.attach(token, client_message::Body::Hello(hello)).await
    }

    /// Attaches with any token and any first message.
    async fn attach(
        &self,
        token: &Secret,
        first: client_message::Body,
    ) -> Result<TestClient, Status> {
        let (outbound, outbound_receiver) = mpsc::channel(16);
        outbound
            .try_send(ClientMessage { body: Some(first) })
            .unwrap();
        let request = with_token(ReceiverStream::new(outbound_receiver), token);
        let mut client = PoolClient::new(self.channel().await);
        let answer = with_timeout("answer", client.attach(request)).await?;
        let mut client = TestClient {
            outbound,
            inbound: answer.into_inner(),
            hello: PoolHello::default(),
        };
        match client.recv().await? {
            pool_message::Body::Hello(hello) => client.hello = hello,
            other => panic!("{other:?} came before the hello"),
        }
        Ok(client)
    }

    async fn worker(&self, id: u64, devices: usize) -> TestWorker {
        self.register(register(id, devices)).await.unwrap()
    }

    async fn register(&self, register: Register) -> Result<TestWorker, Status> {
        self.join(&self.worker_token, worker_message::Body::Register(register))
            .await
    }

    /// Joins with any token and any first message, with the certificate that the message
    /// registers.
    async fn join(
        &self,
        token: &Secret,
        first: worker_message::Body,
    ) -> Result<TestWorker, Status> {
        let own = match &first {
            worker_message::Body::Register(register) => {
                identity_with_fingerprint(&register.certificate_sha256)
            }
            _ => None,
        };
        self.join_as(own.unwrap_or_else(|| identity_of(0)), token, first)
            .await
    }

    /// Joins with any certificate, token and first message.
    async fn join_as(
        &self,
        own: Arc<Identity>,
        token: &Secret,
        first: worker_message::Body,
    ) -> Result<TestWorker, Status> {
        let (outbound, outbound_receiver) = mpsc::channel(16);
        outbound
            .try_send(WorkerMessage { body: Some(first) })
            .unwrap();
        let request = with_token(ReceiverStream::new(outbound_receiver), token);
        let port = self.scheduler.address().port();
        let connecting = control::connect_as(own, "127.0.0.1", port, &self.trust);
        let channel = with_timeout("connection", connecting).await.unwrap();
        let mut workers = WorkersClient::new(channel);
        let answer = with_timeout("answer", workers.join(request)).await?;
        let mut inbound = answer.into_inner();
        match with_timeout("command", inbound.message())
            .await?
            .and_then(|command| command.body)
        {
            Some(worker_command::Body::Registered(registered)) => Ok(TestWorker {
                outbound,
                inbound,
                registered,
            }),
            other => panic!("{other:?} is no registration"),
        }
    }

    async fn status(&self) -> StatusReply {
        self.status_with(&self.client_token).await.unwrap()
    }

    async fn status_with(&self, token: &Secret) -> Result<StatusReply, Status> {
        let mut client = PoolClient::new(self.channel().await);
        let request = with_token(StatusRequest {}, token);
        let reply = with_timeout("status", client.status(request)).await?;
        Ok(reply.into_inner())
    }

    /// Waits until the status meets `condition`, for changes that no stream reports.
    async fn wait_for_status(&self, condition: impl Fn(&StatusReply) -> bool) -> StatusReply {
        with_timeout("such status", async {
            loop {
                let status = self.status().await;
                if condition(&status) {
                    return status;
                }
                tokio::task::yield_now().await;
            }
        })
        .await
    }
}

/// The credential of test client `id`.
fn credential(id: u64) -> ClientCredential {
    let mut bytes = [0; ClientCredential::BYTES];
    bytes[..8].copy_from_slice(&id.to_le_bytes());
    ClientCredential::new(bytes)
}

/// The hello of test client `id`, without leases.
fn hello_of(id: u64) -> ClientHello {
    let credential = credential(id);
    ClientHello {
        hello: Some(version::hello()),
        client_id: credential.hash().client_id().0,
        lease_tokens: Vec::new(),
        credential: credential.reveal(),
    }
}

/// The claims of a lease's token.
fn claims(token: &[u8]) -> LeaseClaims {
    const SIGNATURE_BYTES: usize = 64;
    let claims = &token[..token.len() - SIGNATURE_BYTES];
    LeaseClaims::decode(claims).unwrap()
}

fn with_token<T>(message: T, token: &Secret) -> Request<T> {
    let mut request = Request::new(message);
    let bearer = format!("Bearer {}", token.reveal()).parse().unwrap();
    request.metadata_mut().insert("authorization", bearer);
    request
}

static IDENTITIES: LazyLock<Mutex<HashMap<u64, Arc<Identity>>>> = LazyLock::new(Mutex::default);

/// The identity of test worker `number`, the same for all pools of the test process.
fn identity_of(number: u64) -> Arc<Identity> {
    let mut identities = IDENTITIES.lock().unwrap();
    let made = || Arc::new(Identity::self_signed().unwrap());
    identities.entry(number).or_insert_with(made).clone()
}

/// The test worker identity with this certificate fingerprint.
fn identity_with_fingerprint(fingerprint: &[u8]) -> Option<Arc<Identity>> {
    let identities = IDENTITIES.lock().unwrap();
    let mut all = identities.values();
    all.find(|own| own.fingerprint().0 == fingerprint).cloned()
}

/// The start bytes of test worker `number`.
fn start(number: u64) -> [u8; identity::START_BYTES] {
    [number as u8; identity::START_BYTES]
}

/// The id of test worker `number`.
fn worker_id(number: u64) -> tensord_proto::ids::WorkerId {
    identity::worker_id(&identity_of(number).fingerprint(), &start(number))
}

/// The registration of a worker with `devices` CPU devices of 1 GiB that listens on every
/// address.
fn register(id: u64, devices: usize) -> Register {
    let device = Device {
        kind: "flex".into(),
        name: "CPU".into(),
        memory_bytes: 1 << 30,
        fingerprint: None,
    };
    Register {
        hello: Some(version::hello()),
        worker_id: worker_id(id).0,
        start: start(id).to_vec().into(),
        name: format!("w{id}"),
        address: format!("0.0.0.0:{}", 7000 + id),
        certificate_sha256: identity_of(id).fingerprint().0.to_vec().into(),
        devices: vec![device; devices],
        held: Vec::new(),
        ended: Vec::new(),
        leaving: false,
        out_of_service: Vec::new(),
        suspended_leases: Vec::new(),
        store_id: 0,
        takes_shares: false,
    }
}

/// Returns the code and error of a refused call.
fn error_of<T: Debug>(refused: Result<T, Status>) -> (tonic::Code, Error) {
    let status = refused.unwrap_err();
    let error = grpc_status::error(&status);
    (
        status.code(),
        error.unwrap_or_else(|| panic!("{status:?} carries no error of ours")),
    )
}
