//! Bad input gives a clear error, no hang, and no effect on others.

use std::{
    io::Write,
    net::{TcpListener, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use burn::tensor::{Device, Tensor};
use tensord_client::{ConnectError, LeaseRequest, Pool, PoolUrl};
use tensord_proto::{
    v1::{
        ClientHello, ClientMessage, ErrorCode, Hello, Open, client_message, frame,
        pool_client::PoolClient,
    },
    version,
};
use tensord_testkit::cluster::Cluster;
use tensord_transport::{
    Dialer, TransportChoice, channel::duplex, control, dial::DialError, tls::Trust,
};

fn works(device: &Device) -> bool {
    Tensor::<1>::ones([3], device).sum().into_scalar::<f32>() == 3.0
}

fn connect_error(url: &str) -> ConnectError {
    let begun = Instant::now();
    let error = Pool::connect(url).unwrap_err();
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{url}: {:?}",
        begun.elapsed()
    );
    error
}

#[test]
fn connection_failures_have_distinct_errors_within_five_seconds() {
    let cluster = Cluster::start(&[]);
    let url: PoolUrl = cluster.client_url().parse().unwrap();
    assert!(matches!(
        connect_error("http://host:1"),
        ConnectError::Url(_)
    ));

    let closed = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let nobody = PoolUrl {
        port: closed.port(),
        ..url.clone()
    };
    let error = connect_error(&nobody.reveal());
    assert!(
        matches!(error, ConnectError::Dial(DialError::Unreachable { .. })),
        "{error}"
    );

    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mute = PoolUrl {
        port: silent.local_addr().unwrap().port(),
        ..url.clone()
    };
    let error = connect_error(&mute.reveal());
    assert!(
        error.to_string().contains("did not answer within"),
        "{error}"
    );

    let pin = format!("sha256:{}", "00".repeat(32)).parse().unwrap();
    let other = PoolUrl {
        trust: Trust::Pin(pin),
        ..url.clone()
    };
    let error = connect_error(&other.reveal());
    assert!(
        matches!(error, ConnectError::Dial(DialError::Certificate { .. })),
        "{error}"
    );

    let workers: PoolUrl = cluster.worker_url().parse().unwrap();
    let wrong = PoolUrl {
        token: Some(tensord_client::Secret::new("wrong")),
        ..url.clone()
    };
    for url in [PoolUrl { token: None, ..url }, wrong, workers] {
        let error = connect_error(&url.reveal());
        assert!(matches!(error, ConnectError::Token { .. }), "{error}");
        assert!(
            !error.to_string().contains("wrong"),
            "an error must not repeat the token"
        );
    }
}

#[tokio::test]
async fn scheduler_version_mismatch_error_names_both_versions() {
    let cluster = tokio::task::spawn_blocking(|| Cluster::start(&[]))
        .await
        .unwrap();
    let url: PoolUrl = cluster.client_url().parse().unwrap();
    for hello in [
        Hello {
            protocol_min: 90,
            protocol_max: 99,
            ..version::hello()
        },
        Hello {
            ir_version: "burn-ir 9.9.9".into(),
            ..version::hello()
        },
    ] {
        let channel = control::connect(&url.host, url.port, &url.trust)
            .await
            .unwrap();
        let body = client_message::Body::Hello(ClientHello {
            hello: Some(hello),
            client_id: 1,
            ..ClientHello::default()
        });
        let messages = tokio_stream::once(ClientMessage { body: Some(body) });
        let mut request = tonic::Request::new(messages);
        let token = url.token.as_ref().unwrap().reveal();
        request
            .metadata_mut()
            .insert("authorization", format!("Bearer {token}").parse().unwrap());
        let status = match PoolClient::new(channel).attach(request).await {
            Err(status) => status,
            Ok(stream) => stream.into_inner().message().await.unwrap_err(),
        };
        let error = ConnectError::CallFailed {
            pool: "x".into(),
            reason: status.message().into(),
        };
        let text = error.to_string();
        assert!(
            text.contains("burn-ir 0.22.1") && text.contains("update"),
            "{text}"
        );
    }
    tokio::task::spawn_blocking(move || drop(cluster))
        .await
        .unwrap();
}

/// Returns the errors with which a worker rejects `open`, one for each carrier.
async fn rejections(address: &str, trust: &Trust, open: Open) -> Vec<tensord_proto::v1::Error> {
    let mut errors = Vec::new();
    let choices = [
        TransportChoice::Tcp,
        TransportChoice::Quic,
        TransportChoice::Grpc,
    ];
    for choice in choices {
        let dialler = Dialer::new(choice);
        let mut link = dialler
            .dial(address, trust, Duration::from_secs(5))
            .await
            .unwrap();
        let frame = duplex::encode(frame::Body::Open(open.clone()));
        link.sender.send(&[frame]).await.unwrap();
        let answer = tokio::time::timeout(Duration::from_secs(5), link.receiver.recv()).await;
        match duplex::decode(answer.unwrap().unwrap().unwrap())
            .unwrap()
            .body
        {
            Some(frame::Body::Rejected(rejected)) => errors.push(rejected.error.unwrap()),
            other => panic!("not rejected: {other:?}"),
        }
    }
    errors
}

#[test]
fn worker_survives_garbage_and_rejects_invalid_openings() {
    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    let address = pool.status().unwrap().workers[0].address.clone();

    let mut streams: Vec<TcpStream> = Vec::new();
    for garbage in [&b""[..], &[0xff; 4096], b"GET / HTTP/1.1\r\n\r\n"] {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(garbage).unwrap();
        streams.push(stream);
    }
    let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
    for size in [0, 1, 1200] {
        datagrams.send_to(&vec![0xc3; size], &address).unwrap();
    }
    assert!(works(device));

    let runtime = tokio::runtime::Runtime::new().unwrap();
    // Only the lease has the real pin, so a stranger would not know it. Here the
    // fingerprint of the worker's certificate is read from its log.
    let unsigned = Open {
        hello: Some(version::hello()),
        ..Open::default()
    };
    let trust = cluster.worker_trust(0);
    for error in runtime.block_on(rejections(&address, &trust, unsigned)) {
        assert_eq!(error.code(), ErrorCode::Token, "{error}");
    }
    let other = Hello {
        ir_version: "burn-ir 9.9.9".into(),
        ..version::hello()
    };
    let other = Open {
        hello: Some(other),
        ..Open::default()
    };
    for error in runtime.block_on(rejections(&address, &trust, other)) {
        assert_eq!(error.code(), ErrorCode::Version);
        assert!(
            error.message.contains("9.9.9") && error.message.contains("0.22.1"),
            "{error}"
        );
    }
    assert!(works(device));
}
