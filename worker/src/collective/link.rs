//! The tasks behind a link between two workers: dial or accept, pump, again.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tensord_proto::{
    ids::WorkerId,
    v1::{Error, ErrorCode, Join, Joined, frame::Body},
    version,
};
use tensord_transport::{
    Dialer, Link, LinkReceiver, LinkSender, TransportChoice, duplex,
    tls::{Fingerprint, Trust},
};
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info, warn};

use super::{
    cohort::Cohort,
    peer::{Outgoing, Peer},
};

/// How long one try to connect may take.
const DIAL_DEADLINE: Duration = Duration::from_secs(3);

/// Pauses between tries.
const RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(1);

/// A connection that is silent for this long is lost; the other side beats each
/// second.
const SILENCE: Duration = Duration::from_secs(4);

/// How long a writer with nothing to send waits before it beats.
const BEAT: Duration = Duration::from_secs(1);

/// How long news (an ack, credit) may wait for a frame to ride on.
const NEWS_DELAY: Duration = Duration::from_millis(20);

/// Frames between two looks at what may be in flight.
const LOOK_FRAMES: usize = 2;

/// A connection that the other worker opened.
pub(crate) struct Accepted {
    pub(crate) cohort: Weak<Cohort>,
    pub(crate) peer: Arc<Peer>,
    pub(crate) connection: u64,
    pub(crate) joined: Joined,
}

/// Keeps the link to `peer` connected for as long as there is the cohort.
pub(crate) async fn dial(cohort: Weak<Cohort>, peer: Arc<Peer>) {
    // Everything goes over TCP: it carries the most by far, and whoever leases
    // devices of both has let them reach each other.
    let dialer = Dialer::new(TransportChoice::Auto);
    let name = peer.share.worker.clone();
    let mut pause = RETRY;
    loop {
        match connect(&cohort, &peer, &dialer).await {
            Ok((connection, link)) => {
                info!(worker = name, "linked over {}", link.carrier);
                let ended = pump(&cohort, &peer, connection, link).await;
                info!(worker = name, "the link ended: {ended}");
                pause = RETRY;
            }
            Err(e) => debug!(worker = name, "no link: {e}"),
        }
        if cohort.strong_count() == 0 {
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(LAST_RETRY);
    }
}

async fn connect(
    cohort: &Weak<Cohort>,
    peer: &Peer,
    dialer: &Dialer,
) -> Result<(u64, Link), String> {
    let share = &peer.share;
    let pin = <[u8; 32]>::try_from(&share.certificate_sha256[..]);
    let pin = pin.map_err(|_| "the lease has no fingerprint of its certificate".to_owned())?;
    let join = {
        let cohort = cohort.upgrade().ok_or("the lease is over")?;
        let (received, credit_bytes) = peer.tell();
        Join {
            hello: Some(version::hello()),
            lease_token: cohort.lease_token(),
            cohort: cohort.id,
            from_worker_id: cohort.roster().me().0,
            to_worker_id: peer.worker.0,
            received,
            credit_bytes,
        }
    };
    let trust = Trust::Pin(Fingerprint(pin));
    let link = dialer
        .dial_bulk(&share.address, &trust, DIAL_DEADLINE)
        .await;
    let mut link = link.map_err(|e| e.to_string())?;
    let joining = duplex::encode(Body::Join(join));
    let asked = Instant::now();
    let sent = link.sender.send(&[joining]).await;
    sent.map_err(|e| e.to_string())?;
    let answer = timeout(DIAL_DEADLINE, link.receiver.recv()).await;
    let answer = answer
        .map_err(|_| "no answer")?
        .map_err(|e| e.to_string())?;
    peer.answered(asked.elapsed());
    let answer = duplex::decode(answer.ok_or("closed before an answer")?);
    match answer.map_err(|e| e.to_string())?.body {
        Some(Body::Joined(joined)) => {
            let attached = peer.attach(joined.received, joined.credit_bytes);
            let (connection, ..) = attached.map_err(|e| e.to_string())?;
            Ok((connection, link))
        }
        Some(Body::Rejected(rejected)) => Err(rejected.error.unwrap_or_default().to_string()),
        _ => Err("it did not answer the joining".into()),
    }
}

/// Takes in a worker that dialled, whose token was checked.
pub(crate) fn accept(cohort: &Arc<Cohort>, join: &Join) -> Result<Accepted, Error> {
    let protocol = |what: String| Error::new(ErrorCode::Protocol, what);
    let ours = version::hello();
    let theirs = join.hello.clone().unwrap_or_default();
    let agreed = version::negotiate(&ours, &theirs)?;
    let from = WorkerId(join.from_worker_id);
    let peer = cohort
        .peer(from)
        .ok_or_else(|| protocol(format!("worker {from} is not of the lease")))?;
    peer.want();
    let attached = peer.attach(join.received, join.credit_bytes);
    let (connection, received, credit_bytes) = attached.map_err(|e| protocol(e.to_string()))?;
    Ok(Accepted {
        cohort: Arc::downgrade(cohort),
        peer: peer.clone(),
        connection,
        joined: Joined {
            hello: Some(ours),
            protocol: agreed,
            received,
            credit_bytes,
        },
    })
}

/// Serves a connection that was taken in, until it ends.
pub(crate) async fn serve(accepted: Accepted, mut link: Link) {
    let Accepted {
        cohort,
        peer,
        connection,
        joined,
    } = accepted;
    let greeting = duplex::encode(Body::Joined(joined));
    let ended = match link.sender.send(&[greeting]).await {
        Ok(()) => pump(&cohort, &peer, connection, link).await,
        Err(e) => {
            peer.detach(connection);
            e.to_string()
        }
    };
    debug!(worker = peer.share.worker, "the link ended: {ended}");
}

async fn pump(cohort: &Weak<Cohort>, peer: &Peer, connection: u64, link: Link) -> String {
    let Link {
        sender, receiver, ..
    } = link;
    let lease = cohort.upgrade();
    let Some(mut alive) = lease.map(|cohort| cohort.alive()) else {
        return "the lease is over".into();
    };
    let ended = tokio::select! {
        ended = read(cohort, peer, connection, receiver) => ended,
        ended = write(peer, connection, sender) => ended,
        _ = alive.changed() => "the lease is over".into(),
    };
    peer.detach(connection);
    ended
}

async fn read(
    cohort: &Weak<Cohort>,
    peer: &Peer,
    connection: u64,
    mut receiver: LinkReceiver,
) -> String {
    let joined = Instant::now();
    let mut is_first = true;
    loop {
        let frame = match timeout(SILENCE, receiver.recv()).await {
            Ok(Ok(Some(frame))) => frame,
            Ok(Ok(None)) => return "finished by the other side".into(),
            Ok(Err(e)) => return e.to_string(),
            Err(_) => return format!("silent for {SILENCE:?}"),
        };
        if std::mem::take(&mut is_first) {
            // The other side began to write when it heard from this one.
            peer.answered(joined.elapsed());
        }
        let body = match peer.receive(connection, frame) {
            Ok(Some(body)) => body,
            Ok(None) => return "replaced by a later one".into(),
            Err(e) => return e.to_string(),
        };
        let (Some(body), Some(cohort)) = (body, cohort.upgrade()) else {
            continue;
        };
        if let Err(e) = cohort.heard(peer.worker, body) {
            // Whoever waits for what it had to say hears of it at the deadline.
            warn!(worker = peer.share.worker, "it broke the protocol: {e}");
            return e.to_string();
        }
    }
}

async fn write(peer: &Peer, connection: u64, mut sender: LinkSender) -> String {
    // Lets the other side measure the round trip.
    if let Some(beat) = peer.beat(connection)
        && let Err(e) = sender.send(&beat).await
    {
        return e.to_string();
    }
    let (mut frames, mut bound) = (0usize, None);
    loop {
        let wait = match peer.next_to_send(connection) {
            Outgoing::Frame(parts) => {
                frames = frames.wrapping_add(1);
                if frames.is_multiple_of(LOOK_FRAMES)
                    && let Some(bytes) = peer.flight_bytes()
                    && bound != Some(bytes)
                {
                    sender.bound_flight(bytes);
                    bound = Some(bytes);
                }
                if let Err(e) = sender.send(&parts).await {
                    return e.to_string();
                }
                continue;
            }
            Outgoing::Replaced => return "replaced by a later one".into(),
            Outgoing::News => NEWS_DELAY,
            Outgoing::Nothing => BEAT,
        };
        if timeout(wait, peer.news.notified()).await.is_err()
            && let Some(beat) = peer.beat(connection)
            && let Err(e) = sender.send(&beat).await
        {
            return e.to_string();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use burn_backend::{DType, Shape};
    use bytes::Bytes;
    use tensord_proto::{ids::LeaseId, v1::LeaseShare};
    use tensord_transport::{Identity, Listener};
    use tokio::{runtime::Handle, sync::mpsc, task::AbortHandle};

    use super::super::{Arrival, Arrived, Call, Member, Members, Outcome, Roster, Settings};
    use super::*;

    /// A session that only listens.
    struct Ear(mpsc::UnboundedSender<(u64, Outcome)>);

    impl Member for Ear {
        fn deliver(self: Arc<Self>, ticket: u64, outcome: Outcome) {
            let _ = self.0.send((ticket, outcome));
        }
    }

    struct Worker {
        cohort: Arc<Cohort>,
        _ear: Arc<dyn Member>,
        heard: mpsc::UnboundedReceiver<(u64, Outcome)>,
    }

    /// The worker of the lease with this id, with the session at `place`.
    fn worker(shares: &[LeaseShare], id: u64, place: u32) -> Worker {
        let settings = Settings {
            deadline: Duration::from_secs(20),
            bucket_bytes: None,
            runtime: Handle::current(),
        };
        let roster = Roster::new(shares.to_vec(), WorkerId(id));
        let cohort = Cohort::new(1, LeaseId(1), roster, Bytes::new(), settings);
        let (tell, heard) = mpsc::unbounded_channel();
        let ear: Arc<dyn Member> = Arc::new(Ear(tell));
        assert!(cohort.enter(place, Arc::downgrade(&ear)));
        Worker {
            cohort,
            _ear: ear,
            heard,
        }
    }

    impl Worker {
        fn call(&self, place: u32, ticket: u64, size: usize) {
            let value = (ticket as f32 + place as f32).to_le_bytes();
            let call = Call {
                members: Members::new(vec![0, 1], self.cohort.roster()).unwrap(),
                ticket,
                arrival: Arrival {
                    shape: Shape::new([size]),
                    dtype: DType::F32,
                    mean: false,
                    fault: None,
                    ring_bytes: None,
                },
                bytes: value.repeat(size).into(),
            };
            self.cohort.call(place, vec![call]);
        }

        async fn next(&mut self) -> (u64, Bytes) {
            let heard = timeout(Duration::from_secs(30), self.heard.recv()).await;
            match heard.unwrap().unwrap() {
                (ticket, Ok(Arrived::Reduced(bytes))) => (ticket, bytes),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Takes in whoever dials; the last connection can be cut.
    async fn accepting(
        mut listener: Listener,
        cohort: Arc<Cohort>,
        last: Arc<Mutex<Option<AbortHandle>>>,
    ) {
        loop {
            let mut link = listener.accept().await;
            let first = link.receiver.recv().await.unwrap().unwrap();
            link.receiver.admit().unwrap();
            let Some(Body::Join(join)) = duplex::decode(first).unwrap().body else {
                panic!("the first frame joins");
            };
            let serving = serve(accept(&cohort, &join).unwrap(), link);
            *last.lock().unwrap() = Some(tokio::spawn(serving).abort_handle());
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_link_that_is_lost_is_made_again_and_nothing_with_it() {
        let identity = Identity::self_signed().unwrap();
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), &identity).await;
        let listener = listener.unwrap();
        let share = |worker_id, address: String| LeaseShare {
            worker_id,
            worker: format!("w{worker_id}"),
            address,
            certificate_sha256: identity.fingerprint().0.to_vec().into(),
            ..LeaseShare::default()
        };
        let address = listener.address().to_string();
        let shares = [share(1, "127.0.0.1:1".into()), share(2, address)];
        let (mut first, mut second) = (worker(&shares, 1, 0), worker(&shares, 2, 1));
        let last: Arc<Mutex<Option<AbortHandle>>> = Arc::default();
        let accepting = accepting(listener, second.cohort.clone(), last.clone());
        let accepting = tokio::spawn(accepting);
        let (calls, size) = (40, 300_000);
        for ticket in 0..calls {
            first.call(0, ticket, size);
            second.call(1, ticket, size);
            if ticket % 8 == 7 {
                // In the middle of what was begun last.
                assert_eq!(first.next().await.0, ticket / 8);
                let connected = async {
                    loop {
                        if let Some(last) = last.lock().unwrap().take() {
                            break last;
                        }
                        sleep(Duration::from_millis(1)).await;
                    }
                };
                let last = timeout(Duration::from_secs(20), connected).await;
                last.expect("it is dialled again").abort();
            }
        }
        let sum = |ticket: u64| (2.0 * ticket as f32 + 1.0).to_le_bytes().repeat(size);
        for ticket in calls / 8..calls {
            assert_eq!(first.next().await.0, ticket);
        }
        for ticket in 0..calls {
            let (of, bytes) = second.next().await;
            assert!(of == ticket && bytes == sum(ticket), "call {ticket}");
        }
        accepting.abort();
    }
}
