//! Where batches come from.
//!
//! The engine shards the data: a [`Dataset`] is the whole of it, indexed by sample, and each rank
//! asks for the samples that [`sampler`] gives it. Batches are made on a thread of their own, ahead
//! of the step that trains on them.

pub(crate) mod loader;
pub mod sampler;
mod samples;

use std::sync::Arc;

use crate::error::BoxError;
pub(crate) use loader::MicroBatches;
use sampler::Sampling;
pub use samples::Samples;

/// A finite set of samples.
pub trait Dataset: Send + Sync {
    /// What a training step gets. Lives in host memory; the step moves it to its device.
    type Batch: Send + 'static;

    /// Number of samples.
    fn len(&self) -> usize;

    /// Whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The batch of these samples. `indices` is never empty.
    ///
    /// # Errors
    ///
    /// Any error ends the run.
    fn batch(&self, indices: &[usize]) -> Result<Self::Batch, BoxError>;

    /// How much these samples count in the mean. The loss of a batch must be the mean over the same
    /// measure: by default samples count alike.
    fn weight(&self, indices: &[usize]) -> f64 {
        indices.len() as f64
    }

    /// Tokens in a sample, for throughput only.
    fn tokens_per_sample(&self) -> usize {
        1
    }
}

/// A dataset, and how it is read.
pub struct Loader<B> {
    pub(crate) dataset: Arc<dyn Dataset<Batch = B>>,
    pub(crate) batch_size: usize,
    pub(crate) sampling: Sampling,
}

impl<B: Send + 'static> Loader<B> {
    /// Reads `dataset` in order, in micro-batches of `batch_size` samples per rank.
    pub fn new(dataset: impl Dataset<Batch = B> + 'static, batch_size: usize) -> Self {
        Self { dataset: Arc::new(dataset), batch_size, sampling: Sampling::Sequential }
    }

    /// Sets the order in which samples are read.
    #[must_use]
    pub fn with_sampling(mut self, sampling: Sampling) -> Self {
        self.sampling = sampling;
        self
    }
}

impl<B: Send + 'static> std::fmt::Debug for Loader<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (samples, batch_size, sampling) = (self.dataset.len(), self.batch_size, &self.sampling);
        write!(f, "Loader({samples} samples by {batch_size}, {sampling:?})")
    }
}

/// Prepares and opens the data of a run. Every rank gets a clone.
pub trait DataModule: Clone + Send + Sync {
    /// What a training step gets.
    type Batch: Send + 'static;

    /// Downloads, unpacks, tokenises: whatever must happen once per node. Runs before any rank's
    /// [`setup`](Self::setup); the other ranks wait, no longer than `PYROCLAST_TIMEOUT` (seconds,
    /// 600 by default) allows.
    ///
    /// # Errors
    ///
    /// Any error ends the run.
    fn prepare_data(&self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Opens the data. Runs on every rank.
    ///
    /// # Errors
    ///
    /// Any error ends the run.
    fn setup(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Training data, after [`setup`](Self::setup).
    fn train(&self) -> Loader<Self::Batch>;

    /// Held-out data, if there is any.
    fn validation(&self) -> Option<Loader<Self::Batch>> {
        None
    }
}
