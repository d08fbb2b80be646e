//! Settings of `pyroclast train`: flags over file over defaults.

mod file;
mod merge;
mod parse;

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use pyroclast::environment::SET_RANKS;
use pyroclast::gpt::GptConfig;
use pyroclast::{
    CheckpointConfig, Environment, LossScaleConfig, Mistake, MonitorConfig, ProcessRank,
    ScheduleConfig, StrategyConfig, TrainerConfig, environment,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(crate) use self::merge::Given;

/// What was given, by flag or in a file; absent where nothing was.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Settings {
    /// gpt-nano (default), gpt-mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl.
    #[arg(long, value_name = "PRESET")]
    pub(crate) model: Option<String>,
    /// Transformer blocks, in place of the preset's.
    #[arg(long)]
    pub(crate) layers: Option<usize>,
    /// Attention heads, in place of the preset's.
    #[arg(long)]
    pub(crate) heads: Option<usize>,
    /// Width of the residual stream, in place of the preset's.
    #[arg(long)]
    pub(crate) width: Option<usize>,
    /// Bytes of context, in place of the preset's.
    #[arg(long)]
    pub(crate) context: Option<usize>,
    /// Text file, or folder of text files [default: the project's own documentation and sources].
    #[arg(long, value_name = "PATH", value_parser = parse::path)]
    pub(crate) data: Option<PathBuf>,
    /// Part of the text that is held out, from its end [default: 0.1].
    #[arg(long)]
    pub(crate) val_split: Option<f64>,
    /// random (default) or sequential.
    #[arg(long)]
    pub(crate) sampling: Option<String>,
    /// Samples of all ranks per step, to be checked: batch_size x accumulate_grad_batches x ranks.
    #[arg(long)]
    pub(crate) train_batch_size: Option<usize>,
    /// Samples per micro-batch and rank [default: 12].
    #[arg(long)]
    pub(crate) batch_size: Option<usize>,
    /// auto (default), single, ddp, fsdp, zero1, zero2, zero3, deepspeed, deepspeed_stage_1 to _3; or JSON
    /// with a strategy's settings, such as '{"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}'.
    #[arg(long, value_name = "NAME|JSON", value_parser = parse::strategy)]
    pub(crate) strategy: Option<StrategyConfig>,
    /// Units that recompute their activations: none (default), all, types=A,B, paths=blocks.0 or
    /// min_params=N.
    #[arg(long, value_name = "UNITS")]
    pub(crate) activation_checkpointing: Option<String>,
    /// auto (default), ring, gloo (taken for ring).
    #[arg(long)]
    pub(crate) process_group_backend: Option<String>,
    /// cpu (default), gpu, wgpu, vulkan, cuda, auto.
    #[arg(long)]
    pub(crate) accelerator: Option<String>,
    /// Replicas, and ranks that shard each (not in this version).
    #[arg(long, value_name = "REPLICATE,SHARD", value_parser = parse::mesh)]
    pub(crate) device_mesh: Option<(usize, usize)>,
    /// Ranks on this node [default: 1]. Where each is a process, WORLD_SIZE says how many there are.
    #[arg(long)]
    pub(crate) devices: Option<usize>,
    /// Nodes [default: 1], for processes that were started with RANK and WORLD_SIZE.
    #[arg(long)]
    pub(crate) num_nodes: Option<usize>,
    /// This node's number; it follows from RANK, and is checked.
    #[arg(long)]
    pub(crate) node_rank: Option<usize>,
    /// Address of rank 0's machine, in place of MASTER_ADDR.
    #[arg(long)]
    pub(crate) master_addr: Option<String>,
    /// Port that rank 0 listens on, in place of MASTER_PORT.
    #[arg(long)]
    pub(crate) master_port: Option<u16>,
    /// thread; a process is a rank if it is started with RANK and WORLD_SIZE.
    #[arg(long)]
    pub(crate) spawn: Option<String>,
    /// 32-true (default), 64-true, 16-mixed, bf16-mixed, 16-true, bf16-true.
    #[arg(long)]
    pub(crate) precision: Option<String>,
    /// Units with a precision of their own: '{"types=LayerNorm": "32-true"}'.
    #[arg(long, value_name = "JSON", value_parser = parse::overrides)]
    pub(crate) precision_overrides: Option<BTreeMap<String, String>>,
    /// What gradients are summed in [default: f32; f64 for 64-true].
    #[arg(long, value_name = "TYPE")]
    pub(crate) reduce_dtype: Option<String>,
    /// For 16-mixed and 16-true: dynamic (default), a number, or JSON with a rule, such as
    /// '{"deepspeed": {"hysteresis": 2}}'.
    #[arg(long, value_name = "NAME|NUMBER|JSON", value_parser = parse::loss_scale)]
    pub(crate) loss_scale: Option<LossScaleConfig>,
    /// Name the first unit whose output is NaN or infinite. Takes time.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub(crate) detect_anomaly: Option<bool>,
    /// adamw (default) or sgd.
    #[arg(long)]
    pub(crate) optimizer: Option<String>,
    /// Learning rate [default: 1e-3].
    #[arg(long)]
    pub(crate) lr: Option<f64>,
    /// none (default), linear, sqrt: by ranks x micro-batches.
    #[arg(long)]
    pub(crate) lr_scaling: Option<String>,
    /// AdamW's decay of the first moment [default: 0.9].
    #[arg(long)]
    pub(crate) beta1: Option<f64>,
    /// AdamW's decay of the second moment [default: 0.999].
    #[arg(long)]
    pub(crate) beta2: Option<f64>,
    /// AdamW's epsilon [default: 1e-8].
    #[arg(long)]
    pub(crate) eps: Option<f64>,
    /// SGD's momentum [default: 0.9].
    #[arg(long)]
    pub(crate) momentum: Option<f64>,
    /// SGD looks ahead along the momentum.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub(crate) nesterov: Option<bool>,
    /// Weight decay of matrices and embeddings [default: 0.01 for adamw, 0 for sgd].
    #[arg(long)]
    pub(crate) weight_decay: Option<f64>,
    /// Decay norms and biases too, as torch does by default.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub(crate) decay_all: Option<bool>,
    /// constant (default), linear, cosine; or JSON with one of DeepSpeed's schedulers, such as
    /// '{"WarmupLR": {"warmup_num_steps": 100}}'.
    #[arg(long, value_name = "NAME|JSON", value_parser = parse::schedule)]
    pub(crate) schedule: Option<ScheduleConfig>,
    /// Steps over which the learning rate rises from 0 [default: 0].
    #[arg(long)]
    pub(crate) warmup_steps: Option<u64>,
    /// Micro-batches per optimizer step [default: 1].
    #[arg(long)]
    pub(crate) accumulate_grad_batches: Option<usize>,
    /// Limit of averaged gradients [default: no clipping].
    #[arg(long)]
    pub(crate) gradient_clip_val: Option<f64>,
    /// norm (default): of the global norm; value: of each element.
    #[arg(long)]
    pub(crate) gradient_clip_algorithm: Option<String>,
    /// Optimizer steps [default: 1000, unless max_epochs is set].
    #[arg(long)]
    pub(crate) max_steps: Option<u64>,
    /// Passes over the training data.
    #[arg(long)]
    pub(crate) max_epochs: Option<u64>,
    /// Steps between validations; 0 for none [default: 250].
    #[arg(long)]
    pub(crate) val_check_interval: Option<u64>,
    /// Validation batches per rank, or fewer if there are no more [default: 20].
    #[arg(long)]
    pub(crate) limit_val_batches: Option<usize>,
    /// Steps between two lines or redraws on the terminal [default: 10].
    #[arg(long)]
    pub(crate) log_every_n_steps: Option<u64>,
    /// Seed of initial weights and sampling [default: 0].
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Refuse what could make two runs differ.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub(crate) deterministic: Option<bool>,
    /// One step and one validation batch, and nothing written.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub(crate) fast_dev_run: Option<bool>,
    /// Folder for metrics, checkpoints and report [default: runs/MODEL-N].
    #[arg(long, value_name = "DIR", value_parser = parse::path)]
    pub(crate) out: Option<PathBuf>,
    /// Each machine keeps its ranks' part of every checkpoint in its own folder, where machines share none.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub(crate) node_local: Option<bool>,
    /// When checkpoints are saved and which are kept, as JSON: '{"every_n_train_steps": 100, "monitor": "val_loss",
    /// "save_top_k": 3}' [default: every epoch, the newest].
    #[arg(long, value_name = "JSON", value_parser = parse::checkpoint)]
    pub(crate) checkpoint: Option<CheckpointConfig>,
    /// auto (the newest checkpoint under --out) or a checkpoint's folder.
    #[arg(long, value_name = "auto|PATH")]
    pub(crate) resume: Option<String>,
    /// Curves as CSV files, in this folder [default: none]; JSON names it in a file:
    /// {"output_path": "DIR", "job_name": "NAME"}.
    #[arg(long, value_name = "DIR", value_parser = parse::monitor)]
    pub(crate) csv_monitor: Option<MonitorConfig>,
    /// Curves for TensorBoard, in this folder [default: none].
    #[arg(long, value_name = "DIR", value_parser = parse::monitor)]
    pub(crate) tensorboard: Option<MonitorConfig>,
    /// Initial weights in PyTorch layout, safetensors.
    #[arg(long, value_name = "FILE", value_parser = parse::path)]
    pub(crate) init_from: Option<PathBuf>,
    /// Write the trained weights in PyTorch layout, safetensors.
    #[arg(long, value_name = "FILE", value_parser = parse::path)]
    pub(crate) save_weights: Option<PathBuf>,
}

impl Settings {
    /// Sizes of the model.
    pub(crate) fn model(&self, mistakes: &mut Vec<Mistake>) -> Option<GptConfig> {
        let preset = GptConfig::preset(self.model_name());
        let preset = preset.map_err(|mistake| mistakes.push(mistake)).ok()?;
        let config = GptConfig {
            layers: self.layers.unwrap_or(preset.layers),
            heads: self.heads.unwrap_or(preset.heads),
            width: self.width.unwrap_or(preset.width),
            context: self.context.unwrap_or(preset.context),
        };
        mistakes.extend(config.mistakes());
        Some(config)
    }

    pub(crate) fn model_name(&self) -> &str {
        self.model.as_deref().unwrap_or("gpt-nano")
    }

    /// Settings of the trainer.
    pub(crate) fn trainer(&self) -> TrainerConfig {
        let set = self.clone();
        let default = TrainerConfig::default();
        let max_steps = set.max_steps.or(set.max_epochs.is_none().then_some(1000));
        TrainerConfig {
            strategy: set.strategy.unwrap_or(default.strategy),
            activation_checkpointing: set
                .activation_checkpointing
                .unwrap_or(default.activation_checkpointing),
            process_group_backend: set
                .process_group_backend
                .unwrap_or(default.process_group_backend),
            device_mesh: set.device_mesh,
            accelerator: set.accelerator.unwrap_or(default.accelerator),
            devices: set.devices.unwrap_or(default.devices),
            num_nodes: set.num_nodes.unwrap_or(default.num_nodes),
            precision: set.precision.unwrap_or(default.precision),
            precision_overrides: set.precision_overrides.unwrap_or(default.precision_overrides),
            reduce_dtype: set.reduce_dtype,
            loss_scale: set.loss_scale.unwrap_or(default.loss_scale),
            detect_anomaly: set.detect_anomaly.unwrap_or(default.detect_anomaly),
            optimizer: set.optimizer.unwrap_or(default.optimizer),
            lr: set.lr.unwrap_or(default.lr),
            lr_scaling: set.lr_scaling.unwrap_or(default.lr_scaling),
            beta1: set.beta1.unwrap_or(default.beta1),
            beta2: set.beta2.unwrap_or(default.beta2),
            eps: set.eps.unwrap_or(default.eps),
            momentum: set.momentum.unwrap_or(default.momentum),
            nesterov: set.nesterov.unwrap_or(default.nesterov),
            weight_decay: set.weight_decay,
            schedule: set.schedule.unwrap_or(default.schedule),
            warmup_steps: set.warmup_steps.unwrap_or(default.warmup_steps),
            train_batch_size: set.train_batch_size,
            accumulate_grad_batches: set
                .accumulate_grad_batches
                .unwrap_or(default.accumulate_grad_batches),
            gradient_clip_val: set.gradient_clip_val,
            gradient_clip_algorithm: set
                .gradient_clip_algorithm
                .unwrap_or(default.gradient_clip_algorithm),
            max_steps,
            max_epochs: set.max_epochs,
            val_check_interval: Some(set.val_check_interval.unwrap_or(250)),
            limit_val_batches: Some(set.limit_val_batches.unwrap_or(20)),
            fast_dev_run: set.fast_dev_run.unwrap_or(default.fast_dev_run),
            deterministic: set.deterministic.unwrap_or(default.deterministic),
            log_every_n_steps: set.log_every_n_steps.unwrap_or(default.log_every_n_steps),
            seed: set.seed.unwrap_or(default.seed),
            out: set.out,
            node_local: set.node_local.unwrap_or(default.node_local),
            checkpoint: set.checkpoint.unwrap_or(default.checkpoint),
            resume: set.resume,
            csv_monitor: set.csv_monitor,
            tensorboard: set.tensorboard,
        }
    }

    /// The environment of this process, in which flags win.
    pub(crate) fn environment(&self, mistakes: &mut Vec<Mistake>) -> Environment {
        let flag = |name: &str| match name {
            "MASTER_ADDR" => self.master_addr.clone(),
            "MASTER_PORT" => self.master_port.map(|port| port.to_string()),
            _ => None,
        };
        match Environment::read(|name| flag(name).or_else(|| environment::variable(name))) {
            Ok(environment) => {
                match &environment.process {
                    Some(process) => mistakes.extend(self.wrong_node(process)),
                    None => mistakes.extend(self.without_ranks()),
                }
                environment
            }
            Err(more) => {
                mistakes.extend(more);
                Environment::default()
            }
        }
    }

    /// A node's number that the rank contradicts.
    fn wrong_node(&self, process: &ProcessRank) -> Option<Mistake> {
        let ProcessRank { rank, local_world, .. } = *process;
        let given = self.node_rank.filter(|node| *node != rank / local_world)?;
        let node = rank / local_world;
        let problem = format!(
            "{given}, but RANK {rank} with {local_world} ranks on each node is on node {node}; \
             leave it out, or set LOCAL_WORLD_SIZE"
        );
        Some(Mistake::new("node_rank", problem))
    }

    /// Settings that mean something only where each rank is a process.
    fn without_ranks(&self) -> Vec<Mistake> {
        let given = [
            ("node_rank", self.node_rank.is_some()),
            ("master_addr", self.master_addr.is_some()),
            ("master_port", self.master_port.is_some()),
        ];
        let given = given.into_iter().filter(|(_, given)| *given);
        let problem = format!("means nothing to ranks that are threads; {SET_RANKS}");
        given.map(|(name, _)| Mistake::new(name, &problem)).collect()
    }

    /// A way to start ranks that this version does not have.
    pub(crate) fn wrong_spawn(&self, environment: &Environment) -> Option<Mistake> {
        let problem = match self.spawn.as_deref()? {
            "thread" => return None,
            "process" if environment.process.is_some() => return None,
            "process" => format!("`process` is not in this version; {SET_RANKS}"),
            other => format!("unknown `{other}`; use `thread`"),
        };
        Some(Mistake::new("spawn", problem))
    }
}

/// All settings.
const KEYS: [&str; 57] = [
    "model",
    "layers",
    "heads",
    "width",
    "context",
    "data",
    "val_split",
    "sampling",
    "train_batch_size",
    "batch_size",
    "strategy",
    "activation_checkpointing",
    "process_group_backend",
    "accelerator",
    "device_mesh",
    "devices",
    "num_nodes",
    "node_rank",
    "master_addr",
    "master_port",
    "spawn",
    "precision",
    "precision_overrides",
    "reduce_dtype",
    "loss_scale",
    "detect_anomaly",
    "optimizer",
    "lr",
    "lr_scaling",
    "beta1",
    "beta2",
    "eps",
    "momentum",
    "nesterov",
    "weight_decay",
    "decay_all",
    "schedule",
    "warmup_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "max_steps",
    "max_epochs",
    "val_check_interval",
    "limit_val_batches",
    "log_every_n_steps",
    "seed",
    "deterministic",
    "fast_dev_run",
    "out",
    "node_local",
    "checkpoint",
    "resume",
    "csv_monitor",
    "tensorboard",
    "init_from",
    "save_weights",
];

#[cfg(test)]
mod tests {
    use pyroclast::Error;

    use super::*;

    fn over(file: &str, flags: Settings) -> Result<Settings, Error> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("run.toml");
        std::fs::write(&path, file).expect("a file");
        flags.over_files(Some(&path), None).map(|given| given.settings)
    }

    /// What editors check files of settings by. `PYROCLAST_BLESS=1` writes it anew.
    #[test]
    fn the_schema_is_that_of_the_settings() {
        let schema = schemars::schema_for!(Settings);
        let schema = serde_json::to_string_pretty(&schema).expect("JSON") + "\n";
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/settings.schema.json");
        if std::env::var_os("PYROCLAST_BLESS").is_some() {
            std::fs::write(path, &schema).expect("the schema");
        }
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(schema == committed, "docs/settings.schema.json is of other settings; bless it");
    }

    #[test]
    fn every_setting_has_its_key() {
        let keys = KEYS.map(|key| format!("--{}", key.replace('_', "-"))).join(" ");
        let flags = Settings::augment_args(clap::Command::new("train"));
        let known: Vec<String> = flags
            .get_arguments()
            .map(|arg| format!("--{}", arg.get_id().as_str().replace('_', "-")))
            .collect();
        assert_eq!(keys, known.join(" "));
    }

    #[test]
    fn flags_win_over_the_file() {
        let flags = Settings { lr: Some(0.5), ..Settings::default() };
        let merged = over("lr = 0.1\nmax_steps = 7\n", flags).expect("valid settings");
        assert_eq!((merged.lr, merged.max_steps, merged.seed), (Some(0.5), Some(7), None));
    }

    #[test]
    fn wrong_files_are_refused() {
        for (file, expected) in [
            ("gradient_clipp_val = 1.0", "did you mean `gradient_clip_val`?"),
            ("max_steps = \"many\"", "max_steps: \"many\""),
            ("max_steps = ", "config"),
            ("max-steps = 3", "did you mean `max_steps`?"),
        ] {
            let error = over(file, Settings::default()).expect_err(file);
            assert!(error.is_misuse() && error.to_string().contains(expected), "{file}: {error}");
        }
    }
}
