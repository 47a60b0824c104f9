//! The peers that are compared: backends that run the same program's ops.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::Result;
use burn::tensor::Device;
use iroh::EndpointAddr;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tensord_client::{Lease, Pool, TensordDevice};
use tensord_testkit::cluster::Process;
use tensord_transport::TransportChoice;
use tokio::runtime::Runtime;

use crate::{
    data::ReadStart,
    pool::{LocalPool, lease},
    process::cpu_time,
    remote,
};

/// Servers count as idle if they used at most [`IDLE_CPU_TIME`] of CPU time within this time.
const IDLE_WINDOW: Duration = Duration::from_millis(100);

/// CPU time that counts as idle: the resolution of the CPU clock.
const IDLE_CPU_TIME: Duration = Duration::from_millis(10);

/// Longest wait for servers to become idle.
const IDLE_DEADLINE: Duration = Duration::from_secs(5);

/// The implementation that runs a peer's ops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Flex, in this process.
    Local,
    /// Burn's remote backend over WebSocket.
    BurnWebSocket,
    /// Burn's remote backend over Iroh.
    BurnIroh,
    /// tensord with its default transport, TCP.
    Tensord,
    /// tensord over QUIC.
    TensordQuic,
    /// tensord over gRPC.
    TensordGrpc,
}

impl Kind {
    /// Returns the prefix of the peer's keys in JSON.
    pub(crate) const fn key(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::BurnWebSocket => "burn_remote",
            Self::BurnIroh => "burn_remote_iroh",
            Self::Tensord => "tensord",
            Self::TensordQuic => "tensord_quic",
            Self::TensordGrpc => "tensord_grpc",
        }
    }

    /// Returns what starts a read of the peer's device.
    pub(crate) const fn start(self) -> ReadStart {
        match self {
            Self::Tensord | Self::TensordQuic | Self::TensordGrpc => ReadStart::Call,
            Self::Local | Self::BurnWebSocket | Self::BurnIroh => ReadStart::Poll,
        }
    }

    /// Returns the peer's name in tables.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Local => "Flex, local",
            Self::BurnWebSocket => "burn-remote, WebSocket",
            Self::BurnIroh => "burn-remote, Iroh",
            Self::Tensord => "tensord, TCP",
            Self::TensordQuic => "tensord, QUIC",
            Self::TensordGrpc => "tensord, gRPC",
        }
    }
}

/// The address of a peer.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) enum Address {
    /// In the process that connects.
    Local,
    /// The address of Burn's server over WebSocket.
    BurnWebSocket(String),
    /// The address of Burn's server over Iroh.
    BurnIroh(EndpointAddr),
    /// The pool's URL.
    Tensord(String),
    /// The pool's URL, with everything over QUIC.
    TensordQuic(String),
    /// The pool's URL, with ops over gRPC.
    TensordGrpc(String),
}

impl Address {
    /// Returns the kind of the peer.
    pub(crate) const fn kind(&self) -> Kind {
        match self {
            Self::Local => Kind::Local,
            Self::BurnWebSocket(_) => Kind::BurnWebSocket,
            Self::BurnIroh(_) => Kind::BurnIroh,
            Self::Tensord(_) => Kind::Tensord,
            Self::TensordQuic(_) => Kind::TensordQuic,
            Self::TensordGrpc(_) => Kind::TensordGrpc,
        }
    }

    /// Connects to the peer. Sockets that this crate opens itself use `runtime`.
    ///
    /// # Errors
    ///
    /// If the peer does not respond.
    pub(crate) fn connect(&self, runtime: &Runtime) -> Result<Peer> {
        let mut leased = None;
        let device = match self {
            Self::Local => Device::flex(),
            Self::BurnWebSocket(address) => remote::websocket_device(address)?,
            Self::BurnIroh(address) => remote::iroh_device(runtime, address.clone())?,
            Self::Tensord(url) | Self::TensordQuic(url) | Self::TensordGrpc(url) => {
                let (pool, lease) = lease(url.parse()?)?;
                let device = lease.devices()[0].clone();
                leased = Some((lease, pool));
                device
            }
        };
        Ok(Peer {
            kind: self.kind(),
            device,
            leased,
        })
    }
}

/// A device to run on, with the lease that keeps it.
pub(crate) struct Peer {
    /// The kind of the peer.
    pub(crate) kind: Kind,
    /// The device of its tensors.
    pub(crate) device: Device,
    leased: Option<(Lease, Pool)>,
}

impl Peer {
    /// Returns the peer's lease, if the peer is tensord.
    pub(crate) fn lease(&self) -> Option<&Lease> {
        self.leased.as_ref().map(|(lease, _)| lease)
    }

    /// Returns the peer's device for code that is generic over Burn's `Backend`.
    pub(crate) fn backend_device(&self) -> Option<TensordDevice> {
        self.lease()?.backend_devices().first().copied()
    }
}

/// The processes of all peers.
pub(crate) struct Servers {
    addresses: Vec<Address>,
    processes: [Process; 2],
    pool: LocalPool,
    _dir: TempDir,
}

impl Servers {
    /// Starts every process.
    ///
    /// # Errors
    ///
    /// If a process does not start.
    pub(crate) fn start() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        // A device for each kind of tensord peer, and one more, because a dropped lease may
        // take a moment to end.
        let pool = LocalPool::start("flex*4")?;
        let (websocket, websocket_address) = remote::start_websocket(&dir)?;
        let (iroh, iroh_address) = remote::start_iroh(&dir)?;
        let url = |transport| pool.url(transport).reveal();
        Ok(Self {
            addresses: vec![
                Address::Local,
                Address::BurnWebSocket(websocket_address),
                Address::BurnIroh(iroh_address),
                Address::Tensord(url(TransportChoice::Auto)),
                Address::TensordQuic(url(TransportChoice::Quic)),
                Address::TensordGrpc(url(TransportChoice::Grpc)),
            ],
            processes: [websocket, iroh],
            pool,
            _dir: dir,
        })
    }

    /// Returns the addresses of all peers.
    pub(crate) fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Returns the address of the peer of `kind`.
    pub(crate) fn address(&self, kind: Kind) -> &Address {
        let found = self.addresses.iter().find(|at| at.kind() == kind);
        found.expect("there is a peer of each kind")
    }

    /// Waits until all processes are idle. Work that a worker does after the end of a
    /// session must not slow down the next contender.
    pub(crate) fn wait_until_idle(&self) {
        let ids = self.processes.iter().map(Process::id);
        let ids: Vec<_> = ids.chain([self.pool.process_id()]).collect();
        wait_until_idle(&ids);
    }
}

/// Waits until the processes with these ids are idle, for at most [`IDLE_DEADLINE`].
pub(crate) fn wait_until_idle(ids: &[u32]) {
    let cpu_used = || ids.iter().map(|&id| cpu_time(id)).sum::<Option<Duration>>();
    let until = Instant::now() + IDLE_DEADLINE;
    let mut before = cpu_used();
    while Instant::now() < until {
        sleep(IDLE_WINDOW);
        let now = cpu_used();
        match (before, now) {
            (Some(before), Some(now)) if now.saturating_sub(before) > IDLE_CPU_TIME => {}
            _ => return,
        }
        before = now;
    }
}

/// All peers, each connected from this process.
pub(crate) struct Peers(Vec<Peer>);

impl Peers {
    /// Connects to all peers.
    ///
    /// # Errors
    ///
    /// If a peer does not respond.
    pub(crate) fn connect(servers: &Servers, runtime: &Runtime) -> Result<Self> {
        let all = servers.addresses().iter();
        let all = all.map(|address| address.connect(runtime));
        Ok(Self(all.collect::<Result<_>>()?))
    }

    /// Returns an iterator over all peers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.0.iter()
    }

    /// Returns the peer of `kind`.
    pub(crate) fn get(&self, kind: Kind) -> &Peer {
        let found = self.0.iter().find(|peer| peer.kind == kind);
        found.expect("there is a peer of each kind")
    }
}
