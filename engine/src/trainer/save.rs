//! Saving a run: when, under which names, and what is kept of it.

mod file;
mod home;
mod saving;
mod together;

use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::module::Module;
use pyroclast_strategies::{DataParallel, ProcessGroup};

use self::file::When;
pub(super) use self::home::Home;
use self::saving::Saving;
use self::together::first_decides;
use crate::checkpoint::{self, CheckpointConfig, Keeper, Kept, Manifest, Moment, Scores};
use crate::error::Error;
use crate::metrics::{Metrics, Split};
use crate::output::Sharing;

/// When a run is saved, and what is kept of it.
#[derive(Debug)]
pub(super) struct Saver {
    config: CheckpointConfig,
    home: Home,
    /// What is there, as rank 0 knows it.
    keeper: Keeper,
    /// What the checkpoint that the run came from has replaced.
    replaced: Vec<String>,
    /// A checkpoint that is being written while training goes on, and what will be there then.
    under_way: Option<(Saving, Keeper)>,
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

/// How far a run has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    pub(super) step: u64,
    /// Epochs that have ended.
    pub(super) epochs: u64,
    /// Whether the step was followed by a validation.
    pub(super) validated: bool,
}

/// A checkpoint that is to be saved.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// The monitored metric; none where it is no number, or where nothing is monitored.
    score: Option<f64>,
}

impl Saver {
    pub(super) fn new(
        config: CheckpointConfig,
        home: Home,
        resumed: Option<&Manifest>,
        epochs: u64,
    ) -> Self {
        let kept = resumed.map(|manifest| manifest.kept.clone()).unwrap_or_default();
        let folder = home.kept().map(|folder| folder.checkpoints());
        let is_there = |kept: &Kept| folder.as_ref().is_some_and(|f| f.join(&kept.name).is_dir());
        let kept = kept.into_iter().filter(is_there).collect();
        Self {
            keeper: Keeper::new(config.clone(), kept),
            replaced: resumed.map(|manifest| manifest.replaced.clone()).unwrap_or_default(),
            config,
            home,
            under_way: None,
            scores: Scores::new(),
            saved_epochs: epochs,
            saved_at: Instant::now(),
            saved_step: resumed.map_or(0, |manifest| manifest.step),
        }
    }

    pub(super) fn home(&self) -> &Home {
        &self.home
    }

    /// Removes what a crash has left: checkpoints that were not complete, and those that were about to be removed.
    /// On ranks that keep a folder, while they keep other runs out of it.
    pub(super) fn clean_up(&self) -> Result<(), Error> {
        let Some(folder) = self.home.kept().map(|folder| folder.checkpoints()) else {
            return Ok(());
        };
        let mut gone: Vec<PathBuf> = self.replaced.iter().map(|name| folder.join(name)).collect();
        if self.home.sharing() == Sharing::NodeLocal {
            // Other machines do not have these.
            let newer = checkpoint::by_step(&folder)?.into_iter();
            gone.extend(newer.filter(|(step, _)| *step > self.saved_step).map(|(_, path)| path));
        }
        let mut gone = gone.into_iter().filter(|path| path.is_dir());
        gone.try_for_each(|path| checkpoint::remove(&path))?;
        let entries = std::fs::read_dir(&folder).map_err(Error::io("reading", &folder))?;
        for entry in entries {
            let path = entry.map_err(Error::io("reading", &folder))?.path();
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

    /// Whether a checkpoint is due after a step, and would be kept. Rank 0 decides.
    pub(super) fn wants(
        &mut self,
        group: &ProcessGroup,
        now: &Now,
    ) -> Result<Option<Wanted>, Error> {
        let moment = Moment {
            step: now.step,
            epochs: now.epochs,
            saved_epochs: self.saved_epochs,
            validated: now.validated,
            seconds: self.saved_at.elapsed().as_secs_f64(),
        };
        // By rank 0's clock; all else is the same on all ranks.
        let is_due = match self.config.train_time_interval {
            Some(_) => first_decides(group, self.config.is_due(&moment))?,
            None => self.config.is_due(&moment),
        };
        if !is_due || self.is_too_early() {
            return Ok(None);
        }
        (self.saved_epochs, self.saved_at) = (now.epochs, Instant::now());
        let score = self.score()?;
        // Which are kept depends on whether the one before was saved.
        self.complete(group)?;
        let is_wanted = first_decides(group, self.home.is_kept() && self.keeper.wants(score))?;
        Ok(is_wanted.then_some(Wanted { score }))
    }

    /// Whether a run that ends is to be saved. One that has taken no step since its last checkpoint keeps that, once
    /// it is written.
    pub(super) fn wants_at_end(
        &mut self,
        group: &ProcessGroup,
        step: u64,
    ) -> Result<Option<Wanted>, Error> {
        self.complete(group)?;
        let score = self.score().unwrap_or_default();
        let is_wanted = step > self.saved_step && first_decides(group, self.home.is_kept())?;
        Ok(is_wanted.then_some(Wanted { score }))
    }

    /// Whether this rank still writes its file of a checkpoint.
    pub(super) fn is_writing(&self) -> bool {
        self.under_way.as_ref().is_some_and(|(saving, _)| !saving.is_written())
    }

    /// Waits for the checkpoint that is being written, if there is one, and removes what is not to be kept any more.
    /// All ranks call it.
    pub(super) fn complete(&mut self, group: &ProcessGroup) -> Result<(), Error> {
        let Some((saving, keeper)) = self.under_way.take() else { return Ok(()) };
        let name = saving.name();
        let manifest = saving.finish(group, &self.home)?;
        self.keeper = keeper;
        let Some(folder) = self.home.kept().map(|folder| folder.checkpoints()) else {
            return Ok(());
        };
        if self.config.save_last {
            link_last(&folder, &name)?;
        }
        let gone = manifest.replaced.iter().map(|name| folder.join(name));
        let mut gone = gone.filter(|path| path.is_dir());
        gone.try_for_each(|path| checkpoint::remove(&path))
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

    /// Saves, or begins to.
    pub(super) fn save<M: Module>(
        &mut self,
        state: &State<'_, M>,
        Wanted { score }: Wanted,
    ) -> Result<(), Error> {
        let step = state.manifest.step;
        let name = checkpoint::name(&self.config, step, state.epochs, &self.scores);
        let folder = self.home.kept().map(|folder| folder.checkpoints());
        let path = folder.map(|folder| free_name(&folder, &name));
        let mut keeper = self.keeper.clone();
        let mut replaced = vec![];
        let name = path.as_ref().and_then(|path| path.file_name());
        if let Some(name) = name.map(|name| name.to_string_lossy().into_owned())
            && keeper.wants(score)
        {
            replaced = keeper.saved(name, score);
        }
        let manifest =
            Manifest { kept: keeper.kept().to_vec(), replaced, ..state.manifest.clone() };
        let when = if self.config.async_save { When::Meanwhile } else { When::Now };
        let saving = Saving::begin(state, (&self.home, path), manifest, when)?;
        (self.under_way, self.saved_step) = (Some((saving, keeper)), step);
        if when == When::Now { self.complete(state.group) } else { Ok(()) }
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        if let Some((saving, _)) = self.under_way.take() {
            saving.abandon(&self.home);
        }
    }
}

/// The path of a checkpoint whose name nobody has: `-v1`, `-v2` and so on distinguish equal ones.
fn free_name(folder: &Path, name: &str) -> PathBuf {
    let versions = (1..).map(|version| folder.join(format!("{name}-v{version}")));
    let mut names = [folder.join(name)].into_iter().chain(versions);
    names.find(|path| !path.exists()).unwrap_or_else(|| folder.join(name))
}

/// Makes the link `last` that of a checkpoint. At no time there is none.
fn link_last(folder: &Path, name: &Path) -> Result<(), Error> {
    let (temporary, link) = (folder.join(".last"), folder.join("last"));
    let _ = std::fs::remove_file(&temporary);
    #[cfg(unix)]
    let linked = std::os::unix::fs::symlink(name, &temporary);
    #[cfg(not(unix))]
    let linked = std::os::windows::fs::symlink_dir(name, &temporary);
    linked.map_err(Error::io("linking", &link))?;
    std::fs::rename(&temporary, &link).map_err(Error::io("linking", &link))
}

#[cfg(test)]
mod tests;
