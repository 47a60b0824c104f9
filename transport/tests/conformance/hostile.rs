//! What the accepting side withstands: peers that send garbage, incomplete messages, or
//! nothing. Each is closed with a log line, while existing links go on and new ones work.
//!
//! The tests run on one thread, so that a test's log is that of its listener.

use std::collections::HashMap;

use tensord_proto::v1::{Packet, data_client::DataClient};
use tensord_transport::{Link, control};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    task::JoinSet,
};
use tonic::{body::Body, codegen::http};
use tower::ServiceExt;

use crate::{
    harness::*,
    raw::{quic_client, tls_client},
};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Runs `attack` on a listener with a link of each carrier, which must not be affected,
/// and expects `logged` in the log, unless it is empty.
async fn withstand(logged: &str, attack: impl AsyncFnOnce(&mut Server)) {
    let log = Log::capture();
    no_hang(async {
        let mut server = Server::start().await;
        let mut before = [server.connect(QUIC).await, server.connect(GRPC).await];
        attack(&mut server).await;
        for (near, far) in &mut before {
            echo(near, far).await;
        }
        for kind in [QUIC, GRPC] {
            let (mut near, mut far) = server.connect(kind).await;
            echo(&mut near, &mut far).await;
        }
    })
    .await;
    let log = log.to_string();
    assert!(log.contains(logged), "no {logged:?} in the log:\n{log}");
}

async fn echo(near: &mut Link, far: &mut Link) {
    near.sender.send(&[frame(1, 1000)]).await.unwrap();
    expect_frame(&mut far.receiver, 1, 1000).await;
    far.sender.send(&[frame(2, 1000)]).await.unwrap();
    expect_frame(&mut near.receiver, 2, 1000).await;
}

/// Reads until the other side closes, cleanly or not.
async fn read_until_closed(stream: &mut (impl AsyncRead + Unpin)) {
    let mut buffer = [0; 1024];
    while !matches!(stream.read(&mut buffer).await, Ok(0) | Err(_)) {}
}

#[tokio::test]
async fn garbage_over_tcp() {
    withstand("TLS handshake failed", async |server| {
        let mut tcp = TcpStream::connect(server.listener.address()).await.unwrap();
        // May fail half way, as the other side closes at the first bytes.
        let _ = tcp.write_all(&frame(1, 100_000)).await;
        read_until_closed(&mut tcp).await;
    })
    .await;
}

#[tokio::test]
async fn plain_http() {
    withstand("TLS handshake failed", async |server| {
        let mut tcp = TcpStream::connect(server.listener.address()).await.unwrap();
        tcp.write_all(PREFACE).await.unwrap();
        read_until_closed(&mut tcp).await;
    })
    .await;
}

#[tokio::test]
async fn silent_tcp_connections() {
    withstand(
        "no TLS handshake and HTTP/2 preface within",
        async |server| {
            let mut waiting = JoinSet::new();
            for _ in 0..100 {
                let mut tcp = TcpStream::connect(server.listener.address()).await.unwrap();
                waiting.spawn(async move { read_until_closed(&mut tcp).await });
            }
            waiting.join_all().await;
        },
    )
    .await;
}

#[tokio::test]
async fn silence_after_tls_handshake() {
    withstand(
        "no TLS handshake and HTTP/2 preface within",
        async |server| {
            let mut nothing = tls_client(server).await;
            let mut too_little = tls_client(server).await;
            too_little.write_all(&PREFACE[..10]).await.unwrap();
            too_little.flush().await.unwrap();
            tokio::join!(
                read_until_closed(&mut nothing),
                read_until_closed(&mut too_little)
            );
        },
    )
    .await;
}

#[tokio::test]
async fn silence_after_http2_preface() {
    // The connection's own probes detect it.
    withstand("", async |server| {
        let mut tls = tls_client(server).await;
        tls.write_all(PREFACE).await.unwrap();
        tls.flush().await.unwrap();
        read_until_closed(&mut tls).await;
    })
    .await;
}

#[tokio::test]
async fn garbage_within_tls() {
    withstand("", async |server| {
        let mut tls = tls_client(server).await;
        let _ = tls.write_all(&frame(1, 100_000)).await;
        let _ = tls.flush().await;
        read_until_closed(&mut tls).await;
    })
    .await;
}

#[tokio::test]
async fn a_call_without_a_frame() {
    withstand("the gRPC link sent nothing for", async |server| {
        let port = server.listener.address().port();
        let channel = control::connect("127.0.0.1", port, &server.trust)
            .await
            .unwrap();
        let silence = tokio_stream::pending::<Packet>();
        DataClient::new(channel).connect(silence).await.unwrap_err();
    })
    .await;
}

/// A gRPC message: a flag, a length, and fewer bytes than the length.
fn truncated(announced_size: u32) -> http::Request<Body> {
    let mut message = String::from("\0");
    message.extend(announced_size.to_be_bytes().map(char::from));
    message.push_str("abc");
    http::Request::post("http://tensord/tensord.v1.Data/Connect")
        .header("content-type", "application/grpc")
        .body(Body::new(message))
        .unwrap()
}

#[tokio::test]
async fn truncated_grpc_message() {
    withstand("gRPC link failed", async |server| {
        let port = server.listener.address().port();
        // The second is refused for its length alone.
        for announced_size in [100, 0x7f00_0000] {
            let channel = control::connect("127.0.0.1", port, &server.trust)
                .await
                .unwrap();
            let answer = channel.oneshot(truncated(announced_size)).await.unwrap();
            let status = answer
                .headers()
                .get("grpc-status")
                .expect("an error at once");
            assert_ne!(status, "0");
        }
    })
    .await;
}

#[tokio::test]
async fn garbage_over_udp() {
    withstand("", async |server| {
        let udp = UdpSocket::bind(any_port()).await.unwrap();
        udp.connect(server.listener.address()).await.unwrap();
        for size in [0, 1, 20, 500, 1200, 1400] {
            udp.send(&frame(size, size)).await.unwrap();
            // The first bits of an Initial packet, version 1.
            let mut initial = vec![0xc3, 0, 0, 0, 1];
            initial.extend_from_slice(&frame(size, size));
            udp.send(&initial).await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn silent_quic_connections() {
    withstand("the QUIC connection sent nothing for", async |server| {
        let without_a_stream = quic_client(server).await;
        let without_a_frame = quic_client(server).await;
        // Opening a stream sends nothing.
        let _stream = without_a_frame.open_bi().await.unwrap();
        tokio::join!(without_a_stream.closed(), without_a_frame.closed());
    })
    .await;
}

/// The code that accepted the link receives its frames, but does not admit it.
#[tokio::test]
async fn a_link_that_is_never_admitted() {
    withstand("", async |server| {
        for kind in [TCP, QUIC, GRPC] {
            let mut near = server.dial(kind).await;
            near.sender.send(&[frame(1, 10)]).await.unwrap();
            let mut far = server.listener.accept().await;
            expect_frame(&mut far.receiver, 1, 10).await;
            assert!(is_pending(far.receiver.recv()).await);
            expect_error(&mut near.receiver).await;
            expect_error(&mut far.receiver).await;
        }
    })
    .await;
}

/// So many that later peers must prove their addresses first.
#[tokio::test]
async fn many_silent_quic_connections() {
    withstand("", async |server| {
        let mut idle = Vec::new();
        for _ in 0..40 {
            idle.push(quic_client(server).await);
        }
        let (mut near, mut far) = server.connect(QUIC).await;
        echo(&mut near, &mut far).await;
        for connection in idle {
            connection.closed().await;
        }
        echo(&mut near, &mut far).await;
    })
    .await;
}

#[tokio::test]
async fn quic_connection_closed_at_once() {
    withstand("QUIC connection failed", async |server| {
        quic_client(server).await.close(7u8.into(), b"never mind");
    })
    .await;
}

#[tokio::test]
async fn truncated_quic_frame() {
    withstand("", async |server| {
        for prefix in [&[100, 0, 0, 0, b'a', b'b', b'c'][..], &[100, 0]] {
            let connection = quic_client(server).await;
            let (mut send, _recv) = connection.open_bi().await.unwrap();
            send.write_all(prefix).await.unwrap();
            send.finish().unwrap();
            let mut link = server.listener.accept().await;
            let error = expect_error(&mut link.receiver).await;
            assert!(
                error.to_string().contains("ended in the middle of a frame"),
                "{error}"
            );
        }
    })
    .await;
}

/// Links that are not accepted wait, and their dialers with them; those that are dropped
/// meanwhile do no harm.
#[tokio::test]
async fn unaccepted_links_wait() {
    const LINKS: usize = 60;
    no_hang(async {
        let mut server = Server::start().await;
        for kind in [QUIC, GRPC] {
            let mut near = Vec::new();
            for number in 0..LINKS {
                let mut link = server.dial(kind).await;
                link.sender.send(&[frame(number, 1000)]).await.unwrap();
                near.push(link);
            }
            near.truncate(LINKS / 2);
            let mut far = HashMap::new();
            while (0..LINKS / 2).any(|number| !far.contains_key(&number)) {
                let mut link = server.listener.accept().await;
                if let Ok(Some(first)) = link.receiver.recv().await {
                    let number = (0..LINKS).find(|&number| first == frame(number, 1000));
                    far.insert(number.unwrap(), link);
                }
            }
            for (number, near) in near.iter_mut().enumerate() {
                echo(near, far.get_mut(&number).unwrap()).await;
            }
        }
    })
    .await;
}
