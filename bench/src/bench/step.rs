//! Time of a training step: the three models, a fresh batch uploaded each step.
//!
//! A sample is several steps and one read of the last loss, divided by the steps.
//! Batches are made beforehand, and are new to the worker. All peers start from
//! the same weights, and see the same batches in the round that does not count:
//! there their losses must agree to the last bit, which is checked.

use std::{cell::RefCell, time::Instant};

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};

use crate::{
    context::Context,
    data::Upload,
    models::Model,
    peer::{Kind, Peer},
    race::{Contender, Results},
    report::{Report, number, optional, spread, table},
    stats::round,
    trainer::{BATCH, Batch, Trainer, fresh_seeds},
};

/// Measures.
///
/// # Errors
///
/// When a peer fails, or the losses differ.
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
                number(finding.summary.median),
                spread(&finding.summary),
                optional(ratio),
            ]);
        }
        json.insert(model.name().into(), to_json(&found));
    }
    Ok(Report {
        json: json.into(),
        table: rows,
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
    let steps = match model {
        Model::Mlp => context.pick(60, 2),
        Model::Cnn => context.pick(8, 1),
        Model::Transformer => context.pick(15, 1),
    };
    let losses = Losses::default();
    let mut contenders = Vec::new();
    for peer in context.peers()?.iter() {
        contenders.push(contender(peer, model, steps, Upload::Helper, &losses));
        if peer.kind == Kind::TensordQuic {
            contenders.push(contender(peer, model, steps, Upload::Plain, &losses));
        }
    }
    let found = context.race(&format!("step {}", model.name()), contenders)?;
    losses.check()?;
    Ok(found)
}

fn contender<'a>(
    peer: &Peer,
    model: Model,
    steps: usize,
    upload: Upload,
    losses: &'a Losses,
) -> Contender<'a> {
    let mut trainer = Trainer::new(model, &peer.device, upload);
    let (way, note) = match upload {
        Upload::Helper => ("", ""),
        Upload::Plain => ("_plain", ", plain from_data"),
    };
    let key = format!("{}{way}_ms", peer.kind.key());
    let label = format!("{}{note}", peer.kind.label());
    Contender::new(key, label.clone(), move |run| {
        let seeds = match run {
            0 => 0..steps as u64,
            _ => fresh_seeds(steps),
        };
        let batches: Vec<_> = seeds.map(|seed| Batch::noise(BATCH, seed)).collect();
        let begun = Instant::now();
        let loss = trainer.steps(batches)?;
        let took = begun.elapsed().as_secs_f64() * 1000.0 / steps as f64;
        if run == 0 {
            losses.note(&label, loss);
        }
        Ok(took)
    })
}

/// The loss of each contender after the same batches.
#[derive(Default)]
struct Losses(RefCell<Vec<(String, f32)>>);

impl Losses {
    fn note(&self, label: &str, loss: f32) {
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
        losses.note("a", 0.25);
        losses.note("b", 0.25);
        assert!(losses.check().is_ok());
        losses.note("c", 0.250_000_1);
        assert!(losses.check().unwrap_err().to_string().contains("differ"));
    }
}
