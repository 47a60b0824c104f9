//! The tasks that keep a session connected, one for each of its tracks: dial, open or
//! resume, exchange frames, and again.

use std::{
    convert::Infallible,
    future::pending,
    mem,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tensord_proto::{
    text::{NAME_CHARS, sanitize},
    v1::frame::Body,
};
use tensord_session::{ConnectionEnd, Track, after_pump, rejected_by};
use tensord_transport::{
    Carrier, Link,
    channel::{Connection, Timing, duplex, pump},
};
use tokio::{
    sync::{oneshot, watch},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval_at, sleep, sleep_until, timeout, timeout_at},
};
use tracing::{debug, info, warn};

use super::{
    Session,
    destination::{Destination, SessionTarget},
    track_end::TrackEnd,
};
use crate::lease::LeaseEvent;

/// How long one attempt to connect may take.
const DIAL_DEADLINE: Duration = Duration::from_secs(3);

/// How long a new session waits for the list of uploads that the worker has. The worker sends it right
/// after its answer.
const HELD_DEADLINE: Duration = Duration::from_secs(3);

/// A worker that was not reached for this long is reported to the pool, and then at intervals of
/// this length.
const UNREACHABLE_AFTER: Duration = Duration::from_millis(300);

/// Pause between attempts.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Keeps `session` connected until it is over. `opened` receives the result of the first
/// connection.
pub(crate) fn drive(
    session: Arc<Session>,
    mut destination: watch::Receiver<Destination>,
    opened: oneshot::Sender<Result<(), String>>,
) -> impl Future<Output = ()> {
    let driven = DriverGuard(session);
    async move {
        let DriverGuard(session) = &driven;
        // Aborted when this task ends.
        let mut bulk = JoinSet::new();
        let bulk_destination = destination.clone();
        bulk.spawn(drive_bulk(DriverGuard(session.clone()), bulk_destination));
        keep_connected(session, &mut destination, Track::Ops, Some(opened)).await;
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
async fn drive_bulk(driven: DriverGuard, mut destination: watch::Receiver<Destination>) {
    let DriverGuard(session) = &driven;
    while !session.lock().has_bulk {
        session.wake_bulk.notified().await;
    }
    keep_connected(session, &mut destination, Track::Bulk, None).await;
}

/// Keeps a track connected until the session is over.
async fn keep_connected(
    session: &Session,
    destination: &mut watch::Receiver<Destination>,
    track: Track,
    mut opened: Option<oneshot::Sender<Result<(), String>>>,
) {
    let mut reach = Reach::new(destination.borrow().target.clone());
    let mut resume = false;
    while track == Track::Ops || !session.is_over() {
        let current = destination.borrow_and_update().clone();
        let is_interrupted = current.is_interrupted();
        reach.go_to(&current, is_interrupted);
        if current.must_wait() {
            match resumed_or_over(session, destination, track, &current).await {
                true => continue,
                false => return,
            }
        }
        let until = gives_up_at(session, &current, &reach);
        let connected = tokio::select! {
            connected = connect(session, &current, &reach, track, resume) => connected,
            // A try must not outlast the time in which a worker is given up.
            () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                Err(ConnectionEnd::Lost("the worker did not answer".into()))
            }
            never = report_unreachable(&current, reach.last_received), if reach.must_answer(&current) => match never {},
            Ok(()) = destination.changed() => continue,
        };
        let ended = match connected {
            Ok(Connected {
                connection,
                link,
                is_restored,
            }) => {
                let is_back = reach.connected() || is_restored;
                log_connected(session, track, &reach.target, link.carrier, resume);
                if is_back && track == Track::Ops {
                    let worker = reach.target.worker.clone();
                    current.events.send(LeaseEvent::Running { worker });
                }
                resume = true;
                let end = TrackEnd { session, track };
                let exchange = pump(&end, connection, link, Timing::DEFAULT);
                let ended = tokio::select! {
                    ended = exchange => after_pump(ended),
                    never = report_opened(session, &mut opened) => match never {},
                    reason = moved_or_suspended(destination, &reach.target) => {
                        ConnectionEnd::Lost(reason.into())
                    }
                };
                reach.received_at(session.last_received(track).into());
                ended
            }
            Err(ended) => ended,
        };
        let now = Instant::now();
        let current = destination.borrow().clone();
        let is_given_up = gives_up_at(session, &current, &reach).is_some_and(|at| at <= now);
        let is_lease_over = matches!(ended, ConnectionEnd::LeaseOver(_));
        let reason = match ended {
            ConnectionEnd::Lost(reason) if !is_given_up && !session.is_over() => {
                let worker = &reach.target.worker;
                debug!(session = %session.id, ?track, worker, "cannot connect to the worker: {reason}");
                sleep(RETRY_DELAY).await;
                continue;
            }
            ended => end_reason(ended, &reach.target),
        };
        if is_lease_over {
            over_by(session, track, current.awaits_end_until(now.into())).await;
        }
        give_up(session, reason, opened);
        return;
    }
}

/// Waits until the pool reports something about a suspended lease, or until the session must not wait any
/// more. Returns `false` if the session is over, or the pool reports nothing any more.
///
/// If the lease is suspended because it was idle, the pool learns when the program uses the session.
async fn resumed_or_over(
    session: &Session,
    destination: &mut watch::Receiver<Destination>,
    track: Track,
    current: &Destination,
) -> bool {
    // Whatever the program sends, the track for ops has a part of it.
    let mut reports_use = current.is_idle() && track == Track::Ops;
    let deadline = async {
        match current.waits_until() {
            Some(deadline) => sleep_until(deadline.into()).await,
            None => pending().await,
        }
    };
    let mut deadline = pin!(deadline);
    loop {
        if reports_use && session.is_used() {
            current.used.add(current.lease);
            reports_use = false;
        }
        tokio::select! {
            changed = destination.changed() => return changed.is_ok(),
            () = &mut deadline => return true,
            // The session is woken for other reasons, too.
            () = session.wake_of(track).notified() => if session.is_over() {
                return false;
            },
        }
    }
}

/// Waits until the session is over, or until `deadline`. Returns at once without a deadline.
pub(super) async fn over_by(session: &Session, track: Track, deadline: Option<std::time::Instant>) {
    let Some(deadline) = deadline else {
        return;
    };
    let over = async {
        // The session is woken for other reasons, too.
        while !session.is_over() {
            session.wake_of(track).notified().await;
        }
    };
    // An error means that the deadline has passed.
    let _ = timeout_at(deadline.into(), over).await;
}

/// Ends a session that goes on nowhere, for `reason` unless it has ended for another one.
fn give_up(session: &Session, reason: String, opened: Option<oneshot::Sender<Result<(), String>>>) {
    if !session.is_over() {
        warn!(session = %session.id, "{reason}");
    }
    session.fail(reason.clone());
    if let Some(opened) = opened {
        let first = session.cohort_member.cohort.end_reason();
        let _ = opened.send(Err(first.unwrap_or(reason)));
    }
}

/// What a track connects to, and since when it has not reached that.
struct Reach {
    target: Arc<SessionTarget>,
    /// When something was received last, or when the session began or was moved.
    last_received: Instant,
    /// When the worker accepted a link last, or when the session began.
    last_dialled: Mutex<Instant>,
    /// Whether the program waits for the session to go on elsewhere, or where it was.
    is_moving: bool,
    /// Whether the track was connected, or was to wait, since the session was moved last. If not,
    /// another move gives it no more time: it could go from worker to worker for ever.
    has_more_time: bool,
}

impl Reach {
    fn new(target: Arc<SessionTarget>) -> Self {
        Self {
            target,
            last_received: Instant::now(),
            last_dialled: Mutex::new(Instant::now()),
            is_moving: false,
            has_more_time: true,
        }
    }

    /// Records where the session is to be. `is_interrupted` is whether it is to wait for that.
    fn go_to(&mut self, destination: &Destination, is_interrupted: bool) {
        if !Arc::ptr_eq(&self.target, &destination.target) {
            self.target = destination.target.clone();
            self.is_moving = true;
            if mem::take(&mut self.has_more_time) {
                self.last_received = Instant::now();
            }
        }
        self.is_moving |= is_interrupted;
        self.has_more_time |= is_interrupted;
    }

    /// Records that the worker has accepted a link.
    fn dialled(&self) {
        *self.lock_last_dialled() = Instant::now();
    }

    /// Returns whether a worker that accepts a link and does not answer counts as unreachable. It does unless the session
    /// is to be restored there, which may take long.
    fn must_answer(&self, destination: &Destination) -> bool {
        !self.is_moving && !destination.is_interrupted()
    }

    /// Returns when the worker was there last.
    fn last_there(&self) -> Instant {
        self.last_received.max(*self.lock_last_dialled())
    }

    fn lock_last_dialled(&self) -> MutexGuard<'_, Instant> {
        let last_dialled = self.last_dialled.lock();
        last_dialled.unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the track is connected. Returns whether the session was to go on elsewhere, or
    /// to wait.
    fn connected(&mut self) -> bool {
        self.last_received = Instant::now();
        self.has_more_time = true;
        mem::take(&mut self.is_moving)
    }

    fn received_at(&mut self, at: Instant) {
        self.last_received = at.max(self.last_received);
    }
}

/// Returns when the session gives up what it connects to; `None` if it waits for the pool.
fn gives_up_at(session: &Session, destination: &Destination, reach: &Reach) -> Option<Instant> {
    let (now, last_received) = (Instant::now().into(), reach.last_received.into());
    let at = destination.gives_up_at(now, last_received, session.can_be_restored());
    at.map(Instant::from)
}

fn log_connected(
    session: &Session,
    track: Track,
    target: &SessionTarget,
    carrier: Carrier,
    is_resumed: bool,
) {
    let worker = &target.worker;
    match is_resumed {
        true => info!(session = %session.id, ?track, worker, "resumed over {carrier}"),
        false => debug!(session = %session.id, ?track, worker, "connected over {carrier}"),
    }
}

/// Reports to the pool that the worker cannot be reached, until the future is dropped. It was there last at this time.
async fn report_unreachable(destination: &Destination, last_there: Instant) -> Infallible {
    let mut reports = interval_at(last_there + UNREACHABLE_AFTER, UNREACHABLE_AFTER);
    reports.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        reports.tick().await;
        let worker = destination.target.worker_id;
        destination.unreachable.add((destination.lease, worker));
    }
}

/// Reports, once, that the session is open: when the client knows which uploads of earlier sessions the
/// worker has, so that it sends none of them again, or could not learn that in time.
async fn report_opened(
    session: &Session,
    opened: &mut Option<oneshot::Sender<Result<(), String>>>,
) -> Infallible {
    if opened.is_some() && session.lock().awaits_held() {
        // An error means that the time is over.
        let _ = timeout(HELD_DEADLINE, session.held.notified()).await;
    }
    if let Some(opened) = opened.take() {
        // The caller that leases may have given up; it then closes the session.
        let _ = opened.send(Ok(()));
    }
    pending().await
}

/// Waits until the session is to be elsewhere than at `target`, or its lease is suspended, and returns
/// that as text. The client must ignore what the worker sends after that: the lease may go on from
/// snapshots that another worker has.
async fn moved_or_suspended(
    destination: &mut watch::Receiver<Destination>,
    target: &Arc<SessionTarget>,
) -> &'static str {
    let is_elsewhere = |destination: &Destination| {
        destination.must_wait() || !Arc::ptr_eq(&destination.target, target)
    };
    if destination.wait_for(is_elsewhere).await.is_err() {
        // The pool will not report anything any more.
        pending::<()>().await;
    }
    "the pool has suspended the lease, or reported where it goes on"
}

/// Returns why a session is over, for its reads.
fn end_reason(ended: ConnectionEnd, target: &SessionTarget) -> String {
    let (worker, address) = (&target.worker, &target.address);
    match ended {
        ConnectionEnd::Over(reason) | ConnectionEnd::LeaseOver(reason) => reason,
        ConnectionEnd::BrokeRule(rule) => {
            format!("worker {worker} at {address} broke the protocol: {rule}")
        }
        ConnectionEnd::Diverged(reason) => {
            let device = &target.device;
            let (name, kind) = (sanitize(&device.name, NAME_CHARS), &device.kind);
            format!("{reason}. The session went on at the {kind} device {name} of worker {worker}")
        }
        ConnectionEnd::Lost(reason) => format!("worker {worker} at {address} is lost ({reason})"),
    }
}

/// A connection for a track of a session.
struct Connected {
    connection: Connection,
    link: Link,
    /// Whether the session goes on from a snapshot.
    is_restored: bool,
}

/// Dials a worker. If the session is to be restored there, reports to the pool while no link is accepted; otherwise the
/// caller reports until the session is open.
async fn dial(
    destination: &Destination,
    reach: &Reach,
    track: Track,
) -> Result<Link, ConnectionEnd> {
    let SessionTarget {
        dialer,
        address,
        trust,
        ..
    } = &*reach.target;
    let dialling = async {
        match track {
            Track::Ops => dialer.dial(address, trust, DIAL_DEADLINE).await,
            Track::Bulk => dialer.dial_bulk(address, trust, DIAL_DEADLINE).await,
        }
    };
    let is_reported = reach.is_moving && !destination.is_interrupted();
    let dialled = tokio::select! {
        dialled = dialling => dialled,
        never = report_unreachable(destination, reach.last_there()), if is_reported => match never {},
    };
    let link = dialled.map_err(|e| ConnectionEnd::Lost(e.to_string()))?;
    reach.dialled();
    Ok(link)
}

async fn connect(
    session: &Session,
    destination: &Destination,
    reach: &Reach,
    track: Track,
    resume: bool,
) -> Result<Connected, ConnectionEnd> {
    let target = &reach.target;
    let mut link = dial(destination, reach, track).await?;
    let lost = |e: &dyn std::fmt::Display| ConnectionEnd::Lost(e.to_string());
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
    let at_worker = |e: &dyn std::fmt::Display| format!("worker {}: {e}", target.worker);
    let over = |e: &dyn std::fmt::Display| ConnectionEnd::Over(at_worker(e));
    let answer = duplex::decode(answer).map_err(|e| ConnectionEnd::BrokeRule(e.to_string()))?;
    match answer.body {
        Some(Body::Opened(opened)) => {
            let is_restored = track == Track::Ops && resume && opened.epoch > epoch;
            if is_restored {
                let (mark, worker) = (opened.mark, &target.worker);
                info!(session = %session.id, mark, worker, "the session goes on in another process");
            }
            match session.opened(track, &opened) {
                Ok(connection) => Ok(Connected {
                    connection,
                    link,
                    is_restored,
                }),
                Err(ConnectionEnd::Over(reason)) => Err(over(&reason)),
                Err(ended) => Err(ended),
            }
        }
        Some(Body::Rejected(rejected)) => {
            let error = rejected.error.unwrap_or_default();
            match rejected_by(&error, track, resume, is_durable) {
                ConnectionEnd::Lost(reason) => Err(ConnectionEnd::Lost(reason)),
                ConnectionEnd::LeaseOver(_) => Err(ConnectionEnd::LeaseOver(at_worker(&error))),
                ConnectionEnd::Over(_)
                | ConnectionEnd::BrokeRule(_)
                | ConnectionEnd::Diverged(_) => Err(over(&error)),
            }
        }
        _ => Err(ConnectionEnd::BrokeRule(
            "the worker's first frame did not answer the request to open a session".into(),
        )),
    }
}
