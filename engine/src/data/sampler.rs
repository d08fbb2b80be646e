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

use crate::error::BoxError;

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
    ///
    /// # Errors
    ///
    /// If the user's sampler does not return a permutation.
    pub(crate) fn samples(&mut self, positions: Range<u64>) -> Result<Vec<usize>, BoxError> {
        positions.map(|position| self.sample(position)).collect()
    }

    fn sample(&mut self, position: u64) -> Result<usize, BoxError> {
        let (epoch, within) = (position / self.len as u64, (position % self.len as u64) as usize);
        if matches!(self.sampling, Sampling::Sequential) {
            return Ok(within);
        }
        if self.order.as_ref().is_none_or(|(known, _)| *known != epoch) {
            let order = self.order_of(epoch);
            if !is_permutation(&order, self.len) {
                let (found, len) = (order.len(), self.len);
                let problem = format!("the sampler's order of epoch {epoch} ({found} indices)");
                return Err(format!("{problem} is no permutation of 0..{len}").into());
            }
            self.order = Some((epoch, order));
        }
        Ok(self.order.as_ref().map_or(within, |(_, order)| order[within]))
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

fn is_permutation(order: &[usize], len: usize) -> bool {
    let mut seen = vec![false; len];
    let fresh =
        |&index: &usize| seen.get_mut(index).is_some_and(|seen| !std::mem::replace(seen, true));
    order.len() == len && order.iter().all(fresh)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_orders_are_permutations_that_change_with_epoch_and_seed() {
        let epoch = |seed, epoch: u64| {
            Stream::new(Sampling::Random, 50, seed)
                .samples(epoch * 50..(epoch + 1) * 50)
                .expect("an order")
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
        assert_eq!(stream.samples(3..8).expect("an order"), [3, 4, 0, 1, 2]);
        let mut random = Stream::new(Sampling::Random, 5, 0);
        let mut samples = |positions| random.samples(positions).expect("an order");
        let across = samples(3..8);
        assert_eq!(across[..2], samples(3..5));
        assert_eq!(across[2..], samples(5..8));
    }

    struct Fixed(Vec<usize>);

    impl Sampler for Fixed {
        fn order(&self, _epoch: u64, _len: usize) -> Vec<usize> {
            self.0.clone()
        }
    }

    #[test]
    fn an_order_that_is_no_permutation_is_refused() {
        for (order, is_valid) in [
            (vec![2, 0, 1], true),
            (vec![0, 1], false),
            (vec![0, 1, 1], false),
            (vec![0, 1, 3], false),
            (vec![0, 1, 2, 0], false),
        ] {
            let mut stream = Stream::new(Sampling::Custom(Arc::new(Fixed(order))), 3, 0);
            assert_eq!(stream.samples(0..1).is_ok(), is_valid);
        }
    }
}
