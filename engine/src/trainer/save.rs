//! Saving a run: every rank writes what it holds, rank 0 what makes a checkpoint of it.

use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::module::Module;
use pyroclast_kernels::gradient;
use pyroclast_strategies::{DataParallel, PieceOf, ProcessGroup};

use crate::checkpoint::{
    self, CheckpointConfig, Draft, Keeper, Kept, Manifest, Moment, Scores, Written,
};
use crate::error::Error;
use crate::metrics::{Metrics, Split};

/// When a run is saved, and what is kept of it.
#[derive(Debug)]
pub(super) struct Saver {
    config: CheckpointConfig,
    /// On rank 0, if the run writes anything.
    folder: Option<PathBuf>,
    keeper: Keeper,
    /// What the checkpoint that the run came from has replaced.
    replaced: Vec<String>,
    /// The last of every metric.
    scores: Scores,
    /// Epochs that had ended, and when it was, at the last checkpoint.
    saved_epochs: u64,
    saved_at: Instant,
    /// The step of the last checkpoint, or of the one that the run came from.
    saved_step: u64,
}

/// What is saved.
#[derive(Debug)]
pub(super) struct State<'a, M> {
    pub(super) group: &'a ProcessGroup,
    pub(super) strategy: &'a DataParallel,
    pub(super) model: &'a M,
    /// But for what the ranks write.
    pub(super) manifest: Manifest,
    /// Epochs that have ended.
    pub(super) epochs: u64,
}

impl Saver {
    pub(super) fn new(
        config: CheckpointConfig,
        folder: Option<PathBuf>,
        resumed: Option<&Manifest>,
        epochs: u64,
    ) -> Self {
        let kept = resumed.map(|manifest| manifest.kept.clone()).unwrap_or_default();
        let is_there = |kept: &Kept| folder.as_ref().is_some_and(|f| f.join(&kept.name).is_dir());
        let kept = kept.into_iter().filter(is_there).collect();
        Self {
            keeper: Keeper::new(config.clone(), kept),
            replaced: resumed.map(|manifest| manifest.replaced.clone()).unwrap_or_default(),
            config,
            folder,
            scores: Scores::new(),
            saved_epochs: epochs,
            saved_at: Instant::now(),
            saved_step: resumed.map_or(0, |manifest| manifest.step),
        }
    }

    /// Removes what a crash has left: checkpoints that were not complete, and those that were about to be removed.
    /// On rank 0, which keeps other runs out of the folder.
    pub(super) fn clean_up(&self) -> Result<(), Error> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let replaced = self.replaced.iter().map(|name| folder.join(name));
        replaced.filter(|path| path.is_dir()).try_for_each(|path| checkpoint::remove(&path))?;
        let entries = std::fs::read_dir(folder).map_err(Error::io("reading", folder))?;
        for entry in entries {
            let path = entry.map_err(Error::io("reading", folder))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with('.') && path.is_dir() && !path.is_symlink() {
                std::fs::remove_dir_all(&path).map_err(Error::io("removing", &path))?;
            }
        }
        Ok(())
    }

    /// Takes note of a row's metrics.
    pub(super) fn note(&mut self, row: &Metrics) {
        let split = match row.split {
            Split::Train => "train",
            Split::Val => "val",
        };
        let named = row.named.iter().map(|(name, value)| (name.as_str(), *value));
        for (name, value) in named.chain([("loss", row.loss)]) {
            self.scores.insert(format!("{split}_{name}"), value.unwrap_or(f64::NAN));
        }
    }

    /// Saves, if a checkpoint is due and would be kept. Rank 0 decides.
    pub(super) fn after_step<M: Module>(
        &mut self,
        state: &State<'_, M>,
        validated: bool,
    ) -> Result<(), Error> {
        let moment = Moment {
            step: state.manifest.step,
            epochs: state.epochs,
            saved_epochs: self.saved_epochs,
            validated,
            seconds: self.saved_at.elapsed().as_secs_f64(),
        };
        // By rank 0's clock; all else is the same on all ranks.
        let is_due = match self.config.train_time_interval {
            Some(_) => first_decides(state.group, self.config.is_due(&moment))?,
            None => self.config.is_due(&moment),
        };
        if !is_due || self.is_too_early() {
            return Ok(());
        }
        (self.saved_epochs, self.saved_at) = (state.epochs, Instant::now());
        let score = self.score()?;
        if first_decides(state.group, self.folder.is_some() && self.keeper.wants(score))? {
            self.save(state, score)?;
        }
        Ok(())
    }

    /// Saves a run that ends. One that has taken no step since its last checkpoint keeps that.
    pub(super) fn at_end<M: Module>(&mut self, state: &State<'_, M>) -> Result<(), Error> {
        if state.manifest.step > self.saved_step
            && first_decides(state.group, self.folder.is_some())?
        {
            let score = self.score().unwrap_or_default();
            self.save(state, score)?;
        }
        Ok(())
    }

    /// Whether a validation's metric is monitored, and there was none yet.
    fn is_too_early(&self) -> bool {
        let of_validation = |name: &String| name.starts_with("val_");
        self.config.monitor.as_ref().is_some_and(of_validation)
            && !self.scores.keys().any(of_validation)
    }

    /// The monitored metric; none where it is no number.
    fn score(&self) -> Result<Option<f64>, Error> {
        let Some(monitor) = &self.config.monitor else { return Ok(None) };
        match self.scores.get(monitor) {
            Some(score) => Ok(score.is_finite().then_some(*score)),
            None => {
                let known = self.scores.keys().cloned().collect::<Vec<_>>().join(", ");
                let problem = format!("there is no metric `{monitor}` yet; there are {known}");
                Err(Error::setting("checkpoint.monitor", problem))
            }
        }
    }

    /// Saves, and removes what is not to be kept any more once that is done.
    fn save<M: Module>(&mut self, state: &State<'_, M>, score: Option<f64>) -> Result<(), Error> {
        let step = state.manifest.step;
        let name = checkpoint::name(&self.config, step, state.epochs, &self.scores);
        let path = self.folder.as_ref().map(|folder| free_name(folder, &name));
        let mut keeper = self.keeper.clone();
        let mut removed = vec![];
        let name = path.as_ref().and_then(|path| path.file_name());
        if let Some(name) = name.map(|name| name.to_string_lossy().into_owned())
            && keeper.wants(score)
        {
            removed = keeper.saved(name, score);
        }
        let manifest = Manifest {
            kept: keeper.kept().to_vec(),
            replaced: removed.clone(),
            ..state.manifest.clone()
        };
        write_checkpoint(state, path.as_deref(), manifest)?;
        (self.keeper, self.saved_step) = (keeper, step);
        let Some(folder) = &self.folder else { return Ok(()) };
        if let (true, Some(path)) = (self.config.save_last, &path) {
            link_last(folder, path)?;
        }
        let gone = removed.iter().map(|name| folder.join(name)).filter(|path| path.is_dir());
        gone.into_iter().try_for_each(|path| checkpoint::remove(&path))
    }
}

/// The path of a checkpoint whose name nobody has: `-v1`, `-v2` and so on distinguish equal ones.
fn free_name(folder: &Path, name: &str) -> PathBuf {
    let versions = (1..).map(|version| folder.join(format!("{name}-v{version}")));
    let mut names = [folder.join(name)].into_iter().chain(versions);
    names.find(|path| !path.exists()).unwrap_or_else(|| folder.join(name))
}

/// Makes the link `last` that of a checkpoint. At no time there is none.
fn link_last(folder: &Path, path: &Path) -> Result<(), Error> {
    let (temporary, link) = (folder.join(".last"), folder.join("last"));
    let _ = std::fs::remove_file(&temporary);
    let name = Path::new(path.file_name().unwrap_or_default());
    #[cfg(unix)]
    let linked = std::os::unix::fs::symlink(name, &temporary);
    #[cfg(not(unix))]
    let linked = std::os::windows::fs::symlink_dir(name, &temporary);
    linked.map_err(Error::io("linking", &link))?;
    std::fs::rename(&temporary, &link).map_err(Error::io("linking", &link))
}

/// What rank 0 thinks, on all ranks.
fn first_decides(group: &ProcessGroup, decision: bool) -> Result<bool, Error> {
    Ok(group.broadcast(vec![u8::from(decision)], 0).wait()? == [1])
}

/// Writes a checkpoint to `path`, which rank 0 alone need know. All ranks call it. Where one of them fails all fail,
/// and what was written is removed.
fn write_checkpoint<M: Module>(
    State { group, strategy, model, .. }: &State<'_, M>,
    path: Option<&Path>,
    manifest: Manifest,
) -> Result<(), Error> {
    let draft = Draft::new(&told(group, path)?);
    let is_first = group.rank() == 0;
    let created = if is_first { draft.create() } else { Ok(()) };
    let outcome = agreed(group, created)
        .and_then(|()| agreed(group, seen(&draft)))
        .and_then(|()| write(group, strategy, *model, &draft, manifest.step))
        .and_then(|written| {
            let finished = match is_first {
                true => draft.finish(&complete(manifest, written)).map(drop),
                false => Ok(()),
            };
            agreed(group, finished)
        });
    if outcome.is_err() && is_first {
        draft.discard();
    }
    outcome
}

/// The path that rank 0 knows, on all ranks.
fn told(group: &ProcessGroup, path: Option<&Path>) -> Result<PathBuf, Error> {
    let absolute = |path: &Path| std::path::absolute(path).map_err(Error::io("finding", path));
    let mine = path.map(absolute).transpose()?;
    let text = mine.map(|path| path.into_os_string().into_encoded_bytes()).unwrap_or_default();
    // Only rank 0's counts.
    let text = if group.rank() == 0 { text } else { vec![] };
    let all = group.all_gather_uneven(text).wait()?;
    let path = String::from_utf8(all.into_iter().next().unwrap_or_default()).map_err(|_| {
        Error::setting("out", "is no text that every machine can read; name another folder")
    })?;
    Ok(PathBuf::from(path))
}

/// Whether this rank can write to the folder that rank 0 has made.
fn seen(draft: &Draft) -> Result<(), Error> {
    match draft.is_there() {
        true => Ok(()),
        false => Err(Error::setting(
            "out",
            format!(
                "{} is not on this machine, although rank 0 has just made it; name a folder that all machines \
                 share",
                draft.folder().display()
            ),
        )),
    }
}

/// Writes this rank's file; returns what each has written.
fn write<M: Module>(
    group: &ProcessGroup,
    strategy: &DataParallel,
    model: &M,
    draft: &Draft,
    step: u64,
) -> Result<Vec<Written>, Error> {
    let own = write_own(group.rank(), strategy, model, draft, step);
    let (text, own) = match own {
        Ok(written) => (serde_json::to_string(&written).unwrap_or_default(), Ok(())),
        Err(error) => (String::new(), Err(error)),
    };
    agreed(group, own)?;
    let all = group.all_gather_uneven(text.into_bytes()).wait()?;
    let read = |text: &Vec<u8>| serde_json::from_slice(text).unwrap_or_default();
    Ok(all.iter().map(read).collect())
}

fn write_own<M: Module>(
    rank: usize,
    strategy: &DataParallel,
    model: &M,
    draft: &Draft,
    step: u64,
) -> Result<Written, Error> {
    let mut shard = draft.shard(rank);
    let mut broken = None;
    strategy.own_pieces(model, |piece| {
        shard.announce(piece.of.name(), piece.info, piece.range.start, piece.values);
        shard.alias(&piece.info.path, piece.aliases);
        let is_finite = gradient::first_not_finite(piece.values).is_none();
        if piece.of == PieceOf::Weights && !is_finite && broken.is_none() {
            broken = Some(piece.info.path.clone());
        }
    })?;
    if let Some(path) = broken {
        return Err(Error::WeightsNotFinite { step, path });
    }
    let mut file = shard.begin()?;
    let mut outcome = Ok(());
    strategy.own_pieces(model, |piece| {
        if outcome.is_ok() {
            outcome = file.piece(piece.of.name(), piece.info, piece.range.start, piece.values);
        }
    })?;
    outcome?;
    file.finish()
}

/// The manifest with what the ranks have written.
fn complete(mut manifest: Manifest, written: Vec<Written>) -> Manifest {
    manifest.world = written.len();
    for (rank, Written { file, tensors }) in written.into_iter().enumerate() {
        manifest.files.extend(file.map(|file| (checkpoint::file_of(rank), file)));
        manifest.tensors.extend(tensors);
    }
    manifest
}

/// The outcome, if all ranks have succeeded; else this rank's own error, or the first of the others'.
fn agreed<T>(group: &ProcessGroup, outcome: Result<T, Error>) -> Result<T, Error> {
    let mine = outcome.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let all = group.all_gather_uneven(mine.into_bytes()).wait()?;
    let value = outcome?;
    match all.iter().position(|problem| !problem.is_empty()) {
        None => Ok(value),
        Some(rank) => {
            let problem = String::from_utf8_lossy(&all[rank]).into_owned();
            Err(Error::Saving { rank, problem })
        }
    }
}

#[cfg(test)]
mod tests;
