//! A running worker.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use rand::Rng;
use tensord_proto::v1::{Error, ErrorCode};
use tensord_transport::identity::{START_BYTES, worker_id};
use tokio::{sync::watch, task::JoinSet, time::sleep};
use tracing::info;

#[cfg(target_os = "linux")]
use crate::start::start_in_processes;
use crate::{
    lease_host::LeaseHost,
    options::{Isolation, WorkerOptions},
    registration::{
        LEAVE_TIMEOUT, LeaveStage, RefusedError, Registration, RegistrationState, WorkerDescription,
    },
    restart::LostDevice,
    start::{StartError, StartedHost, start_in_this_process},
};

/// How long a worker that drains, has snapshots of leases without devices and nothing else to do waits for
/// the scheduler's request to hand them over: longer than the scheduler waits for marks of the leases that
/// are to move away.
const HANDOVER_REQUEST_TIMEOUT: Duration = Duration::from_secs(3);

/// A running worker. Dropping it ends its sessions at once.
pub struct Worker {
    address: SocketAddr,
    host: Arc<dyn LeaseHost>,
    registration_state: watch::Receiver<RegistrationState>,
    leave: watch::Sender<LeaveStage>,
    lost: watch::Receiver<Option<LostDevice>>,
    _tasks: JoinSet<()>,
}

impl Worker {
    /// Starts a worker. It joins its pool in the background, and joins again whenever the
    /// connection to the scheduler was lost.
    ///
    /// # Errors
    ///
    /// When the worker cannot listen, when none of its devices can be opened, or when a
    /// thread or process cannot be started.
    pub async fn start(options: WorkerOptions) -> Result<Self, StartError> {
        let mut start = [0; START_BYTES];
        rand::rng().fill_bytes(&mut start);
        let id = worker_id(&options.identity.fingerprint(), &start);
        let started = match &options.isolation {
            Isolation::None => start_in_this_process(&options, id).await?,
            #[cfg(target_os = "linux")]
            Isolation::Processes(program) => {
                start_in_processes(&options, id, program.clone()).await?
            }
        };
        let StartedHost {
            address,
            host,
            devices,
            mut tasks,
            lost,
        } = started;
        let worker_description = WorkerDescription {
            id,
            name: options.name.clone(),
            address: advertised(options.advertise.as_deref(), address),
            identity: options.identity.clone(),
            start,
            devices,
        };
        let (registration_state, state_receiver) = watch::channel(RegistrationState::Joining);
        let (leave, leave_receiver) = watch::channel(LeaveStage::Staying);
        let registration = Registration {
            scheduler: options.scheduler,
            worker_description,
            host: host.clone(),
            registration_state,
            leave: leave_receiver,
        };
        tasks.spawn(registration.run());
        let certificate = options.identity.fingerprint();
        info!(name = options.name, %address, %certificate, "worker listening");
        Ok(Self {
            address,
            host,
            registration_state: state_receiver,
            leave,
            lost,
            _tasks: tasks,
        })
    }

    /// Returns the address that the worker listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until the worker has joined its pool.
    ///
    /// # Errors
    ///
    /// When the scheduler refuses the worker.
    pub async fn joined(&self) -> Result<(), RefusedError> {
        let mut registration_state = self.registration_state.clone();
        let state_receiver = registration_state
            .wait_for(|registration_state| *registration_state != RegistrationState::Joining)
            .await;
        match state_receiver.as_deref() {
            Ok(RegistrationState::Refused(refused)) => Err(refused.clone()),
            _ => Ok(()),
        }
    }

    /// Waits until the scheduler refuses the worker, which is final, and returns the
    /// reason.
    pub async fn failed(&self) -> RefusedError {
        let mut registration_state = self.registration_state.clone();
        let refused = |registration_state: &RegistrationState| {
            matches!(registration_state, RegistrationState::Refused(_))
        };
        if let Ok(registration_state) = registration_state.wait_for(refused).await
            && let RegistrationState::Refused(refused) = &*registration_state
        {
            return refused.clone();
        }
        // The registration ended because the worker leaves the pool, which is no failure.
        std::future::pending().await
    }

    /// Waits until a device of this worker is lost: an op has occupied it for twice
    /// [`WorkerOptions::op_timeout`], and no session uses another device. The device
    /// becomes usable again only when this process has ended and the program was started
    /// again. Never returns if leases run in processes of their own: there, the lease's process
    /// ends, and the next lease has a new one.
    pub async fn lost_device(&self) -> LostDevice {
        let mut lost = self.lost.clone();
        if let Ok(lost) = lost.wait_for(Option::is_some).await
            && let Some(lost) = &*lost
        {
            return lost.clone();
        }
        // The sender is gone: the worker shuts down, or runs leases in processes.
        std::future::pending().await
    }

    /// Leaves the pool: the worker accepts no new sessions, existing ones may finish until
    /// `deadline` has passed, and then they are ended. Snapshots of suspended leases are handed over to
    /// other workers meanwhile.
    pub async fn drain(&self, deadline: Duration) {
        self.leave.send_replace(LeaveStage::Draining);
        let idle = async {
            let mut idle_since = Instant::now();
            loop {
                let is_joined = *self.registration_state.borrow() == RegistrationState::Joined;
                if self.host.live_session_count() > 0 || self.host.is_handing_over() || !is_joined {
                    idle_since = Instant::now();
                }
                // The scheduler may yet request that they are handed over.
                let must_wait = match self.host.has_waiting_leases() {
                    true => idle_since.elapsed() < HANDOVER_REQUEST_TIMEOUT,
                    false => self.host.live_session_count() > 0,
                };
                if !must_wait {
                    return;
                }
                sleep(Duration::from_millis(50)).await;
            }
        };
        if tokio::time::timeout(deadline, idle).await.is_err() {
            self.host
                .end_all(&Error::new(ErrorCode::Draining, "the worker shuts down"));
            // Leaves time to send the final error to the clients.
            sleep(Duration::from_millis(200)).await;
        }
        self.leave.send_replace(LeaveStage::Leaving);
        let mut registration_state = self.registration_state.clone();
        let over = |registration_state: &RegistrationState| {
            !matches!(
                registration_state,
                RegistrationState::Joining | RegistrationState::Joined
            )
        };
        // Bounds the wait in case the scheduler is unreachable.
        let _ = tokio::time::timeout(2 * LEAVE_TIMEOUT, registration_state.wait_for(over)).await;
        self.host.stop().await;
    }
}

/// Returns the address for clients. The scheduler fills in an unspecified host.
fn advertised(host: Option<&str>, listening: SocketAddr) -> String {
    match host {
        Some(host) if host.contains(':') && !host.starts_with('[') => {
            format!("[{host}]:{}", listening.port())
        }
        Some(host) => format!("{host}:{}", listening.port()),
        None => listening.to_string(),
    }
}
