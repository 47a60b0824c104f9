//! The tasks that keep a session connected, one for each of its tracks: dial,
//! open or resume, pump, again.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use tensord_proto::{
    codec::DeviceProfile,
    v1::{ErrorCode, Open, Opened, TensorValue, Value, frame::Body, tensor_value, value},
    version,
};
use tensord_transport::{Dialer, Link, LinkReceiver, LinkSender, duplex, tls::Trust};
use tokio::{
    sync::{Notify, oneshot},
    task::JoinSet,
    time::{Instant, sleep, timeout, timeout_at},
};
use tracing::{debug, info, warn};

use super::{EAGER_OPS, Session, State, Track, Waiting, values::Delivery};

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
    let target = Arc::new(target);
    // Ends with this one.
    let mut bulk = JoinSet::new();
    bulk.spawn(drive_bulk(session.clone(), target.clone()));
    keep_connected(&session, &target, Track::Ops, Some(opened)).await;
}

/// Keeps the session's second track connected, once there are bulk bytes.
async fn drive_bulk(session: Arc<Session>, target: Arc<Target>) {
    while !session.lock().has_bulk {
        session.wake_bulk.notified().await;
    }
    keep_connected(&session, &target, Track::Bulk, None).await;
}

/// Keeps a track connected until the session is over.
async fn keep_connected(
    session: &Session,
    target: &Target,
    track: Track,
    mut opened: Option<oneshot::Sender<Result<(), String>>>,
) {
    let mut heard = Instant::now();
    let mut resume = false;
    while track == Track::Ops || !session.is_over() {
        // A try must not outlast the time in which a worker is given up.
        let until = heard + GIVE_UP;
        let connected = timeout_at(until, connect(session, target, track, resume)).await;
        let ended = match connected.unwrap_or_else(|_| Err(Ended::Lost("no answer".into()))) {
            Ok(link) => {
                heard = Instant::now();
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
                pump(session, track, link, &mut heard).await
            }
            Err(ended) => ended,
        };
        let reason = match ended {
            Ended::Over(reason) => reason,
            Ended::Lost(reason) if heard.elapsed() < GIVE_UP && !session.is_over() => {
                debug!(session = %session.id, ?track, worker = target.worker, "no connection: {reason}");
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

async fn connect(
    session: &Session,
    target: &Target,
    track: Track,
    resume: bool,
) -> Result<Link, Ended> {
    let lost = |e: &dyn std::fmt::Display| Ended::Lost(e.to_string());
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
        Some(Body::Opened(opened)) => session.opened(track, opened).map_err(|e| over(&e))?,
        Some(Body::Rejected(rejected)) => return Err(over(&rejected.error.unwrap_or_default())),
        _ => return Err(over(&"it did not answer the opening")),
    }
    Ok(link)
}

async fn pump(session: &Session, track: Track, link: Link, heard: &mut Instant) -> Ended {
    let Link {
        sender, receiver, ..
    } = link;
    tokio::select! {
        ended = read(session, track, receiver, heard) => ended,
        ended = write(session, track, sender) => ended,
    }
}

async fn read(
    session: &Session,
    track: Track,
    mut receiver: LinkReceiver,
    heard: &mut Instant,
) -> Ended {
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
        if let Err(ended) = session.receive(track, frame) {
            return ended;
        }
    }
}

async fn write(session: &Session, track: Track, mut sender: LinkSender) -> Ended {
    let mut patient = true;
    let wake = session.wake_of(track);
    loop {
        let wait = match session.next_to_send(track, patient) {
            Outgoing::Frame(parts) => {
                if let Err(ended) = send(session, &mut sender, &parts).await {
                    return ended;
                }
                continue;
            }
            Outgoing::Few => {
                patient = timeout(GATHER, wake.notified()).await.is_ok();
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
        if timeout(wait, wake.notified()).await.is_err()
            && let Err(ended) = send(session, &mut sender, &session.beat(track)).await
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

    fn wake_of(&self, track: Track) -> &Notify {
        match track {
            Track::Ops => &self.wake,
            Track::Bulk => &self.wake_bulk,
        }
    }

    fn received(&self, track: Track) -> u64 {
        self.lock().track(track).inbox().received()
    }

    fn opened(&self, track: Track, opened: Opened) -> Result<(), String> {
        let ours = version::hello();
        version::negotiate(&ours, &opened.hello.unwrap_or_default()).map_err(|e| e.message)?;
        let profile = opened.settings.unwrap_or_default();
        let profile = DeviceProfile::decode(&profile.encoded).map_err(|e| e.to_string())?;
        let mut state = self.lock();
        state.profile = Some(profile);
        state.blobs.set_budget(opened.kept_bytes);
        let duplex = state.track(track);
        let rewound = duplex.rewind(opened.received, opened.credit_bytes);
        rewound.map_err(|e| e.to_string())?;
        drop(state);
        self.room.notify_all();
        Ok(())
    }

    /// What to send next; few ops are held back if the driver is `patient`.
    fn next_to_send(&self, track: Track, patient: bool) -> Outgoing {
        let mut state = self.lock();
        let few = track == Track::Ops && patient && (1..EAGER_OPS).contains(&state.op_count);
        if track == Track::Ops && !few {
            state.cut();
        }
        if let Some(parts) = state.track(track).next_to_send() {
            return Outgoing::Frame(parts);
        }
        if state.end.is_some() {
            return Outgoing::Goodbye;
        }
        if few {
            state.driver = Waiting::ForMore;
            return Outgoing::Few;
        }
        let duplex = state.track(track);
        let (due, news) = (duplex.inbox().is_telling_due(), duplex.inbox().has_news());
        if due {
            return Outgoing::Frame([duplex.beat(), Bytes::new(), Bytes::new()]);
        }
        if track == Track::Ops {
            state.driver = Waiting::ForAny;
        }
        match news {
            true => Outgoing::News,
            false => Outgoing::Nothing,
        }
    }

    fn beat(&self, track: Track) -> [Bytes; 3] {
        let beat = self.lock().track(track).beat();
        [beat, Bytes::new(), Bytes::new()]
    }

    fn receive(&self, track: Track, frame: Bytes) -> Result<(), Ended> {
        let broke = |e: String| Ended::Over(format!("the worker broke the protocol: {e}"));
        let mut state = self.lock();
        let duplex = state.track(track);
        let was_full = duplex.outbox().is_full();
        let received = duplex.receive(frame).map_err(|e| match e.is_loss() {
            true => Ended::Lost(e.to_string()),
            false => broke(e.to_string()),
        })?;
        if was_full && !duplex.outbox().is_full() {
            self.room.notify_all();
        }
        if let Some((_, bytes)) = &received {
            duplex.inbox().consume(*bytes);
        }
        // Credit may have come for what waits.
        match track {
            Track::Ops => self.wake(&mut state),
            Track::Bulk => self.wake_bulk.notify_one(),
        }
        let delivery = match received {
            None => None,
            Some((body, _)) => self.take(&mut state, track, body)?,
        };
        drop(state);
        if let Some(delivery) = delivery {
            delivery.deliver();
        }
        Ok(())
    }

    fn take(&self, state: &mut State, track: Track, body: Body) -> Result<Option<Delivery>, Ended> {
        let broke = |e: String| Ended::Over(format!("the worker broke the protocol: {e}"));
        let taken = match (track, body) {
            (_, Body::Ping(_)) => Ok(None),
            (Track::Bulk, Body::Chunk(chunk)) => {
                self.count_down(chunk.bytes.len());
                state.values.chunk(&chunk)
            }
            (Track::Ops, Body::Value(value)) => {
                self.count_down(inline_bytes(&value));
                state.values.value(value)
            }
            (Track::Ops, Body::Synced(synced)) => Ok(state.synced(synced)),
            (Track::Ops, Body::Held(held)) => {
                state.blobs.set_held(&held.hashes);
                Ok(None)
            }
            (_, Body::Closed(closed)) => {
                return Err(closed_by(closed.error.unwrap_or_default()));
            }
            _ => Err("it sent a frame that workers do not send".into()),
        };
        taken.map_err(broke)
    }

    fn count_down(&self, bytes: usize) {
        let counter = &self.counters.tensors_down;
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// The bytes of a tensor that `value` has in itself.
fn inline_bytes(value: &Value) -> usize {
    match &value.result {
        Some(value::Result::Tensor(TensorValue {
            content: Some(tensor_value::Content::Bytes(bytes)),
            ..
        })) => bytes.len(),
        _ => 0,
    }
}

fn closed_by(error: tensord_proto::v1::Error) -> Ended {
    match error.code() {
        ErrorCode::Unspecified => Ended::Over("closed".into()),
        _ => Ended::Over(format!("the worker ended the session: {error}")),
    }
}
