//! What the user's code is told while a run goes on.

use crate::metrics::Metrics;
use crate::trainer::StopReason;

/// What a callback asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub enum Action {
    /// Go on.
    #[default]
    Continue,
    /// End the run after this step, with a checkpoint.
    Stop,
}

/// What is known when a run starts.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RunInfo {
    /// Trainable parameters.
    pub num_params: usize,
    /// Ranks.
    pub world: usize,
    /// Steps that were taken before (a resumed run).
    pub first_step: u64,
    /// Step at which the run ends.
    pub last_step: u64,
    /// Where the ranks compute.
    pub device: String,
}

/// Told of a run's events, on rank 0. A callback sees and may stop a run, but changes nothing in it.
pub trait Callback: Send {
    /// Before the first step.
    fn on_fit_start(&mut self, _run: &RunInfo) {}

    /// After each optimizer step.
    fn on_step_end(&mut self, _metrics: &Metrics) -> Action {
        Action::Continue
    }

    /// After each validation.
    fn on_validation_end(&mut self, _metrics: &Metrics) -> Action {
        Action::Continue
    }

    /// After the last step.
    fn on_fit_end(&mut self, _reason: StopReason) {}
}
