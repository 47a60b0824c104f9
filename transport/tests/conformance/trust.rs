//! Which peers a dialler trusts, over all carriers.

use tensord_transport::{
    Identity, Listener, control,
    dial::DialError,
    identity::IdentityPem,
    tls::{Fingerprint, Trust},
};

use crate::{
    dialling::{ca_file_with, dial_with_all_choices, unknown_pin},
    harness::*,
    raw::fingerprints,
};

async fn expect_refusal(server: &Server, trust: &Trust, expected: &str) {
    for result in dial_with_all_choices(&server.address(), trust, DIAL_DEADLINE).await {
        let error = result.unwrap_err();
        assert!(
            matches!(error, DialError::Certificate { .. }),
            "{trust:?}: {error:?}"
        );
        let text = error.to_string();
        assert!(
            text.contains(&server.address()) && text.contains(expected),
            "{text}"
        );
    }
    let port = server.listener.address().port();
    let error = control::connect("127.0.0.1", port, trust)
        .await
        .unwrap_err();
    assert!(
        matches!(error, DialError::Certificate { .. }),
        "{trust:?}: {error:?}"
    );
}

async fn expect_links(server: &mut Server, trust: &Trust) {
    for result in dial_with_all_choices(&server.address(), trust, DIAL_DEADLINE).await {
        let link = result.unwrap();
        server.exchange_first_frame(link).await;
    }
}

#[tokio::test]
async fn another_fingerprint_is_refused() {
    no_hang(async {
        let server = Server::start().await;
        let expected = format!("ca={}", Fingerprint([7; 32]));
        expect_refusal(&server, &unknown_pin(), &expected).await;
    })
    .await;
}

#[tokio::test]
async fn pool_can_be_pinned_by_authority_or_server() {
    no_hang(async {
        let mut server = Server::start().await;
        let known = fingerprints(&server.pem);
        assert_eq!(known.len(), 2);
        for pin in known {
            expect_links(&mut server, &Trust::Pin(pin)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn self_signed_worker_can_be_pinned() {
    no_hang(async {
        let identity = Identity::self_signed().unwrap();
        let mut server = Server {
            listener: Listener::bind(any_port(), &identity).await.unwrap(),
            ..Server::start().await
        };
        expect_links(&mut server, &Trust::Pin(identity.fingerprint())).await;
    })
    .await;
}

/// The authority's certificate is public: showing it proves nothing.
#[tokio::test]
async fn a_borrowed_authority_is_refused() {
    no_hang(async {
        let pool = IdentityPem::new_pool().unwrap();
        let trust = Trust::Pin(*fingerprints(&pool).last().unwrap());
        let thief = IdentityPem::new_pool().unwrap();
        let leaf = |pem: &IdentityPem| {
            pem.chain
                .split_inclusive("-----END CERTIFICATE-----")
                .next()
                .unwrap()
                .to_owned()
        };
        let pem = IdentityPem {
            chain: format!("{}\n{}", leaf(&thief), pool.chain.replace(&leaf(&pool), "")),
            key: thief.key,
        };
        let identity = Identity::from_pem(&pem).unwrap();
        assert_eq!(Trust::Pin(identity.fingerprint()), trust);
        let server = Server {
            listener: Listener::bind(any_port(), &identity).await.unwrap(),
            pem,
            trust: trust.clone(),
        };
        expect_refusal(&server, &trust, "ca=sha256:").await;
    })
    .await;
}

#[tokio::test]
async fn ca_file_accepts_certificates_it_signed() {
    no_hang(async {
        let mut server = Server::start().await;
        let directory = tempfile::tempdir().unwrap();
        let right = ca_file_with(directory.path(), &server.pem.chain);
        expect_links(&mut server, &right).await;
        let port = server.listener.address().port();
        control::connect("127.0.0.1", port, &right).await.unwrap();

        let other = IdentityPem::new_pool().unwrap();
        let wrong = ca_file_with(directory.path(), &other.chain);
        expect_refusal(&server, &wrong, "ca-file=").await;
    })
    .await;
}

/// An organisation's own authority puts host names into certificates.
#[tokio::test]
async fn ca_file_accepts_a_host_name() {
    no_hang(async {
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = || rcgen::KeyPair::generate().unwrap();
        let authority = rcgen::CertifiedIssuer::self_signed(params, key()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let trust = ca_file_with(directory.path(), &authority.pem());

        let serve = async |name: &str| {
            let key = key();
            let params = rcgen::CertificateParams::new([name.to_owned()]).unwrap();
            let pem = IdentityPem {
                chain: params.signed_by(&key, &authority).unwrap().pem(),
                key: key.serialize_pem(),
            };
            let identity = Identity::from_pem(&pem).unwrap();
            let listener = Listener::bind(any_port(), &identity).await.unwrap();
            Server {
                listener,
                pem,
                trust: trust.clone(),
            }
        };
        let mut by_address = serve("127.0.0.1").await;
        expect_links(&mut by_address, &trust).await;

        let by_name = serve("localhost").await;
        let port = by_name.listener.address().port();
        for result in
            dial_with_all_choices(&format!("localhost:{port}"), &trust, DIAL_DEADLINE).await
        {
            result.unwrap();
        }
        control::connect("localhost", port, &trust).await.unwrap();

        let by_another_name = serve("gpu-1.example").await;
        expect_refusal(&by_another_name, &trust, "ca-file=").await;
    })
    .await;
}
