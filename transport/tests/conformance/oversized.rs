//! Law 2, for a peer that sends frames over the limit: the link ends with an error at
//! both ends, and other links go on.

use bytes::Bytes;
use tensord_proto::{
    MAX_FRAME_BYTES,
    v1::{
        Packet,
        data_client::DataClient,
        data_server::{Data, DataServer},
    },
};
use tensord_transport::{Identity, LinkError, control, link::FIRST_FRAME_BYTES};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming, service::Routes};

use crate::{
    harness::*,
    raw::{quic_client, quic_server},
};

/// One byte over the limit, and twice the limit.
const SIZES: [usize; 2] = [MAX_FRAME_BYTES + 1, 2 * MAX_FRAME_BYTES];

/// The limit before the peer is admitted.
#[tokio::test]
async fn oversized_first_frame_is_refused() {
    no_hang(async {
        let size = FIRST_FRAME_BYTES + 1;
        for kind in [QUIC, TCP] {
            let mut server = Server::start().await;
            let mut near = server.dial(kind).await;
            // Fails if the other side was quick.
            let _ = near.sender.send(&[frame(1, size)]).await;
            let mut far = server.listener.accept().await;
            let refused = Err(LinkError::FirstTooLarge(size));
            assert_eq!(far.receiver.recv().await, refused);
            expect_error(&mut near.receiver).await;
        }
        // Refused by the announced length, before memory is reserved, so the link is
        // never accepted.
        for size in [2 * size, MAX_FRAME_BYTES] {
            let mut server = Server::start().await;
            let mut near = server.dial(GRPC).await;
            near.sender.send(&[frame(1, size)]).await.unwrap();
            let refused = expect_error(&mut near.receiver).await.to_string();
            assert!(refused.contains("the first message has"), "{refused}");
            assert!(is_pending(server.listener.accept()).await);
        }
    })
    .await;
}

#[tokio::test]
async fn the_largest_first_frame_passes() {
    no_hang(async {
        for kind in [QUIC, TCP, GRPC] {
            let mut server = Server::start().await;
            let mut near = server.dial(kind).await;
            // The bytes that gRPC and HTTP/2 add count, too.
            let size = FIRST_FRAME_BYTES - 1024;
            near.sender.send(&[frame(1, size)]).await.unwrap();
            let mut far = server.listener.accept().await;
            expect_frame(&mut far.receiver, 1, size).await;
        }
    })
    .await;
}

#[tokio::test]
async fn from_a_quic_dialler() {
    no_hang(async {
        let (mut near, mut far, mut server) = connect(QUIC).await;
        for size in SIZES {
            let connection = quic_client(&server).await;
            let (mut send, _recv) = connection.open_bi().await.unwrap();
            send.write_all(&(size as u32).to_le_bytes()).await.unwrap();
            let mut link = server.listener.accept().await;
            link.receiver.admit().unwrap();
            // Refused by the length alone: no byte of the frame itself was sent.
            assert_eq!(link.receiver.recv().await, Err(LinkError::TooLarge(size)));
            assert_eq!(link.receiver.recv().await, Err(LinkError::TooLarge(size)));
            let closed = connection.closed().await.to_string();
            assert!(closed.contains("the frame is too large"), "{closed}");
        }
        send_frames(&mut near.sender, 3, 1000).await;
        expect_frames(&mut far.receiver, 3, 1000).await;
    })
    .await;
}

#[tokio::test]
async fn from_a_quic_listener() {
    no_hang(async {
        for size in SIZES {
            let (endpoint, trust) = quic_server();
            let address = endpoint.local_addr().unwrap().to_string();
            let peer = tokio::spawn(async move {
                let connection = endpoint.accept().await.unwrap().await.unwrap();
                let (mut send, _recv) = connection.accept_bi().await.unwrap();
                send.write_all(&(size as u32).to_le_bytes()).await.unwrap();
                connection.closed().await.to_string()
            });
            let link = QUIC.dialer().dial(&address, &trust, DIAL_DEADLINE).await;
            let mut link = link.unwrap();
            link.sender.send(&[frame(1, 10)]).await.unwrap();
            assert_eq!(link.receiver.recv().await, Err(LinkError::TooLarge(size)));
            let closed = peer.await.unwrap();
            assert!(closed.contains("the frame is too large"), "{closed}");
        }
    })
    .await;
}

fn packet(size: usize) -> Packet {
    let frame = Bytes::from(vec![7; size]);
    Packet { frame }
}

fn assert_too_large(error: &LinkError, size: usize) {
    match error {
        LinkError::TooLarge(found) => assert_eq!(*found, size),
        LinkError::FirstTooLarge(found) => panic!("a first frame of {found} bytes"),
        // Detected by the gRPC decoder, from the message's length.
        LinkError::Lost(reason) => assert!(reason.contains("too large"), "{reason}"),
    }
}

#[tokio::test]
async fn from_a_grpc_dialler() {
    no_hang(async {
        let (mut near, mut far, mut server) = connect(GRPC).await;
        let port = server.listener.address().port();
        for size in SIZES {
            let channel = control::connect("127.0.0.1", port, &server.trust)
                .await
                .unwrap();
            let (packets, outgoing) = mpsc::channel(4);
            packets.send(packet(10)).await.unwrap();
            let call = tokio::spawn(async move {
                let mut client = DataClient::new(channel);
                let answer = client.connect(ReceiverStream::new(outgoing)).await;
                answer.unwrap().into_inner().message().await
            });
            let mut link = server.listener.accept().await;
            link.receiver.admit().unwrap();
            assert!(link.receiver.recv().await.unwrap().is_some());
            packets.send(packet(size)).await.unwrap();
            assert_too_large(&expect_error(&mut link.receiver).await, size);
            call.await.unwrap().unwrap_err();
        }
        send_frames(&mut near.sender, 3, 1000).await;
        expect_frames(&mut far.receiver, 3, 1000).await;
    })
    .await;
}

struct OversizedSender(usize);

#[tonic::async_trait]
impl Data for OversizedSender {
    type ConnectStream = control::ResponseStream<Packet>;

    async fn connect(
        &self,
        mut request: Request<Streaming<Packet>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        assert!(request.get_mut().message().await?.is_some());
        let (packets, outgoing) = mpsc::channel(1);
        packets.send(packet(self.0)).await.unwrap();
        let mut incoming = request.into_inner();
        // Keeps its side open for as long as the dialler does.
        tokio::spawn(async move {
            while let Ok(Some(_)) = incoming.message().await {}
            drop(packets);
        });
        Ok(Response::new(control::response_stream(outgoing)))
    }
}

#[tokio::test]
async fn from_a_grpc_listener() {
    no_hang(async {
        for size in SIZES {
            let tcp = tokio::net::TcpListener::bind(any_port()).await.unwrap();
            let address = tcp.local_addr().unwrap().to_string();
            let identity = Identity::self_signed().unwrap();
            let trust = tensord_transport::tls::Trust::Pin(identity.fingerprint());
            let server = control::server(tcp, &identity).unwrap();
            let routes = Routes::new(DataServer::new(OversizedSender(size)));
            let serving = tokio::spawn(server.run(routes));
            let link = GRPC.dialer().dial(&address, &trust, DIAL_DEADLINE).await;
            let mut link = link.unwrap();
            link.sender.send(&[frame(1, 10)]).await.unwrap();
            assert_too_large(&expect_error(&mut link.receiver).await, size);
            send_until_error(&mut link.sender).await;
            serving.abort();
        }
    })
    .await;
}
