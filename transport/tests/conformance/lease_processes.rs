//! Processes that run a lease for a worker: whoever pins the worker's certificate accepts
//! them, and only for their lease.

use std::sync::Arc;

use tensord_proto::ids::LeaseId;
use tensord_transport::{
    Dialer, Identity, Link, Listener, TransportChoice,
    dial::DialError,
    handoff::{self, Destination, LeaseRouter, Passed},
    identity::IdentityDer,
    tls::Trust,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UnixStream},
    sync::{Notify, mpsc},
    task::JoinSet,
};

use crate::harness::*;

const CARRIERS: [TransportChoice; 3] = [
    TransportChoice::Quic,
    TransportChoice::Grpc,
    TransportChoice::Tcp,
];

const LEASE: LeaseId = LeaseId(7);
const OTHER: LeaseId = LeaseId(8);

fn process_of(worker: &Identity, lease: LeaseId) -> IdentityDer {
    worker.issue_for_lease(lease).unwrap()
}

async fn listener(identity: IdentityDer) -> Listener {
    let identity = Identity::from_der(identity).unwrap();
    let any = "127.0.0.1:0".parse().unwrap();
    Listener::bind(any, &identity).await.unwrap()
}

/// Dials `listener` over each carrier, for `lease` if there is one, with the certificate of
/// `worker` pinned. Returns whether it was accepted, which is the same on all carriers.
async fn is_accepted(listener: &Listener, worker: &Identity, lease: Option<LeaseId>) -> bool {
    let (address, trust) = (
        listener.address().to_string(),
        Trust::Pin(worker.fingerprint()),
    );
    let mut accepted = Vec::new();
    for choice in CARRIERS {
        let mut dialer = Dialer::new(choice);
        if let Some(lease) = lease {
            dialer = dialer.for_lease(lease);
        }
        match dialer.dial(&address, &trust, DIAL_DEADLINE).await {
            Ok(_) => accepted.push(true),
            Err(DialError::Certificate { .. }) => accepted.push(false),
            Err(e) => panic!("{choice}: {e}"),
        }
    }
    assert!(accepted.iter().all(|is| *is == accepted[0]), "{accepted:?}");
    accepted[0]
}

#[tokio::test]
async fn a_process_is_accepted_for_its_lease_alone() {
    no_hang(async {
        let [worker, other_worker] = [(); 2].map(|()| Identity::self_signed().unwrap());
        let process = listener(process_of(&worker, LEASE)).await;
        assert!(is_accepted(&process, &worker, Some(LEASE)).await);
        assert!(!is_accepted(&process, &worker, Some(OTHER)).await);
        // It is not the worker.
        assert!(!is_accepted(&process, &worker, None).await);
        assert!(!is_accepted(&process, &other_worker, Some(LEASE)).await);
    })
    .await;
}

#[tokio::test]
async fn the_worker_itself_is_accepted_for_every_lease() {
    no_hang(async {
        let worker = Identity::self_signed().unwrap();
        let any = "127.0.0.1:0".parse().unwrap();
        let listener = Listener::bind(any, &worker).await.unwrap();
        for lease in [Some(LEASE), Some(OTHER), None] {
            assert!(is_accepted(&listener, &worker, lease).await, "{lease:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_process_cannot_issue_certificates_for_other_leases() {
    no_hang(async {
        let worker = Identity::self_signed().unwrap();
        let process = process_of(&worker, LEASE);
        let worker_certificate = process.chain[1].clone();
        let mut forged = process_of(&Identity::from_der(process).unwrap(), OTHER);
        // The chain is complete: the forged certificate, the process's, the worker's.
        forged.chain.push(worker_certificate.clone());
        let complete = listener(forged.clone()).await;
        assert!(!is_accepted(&complete, &worker, Some(OTHER)).await);
        // Without the process's, the forged certificate looks like one of the worker's.
        forged.chain.remove(1);
        let shortened = listener(forged).await;
        assert!(!is_accepted(&shortened, &worker, Some(OTHER)).await);
    })
    .await;
}

#[tokio::test]
async fn an_accepting_side_knows_whose_process_dialled() {
    no_hang(async {
        let mut server = Server::start().await;
        let [worker, other_worker] = [(); 2].map(|()| Identity::self_signed().unwrap());
        let process = Identity::from_der(process_of(&worker, LEASE)).unwrap();
        let process = Arc::new(process);
        for choice in CARRIERS {
            let dialer = Dialer::new(choice).with_identity(process.clone());
            let address = server.address();
            let near = dialer.dial(&address, &server.trust, DIAL_DEADLINE).await;
            let (_, far) = server.exchange_first_frame(near.unwrap()).await;
            let shown = far.certificate.unwrap();
            assert!(shown.is_of_lease(&worker.fingerprint(), LEASE), "{choice}");
            assert!(!shown.is_of_lease(&worker.fingerprint(), OTHER), "{choice}");
            assert!(!shown.is_of_lease(&other_worker.fingerprint(), LEASE));
            assert_ne!(shown.fingerprint, worker.fingerprint());
        }
    })
    .await;
}

/// A client's handshake succeeds before the server has checked its certificate, so a refusal
/// shows as a link that ends.
#[tokio::test]
async fn a_forged_issuer_is_refused() {
    no_hang(async {
        let mut server = Server::start().await;
        let [worker, thief] = [(); 2].map(|()| Identity::self_signed().unwrap());
        let mut forged = process_of(&thief, LEASE);
        forged.chain[1] = process_of(&worker, LEASE).chain[1].clone();
        let forged = Arc::new(Identity::from_der(forged).unwrap());
        for choice in [TransportChoice::Tcp, TransportChoice::Quic] {
            let dialer = Dialer::new(choice).with_identity(forged.clone());
            let address = server.address();
            let dialled = dialer.dial(&address, &server.trust, DIAL_DEADLINE).await;
            if let Ok(mut near) = dialled {
                let _ = near.sender.send(&[bytes::Bytes::from_static(b"x")]).await;
                near.receiver.recv().await.unwrap_err();
            }
        }
        assert!(is_pending(server.listener.accept()).await);
    })
    .await;
}

/// A worker that passes the connections of [`LEASE`] on, and the process that serves them,
/// with real sockets between them.
struct Host {
    worker: Identity,
    daemon: Listener,
    process: Listener,
    _passing: JoinSet<()>,
}

struct Router(mpsc::Sender<Passed>, Notify);

impl LeaseRouter for Router {
    fn destination(&self, lease: LeaseId) -> Destination {
        match lease {
            LEASE => Destination::Process(self.0.clone()),
            _ => Destination::Here,
        }
    }

    fn announced(&self) -> &Notify {
        &self.1
    }
}

impl Host {
    async fn start() -> Self {
        let worker = Identity::self_signed().unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let ((mut sender, kept), (other_kept, mut receiver)) =
            (handoff::channel(near), handoff::channel(far));
        let (queue, mut queued) = mpsc::channel::<Passed>(4);
        let (arrive, arrived) = mpsc::channel(4);
        let mut passing = JoinSet::new();
        passing.spawn(async move {
            let _kept = kept;
            while let Some(connection) = queued.recv().await {
                let (socket, first) = connection.parts();
                let first = first.map_or(&b""[..], |first| first);
                sender.send(first, Some(socket)).await.unwrap();
            }
        });
        passing.spawn(async move {
            let _kept = other_kept;
            while let Some(received) = receiver.recv().await.unwrap() {
                let first = Some(received.frame).filter(|first| !first.is_empty());
                let connection = Passed::received(received.fd.unwrap(), first).unwrap();
                arrive.send(connection).await.unwrap();
            }
        });
        let any = "127.0.0.1:0".parse().unwrap();
        let router = Arc::new(Router(queue, Notify::new()));
        let daemon = Listener::bind_with_router(any, &worker, router).await;
        let daemon = daemon.unwrap();
        let identity = Identity::from_der(process_of(&worker, LEASE)).unwrap();
        let process = Listener::of_passed(arrived, &identity).unwrap();
        Self {
            worker,
            daemon,
            process,
            _passing: passing,
        }
    }

    async fn dial(&self, choice: TransportChoice, lease: Option<LeaseId>) -> Link {
        let mut dialer = Dialer::new(choice);
        if let Some(lease) = lease {
            dialer = dialer.for_lease(lease);
        }
        let (address, trust) = (
            self.daemon.address().to_string(),
            Trust::Pin(self.worker.fingerprint()),
        );
        let dialled = dialer.dial(&address, &trust, DIAL_DEADLINE).await;
        dialled.unwrap_or_else(|e| panic!("{choice}: {e}"))
    }
}

/// Sends frames over a link in both directions.
async fn exchange(mut near: Link, listener: &mut Listener) {
    // The first frame is small, as the listener has not admitted the link yet.
    let frame = |i: u8| [bytes::Bytes::from(vec![i; 1 + 5_000 * usize::from(i)])];
    near.sender.send(&frame(0)).await.unwrap();
    let mut far = listener.accept().await;
    far.receiver.admit().unwrap();
    assert_eq!(far.receiver.recv().await.unwrap().unwrap(), frame(0)[0]);
    let sending = async {
        for i in 1..50 {
            near.sender.send(&frame(i)).await.unwrap();
        }
    };
    let answering = async {
        for i in 1..50 {
            assert_eq!(far.receiver.recv().await.unwrap().unwrap(), frame(i)[0]);
            far.sender.send(&frame(i)).await.unwrap();
        }
    };
    let reading = async {
        for i in 1..50 {
            assert_eq!(near.receiver.recv().await.unwrap().unwrap(), frame(i)[0]);
        }
    };
    tokio::join!(sending, answering, reading);
}

#[tokio::test]
async fn connections_of_a_lease_go_to_its_process() {
    no_hang(async {
        let mut host = Host::start().await;
        for choice in CARRIERS {
            let near = host.dial(choice, Some(LEASE)).await;
            let shown = near.certificate.as_ref().unwrap().fingerprint;
            assert_ne!(
                shown,
                host.worker.fingerprint(),
                "{choice}: the process's own"
            );
            exchange(near, &mut host.process).await;
        }
    })
    .await;
}

#[tokio::test]
async fn other_connections_stay_with_the_worker() {
    no_hang(async {
        let mut host = Host::start().await;
        for choice in CARRIERS {
            for lease in [None, Some(OTHER)] {
                let near = host.dial(choice, lease).await;
                let shown = near.certificate.as_ref().unwrap().fingerprint;
                assert_eq!(shown, host.worker.fingerprint(), "{choice}");
                exchange(near, &mut host.daemon).await;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_peer_without_a_hello_holds_nobody_up() {
    no_hang(async {
        let mut host = Host::start().await;
        let address = host.daemon.address();
        let silent = TcpStream::connect(address).await.unwrap();
        let mut partial = TcpStream::connect(address).await.unwrap();
        partial.write_all(&[0x16, 3, 1, 2, 0]).await.unwrap();
        let mut junk = TcpStream::connect(address).await.unwrap();
        junk.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        let near = host.dial(TransportChoice::Tcp, Some(LEASE)).await;
        exchange(near, &mut host.process).await;
        // Each is closed in the end.
        for mut peer in [silent, partial, junk] {
            let mut rest = Vec::new();
            let _ = peer.read_to_end(&mut rest).await;
        }
    })
    .await;
}
