//! Step time over a network with a round trip of 0, 1, 20 and 100 ms.
//!
//! The network is a relay on loopback that delays both directions. A step takes about 100
//! ms: the CNN, with the batch size that gives this time. Its loss is read one step late,
//! as programs should: the read is requested at once and awaited after the next step was
//! issued. A sample is the time of several such steps in the middle of more, so it includes
//! every stall but not the time to fill the pipeline.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use burn::tensor::Device;
use serde_json::{Value, json};
use tempfile::TempDir;
use tensord_client::Lease;
use tensord_transport::TransportChoice;

use crate::{
    context::Context,
    counted::CountedRemote,
    data::{Upload, start_read},
    models::Model,
    peer::Kind,
    pool::LocalPool,
    race::{Contender, Results},
    relay::{Relay, Route, second_loopback},
    report::{Report, format_number, format_optional, format_quartiles, table},
    stats::round,
    trainer::{BATCH, Batch, Trainer, fresh_seeds},
};

/// Number of steps before the timed ones.
const WARMUP_STEPS: usize = 2;

/// Runs the bench.
///
/// # Errors
///
/// If a peer fails, or this host has only one loopback address.
pub(super) fn run(context: &Context) -> Result<Report> {
    let batch = calibrate(context)?;
    let mut rows = table(
        &["round trip, ms", "peer"],
        &["ms a step", "quartiles", "× local"],
    );
    let mut rtts = Vec::new();
    for &rtt_ms in context.full_or_quick::<&[u64]>(&[0, 1, 20, 100], &[0, 1]) {
        let found = measure(context, rtt_ms, batch)?;
        for finding in found.iter() {
            rows.add_row([
                rtt_ms.to_string(),
                finding.label.clone(),
                format_number(finding.summary.median),
                format_quartiles(&finding.summary),
                format_optional(found.ratio(&finding.key, "local_ms")),
            ]);
        }
        rtts.push(to_json(rtt_ms, &found));
    }
    Ok(Report {
        json: json!({ "rtts": rtts, "batch": batch }),
        table: rows.to_string(),
    })
}

fn to_json(rtt_ms: u64, found: &Results) -> Value {
    let mut json = found.to_json();
    let ratio = |key| json!(found.ratio(key, "local_ms").map(round));
    json.insert("rtt_ms".into(), json!(rtt_ms));
    json.insert("ratio_to_local".into(), ratio("tensord_ms"));
    json.insert("quic_ratio".into(), ratio("tensord_quic_ms"));
    json.insert("grpc_ratio".into(), ratio("tensord_grpc_ms"));
    json.insert("burn_remote_ratio".into(), ratio("burn_remote_ms"));
    json.into()
}

/// Returns the batch with which a local step takes the target time.
fn calibrate(context: &Context) -> Result<usize> {
    let target = Duration::from_millis(context.full_or_quick(100, 5));
    let mut trainer = Trainer::new(Model::Cnn, &Device::flex(), Upload::Helper);
    let mut time = |steps: usize| {
        let batches: Vec<_> = (0..steps)
            .map(|step| Batch::noise(BATCH, step as u64))
            .collect();
        let begun = Instant::now();
        trainer.steps(batches)?;
        anyhow::Ok(begun.elapsed() / steps as u32)
    };
    time(1)?;
    let took = time(context.full_or_quick(8, 1))?;
    let scaled = BATCH as f64 * target.as_secs_f64() / took.as_secs_f64();
    Ok((scaled.round() as usize).clamp(1, 1024))
}

fn measure(context: &Context, rtt_ms: u64, batch: usize) -> Result<Results> {
    context
        .progress
        .update(&format!("rtt {rtt_ms} ms: starting the peers"));
    let delay = Duration::from_micros(rtt_ms * 1000 / 2);
    let far = DelayedPool::start(delay)?;
    let remote = CountedRemote::start_delayed(delay)?;
    let (_pool, ours) = far.pool.lease(TransportChoice::Auto)?;
    let (_quic_pool, quic) = far.pool.lease(TransportChoice::Quic)?;
    let (_grpc_pool, grpc) = far.pool.lease(TransportChoice::Grpc)?;
    let first = |lease: &Lease| lease.devices()[0].clone();
    let peers = [
        (Kind::Local, Device::flex()),
        (Kind::BurnWebSocket, remote.device().clone()),
        (Kind::Tensord, first(&ours)),
        (Kind::TensordQuic, first(&quic)),
        (Kind::TensordGrpc, first(&grpc)),
    ];
    let steps = context.full_or_quick(8, 1);
    let contenders = peers
        .into_iter()
        .map(|(kind, device)| contender(kind, &device, batch, steps));
    context.race(&format!("rtt {rtt_ms} ms"), contenders.collect())
}

fn contender(kind: Kind, device: &Device, batch: usize, steps: usize) -> Contender<'static> {
    let mut trainer = Trainer::new(Model::Cnn, device, Upload::Helper);
    Contender::new(format!("{}_ms", kind.key()), kind.label(), move |_| {
        let count = WARMUP_STEPS + steps + 1;
        let seeds = fresh_seeds(count);
        let batches: Vec<_> = seeds.map(|seed| Batch::noise(batch, seed)).collect();
        let mut step_times = Vec::with_capacity(count);
        let mut pending_read = None;
        for batch in batches {
            let read = start_read(trainer.step(batch)?, kind.start());
            if let Some(before) = pending_read.replace(read) {
                before.scalar()?;
            }
            step_times.push(Instant::now());
        }
        pending_read.context("the run has no steps")?.scalar()?;
        let took = step_times[WARMUP_STEPS + steps] - step_times[WARMUP_STEPS];
        Ok(took.as_secs_f64() * 1000.0 / steps as f64)
    })
}

/// A pool whose worker is reached through a relay that delays.
struct DelayedPool {
    pool: LocalPool,
    _relay: Relay,
    _dir: TempDir,
}

impl DelayedPool {
    /// Starts the pool and the relay. The worker listens on one loopback address and
    /// advertises another one, with the same port, where the relay listens.
    fn start(delay: Duration) -> Result<Self> {
        let host = second_loopback()?;
        let pool = LocalPool::start_advertising("flex*3", Some(&host.to_string()))?;
        let status = pool.connect(TransportChoice::Auto)?.status()?;
        let worker = status.workers.first().context("the pool has no worker")?;
        let listen: SocketAddr = worker.address.parse().context("the worker's address")?;
        let dir = tempfile::tempdir()?;
        let route = Route {
            listen,
            to: SocketAddr::from(([127, 0, 0, 1], listen.port())),
            delay,
        };
        let relay = Relay::start(route, &dir)?;
        Ok(Self {
            pool,
            _relay: relay,
            _dir: dir,
        })
    }
}
