//! From a pool's URL to the first result: connect, lease, a tiny op, its read.
//!
//! Of a process that has just started, as programs that attach have. For comparison,
//! the same from the address of one of Burn's own servers, which has nothing to lease
//! and no TLS. Each of its samples has a fresh server, as those of tensord have a fresh
//! session.

use std::{cell::Cell, time::Instant};

use anyhow::{Result, ensure};
use burn::tensor::{Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tensord_client::{LeaseRequest, Pool};
use tensord_transport::TransportChoice;

use crate::{
    bench::Bench,
    context::Context,
    data::{self, Upload},
    pool::LocalPool,
    race::Contender,
    remote::{start_websocket, websocket_device},
    report::{Report, add_findings, table},
};

/// Measures.
///
/// # Errors
///
/// When the pool or a server fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    let dir = tempfile::tempdir()?;
    // Several devices, as a lease that was dropped may take a moment to end.
    let pool = LocalPool::start("flex*4")?;
    let traffic = Cell::default();
    let tensord = |key: &str, label: &str, transport| {
        let url = pool.url(transport).reveal();
        let traffic = &traffic;
        Contender::new(key, label, move |_| {
            let found: Found = context.turn(Bench::Attach, &Turn::Pool(url.clone()))?;
            if transport == TransportChoice::Auto {
                traffic.set((found.bytes_up, found.bytes_down));
            }
            Ok(found.ms)
        })
    };
    let contenders = vec![
        tensord("ms", "tensord, QUIC", TransportChoice::Auto),
        tensord("grpc_ms", "tensord, gRPC", TransportChoice::Grpc),
        Contender::new("burn_remote_ms", "burn-remote, WebSocket", |_| {
            let (_process, address) = start_websocket(&dir)?;
            let found: Found = context.turn(Bench::Attach, &Turn::Server(address))?;
            Ok(found.ms)
        }),
    ];
    let found = context.race("attach", contenders)?;
    let mut rows = table(&["peer"], &["ms", "quartiles"]);
    add_findings(&mut rows, &[], &found);
    let mut json = found.to_json();
    let (up, down) = traffic.get();
    json.insert("bytes_up".into(), json!(up));
    json.insert("bytes_down".into(), json!(down));
    Ok(Report {
        json: json.into(),
        table: rows.to_string(),
    })
}

/// What a turn attaches to.
#[derive(Serialize, Deserialize)]
pub(super) enum Turn {
    /// The URL of a pool.
    Pool(String),
    /// The address of one of Burn's servers.
    Server(String),
}

/// What it finds.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Found {
    ms: f64,
    bytes_up: u64,
    bytes_down: u64,
}

/// Takes a turn.
///
/// # Errors
///
/// When the pool or the server fails.
pub(super) fn turn(turn: &Turn) -> Result<Value> {
    let begun = Instant::now();
    let mut found = Found::default();
    match turn {
        Turn::Pool(url) => {
            let pool = Pool::connect(url)?;
            let lease = pool.lease(LeaseRequest::devices(1))?;
            first_result(&lease.devices()[0])?;
            let traffic = lease.traffic();
            (found.bytes_up, found.bytes_down) = (traffic.bytes_up, traffic.bytes_down);
            // To let go of it does not count.
            found.ms = begun.elapsed().as_secs_f64() * 1000.0;
        }
        Turn::Server(address) => {
            first_result(&websocket_device(address)?)?;
            found.ms = begun.elapsed().as_secs_f64() * 1000.0;
        }
    }
    Ok(serde_json::to_value(found)?)
}

fn first_result(device: &Device) -> Result<()> {
    let one: Tensor<1> = data::from_data(TensorData::from([1f32]), device, Upload::Helper);
    ensure!(data::scalar(one + 1.0)? == 2.0, "1 + 1 is something else");
    Ok(())
}
