//! What each rank holds only its own shard of, and when it gathers the rest.

use std::ops::Range;

use crate::group::ProcessGroup;
use crate::layout::UnitLayout;
use crate::shard::shard;

/// What the ranks hold in shards, each stage adding to the one before (Rajbhandari et al., ZeRO,
/// 2020). Bytes per rank are for `P` parameters in `f32`, AdamW, `N` ranks and `A` micro-batches,
/// units in flight apart.
///
/// | stage | bytes | elements sent and received x `(N - 1) / N` |
/// |---|---|---|
/// | [`Stage::Nothing`] | `16 P` | `2 P` |
/// | [`Stage::Optimizer`] | `8 P + 8 P / N` | `2 P` |
/// | [`Stage::Gradients`] | `4 P + 12 P / N` | `(A + 1) P` |
/// | [`Stage::Parameters`] | `16 P / N` | `3 A P`, or `2 A P` where weights are [kept](AfterForward::Keep) |
///
/// With one micro-batch per step all stages give the same bits. With several, the first two add up
/// sums over ranks, and the others sum over ranks what each has added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Nothing: every rank holds everything (DDP, FSDP's NO_SHARD).
    #[default]
    Nothing,
    /// The optimizer's state (ZeRO-1).
    Optimizer,
    /// Gradients as well (ZeRO-2): a unit's are reduced in every micro-batch, and only the own shard
    /// is kept.
    Gradients,
    /// Parameters as well (ZeRO-3, FSDP): a unit's weights are whole only around its forward and its
    /// backward pass. Those outside any unit are whole during a micro-batch.
    Parameters,
}

impl Stage {
    /// The part of a unit's flat buffer that a rank's optimizer steps.
    pub(crate) fn owned(self, unit: &UnitLayout, group: &ProcessGroup) -> Range<usize> {
        match self {
            Self::Nothing => 0..unit.len,
            Self::Optimizer | Self::Gradients | Self::Parameters => {
                shard(unit.len, group.world(), group.rank())
            }
        }
    }

    /// Whether gradients are reduced to shards in every micro-batch.
    pub(crate) fn shards_gradients(self) -> bool {
        self >= Self::Gradients
    }

    /// Whether parameters are whole only while they are used.
    pub(crate) fn shards_parameters(self) -> bool {
        self == Self::Parameters
    }
}

/// What becomes of a unit's gathered weights between its forward and its backward pass, under
/// [`Stage::Parameters`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AfterForward {
    /// They are freed, and gathered once more for the backward pass (FSDP's FULL_SHARD, ZeRO-3).
    #[default]
    Free,
    /// They are kept (FSDP's SHARD_GRAD_OP).
    Keep,
}

/// When the weights of the unit before are gathered in the backward pass, as in FSDP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackwardPrefetch {
    /// Before a unit's backward pass, so that the transfer overlaps it.
    #[default]
    Pre,
    /// After it, so that it overlaps the reduction of its gradients alone; less memory.
    Post,
    /// When the unit before needs them.
    None,
}

/// How weights are gathered under [`Stage::Parameters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gathering {
    /// What becomes of them after a unit's forward pass.
    pub after_forward: AfterForward,
    /// Whether the next unit's are gathered while a unit runs forward. The order of the last forward
    /// pass is expected again. Unlike FSDP's, which runs ahead on the GPU anyway, it is on by default.
    pub forward_prefetch: bool,
    /// When those of the unit before are gathered in the backward pass.
    pub backward_prefetch: BackwardPrefetch,
    /// Whether only one unit's weights are gathered ahead. Without the limit a forward pass gathers
    /// those of all units at its start.
    pub limit_all_gathers: bool,
}

impl Default for Gathering {
    fn default() -> Self {
        Self {
            after_forward: AfterForward::default(),
            forward_prefetch: true,
            backward_prefetch: BackwardPrefetch::default(),
            limit_all_gathers: true,
        }
    }
}
