//! A rank's model before its first step: built, or restored from a checkpoint.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleVisitor};
use pyroclast_strategies::{
    DataParallel, ParamInfo, PieceOf, ProcessGroup, UnitPolicy, any_recomputes,
};
use serde_json::Value;

use super::rank::Shared;
use super::save::Home;
use crate::checkpoint::{self, Checkpoint, Manifest, TensorEntry};
use crate::error::{Error, Mistake};
use crate::output::{RunFolder, Sharing, checkpoint_in};
use crate::plan::Resume;
use crate::step::{hash, user};
use crate::task::{RankContext, TrainModule};

/// Burn's generator of initial numbers belongs to the process. Whoever seeds it and draws from it
/// holds this, so that two runs in one process do not take each other's numbers.
static GENERATOR: Mutex<()> = Mutex::new(());

/// A rank's model and strategy before the first step.
pub(super) struct Started<M> {
    pub(super) model: M,
    pub(super) strategy: DataParallel,
    pub(super) randomness: Randomness,
}

/// Builds a rank's model, and lays it out. Only rank 0's numbers are used: it draws them unit by unit
/// while the others, which have built theirs for its structure, receive what they store.
pub(super) fn start<T: TrainModule>(
    shared: &Shared<'_, T>,
    context: &RankContext,
    group: &Arc<ProcessGroup>,
) -> Result<Started<T::Model>, Error> {
    let build = || shared.task.configure_model(context).map_err(user(context, "configure_model"));
    let setup = shared.plan.strategy.setup(shared.plan, shared.task.optimizer_groups());
    let lay_out = |model: T::Model| {
        let randomness = Randomness::of(&model, shared)?;
        let (model, strategy) = DataParallel::new(model, group, &setup)
            .map_err(|error| shared.plan.strategy.named_in_settings(error))?;
        Ok(Started { model, strategy, randomness })
    };
    let lock = || GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    if context.rank > 0 {
        let model = {
            let _generator = lock();
            build()?
        };
        group.barrier()?;
        return lay_out(model);
    }
    group.barrier()?;
    let _generator = lock();
    shared.device.seed(shared.plan.resolved.seed);
    // Lazy parameters draw their numbers when they are laid out.
    lay_out(build()?)
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
        let recomputes =
            shared.plan.activation_checkpointing != UnitPolicy::None || any_recomputes(model);
        let forbidden = match (shared.plan.resolved.deterministic, recomputes) {
            (true, _) => Some("deterministic"),
            // A mask would be another one when it is drawn again.
            (false, true) => Some("activation_checkpointing"),
            (false, false) => None,
        };
        if let (Self::SharedGenerator, Some(setting)) = (randomness, forbidden) {
            return Err(Error::setting(
                setting,
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

/// The checkpoint to continue from, if there is one. Read before anything is built or written: a damaged one costs
/// no time. All ranks call it.
pub(super) fn to_continue(
    home: &Home,
    resume: &Resume,
    group: &ProcessGroup,
) -> Result<Option<Checkpoint>, Error> {
    let folder = home.folder().map(RunFolder::checkpoints);
    let path = match (resume, folder) {
        (Resume::Never, _) | (Resume::IfPresent, None) => None,
        (Resume::IfPresent, Some(folder)) => match home.sharing() {
            Sharing::OneFolder => checkpoint::newest(&folder)?,
            Sharing::NodeLocal => newest_of_all(&folder, group)?,
        },
        (Resume::From(path), _) => Some(checkpoint_in(path)?),
    };
    let resumed = path.as_deref().map(Checkpoint::open).transpose()?;
    agree(resumed.as_ref(), group)?;
    Ok(resumed)
}

/// The newest checkpoint that all machines have: a crash may have left one that only some of them made.
fn newest_of_all(folder: &Path, group: &ProcessGroup) -> Result<Option<PathBuf>, Error> {
    let here = checkpoint::by_step(folder)?;
    let mut newest = vec![-1; group.world()];
    newest[group.rank()] = here.last().map_or(-1, |(step, _)| i64::try_from(*step).unwrap_or(-1));
    let newest = group.all_gather(newest).wait()?;
    let common = newest.iter().copied().min().unwrap_or(-1);
    let without = newest.iter().position(|step| *step < 0);
    let with = newest.iter().position(|step| *step >= 0);
    if let (Some(without), Some(with)) = (without, with) {
        let problem = format!(
            "rank {without} finds no checkpoint in its folder, but rank {with} has one of step {}; bring its \
             machine's files back, or name an empty folder on every machine",
            newest[with]
        );
        return Err(Error::setting("resume", problem));
    }
    let found = here.into_iter().find(|(step, _)| i64::try_from(*step) == Ok(common));
    match found {
        None if common >= 0 => Err(Error::setting(
            "resume",
            format!(
                "the newest checkpoint that every machine may have is of step {common}, and {} has none of it",
                folder.display()
            ),
        )),
        found => Ok(found.map(|(_, path)| path)),
    }
}

/// Refuses to go on where ranks have read different checkpoints, which are those of machines with
/// folders of their own.
fn agree(resumed: Option<&Checkpoint>, group: &ProcessGroup) -> Result<(), Error> {
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
                 name a folder that all machines share, or let each keep its own with node_local"
            ),
        )),
    }
}

/// A number that is different for different checkpoints, by their checksums.
fn fingerprint(manifest: &Manifest) -> u32 {
    let blocks = manifest.files.values().flat_map(|file| &file.blocks);
    hash(blocks.flat_map(|checksum| checksum.bytes()).chain(manifest.step.to_le_bytes()))
}

/// Gives model and strategy what the checkpoint holds. Each rank reads what it stores, and no more.
pub(super) fn restore<M: Module>(
    model: M,
    strategy: &mut DataParallel,
    checkpoint: &Checkpoint,
) -> Result<M, Error> {
    let infos = strategy.param_infos(&model);
    same_model(&infos, checkpoint).map_err(|problem| {
        Error::setting("resume", format!("the checkpoint is of another model: {problem}"))
    })?;
    let mut failed = None;
    let mut source = |of: PieceOf, info: &ParamInfo, range: Range<usize>| {
        checkpoint.read(of.name(), &info.path, range).map_err(|error| {
            let told = pyroclast_strategies::Error::MissingValues(info.path.clone());
            failed = Some(error);
            told
        })
    };
    let steps = checkpoint.manifest.step - checkpoint.manifest.skipped;
    let restored = strategy.restore(model, steps, &mut source);
    failed.map_or(Ok(()), Err)?;
    restored.map_err(|error| Error::setting("resume", error.to_string()))
}

/// Whether a checkpoint has just the parameters and buffers of a model.
fn same_model(infos: &[ParamInfo], checkpoint: &Checkpoint) -> Result<(), String> {
    let tensors = &checkpoint.manifest.tensors;
    for ParamInfo { path, shape } in infos {
        match tensors.get(path) {
            None => return Err(format!("`{path}` is missing")),
            Some(tensor) if tensor.shape != *shape => {
                let found = &tensor.shape;
                return Err(format!("`{path}` has shape {found:?}, but the model's has {shape:?}"));
            }
            Some(_) => {}
        }
    }
    let is_known = |path: &&String| infos.iter().any(|info| info.path == **path);
    match tensors.keys().find(|path| !is_known(path)) {
        Some(path) => Err(format!("the model has no `{path}`")),
        None => Ok(()),
    }
}

/// Settings that make another training of it when they change.
const IDENTITY: [&str; 9] = [
    "seed",
    "optimizer",
    "sampling",
    "layers",
    "heads",
    "width",
    "context",
    "val_split",
    "decay_all",
];

/// Refuses a checkpoint of another training.
pub(super) fn check_identity(
    manifest: &Manifest,
    config: &Value,
    dataset_len: u64,
) -> Result<(), Error> {
    let has_states = |tensor: &TensorEntry| !tensor.states.is_empty();
    if manifest.samples == 0 && !manifest.tensors.values().any(has_states) {
        let problem =
            "the checkpoint has weights alone, as imported ones do; begin with them: init_from";
        return Err(Error::setting("resume", problem));
    }
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
