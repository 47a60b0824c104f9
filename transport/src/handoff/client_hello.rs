//! Reads from the first bytes of a connection for which lease it was dialled.

use std::time::Duration;

use rustls::server::Acceptor;
use tensord_proto::ids::LeaseId;
use tokio::{net::TcpStream, time::sleep};

use crate::identity::lease_of_name;

/// Most bytes of a ClientHello. Those of tensord's clients have some 300, or 1,500 with a
/// post-quantum key share.
const MAX_HELLO_BYTES: usize = 8 << 10;

/// How long to wait for more of a ClientHello of which a part has arrived. The socket counts as
/// readable all the while, so there is nothing else to wait for.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Returns the lease that the other side names in its ClientHello, and leaves all bytes in the
/// socket. `None` if it names none, or sends something else. Waits for a complete ClientHello,
/// so the caller sets a deadline.
pub(crate) async fn lease_of(stream: &TcpStream) -> Option<LeaseId> {
    let mut buffer = vec![0; MAX_HELLO_BYTES];
    let mut seen = 0;
    loop {
        let size = stream.peek(&mut buffer).await.ok()?;
        if size == 0 {
            return None;
        }
        if size > seen {
            seen = size;
            match server_name(&buffer[..size]) {
                Hello::Complete(name) => return lease_of_name(&name?),
                Hello::Partial if size < MAX_HELLO_BYTES => {}
                Hello::Partial | Hello::Malformed => return None,
            }
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// What the first bytes of a connection are.
#[derive(Debug, PartialEq, Eq)]
enum Hello {
    /// A complete ClientHello, with the server name in it, if any.
    Complete(Option<String>),
    /// The beginning of a ClientHello.
    Partial,
    /// Something else.
    Malformed,
}

fn server_name(mut bytes: &[u8]) -> Hello {
    let mut acceptor = Acceptor::default();
    while !bytes.is_empty() {
        if !matches!(acceptor.read_tls(&mut bytes), Ok(1..)) {
            return Hello::Malformed;
        }
        match acceptor.accept() {
            Ok(Some(accepted)) => {
                let name = accepted.client_hello().server_name().map(str::to_owned);
                return Hello::Complete(name);
            }
            Ok(None) => {}
            Err(_) => return Hello::Malformed,
        }
    }
    Hello::Partial
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::ClientConnection;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
        time::timeout,
    };

    use super::*;
    use crate::{
        identity::Identity,
        tls::{ALPN_FRAMES, TlsOptions, Trust, client_config},
    };

    const LEASE: LeaseId = LeaseId(0x1234_5678_9abc_def0);

    /// Returns the first bytes that a client sends who dials `host` for `lease`.
    fn hello(lease: Option<LeaseId>, host: &str) -> Vec<u8> {
        let identity = Identity::self_signed().unwrap();
        let tls_options = TlsOptions {
            lease,
            ..TlsOptions::anonymous(&Trust::Pin(identity.fingerprint()))
        };
        let config = client_config(&tls_options, ALPN_FRAMES).unwrap();
        let name = tls_options.server_name(host).try_into().unwrap();
        let mut connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = Vec::new();
        connection.write_tls(&mut bytes).unwrap();
        bytes
    }

    async fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (near, far) = tokio::join!(TcpStream::connect(address), listener.accept());
        (near.unwrap(), far.unwrap().0)
    }

    #[tokio::test]
    async fn the_lease_is_read_and_the_bytes_stay() {
        let (mut near, mut far) = connected().await;
        let sent = hello(Some(LEASE), "127.0.0.1");
        near.write_all(&sent).await.unwrap();
        assert_eq!(lease_of(&far).await, Some(LEASE));
        let mut read = vec![0; sent.len()];
        far.read_exact(&mut read).await.unwrap();
        assert_eq!(read, sent);
    }

    #[tokio::test]
    async fn a_hello_in_pieces_is_waited_for() {
        let (mut near, far) = connected().await;
        near.set_nodelay(true).unwrap();
        let sent = hello(Some(LEASE), "127.0.0.1");
        let sending = async {
            for piece in sent.chunks(60) {
                near.write_all(piece).await.unwrap();
                sleep(POLL_INTERVAL).await;
            }
        };
        let (lease, ()) = tokio::join!(lease_of(&far), sending);
        assert_eq!(lease, Some(LEASE));
    }

    #[tokio::test]
    async fn no_lease_is_read_where_none_is_named() {
        let other_names = [
            "pool.example",
            "lease-12.tensord",
            "lease-0000000000000001.example",
        ];
        let hellos = other_names.map(|name| hello(None, name));
        let junk = [
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            vec![0x16; 9000],
            vec![0; 100],
        ];
        for sent in hellos.into_iter().chain(junk) {
            let (mut near, far) = connected().await;
            near.write_all(&sent).await.unwrap();
            assert_eq!(lease_of(&far).await, None, "{:?}", &sent[..4]);
        }
        let (near, far) = connected().await;
        drop(near);
        assert_eq!(lease_of(&far).await, None);
    }

    #[tokio::test]
    async fn an_incomplete_hello_is_waited_for_until_the_caller_gives_up() {
        let (mut near, far) = connected().await;
        near.write_all(&hello(Some(LEASE), "h")[..40])
            .await
            .unwrap();
        let waiting = timeout(Duration::from_millis(50), lease_of(&far)).await;
        assert!(waiting.is_err());
    }
}
