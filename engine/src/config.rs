//! What the user wrote. Nothing here is checked; [`Plan`](crate::Plan) does that, once.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::checkpoint::CheckpointConfig;
use crate::loss_scale::LossScaleConfig;
use crate::monitor::MonitorConfig;
use crate::schedule::ScheduleConfig;
use crate::strategy::StrategyConfig;

/// Settings of a [`Trainer`](crate::Trainer), under Lightning's names where it has the setting.
///
/// ```
/// use pyroclast::TrainerConfig;
///
/// let config = TrainerConfig { max_steps: Some(100), devices: 2, ..TrainerConfig::default() };
/// assert_eq!(config.strategy, "auto".into());
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainerConfig {
    /// How ranks share the work: a name, or a strategy with its settings. Default `auto`.
    pub strategy: StrategyConfig,
    /// Which declared units recompute their activations in the backward pass instead of keeping them, with
    /// any strategy: `none` (the default), `all`, `types=Block`, `paths=blocks.0`, `min_params=100000`.
    pub activation_checkpointing: String,
    /// `cpu` (the default), `gpu`, `wgpu`, `vulkan`, `cuda`, `auto`.
    pub accelerator: String,
    /// What moves numbers between ranks: `auto` (the default) or `ring`, the engine's own; `gloo` is
    /// taken for `ring`. `nccl` and `mpi` are not in this version.
    pub process_group_backend: String,
    /// Replicas, and ranks that shard each of them: not in this version.
    pub device_mesh: Option<(usize, usize)>,
    /// Ranks on this node. As threads at most 256, and on a GPU all of them share the first one; where
    /// each is a process, `WORLD_SIZE` counts them and this may stay at 1. Default 1.
    pub devices: usize,
    /// Nodes. More than 1 needs one process per rank. Default 1.
    pub num_nodes: usize,
    /// `32-true` (the default), `64-true`, `16-mixed`, `bf16-mixed`, `16-true`, `bf16-true`.
    pub precision: String,
    /// Units with a precision of their own: `types=LayerNorm` or `paths=head`, and the precision's name.
    pub precision_overrides: BTreeMap<String, String>,
    /// What gradients are accumulated, and summed over ranks, in: `f32`, `bf16`, `f16`, `f64`. Default: `f32`, or
    /// `f64` for `64-true`.
    pub reduce_dtype: Option<String>,
    /// For `16-mixed` and `16-true`: `dynamic` (the default), a number, or a rule with its settings.
    pub loss_scale: LossScaleConfig,
    /// Whether the first unit whose output is NaN or infinite is looked for, and named. Default false: it takes
    /// time.
    pub detect_anomaly: bool,
    /// `adamw` (the default) or `sgd`.
    pub optimizer: String,
    /// Learning rate. Default 1e-3.
    pub lr: f64,
    /// What `lr` is multiplied by: `none` (the default), `linear` for world x `accumulate_grad_batches`, or
    /// `sqrt` for its square root. The resolved configuration has the product as `lr`.
    pub lr_scaling: String,
    /// AdamW's decay of the first moment. Default 0.9.
    pub beta1: f64,
    /// AdamW's decay of the second moment. Default 0.999.
    pub beta2: f64,
    /// AdamW's epsilon. Default 1e-8.
    pub eps: f64,
    /// SGD's momentum. Default 0.9.
    pub momentum: f64,
    /// Whether SGD looks ahead along the momentum (Nesterov). Default false.
    pub nesterov: bool,
    /// Weight decay. Default 0.01 for AdamW, 0 for SGD.
    pub weight_decay: Option<f64>,
    /// `constant` (the default), `linear` or `cosine`: the rate after warm-up; or one of DeepSpeed's
    /// schedulers with its settings.
    pub schedule: ScheduleConfig,
    /// Steps over which the rate rises linearly from 0. Default 0.
    pub warmup_steps: u64,
    /// Samples of all ranks per optimizer step, if they are to be checked: the loader's batch size x
    /// `accumulate_grad_batches` x ranks.
    pub train_batch_size: Option<usize>,
    /// Micro-batches per optimizer step. Default 1.
    pub accumulate_grad_batches: usize,
    /// Limit of averaged gradients; 0 or none for no clipping, the default.
    pub gradient_clip_val: Option<f64>,
    /// `norm` (the default): all gradients are scaled so that their global norm is within the limit;
    /// `value`: each element is cut to it.
    pub gradient_clip_algorithm: String,
    /// Optimizer steps to take.
    pub max_steps: Option<u64>,
    /// Passes over the training data. The run ends at whichever limit comes first.
    pub max_epochs: Option<u64>,
    /// Optimizer steps between validations, and one after the last step; 0 for none. Default: only
    /// after the last step.
    pub val_check_interval: Option<u64>,
    /// Validation batches per rank; none for all of them.
    pub limit_val_batches: Option<usize>,
    /// One step and one validation batch, and nothing written.
    pub fast_dev_run: bool,
    /// Refuse what makes two runs differ. Every kernel of this version is deterministic; Burn's
    /// `Dropout` is not on several ranks that are threads, which share their process's generator.
    pub deterministic: bool,
    /// Steps between two lines on the terminal. Default 10.
    pub log_every_n_steps: u64,
    /// Seed of initial weights and sampling. Default 0.
    pub seed: u64,
    /// Folder for metrics, report and checkpoints; none to write nothing.
    pub out: Option<PathBuf>,
    /// Whether each machine keeps its ranks' part of every checkpoint in a folder of its own, where machines do not
    /// share one. Such a run continues with the same ranks on the same machines, or from all their files in one
    /// folder. Default false.
    pub node_local: bool,
    /// When checkpoints are saved in `out`, and which are kept. Default: at the end of every epoch, and the newest.
    pub checkpoint: CheckpointConfig,
    /// `auto` (the newest checkpoint under `out`, if there is one) or a checkpoint's folder.
    pub resume: Option<String>,
    /// Where rank 0 writes curves as CSV files, if it does.
    pub csv_monitor: Option<MonitorConfig>,
    /// Where rank 0 writes curves for TensorBoard, if it does.
    pub tensorboard: Option<MonitorConfig>,
}

/// What is wrong with a value, as serde says it, in words for whoever wrote it: types by what they are, and
/// for an unknown key the one that was meant.
#[must_use]
pub fn explain(error: &str) -> String {
    let unknown = error.strip_prefix("unknown field `").or(error.strip_prefix("unknown variant `"));
    if let Some((key, expected)) = unknown.and_then(|rest| rest.split_once('`')) {
        let known: Vec<&str> = expected.split('`').skip(1).step_by(2).collect();
        let likeness = |known: &&&str| strsim::jaro_winkler(known, key);
        let nearest = known.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
        if let Some(nearest) = nearest {
            let all = known.join(", ");
            return format!("unknown `{key}`; did you mean `{nearest}`? There are {all}");
        }
    }
    let Some((value, expected)) = error.rsplit_once(", expected ") else { return error.to_owned() };
    let kind = expected.split(" at line").next().unwrap_or(expected);
    let words = match kind {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, 0 or more",
        "f64" | "f32" => "a number",
        "a boolean" => "true or false",
        "a string" => "a text",
        "a tuple of size 2" => "two numbers",
        other => other,
    };
    format!("{value}, expected {words}")
}

impl Default for TrainerConfig {
    fn default() -> Self {
        Self {
            strategy: StrategyConfig::default(),
            activation_checkpointing: "none".to_owned(),
            process_group_backend: "auto".to_owned(),
            device_mesh: None,
            accelerator: "cpu".to_owned(),
            devices: 1,
            num_nodes: 1,
            precision: "32-true".to_owned(),
            precision_overrides: BTreeMap::new(),
            reduce_dtype: None,
            loss_scale: LossScaleConfig::default(),
            detect_anomaly: false,
            optimizer: "adamw".to_owned(),
            lr: 1e-3,
            lr_scaling: "none".to_owned(),
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            momentum: 0.9,
            nesterov: false,
            weight_decay: None,
            schedule: ScheduleConfig::default(),
            warmup_steps: 0,
            train_batch_size: None,
            accumulate_grad_batches: 1,
            gradient_clip_val: None,
            gradient_clip_algorithm: "norm".to_owned(),
            max_steps: None,
            max_epochs: None,
            val_check_interval: None,
            limit_val_batches: None,
            fast_dev_run: false,
            deterministic: false,
            log_every_n_steps: 10,
            seed: 0,
            out: None,
            node_local: false,
            checkpoint: CheckpointConfig::default(),
            resume: None,
            csv_monitor: None,
            tensorboard: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::Strategy;

    #[test]
    fn mistakes_are_explained() {
        for (json, expected) in [
            (r#"{"zero": {"stage": "two"}}"#, "expected a whole number, 0 or more"),
            (
                r#"{"zero": {"stagee": 2}}"#,
                "unknown `stagee`; did you mean `stage`? There are stage,",
            ),
            (r#"{"zeros": {}}"#, "unknown `zeros`; did you mean `zero`?"),
            (r#"{"fsdp": {"forward_prefetch": 1}}"#, "expected true or false"),
            (r#"{"fsdp": {"auto_wrap_policy": 1}}"#, "expected a text"),
            ("{", "EOF while parsing"),
        ] {
            let error = serde_json::from_str::<Strategy>(json).expect_err(json);
            let explained = explain(&error.to_string());
            assert!(explained.contains(expected), "{explained}");
        }
    }
}
