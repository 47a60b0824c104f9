//! A pool whose scheduler runs in this process: the scheduler, its secrets and its URLs.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::SystemTime,
};

use tensord_transport::{PoolUrl, Secret, TransportChoice, tls::Trust};

use crate::{
    audit::Audit,
    config::SchedulerConfig,
    failure::Failure,
    scheduler::{
        Access, Enrolment, LeaseRecords, Options, PastUseFile, RedbTenants, Role, Scheduler,
        Tenants, UsageLog,
    },
    state::{SchedulerLock, StateDir},
};

/// A running pool.
pub(crate) struct LocalPool {
    /// The scheduler.
    pub(crate) scheduler: Scheduler,
    /// The pool's URLs.
    pub(crate) urls: Urls,
    _lock: SchedulerLock,
}

/// The URLs of a pool.
pub(crate) struct Urls {
    /// The URL without a token.
    pub(crate) pool: PoolUrl,
    /// The URL for programs, with the token from `client-token` in the state directory;
    /// `None` if that token is not valid any more.
    pub(crate) programs: Option<PoolUrl>,
    /// The URL for workers, with the token from `worker-token` in the state directory; `None`
    /// if that token is not valid any more.
    pub(crate) workers: Option<PoolUrl>,
    /// The URL for workers on this host: it has a local address, whatever `advertise` is, and
    /// the token of `workers`, or no token if that is not valid any more.
    pub(crate) own_worker: PoolUrl,
}

impl LocalPool {
    /// Starts the pool whose secrets are in the configured state directory.
    pub(crate) async fn start(config: &SchedulerConfig) -> Result<Self, Failure> {
        let state = StateDir::open(&config.state.path)?;
        let lock = state.lock_scheduler()?;
        let secrets = state.pool_secrets()?;
        let audit =
            Audit::open(config.audit.clone()).map_err(Failure::system("write the audit log"))?;
        let mut options = Options::new(config.listen, state.raise_grant_term(SystemTime::now())?);
        options.audit = audit;
        options.timing.lease_token_life = config.lease_token_life;
        options.engine.half_life = config.half_life;
        options.engine.reserve_after = config.reserve_after;
        options.engine.idle_timeout = config.idle_timeout;
        options.past_use = Some(PastUseFile::open(&state)?);
        options.usage = Some(UsageLog::open(&state)?);
        let access = Access::open(StateDir::open(&config.state.path)?, &secrets)?;
        let enrolment = Enrolment::open(&state, &access)?;
        let tenants = Tenants::open(Box::new(RedbTenants::open(&state)?), &access)?;
        let records = LeaseRecords::open(&state)?;
        let trust = Trust::Pin(secrets.identity.fingerprint());
        let token = |role| access.url_token(role, &secrets);
        let (programs, workers) = (token(Role::Client), token(Role::Worker));
        let scheduler =
            Scheduler::start(options, secrets, access, enrolment, tenants, records).await?;
        let address = scheduler.address();
        let url = |host: &str, token: Option<Secret>| PoolUrl {
            token,
            host: host.into(),
            port: address.port(),
            trust: trust.clone(),
            transport: TransportChoice::Auto,
        };
        let host = match &config.advertise {
            Some(host) => host.clone(),
            None => reachable_host(address.ip(), config.host_name.as_deref()),
        };
        let urls = Urls {
            own_worker: url(&own_host(address.ip()), workers.clone()),
            programs: programs.map(|token| url(&host, Some(token))),
            workers: workers.map(|token| url(&host, Some(token))),
            pool: url(&host, None),
        };
        state.set_pool_url(&urls.pool)?;
        Ok(Self {
            scheduler,
            urls,
            _lock: lock,
        })
    }

    /// Stops the scheduler, which announces the shutdown to each peer and ends its stream.
    pub(crate) async fn stop(self) {
        self.scheduler.stop().await;
    }
}

impl Urls {
    /// Returns the text to print when the pool is up. Its `export` lines can be pasted into
    /// a shell.
    pub(crate) fn banner(&self, state: &str) -> String {
        let line = |url: &Option<PoolUrl>, role: Role| match url {
            Some(url) => format!("export TENSORD_URL='{}'", url.reveal()),
            None => format!("make a URL with `tensord token create --role {role}`"),
        };
        format!(
            "tensord pool at {}  (state in {state})\n\n\
             programs:  {}\n\
             workers:   {}\n",
            self.pool.authority(),
            line(&self.programs, Role::Client),
            line(&self.workers, Role::Worker),
        )
    }
}

/// Returns a host under which others reach a listener on `listening`.
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

/// Returns the local address from which the system would send to other networks, if
/// there is one. Connecting a UDP socket sends nothing; it only looks up the route.
fn outward_address(listening: IpAddr) -> Option<IpAddr> {
    // The destinations are reserved for documentation, but routed like others.
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

/// Returns a host under which this host itself reaches a listener on `listening`.
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
        let urls = |workers| Urls {
            pool: url("client"),
            programs: Some(url("client")),
            workers,
            own_worker: url("worker"),
        };
        let pin = "ab".repeat(32);
        let banner = |last: &str| {
            format!(
                "\
tensord pool at gpu-1.example:7461  (state in ~/.local/state/tensord)

programs:  export TENSORD_URL='tensord://client@gpu-1.example:7461?ca=sha256:{pin}'
workers:   {last}
"
            )
        };
        let last =
            format!("export TENSORD_URL='tensord://worker@gpu-1.example:7461?ca=sha256:{pin}'");
        let state = "~/.local/state/tensord";
        assert_eq!(urls(Some(url("worker"))).banner(state), banner(&last));
        assert_eq!(
            urls(None).banner(state),
            banner("make a URL with `tensord token create --role worker`")
        );
    }

    #[test]
    fn chosen_host_is_used_in_urls() {
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
