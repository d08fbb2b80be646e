//! What is decided before a run begins.

use crate::optimizer::{Optimizer, ParamGroup};
use crate::policy::UnitPolicy;
use crate::precision::UnitTypes;
use crate::sizes::{Overlap, ParamOrder, Sizes};
use crate::stage::{Gathering, Stage};

/// What is sharded, and how the model is trained.
#[derive(Clone, Debug)]
pub struct Setup {
    /// What each rank holds only its own shard of.
    pub stage: Stage,
    /// How weights are gathered, where they are sharded.
    pub gathering: Gathering,
    /// Which declared units are stored and communicated by themselves. Default: all.
    pub wrap: UnitPolicy,
    /// Which declared units recompute their activations. Default: none.
    pub activation_checkpointing: UnitPolicy,
    /// In which types units keep their numbers. Default: `f32`.
    pub precision: UnitTypes,
    /// Whether units look for NaN and infinity in what they return ([`Error::Anomaly`]). Default: they do not.
    ///
    /// [`Error::Anomaly`]: crate::Error::Anomaly
    pub anomalies: Anomalies,
    /// How much is communicated, kept and stepped at once. Default: a unit.
    pub sizes: Sizes,
    /// Whether communication overlaps computation. Default: it does.
    pub overlap: Overlap,
    /// The order of parameters within a unit.
    pub order: ParamOrder,
    /// What becomes of parameters that no gradient reaches.
    pub unused: Unused,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Groups, of which the first that matches a parameter applies to it.
    pub groups: Vec<ParamGroup>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            stage: Stage::default(),
            gathering: Gathering::default(),
            wrap: UnitPolicy::All,
            activation_checkpointing: UnitPolicy::None,
            precision: UnitTypes::default(),
            anomalies: Anomalies::default(),
            sizes: Sizes::default(),
            overlap: Overlap::default(),
            order: ParamOrder::default(),
            unused: Unused::default(),
            optimizer: Optimizer::default(),
            groups: vec![],
        }
    }
}

/// Whether NaN and infinity are looked for where they arise, which reads back every output of every unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Anomalies {
    /// They are noticed in gradients alone.
    #[default]
    Ignore,
    /// They are.
    Detect,
}

/// What several ranks do about parameters that no gradient reaches in a step. A single rank leaves them
/// alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unused {
    /// They end the run: mostly they are a mistake. DDP's `find_unused_parameters = false`.
    #[default]
    Refuse,
    /// Ranks tell each other what they have used. What none has used is left alone; a gradient that some
    /// rank has not is zero there.
    Allow,
}
