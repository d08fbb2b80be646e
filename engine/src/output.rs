//! The folder that a run writes: metrics, configuration, checkpoints, report.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use crate::checkpoint;
use crate::error::Error;
use crate::plan::Resume;

const METRICS: &str = "metrics.jsonl";
const CONFIG: &str = "config.resolved.json";
const LOCK: &str = ".lock";
const MEMORY: &str = "memory.json";
const REPORT: &str = "report.html";
const CHECKPOINTS: &str = "checkpoints";

/// Whether machines share the folder of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// They do.
    OneFolder,
    /// Each has its own, with its ranks' part of every checkpoint.
    NodeLocal,
}

/// A run's folder.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// The run in `path`, whether it exists or not.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Refuses a folder that holds a run, unless it is that run which is to be continued, from its
    /// newest checkpoint: continuing from an older one would leave two histories in one folder.
    ///
    /// # Errors
    ///
    /// [`Error::Config`].
    pub fn refuse_taken(&self, resume: &Resume) -> Result<(), Error> {
        if self.path.as_os_str().is_empty() {
            return Err(Error::setting("out", "an empty name; give a folder, or leave it out"));
        }
        let newest = checkpoint::newest(&self.checkpoints())
            .map_err(|error| self.refused(format!("cannot be used: {error}")))?;
        if !self.metrics().exists() && newest.is_none() {
            return Ok(());
        }
        match resume {
            Resume::IfPresent => Ok(()),
            Resume::Never => {
                Err(self.refused("holds a run already; resume it, or name another folder"))
            }
            Resume::From(path) => {
                let same = |a: &Path, b: &Path| a.canonicalize().ok() == b.canonicalize().ok();
                let path = checkpoint_in(path)?;
                match newest {
                    Some(newest) if same(&newest, &path) => Ok(()),
                    _ => Err(self.refused(format!(
                        "holds a run whose newest checkpoint is not {}; name another folder",
                        path.display()
                    ))),
                }
            }
        }
    }

    /// Creates the folder and the one for its checkpoints, and keeps other runs out of it for as long
    /// as the returned lock lives.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if that fails.
    pub(crate) fn create(&self) -> Result<File, Error> {
        let cannot = |error: std::io::Error| self.refused(format!("cannot be written: {error}"));
        fs::create_dir_all(self.checkpoints()).map_err(cannot)?;
        let lock = File::create(self.path.join(LOCK)).map_err(cannot)?;
        match lock.try_lock() {
            Ok(()) => Ok(lock),
            Err(TryLockError::WouldBlock) => Err(self.refused("another run is writing to it")),
            Err(TryLockError::Error(error)) => Err(cannot(error)),
        }
    }

    fn refused(&self, problem: impl std::fmt::Display) -> Error {
        Error::setting("out", format!("{}: {problem}", self.path.display()))
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `metrics.jsonl`.
    #[must_use]
    pub fn metrics(&self) -> PathBuf {
        self.path.join(METRICS)
    }

    /// `config.resolved.json`.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.path.join(CONFIG)
    }

    /// `memory.json`.
    #[must_use]
    pub fn memory(&self) -> PathBuf {
        self.path.join(MEMORY)
    }

    /// `report.html`.
    #[must_use]
    pub fn report(&self) -> PathBuf {
        self.path.join(REPORT)
    }

    /// The folder of checkpoints.
    #[must_use]
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join(CHECKPOINTS)
    }

    pub(crate) fn write_config(&self, config: &serde_json::Value) -> Result<(), Error> {
        let path = self.config();
        fs::write(&path, format!("{config:#}\n")).map_err(Error::io("writing", path))
    }
}

/// The checkpoint that a path means: itself, or the newest of the run that it names.
pub(crate) fn checkpoint_in(path: &Path) -> Result<PathBuf, Error> {
    if !path.is_dir() {
        return Err(Error::setting("resume", format!("{}: no such folder", path.display())));
    }
    let newest = checkpoint::newest(&RunFolder::at(path).checkpoints())?;
    Ok(newest.unwrap_or_else(|| path.to_owned()))
}
