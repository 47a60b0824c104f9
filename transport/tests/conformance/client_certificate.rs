//! The certificate that the dialling side shows, and what it proves.

use std::sync::Arc;

use tensord_proto::v1::{Packet, data_client::DataClient};
use tensord_transport::{
    Dialer, Identity, Link, TransportChoice, control,
    dial::DialError,
    identity::IdentityPem,
    tls::{Fingerprint, Trust},
};
use tokio::io::AsyncReadExt;

use crate::{
    control::PeerEchoService,
    harness::*,
    raw::{fingerprints, impostor_over_quic, impostor_over_tls},
};

const CARRIERS: [TransportChoice; 3] = [
    TransportChoice::Quic,
    TransportChoice::Grpc,
    TransportChoice::Tcp,
];

fn identity() -> Arc<Identity> {
    Arc::new(Identity::self_signed().unwrap())
}

#[tokio::test]
async fn listener_sees_the_dialler_certificate() {
    no_hang(async {
        let mut server = Server::start().await;
        let (own, leaf) = (identity(), fingerprints(&server.pem)[0]);
        for choice in CARRIERS {
            let named = Dialer::new(choice).with_identity(own.clone());
            for (dialer, expected) in [
                (named, Some(own.fingerprint())),
                (Dialer::new(choice), None),
            ] {
                let address = server.address();
                let near = dialer.dial(&address, &server.trust, DIAL_DEADLINE).await;
                let (near, far) = server.exchange_first_frame(near.unwrap()).await;
                let seen = |link: &Link| link.certificate.as_ref().map(|shown| shown.fingerprint);
                assert_eq!(seen(&far), expected, "{choice}");
                assert_eq!(seen(&near), Some(leaf), "{choice}");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn control_server_sees_the_caller_certificate() {
    no_hang(async {
        let (server, own) = (identity(), identity());
        let trust = Trust::Pin(server.fingerprint());
        let (port, _serving) = PeerEchoService::serve(&server).await;
        let reported = async |channel| {
            let silence = tokio_stream::pending::<Packet>();
            let call = DataClient::new(channel).connect(silence).await.unwrap();
            let reported = call.into_inner().message().await.unwrap().unwrap();
            String::from_utf8(reported.frame.to_vec()).unwrap()
        };
        let channel = control::connect_as(own.clone(), "127.0.0.1", port, &trust).await;
        let named = reported(channel.unwrap()).await;
        assert!(
            named.ends_with(&format!("{:?}", Some(own.fingerprint()))),
            "{named}"
        );
        let channel = control::connect("127.0.0.1", port, &trust).await;
        let unnamed = reported(channel.unwrap()).await;
        assert!(
            unnamed.ends_with(&format!("{:?}", None::<Fingerprint>)),
            "{unnamed}"
        );
    })
    .await;
}

/// Certificates are public: every peer sees those of the others.
#[tokio::test]
async fn a_certificate_without_its_key_is_refused() {
    no_hang(async {
        let mut server = Server::start().await;
        let victim = IdentityPem::self_signed().unwrap();
        let thief = IdentityPem::self_signed().unwrap();
        // For the client the handshake is over before the server has checked the
        // certificate.
        let mut stream = impostor_over_tls(&server, &victim, &thief).await;
        let refused = stream.read(&mut [0; 1]).await.unwrap_err();
        assert!(refused.to_string().contains("DecryptError"), "{refused}");
        if let Ok(connection) = impostor_over_quic(&server, &victim, &thief).await {
            connection.closed().await;
        }
        // Neither became a link.
        assert!(is_pending(server.listener.accept()).await);
        // A peer with the key is let in.
        let (own, trust) = (Identity::from_pem(&victim).unwrap(), server.trust.clone());
        let dialer = Dialer::new(TransportChoice::Tcp).with_identity(Arc::new(own));
        let near = dialer.dial(&server.address(), &trust, DIAL_DEADLINE).await;
        let (_, far) = server.exchange_first_frame(near.unwrap()).await;
        assert_eq!(
            far.certificate.unwrap().fingerprint,
            fingerprints(&victim)[0]
        );
    })
    .await;
}

#[tokio::test]
async fn mismatched_own_key_is_a_trust_error() {
    let (one, other) = (
        IdentityPem::self_signed().unwrap(),
        IdentityPem::self_signed().unwrap(),
    );
    let mixed = Identity::from_pem(&IdentityPem {
        chain: one.chain,
        key: other.key,
    });
    let dialer = Dialer::new(TransportChoice::Tcp).with_identity(Arc::new(mixed.unwrap()));
    let server = Server::start().await;
    let address = server.address();
    let dialled = dialer.dial(&address, &server.trust, DIAL_DEADLINE);
    let error = dialled.await.unwrap_err();
    assert!(matches!(error, DialError::Trust(_)), "{error:?}");
    assert!(
        error.to_string().contains("certificate of this process"),
        "{error}"
    );
}
