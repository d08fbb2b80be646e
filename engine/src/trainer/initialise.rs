//! A rank's model before its first step: built, or restored from a checkpoint.

use std::sync::{Mutex, PoisonError};

use burn::module::{Module, ModuleVisitor};
use pyroclast_strategies::{DataParallel, ProcessGroup, parameters};
use serde_json::Value;

use super::rank::Shared;
use crate::checkpoint::{Checkpoint, Manifest};
use crate::error::{Error, Mistake};
use crate::step::{hash, user};
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

/// Whether a model draws random numbers in training, which it does from its process's generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Randomness {
    /// It does not.
    None,
    /// It does, as the only rank of its process.
    OwnGenerator,
    /// It does, as other ranks of the process do, in no certain order.
    SharedGenerator,
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
        let mut find = FindDropout { found: false };
        model.visit(&mut find);
        let world = shared.plan.world;
        let is_alone = world == 1 || shared.plan.process.is_some();
        let randomness = match find.found {
            false => Self::None,
            true if is_alone => Self::OwnGenerator,
            true => Self::SharedGenerator,
        };
        if randomness == Self::SharedGenerator && shared.plan.resolved.deterministic {
            return Err(Error::setting(
                "deterministic",
                format!(
                    "the model has a Dropout, and the {world} ranks of this process draw its masks \
                     from one generator; start one process per rank, or use devices = 1"
                ),
            ));
        }
        Ok(randomness)
    }
}

struct FindDropout {
    found: bool,
}

impl ModuleVisitor for FindDropout {
    fn enter_module(&mut self, _name: &str, container: &str) {
        self.found |= container.ends_with("Dropout");
    }
}

/// Refuses to go on where ranks have read different checkpoints, which are those of machines with
/// folders of their own.
pub(super) fn agree(resumed: Option<&Checkpoint>, group: &ProcessGroup) -> Result<(), Error> {
    let manifest = resumed.map(|checkpoint| &checkpoint.manifest);
    // Half of the integers, so that none stands for no checkpoint.
    let identity = manifest.map_or(-1, |manifest| i64::from(fingerprint(manifest)));
    let mut identities = vec![0; group.world()];
    identities[group.rank()] = identity;
    let identities = group.all_gather(identities).wait()?;
    match identities.iter().position(|other| *other != identities[0]) {
        None => Ok(()),
        Some(rank) => Err(Error::setting(
            "resume",
            format!(
                "rank {rank} finds another checkpoint than rank 0, or only one of them finds any; \
                 name a folder that all machines share"
            ),
        )),
    }
}

/// A number that is different for different checkpoints, by their checksums.
fn fingerprint(manifest: &Manifest) -> u32 {
    let checksums = manifest.checksums.values().flat_map(|checksum| checksum.bytes());
    hash(checksums.chain(manifest.step.to_le_bytes()))
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
