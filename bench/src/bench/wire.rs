//! Bytes that a training step sends, in addition to its batch.
//!
//! Bytes are counted from the client to the worker, over many steps with one read at the
//! end, after enough steps that their structure is known. The bytes of tensors are
//! subtracted; everything else counts: ops, announcements, frames and their headers above
//! TLS, acknowledgements, the last read.
//!
//! tensord counts both by itself (`Lease::traffic`). Burn's remote client does not: a relay
//! counts its TCP bytes, and the size of the batch on the device is subtracted. The number
//! of ops in a step is counted by a server that discards them.

use std::net::TcpListener;

use anyhow::{Context as _, Result};
use burn::tensor::Device;
use burn_remote::server::{BackendServer, WebSocketTransport};
use serde_json::{Map, json};

use crate::{
    context::Context,
    counted::CountedRemote,
    data::Upload,
    discard::{self, Discard, DiscardDevice},
    models::Model,
    peer::{Kind, Peer},
    remote::websocket_device,
    report::{Report, format_number, table},
    trainer::{BATCH, Batch, Trainer, fresh_seeds},
};

/// Runs the bench.
///
/// # Errors
///
/// If a peer fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    let counted = CountedRemote::start()?;
    let discard_device = start_discard_server(context)?;
    let mut json = Map::new();
    let mut rows = table(
        &["model"],
        &[
            "ops",
            "batch",
            "tensord up",
            "plain from_data",
            "gRPC up",
            "tensord down",
            "burn-remote up",
        ],
    );
    for model in Model::ALL {
        context.progress.update(&format!("wire {}", model.name()));
        let steps = steps(context, model);
        let peers = context.peers()?;
        let ours = |kind, upload| tensord(peers.get(kind), model, steps, upload);
        let helper = ours(Kind::Tensord, Upload::Helper)?;
        let plain = ours(Kind::Tensord, Upload::Plain)?;
        let grpc = ours(Kind::TensordGrpc, Upload::Helper)?;
        let remote = remote(&counted, model, steps)?;
        let ops = ops(&discard_device, model)?;
        rows.add_row([
            model.name().to_owned(),
            format_number(ops),
            format_number(remote.batch),
            format_number(helper.up),
            format_number(plain.up),
            format_number(grpc.up),
            format_number(helper.down),
            format_number(remote.up),
        ]);
        let found = json!({
            "ops_per_step": ops,
            "batch_bytes": remote.batch,
            "tensord_bytes": helper.up.round(),
            "tensord_plain_bytes": plain.up.round(),
            "tensord_grpc_bytes": grpc.up.round(),
            "tensord_down_bytes": helper.down.round(),
            "burn_remote_bytes": remote.up.round(),
            "burn_remote_down_bytes": remote.down.round(),
        });
        json.insert(model.name().into(), found);
    }
    Ok(Report {
        json: json.into(),
        table: rows.to_string(),
    })
}

/// Number of steps before counting, and while counting.
#[derive(Clone, Copy)]
struct Steps {
    warmup: usize,
    counted: usize,
}

fn steps(context: &Context, model: Model) -> Steps {
    let full = match model {
        Model::Mlp => 200,
        Model::Cnn => 30,
        Model::Transformer => 60,
    };
    Steps {
        warmup: context.full_or_quick(full, 3),
        counted: context.full_or_quick(full, 3),
    }
}

/// Bytes per step.
struct PerStep {
    /// Bytes to the worker without those of tensors.
    up: f64,
    down: f64,
    batch: f64,
}

/// Bytes so far.
struct ByteCount {
    /// Bytes to the worker without those of tensors.
    control: i64,
    /// Bytes from the worker.
    down: i64,
}

/// Trains, and returns the bytes per step. `count` returns the bytes so far.
fn measure(
    device: &Device,
    model: Model,
    steps: Steps,
    upload: Upload,
    count: impl Fn(&Trainer) -> Result<ByteCount>,
) -> Result<PerStep> {
    let mut trainer = Trainer::new(model, device, upload);
    let batches = |count| fresh_seeds(count).map(|seed| Batch::noise(BATCH, seed));
    trainer.steps(batches(steps.warmup))?;
    let (before, batches_before) = (count(&trainer)?, trainer.uploaded_bytes());
    trainer.steps(batches(steps.counted))?;
    let after = count(&trainer)?;
    let per_step = |bytes: i64| bytes as f64 / steps.counted as f64;
    Ok(PerStep {
        up: per_step(after.control - before.control),
        down: per_step(after.down - before.down),
        batch: per_step((trainer.uploaded_bytes() - batches_before) as i64),
    })
}

fn tensord(peer: &Peer, model: Model, steps: Steps, upload: Upload) -> Result<PerStep> {
    let lease = peer.lease().context("tensord has a lease")?;
    measure(&peer.device, model, steps, upload, |_| {
        let traffic = lease.traffic();
        Ok(ByteCount {
            control: traffic.bytes_up as i64 - traffic.tensor_bytes_up as i64,
            down: traffic.bytes_down as i64,
        })
    })
}

fn remote(counted: &CountedRemote, model: Model, steps: Steps) -> Result<PerStep> {
    let device = counted.device();
    measure(device, model, steps, Upload::Plain, |trainer| {
        let (up, down) = counted.traffic()?;
        Ok(ByteCount {
            control: up as i64 - trainer.uploaded_bytes() as i64,
            down: down as i64,
        })
    })
}

/// Starts a server in this process that counts and discards ops, and returns its device.
fn start_discard_server(context: &Context) -> Result<Device> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    let server = BackendServer::<Discard>::new([DiscardDevice::SameThread]);
    let serving = server.serve_async(WebSocketTransport::from_listener(listener));
    // The server ends with the runtime.
    context.runtime().spawn(serving);
    websocket_device(&address)
}

/// Returns the number of ops in a step, drops of tensors included.
fn ops(discard_device: &Device, model: Model) -> Result<f64> {
    const STEPS: usize = 4;
    let mut trainer = Trainer::new(model, discard_device, Upload::Plain);
    let batches = || (0..STEPS).map(|step| Batch::noise(BATCH, step as u64));
    trainer.steps(batches())?;
    let before = discard::ops();
    trainer.steps(batches())?;
    Ok(((discard::ops() - before) as f64 / STEPS as f64).round())
}
