//! Which samples a rank sees, and when.
//!
//! One global stream of samples serves all ranks. Position `k` of the stream is sample `k mod n` of
//! the order of epoch `k div n`. Micro-batch `m` of a step takes, on rank `r` of a world of `W`, the
//! `B` positions from `consumed + (m * W + r) * B`. So the samples of a step depend on the world only
//! through the size of the global batch, and a run that continues at another world or batch size
//! neither repeats nor skips any.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// An order of samples that the user defines.
pub trait Sampler: Send + Sync {
    /// A permutation of `0..len`, the same on every rank.
    fn order(&self, epoch: u64, len: usize) -> Vec<usize>;

    /// How many ranks the sampler has already split the data among. The engine does that itself, so
    /// anything but 1 is refused.
    fn num_replicas(&self) -> usize {
        1
    }
}

/// In which order samples are read.
#[derive(Clone)]
pub enum Sampling {
    /// As they are stored.
    Sequential,
    /// A new permutation each epoch, seeded by the run's seed and the epoch.
    Random,
    /// As the user's sampler says.
    Custom(Arc<dyn Sampler>),
}

impl fmt::Debug for Sampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sequential => "sequential",
            Self::Random => "random",
            Self::Custom(_) => "custom",
        })
    }
}

/// The stream of samples; remembers the order of the epoch that it read last.
#[derive(Debug)]
pub(crate) struct Stream {
    sampling: Sampling,
    len: usize,
    seed: u64,
    order: Option<(u64, Vec<usize>)>,
}

impl Stream {
    pub(crate) fn new(sampling: Sampling, len: usize, seed: u64) -> Self {
        Self { sampling, len, seed, order: None }
    }

    /// The samples at `positions`.
    pub(crate) fn samples(&mut self, positions: Range<u64>) -> Vec<usize> {
        positions.map(|position| self.sample(position)).collect()
    }

    fn sample(&mut self, position: u64) -> usize {
        let (epoch, within) = (position / self.len as u64, (position % self.len as u64) as usize);
        if matches!(self.sampling, Sampling::Sequential) {
            return within;
        }
        if self.order.as_ref().is_none_or(|(known, _)| *known != epoch) {
            self.order = Some((epoch, self.order_of(epoch)));
        }
        self.order.as_ref().map_or(within, |(_, order)| order[within])
    }

    fn order_of(&self, epoch: u64) -> Vec<usize> {
        match &self.sampling {
            Sampling::Sequential => (0..self.len).collect(),
            Sampling::Random => {
                let mut order: Vec<usize> = (0..self.len).collect();
                let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
                // One stream of the generator per epoch: no epoch's order depends on another's.
                rng.set_stream(epoch);
                order.shuffle(&mut rng);
                order
            }
            Sampling::Custom(sampler) => sampler.order(epoch, self.len),
        }
    }
}

/// The positions of micro-batch `micro_batch` of a step, cut off at `limit`.
pub(crate) fn positions(
    consumed: u64,
    micro_batch: usize,
    (world, rank): (usize, usize),
    batch_size: usize,
    limit: u64,
) -> Range<u64> {
    let start = consumed + ((micro_batch * world + rank) * batch_size) as u64;
    start.min(limit)..(start + batch_size as u64).min(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_the_same_samples_at_any_world() {
        let step = |world, accumulate, batch: usize| {
            let mut all: Vec<u64> = (0..accumulate)
                .flat_map(|m| (0..world).map(move |r| (m, r)))
                .flat_map(|(m, r)| positions(100, m, (world, r), batch, u64::MAX))
                .collect();
            all.sort_unstable();
            all
        };
        let expected: Vec<u64> = (100..112).collect();
        for (world, accumulate, batch) in [(1, 1, 12), (2, 1, 6), (3, 1, 4), (4, 1, 3), (2, 3, 2)] {
            assert_eq!(step(world, accumulate, batch), expected);
        }
    }

    #[test]
    fn the_limit_cuts_batches_short_or_empty() {
        assert_eq!(positions(8, 0, (2, 0), 4, 10), 8..10);
        assert_eq!(positions(8, 0, (2, 1), 4, 10), 10..10);
    }

    #[test]
    fn random_orders_are_permutations_that_change_with_epoch_and_seed() {
        let epoch = |seed, epoch: u64| {
            Stream::new(Sampling::Random, 50, seed).samples(epoch * 50..(epoch + 1) * 50)
        };
        let mut sorted = epoch(7, 3);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        assert_eq!(epoch(7, 3), epoch(7, 3));
        assert_ne!(epoch(7, 3), epoch(7, 4));
        assert_ne!(epoch(7, 3), epoch(8, 3));
    }

    #[test]
    fn the_stream_wraps_into_the_next_epoch() {
        let mut stream = Stream::new(Sampling::Sequential, 5, 0);
        assert_eq!(stream.samples(3..8), [3, 4, 0, 1, 2]);
        let mut random = Stream::new(Sampling::Random, 5, 0);
        let across = random.samples(3..8);
        assert_eq!(across[..2], random.samples(3..5));
        assert_eq!(across[2..], random.samples(5..8));
    }
}
