//! A relay between all hosts of a network, in a process of its own.
//!
//! It listens for each host at the host's own port, on another loopback address. A host's
//! link is shared by all its connections: what the host sends takes one direction, what it
//! receives the other, whichever end dialled. Connections from other processes, such as a
//! program's ops, are delayed but take no link. Datagrams are only delayed, because hosts
//! communicate over TCP.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tensord_testkit::cluster::Process;

use super::{Counters, Route, dialer, limit::RateLimit, relay_datagrams, relay_stream};
use crate::{
    network::Shape,
    process::{announce, start_server},
};

/// How far ahead of its link a connection may be. Equal to the longest delay of a wake-up
/// from sleep, so that such a delay never leaves the link idle.
const MAX_AHEAD: Duration = Duration::from_millis(5);

/// The listening process of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// The port on 127.0.0.1.
    pub(crate) port: u16,
    /// The process id; the same process also dials.
    pub(crate) process: u32,
}

impl FromStr for Endpoint {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (port, process) = text.split_once(':').context("the endpoint has no colon")?;
        Ok(Self {
            port: port.parse()?,
            process: process.parse()?,
        })
    }
}

/// Returns whether the relay can identify the process that dials on this system.
pub(crate) fn is_supported() -> bool {
    dialer::is_supported()
}

#[derive(Debug)]
struct Host {
    endpoint: Endpoint,
    egress: RateLimit,
    ingress: RateLimit,
    sent: AtomicU64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Announcement {
    counts: SocketAddr,
}

/// Relays until the process is killed.
///
/// # Errors
///
/// If a port cannot be bound.
pub(crate) fn run(relay: IpAddr, shape: Shape, endpoints: &[Endpoint]) -> Result<()> {
    let host = |endpoint: &Endpoint| {
        Arc::new(Host {
            endpoint: *endpoint,
            egress: RateLimit::new(shape.rate_mbit),
            ingress: RateLimit::new(shape.rate_mbit),
            sent: AtomicU64::new(0),
        })
    };
    let hosts: Arc<[Arc<Host>]> = endpoints.iter().map(host).collect();
    for host in hosts.iter() {
        let listen = SocketAddr::new(relay, host.endpoint.port);
        let route = Route {
            listen,
            to: SocketAddr::from((Ipv4Addr::LOCALHOST, host.endpoint.port)),
            delay: shape.latency,
        };
        let tcp = TcpListener::bind(listen).with_context(|| format!("{listen}"))?;
        let udp = UdpSocket::bind(listen).with_context(|| format!("UDP {listen}"))?;
        let (hosts, host) = (hosts.clone(), host.clone());
        thread::spawn(move || accept(&tcp, route, &host, &hosts));
        thread::spawn(move || relay_datagrams(&udp, route, &Arc::new(Counters::default())));
    }
    let counts = TcpListener::bind("127.0.0.1:0")?;
    announce(&Announcement {
        counts: counts.local_addr()?,
    })?;
    for connection in counts.incoming().flatten() {
        let sent = hosts.iter().map(|host| host.sent.load(Ordering::Relaxed));
        // The client may be gone.
        let _ = serde_json::to_writer(&connection, &sent.collect::<Vec<_>>());
    }
    Ok(())
}

fn accept(listener: &TcpListener, route: Route, host: &Arc<Host>, hosts: &[Arc<Host>]) {
    let processes: Vec<u32> = hosts.iter().map(|host| host.endpoint.process).collect();
    for client in listener.incoming().flatten() {
        let dialer = client.peer_addr().ok();
        let dialer = dialer.and_then(|address| dialer::owner(address, &processes));
        let dialer = hosts
            .iter()
            .find(|host| Some(host.endpoint.process) == dialer);
        // If the host has ended, the connection is closed, as without a relay.
        let _ = connect_to_host(client, route, host, dialer);
    }
}

/// Connects `client` with the host behind `route`.
fn connect_to_host(
    client: TcpStream,
    route: Route,
    host: &Arc<Host>,
    dialer: Option<&Arc<Host>>,
) -> std::io::Result<()> {
    let server = TcpStream::connect(route.to)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (back, onward) = (server.try_clone()?, client.try_clone()?);
    relay_stream(client, server, route.delay, pace(dialer, Some(host)));
    relay_stream(back, onward, route.delay, pace(Some(host), dialer));
    Ok(())
}

/// Returns a function that reserves the links of both hosts, if there are two, blocks the
/// reader while the links are far behind, and returns when the bytes are through.
fn pace(
    from: Option<&Arc<Host>>,
    to: Option<&Arc<Host>>,
) -> impl Fn(usize) -> Instant + Send + 'static {
    let both = from.cloned().zip(to.cloned());
    move |bytes| {
        let now = Instant::now();
        let Some((from, to)) = &both else { return now };
        from.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        let through = from
            .egress
            .reserve(bytes, now)
            .max(to.ingress.reserve(bytes, now));
        thread::sleep(through.saturating_duration_since(now + MAX_AHEAD));
        through
    }
}

/// The relay, in a process of its own.
pub(crate) struct Mesh {
    announced: Announcement,
    _process: Process,
}

impl Mesh {
    /// Starts a relay that listens on `relay` for all `endpoints`.
    ///
    /// # Errors
    ///
    /// If the process does not start.
    pub(crate) fn start(
        relay: IpAddr,
        shape: Shape,
        endpoints: &[Endpoint],
        dir: &TempDir,
    ) -> Result<Self> {
        let relay = relay.to_string();
        let rate = shape.rate_mbit.to_string();
        let delay = shape.latency.as_micros().to_string();
        let args = [
            "mesh",
            "--relay",
            &relay,
            "--rate-mbit",
            &rate,
            "--delay-us",
            &delay,
        ];
        let mut args = args.map(str::to_owned).to_vec();
        for Endpoint { port, process } in endpoints {
            args.extend(["--endpoint".into(), format!("{port}:{process}")]);
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let (process, announced) = start_server(&args, dir)?;
        Ok(Self {
            announced,
            _process: process,
        })
    }

    /// Returns the bytes that each host has sent to others so far.
    ///
    /// # Errors
    ///
    /// If the relay is gone.
    pub(crate) fn sent(&self) -> Result<Vec<u64>> {
        let connection = TcpStream::connect(self.announced.counts)?;
        serde_json::from_reader(connection).context("the relay sent malformed counts")
    }
}
