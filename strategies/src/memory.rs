//! Bytes that the engine holds, by what they are for.
//!
//! Whoever holds memory holds a [`Held`] beside it, so that what is counted lives exactly as long as
//! what it stands for. Counted are buffers of the engine, padding included: not what autodiff saves
//! inside a unit, nor what a backend allocates while it computes.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Category {
    /// Weights of whole units, as a model computes with them.
    ParametersFull,
    /// The rank's own shard of the weights, where it holds no more of them.
    ParametersSharded,
    /// Gradients, whole units' or the own shard's.
    Gradients,
    /// The optimizer's state.
    Optimizer,
    /// Buffers that exist only for a collective.
    Communication,
    /// Inputs and outputs of units, kept for the backward pass.
    Activations,
}

/// Number of categories.
const COUNT: usize = 6;

impl Category {
    /// All categories, in the order of [`Bytes`].
    pub const ALL: [Self; COUNT] = [
        Self::ParametersFull,
        Self::ParametersSharded,
        Self::Gradients,
        Self::Optimizer,
        Self::Communication,
        Self::Activations,
    ];

    /// The name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ParametersFull => "parameters_full",
            Self::ParametersSharded => "parameters_sharded",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Communication => "communication",
            Self::Activations => "activations",
        }
    }
}

/// Bytes by category, in the order of [`Category::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes([u64; COUNT]);

impl Bytes {
    /// Bytes of one category.
    #[must_use]
    pub fn of(&self, category: Category) -> u64 {
        self.0[category as usize]
    }

    /// Bytes of all categories.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

impl From<[u64; COUNT]> for Bytes {
    fn from(bytes: [u64; COUNT]) -> Self {
        Self(bytes)
    }
}

impl From<Bytes> for [u64; COUNT] {
    fn from(bytes: Bytes) -> Self {
        bytes.0
    }
}

/// What a rank held at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Seconds since the recording began.
    pub seconds: f64,
    /// What was held from then on.
    pub live: Bytes,
}

/// The most that a rank held since [`Ledger::begin_step`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    /// The largest of each category, each at a moment of its own.
    pub by_category: Bytes,
    /// The largest sum of all categories.
    pub total: u64,
}

/// One rank's account. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Arc<Mutex<Account>>);

#[derive(Debug, Default)]
struct Account {
    live: Bytes,
    peak: Peak,
    recording: Option<Recording>,
}

#[derive(Debug)]
struct Recording {
    started: Instant,
    samples: Vec<Sample>,
}

/// Most samples of a recording. A step changes what is held some ten times per unit.
const MAX_SAMPLES: usize = 100_000;

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, Account> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts `bytes` until the result is dropped.
    #[must_use = "bytes are counted for as long as this lives"]
    pub fn hold(&self, category: Category, bytes: usize) -> Held {
        let bytes = bytes as u64;
        self.lock().change(category, |live| live + bytes);
        Held { ledger: self.clone(), category, bytes }
    }

    /// What is held now.
    #[must_use]
    pub fn live(&self) -> Bytes {
        self.lock().live
    }

    /// The most that was held since the step began.
    #[must_use]
    pub fn peak(&self) -> Peak {
        self.lock().peak
    }

    /// Starts a step: peaks count from here.
    pub fn begin_step(&self) {
        let account = &mut *self.lock();
        account.peak = Peak { by_category: account.live, total: account.live.total() };
    }

    /// Records every change from now on.
    pub fn record(&self) {
        let account = &mut *self.lock();
        let start = Sample { seconds: 0.0, live: account.live };
        account.recording = Some(Recording { started: Instant::now(), samples: vec![start] });
    }

    /// Ends the recording, and returns it. The last sample is of now.
    #[must_use]
    pub fn recorded(&self) -> Vec<Sample> {
        let account = &mut *self.lock();
        let Some(Recording { started, mut samples }) = account.recording.take() else {
            return vec![];
        };
        samples.push(Sample { seconds: started.elapsed().as_secs_f64(), live: account.live });
        samples
    }
}

impl Account {
    fn change(&mut self, category: Category, to: impl FnOnce(u64) -> u64) {
        let live = &mut self.live.0[category as usize];
        *live = to(*live);
        let highest = &mut self.peak.by_category.0[category as usize];
        *highest = (*highest).max(*live);
        self.peak.total = self.peak.total.max(self.live.total());
        if let Some(Recording { started, samples }) = &mut self.recording
            && samples.len() < MAX_SAMPLES
        {
            samples.push(Sample { seconds: started.elapsed().as_secs_f64(), live: self.live });
        }
    }
}

/// Memory that is counted until this is dropped.
pub struct Held {
    ledger: Ledger,
    category: Category,
    bytes: u64,
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Held({} bytes of {})", self.bytes, self.category.name())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let bytes = self.bytes;
        self.ledger.lock().change(self.category, |live| live - bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_lives_as_long_as_its_guard() {
        let ledger = Ledger::default();
        let state = ledger.hold(Category::Optimizer, 80);
        let gradients = ledger.hold(Category::Gradients, 40);
        drop(ledger.hold(Category::Gradients, 10));
        assert_eq!(ledger.live().of(Category::Gradients), 40);
        assert_eq!(ledger.peak().by_category.of(Category::Gradients), 50);
        assert_eq!((ledger.live().total(), ledger.peak().total), (120, 130));
        ledger.begin_step();
        assert_eq!(ledger.peak().total, 120);
        ledger.record();
        drop((gradients, state));
        assert_eq!(ledger.live(), Bytes::default());
        let totals: Vec<u64> = ledger.recorded().iter().map(|s| s.live.total()).collect();
        assert_eq!(totals, [120, 80, 0, 0]);
        assert!(ledger.recorded().is_empty(), "it has ended");
    }

    #[test]
    fn categories_are_in_their_own_order() {
        assert!(Category::ALL.iter().enumerate().all(|(at, category)| *category as usize == at));
    }
}
