//! The cost of a tiny op, end to end.
//!
//! A sample is the time of a long chain of additions to a tensor of one element and one
//! read at its end, divided by the number of additions. Programs use the `Tensor` API; the
//! `Backend` level is below it, where tensord needs no bridge. There, Burn's router over a
//! client that discards ops is the floor: everything that is built on the router costs a
//! program at least that. Processing ops in parallel with the program needs another thread,
//! which costs more, whatever that thread does: an op has 616 bytes, which move from one
//! core's cache to another's. Because these ops are never executed, the floors are compared
//! by the time until the program has issued all ops, for a chain as long as a few training
//! steps: in an endless chain, backpressure would slow the program to the pace of the
//! worker, which the other figures show. Such chains are short, so some unmeasured ones
//! come first: until then ops are stored in memory that is new to the process.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use burn::tensor::{Tensor, TensorData};
use burn_backend::Backend;
use burn_flex::{Flex, FlexDevice};
use serde::{Deserialize, Serialize};
use tensord_client::Tensord;

use crate::{
    bench::Bench,
    context::Context,
    data::{self, Upload},
    discard::{Discard, DiscardDevice},
    part::{after_warmup, after_warmups},
    peer::{Address, Kind, Peer},
    race::Contender,
    report::{Report, add_results, table},
};

/// Runs the bench.
///
/// # Errors
///
/// If a peer fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    let servers = context.servers()?;
    let contender = |key: &str, label: &str, turn: OpsTurn| {
        Contender::new(key, label, move |_| context.turn(Bench::Ops, &turn))
    };
    let mut contenders = Vec::new();
    for address in servers.addresses() {
        let kind = address.kind();
        let key = format!("{}_us", kind.key());
        let turn = OpsTurn::Tensors(address.clone(), Until::Read);
        contenders.push(contender(&key, kind.label(), turn));
    }
    let ours = || servers.address(Kind::Tensord).clone();
    let levels = [
        (
            "tensord_issue_us",
            "tensord, TCP, until issued",
            OpsTurn::Tensors(ours(), Until::Issued),
        ),
        (
            "backend_whole_us",
            "tensord, TCP, Backend level",
            OpsTurn::Tensord(ours(), Until::Read),
        ),
        (
            "local_backend_us",
            "Flex, Backend level",
            OpsTurn::Flex(Until::Read),
        ),
        (
            "backend_us",
            "tensord, TCP, Backend level, until issued",
            OpsTurn::Tensord(ours(), Until::Issued),
        ),
        (
            "handover_floor_us",
            "Burn's router, and another thread gets the ops, until issued",
            OpsTurn::Handover,
        ),
        (
            "router_floor_us",
            "Burn's router alone, until issued",
            OpsTurn::Router,
        ),
    ];
    contenders.extend(levels.map(|(key, label, turn)| contender(key, label, turn)));
    let found = context.race("ops", contenders)?;
    let mut rows = table(&["peer"], &["µs an op", "quartiles"]);
    add_results(&mut rows, &[], &found);
    Ok(Report {
        json: found.to_json().into(),
        table: rows.to_string(),
    })
}

/// The work that a turn measures.
#[derive(Serialize, Deserialize)]
pub(super) enum OpsTurn {
    /// The `Tensor` API.
    Tensors(Address, Until),
    /// tensord's `Backend`.
    Tensord(Address, Until),
    /// Flex's `Backend`.
    Flex(Until),
    /// Burn's router, which hands its ops to another thread.
    Handover,
    /// Burn's router.
    Router,
}

/// The end of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Until {
    /// The program has issued all ops.
    Issued,
    /// The program has read the result.
    Read,
}

/// Number of chains that warm up, at the `Backend` level, where ops are timed until they
/// are issued.
const WARMUP_CHAINS: usize = 20;

/// Takes a turn and returns µs per op.
///
/// # Errors
///
/// If the peer fails.
pub(super) fn turn(context: &Context, turn: &OpsTurn) -> Result<f64> {
    let runtime = context.runtime();
    let count = context.full_or_quick(20_000, 500);
    // Length of a chain at the `Backend` level.
    let chain_len = |until| match until {
        Until::Read => count,
        Until::Issued => context.full_or_quick(2_000, 500),
    };
    match turn {
        OpsTurn::Tensors(address, until) => {
            let peer = address.connect(runtime)?;
            after_warmup(|| tensors(&peer, count, *until))
        }
        OpsTurn::Tensord(address, until) => {
            let peer = address.connect(runtime)?;
            let device = peer.backend_device().context("tensord has a device")?;
            until.with_warmup(|| backend::<Tensord>(device, chain_len(*until), *until))
        }
        OpsTurn::Flex(until) => {
            after_warmup(|| backend::<Flex>(FlexDevice, chain_len(*until), *until))
        }
        OpsTurn::Handover => discard(DiscardDevice::OtherThread, chain_len(Until::Issued)),
        OpsTurn::Router => discard(DiscardDevice::SameThread, chain_len(Until::Issued)),
    }
}

fn discard(device: DiscardDevice, count: usize) -> Result<f64> {
    Until::Issued.with_warmup(|| backend::<Discard>(device, count, Until::Issued))
}

fn tensors(peer: &Peer, count: usize, until: Until) -> Result<f64> {
    let zero: Tensor<1> = data::from_data(TensorData::from([0f32]), &peer.device, Upload::Helper);
    let clock = OpTimer::start(count);
    let sum = (0..count).fold(zero, |sum, _| sum + 1.0);
    let issued = clock.micros();
    let sum = data::scalar(sum)?;
    let read = clock.micros();
    ensure!(sum == count as f32, "the sum is {sum}, not {count}");
    Ok(until.of(issued, read))
}

fn backend<B: Backend>(device: B::Device, count: usize, until: Until) -> Result<f64> {
    let zero = B::float_from_data(TensorData::from([0f32]), &device);
    let clock = OpTimer::start(count);
    let sum = (0..count).fold(zero, |sum, _| B::float_add_scalar(sum, 1.0.into()));
    let issued = clock.micros();
    let read = burn_std::future::block_on(B::float_into_data(sum));
    read.context("cannot read the sum")?;
    Ok(until.of(issued, clock.micros()))
}

impl Until {
    /// Returns the time of a chain in a process that has warmed up.
    fn with_warmup(self, chain: impl FnMut() -> Result<f64>) -> Result<f64> {
        match self {
            Self::Issued => after_warmups(WARMUP_CHAINS, chain),
            Self::Read => after_warmup(chain),
        }
    }

    fn of(self, issued: f64, read: f64) -> f64 {
        match self {
            Self::Issued => issued,
            Self::Read => read,
        }
    }
}

/// A clock that returns µs per op.
struct OpTimer {
    begun: Instant,
    count: usize,
}

impl OpTimer {
    fn start(count: usize) -> Self {
        Self {
            begun: Instant::now(),
            count,
        }
    }

    fn micros(&self) -> f64 {
        self.begun.elapsed().as_secs_f64() * 1e6 / self.count as f64
    }
}
