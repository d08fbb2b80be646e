//! What a rank is doing, as it tells the others and as errors say it.

use std::fmt;

use crate::collectives::ReduceOp;

/// Which collective, with the arguments that all ranks must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// Every rank gets the reduction.
    AllReduce(ReduceOp),
    /// The same, by the ring whatever the size.
    RingAllReduce(ReduceOp),
    /// Every rank gets its shard of the reduction.
    ReduceScatter(ReduceOp),
    /// The root gets the reduction.
    Reduce {
        /// How numbers are combined.
        op: ReduceOp,
        /// Who gets the outcome.
        root: usize,
    },
    /// Every rank gets every rank's shard.
    AllGather,
    /// Every rank gets what each rank brings.
    AllGatherUneven,
    /// Every rank gets the root's numbers.
    Broadcast {
        /// Whose numbers.
        root: usize,
    },
    /// The root gets every rank's shard.
    Gather {
        /// Who gets them.
        root: usize,
    },
    /// Every rank gets its shard of the root's numbers.
    Scatter {
        /// Whose numbers.
        root: usize,
    },
    /// Ranks exchange shards.
    AllToAll,
    /// Ranks wait for each other.
    Barrier,
    /// One rank sends to another.
    Send,
}

impl Operation {
    /// The name, without the arguments.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::RingAllReduce(_) => "ring_all_reduce",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::Reduce { .. } => "reduce",
            Self::AllGather => "all_gather",
            Self::AllGatherUneven => "all_gather_uneven",
            Self::Broadcast { .. } => "broadcast",
            Self::Gather { .. } => "gather",
            Self::Scatter { .. } => "scatter",
            Self::AllToAll => "all_to_all",
            Self::Barrier => "barrier",
            Self::Send => "send",
        }
    }

    /// How numbers are combined, where they are.
    #[must_use]
    pub fn reduce_op(self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce(op)
            | Self::RingAllReduce(op)
            | Self::ReduceScatter(op)
            | Self::Reduce { op, .. } => Some(op),
            _ => None,
        }
    }

    /// The rank that has a part of its own, where one has.
    #[must_use]
    pub fn root(self) -> Option<usize> {
        match self {
            Self::Reduce { root, .. }
            | Self::Broadcast { root }
            | Self::Gather { root }
            | Self::Scatter { root } => Some(root),
            _ => None,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match (self.reduce_op(), self.root()) {
            (Some(op), Some(root)) => write!(f, "({}, root {root})", op.name()),
            (Some(op), None) => write!(f, "({})", op.name()),
            (None, Some(root)) => write!(f, "(root {root})"),
            (None, None) => Ok(()),
        }
    }
}

/// Type of the numbers in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// 64-bit floats.
    F64,
    /// 16-bit floats, IEEE.
    F16,
    /// 16-bit floats with the exponent of `f32`.
    Bf16,
    /// 32-bit integers.
    I32,
    /// 64-bit integers.
    I64,
    /// Bytes.
    U8,
}

impl Dtype {
    /// Bytes of one number.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::U8 => 1,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
        })
    }
}

/// Which ranks take part: the same number on all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GroupId(pub u64);

impl GroupId {
    /// The group of all ranks.
    pub const WORLD: Self = Self(0);
}

/// One collective as both sides of a message describe it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// Which collective.
    pub operation: Operation,
    /// In which group of ranks.
    pub group: GroupId,
    /// How many collectives its rank had launched in the group before.
    pub sequence: u64,
    /// Elements of the whole buffer.
    pub elements: usize,
    /// Type of the elements.
    pub dtype: Dtype,
    /// The unit of a model whose numbers these are, as its [`Layout`](crate::Layout) counts them.
    pub unit: Option<u16>,
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, group, sequence, elements, dtype, unit } = self;
        write!(f, "{operation} #{sequence} of {elements} {dtype}")?;
        if let Some(unit) = unit {
            write!(f, " for unit {unit}")?;
        }
        if *group == GroupId::WORLD { Ok(()) } else { write!(f, " in subgroup {:08x}", group.0) }
    }
}

impl Dtype {
    /// Whether the numbers have fractions.
    #[must_use]
    pub fn is_float(self) -> bool {
        match self {
            Self::F32 | Self::F64 | Self::F16 | Self::Bf16 => true,
            Self::I32 | Self::I64 | Self::U8 => false,
        }
    }
}
