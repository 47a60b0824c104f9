//! Time of a read: one small tensor at a time, and 64 requested at once.
//!
//! The baseline is a small frame over the bare link, there and back: the cost of the two
//! processes and the carrier alone. The time in the program's own process before the link
//! is measured as well: a read passes Burn's client and its server on loopback
//! ([`Loopback`]).

use std::time::Instant;

use anyhow::Result;
use burn::tensor::{Tensor, TensorData};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tensord_transport::TransportChoice;

use crate::{
    bench::Bench,
    context::Context,
    data::{self, Upload},
    link::{EchoAddress, EchoServer},
    loopback::Loopback,
    part::after_warmup,
    peer::{Address, Kind, Peer},
    race::Contender,
    report::{Report, add_results, table},
};

/// Number of reads in flight at once.
const READS_IN_FLIGHT: usize = 64;

/// Runs the bench.
///
/// # Errors
///
/// If a peer fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    let dir = tempfile::tempdir()?;
    let server = EchoServer::start(&dir)?;
    let ping = |kind| ReadTurn::Ping(server.address().clone(), kind);
    let mut contenders = vec![
        contender(context, "rtt_us", "bare link, TCP", ping(EchoCarrier::Tcp)),
        contender(
            context,
            "rtt_quic_us",
            "bare link, QUIC",
            ping(EchoCarrier::Quic),
        ),
        contender(
            context,
            "rtt_grpc_us",
            "bare link, gRPC",
            ping(EchoCarrier::Grpc),
        ),
        contender(context, "burn_floor_us", BURN_ALONE, ReadTurn::Burn(1)),
    ];
    let addresses = context.servers()?.addresses();
    contenders.extend(
        addresses
            .iter()
            .map(|address| single_read_contender(context, address)),
    );
    let single = context.race("read", contenders)?;
    let alone = ReadTurn::Burn(READS_IN_FLIGHT);
    let mut contenders = vec![contender(
        context,
        "burn_floor_pipelined_us",
        BURN_ALONE,
        alone,
    )];
    contenders.extend(
        addresses
            .iter()
            .map(|address| pipelined_contender(context, address)),
    );
    let pipelined = context.race("read, pipelined", contenders)?;

    let mut rows = table(&["reads", "peer"], &["µs a read", "quartiles"]);
    add_results(&mut rows, &["one by one"], &single);
    add_results(&mut rows, &["64 at once"], &pipelined);
    let mut json = single.to_json();
    let mut more = pipelined.to_json();
    if let (Some(Value::Object(all)), Some(Value::Object(new))) =
        (json.get_mut("quartiles"), more.remove("quartiles"))
    {
        all.extend(new);
    }
    json.extend(more);
    Ok(Report {
        json: json.into(),
        table: rows.to_string(),
    })
}

/// Label of the measurements of Burn's own path within the program's process.
const BURN_ALONE: &str = "Burn's client and server, one process";

/// The carrier of a bare link.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) enum EchoCarrier {
    Tcp,
    Quic,
    Grpc,
}

/// The work that a turn measures.
#[derive(Serialize, Deserialize)]
pub(super) enum ReadTurn {
    /// The bare link.
    Ping(EchoAddress, EchoCarrier),
    /// Burn's part of this many reads at once.
    Burn(usize),
    /// Reads one at a time.
    One(Address),
    /// Reads that are requested at once.
    Many(Address),
}

fn contender<'a>(context: &'a Context, key: &str, label: &str, turn: ReadTurn) -> Contender<'a> {
    Contender::new(key, label, move |_| context.turn(Bench::Read, &turn))
}

fn single_read_contender<'a>(context: &'a Context, address: &Address) -> Contender<'a> {
    let kind = address.kind();
    let key = format!("{}_us", kind.key());
    contender(context, &key, kind.label(), ReadTurn::One(address.clone()))
}

fn pipelined_contender<'a>(context: &'a Context, address: &Address) -> Contender<'a> {
    let kind = address.kind();
    let key = match kind {
        Kind::Tensord => "pipelined_us".to_owned(),
        kind => format!("{}_pipelined_us", kind.key()),
    };
    contender(context, &key, kind.label(), ReadTurn::Many(address.clone()))
}

/// Takes a turn and returns µs per read.
///
/// # Errors
///
/// If the peer fails.
pub(super) fn turn(context: &Context, turn: &ReadTurn) -> Result<f64> {
    let (count, runtime) = (context.full_or_quick(200, 10), context.runtime());
    match turn {
        ReadTurn::Ping(server, ping) => {
            let choice = match ping {
                EchoCarrier::Tcp => TransportChoice::Tcp,
                EchoCarrier::Quic => TransportChoice::Quic,
                EchoCarrier::Grpc => TransportChoice::Grpc,
            };
            let mut link = server.dial(runtime, choice)?;
            after_warmup(|| micros_each(count, || link.ping(count)))
        }
        ReadTurn::Burn(at_once) => {
            let burn = Loopback::start(runtime, elements())?;
            let rounds = match at_once {
                1 => count,
                _ => many_rounds(count),
            };
            after_warmup(|| {
                micros_each(rounds * at_once, || {
                    (0..rounds).try_for_each(|_| burn.read(*at_once))
                })
            })
        }
        ReadTurn::One(address) => {
            let peer = address.connect(runtime)?;
            let tensor = small(&peer);
            after_warmup(|| {
                micros_each(count, || {
                    let read = || data::into_data(tensor.clone(), Upload::Helper);
                    (0..count).try_for_each(|_| read().map(drop))
                })
            })
        }
        ReadTurn::Many(address) => {
            let peer = address.connect(runtime)?;
            let (tensor, start) = (small(&peer), peer.kind.start());
            let rounds = many_rounds(count);
            let round = || {
                let reads = (0..READS_IN_FLIGHT).map(|_| data::start_read(tensor.clone(), start));
                let reads: Vec<_> = reads.collect();
                reads.into_iter().try_for_each(|read| read.wait().map(drop))
            };
            after_warmup(|| {
                micros_each(rounds * READS_IN_FLIGHT, || {
                    (0..rounds).try_for_each(|_| round())
                })
            })
        }
    }
}

/// Returns the number of rounds of many reads that replace `count` single reads.
fn many_rounds(count: usize) -> usize {
    (count / 10).max(1)
}

/// Runs `act`, which does something `count` times, and returns µs for each.
fn micros_each(count: usize, act: impl FnOnce() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    act()?;
    Ok(begun.elapsed().as_secs_f64() * 1e6 / count as f64)
}

/// Uploads a tensor whose size is negligible to the peer's device.
fn small(peer: &Peer) -> Tensor<1> {
    data::from_data(elements(), &peer.device, Upload::Helper)
}

fn elements() -> TensorData {
    TensorData::from([1f32, 2.0, 3.0, 4.0])
}
