//! The tasks that keep a session connected, one for each of its tracks: dial, open or
//! resume, exchange frames, and again.

use std::{
    convert::Infallible,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use tensord_proto::{
    v1::{Open, frame::Body},
    version,
};
use tensord_transport::{Dialer, Link, LinkError, LinkReceiver, LinkSender, duplex, tls::Trust};
use tokio::{
    sync::oneshot,
    task::JoinSet,
    time::{Instant, sleep, timeout, timeout_at},
};
use tracing::{debug, info, warn};

use super::{
    Session, Track,
    direct_send::LentSender,
    pending_reads::Delivery,
    wire::{ConnectionEnd, NextFrames},
};

/// How long one attempt to connect may take.
const DIAL_DEADLINE: Duration = Duration::from_secs(3);

/// A connection on which nothing is received for this long is lost; workers send at least
/// a ping each second.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(4);

/// A worker from which nothing was received for this long is given up. With the time
/// until silence is noticed, the error comes within 10 s of the cause.
const WORKER_TIMEOUT: Duration = Duration::from_secs(8);

/// Pause between attempts.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// How long a driver with nothing to send waits before it sends a ping.
const PING_INTERVAL: Duration = Duration::from_secs(1);

/// How long a few ops wait for more: the resolution of the timer. The program does not
/// wait for these ops, as a read or the end of a series of all-reduces would have sent
/// them.
const BATCH_DELAY: Duration = Duration::from_millis(1);

/// [`BATCH_DELAY`] doubles up to this with each time that a few ops were sent since the last
/// urgent item: the worker is busy then, and a frame costs it more than an op.
const MAX_BATCH_DELAY: Duration = Duration::from_millis(4);

/// How long an ack waits for a frame that can carry it.
const ACK_DELAY: Duration = Duration::from_millis(20);

/// Limit on the number of frames processed before their replies are delivered.
const MAX_FRAMES_PER_BATCH: usize = 256;

/// How long a closed session may take to send its last frames.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// What a session connects to.
pub(crate) struct SessionTarget {
    pub(crate) dialer: Dialer,
    pub(crate) worker: String,
    pub(crate) address: String,
    pub(crate) trust: Trust,
    pub(crate) lease_token: Bytes,
    pub(crate) device_index: u32,
    pub(crate) seed: u64,
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
            Ok(link) => {
                last_received = Instant::now();
                let (worker, carrier) = (&target.worker, link.carrier);
                if resume {
                    info!(session = %session.id, ?track, worker, "resumed over {carrier}");
                } else {
                    debug!(session = %session.id, ?track, worker, "connected over {carrier}");
                }
                resume = true;
                if let Some(opened) = opened.take() {
                    // Whoever leased may have given up; then the session is closed soon.
                    let _ = opened.send(Ok(()));
                }
                pump(session, track, link, &mut last_received).await
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
) -> Result<Link, ConnectionEnd> {
    let lost = |e: &dyn std::fmt::Display| ConnectionEnd::Lost(e.to_string());
    let (dialer, address, trust) = (&target.dialer, &target.address, &target.trust);
    let dialled = match track {
        Track::Ops => dialer.dial(address, trust, DIAL_DEADLINE).await,
        Track::Bulk => dialer.dial_bulk(address, trust, DIAL_DEADLINE).await,
    };
    let mut link = dialled.map_err(|e| lost(&e))?;
    let open = Body::Open(Open {
        hello: Some(version::hello()),
        session_id: session.id.0,
        lease_token: target.lease_token.clone(),
        device_index: target.device_index,
        resume: resume || track == Track::Bulk,
        received: session.received(track),
        seed: target.seed,
        bulk: track == Track::Bulk,
        cohort: session.cohort_member.cohort.id,
    });
    link.sender
        .send(&[duplex::encode(open)])
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
        Some(Body::Opened(opened)) => session.opened(track, opened).map_err(|e| over(&e))?,
        Some(Body::Rejected(rejected)) => return Err(over(&rejected.error.unwrap_or_default())),
        _ => {
            return Err(ConnectionEnd::BrokeRule(
                "the worker's first frame did not answer the request to open a session".into(),
            ));
        }
    }
    Ok(link)
}

async fn pump(
    session: &Session,
    track: Track,
    link: Link,
    last_received: &mut Instant,
) -> ConnectionEnd {
    let Link {
        sender, receiver, ..
    } = link;
    tokio::select! {
        ended = read(session, track, receiver, last_received) => ended,
        Err(ended) = write(session, track, sender) => ended,
    }
}

async fn read(
    session: &Session,
    track: Track,
    mut receiver: LinkReceiver,
    last_received: &mut Instant,
) -> ConnectionEnd {
    let mut deliveries = Vec::new();
    loop {
        let Ok(mut next) = timeout(SILENCE_TIMEOUT, receiver.recv()).await else {
            return ConnectionEnd::Lost(format!("the worker sent nothing for {SILENCE_TIMEOUT:?}"));
        };
        // Those that came together are handed out together: whoever waits for many
        // values, one after the other, is then woken once.
        let mut row = 0;
        let ended = loop {
            let frame = match next {
                Ok(Some(frame)) => frame,
                Ok(None) => {
                    break Some(ConnectionEnd::Lost(
                        "the worker closed the connection".into(),
                    ));
                }
                // Another connection would bring it again.
                Err(e @ LinkError::TooLarge(_)) => {
                    break Some(ConnectionEnd::BrokeRule(e.to_string()));
                }
                Err(e) => break Some(ConnectionEnd::Lost(e.to_string())),
            };
            *last_received = Instant::now();
            if let Err(ended) = receive_frame(session, track, frame, &mut deliveries) {
                break Some(ended);
            }
            row += 1;
            if row == MAX_FRAMES_PER_BATCH {
                break None;
            }
            next = match receiver.arrived() {
                Some(arrived) => arrived,
                None => break None,
            };
        };
        // Who waits for the first finds the others there once it is woken.
        deliveries.drain(..).rev().for_each(Delivery::deliver);
        if let Some(ended) = ended {
            return ended;
        }
    }
}

fn receive_frame(
    session: &Session,
    track: Track,
    frame: Bytes,
    deliveries: &mut Vec<Delivery>,
) -> Result<(), ConnectionEnd> {
    let counter = &session.counters.down;
    counter.fetch_add(frame.len() as u64, Ordering::Relaxed);
    session.receive(track, frame, deliveries)
}

async fn write(
    session: &Session,
    track: Track,
    mut sender: LinkSender,
) -> Result<Infallible, ConnectionEnd> {
    // When few ops have waited long enough, if some do.
    let mut gathered_at: Option<Instant> = None;
    let mut rested = false;
    loop {
        let patient = gathered_at.is_none_or(|until| Instant::now() < until);
        let wait = match session.next_to_send(track, patient, rested) {
            NextFrames::Frames(frames) => {
                send(session, &mut sender, &frames).await?;
                (gathered_at, rested) = (None, false);
                continue;
            }
            NextFrames::Few(before) => {
                let gather = MAX_BATCH_DELAY.min(BATCH_DELAY * (1 << before.min(8)));
                let until = *gathered_at.get_or_insert_with(|| Instant::now() + gather);
                (sender, _) = wait_until(session, track, sender, until).await?;
                continue;
            }
            NextFrames::Nothing if rested => PING_INTERVAL,
            // What comes meanwhile need not wake it for an ack: it will look by itself,
            // and most answers are soon followed by the next request.
            NextFrames::PendingAck | NextFrames::Nothing => ACK_DELAY,
            NextFrames::Goodbye => {
                sleep(CLOSE_TIMEOUT).await;
                return Err(ConnectionEnd::Over("closed".into()));
            }
        };
        // Without credit, too, ops are gathered.
        gathered_at = None;
        let woken;
        (sender, woken) = wait_until(session, track, sender, Instant::now() + wait).await?;
        if woken {
            continue;
        }
        let beats = rested || session.has_pending_ack(track);
        rested = true;
        if beats {
            send(session, &mut sender, &[session.beat(track)]).await?;
        }
    }
}

/// Waits until the driver is woken, or until `until`. Other threads may borrow the sender
/// meanwhile. Returns the sender, and whether the driver was woken.
async fn wait_until(
    session: &Session,
    track: Track,
    sender: LinkSender,
    until: Instant,
) -> Result<(LinkSender, bool), ConnectionEnd> {
    let lent_sender = LentSender::new(session, track, sender);
    let woken = timeout_at(until, session.wake_of(track).notified()).await;
    let mut sender = lent_sender.back();
    // Sends what the socket did not accept from a borrower.
    send(session, &mut sender, &[]).await?;
    Ok((sender, woken.is_ok()))
}

async fn send(
    session: &Session,
    sender: &mut LinkSender,
    frames: &[[Bytes; 3]],
) -> Result<(), ConnectionEnd> {
    session.count_up(frames);
    let sent = sender.send_all(frames).await;
    sent.map_err(|e| ConnectionEnd::Lost(e.to_string()))
}
