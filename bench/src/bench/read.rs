//! Time of a read: one small tensor at a time, and 64 asked for at once.
//!
//! The yardstick is a small frame over the bare link, there and back: what the
//! two processes and the carrier cost without anything on top.

use std::time::Instant;

use anyhow::Result;
use burn::tensor::{Tensor, TensorData};
use serde_json::Value;
use tensord_transport::TransportChoice;

use crate::{
    context::Context,
    data::{self, Upload},
    link::{Echo, EchoServer},
    peer::{Kind, Peer},
    race::Contender,
    report::{Report, add_findings, table},
};

/// Reads on the way at once.
const OUTSTANDING: usize = 64;

/// Measures.
///
/// # Errors
///
/// When a peer fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    let dir = tempfile::tempdir()?;
    let server = EchoServer::start(&dir)?;
    let quic = server.dial(context.runtime(), TransportChoice::Quic)?;
    let grpc = server.dial(context.runtime(), TransportChoice::Grpc)?;
    let count = context.pick(200, 10);
    let mut contenders = vec![
        ping("rtt_us", "bare link, QUIC", quic, count),
        ping("rtt_grpc_us", "bare link, gRPC", grpc, count),
    ];
    contenders.extend(context.peers()?.iter().map(|peer| one(peer, count)));
    let single = context.race("read", contenders)?;
    let contenders = context.peers()?.iter().map(|peer| many(peer, count));
    let pipelined = context.race("read, pipelined", contenders.collect())?;

    let mut rows = table(&["reads", "peer"], &["µs a read", "quartiles"]);
    add_findings(&mut rows, &["one by one"], &single);
    add_findings(&mut rows, &["64 at once"], &pipelined);
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
        table: rows,
    })
}

fn micros(since: Instant, count: usize) -> f64 {
    since.elapsed().as_secs_f64() * 1e6 / count as f64
}

fn ping<'a>(key: &str, label: &str, mut link: Echo<'a>, count: usize) -> Contender<'a> {
    Contender::new(key, label, move |_| {
        let begun = Instant::now();
        link.ping(count)?;
        Ok(micros(begun, count))
    })
}

/// A tensor too small to matter, on the peer's device.
fn small(peer: &Peer) -> Tensor<1> {
    let data = TensorData::from([1f32, 2.0, 3.0, 4.0]);
    data::from_data(data, &peer.device, Upload::Helper)
}

fn one(peer: &Peer, count: usize) -> Contender<'_> {
    let tensor = small(peer);
    let key = format!("{}_us", peer.kind.key());
    Contender::new(key, peer.kind.label(), move |_| {
        let begun = Instant::now();
        for _ in 0..count {
            data::into_data(tensor.clone(), Upload::Helper)?;
        }
        Ok(micros(begun, count))
    })
}

fn many(peer: &Peer, count: usize) -> Contender<'_> {
    let tensor = small(peer);
    let key = match peer.kind {
        Kind::TensordQuic => "pipelined_us".to_owned(),
        kind => format!("{}_pipelined_us", kind.key()),
    };
    let (rounds, start) = ((count / 10).max(1), peer.kind.start());
    Contender::new(key, peer.kind.label(), move |_| {
        let begun = Instant::now();
        for _ in 0..rounds {
            let asked = (0..OUTSTANDING).map(|_| data::start_read(tensor.clone(), start));
            let asked: Vec<_> = asked.collect();
            asked
                .into_iter()
                .try_for_each(|read| read.wait().map(drop))?;
        }
        Ok(micros(begun, rounds * OUTSTANDING))
    })
}
