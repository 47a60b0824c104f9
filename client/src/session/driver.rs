//! The tasks that keep a session connected, one for each of its tracks: dial, open or
//! resume, exchange frames, and again.

use std::{sync::Arc, time::Duration};

use tensord_proto::v1::frame::Body;
use tensord_transport::{
    Dialer, Link,
    channel::{Connection, Timing, duplex, pump},
    tls::Trust,
};
use tokio::{
    sync::oneshot,
    task::JoinSet,
    time::{Instant, sleep, timeout, timeout_at},
};
use tracing::{debug, info, warn};

use super::{
    Session, SessionAccess,
    connection_end::{ConnectionEnd, after_pump},
    state::Track,
    track_end::TrackEnd,
};

/// How long one attempt to connect may take.
const DIAL_DEADLINE: Duration = Duration::from_secs(3);

/// A worker from which nothing was received for this long is given up. The time starts with
/// the last frame received, so the error comes within 10 s of the cause.
const WORKER_TIMEOUT: Duration = Duration::from_secs(8);

/// Pause between attempts.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// What a session connects to.
pub(crate) struct SessionTarget {
    pub(crate) dialer: Dialer,
    pub(crate) worker: String,
    pub(crate) address: String,
    pub(crate) trust: Trust,
    pub(crate) access: SessionAccess,
}

/// Keeps `session` connected until it is over. `opened` receives the result of the first
/// connection.
pub(crate) fn drive(
    session: Arc<Session>,
    target: SessionTarget,
    opened: oneshot::Sender<Result<(), String>>,
) -> impl Future<Output = ()> {
    let driven = DriverGuard(session);
    async move {
        let DriverGuard(session) = &driven;
        let target = Arc::new(target);
        // Aborted when this task ends.
        let mut bulk = JoinSet::new();
        bulk.spawn(drive_bulk(DriverGuard(session.clone()), target.clone()));
        keep_connected(session, &target, Track::Ops, Some(opened)).await;
    }
}

/// A session that has a driver. Without one, pending requests would get no reply, so the
/// session fails when this is dropped.
struct DriverGuard(Arc<Session>);

impl Drop for DriverGuard {
    fn drop(&mut self) {
        self.0.fail(match std::thread::panicking() {
            true => {
                "the driver of the session panicked, which is a bug in tensord; please report it"
            }
            false => "the client is shutting down",
        });
    }
}

/// Keeps the session's second track connected, once there are bulk bytes.
async fn drive_bulk(driven: DriverGuard, target: Arc<SessionTarget>) {
    let DriverGuard(session) = &driven;
    while !session.lock().has_bulk {
        session.wake_bulk.notified().await;
    }
    keep_connected(session, &target, Track::Bulk, None).await;
}

/// Keeps a track connected until the session is over.
async fn keep_connected(
    session: &Session,
    target: &SessionTarget,
    track: Track,
    mut opened: Option<oneshot::Sender<Result<(), String>>>,
) {
    let mut last_received = Instant::now();
    let mut resume = false;
    while track == Track::Ops || !session.is_over() {
        // A try must not outlast the time in which a worker is given up.
        let until = last_received + WORKER_TIMEOUT;
        let connected = timeout_at(until, connect(session, target, track, resume)).await;
        let ended = match connected
            .unwrap_or_else(|_| Err(ConnectionEnd::Lost("the worker did not answer".into())))
        {
            Ok((connection, link)) => {
                last_received = Instant::now();
                let (worker, carrier) = (&target.worker, link.carrier);
                if resume {
                    info!(session = %session.id, ?track, worker, "resumed over {carrier}");
                } else {
                    debug!(session = %session.id, ?track, worker, "connected over {carrier}");
                }
                resume = true;
                if let Some(opened) = opened.take() {
                    // The caller that leases may have given up; it then closes the session.
                    let _ = opened.send(Ok(()));
                }
                let end = TrackEnd { session, track };
                let ended = pump(&end, connection, link, Timing::DEFAULT).await;
                last_received = last_received.max(session.last_received(track).into());
                after_pump(ended)
            }
            Err(ended) => ended,
        };
        let reason = match ended {
            ConnectionEnd::Over(reason) => reason,
            ConnectionEnd::BrokeRule(rule) => format!(
                "worker {} at {} broke the protocol: {rule}",
                target.worker, target.address
            ),
            ConnectionEnd::Lost(reason)
                if last_received.elapsed() < WORKER_TIMEOUT && !session.is_over() =>
            {
                debug!(session = %session.id, ?track, worker = target.worker, "cannot connect to the worker: {reason}");
                sleep(RETRY_DELAY).await;
                continue;
            }
            ConnectionEnd::Lost(reason) => {
                format!(
                    "worker {} at {} is lost ({reason})",
                    target.worker, target.address
                )
            }
        };
        if !session.is_over() {
            warn!(session = %session.id, "{reason}");
        }
        session.fail(reason.clone());
        if let Some(opened) = opened.take() {
            let _ = opened.send(Err(reason));
        }
        return;
    }
}

async fn connect(
    session: &Session,
    target: &SessionTarget,
    track: Track,
    resume: bool,
) -> Result<(Connection, Link), ConnectionEnd> {
    let lost = |e: &dyn std::fmt::Display| ConnectionEnd::Lost(e.to_string());
    let (dialer, address, trust) = (&target.dialer, &target.address, &target.trust);
    let dialled = match track {
        Track::Ops => dialer.dial(address, trust, DIAL_DEADLINE).await,
        Track::Bulk => dialer.dial_bulk(address, trust, DIAL_DEADLINE).await,
    };
    let mut link = dialled.map_err(|e| lost(&e))?;
    let open = session.open(track, resume, &target.access);
    let (epoch, is_durable) = (open.epoch, !open.restore.is_empty());
    link.sender
        .send(&[duplex::encode(Body::Open(open))])
        .await
        .map_err(|e| lost(&e))?;
    let answer = timeout(DIAL_DEADLINE, link.receiver.recv()).await;
    let answer = answer.map_err(|_| {
        ConnectionEnd::Lost("the worker did not answer the request to open a session".into())
    })?;
    let answer = answer.map_err(|e| lost(&e))?;
    let answer = answer.ok_or_else(|| {
        ConnectionEnd::Lost("the worker closed the connection before it answered".into())
    })?;
    let over =
        |e: &dyn std::fmt::Display| ConnectionEnd::Over(format!("worker {}: {e}", target.worker));
    let answer = duplex::decode(answer).map_err(|e| ConnectionEnd::BrokeRule(e.to_string()))?;
    match answer.body {
        Some(Body::Opened(opened)) => {
            if resume && opened.epoch > epoch {
                let (mark, worker) = (opened.mark, &target.worker);
                info!(session = %session.id, mark, worker, "the session goes on in another process");
            }
            match session.opened(track, &opened) {
                Ok(connection) => Ok((connection, link)),
                Err(ConnectionEnd::Over(reason)) => Err(over(&reason)),
                Err(ended) => Err(ended),
            }
        }
        // Retry: a new process rejects the bulk track until the track for ops is connected.
        Some(Body::Rejected(rejected)) if track == Track::Bulk && is_durable => Err(
            ConnectionEnd::Lost(rejected.error.unwrap_or_default().to_string()),
        ),
        Some(Body::Rejected(rejected)) => Err(over(&rejected.error.unwrap_or_default())),
        _ => Err(ConnectionEnd::BrokeRule(
            "the worker's first frame did not answer the request to open a session".into(),
        )),
    }
}
