//! Serves a CNN that reads hand-written digits, by the Open Inference Protocol and with a page on which to draw one.
//!
//! Run it with `TENSORD_URL=<URL of your pool> cargo run --release -p tensord-example-serve`. The first time, it trains the
//! model for some seconds and keeps the weights in a file.

mod cnn;
mod training;

use std::{io::Write as _, path::PathBuf, time::Duration};

use anyhow::Context as _;
use burn::prelude::*;
use clap::Parser;
use tensord_client::{Pool, weights};
use tensord_serve::{BATCH, Batching, Model, Port, Serve};

use crate::cnn::Cnn;

/// The page, which sends what is drawn to the model.
const PAGE: &str = include_str!("page.html");

/// How long the first replica may take.
const READY_WITHIN: Duration = Duration::from_secs(120);

#[derive(Debug, Parser)]
#[command(about = "Serves a CNN that reads hand-written digits")]
struct Arguments {
    /// Where to serve
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: String,
    /// The file of the weights; if there is none, the model is trained
    #[arg(long, default_value = "digits.safetensors")]
    weights: PathBuf,
    /// Most replicas, each on a leased device
    #[arg(long, default_value_t = 2)]
    replicas: usize,
    /// The file of the token that clients send, which is made at random otherwise
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// The files of a certificate chain and its key; without them, there is no TLS, and only this host is served
    #[arg(long, num_args = 2, value_names = ["CHAIN", "KEY"])]
    certificate: Option<Vec<PathBuf>>,
}

fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    let arguments = Arguments::parse();
    let pool = Pool::connect_env()?;
    if !arguments.weights.exists() {
        training::train(&pool, &arguments.weights)?;
    }
    let mut serve = Serve::new(pool)
        .model(digits(arguments.weights, arguments.replicas))
        .page("/", PAGE);
    serve = match arguments.certificate.as_deref() {
        Some([chain, key]) => serve.certificate(chain, key),
        _ => serve.plaintext_on_loopback(),
    };
    if let Some(path) = &arguments.token_file {
        let token = std::fs::read_to_string(path);
        serve = serve.token(
            token
                .with_context(|| format!("cannot read {}", path.display()))?
                .trim(),
        );
    }
    let server = serve.bind(arguments.listen.as_str())?;
    if !server.wait_ready(READY_WITHIN) {
        anyhow::bail!("the model has no device after {READY_WITHIN:?}");
    }
    let token = server.token().map_or("", |it| it.reveal());
    // The token is in the part of the URL that browsers send to nobody.
    println!("draw a digit: {}/#{token}", server.url());
    std::io::stdout().flush()?;
    server.run_until_signal();
    Ok(())
}

/// Returns the model to serve: images of 8 x 8 pixels from 0 to 1, and the probability of each digit.
fn digits(path: PathBuf, replicas: usize) -> Model {
    let image = Port::f32("image", [BATCH, 8, 8]);
    let probabilities = Port::f32("probabilities", [BATCH, 10]);
    let load = move |device: &Device| {
        let mut model = Cnn::new(device);
        weights::load(&mut model, &path)?;
        Ok::<_, weights::WeightsError>(move |images: Tensor<3>| model.probabilities(images))
    };
    Model::new("digits", image, probabilities, load)
        .replicas(1..=replicas)
        .batching(Batching {
            max_size: 64,
            ..Batching::default()
        })
        .check_finite()
}
