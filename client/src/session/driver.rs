//! The task that keeps a session connected: dial, open or resume, pump, again.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use tensord_proto::{
    codec::DeviceProfile,
    v1::{ErrorCode, Open, Opened, frame::Body},
    version,
};
use tensord_transport::{Dialer, Link, LinkReceiver, LinkSender, duplex, tls::Trust};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout, timeout_at},
};
use tracing::{debug, info, warn};

use super::{EAGER_OPS, Session, Waiting};

/// How long one try to connect may take.
const DIAL_DEADLINE: Duration = Duration::from_secs(3);

/// A connection that is silent for this long is lost; workers beat each second.
const SILENCE: Duration = Duration::from_secs(4);

/// A worker that was not heard of for this long is given up. With the time
/// until silence is noticed this keeps an error within 10 s of the cause.
const GIVE_UP: Duration = Duration::from_secs(8);

/// Pause between tries.
const RETRY: Duration = Duration::from_millis(100);

/// How long a driver with nothing to send waits before it beats.
const BEAT: Duration = Duration::from_secs(1);

/// How long few ops wait for more. The timer's own grain; nobody waits for these
/// ops, or a read would have sent them.
const GATHER: Duration = Duration::from_millis(1);

/// How long news (an ack) may wait for a frame to ride on.
const NEWS_DELAY: Duration = Duration::from_millis(20);

/// How long a closed session may take to say so.
const GOODBYE: Duration = Duration::from_secs(2);

/// What a session connects to.
pub(crate) struct Target {
    pub(crate) dialer: Dialer,
    pub(crate) worker: String,
    pub(crate) address: String,
    pub(crate) trust: Trust,
    pub(crate) lease_token: Bytes,
    pub(crate) device_index: u32,
    pub(crate) seed: u64,
}

/// Why a connection ended.
enum Ended {
    /// Worth another try.
    Lost(String),
    /// The session is over.
    Over(String),
}

/// Keeps `session` connected until it is over. `opened` hears when the first
/// connection stands, or why it never will.
pub(crate) async fn drive(
    session: Arc<Session>,
    target: Target,
    opened: oneshot::Sender<Result<(), String>>,
) {
    let mut opened = Some(opened);
    let mut heard = Instant::now();
    loop {
        let resume = opened.is_none();
        // A try must not outlast the time in which a worker is given up.
        let until = heard + GIVE_UP;
        let connected = timeout_at(until, connect(&session, &target, resume)).await;
        let ended = match connected.unwrap_or_else(|_| Err(Ended::Lost("no answer".into()))) {
            Ok(link) => {
                heard = Instant::now();
                if let Some(opened) = opened.take() {
                    // Whoever leased may have given up; then the session is closed soon.
                    let _ = opened.send(Ok(()));
                } else {
                    info!(session = %session.id, worker = target.worker, "resumed");
                }
                pump(&session, link, &mut heard).await
            }
            Err(ended) => ended,
        };
        let reason = match ended {
            Ended::Over(reason) => reason,
            Ended::Lost(reason) if heard.elapsed() < GIVE_UP && !session.is_over() => {
                if opened.is_none() {
                    debug!(session = %session.id, worker = target.worker, "connection lost: {reason}");
                }
                sleep(RETRY).await;
                continue;
            }
            Ended::Lost(reason) => {
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

async fn connect(session: &Session, target: &Target, resume: bool) -> Result<Link, Ended> {
    let lost = |e: &dyn std::fmt::Display| Ended::Lost(e.to_string());
    let dialled = target
        .dialer
        .dial(&target.address, &target.trust, DIAL_DEADLINE)
        .await;
    let mut link = dialled.map_err(|e| lost(&e))?;
    let open = Body::Open(Open {
        hello: Some(version::hello()),
        session_id: session.id.0,
        lease_token: target.lease_token.clone(),
        device_index: target.device_index,
        resume,
        received: session.received(),
        seed: target.seed,
    });
    link.sender
        .send(&[duplex::encode(open)])
        .await
        .map_err(|e| lost(&e))?;
    let answer = timeout(DIAL_DEADLINE, link.receiver.recv()).await;
    let answer = answer.map_err(|_| Ended::Lost("no answer to the opening".into()))?;
    let answer = answer.map_err(|e| lost(&e))?;
    let answer = answer.ok_or_else(|| Ended::Lost("closed before an answer".into()))?;
    let over = |e: &dyn std::fmt::Display| Ended::Over(format!("worker {}: {e}", target.worker));
    match duplex::decode(answer).map_err(|e| over(&e))?.body {
        Some(Body::Opened(opened)) => session.opened(opened).map_err(|e| over(&e))?,
        Some(Body::Rejected(rejected)) => return Err(over(&rejected.error.unwrap_or_default())),
        _ => return Err(over(&"it did not answer the opening")),
    }
    debug!(session = %session.id, worker = target.worker, "connected over {}", link.carrier);
    Ok(link)
}

async fn pump(session: &Session, link: Link, heard: &mut Instant) -> Ended {
    let Link {
        sender, receiver, ..
    } = link;
    tokio::select! {
        ended = read(session, receiver, heard) => ended,
        ended = write(session, sender) => ended,
    }
}

async fn read(session: &Session, mut receiver: LinkReceiver, heard: &mut Instant) -> Ended {
    loop {
        let frame = match timeout(SILENCE, receiver.recv()).await {
            Ok(Ok(Some(frame))) => frame,
            Ok(Ok(None)) => return Ended::Lost("finished by the worker".into()),
            Ok(Err(e)) => return Ended::Lost(e.to_string()),
            Err(_) => return Ended::Lost(format!("silent for {SILENCE:?}")),
        };
        *heard = Instant::now();
        session
            .counters
            .down
            .fetch_add(frame.len() as u64, Ordering::Relaxed);
        if let Err(ended) = session.receive(frame) {
            return ended;
        }
    }
}

async fn write(session: &Session, mut sender: LinkSender) -> Ended {
    let mut patient = true;
    loop {
        let wait = match session.next_to_send(patient) {
            Outgoing::Frame(parts) => {
                if let Err(ended) = send(session, &mut sender, &parts).await {
                    return ended;
                }
                continue;
            }
            Outgoing::Few => {
                patient = timeout(GATHER, session.wake.notified()).await.is_ok();
                continue;
            }
            Outgoing::News => NEWS_DELAY,
            Outgoing::Nothing => BEAT,
            Outgoing::Goodbye => {
                sleep(GOODBYE).await;
                return Ended::Over("closed".into());
            }
        };
        patient = true;
        if timeout(wait, session.wake.notified()).await.is_err()
            && let Err(ended) = send(session, &mut sender, &session.beat()).await
        {
            return ended;
        }
    }
}

async fn send(session: &Session, sender: &mut LinkSender, parts: &[Bytes; 3]) -> Result<(), Ended> {
    let bytes: usize = parts.iter().map(Bytes::len).sum();
    session
        .counters
        .up
        .fetch_add(bytes as u64, Ordering::Relaxed);
    sender
        .send(parts)
        .await
        .map_err(|e| Ended::Lost(e.to_string()))
}

/// What the driver finds when it asks for the next frame.
enum Outgoing {
    Frame([Bytes; 3]),
    /// Some ops, to which more may come.
    Few,
    /// Nothing now; the worker was not told everything, though.
    News,
    Nothing,
    /// The session is over and everything was sent.
    Goodbye,
}

impl Session {
    fn is_over(&self) -> bool {
        self.lock().end.is_some()
    }

    fn received(&self) -> u64 {
        self.lock().duplex.inbox().received()
    }

    fn opened(&self, opened: Opened) -> Result<(), String> {
        let ours = version::hello();
        version::negotiate(&ours, &opened.hello.unwrap_or_default()).map_err(|e| e.message)?;
        let profile = opened.settings.unwrap_or_default();
        let profile = DeviceProfile::decode(&profile.encoded).map_err(|e| e.to_string())?;
        let mut state = self.lock();
        state.profile = Some(profile);
        let rewound = state.duplex.rewind(opened.received, opened.credit_bytes);
        rewound.map_err(|e| e.to_string())?;
        drop(state);
        self.room.notify_all();
        Ok(())
    }

    /// What to send next; few ops are held back if the driver is `patient`.
    fn next_to_send(&self, patient: bool) -> Outgoing {
        let mut state = self.lock();
        let few = patient && (1..EAGER_OPS).contains(&state.op_count);
        if !few {
            state.cut();
        }
        if let Some(parts) = state.duplex.next_to_send() {
            return Outgoing::Frame(parts);
        }
        if state.end.is_some() {
            return Outgoing::Goodbye;
        }
        if few {
            state.driver = Waiting::ForMore;
            return Outgoing::Few;
        }
        state.driver = Waiting::ForAny;
        match state.duplex.inbox() {
            inbox if inbox.is_telling_due() => {
                state.driver = Waiting::No;
                Outgoing::Frame([state.duplex.beat(), Bytes::new(), Bytes::new()])
            }
            inbox if inbox.has_news() => Outgoing::News,
            _ => Outgoing::Nothing,
        }
    }

    fn beat(&self) -> [Bytes; 3] {
        [self.lock().duplex.beat(), Bytes::new(), Bytes::new()]
    }

    fn receive(&self, frame: Bytes) -> Result<(), Ended> {
        let broke = |e: String| Ended::Over(format!("the worker broke the protocol: {e}"));
        let mut state = self.lock();
        let was_full = state.duplex.outbox().is_full();
        let received = state.duplex.receive(frame).map_err(|e| match e.is_loss() {
            true => Ended::Lost(e.to_string()),
            false => broke(e.to_string()),
        })?;
        if was_full && !state.duplex.outbox().is_full() {
            self.room.notify_all();
        }
        // Credit may have come for what waits.
        self.wake(&mut state);
        let Some((body, bytes)) = received else {
            return Ok(());
        };
        state.duplex.inbox().consume(bytes);
        let delivery = match body {
            Body::Value(value) => state.value(value).map_err(broke)?,
            Body::ValueChunk(chunk) => state.chunk(&chunk).map_err(broke)?,
            Body::Synced(synced) => state.synced(synced),
            Body::Ping(_) => None,
            Body::Closed(closed) => return Err(closed_by(closed.error.unwrap_or_default())),
            _ => return Err(broke("it sent a frame that workers do not send".into())),
        };
        drop(state);
        if let Some(delivery) = delivery {
            delivery.deliver();
        }
        Ok(())
    }
}

fn closed_by(error: tensord_proto::v1::Error) -> Ended {
    match error.code() {
        ErrorCode::Unspecified => Ended::Over("closed".into()),
        _ => Ended::Over(format!("the worker ended the session: {error}")),
    }
}
