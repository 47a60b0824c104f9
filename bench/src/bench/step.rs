//! Time of a training step: the three models, a fresh batch uploaded each step.
//!
//! A sample is the time of many steps and one read of the last loss, divided by the number
//! of steps. Batches are created beforehand, and are new to the worker. All peers start
//! from the same weights, and warm up on the same batches: there their losses must agree to
//! the last bit, which is checked. Before that they upload as many batches as a worker
//! keeps, for the reason given in [`bulk`](super::bulk).
//!
//! On its way to a worker, an op of tensord's passes Burn's client, its server on loopback
//! and its router ([`loopback`]). A step of which nothing is computed measures the cost of
//! that path, on both cores.

use std::{cell::RefCell, ops::Range, time::Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{
    bench::Bench,
    context::Context,
    data::{self, Upload},
    loopback,
    models::Model,
    part::after_warmup,
    peer::{Address, Kind},
    race::{Contender, Results},
    report::{Report, format_number, format_optional, format_quartiles, table},
    stats::round,
    trainer::{BATCH, Batch, Trainer, fresh_seeds},
};

/// Number of batches that are uploaded before the measurement: somewhat more than the
/// peers' worker keeps of a session.
const WARMUP_BATCHES: usize = 512;

/// Runs the bench.
///
/// # Errors
///
/// If a peer fails, or the losses differ.
pub(super) fn run(context: &Context) -> Result<Report> {
    let mut json = Map::new();
    let mut rows = table(&["model", "peer"], &["ms a step", "quartiles", "× local"]);
    for model in Model::ALL {
        let found = measure(context, model)?;
        for finding in found.iter() {
            let ratio = found.ratio(&finding.key, "local_ms");
            rows.add_row([
                model.name().to_owned(),
                finding.label.clone(),
                format_number(finding.summary.median),
                format_quartiles(&finding.summary),
                format_optional(ratio),
            ]);
        }
        json.insert(model.name().into(), to_json(&found));
    }
    Ok(Report {
        json: json.into(),
        table: rows.to_string(),
    })
}

fn to_json(found: &Results) -> Value {
    let mut json = found.to_json();
    for key in ["tensord_ms", "burn_remote_ms"] {
        let ratio = found.ratio(key, "local_ms").map(round);
        json.insert(key.replace("_ms", "_ratio"), json!(ratio));
    }
    json.into()
}

fn measure(context: &Context, model: Model) -> Result<Results> {
    let losses = Losses::default();
    let mut contenders = vec![Contender::new(
        "burn_floor_ms",
        "Burn's client and server, nobody computes",
        move |_| context.turn(Bench::Step, &StepTurn::Floor(model)),
    )];
    for address in context.servers()?.addresses() {
        let mut add = |upload| contenders.push(contender(context, address, model, upload, &losses));
        add(Upload::Helper);
        if address.kind() == Kind::Tensord {
            add(Upload::Plain);
        }
    }
    let found = context.race(&format!("step {}", model.name()), contenders)?;
    losses.check()?;
    Ok(found)
}

/// The work that a turn measures.
#[derive(Serialize, Deserialize)]
pub(super) enum StepTurn {
    /// Steps on a peer.
    Peer(Address, Model, Upload),
    /// A step through Burn's client and its server in the program's process, of which
    /// nothing is computed, on a batch that is already uploaded.
    Floor(Model),
}

/// The result of a turn on a peer.
#[derive(Debug, Serialize, Deserialize)]
struct StepResult {
    /// Time of a step in ms.
    ms: f64,
    /// Loss after the batches that are the same for all peers.
    loss: f32,
}

fn contender<'a>(
    context: &'a Context,
    address: &Address,
    model: Model,
    upload: Upload,
    losses: &'a Losses,
) -> Contender<'a> {
    let (infix, note) = match upload {
        Upload::Helper => ("", ""),
        Upload::Plain => ("_plain", ", plain from_data"),
    };
    let kind = address.kind();
    let turn = StepTurn::Peer(address.clone(), model, upload);
    let key = format!("{}{infix}_ms", kind.key());
    let label = format!("{}{note}", kind.label());
    Contender::new(key, label.clone(), move |_| {
        let found: StepResult = context.turn(Bench::Step, &turn)?;
        losses.record(&label, found.loss);
        Ok(found.ms)
    })
}

/// Takes a turn.
///
/// # Errors
///
/// If the peer fails.
pub(super) fn turn(context: &Context, turn: &StepTurn) -> Result<Value> {
    match turn {
        StepTurn::Peer(address, model, upload) => peer(context, address, *model, *upload),
        StepTurn::Floor(model) => Ok(floor(context, *model)?.into()),
    }
}

/// Number of steps in a sample: about half a second, because more threads than cores are
/// runnable and each may wait some milliseconds for its time slice.
fn steps(context: &Context, model: Model) -> usize {
    match model {
        Model::Mlp => context.full_or_quick(200, 2),
        Model::Cnn => context.full_or_quick(10, 1),
        Model::Transformer => context.full_or_quick(25, 1),
    }
}

fn floor(context: &Context, model: Model) -> Result<f64> {
    let device = loopback::discard(context.runtime())?;
    let mut trainer = Trainer::new(model, &device, Upload::Plain);
    let (images, labels) = trainer.upload(Batch::noise(BATCH, 0));
    let steps = steps(context, model);
    after_warmup(|| {
        let begun = Instant::now();
        let mut last = None;
        for _ in 0..steps {
            last = Some(trainer.step_on_device(images.clone(), labels.clone())?);
        }
        data::scalar(last.context("the run has no steps")?)?;
        Ok(begun.elapsed().as_secs_f64() * 1000.0 / steps as f64)
    })
}

/// Takes some steps on batches that are the same for all peers, then times as many on new
/// ones.
fn peer(context: &Context, address: &Address, model: Model, upload: Upload) -> Result<Value> {
    let peer = address.connect(context.runtime())?;
    let steps = steps(context, model);
    let mut trainer = Trainer::new(model, &peer.device, upload);
    let batch = |seed| Batch::noise(BATCH, seed);
    for seed in fresh_seeds(context.full_or_quick(WARMUP_BATCHES, 0)) {
        trainer.upload(batch(seed));
    }
    let batches = |seeds: Range<u64>| -> Vec<_> { seeds.map(batch).collect() };
    let loss = trainer.steps(batches(0..steps as u64))?;
    let batches = batches(fresh_seeds(steps));
    let begun = Instant::now();
    trainer.steps(batches)?;
    let ms = begun.elapsed().as_secs_f64() * 1000.0 / steps as f64;
    Ok(serde_json::to_value(StepResult { ms, loss })?)
}

/// The loss of each contender after the same batches.
#[derive(Default)]
struct Losses(RefCell<Vec<(String, f32)>>);

impl Losses {
    fn record(&self, label: &str, loss: f32) {
        self.0.borrow_mut().push((label.to_owned(), loss));
    }

    fn check(&self) -> Result<()> {
        let losses = self.0.borrow();
        let same = |pair: &[(String, f32)]| pair[0].1.to_bits() == pair[1].1.to_bits();
        ensure!(losses.windows(2).all(same), "the losses differ: {losses:?}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_that_differ_are_an_error() {
        let losses = Losses::default();
        assert!(losses.check().is_ok());
        losses.record("a", 0.25);
        losses.record("b", 0.25);
        assert!(losses.check().is_ok());
        losses.record("c", 0.250_000_1);
        assert!(losses.check().unwrap_err().to_string().contains("differ"));
    }
}
