//! The checks of each setting, which collect mistakes.

use pyroclast_strategies::Optimizer;

use crate::config::{TrainerConfig, explain};
use crate::environment::{ProcessRank, SET_RANKS};
use crate::error::Mistake;
use crate::schedule::{Decay, Schedule, ScheduleConfig, Scheduler, Shape};
use crate::strategy::{Strategy, StrategyConfig};

/// Ranks that one process may have: they are threads, each with a connection to every other.
const MAX_RANKS: usize = 256;

/// Micro-batches of a step.
const MAX_MICRO_BATCHES: usize = 1 << 20;

/// Collects mistakes.
#[derive(Default)]
pub(super) struct Check(pub(super) Vec<Mistake>);

/// Strategies that Lightning or DeepSpeed users may ask for and that this version does not build.
const STRATEGIES_NOT_YET: [&str; 7] = [
    "ddp_spawn",
    "ddp_notebook",
    "hybrid_shard",
    "fsdp_cpu_offload",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3_offload",
    "zero3_offload_nvme",
];

impl Check {
    pub(super) fn mistake(&mut self, setting: &str, problem: impl Into<String>) {
        self.0.push(Mistake::new(setting, problem));
    }

    pub(super) fn parse<T, E: ToString>(
        &mut self,
        setting: &str,
        parsed: Result<T, E>,
    ) -> Option<T> {
        parsed.map_err(|error| self.mistake(setting, error.to_string())).ok()
    }

    /// The number of ranks: where they are processes, the environment says it.
    pub(super) fn world(&mut self, config: &TrainerConfig, process: Option<&ProcessRank>) -> usize {
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

    pub(super) fn strategy(&mut self, config: &TrainerConfig, world: usize) -> Option<Strategy> {
        let strategy = match &config.strategy {
            StrategyConfig::Settings(strategy) => strategy.clone(),
            StrategyConfig::Name(text) if text.starts_with('{') => {
                let example = r#"{"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}"#;
                let parsed = serde_json::from_str::<Strategy>(text);
                self.parse("strategy", parsed.map_err(|error| explained(text, &error, example)))?
            }
            StrategyConfig::Name(name) => self.strategy_named(name, world)?,
        };
        if strategy == Strategy::Single && world > 1 {
            let problem = format!("`single` is for one rank, but there are {world}; use `ddp`");
            self.mistake("strategy", problem);
            return None;
        }
        self.0.extend(strategy.mistakes());
        Some(strategy)
    }

    fn strategy_named(&mut self, name: &str, world: usize) -> Option<Strategy> {
        let name = match name {
            "auto" if world > 1 => "ddp",
            "auto" => "single",
            name => name,
        };
        let strategy = Strategy::named(name);
        if strategy.is_none() {
            let known = Strategy::NAMES.join(", ");
            let is_later = STRATEGIES_NOT_YET.contains(&name);
            let problem = match is_later {
                true => format!("`{name}` is not in this version; there are auto, {known}"),
                false => format!("unknown strategy `{name}`; there are auto, {known}"),
            };
            self.mistake("strategy", problem);
        }
        strategy
    }

    pub(super) fn optimizer(&mut self, config: &TrainerConfig) -> Option<Optimizer> {
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

    /// The learning rate of all ranks together.
    pub(super) fn scaled_lr(&mut self, config: &TrainerConfig, world: usize) -> f64 {
        let micro_batches = world.saturating_mul(config.accumulate_grad_batches) as f64;
        match config.lr_scaling.as_str() {
            "none" => config.lr,
            "linear" => config.lr * micro_batches,
            "sqrt" => config.lr * micro_batches.sqrt(),
            name => {
                let problem = format!("unknown scaling `{name}`; there are none, linear, sqrt");
                self.mistake("lr_scaling", problem);
                config.lr
            }
        }
    }

    /// What moves numbers between ranks, and which ranks shard what.
    pub(super) fn communication(&mut self, config: &TrainerConfig, world: usize) {
        match config.process_group_backend.as_str() {
            "auto" | "ring" | "gloo" => {}
            name @ ("nccl" | "mpi") => {
                let problem = format!("`{name}` is not in this version; use auto or ring");
                self.mistake("process_group_backend", problem);
            }
            name => {
                let problem = format!("unknown backend `{name}`; there are auto, ring (also gloo)");
                self.mistake("process_group_backend", problem);
            }
        }
        let Some((replicate, shard)) = config.device_mesh else { return };
        if replicate.checked_mul(shard) != Some(world) {
            let problem = format!(
                "{replicate} replicas x {shard} shards, but there are {world} ranks; make them agree, or \
                 leave it out"
            );
            self.mistake("device_mesh", problem);
        } else {
            let problem = format!(
                "a mesh of {replicate} replicas x {shard} shards is for HYBRID_SHARD, which is not in \
                 this version; leave it out"
            );
            self.mistake("device_mesh", problem);
        }
    }

    pub(super) fn schedule(&mut self, config: &TrainerConfig, lr: f64) -> Option<Schedule> {
        let name = match &config.schedule {
            ScheduleConfig::Settings(scheduler) => return self.scheduler(config, *scheduler, lr),
            ScheduleConfig::Name(text) if text.starts_with('{') => {
                let example = r#"{"WarmupLR": {"warmup_num_steps": 100}}"#;
                let parsed = serde_json::from_str::<Scheduler>(text);
                let parsed = parsed.map_err(|error| explained(text, &error, example));
                let scheduler = self.parse("schedule", parsed)?;
                return self.scheduler(config, scheduler, lr);
            }
            ScheduleConfig::Name(name) => name,
        };
        let decay = match name.as_str() {
            "constant" => Decay::Constant,
            "linear" => Decay::Linear,
            "cosine" => Decay::Cosine,
            name => {
                let known = "constant, linear, cosine, and DeepSpeed's with their settings";
                self.mistake("schedule", format!("unknown schedule `{name}`; there are {known}"));
                return None;
            }
        };
        Some(Schedule { lr, shape: Shape::Warmup { steps: config.warmup_steps, decay } })
    }

    fn scheduler(
        &mut self,
        config: &TrainerConfig,
        scheduler: Scheduler,
        lr: f64,
    ) -> Option<Schedule> {
        for (name, problem) in scheduler.mistakes() {
            self.mistake(&format!("schedule.{}.{name}", scheduler.name()), problem);
        }
        if config.warmup_steps > 0 {
            let problem = format!(
                "{} beside {}, which has a warm-up of its own; set one of them",
                config.warmup_steps,
                scheduler.name()
            );
            self.mistake("warmup_steps", problem);
        }
        if config.lr_scaling != "none" && !scheduler.scales_lr() {
            let problem = format!(
                "`{}` scales `lr`, but {} has rates of its own; use none",
                config.lr_scaling,
                scheduler.name()
            );
            self.mistake("lr_scaling", problem);
        }
        Some(Schedule { lr, shape: Shape::DeepSpeed(scheduler) })
    }

    pub(super) fn limits(&mut self, config: &TrainerConfig) {
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
        if config.train_batch_size == Some(0) {
            self.mistake("train_batch_size", "0 samples train nothing; use 1 or more");
        }
        if config.limit_val_batches == Some(0) {
            self.mistake("limit_val_batches", "0 is no validation; use val_check_interval 0");
        }
        let algorithm = &config.gradient_clip_algorithm;
        if !["norm", "value"].contains(&algorithm.as_str()) {
            let problem = format!("unknown algorithm `{algorithm}`; there are norm, value");
            self.mistake("gradient_clip_algorithm", problem);
        } else if algorithm == "value" && config.gradient_clip_val.is_none() {
            let problem =
                "`value` clips nothing without a limit; set gradient_clip_val, or 0 for none";
            self.mistake("gradient_clip_algorithm", problem);
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

    pub(super) fn checkpoints(&mut self, config: &TrainerConfig) {
        for (setting, problem) in config.checkpoint.mistakes() {
            self.mistake(&format!("checkpoint.{setting}"), problem);
        }
    }

    pub(super) fn ranges(&mut self, config: &TrainerConfig) {
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

fn explained(text: &str, error: &serde_json::Error, example: &str) -> String {
    format!("`{text}`: {}; write it as {example}", explain(&error.to_string()))
}
