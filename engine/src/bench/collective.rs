//! The collectives that can be measured, and what they must move.

use pyroclast_strategies::{Element, Pending, ProcessGroup, ReduceOp};

/// A collective. Reductions are sums; the root, where there is one, is rank 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Every rank gets the sum.
    AllReduce,
    /// Every rank gets its shard of the sum.
    ReduceScatter,
    /// Every rank gets every rank's shard.
    AllGather,
    /// Every rank gets the root's numbers.
    Broadcast,
    /// The root gets the sum.
    Reduce,
    /// Ranks exchange shards.
    AllToAll,
}

impl Collective {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Reduce,
        Self::AllToAll,
    ];

    /// The name on the command line and in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::AllToAll => "all_to_all",
        }
    }

    /// Bus bandwidth over algorithm bandwidth: the part of a buffer that one rank must send.
    #[must_use]
    pub fn bus_factor(self, world: usize) -> f64 {
        let others = (world - 1) as f64 / world as f64;
        match self {
            Self::AllReduce => 2.0 * others,
            Self::ReduceScatter | Self::AllGather | Self::AllToAll => others,
            Self::Broadcast | Self::Reduce => 1.0,
        }
    }

    /// Buffers that all ranks together must move from one rank's memory to another's.
    #[must_use]
    pub fn buffers_moved(self, world: usize) -> f64 {
        let others = (world - 1) as f64;
        match self {
            Self::AllReduce => 2.0 * others,
            _ => others,
        }
    }

    pub(super) fn launch<T: Element>(
        self,
        group: &ProcessGroup,
        buffer: Vec<T>,
    ) -> Pending<Vec<T>> {
        match self {
            Self::AllReduce => group.all_reduce(buffer, ReduceOp::Sum),
            Self::ReduceScatter => group.reduce_scatter(buffer, ReduceOp::Sum),
            Self::AllGather => group.all_gather(buffer),
            Self::Broadcast => group.broadcast(buffer, 0),
            Self::Reduce => group.reduce(buffer, ReduceOp::Sum, 0),
            Self::AllToAll => group.all_to_all(buffer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_those_of_nccl_tests() {
        for (collective, two, four) in [
            (Collective::AllReduce, 1.0, 1.5),
            (Collective::ReduceScatter, 0.5, 0.75),
            (Collective::AllGather, 0.5, 0.75),
            (Collective::AllToAll, 0.5, 0.75),
            (Collective::Broadcast, 1.0, 1.0),
            (Collective::Reduce, 1.0, 1.0),
        ] {
            assert_eq!(collective.bus_factor(2), two, "{collective:?}");
            assert_eq!(collective.bus_factor(4), four, "{collective:?}");
        }
    }

    #[test]
    fn what_moves_is_what_the_ranks_send_together() {
        for collective in [Collective::AllReduce, Collective::AllGather, Collective::AllToAll] {
            for world in 1..9 {
                let sent = collective.bus_factor(world) * world as f64;
                assert!((collective.buffers_moved(world) - sent).abs() < 1e-9, "{collective:?}");
            }
        }
    }
}
