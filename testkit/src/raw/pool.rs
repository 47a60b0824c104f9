//! A pool with one worker that can send anything to its programs.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use burn_backend::{BoolStore, DType, DeviceSettings};
use bytes::Bytes;
use tensord_proto::{
    codec::DeviceProfile,
    v1::{
        self, Beat, ClientMessage, Granted, LeasedDevice, Open, Opened, PoolHello, PoolMessage,
        StatusReply, StatusRequest, WorkerEndpoint, client_message,
        frame::Body,
        pool_message,
        pool_server::{Pool, PoolServer},
    },
    version,
};
use tensord_transport::{
    Identity, Link, Listener,
    channel::duplex::{self, Duplex},
    control,
};
use tokio::{
    net::TcpListener,
    sync::mpsc,
    task::JoinSet,
    time::{Instant, timeout, timeout_at},
};
use tonic::{Request, Response, Status, Streaming, service::Routes};

/// The worker's name.
pub const RAW_WORKER: &str = "mallory";

/// Interval of the beats that the pool and the worker send.
const BEAT: Duration = Duration::from_millis(500);

/// Credit that a program gets, in bytes.
const WINDOW_BYTES: u64 = 32 << 20;

/// A pool that grants every lease request one device of a worker that the test implements.
/// Dropping the value ends the pool and the worker.
pub struct RawPool {
    url: String,
    _tasks: JoinSet<()>,
}

/// The worker's end of one track of a program's session.
pub struct ServedTrack {
    /// The program's opening, which has not been answered yet.
    pub open: Open,
    link: Link,
    duplex: Duplex,
    next_beat: Instant,
}

impl RawPool {
    /// Starts the pool. `serve` is called for each track of a session.
    ///
    /// # Panics
    ///
    /// If no socket can be bound.
    pub async fn start<S, F>(serve: S) -> Self
    where
        S: Fn(ServedTrack) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let identity = Identity::self_signed().expect("a certificate");
        let listener = Listener::bind_tcp(any, &identity).await.expect("a port");
        let endpoint = WorkerEndpoint {
            worker_id: 1,
            name: RAW_WORKER.into(),
            address: listener.address().to_string(),
            certificate_sha256: identity.fingerprint().0.to_vec().into(),
        };
        let tcp = TcpListener::bind(any).await.expect("a port");
        let port = tcp.local_addr().expect("it is bound").port();
        let url = format!("tensord://x@127.0.0.1:{port}?ca={}", identity.fingerprint());
        let server = control::server(tcp, &identity).expect("a usable certificate");
        let mut tasks = JoinSet::new();
        tasks.spawn(server.run(Routes::new(PoolServer::new(GrantAll(endpoint)))));
        tasks.spawn(accept(listener, Arc::new(serve)));
        Self { url, _tasks: tasks }
    }

    /// Returns the URL for programs.
    pub fn url(&self) -> &str {
        &self.url
    }
}

async fn accept<S, F>(mut listener: Listener, serve: Arc<S>)
where
    S: Fn(ServedTrack) -> F + Send + Sync + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let mut links = JoinSet::new();
    loop {
        let mut link = listener.accept().await;
        let serve = serve.clone();
        links.spawn(async move {
            let Ok(Some(first)) = link.receiver.recv().await else {
                return;
            };
            let first = duplex::decode(first).expect("programs keep the rules");
            let Some(Body::Open(open)) = first.body else {
                panic!("not an opening: {first:?}");
            };
            if link.receiver.admit().is_ok() {
                serve(ServedTrack {
                    open,
                    link,
                    duplex: Duplex::new(usize::MAX, u64::MAX, WINDOW_BYTES),
                    next_beat: Instant::now() + BEAT,
                })
                .await;
            }
        });
    }
}

impl ServedTrack {
    /// Returns an honest worker's reply to the opening.
    pub fn opened() -> Opened {
        let dtypes = [DType::F32, DType::I32, DType::Bool(BoolStore::Native)];
        let [float, int, bool] = dtypes;
        let profile = DeviceProfile {
            settings: DeviceSettings::with_dtypes(float, int, bool),
            dtypes: dtypes.map(|dtype| (dtype, u8::MAX)).to_vec(),
        };
        Opened {
            hello: Some(version::hello()),
            protocol: version::PROTOCOL_MAX,
            received: 0,
            credit_bytes: WINDOW_BYTES,
            settings: Some(v1::DeviceSettings {
                encoded: profile.encode(),
            }),
            kept_bytes: 0,
            durable: false,
            epoch: 0,
            mark: 0,
            has_held: false,
        }
    }

    /// Sends `answer` as the reply to the opening. Ignores a program that is gone.
    pub async fn greet(&mut self, answer: Body) {
        self.send_bytes(duplex::encode(answer)).await;
    }

    /// Queues any body as a numbered frame.
    pub fn push(&mut self, body: Body) {
        self.duplex.push(body);
    }

    /// Sends any bytes as a frame. Ignores a program that is gone.
    pub async fn send_bytes(&mut self, frame: impl Into<Bytes>) {
        let _ = self.link.sender.send(&[frame.into()]).await;
    }

    /// Sends the queued frames and returns the program's next body other than a ping, or
    /// `None` once the program has ended the link.
    ///
    /// # Panics
    ///
    /// If the program breaks a rule.
    pub async fn next(&mut self) -> Option<Body> {
        loop {
            let frames = self.duplex.next_frames();
            if !frames.is_empty() {
                self.link.sender.send_all(&frames).await.ok()?;
                continue;
            }
            match timeout_at(self.next_beat, self.link.receiver.recv()).await {
                Ok(frame) => {
                    let received = self.duplex.receive(frame.ok()??);
                    let received = received.expect("programs keep the rules");
                    let Some((body, bytes)) = received else {
                        continue;
                    };
                    self.duplex.inbox().consume(bytes);
                    if !matches!(body, Body::Ping(_)) {
                        return Some(body);
                    }
                }
                Err(_) => {
                    self.next_beat = Instant::now() + BEAT;
                    let ping = self.duplex.ping();
                    self.send_bytes(ping).await;
                }
            }
        }
    }
}

/// Grants each request one device of this worker.
struct GrantAll(WorkerEndpoint);

#[tonic::async_trait]
impl Pool for GrantAll {
    type AttachStream = control::ResponseStream<PoolMessage>;

    async fn attach(
        &self,
        request: Request<Streaming<ClientMessage>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let full =
            |full: tensord_transport::AdmissionLimitError| Status::unavailable(full.to_string());
        control::admit(&request, false).map_err(full)?;
        let (outbound, outbound_receiver) = mpsc::channel(16);
        tokio::spawn(grant(request.into_inner(), outbound, self.0.clone()));
        Ok(Response::new(control::response_stream(outbound_receiver)))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        Err(Status::unimplemented("this pool only grants"))
    }
}

/// Answers a program's messages until the program ends the stream.
async fn grant(
    mut inbound: Streaming<ClientMessage>,
    outbound: mpsc::Sender<PoolMessage>,
    worker: WorkerEndpoint,
) {
    loop {
        let body = match timeout(BEAT, inbound.message()).await {
            Err(_) => pool_message::Body::Beat(Beat {}),
            Ok(Ok(Some(message))) => match message.body {
                Some(client_message::Body::Hello(_)) => pool_message::Body::Hello(PoolHello {
                    hello: Some(version::hello()),
                    protocol: version::PROTOCOL_MAX,
                    lease_expiry_ms: 30_000,
                    explains_waits: false,
                }),
                Some(client_message::Body::Request(request)) => {
                    pool_message::Body::Granted(Granted {
                        request_id: request.request_id,
                        lease_id: 1,
                        token: Bytes::from_static(b"token"),
                        devices: vec![LeasedDevice {
                            device: Some(v1::Device::default()),
                            worker: Some(worker.clone()),
                            index: 0,
                            share: None,
                        }],
                    })
                }
                _ => continue,
            },
            Ok(_) => return,
        };
        if outbound
            .send(PoolMessage { body: Some(body) })
            .await
            .is_err()
        {
            return;
        }
    }
}
