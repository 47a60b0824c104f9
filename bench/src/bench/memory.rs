//! Memory of a client that sends a lot: a million ops, then 10 GiB of uploads.
//!
//! The client is a process of its own. The bench reports the highest rise of the client's
//! resident memory above its level at the first result, and the worker's memory before and
//! after. It needs `/proc`, so it reports memory only on Linux.

use anyhow::{Context as _, Result};
use burn::tensor::{Tensor, TensorData};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tensord_testkit::resource_usage::ResourceUsage;
use tensord_transport::TransportChoice;

use crate::{
    bench::Bench,
    context::Context,
    data::{self, Upload},
    pool::{LocalPool, lease},
    process::{has_proc, resident_bytes},
    report::{Report, format_optional, table},
    stats::round,
};

const MIB: usize = 1 << 20;

/// Size of one upload.
const UPLOAD_MIB: usize = 16;

/// Number of uploads between two progress reports of the client, so that a waiting parent
/// sees that the client lives.
const REPORT_EVERY: usize = 32;

/// The data that the client sends.
#[derive(Serialize, Deserialize)]
pub(super) struct ClientLoad {
    url: String,
    ops: usize,
    mib: usize,
}

/// The client's memory, in bytes.
#[derive(Debug, Serialize, Deserialize)]
struct MemoryResult {
    start: Option<u64>,
    after_ops: Option<u64>,
    after_uploads: Option<u64>,
}

/// Runs the bench.
///
/// # Errors
///
/// If the pool or the client fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    context.progress.update("memory");
    let (ops, mib) = context.full_or_quick((1_000_000, 10 << 10), (2_000, 64));
    let pool = LocalPool::start("flex")?;
    let worker = || {
        let usage = has_proc().then(|| ResourceUsage::of(pool.process_id()));
        usage.map(|usage| usage.resident_bytes)
    };
    let before = worker();
    let url = pool.url(TransportChoice::Auto).reveal();
    let found: MemoryResult = context.turn(Bench::Memory, &ClientLoad { url, ops, mib })?;
    let after = worker();

    let in_mib = |bytes: u64| bytes as f64 / MIB as f64;
    let above = |peak: Option<u64>| Some(in_mib(peak?.saturating_sub(found.start?)));
    let figures = [
        (
            "client_mib",
            "client, peak above its start",
            above(found.after_uploads),
        ),
        (
            "client_ops_mib",
            "client, peak above its start, ops alone",
            above(found.after_ops),
        ),
        (
            "client_start_mib",
            "client at its start",
            found.start.map(in_mib),
        ),
        ("worker_before_mib", "worker before", before.map(in_mib)),
        ("worker_after_mib", "worker after", after.map(in_mib)),
    ];
    let mut json = json!({});
    let mut rows = table(&["memory"], &["MiB"]);
    for (key, label, value) in figures {
        json[key] = json!(value.map(round));
        rows.add_row([label.to_owned(), format_optional(value)]);
    }
    Ok(Report {
        json,
        table: rows.to_string(),
    })
}

/// Runs in the client: sends the data and returns its memory figures.
///
/// # Errors
///
/// If the pool fails.
pub(super) fn run_client(context: &Context, load: &ClientLoad) -> Result<Value> {
    let (_pool, lease) = lease(load.url.parse()?)?;
    let device = &lease.devices()[0];
    let peak = || resident_bytes(std::process::id()).map(|(_, peak)| peak);
    let mut sum: Tensor<1> = data::from_data(TensorData::from([0f32]), device, Upload::Helper);
    data::scalar(sum.clone())?;
    let start = resident_bytes(std::process::id()).map(|(now, _)| now);
    for _ in 0..load.ops {
        sum = sum + 1.0;
    }
    data::scalar(sum)?;
    let after_ops = peak();
    for upload in 0..load.mib / UPLOAD_MIB {
        if upload % REPORT_EVERY == 0 {
            let sent = upload * UPLOAD_MIB;
            context
                .progress
                .update(&format!("memory: {sent} MiB uploaded"));
        }
        let values = vec![upload as f32; UPLOAD_MIB * MIB / 4];
        let count = values.len();
        let data = TensorData::new(values, [count]);
        let tensor: Tensor<1> = data::from_data(data, device, Upload::Helper);
        // The op makes sure that the content has arrived; the result is never read.
        drop(tensor + 1.0);
    }
    device.sync().context("cannot sync")?;
    Ok(serde_json::to_value(MemoryResult {
        start,
        after_ops,
        after_uploads: peak(),
    })?)
}
