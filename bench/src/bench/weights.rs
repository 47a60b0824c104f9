//! Time until the weights in a file are on a device, and what is sent for it.
//!
//! A program makes a model, loads the weights of a Safetensors file, adds up the squares of each
//! layer's weights and reads the sums. It is measured from the start of loading. The file was written just before,
//! so it is in the host's memory. Contenders are Flex in the program's own process, the first
//! and the second program on a pool, and a program in which `burn-store` loads onto the leased
//! device by itself. Each run has a new file and new pools, so that a first program is the first.
//!
//! The worker keeps enough uploads for all weights. What a second program sends to a worker with
//! the default settings is measured once.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    tensor::{Device, Tensor},
};
use serde_json::json;
use tensord_client::weights::{
    self,
    burn_store::{ModuleSnapshot, SafetensorsStore},
};
use tensord_transport::TransportChoice;

use crate::{
    context::Context,
    data::{self, Upload},
    pool::LocalPool,
    report::{Report, format_number, table},
    stats::{Summary, round},
};

/// Rows and columns of each layer, which is 16 MiB.
const SIDE: usize = 2048;

const LAYER_MIB: usize = (SIDE * SIDE * 4) >> 20;

/// Most runs: one takes about half a minute.
const MAX_RUNS: usize = 3;

/// Sessions that run have half of it.
const UPLOAD_CACHE: &str = "3GiB";

/// How long the worker has, after a program has ended, to hash what it keeps of its uploads.
const SETTLE: Duration = Duration::from_secs(4);

#[derive(Module, Debug)]
struct Model {
    layers: Vec<Linear>,
}

impl Model {
    fn new(layers: usize, device: &Device) -> Self {
        let config = LinearConfig::new(SIDE, SIDE).with_bias(false);
        let layers = (0..layers).map(|_| config.init(device)).collect();
        Self { layers }
    }

    /// Returns the sum of each layer's squared weights.
    fn sums(&self) -> Result<Vec<f32>> {
        let sums = self
            .layers
            .iter()
            .map(|layer| layer.weight.val().square().sum());
        let sums = data::into_data(Tensor::cat(sums.collect(), 0), Upload::Helper)?;
        sums.try_to_vec().context("the sums are floats")
    }
}

/// One program's time and traffic.
struct Loaded {
    seconds: f64,
    bytes_up: u64,
    sums: Vec<f32>,
}

/// The times of each run, and what was sent in the last one.
#[derive(Default)]
struct Figures {
    local: Vec<f64>,
    first: Vec<f64>,
    second: Vec<f64>,
    burn_store: Vec<f64>,
    first_bytes: u64,
    second_bytes: u64,
    burn_store_bytes: u64,
}

/// Runs the bench.
///
/// # Errors
///
/// If a pool does not start, or weights are not loaded as they are in the file.
pub(super) fn run(context: &Context) -> Result<Report> {
    let layers = context.full_or_quick(1024 / LAYER_MIB, 1);
    let mut figures = Figures::default();
    let mut default_bytes = 0;
    for run in 0..context.runs.min(MAX_RUNS) {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("weights.safetensors");
        context.progress.update("weights: writing the file");
        weights::save(&Model::new(layers, &Device::flex()), &file)?;
        measure(context, layers, &file, &mut figures)?;
        if run == 0 {
            context.progress.update("weights: default settings");
            let pool = LocalPool::start("flex")?;
            load_on(&pool, layers, &file, ours)?;
            thread::sleep(SETTLE);
            default_bytes = load_on(&pool, layers, &file, ours)?.bytes_up;
        }
    }
    report(layers * LAYER_MIB, &figures, default_bytes)
}

/// Measures each contender once.
fn measure(context: &Context, layers: usize, file: &Path, figures: &mut Figures) -> Result<()> {
    context.progress.update("weights: local");
    let local = load(
        &mut Model::new(layers, &Device::flex()),
        file,
        by_burn_store,
    )?;
    figures.local.push(local.0);
    context.progress.update("weights: first program");
    let pool = LocalPool::start_with("flex", &["--upload-cache", UPLOAD_CACHE])?;
    let first = load_on(&pool, layers, file, ours)?;
    thread::sleep(SETTLE);
    context.progress.update("weights: second program");
    let second = load_on(&pool, layers, file, ours)?;
    drop(pool);
    context.progress.update("weights: burn-store alone");
    let pool = LocalPool::start_with("flex", &["--upload-cache", UPLOAD_CACHE])?;
    let alone = load_on(&pool, layers, file, by_burn_store)?;
    for loaded in [&first, &second, &alone] {
        ensure!(loaded.sums.len() == local.1.len(), "a layer is missing");
        for (found, expected) in loaded.sums.iter().zip(&local.1) {
            let is_close = (found - expected).abs() <= expected * 1e-4;
            ensure!(
                is_close,
                "a layer has the sum {found} instead of {expected}"
            );
        }
    }
    figures.first.push(first.seconds);
    figures.second.push(second.seconds);
    figures.burn_store.push(alone.seconds);
    figures.first_bytes = first.bytes_up;
    figures.second_bytes = second.bytes_up;
    figures.burn_store_bytes = alone.bytes_up;
    Ok(())
}

type Load = fn(&mut Model, &Path) -> Result<()>;

fn ours(model: &mut Model, file: &Path) -> Result<()> {
    weights::load(model, file)?;
    Ok(())
}

fn by_burn_store(model: &mut Model, file: &Path) -> Result<()> {
    model.load_from(&mut SafetensorsStore::from_file(file))?;
    Ok(())
}

/// Loads `file` into `model`, and returns the seconds and the sums.
fn load(model: &mut Model, file: &Path, load: Load) -> Result<(f64, Vec<f32>)> {
    let start = Instant::now();
    load(model, file)?;
    let sums = model.sums()?;
    Ok((start.elapsed().as_secs_f64(), sums))
}

/// Loads `file` in a program that connects to `pool`.
fn load_on(pool: &LocalPool, layers: usize, file: &Path, by: Load) -> Result<Loaded> {
    let (_pool, lease) = pool.lease(TransportChoice::Auto)?;
    let (seconds, sums) = load(&mut Model::new(layers, &lease.devices()[0]), file, by)?;
    Ok(Loaded {
        seconds,
        bytes_up: lease.traffic().bytes_up,
        sums,
    })
}

fn report(mib: usize, figures: &Figures, default_bytes: u64) -> Result<Report> {
    let median = |samples: &[f64]| {
        let summary = Summary::of(samples).context("nothing was measured")?;
        anyhow::Ok(round(summary.median))
    };
    let sent = |bytes: u64| round(bytes as f64 / (1 << 20) as f64);
    let (local, first) = (median(&figures.local)?, median(&figures.first)?);
    let (second, alone) = (median(&figures.second)?, median(&figures.burn_store)?);
    let (first_mib, second_mib) = (sent(figures.first_bytes), sent(figures.second_bytes));
    let burn_store_mib = sent(figures.burn_store_bytes);
    let mut rows = table(&["program"], &["s", "MiB sent"]);
    for (label, seconds, mib) in [
        ("Flex, in the program's process", local, 0.0),
        ("tensord, first program", first, first_mib),
        ("tensord, second program", second, second_mib),
        ("burn-store alone, first program", alone, burn_store_mib),
    ] {
        rows.add_row([label.to_owned(), format_number(seconds), format_number(mib)]);
    }
    Ok(Report {
        json: json!({
            "mib": mib,
            "runs": figures.local.len(),
            "local_s": local,
            "first_s": first,
            "second_s": second,
            "burn_store_s": alone,
            "first_mib_sent": first_mib,
            "second_mib_sent": second_mib,
            "burn_store_mib_sent": burn_store_mib,
            "second_mib_sent_by_default": sent(default_bytes),
        }),
        table: rows.to_string(),
    })
}
