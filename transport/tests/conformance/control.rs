//! The control plane's server: what dropping it does.

use std::net::SocketAddr;

use tensord_proto::v1::{
    Packet,
    data_client::DataClient,
    data_server::{Data, DataServer},
};
use tensord_transport::{Identity, control, tls::Trust};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tonic::{Request, Response, Status, Streaming, service::Routes};

use crate::harness::*;

/// Answers with the address of the call and the certificate that the caller showed, and
/// keeps the stream open.
pub(crate) struct PeerEchoService;

impl PeerEchoService {
    /// Serves it as `identity`, and returns the port and the task.
    pub(crate) async fn serve(identity: &Identity) -> (u16, tokio::task::JoinHandle<()>) {
        let tcp = TcpListener::bind(any_port()).await.unwrap();
        let port = tcp.local_addr().unwrap().port();
        let server = control::server(tcp, identity).unwrap();
        let serving = server.run(Routes::new(DataServer::new(Self)));
        (port, tokio::spawn(serving))
    }
}

#[tonic::async_trait]
impl Data for PeerEchoService {
    type ConnectStream = control::ResponseStream<Packet>;

    async fn connect(
        &self,
        request: Request<Streaming<Packet>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let (peer, certificate) = (control::peer(&request), control::certificate(&request));
        let frame = format!("{peer} {certificate:?}").into();
        let (packets, answers) = mpsc::channel(1);
        packets.send(Packet { frame }).await.unwrap();
        // Kept until the call is over.
        tokio::spawn(async move { packets.closed().await });
        Ok(Response::new(control::response_stream(answers)))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_dropped_closes_its_connections() {
    no_hang(async {
        let identity = Identity::self_signed().unwrap();
        let trust = Trust::Pin(identity.fingerprint());
        let (port, serving) = PeerEchoService::serve(&identity).await;
        let channel = control::connect("127.0.0.1", port, &trust).await.unwrap();
        let mut client = DataClient::new(channel);
        let call = async |client: &mut DataClient<_>| {
            let silence = tokio_stream::pending::<Packet>();
            client.connect(silence).await.map(Response::into_inner)
        };
        // Many calls may share a connection.
        let mut calls = [
            call(&mut client).await.unwrap(),
            call(&mut client).await.unwrap(),
        ];
        for call in &mut calls {
            let packet = call.message().await.unwrap().unwrap();
            assert!(packet.frame.starts_with(b"127.0.0.1:"), "{packet:?}");
        }

        serving.abort();
        for call in &mut calls {
            call.message().await.unwrap_err();
        }
        call(&mut client).await.unwrap_err();
        let refused = control::connect("127.0.0.1", port, &trust).await;
        assert!(refused.is_err());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_connection_attempt_is_retried_in_parallel() {
    no_hang(async {
        let identity = Identity::self_signed().unwrap();
        let trust = Trust::Pin(identity.fingerprint());
        let (port, serving) = PeerEchoService::serve(&identity).await;
        let behind = SocketAddr::from(([127, 0, 0, 1], port));

        // A proxy in front of the server, which serves only the second connection.
        let front = TcpListener::bind(any_port()).await.unwrap();
        let port = front.local_addr().unwrap().port();
        let fronting = tokio::spawn(async move {
            let first = front.accept().await.unwrap();
            let (mut second, _) = front.accept().await.unwrap();
            let mut server = TcpStream::connect(behind).await.unwrap();
            let _ = copy_bidirectional(&mut second, &mut server).await;
            drop(first);
        });
        let channel = control::connect("127.0.0.1", port, &trust).await.unwrap();
        let silence = tokio_stream::pending::<Packet>();
        let mut client = DataClient::new(channel);
        client.connect(silence).await.unwrap();
        fronting.abort();
        serving.abort();
    })
    .await;
}
