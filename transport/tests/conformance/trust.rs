//! Which peers a dialler trusts, over all carriers.

use tensord_transport::{
    Identity, Listener, control,
    dial::DialError,
    identity::IdentityPem,
    tls::{Fingerprint, Trust},
};

use crate::{
    dialling::{dial_each, file, pin_of_nobody},
    harness::*,
    raw::fingerprints,
};

async fn expect_refusal(server: &Server, trust: &Trust, expected: &str) {
    for result in dial_each(&server.address(), trust, DIAL_DEADLINE).await {
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
    for result in dial_each(&server.address(), trust, DIAL_DEADLINE).await {
        let link = result.unwrap();
        server.greet(link).await;
    }
}

#[tokio::test]
async fn another_fingerprint_is_refused() {
    no_hang(async {
        let server = Server::start().await;
        let expected = format!("ca={}", Fingerprint([7; 32]));
        expect_refusal(&server, &pin_of_nobody(), &expected).await;
    })
    .await;
}

#[tokio::test]
async fn the_pools_authority_and_its_server_are_known_by_fingerprint() {
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
async fn a_self_signed_worker_is_known_by_fingerprint() {
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
async fn a_ca_file_is_what_it_chains_to() {
    no_hang(async {
        let mut server = Server::start().await;
        let directory = tempfile::tempdir().unwrap();
        let right = file(directory.path(), &server.pem.chain);
        expect_links(&mut server, &right).await;
        let port = server.listener.address().port();
        control::connect("127.0.0.1", port, &right).await.unwrap();

        let other = IdentityPem::new_pool().unwrap();
        let wrong = file(directory.path(), &other.chain);
        expect_refusal(&server, &wrong, "ca-file=").await;
    })
    .await;
}

/// An organisation's own authority puts host names into certificates.
#[tokio::test]
async fn a_ca_file_may_name_the_host() {
    no_hang(async {
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = || rcgen::KeyPair::generate().unwrap();
        let authority = rcgen::CertifiedIssuer::self_signed(params, key()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let trust = file(directory.path(), &authority.pem());

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
        for result in dial_each(&format!("localhost:{port}"), &trust, DIAL_DEADLINE).await {
            result.unwrap();
        }
        control::connect("localhost", port, &trust).await.unwrap();

        let by_another_name = serve("gpu-1.example").await;
        expect_refusal(&by_another_name, &trust, "ca-file=").await;
    })
    .await;
}
