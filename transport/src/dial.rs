//! The dialling end of a link.

use std::{
    collections::{HashSet, VecDeque},
    fmt, io,
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tracing::{debug, warn};

use crate::{
    Link, TransportChoice,
    faults::FaultSwitch,
    grpc, quic, tcp,
    tls::{Trust, TrustError},
};

/// How long `auto` waits for QUIC before it also tries gRPC, and a name's first
/// address is tried before the second. UDP that is blocked is mostly dropped in
/// silence; a handshake that takes longer than this would be over a path with
/// more than 300 ms of round trip.
const HEAD_START: Duration = Duration::from_millis(600);

/// Why a process could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Nothing answers there.
    #[error(
        "nothing answers at {address} ({reason}); check the address and that tensord runs there"
    )]
    Unreachable {
        /// Where.
        address: String,
        /// What the system said.
        reason: String,
    },
    /// Whoever answers there is not who was expected.
    #[error(
        "{address} shows a certificate that does not match {expected}; take a fresh URL from the host, or someone is in between"
    )]
    Certificate {
        /// Where.
        address: String,
        /// What was expected.
        expected: String,
    },
    /// The trust settings of this side are unusable.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// No answer in time.
    #[error(
        "{address} did not answer within {deadline:?}; check the address, and firewalls on the way"
    )]
    Deadline {
        /// Where.
        address: String,
        /// The time it had.
        deadline: Duration,
    },
}

impl DialError {
    pub(crate) fn unreachable(address: impl fmt::Display, reason: &dyn std::error::Error) -> Self {
        let mut text = reason.to_string();
        let mut cause = reason.source();
        while let Some(error) = cause {
            // tonic and hyper repeat themselves on the way up.
            let inner = error.to_string();
            if !text.contains(&inner) {
                text = format!("{text}: {inner}");
            }
            cause = error.source();
        }
        Self::Unreachable {
            address: address.to_string(),
            reason: text,
        }
    }

    pub(crate) fn certificate(address: impl fmt::Display, trust: &Trust) -> Self {
        let expected = match trust {
            Trust::Pin(pin) => format!("ca={pin}"),
            Trust::CaFile(path) => format!("ca-file={}", path.display()),
            Trust::System => "the authorities this system trusts".into(),
        };
        Self::Certificate {
            address: address.to_string(),
            expected,
        }
    }
}

/// `host:port`, with brackets where the host is an IPv6 address.
pub(crate) fn authority(host: &str, port: u16) -> String {
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// Dials links. Cheap to clone; clones share what was learnt of the network.
#[derive(Debug, Clone, Default)]
pub struct Dialer {
    choice: TransportChoice,
    faults: Option<FaultSwitch>,
    /// Hosts that answered over TCP when they did not over UDP, which is worth
    /// saying once and not trying again.
    without_udp: Arc<Mutex<HashSet<IpAddr>>>,
}

impl Dialer {
    /// A dialer that uses what `choice` allows.
    pub fn new(choice: TransportChoice) -> Self {
        Self {
            choice,
            ..Self::default()
        }
    }

    /// Puts every link under the control of `faults`. For tests.
    pub fn with_faults(mut self, faults: FaultSwitch) -> Self {
        self.faults = Some(faults);
        self
    }

    /// Opens a link to `address` within `deadline`, to whom `trust` accepts.
    ///
    /// # Errors
    ///
    /// See [`DialError`]; each says what to do.
    pub async fn dial(
        &self,
        address: &str,
        trust: &Trust,
        deadline: Duration,
    ) -> Result<Link, DialError> {
        let dialled = timeout(deadline, self.dial_any(address, trust)).await;
        let link = dialled.unwrap_or_else(|_| {
            Err(DialError::Deadline {
                address: address.into(),
                deadline,
            })
        })?;
        Ok(match &self.faults {
            Some(faults) => faults.wrap(link),
            None => link,
        })
    }

    /// Opens a link for bulk bytes: over TCP, which carries several times what
    /// QUIC does where the network is fast, unless this dialer was told to use
    /// QUIC; and over whatever else there is where TCP does not get through.
    ///
    /// # Errors
    ///
    /// As [`dial`](Self::dial).
    pub async fn dial_bulk(
        &self,
        address: &str,
        trust: &Trust,
        deadline: Duration,
    ) -> Result<Link, DialError> {
        if self.choice == TransportChoice::Quic {
            return self.dial(address, trust, deadline).await;
        }
        let tcp = Self {
            choice: TransportChoice::Tcp,
            ..self.clone()
        };
        match tcp.dial(address, trust, deadline / 2).await {
            Err(e @ (DialError::Unreachable { .. } | DialError::Deadline { .. })) => {
                debug!("no TCP for bulk bytes: {e}");
                self.dial(address, trust, deadline / 2).await
            }
            decided => decided,
        }
    }

    /// Tries the addresses behind a name in turn, the next one when the one
    /// before failed or was silent for a while; the first link wins.
    async fn dial_any(&self, address: &str, trust: &Trust) -> Result<Link, DialError> {
        let unreachable = |e: io::Error| DialError::unreachable(address, &e);
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_matches(['[', ']']);
        let found = tokio::net::lookup_host(address).await;
        let mut found: VecDeque<_> = found.map_err(unreachable)?.collect();
        let mut attempts = JoinSet::new();
        let mut failure = unreachable(io::Error::other("the name has no address"));
        loop {
            if let Some(at) = found.pop_front() {
                let (dialer, host, trust) = (self.clone(), host.to_owned(), trust.clone());
                attempts.spawn(async move { dialer.dial_at(at, &host, &trust).await });
            }
            tokio::select! {
                Some(attempt) = attempts.join_next() => {
                    match attempt.expect("dialling does not panic") {
                        Err(e @ DialError::Unreachable { .. }) => failure = e,
                        decided => return decided,
                    }
                }
                () = sleep(HEAD_START), if !found.is_empty() => {}
                else => return Err(failure),
            }
        }
    }

    async fn dial_at(&self, at: SocketAddr, host: &str, trust: &Trust) -> Result<Link, DialError> {
        match self.choice {
            TransportChoice::Quic => quic::dial(at, host, trust).await,
            TransportChoice::Grpc => grpc::dial(at, host, trust).await,
            TransportChoice::Tcp => tcp::dial(at, host, trust).await,
            TransportChoice::Auto if self.without_udp().contains(&at.ip()) => {
                grpc::dial(at, host, trust).await
            }
            TransportChoice::Auto => self.dial_auto(at, host, trust).await,
        }
    }

    async fn dial_auto(
        &self,
        at: SocketAddr,
        host: &str,
        trust: &Trust,
    ) -> Result<Link, DialError> {
        let mut quic = pin!(quic::dial(at, host, trust));
        let link = match timeout(HEAD_START, &mut quic).await {
            Ok(Err(DialError::Unreachable { .. })) => grpc::dial(at, host, trust).await?,
            // The other carrier would meet the same.
            Ok(decided) => return decided,
            Err(_) => tokio::select! {
                // Late, but it works.
                Ok(link) = &mut quic => return Ok(link),
                link = grpc::dial(at, host, trust) => link?,
            },
        };
        if self.without_udp().insert(at.ip()) {
            warn!("UDP to {at} does not get through; using gRPC instead of QUIC");
        }
        Ok(link)
    }

    fn without_udp(&self) -> MutexGuard<'_, HashSet<IpAddr>> {
        self.without_udp
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
