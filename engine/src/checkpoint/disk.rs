//! What a checkpoint asks of the file system. Tests make each call fail, or be the last one that is made.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use crate::error::Error;

pub(super) fn create_folder(path: &Path) -> Result<(), Error> {
    call("creating", path, || fs::create_dir(path))
}

pub(super) fn remove_folder(path: &Path) -> Result<(), Error> {
    call("removing", path, || fs::remove_dir_all(path))
}

pub(super) fn create(path: &Path) -> Result<File, Error> {
    call("creating", path, || File::create(path))
}

/// Writes all of `bytes`.
pub(super) fn write(file: &mut File, path: &Path, bytes: &[u8]) -> Result<(), Error> {
    #[cfg(test)]
    if faults::is_last() {
        // A crash leaves what was written so far.
        let _ = file.write_all(&bytes[..bytes.len() / 2]);
    }
    call("writing", path, || file.write_all(bytes))
}

/// Waits until a file or folder is on the disk.
pub(super) fn sync(path: &Path) -> Result<(), Error> {
    call("syncing", path, || File::open(path)?.sync_all())
}

pub(super) fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    call("renaming", from, || fs::rename(from, to))
}

fn call<T>(
    action: &'static str,
    path: &Path,
    call: impl FnOnce() -> io::Result<T>,
) -> Result<T, Error> {
    #[cfg(test)]
    faults::pass().map_err(Error::io(action, path))?;
    call().map_err(Error::io(action, path))
}

#[cfg(test)]
pub(crate) mod faults {
    //! Calls that fail, on this thread.

    use std::cell::Cell;
    use std::io;

    /// What happens at a call.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub(crate) enum Fault {
        /// It fails, and what follows does not: the disk was full.
        Once,
        /// It fails, and so does everything that follows: the process is dead.
        Death,
    }

    thread_local! {
        static NEXT: Cell<Option<(u64, Fault)>> = const { Cell::new(None) };
        static CALLS: Cell<u64> = const { Cell::new(0) };
    }

    /// Lets `calls` calls pass before the fault; returns how many there were since the last time.
    pub(crate) fn set(fault: Option<(u64, Fault)>) -> u64 {
        NEXT.set(fault);
        CALLS.replace(0)
    }

    /// Whether the next call is the one that fails.
    pub(super) fn is_last() -> bool {
        matches!(NEXT.get(), Some((0, _)))
    }

    pub(super) fn pass() -> io::Result<()> {
        CALLS.set(CALLS.get() + 1);
        match NEXT.get() {
            None => Ok(()),
            Some((0, fault)) => {
                if fault == Fault::Once {
                    NEXT.set(None);
                }
                Err(io::Error::from(io::ErrorKind::StorageFull))
            }
            Some((calls, fault)) => {
                NEXT.set(Some((calls - 1, fault)));
                Ok(())
            }
        }
    }
}
