//! A connection to a pool, and leasing from it.

mod request;
mod status;

use std::{
    str::FromStr,
    sync::{Arc, mpsc as blocking},
    time::Duration,
};

use rand::Rng;
use tensord_proto::{
    ids::{LeaseId, SessionId},
    v1,
};
use tensord_session::{Cohort, CohortMember};
use tensord_transport::{Dialer, PoolUrl};
use tokio::sync::oneshot;

pub use self::status::{DeviceStatus, PoolStatus, WorkerStatus};
use crate::{
    backend::{TensordClient, TensordDevice},
    blocking::block_on,
    bridge::Bridge,
    control::{
        self,
        handle::{CONNECT_DEADLINE, ControlHandle},
        lease_watch::LeaseWatch,
    },
    error::{ConnectError, LeaseError},
    lease::{Durability, Lease, LeaseDevice, LeaseEvents, LeaseRequest, LeasedDevice},
    session::{Session, SessionTarget, drive},
};

/// How long each session of a lease may take to open. The sessions open in parallel, and are
/// awaited one after the other.
const OPEN_DEADLINE: Duration = Duration::from_secs(10);

/// Receives the result of opening a session.
type Opening = oneshot::Receiver<Result<(), String>>;

/// A connection to a pool. It reconnects by itself; clones share it.
#[derive(Clone)]
pub struct Pool {
    control: Arc<ControlHandle>,
    dialer: Dialer,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({})", self.control.url)
    }
}

impl Pool {
    /// Connects to the pool at `url`.
    ///
    /// # Errors
    ///
    /// Within 5 s, a different error for each of: a malformed URL, no answer from the address,
    /// another certificate than the URL's, a token that the pool does not know, an incompatible
    /// version.
    pub fn connect(url: &str) -> Result<Self, ConnectError> {
        Self::connect_url(PoolUrl::from_str(url)?)
    }

    /// Connects to the pool at a URL that was parsed before.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tensord_client::{Pool, PoolUrl};
    ///
    /// let url: PoolUrl = std::fs::read_to_string("pool.url")?.trim().parse()?;
    /// println!("connecting to {url}"); // Prints the URL without its token.
    /// let pool = Pool::connect_url(url)?;
    /// # drop(pool); Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub fn connect_url(url: PoolUrl) -> Result<Self, ConnectError> {
        let dialer = Dialer::new(url.transport);
        Self::connect_by(url, dialer)
    }

    /// Connects to the pool whose URL is in `TENSORD_URL`.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect), and when the variable is not set.
    pub fn connect_env() -> Result<Self, ConnectError> {
        let url = std::env::var("TENSORD_URL").map_err(|_| ConnectError::NoUrl)?;
        Self::connect(&url)
    }

    /// Connects to a pool with settings for tests.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    #[cfg(feature = "testing")]
    pub fn connect_with(
        url: PoolUrl,
        options: crate::testing::Options,
    ) -> Result<Self, ConnectError> {
        let mut dialer = Dialer::new(url.transport);
        if let Some(faults) = options.faults {
            dialer = dialer.with_faults(faults);
        }
        Self::connect_by(url, dialer)
    }

    fn connect_by(url: PoolUrl, dialer: Dialer) -> Result<Self, ConnectError> {
        let control = Arc::new(ControlHandle::connect(url)?);
        Ok(Self { control, dialer })
    }

    /// Returns the URL of the pool, which prints without its token.
    pub fn url(&self) -> &PoolUrl {
        &self.control.url
    }

    /// Returns the pool's workers with their devices, and the numbers of leases and waiting
    /// requests. Blocks until the pool answers, for at most 4 s.
    ///
    /// # Errors
    ///
    /// When the pool does not answer in time, or rejects the call.
    pub fn status(&self) -> Result<PoolStatus, ConnectError> {
        let (events, on_message) = blocking::sync_channel(1);
        let url = self.control.url.clone();
        self.control.runtime_handle.spawn(async move {
            // Nobody listens any more once the deadline has passed.
            let _ = events.send(control::status(&url).await.map(PoolStatus::from));
        });
        on_message
            .recv_timeout(CONNECT_DEADLINE)
            .unwrap_or_else(|_| {
                let pool = self.control.url.authority();
                let reason = format!("the pool sent no status within {CONNECT_DEADLINE:?}");
                Err(ConnectError::CallFailed { pool, reason })
            })
    }

    /// Leases devices, waiting in the pool's queue while they are taken.
    ///
    /// Blocks this thread, which may be one of an async runtime; there,
    /// [`lease_async`](Self::lease_async) lets other tasks run meanwhile.
    ///
    /// # Errors
    ///
    /// When the pool refuses, the request's timeout passes, or a worker cannot be reached.
    pub fn lease(&self, request: LeaseRequest) -> Result<Lease, LeaseError> {
        // No limit here: the future applies the timeout of the request.
        block_on(self.lease_async(request), None).unwrap_or(Err(LeaseError::Closed))
    }

    /// As [`lease`](Self::lease), without blocking the thread. Runs on any executor.
    /// Dropping the future cancels the request, or gives the devices back.
    ///
    /// ```no_run
    /// # async fn train() -> Result<(), Box<dyn std::error::Error>> {
    /// use tensord_client::{LeaseRequest, Pool};
    ///
    /// let pool = Pool::connect_env()?;
    /// let lease = pool.lease_async(LeaseRequest::devices(2)).await?;
    /// println!("{:?}", lease.descriptions());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`lease`](Self::lease).
    pub fn lease_async(
        &self,
        mut request: LeaseRequest,
    ) -> impl Future<Output = Result<Lease, LeaseError>> + Send + 'static + use<> {
        let pool = self.clone();
        async move {
            let durability = request.durability;
            let recover_within = request.recover_within;
            let events = LeaseEvents::start(request.on_event.take());
            let events = events.map_err(|e| LeaseError::Events {
                reason: e.to_string(),
            })?;
            let (granted, watch) = request::wait_for_grant(&pool.control, request, &events).await?;
            watch.prepare(events, recover_within);
            pool.open(&granted, watch, durability).await
        }
    }

    /// Opens a session on each device of a lease, then the bridge.
    async fn open(
        &self,
        granted: &v1::Granted,
        watch: LeaseWatch,
        durability: Durability,
    ) -> Result<Lease, LeaseError> {
        let cohort = Cohort::new(rand::rng().next_u64(), granted.devices.len());
        // From here on dropping the lease gives everything back.
        let mut lease = Lease {
            id: LeaseId(granted.lease_id),
            control: self.control.clone(),
            lease_devices: Vec::new(),
            bridge: None,
            cohort: cohort.clone(),
            watch: watch.clone(),
            #[cfg(unix)]
            ctrl_c: std::sync::OnceLock::new(),
        };
        let mut openings = Vec::new();
        for (lease_rank, leased) in (0..).zip(&granted.devices) {
            let cohort_member = CohortMember {
                cohort: cohort.clone(),
                lease_rank,
            };
            let id = SessionId(rand::rng().next_u64());
            let durability = durability.on(&LeasedDevice::from(leased));
            let session = Session::new(id, cohort_member, durability, rand::random());
            let (lease_device, opening) = self.open_session(leased, granted, session, &watch)?;
            lease.lease_devices.push(lease_device);
            openings.push(opening);
        }
        for (opening, lease_device) in openings.into_iter().zip(&lease.lease_devices) {
            let opened = match self.control.timeout(OPEN_DEADLINE, opening).await {
                Ok(Ok(opened)) => opened,
                Ok(Err(_)) => Err("the client is shutting down".into()),
                Err(_) => Err(format!(
                    "the worker did not answer within {OPEN_DEADLINE:?}"
                )),
            };
            opened.map_err(|reason| LeaseError::Worker {
                worker: lease_device.description.worker.clone(),
                reason,
            })?;
        }
        // Burn's remote client blocks while it connects.
        let (handle, devices) = (self.control.runtime_handle.clone(), lease.backend_devices());
        let start = move || Bridge::start(&handle, devices, cohort);
        let started = self.control.runtime_handle.spawn_blocking(start).await;
        let bridge = started.unwrap_or_else(|e| Err(e.to_string()));
        lease.bridge = Some(bridge.map_err(|reason| LeaseError::Bridge { reason })?);
        Ok(lease)
    }

    fn open_session(
        &self,
        leased: &v1::LeasedDevice,
        granted: &v1::Granted,
        session: Arc<Session>,
        watch: &LeaseWatch,
    ) -> Result<(LeaseDevice, Opening), LeaseError> {
        let unusable = |reason: String| LeaseError::Worker {
            worker: leased.worker.clone().unwrap_or_default().name,
            reason,
        };
        let dialer = self.dialer.clone().for_lease(LeaseId(granted.lease_id));
        let (token, seed) = (granted.token.clone(), rand::rng().next_u64());
        let target = SessionTarget::new(dialer, leased, token, seed).map_err(unusable)?;
        let device = TensordDevice::register(session.clone()).ok_or_else(|| {
            unusable(
                "this process has leased 65,536 devices, which is the limit; restart it".into(),
            )
        })?;
        let destination = watch.add(&session, target);
        let (opened, opening) = oneshot::channel();
        self.control
            .runtime_handle
            .spawn(drive(session.clone(), destination, opened));
        let registration = TensordClient::register(device);
        let lease_device = LeaseDevice {
            device,
            session,
            description: leased.into(),
            _registration: registration,
        };
        Ok((lease_device, opening))
    }
}
