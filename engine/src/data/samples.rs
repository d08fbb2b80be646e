//! Samples that are in memory already.

use std::sync::Arc;

use super::sampler::Sampling;
use super::{DataModule, Dataset, Loader};
use crate::error::BoxError;

/// Training data in memory, shuffled every epoch. A batch is a `Vec` of samples.
#[derive(Clone, Debug)]
pub struct Samples<T> {
    train: Arc<Vec<T>>,
    validation: Option<Arc<Vec<T>>>,
    batch_size: usize,
}

impl<T> Samples<T> {
    /// Trains on `samples`, in micro-batches of `batch_size` per rank.
    pub fn new(samples: Vec<T>, batch_size: usize) -> Self {
        Self { train: Arc::new(samples), validation: None, batch_size }
    }

    /// Validates on `samples`.
    #[must_use]
    pub fn with_validation(mut self, samples: Vec<T>) -> Self {
        self.validation = Some(Arc::new(samples));
        self
    }
}

impl<T: Clone + Send + Sync + 'static> Dataset for Arc<Vec<T>> {
    type Batch = Vec<T>;

    fn len(&self) -> usize {
        Vec::len(self)
    }

    fn batch(&self, indices: &[usize]) -> Result<Vec<T>, BoxError> {
        Ok(indices.iter().map(|&index| self[index].clone()).collect())
    }
}

impl<T: Clone + Send + Sync + 'static> DataModule for Samples<T> {
    type Batch = Vec<T>;

    fn train(&self) -> Loader<Vec<T>> {
        Loader::new(Arc::clone(&self.train), self.batch_size).with_sampling(Sampling::Random)
    }

    fn validation(&self) -> Option<Loader<Vec<T>>> {
        let validation = self.validation.as_ref()?;
        Some(Loader::new(Arc::clone(validation), self.batch_size))
    }
}
