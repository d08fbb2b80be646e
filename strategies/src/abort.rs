//! How one rank's failure reaches all others at once.

use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::description::Description;
use crate::error::Error;

/// The first failure in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The rank that failed.
    pub rank: usize,
    /// Its error.
    pub reason: String,
}

impl Failure {
    /// The error of a rank that is stopped by this failure.
    pub(crate) fn seen_by(self, observer: usize, waiting_in: Description) -> Error {
        Error::Aborted { rank: self.rank, reason: self.reason, observer, waiting_in }
    }
}

/// Shared by all ranks of a group. The first rank to raise it is the one that is blamed.
#[derive(Clone, Debug)]
pub struct AbortSignal {
    state: Arc<Mutex<State>>,
    raised: Receiver<()>,
}

/// Dropping `wake` disconnects every clone of the receiver, and so wakes all who select on it.
#[derive(Debug)]
struct State {
    failure: Option<Failure>,
    wake: Option<Sender<()>>,
}

impl Default for AbortSignal {
    fn default() -> Self {
        let (wake, raised) = bounded(0);
        let state = State { failure: None, wake: Some(wake) };
        Self { state: Arc::new(Mutex::new(state)), raised }
    }
}

impl AbortSignal {
    /// Records that `rank` failed, unless another rank already did, and wakes every waiting rank.
    pub fn raise(&self, rank: usize, reason: impl std::fmt::Display) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.failure.get_or_insert_with(|| Failure { rank, reason: reason.to_string() });
        state.wake = None;
    }

    /// The first failure, if there was one.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).failure.clone()
    }

    /// A channel that carries nothing and disconnects when the signal is raised.
    pub(crate) fn raised(&self) -> &Receiver<()> {
        &self.raised
    }
}
