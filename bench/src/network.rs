//! Networks for fleets: hosts on this machine, and links between them that are as
//! slow as asked for.
//!
//! - *Namespaces*: each host is a network namespace, with a link to a common
//!   bridge that `tc` shapes at both ends. Real TCP on a slow network. Only inside
//!   a namespace of the bench's own, see [`inside`](crate::inside).
//! - *Relay*: every host is 127.0.0.1, and tells the others the address of a relay,
//!   which limits and delays what passes between them. Where namespaces cannot be
//!   had, or cannot delay.
//! - *Plain*: every host is 127.0.0.1, and nothing is in between.
//!
//! What runs on the hosts is not known here.

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
pub(crate) use self::namespaces::{hold, move_in};
use crate::{
    inside::Facts,
    relay::{
        mesh::{self, Endpoint, Mesh},
        second_loopback,
    },
};

/// How slow the link of a host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Megabits a second that a host can send, and as many that it can receive at
    /// the same time.
    pub(crate) rate_mbit: u64,
    /// From one host to another, one way.
    pub(crate) latency: Duration,
}

/// Hosts and their links. Ends with this handle.
pub(crate) enum Network {
    /// Nothing in between.
    Plain,
    /// A relay in between.
    Relayed {
        /// What it makes of the links.
        shape: Shape,
        /// Where it listens.
        relay: IpAddr,
    },
    /// A namespace for each host.
    Namespaces(Namespaces),
}

/// What has been connected, and counts.
pub(crate) enum Wires<'a> {
    /// Nobody counts.
    Uncounted,
    /// The hosts' interfaces count.
    Interfaces(&'a Namespaces),
    /// The relay counts.
    Mesh(Mesh),
}

impl Shape {
    /// Bytes a second that the rate allows, headers and all.
    pub(crate) fn bytes_per_second(self) -> f64 {
        self.rate_mbit as f64 * 1e6 / 8.0
    }
}

impl Network {
    /// A network of `hosts` hosts whose links have `shape`, as well as this system
    /// allows.
    ///
    /// # Errors
    ///
    /// When what should work does not.
    pub(crate) fn shaped(facts: Facts, hosts: usize, shape: Shape, dir: &TempDir) -> Result<Self> {
        if facts.namespaces && (shape.latency.is_zero() || facts.delay) {
            return Ok(Self::Namespaces(Namespaces::start(hosts, shape, dir)?));
        }
        if !mesh::works() {
            return Ok(Self::Plain);
        }
        let relay = second_loopback()?;
        Ok(Self::Relayed { shape, relay })
    }

    /// Its name in JSON and tables.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Relayed { .. } => "relay",
            Self::Namespaces(_) => "namespaces",
        }
    }

    /// Runs `program` on `host` when it is spawned.
    pub(crate) fn command(&self, host: usize, program: &Path) -> Command {
        match self {
            Self::Plain | Self::Relayed { .. } => Command::new(program),
            Self::Namespaces(namespaces) => namespaces.command(host, program),
        }
    }

    /// Where a process on `host` listens.
    pub(crate) fn listen_address(&self, host: usize) -> IpAddr {
        match self {
            Self::Plain | Self::Relayed { .. } => Ipv4Addr::LOCALHOST.into(),
            Self::Namespaces(namespaces) => namespaces.address(host),
        }
    }

    /// Where other hosts reach a process on `host`, at the same port.
    pub(crate) fn told_address(&self, host: usize) -> IpAddr {
        match self {
            Self::Relayed { relay, .. } => *relay,
            Self::Plain | Self::Namespaces(_) => self.listen_address(host),
        }
    }

    /// Where a process listens that runs in this one's place and is to be reached
    /// from every host.
    pub(crate) fn middle_address(&self) -> IpAddr {
        match self {
            Self::Plain | Self::Relayed { .. } => Ipv4Addr::LOCALHOST.into(),
            Self::Namespaces(namespaces) => namespaces.middle(),
        }
    }

    /// Connects what listens on the hosts, one endpoint for each.
    ///
    /// # Errors
    ///
    /// When the relay does not start.
    pub(crate) fn connect(&self, endpoints: &[Endpoint], dir: &TempDir) -> Result<Wires<'_>> {
        Ok(match self {
            Self::Plain => Wires::Uncounted,
            Self::Relayed { shape, relay } => {
                Wires::Mesh(Mesh::start(*relay, *shape, endpoints, dir)?)
            }
            Self::Namespaces(namespaces) => Wires::Interfaces(namespaces),
        })
    }
}

impl Wires<'_> {
    /// Bytes that each host has sent so far, if anybody counts. An interface counts
    /// everything, with one header for up to 64 KiB; the relay counts what TCP
    /// carries between two hosts.
    ///
    /// # Errors
    ///
    /// When whoever counts is gone.
    pub(crate) fn sent(&self) -> Result<Option<Vec<u64>>> {
        match self {
            Self::Uncounted => Ok(None),
            Self::Interfaces(namespaces) => namespaces.sent().map(Some),
            Self::Mesh(mesh) => mesh.sent().map(Some),
        }
    }
}
