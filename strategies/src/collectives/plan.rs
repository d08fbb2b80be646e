//! Who sends what to whom, as data. A plan is one rank's part of a collective; it is made and
//! tested without any transport.
//!
//! A plan is a list of steps, on ranges that are cut into segments. Ring plans are pipelines: a segment
//! that is received is combined with the rank's own numbers and passed on at once, and the next one is
//! sent before the first one has come round, so that what a rank works on stays in its cache.
//!
//! Costs are given per rank for `W` ranks and `n` elements: steps that wait for each other, and
//! elements sent.
//!
//! | plan | steps | elements sent |
//! |---|---|---|
//! | [`all_reduce`] (ring) | `2 (W - 1)` | `2 n (W - 1) / W`, the least that any algorithm can do |
//! | [`all_reduce_doubling`] | `log2 W` (+ 2 where W is no power of two) | `n` per step |
//! | [`all_reduce_direct`] | `W` | `2 n (W - 1) / W` |
//! | [`all_reduce_hierarchical`], `R` rows of `S` | `2 (S - 1) + 2 (R - 1)` | `2 n (W - 1) / W` |
//! | [`reduce_scatter`], [`all_gather`] | `W - 1` | `n (W - 1) / W` |
//! | [`reduce_scatter_direct`], [`all_to_all`] | 1 | `n (W - 1) / W` |
//! | [`broadcast`], [`reduce`] (chain) | `W - 1` | `n` |
//! | [`gather`], [`scatter`] | 1 | the shard; at the root of a scatter `n (W - 1) / W` |

mod direct;
mod doubling;
mod hierarchical;
mod ring;
mod schedule;

use std::ops::Range;

pub use direct::{
    all_reduce_direct, all_to_all, gather, receive, reduce_scatter_direct, scatter, send,
};
pub use doubling::all_reduce_doubling;
pub use hierarchical::all_reduce_hierarchical;
pub use ring::{all_gather, all_gather_ranges, all_reduce, broadcast, reduce, reduce_scatter};
pub use schedule::Task;

/// One rank's part of a collective.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// What to do, in order. A phase begins when the one before has ended on this rank.
    pub phases: Vec<Phase>,
    /// What segments are sized for.
    pub pipeline: Pipeline,
}

/// Steps that run together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    /// How their segments follow each other.
    pub order: Order,
    /// The steps.
    pub steps: Vec<Step>,
}

/// In which order the segments of several steps are worked on. Two ranks must send and receive
/// segments in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// All segments of a step, then those of the next.
    OneByOne,
    /// Each step follows the one before at a distance of some segments. For rings, where what a rank
    /// sends in one step its successor receives in the next, so that both see one order.
    Wave,
}

/// The shape of a plan, from which its segments are sized. The same on all ranks, because both ends
/// of a message must cut it alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pipeline {
    /// Ranks that a segment reaches one after the other, each passing it on as it arrives.
    pub depth: usize,
    /// Elements of the largest range that travels.
    pub chunk: usize,
}

/// One thing that a rank does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Sends a range of the buffer as it is now.
    Send {
        /// The receiver.
        to: usize,
        /// The range.
        range: Range<usize>,
    },
    /// Receives a range, combines it, and perhaps passes the outcome on.
    Receive {
        /// The sender.
        from: usize,
        /// The range of the buffer that arrives.
        range: Range<usize>,
        /// What happens to it.
        action: Action,
        /// Who gets the outcome next.
        forward: Option<usize>,
    },
    /// Receives a range from each of several ranks, combines them all in the type of partial results,
    /// divides where a mean is asked for, rounds once, keeps the outcome and perhaps passes it on.
    Combine {
        /// Whose numbers are combined, in this order. This rank, which is among them, sends nothing.
        ranks: Vec<usize>,
        /// The range of the buffer that arrives.
        range: Range<usize>,
        /// Who gets the outcome next.
        forward: Option<usize>,
    },
}

/// What a rank does with a range that it receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Combine it with this rank's numbers only to pass it on; the buffer stays as it is.
    Pass,
    /// Combine it with this rank's numbers and keep the outcome.
    Finish,
    /// Keep what arrives in place of this rank's numbers.
    Replace,
}

impl Step {
    /// The range of the buffer that it is about.
    #[must_use]
    pub fn range(&self) -> &Range<usize> {
        match self {
            Self::Send { range, .. }
            | Self::Receive { range, .. }
            | Self::Combine { range, .. } => range,
        }
    }
}

impl Plan {
    /// A plan of one phase.
    fn new(order: Order, steps: Vec<Step>, pipeline: Pipeline) -> Self {
        Self { phases: vec![Phase { order, steps }], pipeline }
    }

    /// All steps of all phases.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.phases.iter().flat_map(|phase| &phase.steps)
    }

    /// The plan for a group within a larger one, on a part of a larger buffer that starts at
    /// `offset`. `rank_of` says which rank of the larger group each rank is.
    #[must_use]
    pub fn placed(mut self, offset: usize, rank_of: impl Fn(usize) -> usize) -> Self {
        for step in self.phases.iter_mut().flat_map(|phase| &mut phase.steps) {
            let range = match step {
                Step::Send { to, range } => {
                    *to = rank_of(*to);
                    range
                }
                Step::Receive { from, range, forward, .. } => {
                    *from = rank_of(*from);
                    *forward = forward.map(&rank_of);
                    range
                }
                Step::Combine { ranks, range, forward } => {
                    ranks.iter_mut().for_each(|rank| *rank = rank_of(*rank));
                    *forward = forward.map(&rank_of);
                    range
                }
            };
            *range = range.start + offset..range.end + offset;
        }
        self
    }
}

#[cfg(test)]
mod tests;
