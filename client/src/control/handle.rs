//! The handle by which the rest of the client uses the control task.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc as blocking,
    },
    time::Duration,
};

use tensord_proto::{
    credential::ClientCredential,
    ids::{LeaseId, RequestId},
    v1::ChangeStanding,
};
use tensord_transport::PoolUrl;
use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::{mpsc, oneshot},
    time::{Timeout, timeout},
};

use super::{Call, Control, LeaseCall, StandingCall, withdrawals::Withdrawals};
use crate::error::{ConnectError, LeaseError, StandingError};

/// How long a pool may take to accept a new client, or to send its status.
pub(crate) const CONNECT_DEADLINE: Duration = Duration::from_secs(4);

/// How long a pool may take to suspend or resume a lease. The pool replies at once; the stream may
/// have been lost, which the control task notices within this time.
const STANDING_DEADLINE: Duration = Duration::from_secs(10);

/// How long leaving may take. After that, the pool notices by itself that the client is gone.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Number of threads of the client's runtime, which mostly does I/O.
const IO_THREADS: usize = 2;

/// Capacity of the queue of requests for leases to the control task.
const REQUEST_QUEUE: usize = 64;

/// What a program requests for one of its leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StandingChange {
    Suspend,
    Resume,
    /// Go on at the worker that keeps its snapshots.
    Move,
}

/// The control task of a pool, and the runtime on which it and all sessions run. Dropping
/// the handle leaves the pool, for which it blocks for up to [`LEAVE_TIMEOUT`].
pub(crate) struct ControlHandle {
    pub(crate) url: PoolUrl,
    pub(crate) runtime_handle: Handle,
    requests: mpsc::Sender<Call>,
    withdrawals: Arc<Withdrawals>,
    next_request: AtomicU64,
    /// Taken when dropped.
    runtime: Mutex<Option<Runtime>>,
}

impl ControlHandle {
    /// Starts the runtime and the control task, and waits until the task has connected to
    /// the pool at `url`.
    pub(crate) fn connect(url: PoolUrl) -> Result<Self, ConnectError> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(IO_THREADS)
            .thread_name("tensord-io")
            .enable_all()
            .build()?;
        let (requests, queued) = mpsc::channel(REQUEST_QUEUE);
        let withdrawals = Arc::<Withdrawals>::default();
        let credential = ClientCredential::new(rand::random());
        let task = Control::new(url.clone(), credential, queued, withdrawals.clone());
        let (connected, connects) = blocking::sync_channel(1);
        runtime.spawn(task.run(connected));
        let control = Self {
            url,
            runtime_handle: runtime.handle().clone(),
            requests,
            withdrawals,
            next_request: 1.into(),
            runtime: Mutex::new(Some(runtime)),
        };
        match connects.recv_timeout(CONNECT_DEADLINE) {
            Ok(Ok(())) => Ok(control),
            Ok(Err(e)) => Err(e),
            Err(_) => Err(ConnectError::CallFailed {
                pool: control.url.authority(),
                reason: format!("the pool did not answer within {CONNECT_DEADLINE:?}"),
            }),
        }
    }

    /// Limits the time of `future` by the timer of the client's runtime, so that any executor
    /// can run the returned future.
    pub(crate) fn timeout<F: Future>(&self, limit: Duration, future: F) -> Timeout<F> {
        let _context = self.runtime_handle.enter();
        timeout(limit, future)
    }

    pub(crate) fn new_request(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed))
    }

    /// Queues a request for a lease. Waits while many are queued.
    ///
    /// # Errors
    ///
    /// When the client is shutting down.
    pub(crate) async fn request(&self, lease_call: LeaseCall) -> Result<(), LeaseError> {
        let sent = self.requests.send(Call::Lease(lease_call)).await;
        sent.map_err(|_| LeaseError::Closed)
    }

    /// Suspends a lease, resumes it, or moves it, and waits for the pool's reply.
    ///
    /// # Errors
    ///
    /// The pool's reason, or that it did not reply.
    pub(crate) async fn change_standing(
        &self,
        lease: LeaseId,
        change: StandingChange,
    ) -> Result<(), StandingError> {
        let change = ChangeStanding {
            request_id: self.new_request().0,
            lease_id: lease.0,
            suspend: change == StandingChange::Suspend,
            only_if_idle: false,
            elsewhere: change == StandingChange::Move,
        };
        let (outcome, changed) = oneshot::channel();
        let call = Call::Standing(StandingCall { change, outcome });
        let changing = async {
            let sent = self.requests.send(call).await;
            sent.map_err(|_| StandingError::Closed)?;
            changed.await.unwrap_or(Err(StandingError::Closed))
        };
        let changed = self.timeout(STANDING_DEADLINE, changing).await;
        changed.unwrap_or(Err(StandingError::ConnectionLost))
    }

    /// Cancels a request, even if it is still in the queue.
    pub(crate) fn cancel(&self, request: RequestId) {
        self.withdrawals
            .add(|withdrawn| withdrawn.cancelled.push(request));
    }

    /// Gives a lease back. Best effort: the pool takes it back by itself when
    /// this process is gone.
    pub(crate) fn release(&self, lease: LeaseId) {
        self.withdrawals
            .add(|withdrawn| withdrawn.released.push(lease));
    }
}

impl Drop for ControlHandle {
    fn drop(&mut self) {
        // Without a task, there is nothing to leave.
        if !self.requests.is_closed() {
            let (left, leaving) = blocking::sync_channel(1);
            self.withdrawals
                .add(|withdrawn| withdrawn.left = Some(left));
            let _ = leaving.recv_timeout(LEAVE_TIMEOUT);
        }
        let runtime = self
            .runtime
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(runtime) = runtime {
            // Unlike dropping the runtime, this is allowed within an async runtime, so that a
            // pool may be dropped anywhere.
            runtime.shutdown_background();
        }
    }
}
