//! Text classification by Burn's transformer encoder, on one or several leased devices.
//!
//! It is an ordinary Burn program but for the lease, and for the batcher with which the
//! devices wait for each other ([`train`]).

mod checkpoint;
mod corpus;
mod model;
mod train;

use std::{path::PathBuf, sync::Arc};

use anyhow::{Result, ensure};
use burn::{module::Module, tensor::Device};
use clap::Parser;
use tensord_client::{LeaseRequest, Pool, data};

use corpus::{Corpus, Sentence, Tokenizer};
use model::{Batch, Classifier};
use train::{BATCH, Options};

/// Trains a classifier of sentences on devices of the pool at TENSORD_URL.
#[derive(Parser, Debug)]
struct Arguments {
    /// Devices to train on; they share each batch, so the number must divide 32
    #[arg(long, default_value_t = 1, value_name = "N")]
    devices: u32,
    /// Steps in all, with those before the checkpoint from which the training goes on
    #[arg(long, default_value_t = 200, value_name = "N")]
    steps: usize,
    /// Part of the activations that is dropped in training, from 0 to less than 1
    #[arg(long, default_value_t = 0.1, value_name = "PART")]
    dropout: f64,
    /// Keep checkpoints in this directory, and go on from the last one there
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Steps between two checkpoints
    #[arg(long, default_value_t = 50, value_name = "N")]
    checkpoint_every: usize,
    /// Train in this process, without a pool
    #[arg(long, conflicts_with = "devices")]
    local: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let Arguments {
        devices, dropout, ..
    } = arguments;
    ensure!(
        devices > 0 && BATCH.is_multiple_of(devices as usize),
        "--devices {devices}: a batch has {BATCH} sentences, which this many devices cannot \
         share equally; use 1, 2, 4, 8, 16 or 32"
    );
    ensure!(
        (0.0..1.0).contains(&dropout),
        "--dropout {dropout}: it must be at least 0 and less than 1"
    );
    ensure!(
        arguments.checkpoint_every > 0,
        "--checkpoint-every 0: it must be at least 1"
    );
    if arguments.local {
        return run(&[Device::flex()], arguments);
    }
    let lease = Pool::connect_env()?.lease(LeaseRequest::devices(devices))?;
    run(lease.devices(), arguments)
}

/// Trains on `devices` and prints how many of the test sentences the model classifies right.
fn run(devices: &[Device], arguments: Arguments) -> Result<()> {
    let corpus = Corpus::new();
    let tokenizer = Arc::new(Tokenizer::new(&corpus.train));
    let training: Vec<_> = devices.iter().map(|d| d.clone().autodiff()).collect();
    let options = Options {
        steps: arguments.steps,
        dropout: arguments.dropout,
        directory: arguments.checkpoint,
        checkpoint_every: arguments.checkpoint_every,
    };
    let model = train::train(&corpus.train, &tokenizer, &training, &options)?;
    let accuracy = accuracy(&model.valid(), &corpus.test, &tokenizer, &devices[0])?;
    println!("test accuracy {:.1} %", 100.0 * accuracy);
    Ok(())
}

/// Returns the part of `sentences` that `model` classifies right.
fn accuracy(
    model: &Classifier,
    sentences: &[Sentence],
    tokenizer: &Tokenizer,
    device: &Device,
) -> Result<f32> {
    let batch = Batch::new(sentences, tokenizer, device);
    let guess = model.forward(&batch).argmax(1).squeeze_dim(1);
    let right = guess.equal(batch.topics).float().mean();
    Ok(data::into_data(right)?.try_to_vec::<f32>()?[0])
}
