//! The dialling end of a link.

pub(crate) mod error;

use std::{
    collections::{HashMap, VecDeque},
    fmt, io,
    net::SocketAddr,
    panic::resume_unwind,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tensord_proto::ids::LeaseId;
use tokio::{
    task::{JoinError, JoinSet},
    time::{Instant, sleep, timeout},
};
use tracing::warn;

pub use self::error::DialError;
use crate::{
    carriers::{Carrier, grpc, quic, tcp},
    faults::FaultSwitch,
    identity::Identity,
    link::Link,
    tls::{TlsOptions, Trust},
    url::TransportChoice,
};

/// Carriers in the order in which `auto` tries them. A frame over TCP costs both ends the
/// least time, gRPC passes where only HTTP/2 does, and QUIC passes where TCP does not.
const PREFERENCE: [Carrier; 3] = [Carrier::Tcp, Carrier::Grpc, Carrier::Quic];

/// How long `auto` waits for a carrier before it also tries the next. A firewall mostly
/// drops packets silently. If only TCP's first packet was lost, TCP sends it again after
/// a second.
const CARRIER_ATTEMPT_DELAY: Duration = Duration::from_millis(1300);

/// How long one address of a name is tried before the next one is tried as well.
const ADDRESS_ATTEMPT_DELAY: Duration = Duration::from_millis(600);

/// How long a fallback carrier is tried before TCP.
const FALLBACK_TTL: Duration = Duration::from_secs(300);

/// Dials links. Cheap to clone; clones share what they learnt about the network.
#[derive(Debug, Clone, Default)]
pub struct Dialer {
    choice: TransportChoice,
    faults: Option<FaultSwitch>,
    /// The lease whose processes are dialled.
    lease: Option<LeaseId>,
    /// The certificate to show to peers.
    identity: Option<Arc<Identity>>,
    /// Fallback carrier per address where the first of [`PREFERENCE`] did not get
    /// through, and when the preferred order was last tried. It is logged once, and tried
    /// first for [`FALLBACK_TTL`].
    fallbacks: Arc<Mutex<HashMap<SocketAddr, (Carrier, Instant)>>>,
}

impl Dialer {
    /// Creates a dialer that uses the carriers that `choice` allows.
    pub fn new(choice: TransportChoice) -> Self {
        Self {
            choice,
            ..Self::default()
        }
    }

    /// Shows `identity` to peers, which identify this process by it.
    pub fn with_identity(mut self, identity: Arc<Identity>) -> Self {
        self.identity = Some(identity);
        self
    }

    /// Dials the processes that run `lease` on workers. Their certificates may be issued by
    /// those of the workers.
    pub fn for_lease(mut self, lease: LeaseId) -> Self {
        self.lease = Some(lease);
        self
    }

    /// Puts every link under the control of `faults`. For tests.
    pub fn with_faults(mut self, faults: FaultSwitch) -> Self {
        self.faults = Some(faults);
        self
    }

    /// Opens a link to `address` within `deadline`, if `trust` accepts the peer's
    /// certificate.
    ///
    /// # Errors
    ///
    /// See [`DialError`]; each message names a remedy.
    pub async fn dial(
        &self,
        address: &str,
        trust: &Trust,
        deadline: Duration,
    ) -> Result<Link, DialError> {
        let tls_options = TlsOptions {
            trust: trust.clone(),
            lease: self.lease,
            identity: self.identity.clone(),
        };
        let dialled = timeout(deadline, self.dial_any(address, &tls_options)).await;
        let link = dialled.unwrap_or_else(|_| {
            Err(DialError::Deadline {
                address: address.into(),
                deadline,
            })
        })?;
        Ok(match &self.faults {
            Some(faults) => link.with_faults(faults),
            None => link,
        })
    }

    /// Opens a link for bulk bytes. A dialer that was set to gRPC uses `auto` here, as
    /// TCP carries several times what the other carriers do where the network is fast.
    /// All other settings apply as in [`dial`](Self::dial).
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
        let choice = match self.choice {
            TransportChoice::Grpc => TransportChoice::Auto,
            choice => choice,
        };
        let dialer = Self {
            choice,
            ..self.clone()
        };
        dialer.dial(address, trust, deadline).await
    }

    /// Tries the addresses of a name in turn, the next one when the one before has failed
    /// or was silent for [`ADDRESS_ATTEMPT_DELAY`]. The first link wins.
    async fn dial_any(&self, address: &str, tls_options: &TlsOptions) -> Result<Link, DialError> {
        let unreachable = |e: io::Error| DialError::unreachable(address, &e);
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_matches(['[', ']']);
        let addresses = tokio::net::lookup_host(address).await;
        let mut addresses: VecDeque<_> = addresses.map_err(unreachable)?.collect();
        let mut attempts = JoinSet::new();
        let mut failure = unreachable(io::Error::other("the name has no address"));
        loop {
            if let Some(at) = addresses.pop_front() {
                let (dialer, host, tls_options) =
                    (self.clone(), host.to_owned(), tls_options.clone());
                attempts.spawn(async move { dialer.dial_at(at, &host, &tls_options).await });
            }
            tokio::select! {
                Some(attempt) = attempts.join_next() => {
                    match attempt_result(attempt, address) {
                        Err(e @ DialError::Unreachable { .. }) => failure = e,
                        result => return result,
                    }
                }
                () = sleep(ADDRESS_ATTEMPT_DELAY), if !addresses.is_empty() => {}
                else => return Err(failure),
            }
        }
    }

    async fn dial_at(
        &self,
        at: SocketAddr,
        host: &str,
        tls_options: &TlsOptions,
    ) -> Result<Link, DialError> {
        let carrier = match self.choice {
            TransportChoice::Quic => Carrier::Quic,
            TransportChoice::Grpc => Carrier::Grpc,
            TransportChoice::Tcp => Carrier::Tcp,
            TransportChoice::Auto => return self.dial_auto(at, host, tls_options).await,
        };
        dial_over(carrier, at, host, tls_options).await
    }

    async fn dial_auto(
        &self,
        at: SocketAddr,
        host: &str,
        tls_options: &TlsOptions,
    ) -> Result<Link, DialError> {
        let mut attempts = JoinSet::new();
        let mut failure = None;
        for carrier in self.carrier_order(at) {
            if carrier == Carrier::Grpc && failure.is_none() && !attempts.is_empty() {
                // gRPC runs over TCP, which is silent.
                continue;
            }
            let (host, tls_options) = (host.to_owned(), tls_options.clone());
            attempts.spawn(async move { dial_over(carrier, at, &host, &tls_options).await });
            let conclusive = first_conclusive(&mut attempts, &mut failure, at);
            if let Ok(Some(result)) = timeout(CARRIER_ATTEMPT_DELAY, conclusive).await {
                return self.record_carrier(at, result);
            }
        }
        // No attempt has failed yet, so the path may just be slow.
        if failure.is_none()
            && let Some(result) = first_conclusive(&mut attempts, &mut failure, at).await
        {
            return self.record_carrier(at, result);
        }
        Err(failure.expect("all have failed, or one had before"))
    }

    /// Returns the order in which to try carriers.
    fn carrier_order(&self, at: SocketAddr) -> [Carrier; 3] {
        let fallback = self.fallbacks().get(&at).copied();
        let fallback = fallback.filter(|(_, since)| since.elapsed() < FALLBACK_TTL);
        let mut order = PREFERENCE;
        order.sort_by_key(|&carrier| fallback.is_none_or(|(fallback, _)| carrier != fallback));
        order
    }

    /// Records the carrier of a link to `at`, and returns `dialled` unchanged.
    fn record_carrier(
        &self,
        at: SocketAddr,
        dialled: Result<Link, DialError>,
    ) -> Result<Link, DialError> {
        let link = dialled?;
        let (first, carrier) = (PREFERENCE[0], link.carrier);
        let mut fallbacks = self.fallbacks();
        if carrier == first {
            fallbacks.remove(&at);
            return Ok(link);
        }
        let before = fallbacks.get(&at).copied();
        let before = before.filter(|(before, _)| *before == carrier);
        if before.is_none() {
            warn!("frames over {first} to {at} are not delivered; using {carrier} instead");
        }
        // The time is that of the last attempt in the preferred order.
        if before.is_none_or(|(_, since)| since.elapsed() >= FALLBACK_TTL) {
            fallbacks.insert(at, (carrier, Instant::now()));
        }
        Ok(link)
    }

    fn fallbacks(&self) -> MutexGuard<'_, HashMap<SocketAddr, (Carrier, Instant)>> {
        self.fallbacks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the first of `attempts` to reach `at` that succeeds or fails for good; `None`
/// if all of them find `at` unreachable. The first such error is kept in `failure`.
/// Cancel safe.
async fn first_conclusive(
    attempts: &mut JoinSet<Result<Link, DialError>>,
    failure: &mut Option<DialError>,
    at: SocketAddr,
) -> Option<Result<Link, DialError>> {
    loop {
        match attempt_result(attempts.join_next().await?, at) {
            Err(e @ DialError::Unreachable { .. }) => {
                failure.get_or_insert(e);
            }
            result => return Some(result),
        }
    }
}

/// Returns the result of an attempt to reach `at` that ran in its own task.
fn attempt_result(
    attempt: Result<Result<Link, DialError>, JoinError>,
    at: impl fmt::Display,
) -> Result<Link, DialError> {
    attempt.unwrap_or_else(|e| match e.try_into_panic() {
        Ok(panic) => resume_unwind(panic),
        // The runtime of the task is shutting down.
        Err(cancelled) => Err(DialError::unreachable(at, &cancelled)),
    })
}

async fn dial_over(
    carrier: Carrier,
    at: SocketAddr,
    host: &str,
    tls_options: &TlsOptions,
) -> Result<Link, DialError> {
    Ok(match carrier {
        Carrier::Quic => quic::dial(at, host, tls_options).await?.into(),
        Carrier::Grpc => grpc::dial(at, host, tls_options).await?.into(),
        Carrier::Tcp => tcp::dial(at, host, tls_options).await?.into(),
    })
}
