//! Predicts a column of a table: reads CSV or Parquet with Polars, trains on a leased device, and
//! writes the predictions back.

mod encoder;
mod loader;
mod model;
mod ragged;
mod rides;
mod table;
mod train;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use clap::{Args, Parser};
use polars::prelude::{Column, DataFrame};
use tensord_client::{LeaseRequest, Pool};

use rides::TARGET;
use train::Options;

/// The column that is written.
const PREDICTED: &str = "predicted_minutes";

/// Learns from a table how long taxi rides take, and predicts it for others.
#[derive(Parser, Debug)]
enum Command {
    /// Write a table of made-up rides
    Make {
        /// The file, whose name ends with .csv or .parquet
        file: PathBuf,
        #[arg(long, default_value_t = 100_000, value_name = "N")]
        rows: usize,
        /// Another seed makes other rides
        #[arg(long, default_value_t = 1, value_name = "N")]
        seed: u64,
    },
    /// Train on a table, on a device of the pool at TENSORD_URL, and predict another one
    Train(Train),
}

#[derive(Args, Debug)]
struct Train {
    /// The rides to learn from, in a .csv or .parquet file
    file: PathBuf,
    /// The rides to predict, in a .csv or .parquet file
    #[arg(long, value_name = "FILE")]
    predict: PathBuf,
    /// Write them here, with a column of predictions, as .csv or .parquet
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    /// Passes over the rides to learn from
    #[arg(long, default_value_t = 5, value_name = "N")]
    epochs: usize,
    /// Make each batch when it is wanted, instead of ahead on a thread, to compare times
    #[arg(long)]
    no_loader: bool,
    /// Train in this process, without a pool
    #[arg(long)]
    local: bool,
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Make { file, rows, seed } => {
            ensure!(rows > 0, "--rows 0: a table has at least one row");
            table::write(&mut rides::make(rows, seed)?, &file)
        }
        Command::Train(arguments) => {
            ensure!(arguments.epochs > 0, "--epochs 0: it must be at least 1");
            if arguments.local {
                return run(&arguments, &Device::flex());
            }
            let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
            run(&arguments, &lease.devices()[0])
        }
    }
}

/// Trains and predicts on `device`.
fn run(arguments: &Train, device: &Device) -> Result<()> {
    let Train {
        file, predict, to, ..
    } = arguments;
    let rides = table::read(file)?;
    let targets = table::numbers(&rides, TARGET, file)?;
    let checked = Arc::new(table::checked(&rides, file)?);
    // What is wrong with these is known before the training, not after it.
    let mut others = table::read(predict)?;
    let unknown = Arc::new(table::checked(&others, predict)?);

    let begin = Instant::now();
    let options = Options {
        epochs: arguments.epochs,
        load_ahead: !arguments.no_loader,
    };
    let (trained, times) = train::train(checked, targets, options, device)?;
    println!(
        "trained in {:.2?}; making batches took {:.2?}, of which the training waited {:.2?}",
        begin.elapsed(),
        times.making,
        times.waiting
    );

    let predictions = trained.predict(unknown, device)?;
    if let Some(error) = mean_error(&others, predict, &predictions) {
        println!("mean error of the predictions: {error:.2} minutes");
    }
    let column = Column::new(PREDICTED.into(), predictions);
    others
        .with_column(column)
        .context("cannot add the predictions")?;
    table::write(&mut others, to)
}

/// Returns by how much predictions differ from a table's own numbers, if it has them.
fn mean_error(table: &DataFrame, path: &Path, predictions: &[f32]) -> Option<f32> {
    let actual = table::numbers(table, TARGET, path).ok()?;
    let errors = actual.iter().zip(predictions).map(|(a, p)| (a - p).abs());
    Some(errors.sum::<f32>() / predictions.len() as f32)
}
