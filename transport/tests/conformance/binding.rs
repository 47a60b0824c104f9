//! Why a listener does not start.

use tensord_transport::{Identity, Listener, identity::IdentityPem};
use tokio::net::{TcpListener, UdpSocket};

use crate::harness::any_port;

#[tokio::test]
async fn a_taken_port_is_named_with_its_protocol() {
    let identity = Identity::self_signed().unwrap();
    let tcp = TcpListener::bind(any_port()).await.unwrap();
    let udp = UdpSocket::bind(any_port()).await.unwrap();
    let cases = [
        (tcp.local_addr().unwrap(), "TCP"),
        (udp.local_addr().unwrap(), "UDP"),
    ];
    for (address, protocol) in cases {
        let error = Listener::bind(address, &identity).await.unwrap_err();
        let expected = format!("cannot listen on {address} ({protocol}): ");
        assert!(error.to_string().starts_with(&expected), "{error}");
    }
}

#[tokio::test]
async fn a_key_of_another_certificate_is_refused() {
    let pem = IdentityPem {
        key: IdentityPem::new_pool().unwrap().key,
        ..IdentityPem::new_pool().unwrap()
    };
    let identity = Identity::from_pem(&pem).unwrap();
    let error = Listener::bind(any_port(), &identity).await.unwrap_err();
    let expected = "cannot use this certificate and key for TLS: ";
    assert!(error.to_string().starts_with(expected), "{error}");
}
