//! Peers that are refused, and messages that end a stream.

use tensord_proto::v1::{CancelRequest, DeviceFingerprint, DeviceGrant, Hello, Leaving};
use tonic::Code;

use super::*;

fn client_hello(hello: Hello) -> client_message::Body {
    client_message::Body::Hello(ClientHello {
        hello: Some(hello),
        ..hello_of(1)
    })
}

fn other_version() -> Hello {
    Hello {
        protocol_min: 90,
        protocol_max: 99,
        ..version::hello()
    }
}

#[tokio::test]
async fn each_call_accepts_only_its_roles() {
    let rig = Rig::start().await;
    let unknown = Secret::new("0123456789abcdef");
    let hello = || client_hello(version::hello());
    let joining = || worker_message::Body::Register(register(1, 1));
    for (token, expected_text) in [
        (&unknown, "this pool does not know the token"),
        (&rig.worker_token, "the worker token was sent"),
    ] {
        for (code, error) in [
            error_of(rig.attach(token, hello()).await),
            error_of(rig.status_with(token).await),
        ] {
            assert_eq!(
                (code, error.code()),
                (Code::Unauthenticated, ErrorCode::Token)
            );
            assert!(error.message.contains(expected_text), "{error}");
        }
    }
    for (token, expected_text) in [
        (&unknown, "this pool does not know the token"),
        (&rig.client_token, "the program token was sent"),
    ] {
        let (code, error) = error_of(rig.join(token, joining()).await);
        assert_eq!(
            (code, error.code()),
            (Code::Unauthenticated, ErrorCode::Token)
        );
        assert!(error.message.contains(expected_text), "{error}");
    }
}

#[tokio::test]
async fn version_mismatch_error_names_both_versions() {
    let rig = Rig::start().await;
    let (code, error) = error_of(
        rig.attach(&rig.client_token, client_hello(other_version()))
            .await,
    );
    assert_eq!(
        (code, error.code()),
        (Code::FailedPrecondition, ErrorCode::Version)
    );
    assert!(error.message.contains("protocol 90 to 99"), "{error}");
    let older = Hello {
        ir_version: "burn-ir 0.21.0".into(),
        ..version::hello()
    };
    let joining = Register {
        hello: Some(older),
        ..register(1, 1)
    };
    let (_, error) = error_of(rig.register(joining).await);
    assert_eq!(error.code(), ErrorCode::Version);
    assert!(error.message.contains("burn-ir 0.21.0"), "{error}");
}

#[tokio::test]
async fn a_stream_must_begin_with_its_hello() {
    let mut options = options();
    options.timing.hello = Duration::from_millis(50);
    let rig = Rig::with(options).await;
    let cancel = client_message::Body::Cancel(CancelRequest { request_id: 1 });
    let (_, error) = error_of(rig.attach(&rig.client_token, cancel).await);
    assert_eq!(error.code(), ErrorCode::Protocol);
    let leaving = worker_message::Body::Leaving(Leaving {});
    let (_, error) = error_of(rig.join(&rig.worker_token, leaving).await);
    assert_eq!(error.code(), ErrorCode::Protocol);

    let (_silent, expected_text) = mpsc::channel::<ClientMessage>(1);
    let request = with_token(ReceiverStream::new(expected_text), &rig.client_token);
    let mut client = PoolClient::new(rig.channel().await);
    let (_, error) = error_of(with_timeout("answer", client.attach(request)).await);
    assert_eq!(error.message, "the peer sent no first message within 50ms");
}

#[tokio::test]
async fn a_registration_is_checked() {
    let rig = Rig::start().await;
    let right = || register(1, 1);
    let device = |kind: &str| Device {
        kind: kind.into(),
        name: "CPU".into(),
        memory_bytes: 1,
        fingerprint: None,
    };
    let cases = [
        (
            Register {
                hello: None,
                ..right()
            },
            "the hello contains no protocol versions",
        ),
        (
            Register {
                name: "\u{1b}[31m".into(),
                ..right()
            },
            "the worker's name is",
        ),
        (
            Register {
                name: String::new(),
                ..right()
            },
            "the worker's name is",
        ),
        (
            Register {
                address: "gpu-1".into(),
                ..right()
            },
            "the worker's address \"gpu-1\"",
        ),
        (
            Register {
                certificate_sha256: vec![0; 31].into(),
                ..right()
            },
            "has 31 bytes; it must have 32",
        ),
        (
            Register {
                devices: vec![device("")],
                ..right()
            },
            "a device's kind is",
        ),
        (
            register(1, 257),
            "the worker registered 257 devices; the limit is 256",
        ),
    ];
    for (wrong, expected) in cases {
        let (code, error) = error_of(rig.register(wrong).await);
        assert_eq!(
            (code, error.code()),
            (Code::InvalidArgument, ErrorCode::Protocol)
        );
        assert!(error.message.contains(expected), "{error}");
    }
    assert_eq!(rig.status().await.workers, []);
}

#[tokio::test]
async fn lists_of_a_registration_are_bounded_and_name_its_devices() {
    let rig = Rig::start().await;
    let held = |device_index| HeldDevice {
        lease_id: 7,
        device_index,
        ..HeldDevice::default()
    };
    let ended = |device_index| DeviceGrant {
        device_index,
        ..DeviceGrant::default()
    };
    let with_held = |held| Register {
        held,
        ..register(1, 2)
    };
    let with_ended = |ended| Register {
        ended,
        ..register(1, 2)
    };
    for (wrong, expected) in [
        (
            with_held(vec![held(0); 4097]),
            "the worker's list of held devices has 4097 entries; the limit is 4096",
        ),
        (
            with_ended(vec![ended(0); 4353]),
            "the worker's list of ended grants has 4353 entries; the limit is 4352",
        ),
        (
            with_held(vec![held(1), held(2)]),
            "the worker's list of held devices names the device 2, but the worker registered 2 devices",
        ),
        (
            with_ended(vec![ended(1), ended(u32::MAX)]),
            "the worker's list of ended grants names the device 4294967295, but the worker registered 2 devices",
        ),
    ] {
        let (code, error) = error_of(rig.register(wrong).await);
        assert_eq!(
            (code, error.code()),
            (Code::InvalidArgument, ErrorCode::Protocol)
        );
        assert_eq!(error.message, expected);
    }
    assert_eq!(rig.status().await.workers, []);
    let right = Register {
        held: vec![held(1)],
        ..with_ended(vec![ended(1); 4352])
    };
    rig.register(right).await.unwrap();
}

#[tokio::test]
async fn fingerprint_of_another_length_is_refused() {
    let rig = Rig::start().await;
    let mut wrong = register(1, 1);
    wrong.devices[0].fingerprint = Some(DeviceFingerprint {
        hash: vec![0; 15].into(),
        is_exact: true,
    });
    let (_, error) = error_of(rig.register(wrong).await);
    let expected = "the field `hash` of a fingerprint has 15 bytes; it must have 16";
    assert!(error.message.contains(expected), "{error}");
}

#[tokio::test]
async fn protocol_violation_ends_only_the_violators_stream() {
    let rig = Rig::start().await;
    let mut bystander = rig.client(1).await;
    let mut client = rig.client(2).await;
    client.send(client_hello(version::hello())).await;
    assert_eq!(
        client.recv_stream_error().await.message,
        "the client sent a second hello on the same stream"
    );

    let mut client = rig.client(3).await;
    client.send(request_of_kind("\u{7}".into())).await;
    assert_eq!(client.recv_stream_error().await.code(), ErrorCode::Protocol);

    let mut worker = rig.worker(1, 1).await;
    worker
        .send(worker_message::Body::Register(register(1, 1)))
        .await;
    let (_, error) = error_of(worker.recv().await);
    assert_eq!(error.code(), ErrorCode::Protocol);

    bystander.request(1, 9).await;
    assert_eq!(bystander.refused(1).await.code(), ErrorCode::Unsatisfiable);
}

fn request_of_kind(kind: String) -> client_message::Body {
    client_message::Body::Request(LeaseRequest {
        request_id: 1,
        devices: 1,
        kind,
        ..LeaseRequest::default()
    })
}

#[tokio::test]
async fn a_message_over_the_limit_ends_its_stream_only() {
    let rig = Rig::start().await;
    let mut client = rig.client(1).await;
    client
        .send(request_of_kind("x".repeat(MAX_MESSAGE_BYTES)))
        .await;
    while let Ok(Some(pool_message::Body::Beat(_))) = client.recv_any().await {}
    rig.client(1).await;
}

#[tokio::test]
async fn a_silent_worker_is_cut_off_and_its_lease_ends() {
    let mut options = options();
    options.timing.heartbeat = Duration::from_millis(20);
    options.engine.worker_timeout = Duration::from_millis(100);
    let rig = Rig::with(options).await;
    let mut worker = rig.worker(1, 1).await;
    let mut client = rig.client(1).await;
    assert_eq!(worker.registered.heartbeat_ms, 20);
    client.request(1, 1).await;
    let lease = client.granted().await;
    let (_, error) = error_of(worker.recv().await);
    assert_eq!(error.message, "the peer sent nothing for 100ms");
    let error = client.ended(lease.lease_id).await;
    assert_eq!(error.code(), ErrorCode::WorkerLost);
    let id = worker_id(1);
    assert_eq!(error.message, format!("worker w1 ({id}) was lost"));
}
