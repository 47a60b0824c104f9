//! Data-parallel training on 1, 2 and 4 workers: its speed, and whether the results are the
//! same.
//!
//! The workers share a fixed global batch, and start from the same data and weights. So the
//! losses, averaged over the workers, must be those of one worker except for rounding, and
//! all workers' weights must be the same to the last bit. [`overlap`] measures how much of
//! the communication is hidden behind the backward pass.

mod overlap;
mod train;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use self::{overlap::OverlapResult, train::TrainingPlan};
use crate::{
    bench::Bench,
    context::Context,
    fleet::Fleet,
    models::Model,
    namespace_entry::{NamespaceEntry, NetworkFeatures},
    network::Network,
    report::{Report, format_number, format_optional, table},
    stats::{Summary, ratio, round},
};

const WORLD_SIZES: [usize; 3] = [1, 2, 4];

const MODELS: [Model; 2] = [Model::Mlp, Model::Transformer];

/// Images in a batch, over all workers.
const GLOBAL_BATCH: usize = 256;

/// The part of the bench that runs in one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum DdpPart {
    /// Training of one of [`MODELS`].
    Training { model: usize, world: usize },
    /// See [`overlap`].
    Overlap,
}

/// The results of one model.
#[derive(Debug)]
struct ModelResult {
    model: &'static str,
    /// Results by number of workers; one worker comes first.
    worlds: Vec<WorldResult>,
}

/// The results of one number of workers.
#[derive(Debug, Serialize, Deserialize)]
struct WorldResult {
    world: usize,
    steps_per_s: Summary,
    weights_identical: bool,
    losses: Vec<f64>,
}

/// Runs the bench.
///
/// # Errors
///
/// If a worker or the network fails.
pub(super) fn run(context: &Context) -> Result<Report> {
    let entry = NamespaceEntry::find(Bench::Ddp, context);
    let mut models = Vec::new();
    for (model, name) in MODELS.map(Model::name).into_iter().enumerate() {
        let worlds = context
            .full_or_quick::<&[usize]>(&WORLD_SIZES, &WORLD_SIZES[..2])
            .iter();
        let worlds = worlds.map(|&world| {
            context.progress.update(&format!("ddp {name} on {world}"));
            entry.run(context, &DdpPart::Training { model, world })
        });
        models.push(ModelResult {
            model: name,
            worlds: worlds.collect::<Result<_>>()?,
        });
    }
    let overlap = entry.run(context, &DdpPart::Overlap)?;
    Ok(report(&models, &overlap))
}

/// Measures a [`DdpPart`].
///
/// # Errors
///
/// If a worker or the network fails.
pub(super) fn measure(context: &Context, facts: NetworkFeatures, part: Value) -> Result<Value> {
    Ok(match serde_json::from_value(part)? {
        DdpPart::Training { model, world } => {
            let model = *MODELS
                .get(model)
                .context("there is no model of this name")?;
            serde_json::to_value(measure_world(context, model, world)?)?
        }
        DdpPart::Overlap => serde_json::to_value(overlap::measure(context, facts)?)?,
    })
}

fn measure_world(context: &Context, model: Model, world: usize) -> Result<WorldResult> {
    let plan = TrainingPlan {
        model,
        batch: GLOBAL_BATCH,
        steps: match model {
            Model::Transformer => context.full_or_quick(8, 2),
            Model::Mlp | Model::Cnn => context.full_or_quick(32, 2),
        },
        // The first epoch warms up.
        epochs: context.runs + 1,
    };
    let network = Network::Plain;
    let fleet = Fleet::start(&network, world, Some(threads()))?;
    let trained = train::train(&plan, fleet.devices())?;
    Ok(WorldResult {
        world,
        steps_per_s: trained
            .steps_per_s(&plan)
            .context("the training returned no epochs")?,
        weights_identical: trained.weights_identical,
        losses: trained.losses,
    })
}

/// Returns the number of threads of a worker: the same for one worker as for four, which
/// share the machine.
fn threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / WORLD_SIZES[WORLD_SIZES.len() - 1]).max(1)
}

/// Returns the largest relative difference between two curves.
fn most_different(losses: &[f64], base: &[f64]) -> f64 {
    let pairs = losses.iter().zip(base);
    let differences = pairs.map(|(loss, base)| (loss - base).abs() / base.abs());
    differences.fold(0.0, f64::max)
}

/// Builds the report of the results.
fn report(models: &[ModelResult], overlap: &OverlapResult) -> Report {
    let mut rows = table(
        &["model", "workers"],
        &[
            "steps/s",
            "× one",
            "loss",
            "× 1e-6 off one",
            "weights alike",
        ],
    );
    for found in models {
        for world in &found.worlds {
            let [first, last] = [world.losses.first(), world.losses.last()];
            let loss = |loss: Option<&f64>| format_optional(loss.copied());
            rows.add_row([
                found.model.to_owned(),
                world.world.to_string(),
                format_number(world.steps_per_s.median),
                format_optional(found.scaling(world)),
                format!("{} → {}", loss(first), loss(last)),
                format_number(found.difference(world) * 1e6),
                if world.weights_identical { "yes" } else { "no" }.into(),
            ]);
        }
    }
    let mut json = to_json(models);
    overlap.report(&mut rows, &mut json);
    Report {
        json: json.into(),
        table: rows.to_string(),
    }
}

impl ModelResult {
    /// Returns the speed of `world` relative to one worker.
    fn scaling(&self, world: &WorldResult) -> Option<f64> {
        let one = self.worlds.first()?;
        ratio(world.steps_per_s.median, one.steps_per_s.median)
    }

    /// Returns the largest relative difference of a loss from that of one worker.
    fn difference(&self, world: &WorldResult) -> f64 {
        let one = self.worlds.first().map(|one| one.losses.as_slice());
        most_different(&world.losses, one.unwrap_or_default())
    }

    fn weights_identical(&self) -> bool {
        self.worlds.iter().all(|world| world.weights_identical)
    }

    fn loss_vs_single(&self) -> f64 {
        let worlds = self.worlds.iter().map(|world| self.difference(world));
        worlds.fold(0.0, f64::max)
    }

    fn by_world(&self, figure: impl Fn(&WorldResult) -> Value) -> Value {
        let figures = self.worlds.iter();
        let figures = figures.map(|world| (world.world.to_string(), figure(world)));
        Value::Object(figures.collect())
    }
}

/// Returns each model's figures, and at the top level the first model's speed and the worst
/// of all other figures.
fn to_json(models: &[ModelResult]) -> Map<String, Value> {
    let steps =
        |found: &ModelResult| found.by_world(|world| json!(round(world.steps_per_s.median)));
    let scaling =
        |found: &ModelResult| found.by_world(|world| json!(found.scaling(world).map(round)));
    let each = models.iter().map(|found| {
        let quartiles = found
            .by_world(|world| json!([round(world.steps_per_s.q1), round(world.steps_per_s.q3)]));
        let figures = json!({
            "steps_per_s": steps(found),
            "scaling": scaling(found),
            "weights_identical": found.weights_identical(),
            "loss_vs_single": round(found.loss_vs_single()),
            "quartiles": { "steps_per_s": quartiles },
        });
        (found.model.to_owned(), figures)
    });
    let each: Map<String, Value> = each.collect();
    let mut json = Map::new();
    json.insert(
        "steps_per_s".into(),
        models.first().map_or(json!({}), steps),
    );
    json.insert("scaling".into(), models.first().map_or(json!({}), scaling));
    let identical = models.iter().all(ModelResult::weights_identical);
    json.insert("weights_identical".into(), json!(identical));
    let losses = models.iter().map(ModelResult::loss_vs_single);
    let worst = losses.fold(0.0, f64::max);
    json.insert("loss_vs_single".into(), json!(round(worst)));
    json.insert("models".into(), each.into());
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(world: usize, steps: f64, loss: f64) -> WorldResult {
        WorldResult {
            world,
            steps_per_s: Summary::of(&[steps]).unwrap(),
            weights_identical: world < 4,
            losses: vec![1.0, loss],
        }
    }

    #[test]
    fn json_reports_the_worst_figures() {
        let found = ModelResult {
            model: "mlp",
            worlds: vec![
                world(1, 10.0, 0.5),
                world(2, 15.0, 0.75),
                world(4, 12.0, 0.5),
            ],
        };
        let json = Value::from(to_json(&[found]));
        assert_eq!(
            json["steps_per_s"],
            json!({ "1": 10.0, "2": 15.0, "4": 12.0 })
        );
        assert_eq!(json["scaling"]["2"], 1.5);
        assert_eq!(json["weights_identical"], false);
        assert_eq!(json["loss_vs_single"], 0.5);
        assert_eq!(json["models"]["mlp"]["scaling"]["4"], 1.2);
    }

    #[test]
    fn curves_are_compared_step_by_step() {
        assert_eq!(most_different(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert_eq!(most_different(&[1.0, 1.0], &[1.0, 2.0]), 0.5);
    }
}
