//! From what the user wrote to what will run: every check happens here, once, and all mistakes are
//! reported together.

use std::path::PathBuf;

use burn::tensor::Device;
use pyroclast_precision::Precision;
use pyroclast_strategies::{GroupOptions, Optimizer};
use serde::Serialize;

use crate::config::TrainerConfig;
use crate::device::Accelerator;
use crate::environment::{Environment, ProcessRank};
use crate::error::{Error, Mistake};
use crate::schedule::{Decay, Schedule};

/// How ranks share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// One rank.
    Single,
    /// Every rank holds the whole model; gradients are averaged.
    Ddp,
}

/// A configuration that has been checked and resolved.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What the user wrote, with names resolved, for `config.resolved.json`.
    pub resolved: TrainerConfig,
    /// How ranks share the work.
    pub strategy: Strategy,
    /// Where they compute.
    pub accelerator: Accelerator,
    /// Ranks of the job.
    pub world: usize,
    /// The rank that this process is; none if all ranks are threads of it.
    pub process: Option<ProcessRank>,
    /// Settings of the group of all ranks.
    pub group: GroupOptions,
    /// Numbers in which the model computes.
    pub precision: Precision,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The learning rate over the run.
    pub schedule: Schedule,
    /// Largest gradient norm.
    pub clip: Option<f64>,
    /// Steps between validations; none to validate at the end only.
    pub validate_every: Option<u64>,
    /// What to continue from.
    pub resume: Resume,
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
        let accelerator = check.parse("accelerator", config.accelerator.parse::<Accelerator>());
        let precision = check.parse("precision", config.precision.parse::<Precision>());
        let optimizer = check.optimizer(config);
        let schedule = check.schedule(config);
        check.limits(config);
        check.ranges(config);
        let plan = match (strategy, accelerator, precision, optimizer, schedule) {
            (
                Some(strategy),
                Some(accelerator),
                Some(precision),
                Some(optimizer),
                Some(schedule),
            ) => Self {
                resolved: resolved(config, strategy, accelerator, &optimizer),
                strategy,
                accelerator,
                world,
                process: environment.process.clone(),
                group: environment.group_options(),
                precision,
                optimizer,
                schedule,
                clip: config.gradient_clip_val.filter(|clip| *clip > 0.0),
                validate_every: config.val_check_interval.filter(|steps| *steps > 0),
                resume: resume(config),
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
    strategy: Strategy,
    accelerator: Accelerator,
    optimizer: &Optimizer,
) -> TrainerConfig {
    TrainerConfig {
        strategy: match strategy {
            Strategy::Single => "single".to_owned(),
            Strategy::Ddp => "ddp".to_owned(),
        },
        accelerator: accelerator.name().to_owned(),
        weight_decay: Some(optimizer.weight_decay()),
        max_steps: if config.fast_dev_run { Some(1) } else { config.max_steps },
        ..config.clone()
    }
}

fn resume(config: &TrainerConfig) -> Resume {
    match config.resume.as_deref() {
        None => Resume::Never,
        Some("auto") => Resume::IfPresent,
        Some(path) => Resume::From(PathBuf::from(path)),
    }
}

/// Ranks that one process may have: they are threads, each with a connection to every other.
const MAX_RANKS: usize = 256;

/// How ranks on several machines, or in several processes, are started.
pub const SET_RANKS: &str = "start one process per rank, with RANK and WORLD_SIZE set, and \
                             MASTER_ADDR naming rank 0's machine";

/// Micro-batches of a step.
const MAX_MICRO_BATCHES: usize = 1 << 20;

/// Collects mistakes.
#[derive(Default)]
struct Check(Vec<Mistake>);

/// Strategies that Lightning or DeepSpeed users may ask for and that this version does not build.
const STRATEGIES_NOT_YET: [&str; 9] = [
    "fsdp",
    "fsdp_cpu_offload",
    "zero1",
    "zero2",
    "zero3",
    "deepspeed",
    "ddp_spawn",
    "hybrid_shard",
    "deepspeed_stage_",
];

impl Check {
    fn mistake(&mut self, setting: &str, problem: impl Into<String>) {
        self.0.push(Mistake::new(setting, problem));
    }

    fn parse<T, E: ToString>(&mut self, setting: &str, parsed: Result<T, E>) -> Option<T> {
        parsed.map_err(|error| self.mistake(setting, error.to_string())).ok()
    }

    /// The number of ranks: where they are processes, the environment says it.
    fn world(&mut self, config: &TrainerConfig, process: Option<&ProcessRank>) -> usize {
        let TrainerConfig { devices, num_nodes, .. } = *config;
        if devices == 0 {
            self.mistake("devices", "0 ranks cannot train; use 1 or more");
        }
        let Some(process) = process else {
            if devices > MAX_RANKS {
                let problem = format!("{devices} ranks in one process; the limit is {MAX_RANKS}");
                self.mistake("devices", problem);
            }
            if num_nodes != 1 {
                let problem = format!("{num_nodes} nodes: {SET_RANKS}; or use 1");
                self.mistake("num_nodes", problem);
            }
            return devices;
        };
        let world = process.world;
        if (devices, num_nodes) != (1, 1) && devices.checked_mul(num_nodes) != Some(world) {
            let asked = format!("{devices} devices on each of {num_nodes} nodes");
            let advice = "make them agree, or leave devices and num_nodes out";
            self.mistake("devices", format!("{asked}, but WORLD_SIZE is {world}; {advice}"));
        }
        world
    }

    fn strategy(&mut self, config: &TrainerConfig, world: usize) -> Option<Strategy> {
        match config.strategy.as_str() {
            "auto" if world > 1 => Some(Strategy::Ddp),
            "auto" => Some(Strategy::Single),
            "ddp" => Some(Strategy::Ddp),
            "single" if world > 1 => {
                let problem = format!("`single` is for one rank, but there are {world}; use `ddp`");
                self.mistake("strategy", problem);
                None
            }
            "single" => Some(Strategy::Single),
            name if STRATEGIES_NOT_YET.iter().any(|known| name.starts_with(known)) => {
                self.mistake("strategy", format!("`{name}` is not in this version; use `ddp`"));
                None
            }
            name => {
                let known = "auto, single, ddp";
                self.mistake("strategy", format!("unknown strategy `{name}`; there are {known}"));
                None
            }
        }
    }

    fn optimizer(&mut self, config: &TrainerConfig) -> Option<Optimizer> {
        let TrainerConfig { beta1, beta2, eps, momentum, .. } = *config;
        match config.optimizer.as_str() {
            "adamw" => {
                let weight_decay = config.weight_decay.unwrap_or(0.01);
                Some(Optimizer::AdamW { beta1, beta2, eps, weight_decay })
            }
            "sgd" => {
                let weight_decay = config.weight_decay.unwrap_or(0.0);
                Some(Optimizer::Sgd { momentum, nesterov: config.nesterov, weight_decay })
            }
            name => {
                self.mistake(
                    "optimizer",
                    format!("unknown optimizer `{name}`; there are adamw, sgd"),
                );
                None
            }
        }
    }

    fn schedule(&mut self, config: &TrainerConfig) -> Option<Schedule> {
        let decay = match config.schedule.as_str() {
            "constant" => Decay::Constant,
            "linear" => Decay::Linear,
            "cosine" => Decay::Cosine,
            name => {
                let known = "constant, linear, cosine";
                self.mistake("schedule", format!("unknown schedule `{name}`; there are {known}"));
                return None;
            }
        };
        Some(Schedule { lr: config.lr, warmup_steps: config.warmup_steps, decay })
    }

    fn limits(&mut self, config: &TrainerConfig) {
        if config.max_steps.is_none() && config.max_epochs.is_none() && !config.fast_dev_run {
            self.mistake("max_steps", "a run needs an end: set max_steps or max_epochs");
        }
        for (setting, limit) in [("max_steps", config.max_steps), ("max_epochs", config.max_epochs)]
        {
            if limit == Some(0) {
                self.mistake(setting, "0 would train nothing; use 1 or more");
            }
        }
        let accumulate = config.accumulate_grad_batches;
        if accumulate == 0 || accumulate > MAX_MICRO_BATCHES {
            let limit = format!("it must be 1 to {MAX_MICRO_BATCHES}");
            self.mistake(
                "accumulate_grad_batches",
                format!("{accumulate} is out of range; {limit}"),
            );
        }
        if config.limit_val_batches == Some(0) {
            self.mistake("limit_val_batches", "0 is no validation; use val_check_interval 0");
        }
        if config.gradient_clip_algorithm != "norm" {
            let name = &config.gradient_clip_algorithm;
            self.mistake(
                "gradient_clip_algorithm",
                format!("`{name}` is not in this version; use `norm`"),
            );
        }
        if config.fast_dev_run && config.resume.is_some() {
            self.mistake(
                "resume",
                "fast_dev_run takes one step from the beginning; set one of them",
            );
        }
        if config.resume.as_deref() == Some("auto") && config.out.is_none() {
            self.mistake("resume", "`auto` looks for checkpoints under `out`, which is not set");
        }
    }

    fn ranges(&mut self, config: &TrainerConfig) {
        let unit = |v: f64| (0.0..1.0).contains(&v);
        let not_negative = |v: f64| v.is_finite() && v >= 0.0;
        let checks: [(&str, f64, bool, &str); 7] = [
            ("lr", config.lr, config.lr.is_finite() && config.lr > 0.0, "above 0"),
            ("beta1", config.beta1, unit(config.beta1), "at least 0 and below 1"),
            ("beta2", config.beta2, unit(config.beta2), "at least 0 and below 1"),
            ("eps", config.eps, config.eps.is_finite() && config.eps > 0.0, "above 0"),
            ("momentum", config.momentum, unit(config.momentum), "at least 0 and below 1"),
            (
                "weight_decay",
                config.weight_decay.unwrap_or(0.0),
                not_negative(config.weight_decay.unwrap_or(0.0)),
                "0 or more",
            ),
            (
                "gradient_clip_val",
                config.gradient_clip_val.unwrap_or(0.0),
                not_negative(config.gradient_clip_val.unwrap_or(0.0)),
                "0 (off) or more",
            ),
        ];
        for (setting, value, holds, limit) in checks {
            if !holds {
                self.mistake(setting, format!("{value} is out of range; it must be {limit}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!((one.strategy, one.resolved.strategy.as_str()), (Strategy::Single, "single"));
        let two = steps(|c| c.devices = 2).expect("two ranks should be valid");
        assert_eq!((two.strategy, two.resolved.strategy.as_str()), (Strategy::Ddp, "ddp"));
    }

    #[test]
    fn every_wrong_setting_is_refused_by_name() {
        type Change = fn(&mut TrainerConfig);
        let table: [(&str, Change); 24] = [
            ("devices", |c| c.devices = 257),
            ("resume", |c| (c.resume, c.fast_dev_run) = (Some("x".into()), true)),
            ("devices", |c| c.devices = 0),
            ("num_nodes", |c| c.num_nodes = 2),
            ("strategy", |c| c.strategy = "dpp".into()),
            ("strategy", |c| c.strategy = "zero3".into()),
            ("strategy", |c| (c.strategy, c.devices) = ("single".into(), 2)),
            ("accelerator", |c| c.accelerator = "tpu".into()),
            ("precision", |c| c.precision = "16-mixed".into()),
            ("optimizer", |c| c.optimizer = "adam".into()),
            ("schedule", |c| c.schedule = "cos".into()),
            ("lr", |c| c.lr = 0.0),
            ("lr", |c| c.lr = f64::NAN),
            ("beta2", |c| c.beta2 = 1.0),
            ("eps", |c| c.eps = 0.0),
            ("momentum", |c| c.momentum = -0.1),
            ("weight_decay", |c| c.weight_decay = Some(-1.0)),
            ("gradient_clip_val", |c| c.gradient_clip_val = Some(f64::INFINITY)),
            ("gradient_clip_algorithm", |c| c.gradient_clip_algorithm = "value".into()),
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
        assert_eq!(ddp.strategy, Strategy::Ddp);
        assert!(process(2, |c| c.strategy = "single".into()).is_err());
    }

    #[test]
    fn all_mistakes_are_reported_together() {
        let refused = steps(|c| (c.lr, c.devices, c.schedule) = (-1.0, 0, "x".into()));
        let Err(Error::Config(mistakes)) = refused else { panic!("{refused:?}") };
        assert_eq!(mistakes.len(), 3);
    }
}
