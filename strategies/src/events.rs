//! What a rank did in which order: computation, and collectives from their launch to the wait for them.
//! Tests look at it to see what ran while a transfer was pending.

use std::sync::{Arc, Mutex, PoisonError};

/// One thing that a rank did. The number is the unit's, but for steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Launched the gathering of weights.
    Gather(usize),
    /// Needed those weights.
    GatherWait(usize),
    /// Ran a forward pass.
    Forward(usize),
    /// Ran a backward pass.
    Backward(usize),
    /// Launched the reduction of gradients.
    Reduce(usize),
    /// Needed those gradients.
    ReduceWait(usize),
    /// Stepped so many elements.
    Step(usize),
}

/// The record of a rank, if one is kept. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Events(Arc<Mutex<Option<Vec<Event>>>>);

impl Events {
    pub(crate) fn push(&self, event: Event) {
        if let Some(events) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            events.push(event);
        }
    }

    /// Keeps a record from now on.
    #[cfg(test)]
    pub(crate) fn record(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(vec![]);
    }

    /// The record so far.
    #[cfg(test)]
    pub(crate) fn recorded(&self) -> Vec<Event> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
    }
}
