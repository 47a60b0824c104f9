//! A pool that this process runs: its scheduler, its secrets, and the URLs it
//! is reached under.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use tensord_transport::{PoolUrl, Secret, TransportChoice, tls::Trust};

use crate::{
    config::SchedulerConfig,
    failure::Failure,
    scheduler::{Options, Scheduler},
    state::{SchedulerLock, StateDir},
};

/// A running pool.
pub(crate) struct LocalPool {
    /// The scheduler.
    pub(crate) scheduler: Scheduler,
    /// What to print.
    pub(crate) urls: Urls,
    _lock: SchedulerLock,
}

/// The URLs of a pool, with their tokens.
pub(crate) struct Urls {
    /// For programs.
    pub(crate) programs: PoolUrl,
    /// For workers.
    pub(crate) workers: PoolUrl,
    /// For a worker in this process, whatever name others use.
    pub(crate) own_worker: PoolUrl,
}

impl LocalPool {
    /// Starts the pool whose secrets are in the configured state directory.
    pub(crate) async fn start(config: &SchedulerConfig) -> Result<Self, Failure> {
        let state = StateDir::open(&config.state.path)?;
        let lock = state.lock_scheduler()?;
        let secrets = state.pool_secrets()?;
        let trust = Trust::Pin(secrets.identity.fingerprint());
        let tokens = (secrets.client_token.clone(), secrets.worker_token.clone());
        let scheduler = Scheduler::start(Options::new(config.listen), secrets).await?;
        let address = scheduler.address();
        let url = |host: String, token: &Secret| PoolUrl {
            token: Some(token.clone()),
            host,
            port: address.port(),
            trust: trust.clone(),
            transport: TransportChoice::Auto,
        };
        let host = match &config.advertise {
            Some(host) => host.clone(),
            None => reachable_host(address.ip(), config.host_name.as_deref()),
        };
        let urls = Urls {
            programs: url(host.clone(), &tokens.0),
            workers: url(host, &tokens.1),
            own_worker: url(own_host(address.ip()), &tokens.1),
        };
        Ok(Self {
            scheduler,
            urls,
            _lock: lock,
        })
    }

    /// Ends every stream with a word to its peer.
    pub(crate) async fn stop(self) {
        self.scheduler.stop().await;
    }
}

impl Urls {
    /// What to print when the pool is up. The lines are ready to paste.
    pub(crate) fn banner(&self, state: &str) -> String {
        format!(
            "tensord pool at {}  (state in {state})\n\n\
             programs:  export TENSORD_URL='{}'\n\
             workers:   export TENSORD_URL='{}'\n",
            self.programs.authority(),
            self.programs.reveal(),
            self.workers.reveal(),
        )
    }
}

/// A host under which others reach a listener on `listening`.
pub(crate) fn reachable_host(listening: IpAddr, host_name: Option<&str>) -> String {
    if !listening.is_unspecified() {
        return listening.to_string();
    }
    match (outward_address(listening), host_name) {
        (Some(address), _) => address.to_string(),
        (None, Some(name)) => name.to_owned(),
        (None, None) => own_host(listening),
    }
}

/// The local address that the system would use to reach the world. Connecting
/// a UDP socket sends nothing; it only looks up the route.
fn outward_address(listening: IpAddr) -> Option<IpAddr> {
    // Addresses set aside for documentation: routed like any other.
    let (any, beyond): (SocketAddr, SocketAddr) = match listening {
        IpAddr::V4(_) => (
            (Ipv4Addr::UNSPECIFIED, 0).into(),
            (Ipv4Addr::new(192, 0, 2, 1), 9).into(),
        ),
        IpAddr::V6(_) => (
            (Ipv6Addr::UNSPECIFIED, 0).into(),
            (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9).into(),
        ),
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(beyond).ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

/// A host under which this process itself reaches a listener on `listening`.
fn own_host(listening: IpAddr) -> String {
    match listening {
        IpAddr::V4(address) if address.is_unspecified() => Ipv4Addr::LOCALHOST.to_string(),
        IpAddr::V6(address) if address.is_unspecified() => Ipv6Addr::LOCALHOST.to_string(),
        address => address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use tensord_transport::tls::Fingerprint;

    use super::*;

    #[test]
    fn the_banner_can_be_pasted() {
        let url = |token: &str| PoolUrl {
            token: Some(Secret::new(token)),
            host: "gpu-1.example".into(),
            port: 7461,
            trust: Trust::Pin(Fingerprint([0xab; 32])),
            transport: TransportChoice::Auto,
        };
        let urls = Urls {
            programs: url("client"),
            workers: url("worker"),
            own_worker: url("worker"),
        };
        let pin = "ab".repeat(32);
        let expected = format!(
            "\
tensord pool at gpu-1.example:7461  (state in ~/.local/state/tensord)

programs:  export TENSORD_URL='tensord://client@gpu-1.example:7461?ca=sha256:{pin}'
workers:   export TENSORD_URL='tensord://worker@gpu-1.example:7461?ca=sha256:{pin}'
"
        );
        assert_eq!(urls.banner("~/.local/state/tensord"), expected);
    }

    #[test]
    fn a_host_that_was_chosen_is_the_host_that_is_told() {
        let host = |address: &str| reachable_host(address.parse().unwrap(), Some("gpu-1"));
        assert_eq!(host("10.0.0.5"), "10.0.0.5");
        assert_eq!(host("::1"), "::1");
        assert_ne!(host("0.0.0.0"), "0.0.0.0");
        assert_ne!(host("0.0.0.0"), "127.0.0.1");
        assert_eq!(own_host("0.0.0.0".parse().unwrap()), "127.0.0.1");
        assert_eq!(own_host("::".parse().unwrap()), "::1");
        assert_eq!(own_host("10.0.0.5".parse().unwrap()), "10.0.0.5");
    }
}
