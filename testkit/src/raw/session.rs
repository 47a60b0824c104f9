//! One track of a session with a worker, which can carry any frame.

mod marks;
mod work;

use std::{pin::pin, time::Duration};

use burn_backend::{DType, Shape};
use bytes::Bytes;
use tensord_proto::{
    codec::OpEncoder,
    ids::LeaseId,
    v1::{self, Open, Opened, frame::Body},
};
use tensord_transport::{
    Dialer, Link, TransportChoice,
    channel::duplex::{self, Duplex},
};
use tokio::time::{Instant, timeout, timeout_at};

use super::{ANSWER_DEADLINE, SessionError, Target};

/// How often a waiting session acknowledges to the worker. Half of the longest time that an
/// honest client may leave between two beats.
const BEAT: Duration = Duration::from_millis(500);

/// How long a session attends to its connection before it looks whether other work is done.
const ATTENTION: Duration = Duration::from_millis(10);

/// Receive window in bytes, the same that an honest client grants: data that the worker may
/// send before the session consumes it.
const WINDOW_BYTES: u64 = 32 << 20;

/// Returns every carrier, for tests of rules that hold on all carriers.
pub fn carriers() -> [TransportChoice; 3] {
    [
        TransportChoice::Tcp,
        TransportChoice::Grpc,
        TransportChoice::Quic,
    ]
}

/// One track of a session: for ops, or for bulk bytes if `bulk` is set in its `Open`.
#[derive(Debug)]
pub struct RawSession {
    link: Link,
    duplex: Duplex,
    encoder: OpEncoder,
    requests: u64,
    tensors: u64,
    next_beat: Instant,
    /// The worker's reply to the opening.
    pub opened: Opened,
    /// How long [`next`](Self::next) waits for the worker's next body.
    pub answer_deadline: Duration,
}

impl RawSession {
    /// Opens a session as an honest client does, over TCP.
    ///
    /// # Errors
    ///
    /// If the worker cannot be reached; or the worker's refusal.
    ///
    /// # Panics
    ///
    /// If the worker does not reply.
    pub async fn open(target: &Target) -> Result<Self, SessionError> {
        Self::open_with(target, target.open()).await
    }

    /// Opens a session, or a track of one, with any opening, over TCP.
    ///
    /// # Errors
    ///
    /// If the worker cannot be reached; or the worker's refusal.
    ///
    /// # Panics
    ///
    /// If the worker does not reply.
    pub async fn open_with(target: &Target, open: Open) -> Result<Self, SessionError> {
        Self::open_over(dial_tcp(target).await?, Body::Open(open)).await
    }

    /// Sends any first body over `link`, and makes a session of the link if the worker
    /// accepts.
    ///
    /// # Errors
    ///
    /// The worker's refusal.
    ///
    /// # Panics
    ///
    /// If the worker does not reply.
    pub async fn open_over(mut link: Link, first: Body) -> Result<Self, SessionError> {
        let opened = greet(&mut link, first).await?;
        Ok(Self {
            link,
            duplex: Duplex::new(usize::MAX, opened.credit_bytes, WINDOW_BYTES),
            encoder: OpEncoder::default(),
            requests: 0,
            tensors: 0,
            next_beat: Instant::now() + BEAT,
            opened,
            answer_deadline: ANSWER_DEADLINE,
        })
    }

    /// Resumes this track over a new connection, with the opening that an honest client
    /// would send unless the test has changed `open`. Retransmits frames that the worker
    /// has not received. The old connection ends as if lost.
    ///
    /// # Errors
    ///
    /// If the worker cannot be reached; or the worker's refusal.
    ///
    /// # Panics
    ///
    /// If the worker does not reply.
    pub async fn resume(&mut self, target: &Target, open: Open) -> Result<(), SessionError> {
        let mut link = dial_tcp(target).await?;
        let open = Open {
            resume: true,
            received: self.duplex.inbox().received(),
            ..open
        };
        let opened = greet(&mut link, Body::Open(open)).await?;
        let rewound = self.duplex.rewind(opened.received, opened.credit_bytes);
        rewound.map_err(|e| SessionError::Protocol(e.to_string()))?;
        (self.link, self.opened) = (link, opened);
        Ok(())
    }

    /// Queues any body as a numbered frame.
    pub fn push(&mut self, body: Body) {
        self.duplex.push(body);
    }

    /// Sends queued frames as far as credit allows, and returns the worker's next body.
    ///
    /// # Errors
    ///
    /// If the session is over.
    ///
    /// # Panics
    ///
    /// If none arrives within [`answer_deadline`](Self::answer_deadline).
    pub async fn next(&mut self) -> Result<Body, SessionError> {
        let until = Instant::now() + self.answer_deadline;
        let next = self.next_until(until).await?;
        Ok(next.expect("the worker answers"))
    }

    /// Stays connected for `time`, sends queued frames and drops received ones.
    ///
    /// # Errors
    ///
    /// If the session is over.
    pub async fn stay_connected(&mut self, time: Duration) -> Result<(), SessionError> {
        let until = Instant::now() + time;
        while self.next_until(until).await?.is_some() {}
        Ok(())
    }

    /// Stays connected while `work` is done, for example on another session, and drops received frames.
    ///
    /// # Errors
    ///
    /// If the session is over before.
    pub async fn stay_connected_during<T>(
        &mut self,
        work: impl Future<Output = T>,
    ) -> Result<T, SessionError> {
        let mut work = pin!(work);
        loop {
            // Nothing that is being sent is given up when the work is done.
            let attended = self.next_until(Instant::now() + ATTENTION);
            let (attended, done) = tokio::join!(attended, timeout(ATTENTION, &mut work));
            attended?;
            if let Ok(done) = done {
                return Ok(done);
            }
        }
    }

    /// Sends queued frames as far as credit allows.
    ///
    /// # Errors
    ///
    /// If the session is over.
    pub async fn flush(&mut self) -> Result<(), SessionError> {
        loop {
            let frames = self.duplex.next_frames();
            if frames.is_empty() {
                return Ok(());
            }
            let sent = self.link.sender.send_all(&frames).await;
            sent.map_err(|e| SessionError::Lost(e.to_string()))?;
        }
    }

    /// Sends any bytes as a frame, regardless of numbering and credit. The bytes may come
    /// from [`frame`](super::frame()) or be arbitrary.
    ///
    /// # Errors
    ///
    /// If the session is over.
    pub async fn send_bytes(&mut self, frame: Vec<u8>) -> Result<(), SessionError> {
        let sent = self.link.sender.send(&[frame.into()]).await;
        sent.map_err(|e| SessionError::Lost(e.to_string()))
    }

    /// Returns the number of the last frame that was sent through the outbox.
    pub fn sent(&self) -> u64 {
        self.duplex.outbox().sent()
    }

    /// Waits until the worker ends the session and returns how it ended. Drops earlier
    /// bodies.
    ///
    /// # Panics
    ///
    /// If the session does not end within [`ANSWER_DEADLINE`].
    pub async fn end(&mut self) -> SessionError {
        let until = Instant::now() + ANSWER_DEADLINE;
        loop {
            match self.next_until(until).await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("the worker did not end the session"),
                Err(broken) => return broken,
            }
        }
    }

    /// Returns the link, for bytes that are not frames of the session. The session is lost.
    pub fn into_link(self) -> Link {
        self.link
    }

    /// Returns the worker's next body, or `None` if none arrives before `until`.
    ///
    /// # Errors
    ///
    /// If the session is over.
    pub async fn next_until(&mut self, until: Instant) -> Result<Option<Body>, SessionError> {
        loop {
            self.flush().await?;
            let wake = until.min(self.next_beat);
            match timeout_at(wake, self.link.receiver.recv()).await {
                Ok(frame) => {
                    let frame = frame.map_err(|e| SessionError::Lost(e.to_string()))?;
                    let ended = || SessionError::Lost("finished by the worker".into());
                    if let Some(body) = self.take(frame.ok_or_else(ended)?)? {
                        return Ok(Some(body));
                    }
                }
                Err(_) if Instant::now() >= until => return Ok(None),
                Err(_) => {}
            }
            self.ping().await?;
        }
    }

    fn take(&mut self, frame: Bytes) -> Result<Option<Body>, SessionError> {
        let received = self.duplex.receive(frame);
        let Some((body, bytes)) = received.map_err(|e| SessionError::Protocol(e.to_string()))?
        else {
            return Ok(None);
        };
        self.duplex.inbox().consume(bytes);
        match body {
            Body::Ping(_) => Ok(None),
            Body::Closed(closed) => Err(SessionError::Closed(closed.error.unwrap_or_default())),
            body => Ok(Some(body)),
        }
    }

    /// Sends a beat if an acknowledgement or the next beat is due.
    async fn ping(&mut self) -> Result<(), SessionError> {
        let due = self.duplex.inbox().is_ack_due();
        if due || Instant::now() >= self.next_beat {
            self.next_beat = Instant::now() + BEAT;
            let ping = self.duplex.ping().to_vec();
            self.send_bytes(ping).await?;
        }
        Ok(())
    }
}

/// Tries to open a session at `target` until the worker refuses, and returns its reason. A lost
/// connection is tried again: a process of the lease has ended, and its worker has not noticed.
///
/// # Panics
///
/// If a session is opened, or the worker does not refuse within [`ANSWER_DEADLINE`].
pub async fn refusal(target: &Target) -> v1::Error {
    let until = Instant::now() + ANSWER_DEADLINE;
    let mut attempts = 0;
    loop {
        attempts += 1;
        let last = match timeout_at(until, RawSession::open(target)).await {
            Ok(Ok(_)) => panic!("the worker opened a session"),
            Ok(Err(SessionError::Rejected(error))) => return error,
            Ok(Err(lost)) => format!("failed: {lost}"),
            Err(_) => "got no answer".into(),
        };
        assert!(
            Instant::now() < until,
            "the worker refused no session within {ANSWER_DEADLINE:?}; attempt {attempts} {last}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn dial_tcp(target: &Target) -> Result<Link, SessionError> {
    let dialler = Dialer::new(TransportChoice::Tcp).for_lease(LeaseId(target.lease_id));
    let dialled = dialler.dial(&target.address, &target.trust, ANSWER_DEADLINE);
    dialled.await.map_err(|e| SessionError::Lost(e.to_string()))
}

/// Sends the first body of a link and returns the worker's reply if it opened a session.
async fn greet(link: &mut Link, first: Body) -> Result<Opened, SessionError> {
    let lost = |e: &dyn std::fmt::Display| SessionError::Lost(e.to_string());
    let sent = link.sender.send(&[duplex::encode(first)]).await;
    sent.map_err(|e| lost(&e))?;
    let answer = timeout(ANSWER_DEADLINE, link.receiver.recv()).await;
    let answer = answer.expect("the worker answers").map_err(|e| lost(&e))?;
    let answer = answer.ok_or_else(|| lost(&"it ended before an answer"))?;
    let protocol = |e: &dyn std::fmt::Display| SessionError::Protocol(e.to_string());
    match duplex::decode(answer).map_err(|e| protocol(&e))?.body {
        Some(Body::Opened(opened)) => Ok(opened),
        Some(Body::Rejected(rejected)) => {
            Err(SessionError::Rejected(rejected.error.unwrap_or_default()))
        }
        other => Err(protocol(&format!("not an answer: {other:?}"))),
    }
}

/// Returns the type of a tensor as it is encoded in frames.
pub fn type_of(shape: &[usize], dtype: DType) -> v1::TensorType {
    tensord_proto::codec::encode_type(&Shape::from(shape.to_vec()), dtype)
}
