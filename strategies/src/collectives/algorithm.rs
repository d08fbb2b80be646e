//! Which all-reduce to run.

/// How an all-reduce is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// Whichever [`Algorithm::cheaper`] names.
    #[default]
    Auto,
    /// Ring: the least data, many steps.
    Ring,
    /// Recursive doubling: all data in every step, few steps.
    Doubling,
}

/// Seconds that a message takes to reach a waiting peer, whatever its size. That is a wake-up of a
/// thread or a packet on a loopback or local network; only its ratio to the bandwidth matters.
const LATENCY_S: f64 = 20e-6;

/// Bytes per second that one rank sends and combines.
const BYTES_PER_S: f64 = 2e9;

impl Algorithm {
    /// The algorithm that takes less time for `bytes` on `world` ranks:
    ///
    /// ```text
    /// ring       2 (W - 1) x (latency + bytes / W / bandwidth)
    /// doubling   steps x (latency + bytes / bandwidth),  steps = log2 W, plus 2 unless W is a power of two
    /// ```
    #[must_use]
    pub fn cheaper(bytes: usize, world: usize) -> Self {
        let (world_f, seconds) = (world as f64, bytes as f64 / BYTES_PER_S);
        let ring = 2.0 * (world_f - 1.0) * (LATENCY_S + seconds / world_f);
        let steps = world.ilog2() + if world.is_power_of_two() { 0 } else { 2 };
        let doubling = f64::from(steps) * (LATENCY_S + seconds);
        if doubling < ring { Self::Doubling } else { Self::Ring }
    }

    /// What runs: the choice, if there is one to make.
    #[must_use]
    pub fn resolve(self, bytes: usize, world: usize) -> Self {
        match self {
            Self::Auto => Self::cheaper(bytes, world),
            chosen => chosen,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_messages_take_few_steps_and_large_ones_little_data() {
        for world in [2, 4, 8, 64] {
            assert_eq!(Algorithm::cheaper(8, world), Algorithm::Doubling, "world {world}");
        }
        for world in [3, 4, 5, 8, 64] {
            assert_eq!(Algorithm::cheaper(1 << 26, world), Algorithm::Ring, "world {world}");
        }
        assert_eq!(Algorithm::Ring.resolve(8, 4), Algorithm::Ring);
    }
}
