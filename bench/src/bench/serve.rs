//! What a server of models costs, and what it does when there is too much to do.
//!
//! The server runs in this process with one replica of a CNN on a pool of one Flex device; its clients are processes of
//! their own ([`load`]), without TLS, as the other contender has none between client and model. The
//! figures:
//!
//! - `direct_batch32_rps`: batches of 32 images per second that this process computes on a lease, one after the other:
//!   upload, forward pass, read.
//! - `batch32_rps`: requests of 32 images that the server answers per second while half as many again arrive.
//! - `batch1_rps`: requests of one image that it answers per second while more arrive than it can answer.
//! - `added_ms`: the median latency of one request of one image at a time, less that of the same on the lease. The model
//!   has a `max_delay` of 0 there.
//! - `p99_ms`: the 99th percentile of latencies at half the rate of `batch1_rps`.
//! - `overload_goodput`: at ten times the rate of `batch1_rps` for 30 s, what is answered in time, relative to
//!   `batch1_rps`; and `recovered_ratio`: the same for the rate of `p99_ms`, of which all should be answered, 2 s later.
//! - `failed`: requests with an error other than that there is too much to do, or with none, in all of these.
//!
//! Samples of all but the last two are taken in turn.

use std::{
    cell::{Cell, RefCell},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use burn::tensor::{Device, Tensor, TensorData};
use serde_json::json;
use tempfile::TempDir;
use tensord_client::{Lease, LeaseRequest};
use tensord_serve::{BATCH, Batching, Model, Port, Serve, Server};
use tensord_testkit::models::{Classifier as _, Cnn, ModelSize};
use tensord_transport::TransportChoice;

use crate::{
    bench::serve::direct::Direct,
    context::Context,
    load::{self, Load, LoadResult},
    models::SIDE,
    pool::LocalPool,
    process::resident_bytes,
    race::Contender,
    report::{Report, add_results, format_number, table},
    stats::round,
};

/// The rows of a large request.
const ROWS: usize = 32;

/// How long clients wait for an answer.
const DEADLINE_MS: u64 = 1000;

/// How long the server may take until it is ready.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// Runs the bench.
///
/// # Errors
///
/// If the pool, the server or a client fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    let setup = Setup::start(context)?;
    let failed = Cell::new(0);
    let seconds = context.full_or_quick(3.0, 0.2);
    let count = |result: LoadResult| {
        failed.set(failed.get() + result.failed);
        result
    };
    let direct = Direct::new(&setup.lease)?;
    let (fast, single) = (Cell::new(0.0), Cell::new(0.0));
    let p99 = RefCell::new(Vec::new());
    let load = |model: &str, rows, rate| setup.load(model, rows, rate, seconds).map(count);
    let contenders = vec![
        Contender::new(
            "direct_batch32_rps",
            "32 images on the lease, per second",
            |_| {
                fast.set(direct.rate(ROWS, seconds)?);
                Ok(fast.get())
            },
        ),
        Contender::new("batch32_rps", "requests of 32 images, per second", |_| {
            let rate = 1.5 * fast.get().max(direct.rate(ROWS, 0.1)?);
            Ok(load("cnn", ROWS, rate)?.per_s)
        }),
        Contender::new("batch1_rps", "requests of one image, per second", |_| {
            let rate = 1.5 * ROWS as f64 * fast.get().max(direct.rate(ROWS, 0.1)?);
            single.set(load("cnn", 1, rate)?.per_s);
            Ok(single.get())
        }),
        Contender::new("direct_ms", "one image on the lease, ms", |_| {
            direct.latency(seconds)
        }),
        Contender::new("single_ms", "one request at a time, ms", |_| {
            Ok(load("cnn-at-once", 1, 0.0)?.median_ms)
        }),
        Contender::new("half_load_ms", "requests at half the load, ms", |_| {
            let result = load("cnn", 1, (single.get() / 2.0).max(10.0))?;
            p99.borrow_mut().push(result.p99_ms);
            Ok(result.median_ms)
        }),
    ];
    let found = context.race("serve", contenders)?;
    let best = found
        .median("batch1_rps")
        .context("there are no requests")?;
    let overload = setup.overload(context, best)?;
    failed.set(failed.get() + overload.failed);

    let median = |key| found.median(key).unwrap_or(f64::NAN);
    let added_ms = median("single_ms") - median("direct_ms");
    let p99_ms = crate::stats::Summary::of(&p99.borrow()).map_or(f64::NAN, |it| it.median);
    let ratio = found.ratio("batch32_rps", "direct_batch32_rps");
    let mut rows = table(&["what"], &["median", "quartiles"]);
    add_results(&mut rows, &[], &found);
    let figures = [
        format!(
            "32 images by the server, relative to the lease: {}",
            round(ratio.unwrap_or(f64::NAN))
        ),
        format!(
            "a request takes {} ms more than the lease",
            format_number(added_ms)
        ),
        format!(
            "99 of 100 requests at half the load take less than {} ms",
            format_number(p99_ms)
        ),
        format!(
            "at ten times the load: {} of its best, memory {} MiB more; of half the load 2 s later: {}",
            round(overload.goodput),
            format_number(overload.memory_mib),
            round(overload.recovered)
        ),
        format!("failed: {}", failed.get()),
    ];
    let mut figures_json = found.to_json();
    for (key, value) in [
        ("batch32_ratio", ratio.unwrap_or(f64::NAN)),
        ("added_ms", added_ms),
        ("p99_ms", p99_ms),
        ("overload_goodput", overload.goodput),
        ("overload_memory_mib", overload.memory_mib),
        ("recovered_ratio", overload.recovered),
    ] {
        figures_json.insert(key.into(), json!(round(value)));
    }
    figures_json.insert("failed".into(), json!(failed.get()));
    Ok(Report {
        json: figures_json.into(),
        table: format!("{rows}\n\n{}", figures.join("\n")),
    })
}

/// A pool, a server of its first device, and a lease of its second.
struct Setup {
    server: Server,
    lease: Lease,
    dir: TempDir,
    _pool: LocalPool,
}

/// What happens at ten times the load.
struct Overload {
    goodput: f64,
    recovered: f64,
    memory_mib: f64,
    failed: usize,
}

impl Setup {
    fn start(context: &Context) -> Result<Self> {
        context.progress.update("serve: starting");
        // One for each model, and one for the lease.
        let pool = LocalPool::start("flex*3")?;
        let client = pool.connect(TransportChoice::Auto)?;
        let lease = client.lease(LeaseRequest::devices(1))?;
        let at_once = Batching {
            max_delay: Duration::ZERO,
            ..Batching::default()
        };
        let server = Serve::new(client)
            .model(model("cnn", Batching::default()))
            .model(model("cnn-at-once", at_once))
            .plaintext_on_loopback()
            .without_token_on_loopback()
            .bind("127.0.0.1:0")?;
        ensure!(server.wait_ready(READY_WITHIN), "the server is not ready");
        Ok(Self {
            server,
            lease,
            dir: tempfile::tempdir()?,
            _pool: pool,
        })
    }

    fn load(&self, model: &str, rows: usize, rate: f64, seconds: f64) -> Result<LoadResult> {
        let load = Load {
            address: self.server.address(),
            model: model.into(),
            rows,
            rate,
            seconds,
            deadline_ms: DEADLINE_MS,
        };
        load::run(&load, &self.dir)
    }

    /// Sends ten times what the server answers at best, and half of it after that.
    fn overload(&self, context: &Context, best: f64) -> Result<Overload> {
        context.progress.update("serve: ten times the load");
        let memory = || resident_bytes(std::process::id()).map_or(0, |(now, _)| now);
        let before = memory();
        let seconds = context.full_or_quick(30.0, 0.5);
        let result = self.load("cnn", 1, 10.0 * best, seconds)?;
        let memory_mib = memory().saturating_sub(before) as f64 / f64::from(1 << 20);
        std::thread::sleep(Duration::from_secs(2));
        let rate = (best / 2.0).max(10.0);
        let after = self.load("cnn", 1, rate, context.full_or_quick(3.0, 0.2))?;
        Ok(Overload {
            goodput: result.per_s / best,
            recovered: after.per_s / rate,
            memory_mib,
            failed: result.failed + after.failed,
        })
    }
}

/// Returns the model that is served.
fn model(name: &str, batching: Batching) -> Model {
    let side = SIDE as i64;
    let images = Port::f32("image", [BATCH, side, side]);
    let load = |device: &Device| {
        let network = Cnn::new(&ModelSize::MEDIUM, device);
        Ok::<_, std::convert::Infallible>(move |images: Tensor<3>| network.forward(images))
    };
    Model::new(name, images, Port::f32("logits", [BATCH, 10]), load).batching(batching)
}

mod direct {
    use super::*;
    use crate::data::{self, Upload};

    /// The same model on a lease, without a server.
    pub(super) struct Direct {
        device: Device,
        network: Cnn,
    }

    impl Direct {
        pub(super) fn new(lease: &Lease) -> Result<Self> {
            let device = lease
                .devices()
                .first()
                .context("the lease has no device")?
                .clone();
            let network = Cnn::new(&ModelSize::MEDIUM, &device);
            Ok(Self { device, network })
        }

        fn compute(&self, rows: usize, number: usize) -> Result<()> {
            // Other pixels each time, as requests of a service have.
            let pixels = (0..rows * SIDE * SIDE).map(|it| ((it + number) % 251) as f32 / 251.0);
            let images = TensorData::new(pixels.collect::<Vec<_>>(), [rows, SIDE, SIDE]);
            let images = data::from_data(images, &self.device, Upload::Helper);
            data::into_data(self.network.forward(images), Upload::Helper)?;
            Ok(())
        }

        /// Returns how many batches of so many rows it computes per second.
        pub(super) fn rate(&self, rows: usize, seconds: f64) -> Result<f64> {
            let started = Instant::now();
            let mut batches = 0;
            while started.elapsed().as_secs_f64() < seconds {
                self.compute(rows, batches)?;
                batches += 1;
            }
            Ok(batches as f64 / started.elapsed().as_secs_f64())
        }

        /// Returns the median time for one image, in ms.
        pub(super) fn latency(&self, seconds: f64) -> Result<f64> {
            let started = Instant::now();
            let mut times = Vec::new();
            while started.elapsed().as_secs_f64() < seconds {
                let begun = Instant::now();
                self.compute(1, times.len())?;
                times.push(begun.elapsed().as_secs_f64() * 1e3);
            }
            let summary = crate::stats::Summary::of(&times);
            Ok(summary.context("nothing was computed")?.median)
        }
    }
}
