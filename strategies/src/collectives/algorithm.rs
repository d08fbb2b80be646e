//! Which all-reduce to run.

use super::{CostModel, Element};

/// How an all-reduce is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// Whichever [`Algorithm::resolve`] finds the cheapest.
    #[default]
    Auto,
    /// Ring: the least data, many steps.
    Ring,
    /// Recursive doubling: all data in every step, few steps.
    Doubling,
    /// Every rank sends each chunk straight to the chunk's owner, in its own type. The owner combines
    /// in rank order in the type of partial results and rounds once; a ring then hands the outcome
    /// round. Half precision travels as two bytes.
    Direct,
    /// Rings along the axes of a mesh: as little data as [`Algorithm::Ring`] in fewer steps.
    Hierarchical {
        /// Ranks in a row of the mesh; must divide the world.
        shard: usize,
    },
}

/// What an all-reduce has to do, as far as its cost depends on it. The same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Elements of each rank's buffer.
    pub elements: usize,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// Bytes of a partial result: four for half precision, else as many as an element has.
    pub partial_bytes: usize,
    /// Number of ranks.
    pub world: usize,
    /// Ranks in a row, if the ranks are a mesh.
    pub mesh_shard: Option<usize>,
}

impl Workload {
    /// An all-reduce of `elements` of type `T` over `world` ranks that are no mesh.
    #[must_use]
    pub fn new<T: Element>(elements: usize, world: usize) -> Self {
        let (element_bytes, partial_bytes) = (size_of::<T>(), size_of::<T::Partial>());
        Self { elements, element_bytes, partial_bytes, world, mesh_shard: None }
    }

    /// Whether a partial result is larger than an element, as in half precision.
    fn is_narrow(&self) -> bool {
        self.element_bytes < self.partial_bytes
    }
}

impl Algorithm {
    /// What runs for `work`: the choice, or for [`Algorithm::Auto`] the one of the least
    /// [`Algorithm::seconds`].
    ///
    /// [`Algorithm::Direct`] is a candidate where it sends half the bytes, that is for half
    /// precision; for all other types a ring sends as much, and every rank talks to two others only.
    /// [`Algorithm::Hierarchical`] is one where the ranks are said to be a mesh.
    #[must_use]
    pub fn resolve(self, work: &Workload, costs: &CostModel) -> Self {
        if self != Self::Auto {
            return self;
        }
        let direct = work.is_narrow().then_some(Self::Direct);
        let mesh = work.mesh_shard.map(|shard| Self::Hierarchical { shard });
        // Of equals the first is taken.
        [Some(Self::Ring), mesh, direct, Some(Self::Doubling)]
            .into_iter()
            .flatten()
            .min_by(|a, b| a.seconds(work, costs).total_cmp(&b.seconds(work, costs)))
            .unwrap_or(Self::Ring)
    }

    /// What runs where each rank's shard is reduced by itself: [`Algorithm::Ring`] or
    /// [`Algorithm::Direct`], as chosen; else direct for half precision and a ring for all others.
    /// The size has no say, so that reductions in one piece and in several give the same bits.
    #[must_use]
    pub fn for_shards(self, work: &Workload) -> Self {
        match self {
            Self::Ring | Self::Direct => self,
            _ if work.is_narrow() => Self::Direct,
            _ => Self::Ring,
        }
    }

    /// Seconds that an all-reduce takes, for `W` ranks (`R` rows of `S`), `n` elements of `e` bytes
    /// and partial results of `p` bytes:
    ///
    /// ```text
    /// ring          2 (W - 1)              x latency + 2 (W - 1) / W x n p / bandwidth
    /// doubling      steps                  x latency + steps         x n p / bandwidth
    /// direct        W                      x latency + 2 (W - 1) / W x n e / bandwidth
    /// hierarchical  (2 (S - 1) + 2 (R - 1)) x latency + 2 (W - 1) / W x n p / bandwidth
    ///
    /// steps = log2 W, plus 2 unless W is a power of two
    /// ```
    ///
    /// [`Algorithm::Auto`] takes as long as what it resolves to.
    #[must_use]
    pub fn seconds(self, work: &Workload, costs: &CostModel) -> f64 {
        let world = work.world as f64;
        let own = (work.elements * work.element_bytes) as f64;
        let partial = (work.elements * work.partial_bytes) as f64;
        let passes = 2.0 * (world - 1.0) / world;
        match self {
            Self::Auto => self.resolve(work, costs).seconds(work, costs),
            Self::Ring => costs.seconds(2.0 * (world - 1.0), passes * partial),
            Self::Doubling => {
                let extra = if work.world.is_power_of_two() { 0 } else { 2 };
                let steps = f64::from(work.world.ilog2() + extra);
                costs.seconds(steps, steps * partial)
            }
            Self::Direct => costs.seconds(world, passes * own),
            Self::Hierarchical { shard } => {
                let (shard, rows) = (shard as f64, world / shard as f64);
                costs.seconds(2.0 * (shard - 1.0) + 2.0 * (rows - 1.0), passes * partial)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn auto<T: Element>(elements: usize, world: usize) -> Algorithm {
        Algorithm::Auto.resolve(&Workload::new::<T>(elements, world), &CostModel::default())
    }

    #[test]
    fn small_messages_take_few_steps_and_large_ones_little_data() {
        for world in [2, 4, 8, 64] {
            assert_eq!(auto::<f32>(2, world), Algorithm::Doubling, "world {world}");
            assert_eq!(auto::<f16>(2, world), Algorithm::Doubling, "world {world}");
        }
        for world in [3, 4, 5, 8, 64] {
            assert_eq!(auto::<f32>(1 << 24, world), Algorithm::Ring, "world {world}");
            assert_eq!(auto::<i64>(1 << 24, world), Algorithm::Ring, "world {world}");
            assert_eq!(auto::<bf16>(1 << 24, world), Algorithm::Direct, "world {world}");
        }
        assert_eq!(auto::<f32>(1 << 24, 1), Algorithm::Ring);
    }

    #[test]
    fn a_mesh_is_used_where_the_ranks_are_one_and_it_saves_steps() {
        let costs = CostModel::default();
        let work = |mesh_shard| Workload { mesh_shard, ..Workload::new::<f32>(1 << 22, 8) };
        for shard in [2, 4] {
            let chosen = Algorithm::Auto.resolve(&work(Some(shard)), &costs);
            assert_eq!(chosen, Algorithm::Hierarchical { shard });
        }
        // One row or one column is a ring.
        for shard in [None, Some(1), Some(8)] {
            assert_eq!(Algorithm::Auto.resolve(&work(shard), &costs), Algorithm::Ring);
        }
    }

    #[test]
    fn the_choice_is_the_least_of_the_formulas() {
        let costs = CostModel { latency_s: 1.0, bytes_per_s: 1.0 };
        let work = Workload { mesh_shard: Some(3), ..Workload::new::<f16>(6, 6) };
        let seconds = |algorithm: Algorithm| algorithm.seconds(&work, &costs);
        assert_eq!(seconds(Algorithm::Ring), 10.0 + 40.0);
        assert_eq!(seconds(Algorithm::Doubling), 4.0 + 96.0);
        assert_eq!(seconds(Algorithm::Direct), 6.0 + 20.0);
        assert_eq!(seconds(Algorithm::Hierarchical { shard: 3 }), 6.0 + 40.0);
        assert_eq!(seconds(Algorithm::Auto), 26.0);
        assert_eq!(Algorithm::Auto.resolve(&work, &costs), Algorithm::Direct);
    }

    #[test]
    fn a_forced_algorithm_is_what_runs() {
        let costs = CostModel::default();
        let work = Workload::new::<f32>(2, 4);
        let mesh = Algorithm::Hierarchical { shard: 2 };
        for forced in [Algorithm::Ring, Algorithm::Doubling, Algorithm::Direct, mesh] {
            assert_eq!(forced.resolve(&work, &costs), forced);
        }
    }

    #[test]
    fn shards_are_reduced_alike_whatever_their_size() {
        for elements in [0, 1, 1 << 24] {
            let half = Workload::new::<bf16>(elements, 4);
            let single = Workload::new::<f32>(elements, 4);
            for undecided in [Algorithm::Auto, Algorithm::Doubling] {
                assert_eq!(undecided.for_shards(&half), Algorithm::Direct);
                assert_eq!(undecided.for_shards(&single), Algorithm::Ring);
            }
            assert_eq!(Algorithm::Ring.for_shards(&half), Algorithm::Ring);
            assert_eq!(Algorithm::Direct.for_shards(&single), Algorithm::Direct);
        }
    }
}
