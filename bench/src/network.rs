//! Networks for fleets: hosts on this machine, and links between them with a given rate and
//! latency.
//!
//! - *Namespaces*: each host is a network namespace, with a link to a common bridge that
//!   `tc` shapes at both ends. This is real TCP on a slow network. It works only inside a
//!   namespace of the bench's own, see [`namespace_entry`](crate::namespace_entry).
//! - *Relay*: every host is 127.0.0.1 and advertises the address of a relay, which limits
//!   and delays the traffic between hosts. Used where namespaces are not available or
//!   cannot delay.
//! - *Plain*: every host is 127.0.0.1, without rate limit or delay.
//!
//! This module does not depend on the programs that run on the hosts.

mod namespaces;

use std::{
    net::{IpAddr, Ipv4Addr},
    path::Path,
    process::Command,
    time::Duration,
};

use anyhow::Result;
use tempfile::TempDir;

use self::namespaces::Namespaces;
pub(crate) use self::namespaces::{hold_namespace, set_up_namespace};
use crate::{
    namespace_entry::NetworkFeatures,
    relay::{
        mesh::{self, Endpoint, Mesh},
        second_loopback,
    },
};

/// Rate and latency of a host's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Rate in Mbit/s in which a host can send and, at the same time, receive.
    pub(crate) rate_mbit: u64,
    /// One-way latency from one host to another.
    pub(crate) latency: Duration,
}

/// Hosts and their links. They end when this handle is dropped.
pub(crate) enum Network {
    /// All hosts on loopback, without a relay.
    Plain,
    /// All hosts on loopback, with a relay between them.
    Relayed {
        /// The rate and latency that the relay imposes.
        shape: Shape,
        /// The address on which the relay listens.
        relay: IpAddr,
    },
    /// A namespace for each host.
    Namespaces(Namespaces),
}

/// The connected links, and what counts their traffic.
pub(crate) enum ConnectedLinks<'a> {
    /// Traffic is not counted.
    Uncounted,
    /// The hosts' network interfaces count.
    Interfaces(&'a Namespaces),
    /// The relay counts.
    Mesh(Mesh),
}

impl Shape {
    /// Returns the rate in bytes per second, headers included.
    pub(crate) fn bytes_per_second(self) -> f64 {
        self.rate_mbit as f64 * 1e6 / 8.0
    }
}

impl Network {
    /// Creates a network of `hosts` hosts whose links have `shape`, or the best
    /// approximation that this system allows.
    ///
    /// # Errors
    ///
    /// If the setup fails where it should work.
    pub(crate) fn shaped(
        facts: NetworkFeatures,
        hosts: usize,
        shape: Shape,
        dir: &TempDir,
    ) -> Result<Self> {
        if facts.namespaces && (shape.latency.is_zero() || facts.delay) {
            return Ok(Self::Namespaces(Namespaces::start(hosts, shape, dir)?));
        }
        if !mesh::is_supported() {
            return Ok(Self::Plain);
        }
        let relay = second_loopback()?;
        Ok(Self::Relayed { shape, relay })
    }

    /// Returns the network's name in JSON and tables.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Relayed { .. } => "relay",
            Self::Namespaces(_) => "namespaces",
        }
    }

    /// Returns a command that runs `program` on `host`.
    pub(crate) fn command(&self, host: usize, program: &Path) -> Command {
        match self {
            Self::Plain | Self::Relayed { .. } => Command::new(program),
            Self::Namespaces(namespaces) => namespaces.command(host, program),
        }
    }

    /// Returns the address on which a process on `host` listens.
    pub(crate) fn listen_address(&self, host: usize) -> IpAddr {
        match self {
            Self::Plain | Self::Relayed { .. } => Ipv4Addr::LOCALHOST.into(),
            Self::Namespaces(namespaces) => namespaces.address(host),
        }
    }

    /// Returns the address at which other hosts reach a process on `host`, with the same
    /// port.
    pub(crate) fn advertised_address(&self, host: usize) -> IpAddr {
        match self {
            Self::Relayed { relay, .. } => *relay,
            Self::Plain | Self::Namespaces(_) => self.listen_address(host),
        }
    }

    /// Returns the address for a process that runs in this process's namespace and must be
    /// reachable from every host.
    pub(crate) fn hub_address(&self) -> IpAddr {
        match self {
            Self::Plain | Self::Relayed { .. } => Ipv4Addr::LOCALHOST.into(),
            Self::Namespaces(namespaces) => namespaces.bridge_address(),
        }
    }

    /// Connects the hosts; `endpoints` has one listening process for each host.
    ///
    /// # Errors
    ///
    /// If the relay does not start.
    pub(crate) fn connect(
        &self,
        endpoints: &[Endpoint],
        dir: &TempDir,
    ) -> Result<ConnectedLinks<'_>> {
        Ok(match self {
            Self::Plain => ConnectedLinks::Uncounted,
            Self::Relayed { shape, relay } => {
                ConnectedLinks::Mesh(Mesh::start(*relay, *shape, endpoints, dir)?)
            }
            Self::Namespaces(namespaces) => ConnectedLinks::Interfaces(namespaces),
        })
    }
}

impl ConnectedLinks<'_> {
    /// Returns the bytes that each host has sent so far, if they are counted. An interface
    /// counts everything, with one header for up to 64 KiB; the relay counts the TCP
    /// payload between two hosts.
    ///
    /// # Errors
    ///
    /// If the counters cannot be read.
    pub(crate) fn sent(&self) -> Result<Option<Vec<u64>>> {
        match self {
            Self::Uncounted => Ok(None),
            Self::Interfaces(namespaces) => namespaces.sent().map(Some),
            Self::Mesh(mesh) => mesh.sent().map(Some),
        }
    }
}
