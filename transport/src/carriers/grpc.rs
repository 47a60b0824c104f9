//! The gRPC carrier: the `Data.Connect` stream, one frame per packet.
//!
//! Each link is a call on a connection of its own, so that dropping a link can close the
//! connection. hyper on the other side takes every other way of ending an HTTP/2 stream
//! early for its proper end.

mod first_message;
mod receive;
mod send;

use std::net::SocketAddr;

use tensord_proto::{
    MAX_FRAME_BYTES,
    v1::{
        Packet,
        data_client::DataClient,
        data_server::{Data, DataServer},
    },
};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use tokio_stream::StreamExt;
use tonic::{Request, Response, Status, Streaming};
use tracing::debug;

use super::{Halves, SETUP_DEADLINE};
use crate::{control, dial::error::DialError, tls::TlsOptions};

pub(crate) use receive::Receiver;
pub(crate) use send::Sender;

/// Maximum size of a packet's own bytes on top of its frame.
const PACKET_OVERHEAD: usize = 16;

/// Dials `address`, an address of `host`.
pub(crate) async fn dial(
    address: SocketAddr,
    host: &str,
    tls_options: &TlsOptions,
) -> Result<Halves<Sender, Receiver>, DialError> {
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
    Ok(Halves {
        sender,
        receiver,
        peer: address,
        certificate,
    })
}

/// Serves `Data.Connect` on `server`. Every call becomes a link in `accepted`. When the
/// receiver of `accepted` is dropped, the future goes on for the links already taken, and
/// ends with the last of them.
pub(crate) fn serve_links<L>(
    server: control::Server,
    accepted: mpsc::Sender<L>,
) -> impl Future<Output = ()> + Send + use<L>
where
    L: From<Halves<Sender, Receiver>> + Send + 'static,
{
    let closing = accepted.clone();
    let service = DataServer::new(DataService { accepted })
        .max_decoding_message_size(MAX_FRAME_BYTES + PACKET_OVERHEAD);
    let routes = tonic::service::Routes::new(first_message::FirstMessageLimit(service));
    server.run_until(routes, async move { closing.closed().await })
}

struct DataService<L> {
    accepted: mpsc::Sender<L>,
}

#[tonic::async_trait]
impl<L: From<Halves<Sender, Receiver>> + Send + 'static> Data for DataService<L> {
    type ConnectStream = control::ResponseStream<Packet>;

    async fn connect(
        &self,
        request: Request<Streaming<Packet>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let peer_handle = control::peer_handle(&request).clone();
        let (peer, closer) = (peer_handle.peer, peer_handle.closer.clone());
        let certificate = peer_handle.certificate.clone();
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
        let halves = Halves {
            sender,
            receiver,
            peer,
            certificate,
        };
        let accepted = self.accepted.send(halves.into()).await;
        accepted.map_err(closing)?;
        Ok(Response::new(Box::pin(outgoing.map(Ok))))
    }
}
