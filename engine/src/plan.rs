//! From what the user wrote to what will run: every check happens here, once, and all mistakes are
//! reported together.

mod check;
mod precision;

use std::path::PathBuf;

use burn::tensor::Device;
use pyroclast_precision::Clip;
use pyroclast_strategies::{GroupOptions, Optimizer, UnitPolicy};
use serde::Serialize;

use crate::config::TrainerConfig;
use crate::device::Accelerator;
use crate::environment::{Environment, ProcessRank};
use crate::error::Error;
use crate::output::Sharing;
use crate::schedule::Schedule;
use crate::strategy::Strategy;
use check::Check;
pub use precision::PrecisionPlan;

/// A configuration that has been checked and resolved.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What the user wrote, with names resolved, for `config.resolved.json`.
    pub resolved: TrainerConfig,
    /// How ranks share the work.
    pub strategy: Strategy,
    /// Which units recompute their activations.
    pub activation_checkpointing: UnitPolicy,
    /// Where they compute.
    pub accelerator: Accelerator,
    /// Ranks of the job.
    pub world: usize,
    /// The rank that this process is; none if all ranks are threads of it.
    pub process: Option<ProcessRank>,
    /// Settings of the group of all ranks.
    pub group: GroupOptions,
    /// Numbers in which the model computes.
    pub precision: PrecisionPlan,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The learning rate over the run.
    pub schedule: Schedule,
    /// How averaged gradients are limited.
    pub clip: Option<Clip>,
    /// Steps between validations; none to validate at the end only.
    pub validate_every: Option<u64>,
    /// What to continue from.
    pub resume: Resume,
    /// What became of settings that mean something else here than they say, for the user to read.
    pub notes: Vec<String>,
}

/// What a run continues from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Nothing: start anew.
    Never,
    /// The newest checkpoint of the output folder, if there is one.
    IfPresent,
    /// This checkpoint.
    From(PathBuf),
}

impl Plan {
    /// Checks `config` and resolves every name in it.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] with every mistake.
    pub fn new(config: &TrainerConfig, environment: &Environment) -> Result<Self, Error> {
        let mut check = Check::default();
        let world = check.world(config, environment.process.as_ref());
        let strategy = check.strategy(config, world);
        let recompute = config.activation_checkpointing.parse::<UnitPolicy>();
        let recompute = check.parse("activation_checkpointing", recompute);
        let accelerator = check.parse("accelerator", config.accelerator.parse::<Accelerator>());
        let precision = check.precision(config, accelerator);
        let optimizer = check.optimizer(config);
        let lr = check.scaled_lr(config, world);
        let schedule = check.schedule(config, lr);
        check.communication(config, world);
        check.limits(config);
        check.ranges(config);
        check.checkpoints(config);
        let plan = match (strategy, recompute, accelerator, precision, optimizer, schedule) {
            (
                Some(strategy),
                Some(activation_checkpointing),
                Some(accelerator),
                Some(precision),
                Some(optimizer),
                Some(schedule),
            ) => Self {
                resolved: TrainerConfig {
                    lr,
                    ..resolved(config, &strategy, accelerator, &precision, (&optimizer, &schedule))
                },
                strategy,
                activation_checkpointing,
                accelerator,
                world,
                process: environment.process.clone(),
                group: environment.group_options(),
                precision,
                optimizer,
                schedule,
                clip: clip(config),
                validate_every: config.val_check_interval.filter(|steps| *steps > 0),
                resume: resume(config),
                notes: notes(config, world, lr),
            },
            _ => return Err(Error::Config(check.0)),
        };
        if check.0.is_empty() { Ok(plan) } else { Err(Error::Config(check.0)) }
    }

    /// Whether this process has rank 0, which alone prints and writes.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.process.as_ref().is_none_or(|process| process.rank == 0)
    }

    /// A rank's number among the ranks of its machine.
    #[must_use]
    pub fn local_rank(&self, rank: usize) -> usize {
        self.process.as_ref().map_or(rank, |process| process.local_rank)
    }

    /// Whether machines share the folder of the run.
    #[must_use]
    pub fn sharing(&self) -> Sharing {
        if self.resolved.node_local { Sharing::NodeLocal } else { Sharing::OneFolder }
    }

    /// How ranks share the work, in a few words.
    #[must_use]
    pub fn describe_strategy(&self) -> String {
        let strategy = self.strategy.describe();
        match &self.activation_checkpointing {
            UnitPolicy::None => strategy,
            units => format!("{strategy}, activation checkpointing of {units}"),
        }
    }

    /// The device of this process's ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if there is none.
    pub fn device(&self) -> Result<Device, Error> {
        let local_rank = self.process.as_ref().map_or(0, |process| process.local_rank);
        Ok(self.accelerator.device_of(local_rank)?)
    }

    /// The resolved configuration as JSON.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        #[derive(Serialize)]
        struct Resolved<'a> {
            #[serde(flatten)]
            config: &'a TrainerConfig,
            world: usize,
        }
        let resolved = Resolved { config: &self.resolved, world: self.world };
        serde_json::to_value(resolved).unwrap_or_default()
    }
}

fn resolved(
    config: &TrainerConfig,
    strategy: &Strategy,
    accelerator: Accelerator,
    precision: &PrecisionPlan,
    (optimizer, schedule): (&Optimizer, &Schedule),
) -> TrainerConfig {
    TrainerConfig {
        strategy: strategy.to_config(),
        accelerator: accelerator.name().to_owned(),
        precision: precision.name.name().to_owned(),
        schedule: schedule.to_config(),
        process_group_backend: "ring".to_owned(),
        lr_scaling: "none".to_owned(),
        weight_decay: Some(optimizer.weight_decay()),
        max_steps: if config.fast_dev_run { Some(1) } else { config.max_steps },
        ..config.clone()
    }
}

fn notes(config: &TrainerConfig, world: usize, lr: f64) -> Vec<String> {
    let mut notes = vec![];
    if config.process_group_backend == "gloo" {
        notes.push("process_group_backend gloo is the engine's own ring here".to_owned());
    }
    if config.lr_scaling != "none" {
        let TrainerConfig { lr: given, lr_scaling, accumulate_grad_batches, .. } = config;
        notes.push(format!(
            "learning rate {lr} is {given}, scaled ({lr_scaling}) for {world} ranks x \
             {accumulate_grad_batches} micro-batches"
        ));
    }
    notes
}

fn clip(config: &TrainerConfig) -> Option<Clip> {
    let limit = config.gradient_clip_val.filter(|limit| *limit > 0.0)?;
    Some(match config.gradient_clip_algorithm.as_str() {
        "value" => Clip::Value(limit),
        _ => Clip::Norm(limit),
    })
}

fn resume(config: &TrainerConfig) -> Resume {
    match config.resume.as_deref() {
        None => Resume::Never,
        Some("auto") => Resume::IfPresent,
        Some(path) => Resume::From(PathBuf::from(path)),
    }
}

#[cfg(test)]
mod tests {
    use pyroclast_strategies::Stage;

    use crate::loss_scale::{LossScaleConfig, LossScaleRule, TorchScaleConfig};

    use super::*;

    fn steps(change: impl FnOnce(&mut TrainerConfig)) -> Result<Plan, Error> {
        let mut config = TrainerConfig { max_steps: Some(1), ..TrainerConfig::default() };
        change(&mut config);
        Plan::new(&config, &Environment::default())
    }

    /// As one rank of `world` processes.
    fn process(world: usize, change: impl FnOnce(&mut TrainerConfig)) -> Result<Plan, Error> {
        let mut config = TrainerConfig { max_steps: Some(1), ..TrainerConfig::default() };
        change(&mut config);
        let world = world.to_string();
        let environment = Environment::read(|name| match name {
            "RANK" => Some("0".to_owned()),
            "WORLD_SIZE" => Some(world.clone()),
            _ => None,
        });
        Plan::new(&config, &environment.map_err(Error::Config)?)
    }

    #[test]
    fn auto_is_resolved() {
        let one = steps(|_| ()).expect("the defaults should be valid");
        assert_eq!((one.strategy, one.resolved.strategy), (Strategy::Single, "single".into()));
        let two = steps(|c| c.devices = 2).expect("two ranks should be valid");
        assert_eq!((two.strategy.name(), two.resolved.strategy), ("ddp", "ddp".into()));
    }

    #[test]
    fn strategies_have_the_names_of_lightning_and_deepspeed() {
        for (name, own, stage) in [
            ("zero1", "zero1", Stage::Optimizer),
            ("deepspeed_stage_1", "zero1", Stage::Optimizer),
            ("zero2", "zero2", Stage::Gradients),
            ("deepspeed_stage_2", "zero2", Stage::Gradients),
            ("deepspeed", "zero2", Stage::Gradients),
            ("zero3", "zero3", Stage::Parameters),
            ("deepspeed_stage_3", "zero3", Stage::Parameters),
            ("fsdp", "fsdp", Stage::Parameters),
            ("ddp", "ddp", Stage::Nothing),
            ("ddp_find_unused_parameters_false", "ddp", Stage::Nothing),
        ] {
            let plan = steps(|c| (c.strategy, c.devices) = (name.into(), 2)).expect(name);
            assert_eq!((plan.resolved.strategy, plan.strategy.stage()), (own.into(), stage));
        }
        let json = r#"{"fsdp": {"sharding_strategy": "NO_SHARD"}}"#;
        let plan = steps(|c| (c.strategy, c.devices) = (json.into(), 2)).expect("settings");
        assert_eq!(plan.strategy.stage(), Stage::Nothing);
    }

    #[test]
    fn every_wrong_setting_is_refused_by_name() {
        type Change = fn(&mut TrainerConfig);
        let table: [(&str, Change); 47] = [
            ("devices", |c| c.devices = 257),
            ("resume", |c| (c.resume, c.fast_dev_run) = (Some("x".into()), true)),
            ("devices", |c| c.devices = 0),
            ("num_nodes", |c| c.num_nodes = 2),
            ("strategy", |c| c.strategy = "dpp".into()),
            ("strategy", |c| c.strategy = "hybrid_shard".into()),
            ("strategy", |c| c.strategy = r#"{"fsdp": {"sharding": 1}}"#.into()),
            ("activation_checkpointing", |c| c.activation_checkpointing = "some".into()),
            ("strategy", |c| (c.strategy, c.devices) = ("single".into(), 2)),
            ("accelerator", |c| c.accelerator = "tpu".into()),
            ("precision", |c| c.precision = "transformer-engine".into()),
            ("precision", |c| c.precision = "17".into()),
            ("precision_overrides.types=Norm", |c| {
                c.precision_overrides = [("types=Norm".into(), "f32".into())].into();
            }),
            ("precision_overrides.norms", |c| {
                c.precision_overrides = [("norms".into(), "32-true".into())].into();
            }),
            ("checkpoint.save_top_k", |c| c.checkpoint.save_top_k = -3),
            ("reduce_dtype", |c| c.reduce_dtype = Some("f8".into())),
            ("reduce_dtype", |c| c.reduce_dtype = Some("f64".into())),
            ("loss_scale", |c| c.loss_scale = LossScaleConfig::Static(8.0)),
            ("loss_scale.torch.growth_factor", |c| {
                let torch = TorchScaleConfig { growth_factor: 0.5, ..TorchScaleConfig::default() };
                c.loss_scale = LossScaleRule::Torch(torch).into();
            }),
            ("optimizer", |c| c.optimizer = "adam".into()),
            ("schedule", |c| c.schedule = "cos".into()),
            ("schedule", |c| c.schedule = r#"{"WarmupLR": {"steps": 3}}"#.into()),
            ("schedule.WarmupLR.warmup_num_steps", |c| {
                c.schedule = r#"{"WarmupLR": {"warmup_num_steps": 0}}"#.into();
            }),
            ("warmup_steps", |c| {
                (c.schedule, c.warmup_steps) = (r#"{"LRRangeTest": {}}"#.into(), 3);
            }),
            ("lr_scaling", |c| {
                (c.schedule, c.lr_scaling) = (r#"{"WarmupDecayLR": {}}"#.into(), "sqrt".into());
            }),
            ("train_batch_size", |c| c.train_batch_size = Some(0)),
            ("strategy.zero.reduce_bucket_size", |c| {
                c.strategy = r#"{"zero": {"reduce_bucket_size": 0}}"#.into();
            }),
            ("strategy", |c| c.strategy = "fsdp_cpu_offload".into()),
            ("lr_scaling", |c| c.lr_scaling = "square".into()),
            ("process_group_backend", |c| c.process_group_backend = "nccl".into()),
            ("process_group_backend", |c| c.process_group_backend = "ncl".into()),
            ("device_mesh", |c| c.device_mesh = Some((2, 1))),
            ("device_mesh", |c| (c.device_mesh, c.devices) = (Some((2, 1)), 2)),
            ("gradient_clip_algorithm", |c| c.gradient_clip_algorithm = "value".into()),
            ("lr", |c| c.lr = 0.0),
            ("lr", |c| c.lr = f64::NAN),
            ("beta2", |c| c.beta2 = 1.0),
            ("eps", |c| c.eps = 0.0),
            ("momentum", |c| c.momentum = -0.1),
            ("weight_decay", |c| c.weight_decay = Some(-1.0)),
            ("gradient_clip_val", |c| c.gradient_clip_val = Some(f64::INFINITY)),
            ("gradient_clip_algorithm", |c| c.gradient_clip_algorithm = "max".into()),
            ("accumulate_grad_batches", |c| c.accumulate_grad_batches = 0),
            ("max_steps", |c| c.max_steps = Some(0)),
            ("max_steps", |c| c.max_steps = None),
            ("limit_val_batches", |c| c.limit_val_batches = Some(0)),
            ("resume", |c| c.resume = Some("auto".into())),
        ];
        for (setting, change) in table {
            match steps(change) {
                Err(Error::Config(mistakes)) => {
                    assert_eq!(mistakes.len(), 1, "{mistakes:?}");
                    assert_eq!(mistakes[0].setting, setting);
                }
                other => panic!("{setting} was not refused: {other:?}"),
            }
        }
    }

    #[test]
    fn the_rate_is_scaled_once_and_a_resolved_configuration_is_its_own() {
        for (scaling, expected) in [("none", 1e-3), ("linear", 6e-3), ("sqrt", 1e-3 * 6f64.sqrt())]
        {
            let plan = steps(|c| {
                (c.devices, c.accumulate_grad_batches) = (2, 3);
                c.lr_scaling = scaling.to_owned();
                c.process_group_backend = "gloo".to_owned();
            });
            let plan = plan.expect("a configuration");
            assert!(
                (plan.resolved.lr - expected).abs() < 1e-12 && plan.schedule.lr == plan.resolved.lr
            );
            assert!(plan.notes[0].contains("ring"), "{:?}", plan.notes);
            assert_eq!(plan.notes.len(), if scaling == "none" { 1 } else { 2 });
            let again = Plan::new(&plan.resolved, &Environment::default()).expect("the same");
            assert_eq!(again.resolved, plan.resolved);
            assert_eq!(again.notes, [""; 0]);
        }
    }

    #[test]
    fn the_environment_says_how_many_processes_there_are() {
        let table: [(usize, usize, usize, bool); 8] = [
            (4, 1, 1, true),
            (4, 4, 1, true),
            (4, 2, 2, true),
            (4, 1, 4, true),
            (4, 2, 1, false),
            (4, 2, 3, false),
            (1, 1, 2, false),
            (4, usize::MAX, 2, false),
        ];
        for (world, devices, num_nodes, is_valid) in table {
            let plan = process(world, |c| (c.devices, c.num_nodes) = (devices, num_nodes));
            match plan {
                Ok(plan) => assert_eq!((plan.world, is_valid), (world, true)),
                Err(error) => {
                    assert!(!is_valid, "{error}");
                    assert!(error.to_string().contains(&format!("WORLD_SIZE is {world}")));
                }
            }
        }
        let ddp = process(2, |_| ()).expect("two processes");
        assert_eq!(ddp.strategy.name(), "ddp");
        assert!(process(2, |c| c.strategy = "single".into()).is_err());
    }

    #[test]
    fn all_mistakes_are_reported_together() {
        let refused = steps(|c| (c.lr, c.devices, c.schedule) = (-1.0, 0, "x".into()));
        let Err(Error::Config(mistakes)) = refused else { panic!("{refused:?}") };
        assert_eq!(mistakes.len(), 3);
    }
}
