//! The speed of a training next to a hostile program on the same worker, and next to an
//! honest one that keeps its device busy.
//!
//! Both programs have leases on devices of the same worker. The hostile program attacks the
//! worker ([`crate::hostile`]); the honest one trains as well. Only the neighbour differs,
//! so the ratio of the speeds is the cost of an attack beyond the share of the host that
//! every program may use. Both neighbours run on this host, too. The losses must be the
//! same to the last bit with every neighbour.

use std::{cell::RefCell, time::Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tensord_testkit::resource_usage::ResourceUsage;
use tensord_transport::TransportChoice;

use crate::{
    bench::Bench,
    context::Context,
    data::{self, Upload},
    hostile,
    models::Model,
    part,
    peer::{Address, wait_until_idle},
    pool::LocalPool,
    race::{Contender, Results},
    report::{Report, format_number, format_optional, format_quartiles, table},
    stats::round,
    trainer::{BATCH, Batch, Trainer},
};

/// The MLP's steps are short, so delays of single ops show; the CNN's are mostly computation.
const MODELS: [Model; 2] = [Model::Mlp, Model::Cnn];

/// The model of the honest neighbour: its steps are mostly computation, so it keeps its
/// device busy, as an attack does. The MLP's client is its bottleneck, and its device idles.
const BUSY: Model = Model::Cnn;

/// Runs the bench.
///
/// # Errors
///
/// If the worker fails, or the losses differ.
pub(super) fn run(context: &Context) -> Result<Report> {
    // A device for each program, and some more: the lease of a killed program ends only
    // after the scheduler's lease expiry.
    let pool = LocalPool::start("flex*8")?;
    let before = resource_usage(&pool);
    let mut rows = table(
        &["model", "beside"],
        &["ms a step", "quartiles", "speed, × beside a training"],
    );
    let mut json = Map::new();
    for model in MODELS {
        let found = measure(context, &pool, model)?;
        for finding in found.iter() {
            let speed = found.ratio("honest_ms", &finding.key);
            rows.add_row([
                model.name().to_owned(),
                finding.label.clone(),
                format_number(finding.summary.median),
                format_quartiles(&finding.summary),
                format_optional(speed),
            ]);
        }
        let mut figures = found.to_json();
        let ratio = found.ratio("honest_ms", "attack_ms").map(round);
        figures.insert("speed_ratio".into(), json!(ratio));
        json.insert(model.name().into(), figures.into());
    }
    wait_until_idle(&[pool.process_id()]);
    let after = resource_usage(&pool);
    let mut text = rows.to_string();
    if let (Some(before), Some(after)) = (before, after) {
        text = format!("{text}\nthe pool before: {before}\nand after: {after}");
        json.insert("before".into(), usage_json(&before));
        json.insert("after".into(), usage_json(&after));
    }
    json.insert("losses_identical".into(), true.into());
    Ok(Report {
        json: json.into(),
        table: text,
    })
}

/// Returns the usage of the pool's process, on Linux.
fn resource_usage(pool: &LocalPool) -> Option<ResourceUsage> {
    cfg!(target_os = "linux").then(|| ResourceUsage::of(pool.process_id()))
}

fn usage_json(resource_usage: &ResourceUsage) -> Value {
    json!({
        "resident_mib": resource_usage.resident_bytes >> 20,
        "descriptors": resource_usage.descriptors,
        "threads": resource_usage.threads,
    })
}

fn measure(context: &Context, pool: &LocalPool, model: Model) -> Result<Results> {
    let url = pool.url(TransportChoice::Auto).reveal();
    let address = Address::Tensord(url.clone());
    let training = AttackTurn::Train(address.clone(), model);
    let neighbours = [
        ("alone_ms", "nobody", None),
        (
            "honest_ms",
            "a training",
            Some(AttackTurn::Neighbour(address, BUSY)),
        ),
        ("attack_ms", "an attack", Some(AttackTurn::Attack(url))),
    ];
    let losses = Losses::default();
    let contenders = neighbours.map(|(key, label, neighbour)| {
        let (losses, training) = (&losses, &training);
        Contender::new(key, label, move |_| {
            wait_until_idle(&[pool.process_id()]);
            let neighbour = neighbour.as_ref();
            let neighbour = neighbour.map(|turn| part::background(context, Bench::Attack, turn));
            let neighbour = neighbour.transpose()?;
            let found: TrainingResult = context.turn(Bench::Attack, training)?;
            drop(neighbour);
            losses.check(label, found.losses)?;
            Ok(found.ms)
        })
    });
    context.race(&format!("attack {}", model.name()), contenders.into())
}

/// The work of a process.
#[derive(Serialize, Deserialize)]
pub(super) enum AttackTurn {
    /// Trains, and is measured.
    Train(Address, Model),
    /// Trains until the process is killed.
    Neighbour(Address, Model),
    /// Attacks the worker of the pool at this URL until the process is killed.
    Attack(String),
}

/// The result of a training.
#[derive(Debug, Serialize, Deserialize)]
struct TrainingResult {
    /// Time of a step in ms.
    ms: f64,
    /// Losses of all steps, as bits.
    losses: Vec<u32>,
}

/// Takes a turn.
///
/// # Errors
///
/// If the pool fails.
pub(super) fn turn(context: &Context, turn: &AttackTurn) -> Result<Value> {
    match turn {
        AttackTurn::Train(address, model) => train(context, address, *model),
        AttackTurn::Neighbour(address, model) => neighbour(context, address, *model),
        AttackTurn::Attack(url) => {
            hostile::attack(context.runtime(), url, || {
                context.progress.update("attacking");
            })?;
            Ok(Value::Null)
        }
    }
}

/// Number of steps in a sample: some seconds.
fn steps(context: &Context, model: Model) -> usize {
    match model {
        Model::Mlp => context.full_or_quick(600, 2),
        Model::Cnn | Model::Transformer => context.full_or_quick(30, 1),
    }
}

/// Trains for a quarter of the steps to warm up, then for the steps that are timed. The
/// batches are the same each time.
fn train(context: &Context, address: &Address, model: Model) -> Result<Value> {
    let peer = address.connect(context.runtime())?;
    let steps = steps(context, model);
    let warm = steps.div_ceil(4);
    let mut trainer = Trainer::new(model, &peer.device, Upload::Helper);
    let batches: Vec<_> = (0..(warm + steps) as u64)
        .map(|seed| Batch::noise(BATCH, seed))
        .collect();
    let mut losses = Vec::with_capacity(batches.len());
    let mut begun = Instant::now();
    for (step, batch) in batches.into_iter().enumerate() {
        if step == warm {
            let last = losses.last().cloned();
            data::scalar(last.context("there are steps to warm up")?)?;
            begun = Instant::now();
        }
        losses.push(trainer.step(batch)?);
    }
    let last = losses.last().cloned();
    data::scalar(last.context("there are steps")?)?;
    let ms = begun.elapsed().as_secs_f64() * 1000.0 / steps as f64;
    let losses = losses
        .into_iter()
        .map(|loss| Ok(data::scalar(loss)?.to_bits()));
    let losses = losses.collect::<Result<_>>()?;
    Ok(serde_json::to_value(TrainingResult { ms, losses })?)
}

/// Trains as long as the process lives, and reads a loss now and then.
fn neighbour(context: &Context, address: &Address, model: Model) -> Result<Value> {
    let peer = address.connect(context.runtime())?;
    let mut trainer = Trainer::new(model, &peer.device, Upload::Helper);
    let batches: Vec<_> = (0..8).map(|seed| Batch::noise(BATCH, seed)).collect();
    trainer.steps(batches.clone())?;
    context.progress.update("training");
    loop {
        trainer.steps(batches.clone())?;
    }
}

/// The losses of the first training; all others must have the same.
#[derive(Default)]
struct Losses(RefCell<Option<Vec<u32>>>);

impl Losses {
    fn check(&self, label: &str, losses: Vec<u32>) -> Result<()> {
        let mut first = self.0.borrow_mut();
        let first = first.get_or_insert_with(|| losses.clone());
        let differs = first.iter().zip(&losses).position(|(a, b)| a != b);
        ensure!(
            differs.is_none() && first.len() == losses.len(),
            "the losses beside {label} differ from step {differs:?} on"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_that_differ_in_a_bit_are_an_error() {
        let losses = Losses::default();
        losses.check("nobody", vec![1, 2]).unwrap();
        losses.check("a training", vec![1, 2]).unwrap();
        let error = losses
            .check("an attack", vec![1, 3])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("an attack") && error.contains("step Some(1)"),
            "{error}"
        );
        assert!(losses.check("an attack", vec![1]).is_err());
    }
}
