//! A relay in a process of its own that delays and counts traffic.
//!
//! It relays TCP and UDP on one port. Each direction has its own delay line: one thread
//! reads and stamps the data, another sends it when it is due. So order is kept, bandwidth
//! is not limited, and delays are accurate to some 0.1 ms, which an async timer's are not.
//! A second port serves the counts to every client that connects.
//!
//! [`mesh`] is a relay between many hosts that limits bandwidth, too.

mod delay;
mod dialer;
mod limit;
pub(crate) mod mesh;

use std::{
    collections::{HashMap, hash_map::Entry},
    io::{Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
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

use self::delay::start_delay_line;
use crate::process::{announce, start_server};

/// Bytes read at once.
const CHUNK: usize = 64 << 10;

/// Bytes relayed since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RelayedBytes {
    /// Bytes to the server.
    pub(crate) up: u64,
    /// Bytes from the server.
    pub(crate) down: u64,
}

#[derive(Debug, Default)]
struct Counters {
    up: AtomicU64,
    down: AtomicU64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Announcement {
    address: SocketAddr,
    counts: SocketAddr,
}

/// Addresses and delay of a relay.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Route {
    /// The address for clients.
    pub(crate) listen: SocketAddr,
    /// The server's address.
    pub(crate) to: SocketAddr,
    /// One-way delay, added in each direction.
    pub(crate) delay: Duration,
}

/// Relays until the process is killed.
///
/// # Errors
///
/// If a port cannot be bound.
pub(crate) fn run(route: Route) -> Result<()> {
    let counters = Arc::new(Counters::default());
    let tcp = TcpListener::bind(route.listen).with_context(|| format!("{}", route.listen))?;
    let address = tcp.local_addr()?;
    let udp = UdpSocket::bind(address).with_context(|| format!("UDP {address}"))?;
    let counts = TcpListener::bind("127.0.0.1:0")?;
    announce(&Announcement {
        address,
        counts: counts.local_addr()?,
    })?;
    let counted = counters.clone();
    thread::spawn(move || serve_counts(&counts, &counted));
    let counted = counters.clone();
    thread::spawn(move || relay_datagrams(&udp, route, &counted));
    for client in tcp.incoming() {
        let client = client?;
        let server = TcpStream::connect(route.to)?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let (back, onward) = (server.try_clone()?, client.try_clone()?);
        relay_stream(client, server, route.delay, count(&counters, |c| &c.up));
        relay_stream(back, onward, route.delay, count(&counters, |c| &c.down));
    }
    Ok(())
}

/// Returns a function that adds bytes to one of the counters and returns the time at which
/// they passed: now.
fn count(
    counters: &Arc<Counters>,
    which: fn(&Counters) -> &AtomicU64,
) -> impl Fn(usize) -> Instant + Send + 'static {
    let counters = counters.clone();
    move |bytes| {
        which(&counters).fetch_add(bytes as u64, Ordering::Relaxed);
        Instant::now()
    }
}

fn serve_counts(listener: &TcpListener, counters: &Counters) {
    for mut connection in listener.incoming().flatten() {
        let count = RelayedBytes {
            up: counters.up.load(Ordering::Relaxed),
            down: counters.down.load(Ordering::Relaxed),
        };
        // The client may be gone.
        let _ = serde_json::to_writer(&connection, &count).map(|()| connection.flush());
    }
}

/// Relays data from `from` to `to` until `from` ends, then shuts `to` down for writing.
/// `pace` is called with the number of bytes of each read, may block, and returns when the
/// bytes passed; they arrive `delay` later.
fn relay_stream(
    mut from: TcpStream,
    mut to: TcpStream,
    delay: Duration,
    pace: impl Fn(usize) -> Instant + Send + 'static,
) {
    let end = to.try_clone();
    let (delay_line, sending) =
        start_delay_line(delay, move |bytes: Vec<u8>| to.write_all(&bytes).is_ok());
    thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        while let Ok(bytes @ 1..) = from.read(&mut buffer) {
            let passed = pace(bytes);
            if !delay_line.push(buffer[..bytes].to_vec(), passed) {
                break;
            }
        }
        drop(delay_line);
        let _ = sending.join();
        let _ = end.map(|end| end.shutdown(Shutdown::Write));
    });
}

/// Relays datagrams, with a socket to the server for each client, and their replies.
fn relay_datagrams(socket: &UdpSocket, route: Route, counters: &Arc<Counters>) {
    let send = |(server, bytes): (Arc<UdpSocket>, Vec<u8>)| {
        // A datagram that cannot be sent is lost, as on any network.
        let _ = server.send(&bytes);
        true
    };
    let (delay_line, _sending) = start_delay_line(route.delay, send);
    let up = count(counters, |c| &c.up);
    let mut clients: HashMap<SocketAddr, Arc<UdpSocket>> = HashMap::new();
    let mut buffer = vec![0; CHUNK];
    // An error here is a client host's report that the client is gone.
    loop {
        let Ok((bytes, client)) = socket.recv_from(&mut buffer) else {
            continue;
        };
        let passed = up(bytes);
        let server = match clients.entry(client) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let down = count(counters, |c| &c.down);
                match open_return_path(socket, client, route, down) {
                    Ok(server) => new.insert(server),
                    Err(_) => continue,
                }
            }
        };
        delay_line.push((server.clone(), buffer[..bytes].to_vec()), passed);
    }
}

/// Returns a socket to the server whose received datagrams are relayed to `client`.
fn open_return_path(
    socket: &UdpSocket,
    client: SocketAddr,
    route: Route,
    count: impl Fn(usize) -> Instant + Send + 'static,
) -> std::io::Result<Arc<UdpSocket>> {
    let server = Arc::new(UdpSocket::bind(("127.0.0.1", 0))?);
    server.connect(route.to)?;
    let onward = socket.try_clone()?;
    let receiving = server.clone();
    thread::spawn(move || {
        let (delay_line, _sending) = start_delay_line(route.delay, move |bytes: Vec<u8>| {
            let _ = onward.send_to(&bytes, client);
            true
        });
        let mut buffer = vec![0; CHUNK];
        while let Ok(bytes) = receiving.recv(&mut buffer) {
            let passed = count(bytes);
            delay_line.push(buffer[..bytes].to_vec(), passed);
        }
    });
    Ok(server)
}

/// Returns a loopback address of this host other than 127.0.0.1.
///
/// # Errors
///
/// If this host has none.
pub(crate) fn second_loopback() -> Result<IpAddr> {
    let candidates = [IpAddr::from([127, 0, 0, 2]), "::1".parse()?];
    let free = |address: &IpAddr| TcpListener::bind((*address, 0)).is_ok();
    let found = candidates.into_iter().find(free);
    found.context("cannot listen on 127.0.0.2 or on ::1; the relay needs one of them")
}

/// A relay in a process of its own.
pub(crate) struct Relay {
    announced: Announcement,
    _process: Process,
}

impl Relay {
    /// Starts a relay.
    ///
    /// # Errors
    ///
    /// If the process does not start.
    pub(crate) fn start(route: Route, dir: &TempDir) -> Result<Self> {
        let (listen, to) = (route.listen.to_string(), route.to.to_string());
        let delay = route.delay.as_micros().to_string();
        let args = [
            "relay",
            "--listen",
            &listen,
            "--to",
            &to,
            "--delay-us",
            &delay,
        ];
        let (process, announced) = start_server(&args, dir)?;
        Ok(Self {
            announced,
            _process: process,
        })
    }

    /// Returns the address for clients.
    pub(crate) fn address(&self) -> SocketAddr {
        self.announced.address
    }

    /// Returns the bytes relayed so far.
    ///
    /// # Errors
    ///
    /// If the relay is gone.
    pub(crate) fn count(&self) -> Result<RelayedBytes> {
        let connection = TcpStream::connect(self.announced.counts)?;
        serde_json::from_reader(connection).context("the relay sent malformed counts")
    }
}
