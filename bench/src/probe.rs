//! The throughput and round trip of a link between two hosts: plain TCP, one way.
//!
//! This binary runs on both hosts as a server that receives bytes, and that sends bytes to
//! the other server on request. The server measures the time itself, so its distance from
//! this process does not matter.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tensord_testkit::cluster::Process;

use crate::{
    network::{Network, Shape},
    process::{announce, read_announcement_within},
    relay::mesh::Endpoint,
};

/// Timeout of one reply.
const DEADLINE: Duration = Duration::from_secs(60);

/// Number of round trips, of which the fastest counts.
const ROUND_TRIPS: usize = 5;

/// Number of measurements of a link. The best one counts, because the result serves as a
/// bound: other load on the machine can only reduce it.
const RUNS: usize = 5;

/// Bytes of one measurement where the link's rate is not limited.
const PLAIN_BYTES: u64 = 1 << 30;

const CHUNK: usize = 256 << 10;

/// A connection's first byte: payload bytes follow, or an [`SendRequest`].
const PAYLOAD_BYTE: u8 = b'b';
const REQUEST_BYTE: u8 = b'o';

/// A request to send bytes to a server.
#[derive(Debug, Serialize, Deserialize)]
struct SendRequest {
    to: SocketAddr,
    bytes: u64,
}

/// Throughput and round trip of a link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct LinkMeasurement {
    /// GB/s of payload, one way.
    pub(crate) gbs: f64,
    /// Round trip in ms.
    pub(crate) rtt_ms: f64,
}

/// Receives and sends bytes until the process is killed.
///
/// # Errors
///
/// If the port cannot be bound.
pub(crate) fn serve(listen: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(listen).with_context(|| format!("{listen}"))?;
    announce(&listener.local_addr()?)?;
    for stream in listener.incoming().flatten() {
        // The client notices an error, because the connection ends.
        thread::spawn(move || serve_connection(stream));
    }
    Ok(())
}

fn serve_connection(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    if kind[0] == PAYLOAD_BYTE {
        return receive_payloads(stream);
    }
    let request: SendRequest = serde_json::from_reader(&stream)?;
    serde_json::to_writer(&stream, &send(&request)?)?;
    Ok(stream.shutdown(Shutdown::Write)?)
}

/// Receives payloads, each preceded by its length, and acknowledges each.
fn receive_payloads(mut stream: TcpStream) -> Result<()> {
    let mut chunk = vec![0; CHUNK];
    let mut length = [0; 8];
    while stream.read_exact(&mut length).is_ok() {
        let mut left = u64::from_be_bytes(length);
        while left > 0 {
            let most = chunk.len().min(usize::try_from(left)?);
            let bytes = stream.read(&mut chunk[..most])?;
            ensure!(bytes > 0, "the connection ended early");
            left -= bytes as u64;
        }
        stream.write_all(b"!")?;
    }
    Ok(())
}

/// Sends the bytes of `request` and measures the time. Sends a quarter of them first, so that
/// TCP reaches its steady rate.
fn send(request: &SendRequest) -> Result<LinkMeasurement> {
    let mut stream = TcpStream::connect(request.to)?;
    stream.set_nodelay(true)?;
    stream.write_all(&[PAYLOAD_BYTE])?;
    let chunk = vec![7; CHUNK];
    let mut payload = |bytes: u64| {
        let begun = Instant::now();
        stream.write_all(&bytes.to_be_bytes())?;
        let mut left = bytes;
        while left > 0 {
            let some = left.min(CHUNK as u64);
            stream.write_all(&chunk[..some as usize])?;
            left -= some;
        }
        stream.read_exact(&mut [0])?;
        anyhow::Ok(begun.elapsed().as_secs_f64())
    };
    payload(request.bytes / 4)?;
    let mut round_trip = f64::MAX;
    for _ in 0..ROUND_TRIPS {
        round_trip = round_trip.min(payload(0)?);
    }
    let took = payload(request.bytes)?;
    // On a very fast link the round trip can be most of the time; at most half of the time
    // is taken off for it.
    let sending = (took - round_trip).max(took / 2.0);
    Ok(LinkMeasurement {
        gbs: request.bytes as f64 / sending / 1e9,
        rtt_ms: round_trip * 1000.0,
    })
}

/// Measures the link from the first host of `network` to the second.
///
/// # Errors
///
/// If a process does not start or does not respond.
pub(crate) fn measure(network: &Network, shape: Shape, dir: &TempDir) -> Result<LinkMeasurement> {
    let servers = [
        start(network, 0, dir.path())?,
        start(network, 1, dir.path())?,
    ];
    let endpoint = |(process, address): &(Process, SocketAddr)| Endpoint {
        port: address.port(),
        process: process.id(),
    };
    let _wires = network.connect(&servers.each_ref().map(endpoint), dir)?;
    let bytes = match network {
        Network::Plain => PLAIN_BYTES,
        // The bytes of half a second.
        Network::Relayed { .. } | Network::Namespaces(_) => shape.bytes_per_second() as u64 / 2,
    };
    let to = SocketAddr::new(network.advertised_address(1), servers[1].1.port());
    let request = SendRequest { to, bytes };
    let found: Vec<LinkMeasurement> = (0..RUNS)
        .map(|_| request_measurement(servers[0].1, &request))
        .collect::<Result<_>>()?;
    Ok(LinkMeasurement {
        gbs: found.iter().map(|found| found.gbs).fold(0.0, f64::max),
        rtt_ms: found
            .iter()
            .map(|found| found.rtt_ms)
            .fold(f64::MAX, f64::min),
    })
}

fn start(network: &Network, host: usize, dir: &Path) -> Result<(Process, SocketAddr)> {
    let mut command: Command = network.command(host, &std::env::current_exe()?);
    let listen = SocketAddr::new(network.listen_address(host), 0).to_string();
    command.args(["probe", "--listen", &listen]);
    let process = Process::spawn(command, dir.join(format!("probe-{host}.log")));
    let address = read_announcement_within(&process, DEADLINE)?;
    Ok((process, address))
}

fn request_measurement(server: SocketAddr, request: &SendRequest) -> Result<LinkMeasurement> {
    let mut stream = TcpStream::connect_timeout(&server, DEADLINE)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.write_all(&[REQUEST_BYTE])?;
    serde_json::to_writer(&stream, request)?;
    stream.shutdown(Shutdown::Write)?;
    serde_json::from_reader(&stream).context("the link could not be measured")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_sent_and_timed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let taking = thread::spawn(move || serve_connection(listener.accept().unwrap().0));
        let found = send(&SendRequest { to, bytes: 4 << 20 }).unwrap();
        assert!(found.gbs > 0.0 && found.rtt_ms > 0.0, "{found:?}");
        taking.join().unwrap().unwrap();
    }
}
