//! What a thread is running a unit's function for.

use std::cell::Cell;

/// Why a unit's function runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// For its own outcome.
    Own,
    /// Within a unit that will run again: units inside it need no tapes.
    FirstRun,
    /// Within a unit that is looking for captured tensors, without autodiff.
    Trial,
}

thread_local! {
    static CURRENT: Cell<Pass> = const { Cell::new(Pass::Own) };
}

/// What this thread is running units for.
pub(super) fn current() -> Pass {
    CURRENT.get()
}

/// Runs `f` for `pass`.
pub(super) fn within<R>(pass: Pass, f: impl FnOnce() -> R) -> R {
    let _restore = Restore(CURRENT.replace(pass));
    f()
}

/// Goes back when dropped, also when a pass panics.
struct Restore(Pass);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}
