//! A relay in a process of its own that delays what passes, and counts it.
//!
//! TCP and UDP on one port. Each direction is a line of its own: a thread reads
//! and stamps, another sends when the time has come. So order is kept, bandwidth
//! is not limited, and delays are exact to some 0.1 ms, which an async timer's
//! are not. Counts go to whoever connects to a second port.
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
use tensord_tests::cluster::Process;

use self::delay::line;
use crate::process::{announce, serve};

/// Bytes read at once.
const CHUNK: usize = 64 << 10;

/// Bytes that passed since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Count {
    /// To the server.
    pub(crate) up: u64,
    /// From it.
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

/// Where to listen, where to send on to, and how late.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Route {
    /// Where clients connect.
    pub(crate) listen: SocketAddr,
    /// Where the server is.
    pub(crate) to: SocketAddr,
    /// How much later everything arrives, each way.
    pub(crate) delay: Duration,
}

/// Relays until the process is ended.
///
/// # Errors
///
/// When it cannot listen.
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
    thread::spawn(move || tell_counts(&counts, &counted));
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

/// Adds to one of the counters, and tells when the bytes passed: at once.
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

fn tell_counts(listener: &TcpListener, counters: &Counters) {
    for mut asking in listener.incoming().flatten() {
        let count = Count {
            up: counters.up.load(Ordering::Relaxed),
            down: counters.down.load(Ordering::Relaxed),
        };
        // Whoever asked may be gone.
        let _ = serde_json::to_writer(&asking, &count).map(|()| asking.flush());
    }
}

/// Passes on what `from` sends until it ends, then ends `to`. `pace` is told of
/// bytes as they are read, may take its time, and tells when they passed; they
/// arrive `delay` later.
fn relay_stream(
    mut from: TcpStream,
    mut to: TcpStream,
    delay: Duration,
    pace: impl Fn(usize) -> Instant + Send + 'static,
) {
    let end = to.try_clone();
    let (late, sending) = line(delay, move |bytes: Vec<u8>| to.write_all(&bytes).is_ok());
    thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        while let Ok(bytes @ 1..) = from.read(&mut buffer) {
            let passed = pace(bytes);
            if !late.push(buffer[..bytes].to_vec(), passed) {
                break;
            }
        }
        drop(late);
        let _ = sending.join();
        let _ = end.map(|end| end.shutdown(Shutdown::Write));
    });
}

/// Passes datagrams on, from a socket for each client, and their answers back.
fn relay_datagrams(socket: &UdpSocket, route: Route, counters: &Arc<Counters>) {
    let send = |(server, bytes): (Arc<UdpSocket>, Vec<u8>)| {
        // What cannot be sent is lost, as on any network.
        let _ = server.send(&bytes);
        true
    };
    let (late, _sending) = line(route.delay, send);
    let up = count(counters, |c| &c.up);
    let mut clients: HashMap<SocketAddr, Arc<UdpSocket>> = HashMap::new();
    let mut buffer = vec![0; CHUNK];
    // An error here is an answer from a client's host that the client is gone.
    loop {
        let Ok((bytes, client)) = socket.recv_from(&mut buffer) else {
            continue;
        };
        let passed = up(bytes);
        let server = match clients.entry(client) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let down = count(counters, |c| &c.down);
                match answers(socket, client, route, down) {
                    Ok(server) => new.insert(server),
                    Err(_) => continue,
                }
            }
        };
        late.push((server.clone(), buffer[..bytes].to_vec()), passed);
    }
}

/// A socket to the server whose answers go to `client`.
fn answers(
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
        let (late, _sending) = line(route.delay, move |bytes: Vec<u8>| {
            let _ = onward.send_to(&bytes, client);
            true
        });
        let mut buffer = vec![0; CHUNK];
        while let Ok(bytes) = receiving.recv(&mut buffer) {
            let passed = count(bytes);
            late.push(buffer[..bytes].to_vec(), passed);
        }
    });
    Ok(server)
}

/// An address of this host other than 127.0.0.1 that is not reached from outside.
///
/// # Errors
///
/// When there is none.
pub(crate) fn second_loopback() -> Result<IpAddr> {
    let candidates = [IpAddr::from([127, 0, 0, 2]), "::1".parse()?];
    let free = |address: &IpAddr| TcpListener::bind((*address, 0)).is_ok();
    let found = candidates.into_iter().find(free);
    found.context("neither 127.0.0.2 nor ::1 can be listened on; the relay needs one of them")
}

/// A relay in a process of its own.
pub(crate) struct Relay {
    announced: Announcement,
    _process: Process,
}

impl Relay {
    /// Starts one.
    ///
    /// # Errors
    ///
    /// When it does not start.
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
        let (process, announced) = serve(&args, dir)?;
        Ok(Self {
            announced,
            _process: process,
        })
    }

    /// Where clients connect.
    pub(crate) fn address(&self) -> SocketAddr {
        self.announced.address
    }

    /// What passed so far.
    ///
    /// # Errors
    ///
    /// When the relay is gone.
    pub(crate) fn count(&self) -> Result<Count> {
        let asking = TcpStream::connect(self.announced.counts)?;
        serde_json::from_reader(asking).context("the relay told nonsense")
    }
}
