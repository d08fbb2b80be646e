//! What each rank holds only its own shard of.

use std::ops::Range;

use crate::group::ProcessGroup;
use crate::layout::UnitLayout;
use crate::shard::shard;

/// What the ranks hold in shards, each stage adding to the one before (Rajbhandari et al., ZeRO,
/// 2020). Bytes per rank are for `P` parameters in `f32`, AdamW, `N` ranks and `A` micro-batches.
///
/// | stage | bytes beside the model's `4 P` | elements sent and received x `(N - 1) / N` |
/// |---|---|---|
/// | [`Stage::Nothing`] | gradients `4 P`, masters and state `12 P` | `2 P` |
/// | [`Stage::Optimizer`] | gradients `4 P`, masters and state `12 P / N` | `2 P` |
/// | [`Stage::Gradients`] | gradients, masters and state `16 P / N`, and units in flight | `(A + 1) P` |
///
/// With one micro-batch per step all stages give the same bits. With several, the last one adds up
/// sums over ranks, and the others sum over ranks what each has added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Nothing: every rank holds everything (DDP).
    #[default]
    Nothing,
    /// Master weights and optimizer state (ZeRO-1).
    Optimizer,
    /// Gradients as well (ZeRO-2): a unit's are reduced in every micro-batch, and only the own shard
    /// is kept.
    Gradients,
}

impl Stage {
    /// The part of a unit's flat buffer that a rank's optimizer steps.
    pub(crate) fn owned(self, unit: &UnitLayout, group: &ProcessGroup) -> Range<usize> {
        match self {
            Self::Nothing => 0..unit.len,
            Self::Optimizer | Self::Gradients => shard(unit.len, group.world(), group.rank()),
        }
    }
}
