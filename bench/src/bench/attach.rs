//! From a pool's URL to the first result: connect, lease, a tiny op, its read.
//!
//! The time is measured in a process that has just started, like a program that attaches.
//! For comparison, the same is measured from the address of one of Burn's own servers,
//! which has no lease and no TLS. Each of its samples has a new server, as each sample of
//! tensord has a new session.

use std::{cell::Cell, time::Instant};

use anyhow::{Result, ensure};
use burn::tensor::{Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tensord_client::Lease;
use tensord_transport::TransportChoice;

use crate::{
    bench::Bench,
    context::Context,
    data::{self, Upload},
    peer::{Address, Kind},
    pool::LocalPool,
    race::Contender,
    remote::start_websocket,
    report::{Report, add_results, table},
};

/// Runs the bench.
///
/// # Errors
///
/// If the pool or a server fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    let dir = tempfile::tempdir()?;
    // Several devices, because a dropped lease may take a moment to end.
    let pool = LocalPool::start("flex*4")?;
    let traffic = Cell::default();
    let take = |address: &Address| context.turn::<AttachResult>(Bench::Attach, address);
    let ours = Address::Tensord(pool.url(TransportChoice::Auto).reveal());
    let quic = Address::TensordQuic(pool.url(TransportChoice::Quic).reveal());
    let grpc = Address::TensordGrpc(pool.url(TransportChoice::Grpc).reveal());
    let contenders = vec![
        Contender::new("ms", ours.kind().label(), |_| {
            let found = take(&ours)?;
            traffic.set((found.bytes_up, found.bytes_down));
            Ok(found.ms)
        }),
        Contender::new("quic_ms", quic.kind().label(), |_| Ok(take(&quic)?.ms)),
        Contender::new("grpc_ms", grpc.kind().label(), |_| Ok(take(&grpc)?.ms)),
        Contender::new("burn_remote_ms", Kind::BurnWebSocket.label(), |_| {
            let (_process, address) = start_websocket(&dir)?;
            Ok(take(&Address::BurnWebSocket(address))?.ms)
        }),
    ];
    let found = context.race("attach", contenders)?;
    let mut rows = table(&["peer"], &["ms", "quartiles"]);
    add_results(&mut rows, &[], &found);
    let mut json = found.to_json();
    let (up, down) = traffic.get();
    json.insert("bytes_up".into(), json!(up));
    json.insert("bytes_down".into(), json!(down));
    Ok(Report {
        json: json.into(),
        table: rows.to_string(),
    })
}

/// The result of a turn.
#[derive(Debug, Serialize, Deserialize)]
struct AttachResult {
    ms: f64,
    bytes_up: u64,
    bytes_down: u64,
}

/// Takes a turn: attaches to the peer at `address`.
///
/// # Errors
///
/// If the pool or the server fails.
pub(super) fn turn(context: &Context, address: &Address) -> Result<Value> {
    let begun = Instant::now();
    let peer = address.connect(context.runtime())?;
    first_result(&peer.device)?;
    let ms = begun.elapsed().as_secs_f64() * 1000.0;
    let traffic = peer.lease().map(Lease::traffic).unwrap_or_default();
    Ok(serde_json::to_value(AttachResult {
        ms,
        bytes_up: traffic.bytes_up,
        bytes_down: traffic.bytes_down,
    })?)
}

fn first_result(device: &Device) -> Result<()> {
    let one: Tensor<1> = data::from_data(TensorData::from([1f32]), device, Upload::Helper);
    ensure!(data::scalar(one + 1.0)? == 2.0, "1 + 1 did not give 2");
    Ok(())
}
