//! The gRPC carrier: the `Data.Connect` stream, a frame a packet.
//!
//! Each link is a call on a connection of its own, so that giving a link up
//! can close the connection: HTTP/2 has no other way to tell the peer that a
//! stream ended early which does not look like its proper end.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use tensord_proto::{
    MAX_FRAME_BYTES,
    v1::{
        Packet,
        data_client::DataClient,
        data_server::{Data, DataServer},
    },
};
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot},
    time::timeout,
};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};
use tracing::debug;

use crate::{
    connection::{Caller, Closer},
    control,
    dial::DialError,
    identity::Identity,
    link::{
        Carrier, IDLE_TIMEOUT, Link, LinkError, LinkReceiver, LinkSender, ReceiverKind, SenderKind,
    },
    listen::{BindError, SETUP_DEADLINE},
    tls::Trust,
};

/// Frames handed to HTTP/2 and not yet taken by it.
const SEND_QUEUE: usize = 4;

/// A packet's own bytes on top of its frame.
const PACKET_OVERHEAD: usize = 16;

/// Dials `address`.
pub(crate) async fn dial(address: SocketAddr, trust: &Trust) -> Result<Link, DialError> {
    let host = address.ip().to_string();
    let (channel, closer) = control::connect_closable(&host, address.port(), trust).await?;
    let mut client =
        DataClient::new(channel).max_decoding_message_size(MAX_FRAME_BYTES + PACKET_OVERHEAD);
    let (sender, outgoing) = sender(closer.clone());
    // The answer's headers come once the peer has seen a frame, and the link
    // is used before. The task ends with the headers or the connection.
    let (answer, answered) = oneshot::channel();
    tokio::spawn(async move {
        let response = client.connect(outgoing).await;
        let _ = answer.send(response.map(Response::into_inner));
    });
    let packets = Packets::Expected(answered);
    Ok(link(sender, packets, closer, address))
}

/// Serves `Data.Connect` on `tcp`: every stream becomes a link in `accepted`.
/// When nobody takes them any more, it goes on for the links that were taken,
/// and ends with the last.
pub(crate) fn serve_links(
    tcp: TcpListener,
    identity: &Identity,
    accepted: mpsc::Sender<Link>,
) -> Result<impl Future<Output = ()> + Send + use<>, BindError> {
    let server = control::server(tcp, identity)?.with_max_calls(1);
    let closing = accepted.clone();
    let service = DataServer::new(Accept { accepted })
        .max_decoding_message_size(MAX_FRAME_BYTES + PACKET_OVERHEAD);
    let routes = tonic::service::Routes::new(service);
    Ok(server.run_until(routes, async move { closing.closed().await }))
}

struct Accept {
    accepted: mpsc::Sender<Link>,
}

#[tonic::async_trait]
impl Data for Accept {
    type ConnectStream = control::Answers<Packet>;

    async fn connect(
        &self,
        request: Request<Streaming<Packet>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let Caller { peer, closer } = control::caller(&request).clone();
        let mut packets = request.into_inner();
        let first = match timeout(SETUP_DEADLINE, packets.message()).await {
            Ok(first) => first?,
            Err(_) => {
                debug!(%peer, "gRPC link sent nothing for {SETUP_DEADLINE:?}");
                closer.close();
                return Err(Status::deadline_exceeded("no frame came"));
            }
        };
        let (sender, outgoing) = sender(closer.clone());
        let packets = Packets::Open {
            first,
            rest: packets,
        };
        let link = link(sender, packets, closer, peer);
        let closing = |_| Status::unavailable("the process is shutting down");
        self.accepted.send(link).await.map_err(closing)?;
        Ok(Response::new(Box::pin(outgoing.map(Ok))))
    }
}

fn link(sender: Sender, packets: Packets, closer: Closer, peer: SocketAddr) -> Link {
    let receiver = Box::new(Receiver { packets, closer });
    Link {
        sender: LinkSender(SenderKind::Grpc(sender)),
        receiver: LinkReceiver(ReceiverKind::Grpc(receiver)),
        carrier: Carrier::Grpc,
        peer,
    }
}

fn sender(closer: Closer) -> (Sender, Outgoing) {
    let (packets, outgoing) = mpsc::channel(SEND_QUEUE);
    let (drained, emptied) = oneshot::channel();
    let finished = Arc::new(AtomicBool::new(false));
    let sender = Sender {
        packets,
        emptied,
        guard: Guard {
            finished: finished.clone(),
            closer,
        },
    };
    let outgoing = Outgoing {
        packets: outgoing,
        finished,
        _drained: drained,
    };
    (sender, outgoing)
}

/// What HTTP/2 takes packets from. It ends when the link is finished, and
/// never when the link is dropped: the peer must not take that for the end.
struct Outgoing {
    packets: mpsc::Receiver<Packet>,
    finished: Arc<AtomicBool>,
    /// Dropped with the stream, once HTTP/2 has taken it all or given it up.
    _drained: oneshot::Sender<()>,
}

impl Stream for Outgoing {
    type Item = Packet;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Packet>> {
        match ready!(self.packets.poll_recv(cx)) {
            // The guard closed the connection, which ends this stream, too.
            None if !self.finished.load(Ordering::Acquire) => Poll::Pending,
            packet => Poll::Ready(packet),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Sender {
    packets: mpsc::Sender<Packet>,
    emptied: oneshot::Receiver<()>,
    guard: Guard,
}

/// Closes the connection of a sender that is dropped before it finished.
#[derive(Debug)]
struct Guard {
    finished: Arc<AtomicBool>,
    closer: Closer,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.finished.load(Ordering::Acquire) {
            self.closer.close();
        }
    }
}

impl Sender {
    pub(crate) async fn send(&mut self, parts: &[Bytes], size: usize) -> Result<(), LinkError> {
        let frame = match parts {
            [frame] => frame.clone(),
            parts => {
                let mut frame = BytesMut::with_capacity(size);
                parts.iter().for_each(|part| frame.extend_from_slice(part));
                frame.freeze()
            }
        };
        let sent = self.packets.send(Packet { frame }).await;
        sent.map_err(|_| LinkError::lost("the gRPC stream ended"))
    }

    pub(crate) async fn finish(self) {
        let Self {
            packets,
            emptied,
            guard,
        } = self;
        guard.finished.store(true, Ordering::Release);
        drop(packets);
        // Whether it was taken or the connection is gone, there is no more to do.
        let _ = timeout(IDLE_TIMEOUT, emptied).await;
    }
}

#[derive(Debug)]
pub(crate) struct Receiver {
    packets: Packets,
    closer: Closer,
}

#[derive(Debug)]
enum Packets {
    /// On the dialling side, until the peer answers the call.
    Expected(oneshot::Receiver<Result<Streaming<Packet>, Status>>),
    Open {
        first: Option<Packet>,
        rest: Streaming<Packet>,
    },
    Broken(LinkError),
}

impl Receiver {
    pub(crate) async fn recv(&mut self) -> Result<Option<Bytes>, LinkError> {
        let received = self.next().await;
        if let Err(error) = &received {
            self.packets = Packets::Broken(error.clone());
            // The peer may have broken the framing; there is no way to go on.
            self.closer.close();
        }
        received
    }

    async fn next(&mut self) -> Result<Option<Bytes>, LinkError> {
        if let Packets::Expected(answered) = &mut self.packets {
            let answer = answered
                .await
                .map_err(|_| LinkError::lost("the call ended"))?;
            let rest = answer.map_err(status)?;
            self.packets = Packets::Open { first: None, rest };
        }
        let packet = match &mut self.packets {
            Packets::Expected(_) => unreachable!("it was answered above"),
            Packets::Broken(error) => return Err(error.clone()),
            Packets::Open { first, rest } => match first.take() {
                Some(packet) => Some(packet),
                None => rest.message().await.map_err(status)?,
            },
        };
        match packet.map(|packet| packet.frame) {
            Some(frame) if frame.len() > MAX_FRAME_BYTES => Err(LinkError::TooLarge(frame.len())),
            frame => Ok(frame),
        }
    }
}

fn status(status: Status) -> LinkError {
    LinkError::Lost(format!("{}: {}", status.code(), status.message()))
}
