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
    //! Calls that fail, on this thread and those that it lends its faults to.

    use std::cell::RefCell;
    use std::io;
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

    /// What happens at a call.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub(crate) enum Fault {
        /// It fails, and what follows does not: the disk was full.
        Once,
        /// It fails, and so does everything that follows: the process is dead.
        Death,
    }

    /// How many calls there were, and the fault after how many more.
    #[derive(Debug, Default)]
    struct State {
        calls: u64,
        next: Option<(u64, Fault)>,
    }

    #[derive(Clone, Debug, Default)]
    pub(crate) struct Faults(Arc<Mutex<State>>);

    thread_local! {
        static FAULTS: RefCell<Faults> = RefCell::default();
    }

    /// This thread's.
    pub(crate) fn here() -> Faults {
        FAULTS.with_borrow(Clone::clone)
    }

    /// Makes another thread's faults those of this one.
    pub(crate) fn share(faults: Faults) {
        FAULTS.set(faults);
    }

    fn with<R>(f: impl FnOnce(MutexGuard<'_, State>) -> R) -> R {
        FAULTS.with_borrow(|faults| f(faults.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Lets `calls` calls pass before the fault; returns how many there were since the last time.
    pub(crate) fn set(fault: Option<(u64, Fault)>) -> u64 {
        with(|mut state| {
            state.next = fault;
            std::mem::take(&mut state.calls)
        })
    }

    /// Whether the next call is the one that fails.
    pub(super) fn is_last() -> bool {
        with(|state| matches!(state.next, Some((0, _))))
    }

    pub(super) fn pass() -> io::Result<()> {
        with(|mut state| {
            state.calls += 1;
            match state.next {
                None => Ok(()),
                Some((0, fault)) => {
                    if fault == Fault::Once {
                        state.next = None;
                    }
                    Err(io::Error::from(io::ErrorKind::StorageFull))
                }
                Some((calls, fault)) => {
                    state.next = Some((calls - 1, fault));
                    Ok(())
                }
            }
        })
    }
}
