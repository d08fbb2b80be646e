//! How ranks share the work, under the names of Lightning, PyTorch and DeepSpeed.

use std::fmt;

use pyroclast_strategies::{
    self as strategies, AfterForward, Anomalies, BackwardPrefetch, Gathering, Overlap, ParamGroup,
    ParamOrder, PolicyPurpose, Setup, Sizes, Stage, UnitPolicy, Unused,
};
use schemars::JsonSchema;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{Error, Mistake};
use crate::plan::Plan;

/// What the user wrote: a name, or a strategy with its settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum StrategyConfig {
    /// `auto` (the default: `single` on one rank, else `ddp`), `single`, `ddp`,
    /// `ddp_find_unused_parameters_true` and `_false`, `fsdp`, `zero1` to
    /// `zero3`, `deepspeed_stage_1` to `_3`, `deepspeed` (stage 2). Text that starts with a brace is
    /// read as the JSON of a [`Strategy`].
    Name(String),
    /// A strategy with its settings: `{"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}`.
    Settings(Strategy),
}

impl<'de> Deserialize<'de> for StrategyConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ReadConfig)
    }
}

/// Reads text as a name and everything else as settings, so that errors speak of the settings.
struct ReadConfig;

impl<'de> Visitor<'de> for ReadConfig {
    type Value = StrategyConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a strategy's name, or a strategy with its settings")
    }

    fn visit_str<E>(self, name: &str) -> Result<StrategyConfig, E> {
        Ok(name.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<StrategyConfig, A::Error> {
        Strategy::deserialize(MapAccessDeserializer::new(map)).map(StrategyConfig::Settings)
    }
}

impl Default for StrategyConfig {
    fn default() -> Self {
        Self::Name("auto".to_owned())
    }
}

impl From<&str> for StrategyConfig {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

impl From<Strategy> for StrategyConfig {
    fn from(strategy: Strategy) -> Self {
        Self::Settings(strategy)
    }
}

impl From<DdpStrategy> for StrategyConfig {
    fn from(ddp: DdpStrategy) -> Self {
        Strategy::Ddp(ddp).into()
    }
}

impl From<FsdpStrategy> for StrategyConfig {
    fn from(fsdp: FsdpStrategy) -> Self {
        Strategy::Fsdp(fsdp).into()
    }
}

impl From<ZeroStrategy> for StrategyConfig {
    fn from(zero: ZeroStrategy) -> Self {
        Strategy::Zero(zero).into()
    }
}

/// How ranks share the work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// One rank.
    Single,
    /// Every rank holds the whole model.
    Ddp(DdpStrategy),
    /// Fully sharded data parallelism.
    Fsdp(FsdpStrategy),
    /// ZeRO.
    Zero(ZeroStrategy),
}

/// Data parallelism as in `torch.nn.parallel.DistributedDataParallel`: every rank holds the whole model,
/// and gradients are averaged, unit by unit while the backward pass goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DdpStrategy {
    /// Whether ranks tell each other which parameters a step has used. Without it, a parameter that no
    /// gradient reaches is an error. Default false.
    pub find_unused_parameters: bool,
    /// Always true: gradients are stored in the buckets, and nowhere else.
    pub gradient_as_bucket_view: bool,
}

impl Default for DdpStrategy {
    fn default() -> Self {
        Self { find_unused_parameters: false, gradient_as_bucket_view: true }
    }
}

/// What FSDP shards, under PyTorch's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum ShardingStrategy {
    /// Parameters, gradients and optimizer state; a unit's weights are freed after its forward pass and
    /// gathered again for its backward pass.
    #[default]
    FullShard,
    /// The same, but weights stay from the forward to the backward pass: less communication, more memory.
    ShardGradOp,
    /// Nothing: DDP.
    NoShard,
    /// `FULL_SHARD` within a node and replicas across nodes: not in this version.
    HybridShard,
}

/// Fully sharded data parallelism as in `torch.distributed.fsdp`. Units that a model declares are sharded
/// each by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct FsdpStrategy {
    /// What is sharded. Default `FULL_SHARD`.
    pub sharding_strategy: ShardingStrategy,
    /// Which declared units are sharded by themselves: `all` (the default), `none`, `types=Block,Head`,
    /// `paths=blocks.0`, `min_params=100000`. The parameters of others belong to the unit around them.
    pub auto_wrap_policy: String,
    /// Whether the next unit's weights are gathered while a unit runs forward. Default true, unlike
    /// PyTorch's: there the host runs ahead of the GPU and gathers early without it.
    pub forward_prefetch: bool,
    /// When the weights of the unit before are gathered in the backward pass: `BACKWARD_PRE` (the
    /// default), `BACKWARD_POST` or `NONE`.
    pub backward_prefetch: Prefetch,
    /// Whether at most one unit's weights are gathered ahead. Default true.
    pub limit_all_gathers: bool,
}

impl Default for FsdpStrategy {
    fn default() -> Self {
        Self {
            sharding_strategy: ShardingStrategy::default(),
            auto_wrap_policy: UnitPolicy::All.to_string(),
            forward_prefetch: true,
            backward_prefetch: Prefetch::default(),
            limit_all_gathers: true,
        }
    }
}

/// When weights are gathered in the backward pass, under PyTorch's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Prefetch {
    /// Before a unit's backward pass, those of the unit before.
    #[default]
    #[serde(rename = "BACKWARD_PRE")]
    Pre,
    /// After a unit's backward pass.
    #[serde(rename = "BACKWARD_POST")]
    Post,
    /// When they are needed.
    #[serde(rename = "NONE")]
    None,
}

/// ZeRO as in DeepSpeed, under its names. Numbers are of elements. Unlike DeepSpeed's, the defaults
/// communicate a unit at a time and keep nothing gathered; where a DeepSpeed file is given, its own defaults
/// apply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ZeroStrategy {
    /// 1: optimizer state is sharded; 2: gradients, too; 3: parameters, too. Default 2.
    pub stage: u8,
    /// Which declared units are sharded by themselves, as in [`FsdpStrategy::auto_wrap_policy`].
    pub auto_wrap_policy: String,
    /// Whether parameters that no gradient reaches are left alone. Default true.
    pub ignore_unused_parameters: bool,
    /// Always true: the gradients of a unit lie in one buffer.
    pub contiguous_gradients: bool,
    /// Gradients are reduced in messages of at most so many elements. Default: a unit's.
    pub reduce_bucket_size: Option<usize>,
    /// Stages 1 and 2 exchange stepped weights in messages of at most so many elements. Default: a unit's.
    pub allgather_bucket_size: Option<usize>,
    /// Whether reductions overlap the backward pass. Default true.
    pub overlap_comm: bool,
    /// Whether a unit's parameters are dealt out to the ranks in turn. Default false.
    pub round_robin_gradients: bool,
    /// Most elements that the optimizer steps at once. Default: a unit's shard.
    pub sub_group_size: Option<usize>,
    /// Stage 3 gathers at most so many elements ahead. Default: one unit.
    pub stage3_prefetch_bucket_size: Option<usize>,
    /// Stage 3 keeps parameters of at most so many elements gathered over a step. Default 0.
    pub stage3_param_persistence_threshold: usize,
    /// Stage 3 gathers nothing ahead beyond so many elements that are whole at once. Default: no limit.
    pub stage3_max_live_parameters: Option<usize>,
    /// Stage 3 keeps a unit from its forward to its backward pass if fewer elements are used in between.
    /// Default 0.
    pub stage3_max_reuse_distance: usize,
}

impl Default for ZeroStrategy {
    fn default() -> Self {
        Self {
            stage: 2,
            auto_wrap_policy: UnitPolicy::All.to_string(),
            ignore_unused_parameters: true,
            contiguous_gradients: true,
            reduce_bucket_size: None,
            allgather_bucket_size: None,
            overlap_comm: true,
            round_robin_gradients: false,
            sub_group_size: None,
            stage3_prefetch_bucket_size: None,
            stage3_param_persistence_threshold: 0,
            stage3_max_live_parameters: None,
            stage3_max_reuse_distance: 0,
        }
    }
}

impl Strategy {
    /// Names that mean a strategy with its defaults, the first of each its own. `deepspeed` is the stage
    /// that DeepSpeed users get in Lightning if they name none.
    pub(crate) const NAMES: [&'static str; 12] = [
        "single",
        "ddp",
        "ddp_find_unused_parameters_false",
        "ddp_find_unused_parameters_true",
        "fsdp",
        "zero1",
        "zero2",
        "zero3",
        "deepspeed",
        "deepspeed_stage_1",
        "deepspeed_stage_2",
        "deepspeed_stage_3",
    ];

    pub(crate) fn named(name: &str) -> Option<Self> {
        let zero = |stage| Self::Zero(ZeroStrategy { stage, ..ZeroStrategy::default() });
        Some(match name {
            "single" => Self::Single,
            "ddp" | "ddp_find_unused_parameters_false" => Self::Ddp(DdpStrategy::default()),
            "ddp_find_unused_parameters_true" => {
                Self::Ddp(DdpStrategy { find_unused_parameters: true, ..DdpStrategy::default() })
            }
            "fsdp" => Self::Fsdp(FsdpStrategy::default()),
            "zero1" | "deepspeed_stage_1" => zero(1),
            "zero2" | "deepspeed_stage_2" | "deepspeed" => zero(2),
            "zero3" | "deepspeed_stage_3" => zero(3),
            _ => return None,
        })
    }

    /// The name in the resolved configuration.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Ddp(_) => "ddp",
            Self::Fsdp(_) => "fsdp",
            Self::Zero(ZeroStrategy { stage: 1, .. }) => "zero1",
            Self::Zero(ZeroStrategy { stage: 3, .. }) => "zero3",
            Self::Zero(_) => "zero2",
        }
    }

    /// As it is written: by its name alone, if nothing else is set.
    pub(crate) fn to_config(&self) -> StrategyConfig {
        match Self::named(self.name()) {
            Some(default) if default == *self => self.name().into(),
            _ => self.clone().into(),
        }
    }

    /// What the ranks hold in shards.
    #[must_use]
    pub fn stage(&self) -> Stage {
        match self {
            Self::Single | Self::Ddp(_) => Stage::Nothing,
            Self::Fsdp(fsdp) => match fsdp.sharding_strategy {
                ShardingStrategy::NoShard => Stage::Nothing,
                _ => Stage::Parameters,
            },
            Self::Zero(ZeroStrategy { stage: 1, .. }) => Stage::Optimizer,
            Self::Zero(ZeroStrategy { stage: 3, .. }) => Stage::Parameters,
            Self::Zero(_) => Stage::Gradients,
        }
    }

    /// What is wrong with the settings.
    pub(crate) fn mistakes(&self) -> Vec<Mistake> {
        let mut mistakes = vec![];
        let mut refuse_if = |wrong: bool, setting: &str, problem: String| {
            if wrong {
                mistakes.push(Mistake::new(format!("strategy.{}.{setting}", self.key()), problem));
            }
        };
        match self {
            Self::Single => {}
            Self::Ddp(ddp) => refuse_if(
                !ddp.gradient_as_bucket_view,
                "gradient_as_bucket_view",
                "false would be a second copy of all gradients; they lie in the buckets by design, \
                 so leave it at true"
                    .to_owned(),
            ),
            Self::Fsdp(fsdp) => {
                refuse_if(
                    fsdp.sharding_strategy == ShardingStrategy::HybridShard,
                    "sharding_strategy",
                    "HYBRID_SHARD is not in this version; there are FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"
                        .to_owned(),
                );
                let policy = fsdp.auto_wrap_policy.parse::<UnitPolicy>();
                refuse_if(policy.is_err(), "auto_wrap_policy", policy.err().unwrap_or_default());
            }
            Self::Zero(zero) => {
                let stage = zero.stage;
                refuse_if(
                    !(1..=3).contains(&stage),
                    "stage",
                    format!("{stage} is out of range; it must be 1, 2 or 3 (0 is `ddp`)"),
                );
                refuse_if(
                    !zero.contiguous_gradients,
                    "contiguous_gradients",
                    "false would scatter gradients over memory; a unit's lie in one buffer by design, \
                     so leave it at true"
                        .to_owned(),
                );
                for (setting, size) in [
                    ("reduce_bucket_size", zero.reduce_bucket_size),
                    ("allgather_bucket_size", zero.allgather_bucket_size),
                    ("sub_group_size", zero.sub_group_size),
                ] {
                    let problem = "0 elements at once would never end; use 1 or more";
                    refuse_if(size == Some(0), setting, problem.to_owned());
                }
                let policy = zero.auto_wrap_policy.parse::<UnitPolicy>();
                refuse_if(policy.is_err(), "auto_wrap_policy", policy.err().unwrap_or_default());
            }
        }
        mistakes
    }

    fn key(&self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Ddp(_) => "ddp",
            Self::Fsdp(_) => "fsdp",
            Self::Zero(_) => "zero",
        }
    }

    /// An error of the strategy as one of the setting that is to be changed, if it is one.
    pub(crate) fn named_in_settings(&self, error: strategies::Error) -> Error {
        match &error {
            strategies::Error::UnknownUnits { purpose: PolicyPurpose::Wrap, .. } => {
                let setting = format!("strategy.{}.auto_wrap_policy", self.key());
                Error::setting(&setting, error.to_string())
            }
            strategies::Error::UnknownUnits { purpose: PolicyPurpose::Precision, .. }
            | strategies::Error::TypesWithoutUnit { .. } => {
                Error::setting("precision_overrides", error.to_string())
            }
            strategies::Error::UnknownUnits { .. } => {
                Error::setting("activation_checkpointing", error.to_string())
            }
            _ => error.into(),
        }
    }

    /// The strategy in a few words.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Fsdp(fsdp) => {
                let sharding = match fsdp.sharding_strategy {
                    ShardingStrategy::FullShard => "FULL_SHARD",
                    ShardingStrategy::ShardGradOp => "SHARD_GRAD_OP",
                    ShardingStrategy::NoShard => "NO_SHARD",
                    ShardingStrategy::HybridShard => "HYBRID_SHARD",
                };
                format!("fsdp {sharding}")
            }
            _ => self.name().to_owned(),
        }
    }

    /// What the ranks set up.
    pub(crate) fn setup(&self, plan: &Plan, groups: Vec<ParamGroup>) -> Setup {
        let wrap = match self {
            Self::Single | Self::Ddp(_) => UnitPolicy::All,
            Self::Fsdp(FsdpStrategy { auto_wrap_policy, .. })
            | Self::Zero(ZeroStrategy { auto_wrap_policy, .. }) => {
                auto_wrap_policy.parse().unwrap_or_default()
            }
        };
        let unused = match self {
            Self::Ddp(DdpStrategy { find_unused_parameters: false, .. }) => Unused::Refuse,
            Self::Zero(ZeroStrategy { ignore_unused_parameters: false, .. }) => Unused::Refuse,
            _ => Unused::Allow,
        };
        let (sizes, overlap, order) = self.numbers();
        Setup {
            stage: self.stage(),
            gathering: self.gathering(),
            sizes,
            overlap,
            order,
            wrap,
            activation_checkpointing: plan.activation_checkpointing.clone(),
            precision: plan.precision.types.clone(),
            anomalies: match plan.resolved.detect_anomaly {
                true => Anomalies::Detect,
                false => Anomalies::Ignore,
            },
            unused,
            optimizer: plan.optimizer,
            groups,
        }
    }

    /// How much goes at once, and in which order.
    fn numbers(&self) -> (Sizes, Overlap, ParamOrder) {
        let Self::Zero(zero) = self else { return Default::default() };
        let sizes = Sizes {
            reduce_bucket: zero.reduce_bucket_size,
            gather_bucket: zero.allgather_bucket_size,
            sub_group: zero.sub_group_size,
            prefetch: zero.stage3_prefetch_bucket_size,
            persistence: zero.stage3_param_persistence_threshold,
            max_live: zero.stage3_max_live_parameters,
            max_reuse_distance: zero.stage3_max_reuse_distance,
        };
        let overlap = if zero.overlap_comm { Overlap::Yes } else { Overlap::No };
        let order = match zero.round_robin_gradients {
            true => ParamOrder::RoundRobin,
            false => ParamOrder::Traversal,
        };
        (sizes, overlap, order)
    }

    fn gathering(&self) -> Gathering {
        let Self::Fsdp(fsdp) = self else { return Gathering::default() };
        Gathering {
            after_forward: match fsdp.sharding_strategy {
                ShardingStrategy::ShardGradOp => AfterForward::Keep,
                _ => AfterForward::Free,
            },
            forward_prefetch: fsdp.forward_prefetch,
            backward_prefetch: match fsdp.backward_prefetch {
                Prefetch::Pre => BackwardPrefetch::Pre,
                Prefetch::Post => BackwardPrefetch::Post,
                Prefetch::None => BackwardPrefetch::None,
            },
            limit_all_gathers: fsdp.limit_all_gathers,
        }
    }
}

#[cfg(test)]
mod tests;
