//! The ways to share the work.

use pyroclast::strategies::{AfterForward, Gathering, Setup, Stage, UnitPolicy, Unused};

/// A way to share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Way {
    Ddp,
    Zero1,
    Zero2,
    /// ZeRO-3, and FSDP's FULL_SHARD.
    FullShard,
    /// FULL_SHARD with activation checkpointing.
    Recompute,
    ShardGradOp,
    NoShard,
    /// DDP with activation checkpointing.
    DdpRecompute,
}

pub(crate) const WAYS: [Way; 8] = [
    Way::Ddp,
    Way::Zero1,
    Way::Zero2,
    Way::FullShard,
    Way::Recompute,
    Way::ShardGradOp,
    Way::NoShard,
    Way::DdpRecompute,
];

impl Way {
    pub(crate) fn setup(self) -> Setup {
        let stage = match self {
            Self::Ddp | Self::NoShard | Self::DdpRecompute => Stage::Nothing,
            Self::Zero1 => Stage::Optimizer,
            Self::Zero2 => Stage::Gradients,
            Self::FullShard | Self::Recompute | Self::ShardGradOp => Stage::Parameters,
        };
        let recomputes = matches!(self, Self::Recompute | Self::DdpRecompute);
        let keeps = self == Self::ShardGradOp;
        Setup {
            stage,
            gathering: Gathering {
                after_forward: if keeps { AfterForward::Keep } else { AfterForward::Free },
                ..Gathering::default()
            },
            activation_checkpointing: if recomputes { UnitPolicy::All } else { UnitPolicy::None },
            unused: Unused::Allow,
            ..Setup::default()
        }
    }
}
