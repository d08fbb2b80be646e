//! How much is communicated, kept and stepped at once, in elements, and in which order: what DeepSpeed's
//! file says in numbers. By default everything goes a unit at a time.

/// Numbers of elements, without padding where they are about parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Gradients are reduced in messages of at most so many elements: units that fit share one, in the order
    /// in which they become final, and larger ones take several. `None`: one message a unit.
    pub reduce_bucket: Option<usize>,
    /// The same for the weights that ranks give each other after a step, where they are held whole.
    pub gather_bucket: Option<usize>,
    /// The optimizer steps at most so many elements at once. `None`: a unit's shard.
    pub sub_group: Option<usize>,
    /// Weights are gathered ahead, in both passes, as long as they are at most so many elements together.
    /// `None`: as [`Gathering`](crate::Gathering) says.
    pub prefetch: Option<usize>,
    /// Parameters of at most so many elements are gathered once per step, and kept until it ends.
    pub persistence: usize,
    /// Nothing is gathered ahead if more elements than this would be whole at once. `None`: no limit.
    pub max_live: Option<usize>,
    /// After its forward pass a unit stays whole if fewer elements than this are used before its backward
    /// pass.
    pub max_reuse_distance: usize,
}

/// Whether computation goes on while gradients and weights are on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// It does.
    #[default]
    Yes,
    /// Whatever is sent is waited for.
    No,
}

/// The order of a unit's parameters in its flat buffer, and so which rank owns which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ParamOrder {
    /// That in which the module is traversed.
    #[default]
    Traversal,
    /// Parameters are dealt out to the ranks in turn (DeepSpeed's `round_robin_gradients`).
    RoundRobin,
}

impl ParamOrder {
    /// `params` in this order.
    pub(crate) fn arrange<T>(self, params: Vec<T>, world: usize) -> Vec<T> {
        match self {
            Self::Traversal => params,
            Self::RoundRobin => {
                let mut dealt: Vec<Vec<T>> = (0..world).map(|_| vec![]).collect();
                for (position, param) in params.into_iter().enumerate() {
                    dealt[position % world].push(param);
                }
                dealt.into_iter().flatten().collect()
            }
        }
    }
}
