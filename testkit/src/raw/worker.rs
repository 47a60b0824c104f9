//! A worker that can send anything to a scheduler and to other workers.

use std::{sync::Arc, time::Duration};

use tensord_proto::{
    ids::LeaseId,
    v1::{
        Device, Error, Heartbeat, Join, Register, WorkerCommand, WorkerMessage, frame::Body,
        worker_command, worker_message, workers_client::WorkersClient,
    },
    version,
};
use tensord_transport::{
    Dialer, Identity, Link, PoolUrl, TransportChoice,
    channel::duplex,
    control,
    identity::{START_BYTES, worker_id},
};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{ANSWER_DEADLINE, Target, authorised};

/// Capacity of the queue of messages to the scheduler.
const QUEUE: usize = 16;

/// Interval of heartbeats, less than half of the time after which a silent worker is disconnected.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// A worker's key and its registration, both honest unless a test changes them.
#[derive(Clone, Debug)]
pub struct RawWorker {
    /// The certificate and key with which the worker authenticates itself.
    pub identity: Arc<Identity>,
    /// The worker's first message to a scheduler.
    pub register: Register,
}

/// A worker's stream to the scheduler. Dropping it ends the stream.
pub struct WorkerStream {
    messages: mpsc::Sender<WorkerMessage>,
    commands: Streaming<WorkerCommand>,
}

impl RawWorker {
    /// Creates a worker with `devices` CPU devices of 1 MiB each, at an address where no
    /// process listens.
    ///
    /// # Panics
    ///
    /// If the system provides no randomness.
    pub fn new(name: &str, devices: usize) -> Self {
        let identity = Identity::self_signed().expect("the system gives randomness");
        let start: [u8; START_BYTES] = rand::random();
        let device = Device {
            kind: "flex".into(),
            name: "CPU".into(),
            memory_bytes: 1 << 20,
            fingerprint: None,
        };
        let register = Register {
            hello: Some(version::hello()),
            worker_id: worker_id(&identity.fingerprint(), &start).0,
            start: start.to_vec().into(),
            name: name.into(),
            address: "127.0.0.1:9".into(),
            certificate_sha256: identity.fingerprint().0.to_vec().into(),
            devices: vec![device; devices],
            ..Register::default()
        };
        Self {
            identity: Arc::new(identity),
            register,
        }
    }

    /// Has leases share the worker's devices.
    pub fn taking_shares(mut self) -> Self {
        self.register.takes_shares = true;
        self
    }

    /// Registers at the scheduler of `url` with the token in `url`.
    ///
    /// # Errors
    ///
    /// The scheduler's refusal.
    ///
    /// # Panics
    ///
    /// If the scheduler cannot be reached or does not reply.
    pub async fn join(&self, url: &str) -> Result<WorkerStream, Error> {
        let url: PoolUrl = url.parse().expect("a pool URL");
        let own = self.identity.clone();
        let channel = control::connect_as(own, &url.host, url.port, &url.trust).await;
        let channel = channel.expect("the scheduler is there");
        let (messages, queued) = mpsc::channel(QUEUE);
        let body = Some(worker_message::Body::Register(self.register.clone()));
        let first = messages.try_send(WorkerMessage { body });
        first.expect("the queue is empty");
        let token = url.token.as_ref().map(|token| token.reveal());
        let request = authorised(ReceiverStream::new(queued), token);
        let joined = timeout(ANSWER_DEADLINE, async {
            let mut commands = WorkersClient::new(channel)
                .join(request)
                .await?
                .into_inner();
            let first = commands.message().await?.and_then(|command| command.body);
            Ok::<_, Status>((commands, first))
        });
        match joined.await.expect("the scheduler answers") {
            Ok((commands, Some(worker_command::Body::Registered(_)))) => {
                Ok(WorkerStream { messages, commands })
            }
            Ok((_, other)) => panic!("not an answer: {other:?}"),
            Err(status) => Err(error_of(&status)),
        }
    }

    /// Dials the worker of `target` as another worker of its lease does, and sends `join`
    /// first.
    ///
    /// # Errors
    ///
    /// The worker's refusal.
    ///
    /// # Panics
    ///
    /// If the worker cannot be reached or does not reply.
    pub async fn dial(
        &self,
        carrier: TransportChoice,
        target: &Target,
        join: Join,
    ) -> Result<Link, Error> {
        let dialer = Dialer::new(carrier).with_identity(self.identity.clone());
        join_over(dialer, target, join).await
    }
}

impl WorkerStream {
    /// Sends a heartbeat each second until the returned task is dropped.
    pub fn send_heartbeats(&self) -> JoinSet<()> {
        let messages = self.messages.clone();
        let mut sending = JoinSet::new();
        sending.spawn(async move {
            let body = worker_message::Body::Heartbeat(Heartbeat::default());
            let heartbeat = WorkerMessage { body: Some(body) };
            while messages.send(heartbeat.clone()).await.is_ok() {
                sleep(HEARTBEAT).await;
            }
        });
        sending
    }

    /// Returns the scheduler's next command.
    ///
    /// # Panics
    ///
    /// If none comes within [`ANSWER_DEADLINE`], or the stream ends.
    pub async fn next_command(&mut self) -> worker_command::Body {
        let next = timeout(ANSWER_DEADLINE, self.commands.message()).await;
        let next = next.expect("the scheduler sends a command");
        let command = next.expect("the stream is up").expect("a command");
        command.body.expect("a known command")
    }

    /// Waits until the scheduler ends the stream and returns its error, if any.
    ///
    /// # Panics
    ///
    /// If the scheduler does not end the stream within [`ANSWER_DEADLINE`].
    pub async fn ended(mut self) -> Option<Error> {
        let ended = timeout(ANSWER_DEADLINE, async {
            loop {
                match self.commands.message().await {
                    Ok(Some(_)) => {}
                    Ok(None) => return None,
                    Err(status) => return Some(error_of(&status)),
                }
            }
        });
        let ended = ended.await.expect("the scheduler ends the stream");
        drop(self.messages);
        ended
    }
}

/// Dials the worker of `target` with any dialer, and sends `join` first.
///
/// # Errors
///
/// The worker's refusal.
///
/// # Panics
///
/// If the worker cannot be reached or does not reply.
pub async fn join_over(dialer: Dialer, target: &Target, join: Join) -> Result<Link, Error> {
    let link = dialer
        .for_lease(LeaseId(target.lease_id))
        .dial(&target.address, &target.trust, ANSWER_DEADLINE)
        .await;
    let mut link = link.expect("the worker is there");
    let sent = link.sender.send(&[duplex::encode(Body::Join(join))]).await;
    sent.expect("the worker reads");
    let answer = timeout(ANSWER_DEADLINE, link.receiver.recv()).await;
    let answer = answer.expect("the worker answers").expect("a frame");
    let answer = duplex::decode(answer.expect("an answer")).expect("a frame of ours");
    match answer.body {
        Some(Body::Joined(_)) => Ok(link),
        Some(Body::Rejected(rejected)) => Err(rejected.error.unwrap_or_default()),
        other => panic!("not an answer: {other:?}"),
    }
}

fn error_of(status: &Status) -> Error {
    use prost::Message;
    Error::decode(status.details()).unwrap_or_default()
}
