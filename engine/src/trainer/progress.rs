//! How far a run goes, and how far it has come.

use crate::checkpoint::Manifest;
use crate::data::Loader;
use crate::plan::Plan;

/// What a rank knows of the run's extent and of where it is.
#[derive(Debug)]
pub(super) struct Progress {
    pub(super) step: u64,
    /// Steps whose gradients overflowed, among these.
    pub(super) skipped: u64,
    /// Steps that earlier runs took.
    pub(super) first_step: u64,
    pub(super) last_step: u64,
    pub(super) samples: u64,
    pub(super) samples_per_step: u64,
    /// Position at which the stream of samples ends.
    pub(super) limit: u64,
    pub(super) epoch_len: u64,
    pub(super) tokens: u64,
    pub(super) tokens_per_sample: u64,
    pub(super) peak_device_bytes: Option<u64>,
}

impl Progress {
    pub(super) fn new<B: Send + 'static>(
        plan: &Plan,
        train: &Loader<B>,
        resumed: Option<&Manifest>,
    ) -> Self {
        let config = &plan.resolved;
        let (step, samples, tokens) = resumed
            .map_or((0, 0, 0), |manifest| (manifest.step, manifest.samples, manifest.tokens));
        let samples_per_step =
            (config.accumulate_grad_batches * plan.world * train.batch_size) as u64;
        let epoch_len = train.dataset.len() as u64;
        let limit = config.max_epochs.map_or(u64::MAX, |epochs| epochs.saturating_mul(epoch_len));
        let by_epochs = step + limit.saturating_sub(samples).div_ceil(samples_per_step);
        Self {
            step,
            skipped: resumed.map_or(0, |manifest| manifest.skipped),
            first_step: step,
            last_step: config.max_steps.unwrap_or(u64::MAX).min(by_epochs).max(step),
            samples,
            samples_per_step,
            limit,
            epoch_len,
            tokens,
            tokens_per_sample: train.dataset.tokens_per_sample() as u64,
            peak_device_bytes: None,
        }
    }

    /// Steps that changed the weights.
    pub(super) fn applied(&self) -> u64 {
        self.step - self.skipped
    }

    /// Epochs that have ended.
    pub(super) fn epochs(&self) -> u64 {
        self.samples / self.epoch_len.max(1)
    }

    /// Samples that the next step consumes.
    pub(super) fn next_samples(&self) -> u64 {
        self.samples_per_step.min(self.limit - self.samples)
    }
}
