//! Makes a rank's micro-batches ahead of time.

use std::sync::Arc;

use crossbeam_channel::{Receiver, bounded};

use super::Loader;
use super::sampler::{Sampling, Stream, positions};
use crate::error::{BoxError, Error};

/// Batches that are made ahead of the one in use.
const PREFETCH: usize = 2;

/// A micro-batch and its weight in the step's mean.
#[derive(Clone, Debug)]
pub struct Weighted<B> {
    /// The batch.
    pub batch: B,
    /// The samples' weight over the nominal batch size. 0 where the data ran out: such a batch
    /// repeats a sample, so that the rank runs the same units as the others, and counts nothing.
    pub weight: f64,
}

/// One rank's place in the stream of samples.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) world: usize,
    pub(crate) rank: usize,
    pub(crate) accumulate: usize,
    pub(crate) seed: u64,
    /// Samples that earlier steps consumed.
    pub(crate) consumed: u64,
    /// Position at which the stream ends.
    pub(crate) limit: u64,
    /// Steps to make.
    pub(crate) steps: u64,
}

/// A rank's micro-batches, in order.
#[derive(Debug)]
pub struct MicroBatches<B> {
    batches: Receiver<Result<Weighted<B>, BoxError>>,
}

impl<B: Send + 'static> MicroBatches<B> {
    /// Starts making batches.
    pub(crate) fn start(loader: &Loader<B>, place: Place) -> Self {
        let (sender, batches) = bounded(PREFETCH);
        let dataset = Arc::clone(&loader.dataset);
        let batch_size = loader.batch_size;
        let mut stream = Stream::new(loader.sampling.clone(), dataset.len(), place.seed);
        let make = move || {
            let step_samples = (place.accumulate * place.world * batch_size) as u64;
            for (step, micro_batch) in
                (0..place.steps).flat_map(|s| (0..place.accumulate).map(move |m| (s, m)))
            {
                let consumed = place.consumed + step * step_samples;
                let ranks = (place.world, place.rank);
                let at = positions(consumed, micro_batch, ranks, batch_size, place.limit);
                let (indices, weight) = if at.is_empty() {
                    (stream.samples(place.limit - 1..place.limit), 0.0)
                } else {
                    let indices = stream.samples(at);
                    let weight = dataset.weight(&indices) / batch_size as f64;
                    (indices, weight)
                };
                let made = dataset.batch(&indices).map(|batch| Weighted { batch, weight });
                let failed = made.is_err();
                // The receiver is gone when the run has ended early.
                if sender.send(made).is_err() || failed {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name(format!("data-{}", place.rank))
            .spawn(make)
            .expect("the operating system should start a data thread");
        Self { batches }
    }

    /// The next micro-batch.
    ///
    /// # Errors
    ///
    /// What the dataset returned, or a message if its thread panicked.
    pub fn next(&self) -> Result<Weighted<B>, BoxError> {
        self.batches.recv().unwrap_or_else(|_| Err("the data thread has ended early".into()))
    }
}

/// Checks what a loader asks for.
pub(crate) fn check<B: Send + 'static>(loader: &Loader<B>, which: &str) -> Result<(), Error> {
    if loader.batch_size == 0 {
        return Err(Error::setting("batch_size", "0 is not a batch; use 1 or more"));
    }
    if loader.dataset.is_empty() {
        return Err(Error::Data(format!("the {which} data holds no sample")));
    }
    let replicas = match &loader.sampling {
        Sampling::Custom(sampler) => sampler.num_replicas(),
        _ => 1,
    };
    if replicas != 1 {
        return Err(Error::Data(format!(
            "the {which} sampler is already sharded over {replicas} replicas; the engine shards \
             the data itself, so pass a sampler over all samples"
        )));
    }
    Ok(())
}
