//! The scheduler of a pool: the engine of `tensord_scheduler`, driven by gRPC
//! streams and a timer.
//!
//! ```text
//! service ──(checked hello)──► driver ◄──► Engine
//!   ▲                          │   ▲
//!   └──── answers ◄─ queue ────┘   └── readers, one a stream
//! ```
//!
//! Options in, a running [`Scheduler`] out, which ends when dropped. It sees
//! no tensor, op or session: those go between clients and workers.

mod access;
mod address;
mod admin;
mod convert;
mod driver;
mod enrolment;
mod gap;
mod renewals;
mod service;
mod stream;
mod view;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use tensord_proto::v1::{
    admin_server::AdminServer, pool_server::PoolServer, workers_server::WorkersServer,
};
use tensord_transport::{control, listen::BindError};
use tokio::{net::TcpListener, sync::mpsc, task::JoinSet};
use tonic::service::{Routes, interceptor::InterceptedService};

pub(crate) use self::{
    access::{Access, DEFAULT_TENANT, Role},
    enrolment::Enrolment,
};
use self::{
    driver::{Driver, Input},
    service::{Service, Shared},
};
use crate::{audit::Audit, state::PoolSecrets};

/// Largest message a client or worker may send: a hello with the tokens of
/// hundreds of leases, a registration of hundreds of devices.
const MAX_MESSAGE_BYTES: usize = 256 << 10;

/// How long a lease token opens sessions: long against a restart of the scheduler and
/// against the time that a message takes, short for whoever finds an old one.
pub(crate) const LEASE_TOKEN_LIFE: Duration = Duration::from_secs(600);

/// Heartbeats a worker may miss before its stream is cut off.
const MISSED_HEARTBEATS: u32 = 4;

/// How a scheduler runs.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Where it listens; port 0 for any free one.
    pub(crate) listen: SocketAddr,
    /// The engine's timeouts and bounds.
    pub(crate) engine: tensord_scheduler::Options,
    /// What the scheduler numbers its grants by: higher than that of any scheduler before.
    pub(crate) term: u64,
    /// The streams' timeouts.
    pub(crate) timing: Timing,
    /// Where is recorded who comes and goes.
    pub(crate) audit: Audit,
}

/// How often streams are expected to say something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// How long a new stream may take for its first message.
    pub(crate) hello: Duration,
    /// How long a client's stream is silent before it carries a beat.
    pub(crate) beat: Duration,
    /// How often workers are to say that they are alive.
    pub(crate) heartbeat: Duration,
    /// How long a lease token opens sessions; it is renewed when half of it is over.
    pub(crate) lease_token_life: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            hello: Duration::from_secs(5),
            beat: Duration::from_secs(1),
            heartbeat: Duration::from_secs(1),
            lease_token_life: LEASE_TOKEN_LIFE,
        }
    }
}

impl Options {
    /// Options with the default timeouts and bounds.
    pub(crate) fn new(listen: SocketAddr, term: u64) -> Self {
        Self {
            listen,
            term,
            engine: tensord_scheduler::Options::default(),
            timing: Timing::default(),
            audit: Audit::none(),
        }
    }
}

/// Why a scheduler could not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    /// The address is taken or not one of this host.
    #[error("cannot listen on {listen}: {source}; choose another address with --listen")]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The identity cannot be shown.
    #[error(transparent)]
    Identity(#[from] BindError),
}

/// A running scheduler. When it is gone, clients and workers come back to the
/// next one with the same secrets and keep their leases. Dropping it closes
/// their streams without a word.
pub(crate) struct Scheduler {
    address: SocketAddr,
    driver: mpsc::Sender<Input>,
    tasks: JoinSet<()>,
}

impl Scheduler {
    /// Starts a scheduler.
    ///
    /// # Errors
    ///
    /// See [`StartError`].
    pub(crate) async fn start(
        options: Options,
        secrets: PoolSecrets,
        access: Access,
        enrolment: Enrolment,
    ) -> Result<Self, StartError> {
        let Options {
            listen,
            engine,
            term,
            timing,
            audit,
        } = options;
        let failed = |source| StartError::Listen { listen, source };
        let tcp = TcpListener::bind(listen).await.map_err(failed)?;
        let address = tcp.local_addr().map_err(failed)?;
        let server = control::server(tcp, &secrets.identity)?;
        let (access, enrolment) = (Arc::new(access), Arc::new(enrolment));
        let lease_key = secrets.signer.public_key().into();
        let lease_expiry = engine.lease_expiry;
        let (running, driver) = Driver::new(
            engine,
            term,
            secrets.signer,
            access.clone(),
            enrolment.clone(),
            audit.clone(),
            timing,
        );
        let shared = Shared {
            access,
            enrolment,
            timing,
            lease_expiry,
            lease_key,
            driver: driver.clone(),
            audit,
        };
        let shared = Arc::new(shared);
        let service = Service(shared.clone());
        let pool = PoolServer::new(service.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let pool = InterceptedService::new(pool, shared.guard(&[Role::Client, Role::Admin]));
        let admin = AdminServer::new(service.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let workers = WorkersServer::new(service).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let workers = InterceptedService::new(workers, shared.guard_workers());
        let admin = InterceptedService::new(admin, shared.guard(&[Role::Admin]));
        let mut tasks = JoinSet::new();
        tasks.spawn(running.run());
        tasks.spawn(server.run(Routes::new(pool).add_service(workers).add_service(admin)));
        Ok(Self {
            address,
            driver,
            tasks,
        })
    }

    /// The address it listens on, with the real port.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Refuses every request from here on; leases stay.
    pub(crate) async fn stop_granting(&self) {
        // An error means that it has stopped altogether.
        let _ = self.driver.send(Input::StopGranting).await;
    }

    /// Ends every stream with a word to its peer.
    pub(crate) async fn stop(mut self) {
        if self.driver.send(Input::Stop).await.is_ok() {
            // The driver is the task that ends.
            self.tasks.join_next().await;
        }
    }

    /// Waits for an end that nobody asked for, which only a bug brings about.
    pub(crate) async fn ended(&mut self) {
        self.tasks.join_next().await;
    }
}

#[cfg(test)]
mod tests;
