//! One track of a session with a worker, with anything on it.

use std::time::Duration;

use burn_backend::{DType, Shape};
use burn_ir::{InitOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use bytes::Bytes;
use tensord_proto::{
    codec::{OpEncoder, encode_tensor},
    content::{self, Content, Entry},
    v1::{self, Fault, Open, Opened, Ops, Reads, frame::Body, tensor_value, value},
};
use tensord_transport::{
    Dialer, Link, TransportChoice,
    duplex::{self, Duplex},
    tls::Trust,
};
use tokio::time::{Instant, timeout, timeout_at};

use super::{ANSWER_DEADLINE, Target};

/// How often a session that waits tells the worker what it has received. Half of what an
/// honest client may leave between two beats.
const BEAT: Duration = Duration::from_millis(500);

/// Bytes that the worker may have sent and the session not taken yet: what an honest client
/// grants.
const WINDOW_BYTES: u64 = 32 << 20;

/// Why a session is over.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Broken {
    /// The worker turned the opening away.
    #[error("rejected: {0}")]
    Rejected(v1::Error),
    /// The worker ended the session.
    #[error("closed: {0}")]
    Closed(v1::Error),
    /// The connection ended without a word.
    #[error("lost: {0}")]
    Lost(String),
    /// The worker broke a rule.
    #[error("the worker broke the protocol: {0}")]
    Protocol(String),
}

impl Broken {
    /// What the worker said, if it said something.
    pub fn error(&self) -> Option<&v1::Error> {
        match self {
            Self::Rejected(error) | Self::Closed(error) => Some(error),
            Self::Lost(_) | Self::Protocol(_) => None,
        }
    }
}

/// Each carrier there is, for what must hold on all.
pub fn carriers() -> [TransportChoice; 3] {
    [
        TransportChoice::Tcp,
        TransportChoice::Grpc,
        TransportChoice::Quic,
    ]
}

/// One track of a session: for ops, or for bulk bytes if its `Open` says so.
#[derive(Debug)]
pub struct RawSession {
    link: Link,
    duplex: Duplex,
    encoder: OpEncoder,
    requests: u64,
    tensors: u64,
    next_beat: Instant,
    /// What the worker answered to the opening.
    pub opened: Opened,
}

impl RawSession {
    /// Opens a session as an honest client does, over TCP.
    ///
    /// # Errors
    ///
    /// When the worker cannot be reached, or what it answers instead.
    ///
    /// # Panics
    ///
    /// When the worker does not answer.
    pub async fn open(target: &Target) -> Result<Self, Broken> {
        Self::open_with(target, target.open()).await
    }

    /// Opens a session, or a track of one, with any opening, over TCP.
    ///
    /// # Errors
    ///
    /// When the worker cannot be reached, or what it answers instead.
    ///
    /// # Panics
    ///
    /// When the worker does not answer.
    pub async fn open_with(target: &Target, open: Open) -> Result<Self, Broken> {
        Self::open_over(dial_tcp(target).await?, Body::Open(open)).await
    }

    /// A link to a worker with nothing on it.
    ///
    /// # Panics
    ///
    /// When the worker cannot be reached.
    pub async fn dial(carrier: TransportChoice, address: &str, trust: &Trust) -> Link {
        let dialler = Dialer::new(carrier);
        let dialled = dialler.dial(address, trust, ANSWER_DEADLINE).await;
        dialled.expect("the worker is there")
    }

    /// Sends any first body over `link` and goes on if the worker opens a session.
    ///
    /// # Errors
    ///
    /// What the worker answers instead.
    ///
    /// # Panics
    ///
    /// When the worker does not answer.
    pub async fn open_over(mut link: Link, first: Body) -> Result<Self, Broken> {
        let opened = greet(&mut link, first).await?;
        Ok(Self {
            link,
            duplex: Duplex::new(usize::MAX, opened.credit_bytes, WINDOW_BYTES),
            encoder: OpEncoder::default(),
            requests: 0,
            tensors: 0,
            next_beat: Instant::now() + BEAT,
            opened,
        })
    }

    /// Goes on over another connection, by an opening with which an honest client resumes
    /// this track, unless the test has changed `open`; frames that the worker has not got
    /// are sent again. The old connection ends as one that is lost.
    ///
    /// # Errors
    ///
    /// When the worker cannot be reached, or what it answers instead.
    ///
    /// # Panics
    ///
    /// When the worker does not answer.
    pub async fn resume(&mut self, target: &Target, open: Open) -> Result<(), Broken> {
        let mut link = dial_tcp(target).await?;
        let open = Open {
            resume: true,
            received: self.duplex.inbox().received(),
            ..open
        };
        let opened = greet(&mut link, Body::Open(open)).await?;
        let rewound = self.duplex.rewind(opened.received, opened.credit_bytes);
        rewound.map_err(|e| Broken::Protocol(e.to_string()))?;
        (self.link, self.opened) = (link, opened);
        Ok(())
    }

    /// An id that no tensor of this session has. Ids that a test chooses itself should be
    /// below 2^32.
    pub fn new_id(&mut self) -> u64 {
        self.tensors += 1;
        (1 << 32) + self.tensors
    }

    /// Queues any body, numbered.
    pub fn push(&mut self, body: Body) {
        self.duplex.push(body);
    }

    /// Queues ops, encoded as an honest client does.
    pub fn ops(&mut self, ops: &[OperationIr]) {
        self.ops_with(ops, Vec::new());
    }

    /// Queues ops with any list of contents for the uploads among them.
    ///
    /// # Panics
    ///
    /// When the ops are more than one frame may have.
    pub fn ops_with(&mut self, ops: &[OperationIr], contents: Vec<u8>) {
        let mut encoded = Vec::new();
        for op in ops {
            assert!(!self.encoder.is_full(), "more ops than a frame may have");
            self.encoder.encode(op, &mut encoded);
        }
        self.encoder.finish(&mut encoded);
        self.push(Body::Ops(Ops {
            count: ops.len().try_into().expect("fewer than a frame may have"),
            encoded: encoded.into(),
            contents: contents.into(),
        }));
    }

    /// Queues the upload of a row of numbers and returns the tensor, to be read any number
    /// of times.
    pub fn upload(&mut self, values: &[f32]) -> TensorIr {
        let id = self.new_id();
        self.upload_as(
            super::typed(id, &[values.len()], DType::F32),
            super::bytes_of(values),
        )
    }

    /// Queues the upload of any bytes as the content of `tensor`; they go in the frame of
    /// the op, which has room for some 4 MiB.
    pub fn upload_as(&mut self, tensor: TensorIr, bytes: Vec<u8>) -> TensorIr {
        let content = Content::Inline {
            bytes: bytes.into(),
            keep: None,
        };
        self.upload_from(tensor, &[Entry::Upload(content)])
    }

    /// Queues the upload of `tensor` whose bytes are where `entries` say.
    pub fn upload_from(&mut self, tensor: TensorIr, entries: &[Entry]) -> TensorIr {
        let mut contents = Vec::new();
        for entry in entries {
            content::put(&mut contents, entry);
        }
        let out = TensorIr {
            status: TensorStatus::NotInit,
            ..tensor.clone()
        };
        self.ops_with(&[OperationIr::Init(InitOperationIr { out })], contents);
        tensor
    }

    /// Makes a tensor of which the codec knows nothing, by any body that makes one, such as
    /// an `Alias` or a `Take`.
    pub fn push_made(&mut self, id: u64, body: Body) {
        self.push(body);
        self.encoder.note_tensor(TensorId::new(id));
    }

    /// Queues reads and returns the number of the first.
    pub fn reads(&mut self, tensors: &[TensorIr]) -> u64 {
        let request_id = self.requests + 1;
        self.requests += tensors.len().max(1) as u64;
        let tensors = tensors.iter().map(encode_tensor).collect();
        self.push(Body::Reads(Reads {
            request_id,
            tensors,
        }));
        request_id
    }

    /// Reads a tensor: its bytes, or why it has none. Answers to other requests that come
    /// first are lost.
    ///
    /// # Errors
    ///
    /// When the session is over.
    ///
    /// # Panics
    ///
    /// When no answer comes, or the value is too large for a frame and goes by the track
    /// for bulk bytes.
    pub async fn fetch(&mut self, tensor: &TensorIr) -> Result<Result<Bytes, Fault>, Broken> {
        let request = self.reads(std::slice::from_ref(tensor));
        loop {
            let Body::Values(values) = self.next().await? else {
                continue;
            };
            let found = values.values.into_iter().find(|v| v.request_id == request);
            let Some(found) = found else { continue };
            return Ok(match found.result {
                Some(value::Result::Fault(fault)) => Err(fault),
                Some(value::Result::Tensor(tensor)) => match tensor.content {
                    Some(tensor_value::Content::Bytes(bytes)) => Ok(bytes),
                    other => panic!("not the bytes themselves: {other:?}"),
                },
                None => return Err(Broken::Protocol("a value with nothing in it".into())),
            });
        }
    }

    /// Waits until all before is done; the first fault that no sync has reported.
    /// Answers to other requests that come first are lost.
    ///
    /// # Errors
    ///
    /// When the session is over.
    ///
    /// # Panics
    ///
    /// When no answer comes.
    pub async fn sync(&mut self) -> Result<Option<Fault>, Broken> {
        self.requests += 1;
        let request_id = self.requests;
        self.push(Body::Sync(v1::Sync { request_id }));
        loop {
            match self.next().await? {
                Body::Synced(synced) if synced.request_id == request_id => return Ok(synced.fault),
                _ => {}
            }
        }
    }

    /// Sends what is queued as far as credit goes, and returns the next body of the worker.
    ///
    /// # Errors
    ///
    /// When the session is over.
    ///
    /// # Panics
    ///
    /// When none comes for [`ANSWER_DEADLINE`].
    pub async fn next(&mut self) -> Result<Body, Broken> {
        let until = Instant::now() + ANSWER_DEADLINE;
        let next = self.next_until(until).await?;
        Ok(next.expect("the worker answers"))
    }

    /// Stays connected for `time`, sends what is queued, and drops what comes.
    ///
    /// # Errors
    ///
    /// When the session is over.
    pub async fn rest(&mut self, time: Duration) -> Result<(), Broken> {
        let until = Instant::now() + time;
        while self.next_until(until).await?.is_some() {}
        Ok(())
    }

    /// Sends what is queued as far as credit goes.
    ///
    /// # Errors
    ///
    /// When the session is over.
    pub async fn flush(&mut self) -> Result<(), Broken> {
        loop {
            let frames = self.duplex.next_frames();
            if frames.is_empty() {
                return Ok(());
            }
            let sent = self.link.sender.send_all(&frames).await;
            sent.map_err(|e| Broken::Lost(e.to_string()))?;
        }
    }

    /// Sends any bytes as a frame, whatever the numbering and credit say. They are made by
    /// [`frame`](super::frame()), or by nobody.
    ///
    /// # Errors
    ///
    /// When the session is over.
    pub async fn send_bytes(&mut self, frame: Vec<u8>) -> Result<(), Broken> {
        let sent = self.link.sender.send(&[frame.into()]).await;
        sent.map_err(|e| Broken::Lost(e.to_string()))
    }

    /// The number of the last frame that was sent by the rules.
    pub fn sent(&self) -> u64 {
        self.duplex.outbox().sent()
    }

    /// How the session ends, which the worker is expected to do; drops what comes before.
    ///
    /// # Panics
    ///
    /// When it does not end within [`ANSWER_DEADLINE`].
    pub async fn end(&mut self) -> Broken {
        let until = Instant::now() + ANSWER_DEADLINE;
        loop {
            match self.next_until(until).await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("the worker did not end the session"),
                Err(broken) => return broken,
            }
        }
    }

    /// The link itself, for what goes by no rule at all. The session is lost.
    pub fn into_link(self) -> Link {
        self.link
    }

    /// The next body of the worker, if one comes before `until`.
    ///
    /// # Errors
    ///
    /// When the session is over.
    pub async fn next_until(&mut self, until: Instant) -> Result<Option<Body>, Broken> {
        loop {
            self.flush().await?;
            let wake = until.min(self.next_beat);
            match timeout_at(wake, self.link.receiver.recv()).await {
                Ok(frame) => {
                    let frame = frame.map_err(|e| Broken::Lost(e.to_string()))?;
                    let ended = || Broken::Lost("finished by the worker".into());
                    if let Some(body) = self.take(frame.ok_or_else(ended)?)? {
                        return Ok(Some(body));
                    }
                }
                Err(_) if Instant::now() >= until => return Ok(None),
                Err(_) => {}
            }
            self.beat().await?;
        }
    }

    fn take(&mut self, frame: Bytes) -> Result<Option<Body>, Broken> {
        let received = self.duplex.receive(frame);
        let Some((body, bytes)) = received.map_err(|e| Broken::Protocol(e.to_string()))? else {
            return Ok(None);
        };
        self.duplex.inbox().consume(bytes);
        match body {
            Body::Ping(_) => Ok(None),
            Body::Closed(closed) => Err(Broken::Closed(closed.error.unwrap_or_default())),
            body => Ok(Some(body)),
        }
    }

    /// Tells the worker what was received, when that is due.
    async fn beat(&mut self) -> Result<(), Broken> {
        let due = self.duplex.inbox().is_ack_due();
        if due || Instant::now() >= self.next_beat {
            self.next_beat = Instant::now() + BEAT;
            let beat = self.duplex.beat().to_vec();
            self.send_bytes(beat).await?;
        }
        Ok(())
    }
}

async fn dial_tcp(target: &Target) -> Result<Link, Broken> {
    let dialler = Dialer::new(TransportChoice::Tcp);
    let dialled = dialler.dial(&target.address, &target.trust, ANSWER_DEADLINE);
    dialled.await.map_err(|e| Broken::Lost(e.to_string()))
}

/// Sends the first body of a link; what the worker says of the session it opened.
async fn greet(link: &mut Link, first: Body) -> Result<Opened, Broken> {
    let lost = |e: &dyn std::fmt::Display| Broken::Lost(e.to_string());
    let sent = link.sender.send(&[duplex::encode(first)]).await;
    sent.map_err(|e| lost(&e))?;
    let answer = timeout(ANSWER_DEADLINE, link.receiver.recv()).await;
    let answer = answer.expect("the worker answers").map_err(|e| lost(&e))?;
    let answer = answer.ok_or_else(|| lost(&"it ended before an answer"))?;
    let protocol = |e: &dyn std::fmt::Display| Broken::Protocol(e.to_string());
    match duplex::decode(answer).map_err(|e| protocol(&e))?.body {
        Some(Body::Opened(opened)) => Ok(opened),
        Some(Body::Rejected(rejected)) => Err(Broken::Rejected(rejected.error.unwrap_or_default())),
        other => Err(protocol(&format!("not an answer: {other:?}"))),
    }
}

/// The type of a tensor as frames have it.
pub fn type_of(shape: &[usize], dtype: DType) -> v1::TensorType {
    tensord_proto::codec::encode_type(&Shape::from(shape.to_vec()), dtype)
}
