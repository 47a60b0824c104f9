//! A client's stream to the scheduler that can carry any message.

use bytes::Bytes;
use tensord_proto::{
    credential::ClientCredential,
    v1::{
        ClientHello, ClientMessage, DeviceShare, Error, ErrorCode, Granted, LeaseRequest, Open,
        PoolHello, PoolMessage, ReleaseLease, client_message, pool_client::PoolClient,
        pool_message,
    },
    version,
};
use tensord_transport::{
    PoolUrl, control,
    dial::DialError,
    tls::{Fingerprint, Trust},
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status, Streaming, transport::Channel};

use super::ANSWER_DEADLINE;

/// Capacity of the queue of messages to the scheduler.
const QUEUE: usize = 64;

/// A client's stream to the scheduler. Dropping it ends the stream.
pub struct ClientStream {
    sender: mpsc::Sender<ClientMessage>,
    receiver: Streaming<PoolMessage>,
    requests: u64,
    /// The scheduler's reply to the hello.
    pub hello: PoolHello,
}

/// A leased device, with everything needed to open a session on it.
#[derive(Debug, Clone)]
pub struct Target {
    /// The worker's `host:port`.
    pub address: String,
    /// The trust that the worker's certificate must meet.
    pub trust: Trust,
    /// The id of the lease.
    pub lease_id: u64,
    /// The signed lease token.
    pub token: Bytes,
    /// The device's index in the worker's list.
    pub device_index: u32,
    /// The worker's id.
    pub worker_id: u64,
    /// What the lease has of the device; `None` for all of it.
    pub share: Option<DeviceShare>,
}

impl Target {
    /// Returns all devices of `granted`, in order.
    ///
    /// # Panics
    ///
    /// If the grant lacks a field that the scheduler always fills in.
    pub fn all(granted: &Granted) -> Vec<Self> {
        let target = |leased: &tensord_proto::v1::LeasedDevice| {
            let worker = leased.worker.clone().expect("a grant names the worker");
            let digest = worker.certificate_sha256.as_ref().try_into();
            Self {
                address: worker.address,
                trust: Trust::Pin(Fingerprint(digest.expect("SHA-256 has 32 bytes"))),
                lease_id: granted.lease_id,
                token: granted.token.clone(),
                device_index: leased.index,
                worker_id: worker.worker_id,
                share: leased.share,
            }
        };
        granted.devices.iter().map(target).collect()
    }

    /// Returns the fingerprint of the worker's certificate from the lease.
    ///
    /// # Panics
    ///
    /// If the test has replaced `trust` by something other than a pin.
    pub fn certificate(&self) -> [u8; 32] {
        match &self.trust {
            Trust::Pin(Fingerprint(pin)) => *pin,
            other => panic!("{other:?} is no pin"),
        }
    }

    /// Returns an honest client's opening of a new session.
    pub fn open(&self) -> Open {
        Open {
            hello: Some(version::hello()),
            session_id: rand::random(),
            lease_token: self.token.clone(),
            device_index: self.device_index,
            cohort: rand::random(),
            // The same each time, so that another connection of a session has it, too.
            snapshot_key: vec![7; 32].into(),
            ..Open::default()
        }
    }
}

/// Returns the hello of an honest client that holds no lease, under a new id.
pub fn hello() -> ClientHello {
    let credential = ClientCredential::new(rand::random());
    ClientHello {
        hello: Some(version::hello()),
        client_id: credential.hash().client_id().0,
        credential: credential.reveal(),
        ..ClientHello::default()
    }
}

/// Connects to the scheduler of `url` by gRPC, for any call.
///
/// # Errors
///
/// If the scheduler cannot be reached.
///
/// # Panics
///
/// If `url` is not a pool URL.
pub async fn channel(url: &str) -> Result<Channel, DialError> {
    let url: PoolUrl = url.parse().expect("a pool URL");
    control::connect_once(&url.host, url.port, &url.trust).await
}

/// Wraps `message` in a request that carries `token` as bearer token, if there is one.
///
/// # Panics
///
/// If the token does not fit a header.
pub fn authorised<T>(message: T, token: Option<&str>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        let bearer = format!("Bearer {token}").parse();
        let bearer = bearer.expect("a token that fits a header");
        request.metadata_mut().insert("authorization", bearer);
    }
    request
}

impl ClientStream {
    /// Attaches as an honest client does, under a new id.
    ///
    /// # Errors
    ///
    /// The scheduler's refusal.
    ///
    /// # Panics
    ///
    /// If the scheduler cannot be reached or does not reply.
    pub async fn to(url: &str) -> Result<Self, Status> {
        Self::with(url, hello()).await
    }

    /// Attaches with any hello.
    ///
    /// # Errors
    ///
    /// The scheduler's refusal.
    ///
    /// # Panics
    ///
    /// If the scheduler cannot be reached or does not reply.
    pub async fn with(url: &str, hello: ClientHello) -> Result<Self, Status> {
        let channel = channel(url).await.expect("the scheduler is there");
        let parsed: PoolUrl = url.parse().expect("a pool URL");
        let token = parsed.token.as_ref().map(|token| token.reveal());
        Self::over(channel, token, client_message::Body::Hello(hello)).await
    }

    /// Attaches over an existing connection, with any token and any first message.
    ///
    /// # Errors
    ///
    /// The scheduler's refusal.
    ///
    /// # Panics
    ///
    /// If the scheduler does not reply.
    pub async fn over(
        channel: Channel,
        token: Option<&str>,
        first: client_message::Body,
    ) -> Result<Self, Status> {
        let (sender, queued) = mpsc::channel(QUEUE);
        let first = ClientMessage { body: Some(first) };
        sender.try_send(first).expect("the queue is empty");
        let request = authorised(ReceiverStream::new(queued), token);
        let mut client = PoolClient::new(channel);
        let attached = timeout(ANSWER_DEADLINE, async {
            let mut receiver = client.attach(request).await?.into_inner();
            let first = receiver.message().await?.and_then(|message| message.body);
            Ok::<_, Status>((receiver, first))
        });
        let (receiver, first) = attached.await.expect("the scheduler answers")?;
        let Some(pool_message::Body::Hello(hello)) = first else {
            return Err(Status::internal(format!("not a hello: {first:?}")));
        };
        Ok(Self {
            sender,
            receiver,
            requests: 0,
            hello,
        })
    }

    /// Sends any message.
    ///
    /// # Errors
    ///
    /// If the stream has ended.
    pub async fn send(&self, body: client_message::Body) -> Result<(), Status> {
        let sent = self.sender.send(ClientMessage { body: Some(body) }).await;
        sent.map_err(|_| Status::unavailable("the stream has ended"))
    }

    /// Returns the next message other than a beat, or `None` once the scheduler has ended
    /// the stream without an error.
    ///
    /// # Errors
    ///
    /// The status with which the scheduler ended the stream.
    ///
    /// # Panics
    ///
    /// If only beats arrive for [`ANSWER_DEADLINE`].
    pub async fn next(&mut self) -> Result<Option<pool_message::Body>, Status> {
        let next = timeout(ANSWER_DEADLINE, async {
            loop {
                match self.receiver.message().await?.map(|message| message.body) {
                    Some(None | Some(pool_message::Body::Beat(_))) => {}
                    Some(Some(body)) => return Ok(Some(body)),
                    None => return Ok(None),
                }
            }
        });
        next.await.expect("the scheduler says something")
    }

    /// Stays attached and drops incoming messages until the scheduler ends the stream.
    /// Returns the error status, if any.
    pub async fn hold(&mut self) -> Option<Status> {
        loop {
            match self.receiver.message().await {
                Ok(Some(_)) => {}
                Ok(None) => return None,
                Err(status) => return Some(status),
            }
        }
    }

    /// Releases a lease.
    ///
    /// # Errors
    ///
    /// If the stream has ended.
    pub async fn release(&self, lease_id: u64) -> Result<(), Status> {
        let release = client_message::Body::Release(ReleaseLease { lease_id });
        self.send(release).await
    }

    /// Leases `devices` devices of any kind, waiting in the scheduler's queue if necessary.
    ///
    /// # Errors
    ///
    /// The scheduler's refusal.
    ///
    /// # Panics
    ///
    /// As [`next`](Self::next).
    pub async fn lease(&mut self, devices: u32) -> Result<Vec<Target>, Error> {
        let granted = self.request(LeaseRequest {
            devices,
            ..LeaseRequest::default()
        });
        Ok(Target::all(&granted.await?))
    }

    /// Leases a share of a device of any kind: a part of its time in thousandths, and of its memory; 0 for the same
    /// part of the memory as of the time.
    ///
    /// # Errors
    ///
    /// The scheduler's refusal.
    ///
    /// # Panics
    ///
    /// As [`next`](Self::next).
    pub async fn lease_share(
        &mut self,
        share_permille: u32,
        memory_bytes: u64,
    ) -> Result<Target, Error> {
        let granted = self.request(LeaseRequest {
            devices: 1,
            share_permille,
            memory_bytes,
            ..LeaseRequest::default()
        });
        Ok(Target::all(&granted.await?).remove(0))
    }

    /// Sends any request, under a new request id, and waits until it is granted or refused.
    ///
    /// # Errors
    ///
    /// The scheduler's refusal.
    ///
    /// # Panics
    ///
    /// As [`next`](Self::next).
    pub async fn request(&mut self, request: LeaseRequest) -> Result<Granted, Error> {
        self.requests += 1;
        let request_id = self.requests;
        let request = LeaseRequest {
            request_id,
            ..request
        };
        let ended = |status: &Status| Error::new(ErrorCode::Internal, status.to_string());
        let sent = self.send(client_message::Body::Request(request)).await;
        sent.map_err(|status| ended(&status))?;
        loop {
            match self.next().await.map_err(|status| ended(&status))? {
                Some(pool_message::Body::Granted(granted)) if granted.request_id == request_id => {
                    return Ok(granted);
                }
                Some(pool_message::Body::Refused(refused)) if refused.request_id == request_id => {
                    return Err(refused.error.unwrap_or_default());
                }
                Some(_) => {}
                None => return Err(ended(&Status::unavailable("the stream has ended"))),
            }
        }
    }
}
