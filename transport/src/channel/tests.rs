//! The pump on a real link whose peer is silent, in virtual time: no test sleeps.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tensord_proto::v1::{Seed, frame};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy},
    net::{TcpListener, TcpStream},
    sync::Notify,
    time::{Instant, pause, sleep},
};

use super::*;
use crate::{Dialer, Identity, Link, Listener, TransportChoice, tls::Trust};

/// Both ends of a link over which a first frame has gone.
async fn link() -> (Link, Link) {
    let identity = Identity::self_signed().unwrap();
    let trust = Trust::Pin(identity.fingerprint());
    let address = "127.0.0.1:0".parse().unwrap();
    let mut listener = Listener::bind_tcp(address, &identity).await.unwrap();
    let address = listener.address().to_string();
    let dialer = Dialer::new(TransportChoice::Tcp);
    let dialled = dialer.dial(&address, &trust, Duration::from_secs(10));
    let mut near = dialled.await.unwrap();
    near.sender
        .send(&[Bytes::from_static(b"first")])
        .await
        .unwrap();
    let mut far = listener.accept().await;
    far.receiver.admit().unwrap();
    far.receiver.recv().await.unwrap().unwrap();
    (near, far)
}

/// Passes the bytes of one connection on to `to`, those of its client a few at a time.
async fn relay_slowly(relay: TcpListener, to: String) {
    let (mut client, _) = relay.accept().await.unwrap();
    let mut server = TcpStream::connect(to).await.unwrap();
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.split(), server.split());
    let slow = async {
        let mut bytes = [0; 8 << 10];
        while let Ok(count @ 1..) = from_client.read(&mut bytes).await {
            to_server.write_all(&bytes[..count]).await.unwrap();
            sleep(Duration::from_millis(20)).await;
        }
    };
    let fast = async { drop(copy(&mut from_server, &mut to_client).await) };
    tokio::join!(slow, fast);
}

#[tokio::test]
async fn slow_link_is_not_silent() {
    const SILENCE: Duration = Duration::from_secs(1);

    let identity = Identity::self_signed().unwrap();
    let trust = Trust::Pin(identity.fingerprint());
    let address = "127.0.0.1:0".parse().unwrap();
    let mut listener = Listener::bind_tcp(address, &identity).await.unwrap();
    let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = relay.local_addr().unwrap().to_string();
    let relaying = tokio::spawn(relay_slowly(relay, listener.address().to_string()));
    let dialer = Dialer::new(TransportChoice::Tcp);
    let dialled = dialer.dial(&address, &trust, Duration::from_secs(10));
    let mut near = dialled.await.unwrap();
    // It takes 128 times 20 ms.
    let frame = Bytes::from(vec![1; 1 << 20]);
    let first = Bytes::from_static(b"first");
    let sending = async {
        near.sender.send(&[first]).await.unwrap();
        near.sender
            .send(std::slice::from_ref(&frame))
            .await
            .unwrap();
    };
    let receiving = async {
        let mut far = listener.accept().await;
        far.receiver.admit().unwrap();
        far.receiver.recv().await.unwrap().unwrap();
        let received = pump::receive(&mut far.receiver, SILENCE).await;
        assert_eq!(received.unwrap().unwrap().unwrap(), frame);
        assert!(pump::receive(&mut far.receiver, SILENCE).await.is_none());
    };
    tokio::join!(sending, receiving);
    relaying.abort();
}

/// A channel's owner that records when it sends which frames.
struct Recorder {
    channel: Mutex<Channel>,
    wake: Notify,
    begun: Instant,
    /// Time since the begin in ms, and number of frames, of each batch.
    sent: Mutex<Vec<(u128, usize)>>,
    /// Result of the next look instead of the channel's.
    next: Mutex<Option<Next>>,
    /// Whether the frames are refused.
    refuses: AtomicBool,
    rows: Mutex<Vec<usize>>,
}

impl Recorder {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            channel: Mutex::new(Channel::new(1 << 20, 1 << 20, 1 << 20, now.into())),
            wake: Notify::new(),
            begun: now,
            sent: Mutex::default(),
            next: Mutex::default(),
            refuses: AtomicBool::new(false),
            rows: Mutex::default(),
        }
    }

    fn attach(&self) -> Connection {
        let attached = self.channel.lock().unwrap().attach(0, 1 << 20);
        attached.unwrap().connection
    }

    fn sent(&self) -> Vec<(u128, usize)> {
        self.sent.lock().unwrap().clone()
    }

    /// Returns the time since the begin in ms, rounded down to [`RESOLUTION_MS`]. A timer
    /// ends up to 1 ms late, as its clock has that resolution, and never early.
    fn ms(&self) -> u128 {
        self.begun.elapsed().as_millis() / RESOLUTION_MS * RESOLUTION_MS
    }
}

impl Endpoint for Recorder {
    type Reason = String;
    type Row = usize;

    fn on_frame(
        &self,
        connection: Connection,
        frame: Bytes,
        row: &mut usize,
    ) -> Result<(), Broken<String>> {
        if self.refuses.load(Ordering::Relaxed) {
            return Err(Broken::Over("refused".into(), Duration::from_secs(3)));
        }
        let mut channel = self.channel.lock().unwrap();
        match channel.receive(connection, frame, Instant::now().into()) {
            Ok(Received::Replaced) => Err(Broken::Replaced),
            Ok(_) => {
                *row += 1;
                Ok(())
            }
            Err(e) => Err(Broken::Loss(e.to_string())),
        }
    }

    fn on_row(&self, row: &mut usize) {
        self.rows.lock().unwrap().push(std::mem::take(row));
    }

    fn next(&self, connection: Connection, look: Look) -> Next {
        if look.patient
            && let Some(next) = self.next.lock().unwrap().clone()
        {
            return next;
        }
        let mut channel = self.channel.lock().unwrap();
        if !channel.is_latest(connection) {
            return Next::Replaced;
        }
        match channel.next_frames() {
            frames if frames.is_empty() => channel.acknowledgement(),
            frames => Next::Frames(frames),
        }
    }

    fn ping(&self, connection: Connection, must: bool) -> Option<FrameParts> {
        self.channel.lock().unwrap().ping(connection, must)
    }

    fn wake(&self) -> &Notify {
        &self.wake
    }

    fn on_send(&self, _: &crate::LinkSender, frames: &[FrameParts]) {
        if !frames.is_empty() {
            self.sent.lock().unwrap().push((self.ms(), frames.len()));
        }
    }
}

/// All time limits of these tests are multiples of this.
const RESOLUTION_MS: u128 = 10;

/// Time limits that are not those of the product.
const TIMING: Timing = Timing {
    silence: Duration::from_millis(1000),
    ping: Duration::from_millis(300),
    ack_delay: Duration::from_millis(10),
};

fn seed() -> frame::Body {
    frame::Body::Seed(Seed { seed: 1 })
}

#[tokio::test]
async fn idle_writer_pings_and_silent_peer_is_lost() {
    let (near, _far) = link().await;
    pause();
    let recorder = Recorder::new();
    let ended = pump(&recorder, recorder.attach(), near, TIMING).await;
    assert_eq!(ended, Ended::Lost("the peer sent nothing for 1s".into()));
    assert_eq!(recorder.ms(), 1000);
    assert_eq!(recorder.sent(), [(310, 1), (610, 1), (910, 1)]);
}

#[tokio::test]
async fn frames_wait_as_long_as_the_endpoint_lets_them() {
    let (near, _far) = link().await;
    pause();
    let recorder = Recorder::new();
    recorder.channel.lock().unwrap().push(seed());
    *recorder.next.lock().unwrap() = Some(Next::Later(Duration::from_millis(40)));
    let connection = recorder.attach();
    let pumped = pump(&recorder, connection, near, TIMING);
    tokio::select! {
        ended = pumped => panic!("{ended:?}"),
        () = tokio::time::sleep(Duration::from_millis(60)) => {}
    }
    assert_eq!(recorder.sent(), [(40, 1)]);
}

#[tokio::test]
async fn pending_ack_is_sent_alone_after_its_delay() {
    let (near, _far) = link().await;
    pause();
    let recorder = Recorder::new();
    let connection = recorder.attach();
    let mut peer = Channel::new(1 << 20, 1 << 20, 1 << 20, Instant::now().into());
    peer.attach(0, 1 << 20).unwrap();
    peer.push(seed());
    let frame = peer.next_frame().unwrap().concat().into();
    recorder.on_frame(connection, frame, &mut 0).unwrap();
    let pumped = pump(&recorder, connection, near, TIMING);
    tokio::select! {
        ended = pumped => panic!("{ended:?}"),
        () = tokio::time::sleep(Duration::from_millis(100)) => {}
    }
    assert_eq!(recorder.sent(), [(10, 1)]);
}

#[tokio::test]
async fn replaced_connection_ends_and_sends_nothing() {
    let (near, _far) = link().await;
    pause();
    let recorder = Recorder::new();
    let old = recorder.attach();
    let latest = recorder.attach();
    recorder.channel.lock().unwrap().push(seed());
    let ended = pump(&recorder, old, near, TIMING).await;
    assert_eq!(ended, Ended::Replaced);
    assert_eq!(recorder.sent(), []);
    let mut channel = recorder.channel.lock().unwrap();
    assert!(!channel.detach(old, Instant::now().into()));
    assert_eq!(channel.detached(), None);
    assert!(channel.detach(latest, Instant::now().into()));
    assert!(channel.detached().is_some());
}

#[tokio::test]
async fn done_finishes_the_link_and_linger_waits() {
    let (near, mut far) = link().await;
    let recorder = Recorder::new();
    *recorder.next.lock().unwrap() = Some(Next::Done);
    let connection = recorder.attach();
    let pumped = tokio::join!(
        pump(&recorder, connection, near, TIMING),
        far.receiver.recv()
    );
    assert_eq!(pumped.0, Ended::Done);
    assert_eq!(pumped.1, Ok(None));

    let (near, _far) = link().await;
    pause();
    let recorder = Recorder::new();
    *recorder.next.lock().unwrap() = Some(Next::Linger(Duration::from_millis(120)));
    let ended = pump(&recorder, recorder.attach(), near, TIMING).await;
    assert_eq!((ended, recorder.ms()), (Ended::Done, 120));
}

#[tokio::test]
async fn frames_that_arrived_together_are_one_row() {
    let (near, mut far) = link().await;
    let recorder = Recorder::new();
    let mut peer = Channel::new(1 << 20, 1 << 20, 1 << 20, Instant::now().into());
    peer.attach(0, 1 << 20).unwrap();
    (0..3).for_each(|_| peer.push(seed()));
    far.sender.send_all(&peer.next_frames()).await.unwrap();
    far.sender.finish().await;
    let ended = pump(&recorder, recorder.attach(), near, TIMING).await;
    assert_eq!(ended, Ended::Lost("the peer closed the connection".into()));
    assert_eq!(recorder.rows.lock().unwrap().iter().sum::<usize>(), 3);
    assert_eq!(recorder.rows.lock().unwrap()[0], 3);
}

#[tokio::test]
async fn writer_has_time_for_its_last_frames_after_a_broken_rule() {
    let (near, mut far) = link().await;
    far.sender
        .send(&[Bytes::from_static(b"bad")])
        .await
        .unwrap();
    // The frame is there before time is virtual.
    tokio::time::sleep(Duration::from_millis(50)).await;
    pause();
    let recorder = Recorder::new();
    recorder.refuses.store(true, Ordering::Relaxed);
    recorder.channel.lock().unwrap().push(seed());
    let ended = pump(&recorder, recorder.attach(), near, TIMING).await;
    assert_eq!(ended, Ended::Over("refused".into()));
    assert_eq!(recorder.sent().first().map(|&(_, frames)| frames), Some(1));
    assert!((3000..3050).contains(&recorder.ms()), "{}", recorder.ms());
}
