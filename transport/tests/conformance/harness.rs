//! A listener, links to it, and frames that are easy to distinguish.

use std::{
    fmt, io,
    sync::{Arc, LazyLock, Mutex},
    time::Duration,
};

use bytes::Bytes;
use tensord_proto::MAX_FRAME_BYTES;
use tensord_transport::{
    Dialer, Identity, Link, LinkError, LinkReceiver, LinkSender, Listener, TransportChoice,
    faults::FaultSwitch, identity::IdentityPem, tls::Trust,
};

/// Long enough for any test on a slow machine, so a test that takes longer hangs.
const TEST_TIMEOUT: Duration = Duration::from_secs(40);

/// Long enough for a dial on a slow machine.
pub(crate) const DIAL_DEADLINE: Duration = Duration::from_secs(20);

/// Runs a test that must end.
pub(crate) async fn no_hang<T>(test: impl Future<Output = T>) -> T {
    let ended = tokio::time::timeout(TEST_TIMEOUT, test).await;
    ended.expect("the test hangs")
}

/// An implementation of a link.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) choice: TransportChoice,
    pub(crate) behind_switch: bool,
}

pub(crate) const QUIC: Kind = Kind {
    choice: TransportChoice::Quic,
    behind_switch: false,
};

pub(crate) const GRPC: Kind = Kind {
    choice: TransportChoice::Grpc,
    behind_switch: false,
};

pub(crate) const TCP: Kind = Kind {
    choice: TransportChoice::Tcp,
    behind_switch: false,
};

impl Kind {
    pub(crate) fn dialer(self) -> Dialer {
        match self.behind_switch {
            true => Dialer::new(self.choice).with_faults(FaultSwitch::default()),
            false => Dialer::new(self.choice),
        }
    }

    /// The same, with a healthy `FaultSwitch` at each end.
    pub(crate) const fn with_fault_switch(self) -> Self {
        Self {
            behind_switch: true,
            ..self
        }
    }
}

/// A listener and what a client must know to dial it.
pub(crate) struct Server {
    pub(crate) listener: Listener,
    pub(crate) pem: IdentityPem,
    pub(crate) trust: Trust,
}

impl Server {
    /// Starts a listener with the certificate of a pool of its own.
    pub(crate) async fn start() -> Self {
        let pem = IdentityPem::new_pool().unwrap();
        let identity = Identity::from_pem(&pem).unwrap();
        let listener = Listener::bind(any_port(), &identity).await.unwrap();
        Self {
            listener,
            pem,
            trust: Trust::Pin(identity.fingerprint()),
        }
    }

    pub(crate) fn address(&self) -> String {
        self.listener.address().to_string()
    }

    /// Dials without sending anything yet.
    pub(crate) async fn dial(&self, kind: Kind) -> Link {
        let (dialer, address) = (kind.dialer(), self.address());
        let link = dialer.dial(&address, &self.trust, DIAL_DEADLINE);
        link.await.unwrap()
    }

    /// Returns both ends of a new link, over which a first frame was sent.
    pub(crate) async fn connect(&mut self, kind: Kind) -> (Link, Link) {
        let near = self.dial(kind).await;
        let (near, far) = self.exchange_first_frame(near).await;
        match kind.behind_switch {
            true => (near, far.with_faults(&FaultSwitch::default())),
            false => (near, far),
        }
    }

    /// Sends a first frame on `near`, and accepts the other end.
    pub(crate) async fn exchange_first_frame(&mut self, mut near: Link) -> (Link, Link) {
        near.sender.send(&[frame(0, 5)]).await.unwrap();
        let mut far = self.listener.accept().await;
        far.receiver.admit().unwrap();
        assert_eq!(far.receiver.recv().await, Ok(Some(frame(0, 5))));
        assert_eq!(far.carrier, near.carrier);
        (near, far)
    }
}

/// A listener and both ends of a link to it.
pub(crate) async fn connect(kind: Kind) -> (Link, Link, Server) {
    let mut server = Server::start().await;
    let (near, far) = server.connect(kind).await;
    (near, far, server)
}

pub(crate) fn any_port() -> std::net::SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

/// Returns frame `number`, of `size` bytes. Frames with different numbers differ, and so
/// do the parts of a frame, if it has more than a few bytes.
pub(crate) fn frame(number: usize, size: usize) -> Bytes {
    static NOISE: LazyLock<Bytes> = LazyLock::new(|| {
        let mut state = 1u64;
        let mut next = || {
            // A linear congruential generator (Knuth's constants).
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 56) as u8
        };
        (0..3 * MAX_FRAME_BYTES).map(|_| next()).collect()
    });
    let start = number * 4099 % (2 * MAX_FRAME_BYTES - 1);
    NOISE.slice(start..start + size)
}

/// Sends `count` frames of `size` bytes, numbered from 1.
pub(crate) async fn send_frames(sender: &mut LinkSender, count: usize, size: usize) {
    for number in 1..=count {
        sender.send(&[frame(number, size)]).await.unwrap();
    }
}

/// Expects the frames of [`send_frames`].
pub(crate) async fn expect_frames(receiver: &mut LinkReceiver, count: usize, size: usize) {
    for number in 1..=count {
        expect_frame(receiver, number, size).await;
    }
}

/// Expects frame `number` to be next. Does not print megabytes if it is not.
pub(crate) async fn expect_frame(receiver: &mut LinkReceiver, number: usize, size: usize) {
    let received = receiver.recv().await;
    match &received {
        Ok(Some(bytes)) => {
            let found = bytes.len();
            assert!(
                *bytes == frame(number, size),
                "{found} bytes instead of frame {number}"
            );
        }
        ended => panic!("{ended:?} instead of frame {number}"),
    }
}

/// Reads until the link ends, which must be with an error.
pub(crate) async fn expect_error(receiver: &mut LinkReceiver) -> LinkError {
    loop {
        match receiver.recv().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the link ended as if the peer had finished"),
            Err(error) => {
                let again = receiver.recv().await;
                assert!(again.is_err(), "{again:?} after {error:?}");
                return error;
            }
        }
    }
}

/// Sends until the link ends.
pub(crate) async fn send_until_error(sender: &mut LinkSender) -> LinkError {
    loop {
        if let Err(error) = sender.send(&[frame(1, 100_000)]).await {
            return error;
        }
        // An error may take a moment to be detected.
        tokio::task::yield_now().await;
    }
}

/// Returns whether `future` is still pending after a short time. Only a broken test
/// subject makes this `false`; only a stalled machine could hide that.
pub(crate) async fn is_pending<F: Future>(future: F) -> bool {
    let soon = Duration::from_millis(300);
    tokio::time::timeout(soon, future).await.is_err()
}

/// Captures what is logged on this thread while it lives.
pub(crate) struct Log {
    text: Arc<Mutex<Vec<u8>>>,
    _guard: tracing::subscriber::DefaultGuard,
}

impl Log {
    pub(crate) fn capture() -> Self {
        struct Writer(Arc<Mutex<Vec<u8>>>);
        impl io::Write for Writer {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let text = Arc::<Mutex<Vec<u8>>>::default();
        let writer = Arc::clone(&text);
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::DEBUG)
            .with_ansi(false)
            .with_writer(move || Writer(writer.clone()))
            .finish();
        Self {
            text,
            _guard: tracing::subscriber::set_default(subscriber),
        }
    }

    /// Returns the log lines of this crate that contain `text`.
    pub(crate) fn lines_with(&self, text: &str) -> Vec<String> {
        let log = self.to_string();
        let ours = log
            .lines()
            .filter(|line| line.contains("tensord_transport"));
        ours.filter(|line| line.contains(text))
            .map(String::from)
            .collect()
    }
}

impl fmt::Display for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.text.lock().unwrap()))
    }
}
