//! The peers that are compared: where the same program's ops may run.

use anyhow::Result;
use burn::tensor::Device;
use tempfile::TempDir;
use tensord_client::{Lease, Pool, TensordDevice};
use tensord_tests::cluster::Process;
use tensord_transport::TransportChoice;
use tokio::runtime::Runtime;

use crate::{data::Start, pool::LocalPool, remote};

/// What carries a peer's ops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Flex, in this process.
    Local,
    /// Burn's remote backend over WebSocket.
    BurnWebSocket,
    /// Burn's remote backend over Iroh.
    BurnIroh,
    /// tensord over QUIC.
    TensordQuic,
    /// tensord over gRPC.
    TensordGrpc,
}

impl Kind {
    /// The start of its names in JSON.
    pub(crate) const fn key(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::BurnWebSocket => "burn_remote",
            Self::BurnIroh => "burn_remote_iroh",
            Self::TensordQuic => "tensord",
            Self::TensordGrpc => "tensord_grpc",
        }
    }

    /// What starts a read of its device.
    pub(crate) const fn start(self) -> Start {
        match self {
            Self::TensordQuic | Self::TensordGrpc => Start::Call,
            Self::Local | Self::BurnWebSocket | Self::BurnIroh => Start::Poll,
        }
    }

    /// Its name in tables.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Local => "Flex, local",
            Self::BurnWebSocket => "burn-remote, WebSocket",
            Self::BurnIroh => "burn-remote, Iroh",
            Self::TensordQuic => "tensord, QUIC",
            Self::TensordGrpc => "tensord, gRPC",
        }
    }
}

/// A device to run on, with whatever keeps it there.
pub(crate) struct Peer {
    /// Which one.
    pub(crate) kind: Kind,
    /// Where its tensors live.
    pub(crate) device: Device,
    held: Held,
}

enum Held {
    Nothing,
    Server { _process: Process },
    Lease { lease: Lease, _pool: Pool },
}

impl Peer {
    /// The lease behind it, if it is tensord.
    pub(crate) fn lease(&self) -> Option<&Lease> {
        match &self.held {
            Held::Lease { lease, .. } => Some(lease),
            Held::Nothing | Held::Server { .. } => None,
        }
    }

    /// Its device for code that is generic over Burn's `Backend`.
    pub(crate) fn backend_device(&self) -> Option<TensordDevice> {
        self.lease()?.backend_devices().first().copied()
    }
}

/// All peers, and the processes behind them.
pub(crate) struct Peers {
    all: Vec<Peer>,
    // After `all`, so that leases go before their pool.
    _pool: LocalPool,
    _dir: TempDir,
}

impl Peers {
    /// Starts every process and connects to it.
    ///
    /// # Errors
    ///
    /// When one does not start.
    pub(crate) fn start(runtime: &Runtime) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let pool = LocalPool::start("flex*2")?;
        let mut all = vec![Peer {
            kind: Kind::Local,
            device: Device::flex(),
            held: Held::Nothing,
        }];
        let (process, address) = remote::start_websocket(&dir)?;
        all.push(Peer {
            kind: Kind::BurnWebSocket,
            device: remote::websocket_device(&address)?,
            held: Held::Server { _process: process },
        });
        let (process, device) = remote::start_iroh(runtime, &dir)?;
        all.push(Peer {
            kind: Kind::BurnIroh,
            device,
            held: Held::Server { _process: process },
        });
        let carriers = [
            (Kind::TensordQuic, TransportChoice::Auto),
            (Kind::TensordGrpc, TransportChoice::Grpc),
        ];
        for (kind, transport) in carriers {
            all.push(tensord(kind, &pool, transport)?);
        }
        Ok(Self {
            all,
            _pool: pool,
            _dir: dir,
        })
    }

    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.all.iter()
    }

    /// The one of `kind`.
    pub(crate) fn get(&self, kind: Kind) -> &Peer {
        let found = self.all.iter().find(|peer| peer.kind == kind);
        found.expect("there is a peer of each kind")
    }
}

fn tensord(kind: Kind, pool: &LocalPool, transport: TransportChoice) -> Result<Peer> {
    let (pool, lease) = pool.lease(transport)?;
    Ok(Peer {
        kind,
        device: lease.devices()[0].clone(),
        held: Held::Lease { lease, _pool: pool },
    })
}
