//! A rank's model before its first step: built, or restored from a checkpoint.

use std::sync::{Mutex, PoisonError};

use burn::module::{Module, ModuleVisitor};
use pyroclast_strategies::{DataParallel, ProcessGroup, parameters};
use serde_json::Value;

use super::rank::Shared;
use crate::checkpoint::{Checkpoint, Manifest};
use crate::error::{Error, Mistake};
use crate::step::user;
use crate::task::{RankContext, TrainModule};

/// Burn's generator of initial numbers belongs to the process. Whoever seeds it and draws from it
/// holds this, so that two runs in one process do not take each other's numbers.
static GENERATOR: Mutex<()> = Mutex::new(());

/// Builds a rank's model. Only rank 0's numbers are used, so it draws them while the others wait;
/// they build theirs for its structure.
pub(super) fn build_model<T: TrainModule>(
    shared: &Shared<'_, T>,
    context: &RankContext,
    group: &ProcessGroup,
) -> Result<T::Model, Error> {
    if context.rank > 0 {
        group.barrier()?;
    }
    let model = {
        let _generator = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
        shared.device.seed(shared.plan.resolved.seed);
        let model =
            shared.task.configure_model(context).map_err(user(context, "configure_model"))?;
        // Lazy parameters draw their numbers when they are first read.
        parameters::read(&model)?;
        model
    };
    if context.rank == 0 {
        group.barrier()?;
    }
    Ok(model)
}

/// Whether a model draws random numbers in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Randomness {
    /// It does not.
    None,
    /// Burn's `Dropout` does, from the process's generator.
    Shared,
}

impl Randomness {
    /// Looks for `Dropout` in `model`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the run must be deterministic, but ranks would draw from one generator.
    pub(super) fn of<T: TrainModule>(
        model: &T::Model,
        shared: &Shared<'_, T>,
    ) -> Result<Self, Error> {
        let mut find = FindDropout(Self::None);
        model.visit(&mut find);
        if find.0 == Self::Shared && shared.plan.resolved.deterministic && shared.plan.world > 1 {
            let world = shared.plan.world;
            return Err(Error::setting(
                "deterministic",
                format!(
                    "the model has a Dropout, and the {world} ranks of this process draw its masks \
                     from one generator; use devices = 1"
                ),
            ));
        }
        Ok(find.0)
    }
}

struct FindDropout(Randomness);

impl ModuleVisitor for FindDropout {
    fn enter_module(&mut self, _name: &str, container: &str) {
        if container.ends_with("Dropout") {
            self.0 = Randomness::Shared;
        }
    }
}

/// Gives model and strategy what the checkpoint holds.
pub(super) fn restore<M: Module>(
    model: M,
    strategy: &mut DataParallel,
    checkpoint: &Checkpoint,
) -> Result<M, Error> {
    let other = |problem: String| {
        Error::setting("resume", format!("the checkpoint is of another model: {problem}"))
    };
    let model = checkpoint.fill(model).map_err(other)?;
    let find = |name: &str, path: &str| {
        checkpoint.optimizer.get(&format!("{name}.{path}")).map(|(_, values)| values.clone())
    };
    strategy
        .restore(model, checkpoint.manifest.step, find)
        .map_err(|error| Error::setting("resume", error.to_string()))
}

/// Settings that make another training of it when they change.
const IDENTITY: [&str; 10] = [
    "seed",
    "optimizer",
    "sampling",
    "layers",
    "heads",
    "width",
    "context",
    "val_split",
    "decay_all",
    "precision",
];

/// Refuses a checkpoint of another training.
pub(super) fn check_identity(
    manifest: &Manifest,
    config: &Value,
    dataset_len: u64,
) -> Result<(), Error> {
    let mut mistakes: Vec<Mistake> = IDENTITY
        .into_iter()
        .filter_map(|key| Some((key, manifest.config.get(key)?, config.get(key)?)))
        .filter(|(_, then, now)| then != now)
        .map(|(key, then, now)| {
            Mistake::new(key, format!("is {now}, but the checkpoint was trained with {then}"))
        })
        .collect();
    if manifest.dataset_len != dataset_len {
        let then = manifest.dataset_len;
        let problem =
            format!("has {dataset_len} samples, but the checkpoint was trained on {then} samples");
        mistakes.push(Mistake::new("data", problem));
    }
    if mistakes.is_empty() { Ok(()) } else { Err(Error::Config(mistakes)) }
}
