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
//! - `kill_in_time`: the part of requests that is answered in time, of those that were not refused, while the worker
//!   of one of two replicas is killed, at half the rate of `batch1_rps`.
//! - `failed`: requests with an error other than that there is too much to do, too late, or without an answer, in all
//!   of these but the last.
//!
//! Samples of the first five are taken in turn.

mod direct;
mod figures;
mod kill;
mod overload;

use std::{
    cell::{Cell, RefCell},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use burn::tensor::{Device, Tensor};
use tempfile::TempDir;
use tensord_client::{Lease, LeaseRequest};
use tensord_serve::{BATCH, Batching, Model, Port, Serve, Server};
use tensord_testkit::models::{Classifier as _, Cnn, ModelSize};
use tensord_transport::TransportChoice;

use self::{direct::Direct, figures::Figures, kill::kill, overload::Overload};
use crate::{
    context::Context,
    load::{self, Load, LoadResult},
    models::SIDE,
    pool::LocalPool,
    race::{Contender, Results},
    report::Report,
    stats::Summary,
};

/// The rows of a large request.
const ROWS: usize = 32;

/// How many times as many requests arrive as the server could answer at most, where it is to answer as many as it can.
const PLENTY: f64 = 1.5;

/// How long clients wait for an answer.
const DEADLINE_MS: u64 = 1000;

/// How long the server may take until it is ready.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// The model, and the one whose requests do not wait for others.
const CNN: &str = "cnn";
const CNN_AT_ONCE: &str = "cnn-at-once";

/// Runs the bench.
///
/// # Errors
///
/// If the pool, the server or a client fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    let setup = Setup::start(context)?;
    let (found, p99_ms, failed) = race(&setup, context)?;
    let best = found
        .median("batch1_rps")
        .context("there are no requests")?;
    let overload = Overload::measure(&setup, context, best)?;
    drop(setup);
    let kill = kill(context, best / 2.0)?;
    let figures = Figures {
        found,
        p99_ms,
        failed: failed + overload.failed,
        overload,
        kill,
    };
    Ok(figures.report())
}

/// Takes samples of a server and a lease in turn. Returns them, the 99th percentile of latencies at half the load, and
/// how many requests failed.
fn race(setup: &Setup, context: &Context) -> Result<(Results, f64, usize)> {
    let failed = Cell::new(0);
    let seconds = context.full_or_quick(3.0, 0.2);
    let direct = Direct::new(&setup.lease)?;
    let (fast, single) = (Cell::new(0.0), Cell::new(0.0));
    let p99 = RefCell::new(Vec::new());
    let load = |model: &str, rows, rate| {
        let result = setup.load(model, rows, rate, seconds)?;
        failed.set(failed.get() + result.failed());
        anyhow::Ok(result)
    };
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
            let rate = PLENTY * fast.get().max(direct.rate(ROWS, 0.1)?);
            Ok(load(CNN, ROWS, rate)?.per_s)
        }),
        Contender::new("batch1_rps", "requests of one image, per second", |_| {
            let rate = PLENTY * ROWS as f64 * fast.get().max(direct.rate(ROWS, 0.1)?);
            single.set(load(CNN, 1, rate)?.per_s);
            Ok(single.get())
        }),
        Contender::new("direct_ms", "one image on the lease, ms", |_| {
            direct.latency(seconds)
        }),
        Contender::new("single_ms", "one request at a time, ms", |_| {
            Ok(load(CNN_AT_ONCE, 1, 0.0)?.median_ms)
        }),
        Contender::new("half_load_ms", "requests at half the load, ms", |_| {
            let result = load(CNN, 1, (single.get() / 2.0).max(10.0))?;
            p99.borrow_mut().push(result.p99_ms);
            Ok(result.median_ms)
        }),
    ];
    let found = context.race("serve", contenders)?;
    let p99_ms = Summary::of(&p99.borrow()).map_or(f64::NAN, |it| it.median);
    Ok((found, p99_ms, failed.get()))
}

/// A pool, a server of its first device, and a lease of its second.
struct Setup {
    server: Server,
    lease: Lease,
    dir: TempDir,
    _pool: LocalPool,
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
        let serve = Serve::new(client)
            .model(model(CNN, Batching::default()))
            .model(model(CNN_AT_ONCE, at_once));
        Ok(Self {
            server: start(serve)?,
            lease,
            dir: tempfile::tempdir()?,
            _pool: pool,
        })
    }

    fn load(&self, model: &str, rows: usize, rate: f64, seconds: f64) -> Result<LoadResult> {
        load::run(
            &load_of(&self.server, model, rows, rate, seconds),
            &self.dir,
        )
    }
}

/// Starts a server without TLS and tokens, and waits until it is ready.
fn start(serve: Serve) -> Result<Server> {
    let serve = serve.plaintext_on_loopback().without_token_on_loopback();
    let server = serve.bind("127.0.0.1:0")?;
    ensure!(server.wait_ready(READY_WITHIN), "the server is not ready");
    Ok(server)
}

/// Returns the load of so many requests per second.
fn load_of(server: &Server, model: &str, rows: usize, rate: f64, seconds: f64) -> Load {
    Load {
        address: server.address(),
        model: model.into(),
        rows,
        rate,
        seconds,
        deadline_ms: DEADLINE_MS,
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
