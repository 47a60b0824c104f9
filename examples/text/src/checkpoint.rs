//! Checkpoints: Burn's records of the model, the optimizer and the learning rate's schedule.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use burn::{
    lr_scheduler::{LrSchedulerRecord, module_lr_scheduler::ModuleLrScheduler},
    module::Module,
    optim::{ModuleOptimizer, OptimizerRecord},
};

use crate::model::Classifier;

/// What a training needs to go on.
#[derive(Clone)]
pub(crate) struct State {
    /// Steps that are done.
    pub(crate) steps: usize,
    pub(crate) model: Classifier,
    pub(crate) optimizer: ModuleOptimizer,
    pub(crate) schedule: ModuleLrScheduler,
}

/// The files of a checkpoint.
const MODEL: &str = "model.bpk";
const OPTIMIZER: &str = "optimizer.bpk";
const SCHEDULE: &str = "schedule.bpk";

/// A checkpoint is a directory with the number of its step in its name.
const PREFIX: &str = "step-";

/// Writes a checkpoint of `state` into the directory `dir`. A program that dies meanwhile
/// leaves no half of one: the checkpoint has its name when it is complete.
pub(crate) fn save(state: &State, dir: &Path) -> Result<()> {
    let name = format!("{PREFIX}{}", state.steps);
    let (partial, complete) = (dir.join(format!("partial-{name}")), dir.join(&name));
    let write = || -> Result<()> {
        if partial.exists() {
            fs::remove_dir_all(&partial)?;
        }
        fs::create_dir_all(&partial)?;
        let State {
            model,
            optimizer,
            schedule,
            ..
        } = state;
        model.clone().into_record().save(partial.join(MODEL))?;
        optimizer.to_record().save(partial.join(OPTIMIZER))?;
        schedule.to_record().save(partial.join(SCHEDULE))?;
        if complete.exists() {
            fs::remove_dir_all(&complete)?;
        }
        Ok(fs::rename(&partial, &complete)?)
    };
    write().with_context(|| format!("cannot write the checkpoint {}", complete.display()))
}

/// Returns the step and the path of the last checkpoint in `dir`, if it has one.
pub(crate) fn last(dir: &Path) -> Result<Option<(usize, PathBuf)>> {
    if !dir.exists() {
        return Ok(None);
    }
    let read = || format!("cannot list the checkpoints in {}", dir.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).with_context(read)? {
        let path = entry.with_context(read)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let steps = name.strip_prefix(PREFIX).and_then(|n| n.parse().ok());
        found.extend(steps.map(|steps: usize| (steps, path.clone())));
    }
    Ok(found.into_iter().max())
}

/// Loads the checkpoint at `path` into `state`, which must be of a model of the same sizes.
pub(crate) fn load(state: State, steps: usize, path: &Path) -> Result<State> {
    let file = |name: &str| path.join(name);
    let context = |name: &str| {
        let file = file(name);
        format!(
            "cannot go on from {}; delete {} to go on from the checkpoint before it",
            file.display(),
            path.display()
        )
    };
    let model = state.model.try_load_file(file(MODEL));
    let optimizer = OptimizerRecord::load(file(OPTIMIZER));
    let schedule = LrSchedulerRecord::load(file(SCHEDULE));
    Ok(State {
        steps,
        model: model.with_context(|| context(MODEL))?,
        optimizer: state
            .optimizer
            .load_record(optimizer.with_context(|| context(OPTIMIZER))?),
        schedule: state
            .schedule
            .load_record(schedule.with_context(|| context(SCHEDULE))?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_complete_checkpoint_is_found() {
        let dir = std::env::temp_dir().join(format!("text-checkpoints-{}", std::process::id()));
        assert_eq!(last(&dir).unwrap(), None, "there is no directory");
        for name in ["step-9", "step-10", "partial-step-11", "step-x", "other"] {
            fs::create_dir_all(dir.join(name)).unwrap();
        }
        assert_eq!(last(&dir).unwrap(), Some((10, dir.join("step-10"))));
        fs::remove_dir_all(&dir).unwrap();
    }
}
