//! What the integration tests share.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyroclast::gpt::GptConfig;
use pyroclast::{Action, Callback, Metrics};

/// A model that trains a step in milliseconds.
pub const TINY: GptConfig = GptConfig { layers: 2, heads: 2, width: 32, context: 16 };

/// A file of the golden folder.
#[must_use]
pub fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

/// The text that golden numbers were made from.
///
/// # Panics
///
/// If the repository is incomplete.
#[must_use]
pub fn golden_text() -> Vec<u8> {
    std::fs::read(golden("text.txt")).expect("the golden text should be in the repository")
}

/// Keeps every row of a run.
#[derive(Clone, Debug, Default)]
pub struct Recorder(Arc<Mutex<Vec<Metrics>>>);

impl Recorder {
    /// The rows so far.
    #[must_use]
    pub fn rows(&self) -> Vec<Metrics> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn keep(&self, metrics: &Metrics) -> Action {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(metrics.clone());
        Action::Continue
    }
}

impl Callback for Recorder {
    fn on_step_end(&mut self, metrics: &Metrics) -> Action {
        self.keep(metrics)
    }

    fn on_validation_end(&mut self, metrics: &Metrics) -> Action {
        self.keep(metrics)
    }
}

/// Panics unless `got` is within `tolerance` of `expected`, relative to `expected` or 1.
///
/// # Panics
///
/// As said.
#[track_caller]
pub fn assert_close(got: f64, expected: f64, tolerance: f64, what: &str) {
    let limit = tolerance * expected.abs().max(1.0);
    assert!((got - expected).abs() <= limit, "{what}: got {got}, expected {expected}");
}
