//! From a pool's URL to the first result: connect, lease, a tiny op, its read.
//!
//! For comparison, the same from the address of one of Burn's own servers, which
//! has nothing to lease and no TLS. Each of its samples has a fresh server, as
//! Burn's client keeps its session with a server for the life of the process.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::tensor::{Device, Tensor, TensorData};
use serde_json::json;
use tensord_client::{LeaseRequest, Pool, Traffic};
use tensord_transport::TransportChoice;

use crate::{
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
    let mut traffic = Traffic::default();
    let contenders = vec![
        tensord(
            "ms",
            "tensord, QUIC",
            &pool,
            TransportChoice::Auto,
            Some(&mut traffic),
        ),
        tensord(
            "grpc_ms",
            "tensord, gRPC",
            &pool,
            TransportChoice::Grpc,
            None,
        ),
        Contender::new("burn_remote_ms", "burn-remote, WebSocket", |_| {
            let (_process, address) = start_websocket(&dir)?;
            let begun = Instant::now();
            first_result(&websocket_device(&address)?)?;
            Ok(begun.elapsed().as_secs_f64() * 1000.0)
        }),
    ];
    let found = context.race("attach", contenders)?;
    let mut rows = table(&["peer"], &["ms", "quartiles"]);
    add_findings(&mut rows, &[], &found);
    let mut json = found.to_json();
    json.insert("bytes_up".into(), json!(traffic.bytes_up));
    json.insert("bytes_down".into(), json!(traffic.bytes_down));
    Ok(Report {
        json: json.into(),
        table: rows,
    })
}

fn tensord<'a>(
    key: &str,
    label: &str,
    pool: &LocalPool,
    transport: TransportChoice,
    mut traffic: Option<&'a mut Traffic>,
) -> Contender<'a> {
    let url = pool.url(transport).reveal();
    Contender::new(key, label, move |_| {
        let begun = Instant::now();
        let pool = Pool::connect(&url)?;
        let lease = pool.lease(LeaseRequest::devices(1))?;
        first_result(&lease.devices()[0])?;
        let took = begun.elapsed().as_secs_f64() * 1000.0;
        if let Some(traffic) = &mut traffic {
            **traffic = lease.traffic();
        }
        Ok(took)
    })
}

fn first_result(device: &Device) -> Result<()> {
    let one: Tensor<1> = data::from_data(TensorData::from([1f32]), device, Upload::Helper);
    ensure!(data::scalar(one + 1.0)? == 2.0, "1 + 1 is something else");
    Ok(())
}
