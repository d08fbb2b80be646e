//! Makes a rank's micro-batches ahead of time.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam_channel::{Receiver, bounded};

use super::Loader;
use super::sampler::{Sampling, Stream};
use crate::error::{BoxError, Error};
use crate::ranks::panic_message;

/// Samples of a micro-batch.
pub(crate) const MAX_BATCH_SIZE: usize = 1 << 20;

/// Batches that are made ahead of the one in use.
const PREFETCH: usize = 2;

/// A micro-batch and its weight in the step's mean.
#[derive(Clone, Debug)]
pub(crate) struct Weighted<B> {
    /// The batch.
    pub(crate) batch: B,
    /// The samples' weight over the nominal batch size. 0 where the data ran out: such a batch
    /// repeats a sample, so that the rank runs the same units as the others, and counts nothing.
    pub(crate) weight: f64,
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

impl Place {
    /// The positions of a micro-batch of a step, counted from where this place begins.
    fn positions(&self, step: u64, micro_batch: usize, batch_size: usize) -> Range<u64> {
        let step_samples = (self.accumulate * self.world * batch_size) as u64;
        let within = ((micro_batch * self.world + self.rank) * batch_size) as u64;
        let start = self.consumed + step * step_samples + within;
        start.min(self.limit)..(start + batch_size as u64).min(self.limit)
    }

    /// The last positions of the stream.
    fn last_positions(&self, batch_size: usize) -> Range<u64> {
        self.limit.saturating_sub(batch_size as u64)..self.limit
    }
}

/// A rank's micro-batches, in order.
#[derive(Debug)]
pub(crate) struct MicroBatches<B> {
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
            let order = (0..place.steps).flat_map(|s| (0..place.accumulate).map(move |m| (s, m)));
            for (step, micro_batch) in order {
                let mut one = || -> Result<Weighted<B>, BoxError> {
                    let at = place.positions(step, micro_batch, batch_size);
                    let weight = match at.is_empty() {
                        true => 0.0,
                        false => dataset.weight(&stream.samples(at.clone())?) / batch_size as f64,
                    };
                    let indices = match at.is_empty() {
                        // As many samples as ever: a batch of one would upset running statistics.
                        true => stream.samples(place.last_positions(batch_size))?,
                        false => stream.samples(at)?,
                    };
                    Ok(Weighted { batch: dataset.batch(&indices)?, weight })
                };
                let made = catch_unwind(AssertUnwindSafe(&mut one))
                    .unwrap_or_else(|panic| Err(panic_message(&*panic).into()));
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
    pub(crate) fn next(&self) -> Result<Weighted<B>, BoxError> {
        self.batches.recv().unwrap_or_else(|_| Err("the data thread has ended early".into()))
    }
}

/// Checks what a loader asks for.
pub(crate) fn check<B: Send + 'static>(loader: &Loader<B>, which: &str) -> Result<(), Error> {
    let batch_size = loader.batch_size;
    if batch_size == 0 || batch_size > MAX_BATCH_SIZE {
        let problem = format!("{batch_size} is out of range; it must be 1 to {MAX_BATCH_SIZE}");
        return Err(Error::setting("batch_size", problem));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn place(world: usize, rank: usize, accumulate: usize, limit: u64) -> Place {
        Place { world, rank, accumulate, seed: 0, consumed: 100, limit, steps: 1 }
    }

    #[test]
    fn a_step_takes_the_same_samples_at_any_world() {
        let step = |world, accumulate, batch: usize| {
            let mut all: Vec<u64> = (0..accumulate)
                .flat_map(|m| (0..world).map(move |r| (m, r)))
                .flat_map(|(m, r)| place(world, r, accumulate, u64::MAX).positions(1, m, batch))
                .collect();
            all.sort_unstable();
            all
        };
        let expected: Vec<u64> = (112..124).collect();
        for (world, accumulate, batch) in [(1, 1, 12), (2, 1, 6), (3, 1, 4), (4, 1, 3), (2, 3, 2)] {
            assert_eq!(step(world, accumulate, batch), expected);
        }
    }

    #[test]
    fn the_limit_cuts_batches_short_or_empty() {
        assert_eq!(place(2, 0, 1, 102).positions(0, 0, 4), 100..102);
        assert_eq!(place(2, 1, 1, 102).positions(0, 0, 4), 102..102);
        assert_eq!(place(2, 1, 1, 102).last_positions(4), 98..102);
        assert_eq!(place(2, 1, 1, 3).last_positions(4), 0..3);
    }

    struct Broken;

    impl super::super::Dataset for Broken {
        type Batch = ();

        fn len(&self) -> usize {
            10
        }

        fn batch(&self, indices: &[usize]) -> Result<(), BoxError> {
            panic!("sample {} is damaged", indices[0]);
        }
    }

    #[test]
    fn a_panic_while_making_a_batch_keeps_its_message() {
        let batches = MicroBatches::start(&Loader::new(Broken, 2), place(1, 0, 1, u64::MAX));
        let error = batches.next().expect_err("a damaged sample").to_string();
        assert!(error.contains("sample 0 is damaged"), "{error}");
    }
}
