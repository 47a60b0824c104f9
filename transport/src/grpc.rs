//! The gRPC carrier: the `Data.Connect` stream, one frame per packet.
//!
//! Each link is a call on a connection of its own, so that dropping a link can close the
//! connection. HTTP/2 has no other way to tear a stream down early that hyper on the
//! other side does not take for its proper end.

mod first_message;
mod receive;
mod send;

use std::{net::SocketAddr, sync::Arc};

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
use tokio_stream::StreamExt;
use tonic::{Request, Response, Status, Streaming};
use tracing::debug;

use crate::{
    control,
    dial::DialError,
    gate::Gate,
    identity::Identity,
    link::{Carrier, Link, LinkReceiver, LinkSender, ReceiverKind, SenderKind},
    listen::{BindError, SETUP_DEADLINE},
    tls::{Fingerprint, TlsOptions},
};

pub(crate) use receive::Receiver;
pub(crate) use send::Sender;

/// Maximum size of a packet's own bytes on top of its frame.
const PACKET_OVERHEAD: usize = 16;

/// Dials `address`, an address of `host`.
pub(crate) async fn dial(
    address: SocketAddr,
    host: &str,
    tls_options: &TlsOptions,
) -> Result<Link, DialError> {
    let at = address.to_string();
    let (channel, peer_handle) = control::connect_closable(&at, host, tls_options).await?;
    let (closer, certificate) = (peer_handle.closer, peer_handle.certificate);
    let mut client =
        DataClient::new(channel).max_decoding_message_size(MAX_FRAME_BYTES + PACKET_OVERHEAD);
    let (sender, outgoing) = send::channel(closer.clone());
    // The response headers arrive once the peer has received a frame, but the link is
    // used before that. The task ends with the headers or the connection.
    let (response_sender, response_receiver) = oneshot::channel();
    tokio::spawn(async move {
        let response = client.connect(outgoing).await;
        let _ = response_sender.send(response.map(Response::into_inner));
    });
    let receiver = Receiver::dialled(response_receiver, closer, sender.finished());
    Ok(link(sender, receiver, address, certificate))
}

/// Serves `Data.Connect` on `tcp`. Every stream becomes a link in `accepted`, and so does
/// every connection that negotiated frames. When the receiver of `accepted` is dropped,
/// the future goes on for the links already taken, and ends with the last of them.
pub(crate) fn serve_links(
    tcp: TcpListener,
    identity: &Identity,
    accepted: mpsc::Sender<Link>,
    gate: Arc<Gate>,
) -> Result<impl Future<Output = ()> + Send + use<>, BindError> {
    let server = control::link_server(tcp, identity, accepted.clone(), gate)?;
    let closing = accepted.clone();
    let service = DataServer::new(DataService { accepted })
        .max_decoding_message_size(MAX_FRAME_BYTES + PACKET_OVERHEAD);
    let routes = tonic::service::Routes::new(first_message::FirstMessageLimit(service));
    Ok(server.run_until(routes, async move { closing.closed().await }))
}

struct DataService {
    accepted: mpsc::Sender<Link>,
}

#[tonic::async_trait]
impl Data for DataService {
    type ConnectStream = control::ResponseStream<Packet>;

    async fn connect(
        &self,
        request: Request<Streaming<Packet>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let peer_handle = control::peer_handle(&request).clone();
        let (peer, closer) = (peer_handle.peer, peer_handle.closer.clone());
        let certificate = peer_handle.certificate;
        let mut packets = request.into_inner();
        let first = match timeout(SETUP_DEADLINE, packets.message()).await {
            Ok(first) => first.inspect_err(|e| debug!(%peer, "gRPC link failed: {e}"))?,
            Err(_) => {
                debug!(%peer, "the gRPC link sent nothing for {SETUP_DEADLINE:?}");
                closer.close();
                return Err(Status::deadline_exceeded("no frame arrived"));
            }
        };
        let (sender, outgoing) = send::channel(closer.clone());
        let receiver = Receiver::accepted(first, packets, peer_handle);
        let closing = |_| Status::unavailable("the process is shutting down");
        let link = link(sender, receiver, peer, certificate);
        let accepted = self.accepted.send(link).await;
        accepted.map_err(closing)?;
        Ok(Response::new(Box::pin(outgoing.map(Ok))))
    }
}

fn link(
    sender: Sender,
    receiver: Receiver,
    peer: SocketAddr,
    certificate: Option<Fingerprint>,
) -> Link {
    Link {
        sender: LinkSender(SenderKind::Grpc(sender)),
        receiver: LinkReceiver(ReceiverKind::Grpc(receiver)),
        carrier: Carrier::Grpc,
        peer,
        certificate,
    }
}
