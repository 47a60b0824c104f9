//! The scheduler of a pool: the engine of `tensord_scheduler`, driven by gRPC
//! streams and a timer.
//!
//! ```text
//! service ──(checked hello)──► driver ◄──► Engine
//!   ▲                          │   ▲
//!   └──── answers ◄─ queue ────┘   └── readers, one a stream
//! ```
//!
//! [`Scheduler::start`] takes [`Options`] and returns a running scheduler, which ends when
//! dropped. It handles no tensors, ops or sessions: those go between clients and workers
//! directly.

mod access;
mod address;
mod admin;
mod convert;
mod driver;
mod enrolment;
mod gap;
mod lease_records;
mod past_use;
mod renewals;
mod service;
mod share_messages;
mod stream;
mod tenants;
mod usage;
mod view;
mod worker_commands;
mod worker_events;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use tensord_proto::v1::{
    admin_server::AdminServer, pool_server::PoolServer, workers_server::WorkersServer,
};
use tensord_scheduler::{Engine, Event, Timestamp};
use tensord_transport::{control, listen::BindError};
use tokio::{net::TcpListener, sync::Semaphore, task::JoinSet, time::timeout};
use tonic::service::{Routes, interceptor::InterceptedService};

use self::{
    access::UnixMillis,
    driver::{Driver, Input, InputSender, Logs, MAX_CLIENTS},
    lease_records::OpenRecords,
    service::{Service, Shared},
};
pub(crate) use self::{
    access::{Access, DEFAULT_TENANT, Role, millis},
    enrolment::Enrolment,
    lease_records::LeaseRecords,
    past_use::PastUseFile,
    tenants::{RedbTenants, TenantChange, TenantError, Tenants, policy_of},
    usage::UsageLog,
};
use crate::{audit::Audit, config::MAX_POOL_FILE_BYTES, state::PoolSecrets};

/// The largest message of a client or worker, in bytes: enough for a hello with the tokens
/// of hundreds of leases, or a registration of hundreds of devices.
const MAX_MESSAGE_BYTES: usize = 256 << 10;

/// The largest message of an administrator, in bytes: the tenants of the largest file of `tensord apply` take
/// less than twice the bytes of their text.
const MAX_ADMIN_MESSAGE_BYTES: usize = 2 * MAX_POOL_FILE_BYTES;

/// How long a lease token opens sessions: much longer than a restart of the scheduler or
/// the delivery of a message takes, but short, so that a stolen old token is of little use.
pub(crate) const LEASE_TOKEN_LIFE: Duration = Duration::from_secs(600);

/// The number of heartbeat intervals without a message after which a worker's stream is cut
/// off: as long as a client waits that receives nothing from the worker, because a lease moves once both
/// have noticed.
const MISSED_HEARTBEATS: u32 = 5;

/// How long a scheduler that stops waits for what leases have used to be on disk.
const USAGE_TIMEOUT: Duration = Duration::from_secs(2);

/// The options of a scheduler.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The listen address; port 0 picks a free port.
    pub(crate) listen: SocketAddr,
    /// The engine's timeouts and bounds.
    pub(crate) engine: tensord_scheduler::Options,
    /// The scheduler's term, the first half of its grants' numbers: higher than the term of
    /// any earlier scheduler of the pool.
    pub(crate) term: u64,
    /// The timeouts of streams.
    pub(crate) timing: Timing,
    /// The largest number of clients that are attached or may come back to leases.
    pub(crate) max_clients: usize,
    /// The audit log.
    pub(crate) audit: Audit,
    /// Where what tenants have had is kept, if it is.
    pub(crate) past_use: Option<PastUseFile>,
    /// Where what leases use is kept, if it is.
    pub(crate) usage: Option<UsageLog>,
}

/// Intervals and timeouts of streams.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// The time limit for the first message of a new stream.
    pub(crate) hello: Duration,
    /// The time without a message to a client after which the scheduler sends it a beat.
    pub(crate) beat: Duration,
    /// The heartbeat interval of workers.
    pub(crate) heartbeat: Duration,
    /// How long a lease token opens sessions; it is renewed after half of this time.
    pub(crate) lease_token_life: Duration,
    /// How often what tenants have had is written.
    pub(crate) past_use: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            hello: Duration::from_secs(5),
            beat: Duration::from_secs(1),
            heartbeat: Duration::from_millis(500),
            lease_token_life: LEASE_TOKEN_LIFE,
            past_use: Duration::from_secs(60),
        }
    }
}

impl Options {
    /// Creates options with the default timeouts and bounds.
    pub(crate) fn new(listen: SocketAddr, term: u64) -> Self {
        Self {
            listen,
            term,
            engine: tensord_scheduler::Options::default(),
            timing: Timing::default(),
            max_clients: MAX_CLIENTS,
            audit: Audit::disabled(),
            past_use: None,
            usage: None,
        }
    }
}

/// Who may use the pool, and what they may have.
#[derive(Clone, Debug)]
struct Registries {
    access: Arc<Access>,
    enrolment: Arc<Enrolment>,
    tenants: Arc<Tenants>,
}

/// The reason why a scheduler could not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    /// The address is in use, or not one of this host.
    #[error("cannot listen on {listen}: {source}; choose another address with --listen")]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// The TLS identity cannot be used.
    #[error(transparent)]
    Identity(#[from] BindError),
}

/// A running scheduler. After it has ended, clients and workers reconnect to the next one
/// with the same secrets and keep their leases. Dropping it closes their streams without an
/// error message.
pub(crate) struct Scheduler {
    address: SocketAddr,
    driver: InputSender,
    usage: Option<UsageLog>,
    tasks: JoinSet<()>,
}

impl Scheduler {
    /// Starts a scheduler, which goes on with the leases of `records`.
    ///
    /// # Errors
    ///
    /// See [`StartError`].
    pub(crate) async fn start(
        options: Options,
        secrets: PoolSecrets,
        access: Access,
        enrolment: Enrolment,
        tenants: Tenants,
        records: OpenRecords,
    ) -> Result<Self, StartError> {
        let Options {
            listen,
            engine,
            term,
            timing,
            max_clients,
            audit,
            past_use,
            usage,
        } = options;
        let failed = |source| StartError::Listen { listen, source };
        let tcp = TcpListener::bind(listen).await.map_err(failed)?;
        let address = tcp.local_addr().map_err(failed)?;
        let server = control::server(tcp, &secrets.identity)?;
        let registries = Registries {
            access: Arc::new(access),
            enrolment: Arc::new(enrolment),
            tenants: Arc::new(tenants),
        };
        let lease_key = secrets.signer.public_key().into();
        let lease_expiry = engine.lease_expiry;
        let start = Timestamp::from_millis(0);
        let mut engine = Engine::new(engine, term, start);
        engine.restore(records.known);
        if let Some(file) = &past_use {
            let (shares, age) = file.shares(UnixMillis::now());
            engine.restore_past(shares, age);
        }
        let policy = registries.tenants.read().policy();
        // Nobody is attached yet, so no command follows.
        engine.handle(Event::SetPolicy { policy }, start);
        let (running, driver) = Driver::new(
            engine,
            records.records,
            secrets.signer,
            registries.clone(),
            Logs {
                audit: audit.clone(),
                usage: usage.clone(),
            },
            timing,
            max_clients,
        );
        let shared = Shared {
            registries,
            timing,
            lease_expiry,
            lease_key,
            driver: driver.clone(),
            audit,
            usage,
            status_replies: Arc::new(Semaphore::new(service::STATUS_REPLIES)),
        };
        let shared = Arc::new(shared);
        let service = Service(shared.clone());
        let pool = PoolServer::new(service.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let pool = InterceptedService::new(pool, shared.guard(&[Role::Client, Role::Admin]));
        let admin =
            AdminServer::new(service.clone()).max_decoding_message_size(MAX_ADMIN_MESSAGE_BYTES);
        let workers = WorkersServer::new(service).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let workers = InterceptedService::new(workers, shared.guard_workers());
        let admin = InterceptedService::new(admin, shared.guard(&[Role::Admin]));
        let mut tasks = JoinSet::new();
        tasks.spawn(running.run());
        if let Some(file) = past_use {
            tasks.spawn(file.keep(driver.clone(), timing.past_use));
        }
        tasks.spawn(server.run(Routes::new(pool).add_service(workers).add_service(admin)));
        Ok(Self {
            address,
            driver,
            usage: shared.usage.clone(),
            tasks,
        })
    }

    /// Returns the listen address, with the actual port.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Refuses all further requests; existing leases stay.
    pub(crate) async fn stop_granting(&self) {
        // An error means that the driver has already stopped.
        let _ = self.driver.send(Input::StopGranting.into()).await;
    }

    /// Ends every stream with an error that states the reason, and waits for the driver to
    /// end, and for what leases have used to be on disk.
    pub(crate) async fn stop(mut self) {
        if self.driver.send(Input::Stop.into()).await.is_ok() {
            // The driver is the first task to end.
            self.tasks.join_next().await;
        }
        if let Some(usage) = &self.usage {
            // A disk that hangs does not keep the process from its end.
            let _ = timeout(USAGE_TIMEOUT, usage.written()).await;
        }
    }

    /// Waits until a task of the scheduler ends, which happens before [`stop`](Self::stop)
    /// only because of a bug.
    pub(crate) async fn ended(&mut self) {
        self.tasks.join_next().await;
    }
}

#[cfg(test)]
mod tests;
