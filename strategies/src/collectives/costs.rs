//! What messages cost.

use super::plan::Pipeline;

/// Smallest and largest segment that [`CostModel::segment_bytes`] gives: below, messages cost more
/// than they carry; above, a rank of several on one machine no longer passes a segment on from its
/// second-level cache.
const SEGMENT_BYTES: (f64, f64) = ((16 << 10) as f64, (512 << 10) as f64);

/// What it costs to send a message between two ranks. All ranks must have the same: algorithms and
/// segments are chosen by it.
///
/// Only the ratios of the numbers decide anything, so a rough measurement will do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Seconds that a message takes to reach a waiting peer, whatever its size. By default 20 µs:
    /// the wake-up of a thread, or a packet on a loopback or local network.
    pub latency_s: f64,
    /// Bytes per second that one rank sends. By default 2e9.
    pub bytes_per_s: f64,
    /// Bytes of partial results per second that one rank combines. By default 8e9.
    pub combined_bytes_per_s: f64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self { latency_s: 20e-6, bytes_per_s: 2e9, combined_bytes_per_s: 8e9 }
    }
}

impl CostModel {
    /// Seconds for `messages` that wait for each other and carry `sent` bytes altogether, and for
    /// combining partial results of `combined` bytes.
    #[must_use]
    pub fn seconds(&self, messages: f64, sent: f64, combined: f64) -> f64 {
        messages * self.latency_s + sent / self.bytes_per_s + combined / self.combined_bytes_per_s
    }

    /// The segment that gets a plan's chunks of `c` bytes through its `d` steps soonest. With `k`
    /// segments per chunk, the last one arrives after
    ///
    /// ```text
    /// t = (d + k - 1) x (latency + c / (k x bandwidth))
    /// ```
    ///
    /// which is least for `k = sqrt((d - 1) x c / (latency x bandwidth))`. The outcome lies between
    /// 16 KiB and 512 KiB and is the same on all ranks, because a pipeline's shape is.
    #[must_use]
    pub fn segment_bytes(&self, pipeline: Pipeline, element_bytes: usize) -> usize {
        let chunk_bytes = (pipeline.chunk * element_bytes) as f64;
        let hops = pipeline.depth.saturating_sub(1) as f64;
        let segments = (hops * chunk_bytes / (self.latency_s * self.bytes_per_s)).sqrt().max(1.0);
        (chunk_bytes / segments).clamp(SEGMENT_BYTES.0, SEGMENT_BYTES.1) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(depth: usize, chunk: usize) -> usize {
        CostModel::default().segment_bytes(Pipeline { depth, chunk }, 4)
    }

    #[test]
    fn segments_are_the_least_of_the_formula() {
        let costs = CostModel::default();
        for (depth, bytes) in [(6, 8e6), (14, 4e6), (3, 1e6)] {
            let chosen = bytes / segment(depth, bytes as usize / 4) as f64;
            let seconds = |segments: f64| {
                let steps = depth as f64 + segments - 1.0;
                steps * costs.seconds(1.0, bytes / segments, 0.0)
            };
            for other in [0.5, 0.9, 1.1, 2.0] {
                assert!(seconds(chosen) <= seconds(chosen * other), "{depth} steps, {bytes} bytes");
            }
        }
    }

    #[test]
    fn segments_stay_between_their_limits() {
        assert_eq!(segment(0, 0), 16 << 10);
        assert_eq!(segment(126, 10_000), 16 << 10);
        assert_eq!(segment(2, 1 << 28), 512 << 10);
        // Where nothing is passed on, segments have nothing to gain.
        assert_eq!(segment(1, 1 << 28), 512 << 10);
        assert_eq!(segment(1, 50_000), 200_000);
    }
}
