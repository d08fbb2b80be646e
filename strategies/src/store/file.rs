//! A store for ranks that share a folder.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::{FAILURE, Store};
use crate::error::Error;

/// How often a waiting rank looks. File systems over a network tell nobody of a new file.
const INTERVAL: Duration = Duration::from_millis(20);

/// One file per value, in a folder that belongs to one run of a job. The folder stays; a second run
/// needs another one.
#[derive(Clone, Debug)]
pub struct FileStore {
    folder: PathBuf,
}

impl FileStore {
    /// The store in `folder`, which is created if it does not exist.
    ///
    /// # Errors
    ///
    /// [`Error::Membership`] if that fails.
    pub fn open(folder: impl Into<PathBuf>) -> Result<Self, Error> {
        let folder = folder.into();
        fs::create_dir_all(&folder).map_err(|error| broken("creating", &folder, &error))?;
        Ok(Self { folder })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name.replace('/', "."))
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        let path = self.path(name);
        match fs::read(&path) {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(broken("reading", &path, &error)),
        }
    }
}

impl Store for FileStore {
    fn set(&self, name: &str, value: &[u8]) -> Result<(), Error> {
        super::check(name, value)?;
        let path = self.path(name);
        let mut token = [0; 8];
        getrandom::fill(&mut token).map_err(|error| Error::Membership(error.to_string()))?;
        let token = u64::from_le_bytes(token);
        // Written under a name of its own first, so that a reader never sees half a value. A hard
        // link fails where its name exists, so only one rank can set a value.
        let draft = self.folder.join(format!(".{token:016x}"));
        let written = fs::File::create_new(&draft).and_then(|mut file| {
            file.write_all(value)?;
            // Other machines must not see the name before the value.
            file.sync_all()
        });
        let outcome = written
            .map_err(|error| broken("writing", &draft, &error))
            .and_then(|()| match fs::hard_link(&draft, &path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(match name {
                    FAILURE => super::taken(name),
                    _ => Error::Setting(format!(
                        "{} exists: either two processes have the same RANK, or the folder was used \
                         before and each run needs a new one",
                        path.display()
                    )),
                }),
                Err(error) => Err(broken("writing", &path, &error)),
                Ok(()) => Ok(()),
            });
        fs::remove_file(&draft).map_err(|error| broken("removing", &draft, &error))?;
        outcome
    }

    fn failure(&self) -> Result<Option<String>, Error> {
        Ok(self.read(FAILURE)?.map(|reason| super::text(&reason)))
    }

    fn get(&self, name: &str, deadline: Instant) -> Result<Vec<u8>, Error> {
        let started = Instant::now();
        loop {
            if let Some(value) = self.read(name)? {
                return Ok(value);
            }
            if let Some(reason) = self.read(FAILURE)? {
                return Err(super::failed(&reason));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(super::absent(name, started.elapsed()));
            }
            thread::park_timeout(left.min(INTERVAL));
        }
    }
}

fn broken(action: &str, path: &Path, error: &io::Error) -> Error {
    Error::Membership(format!("{action} {}: {error}", path.display()))
}
