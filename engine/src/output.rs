//! The folder that a run writes: metrics, configuration, checkpoints, report.

use std::fs;
use std::path::{Path, PathBuf};

use crate::checkpoint::{self, Checkpoint};
use crate::error::Error;
use crate::plan::Resume;

const METRICS: &str = "metrics.jsonl";
const CONFIG: &str = "config.resolved.json";
const REPORT: &str = "report.html";
const CHECKPOINTS: &str = "checkpoints";

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

    /// Refuses a folder that holds a run which is not to be continued.
    ///
    /// # Errors
    ///
    /// [`Error::Config`].
    pub(crate) fn refuse_taken(&self, resume: &Resume) -> Result<(), Error> {
        if *resume == Resume::Never && self.metrics().exists() {
            let problem = "holds a run already; resume it, or name another folder";
            return Err(self.refused(problem));
        }
        Ok(())
    }

    /// Creates the folder and the one for its checkpoints, and tries to write.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if that fails.
    pub(crate) fn create(&self) -> Result<(), Error> {
        let probe = self.path.join(".probe");
        fs::create_dir_all(self.checkpoints())
            .and_then(|()| fs::write(&probe, b""))
            .and_then(|()| fs::remove_file(&probe))
            .map_err(|error| self.refused(format!("cannot be written: {error}")))
    }

    fn refused(&self, problem: impl std::fmt::Display) -> Error {
        Error::setting("out", format!("{}: {problem}", self.path.display()))
    }

    /// The checkpoint to continue from.
    ///
    /// # Errors
    ///
    /// As [`checkpoint::load`]; [`Error::Config`] if a named checkpoint is not there.
    pub(crate) fn resume(
        folder: Option<&Self>,
        resume: &Resume,
    ) -> Result<Option<Checkpoint>, Error> {
        let path = match (resume, folder) {
            (Resume::Never, _) | (Resume::IfPresent, None) => None,
            (Resume::IfPresent, Some(folder)) => checkpoint::newest(&folder.checkpoints())?,
            (Resume::From(path), _) if path.is_dir() => Some(path.clone()),
            (Resume::From(path), _) => {
                return Err(Error::setting(
                    "resume",
                    format!("{}: no such folder", path.display()),
                ));
            }
        };
        path.as_deref().map(checkpoint::load).transpose()
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
