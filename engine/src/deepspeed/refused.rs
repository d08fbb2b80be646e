//! Keys of DeepSpeed that are not in this version, and why: one table.
//!
//! Each key may have the value that means "off", so that a complete file passes. [`super::section`]
//! looks up every key that no other part of the translation reads.

mod inside;

use serde_json::Value;

use super::section::{Report, join, unknown};

/// A key that is refused unless it is off.
#[derive(Debug)]
pub(super) struct Refused {
    /// Path in the file.
    pub(super) path: &'static str,
    /// Values that are accepted.
    off: Off,
    /// Why other values are refused, and what to do instead.
    reason: &'static str,
    /// Where the key is found.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "the tests compare it with the documentation")
    )]
    pub(super) source: Source,
}

/// Where DeepSpeed names a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// In its documentation, or in the documentation that is in its code.
    Documented,
    /// In the code that reads the file.
    CodeOnly,
}

/// Values that ask for nothing. Null and `"auto"` always do.
#[derive(Debug)]
enum Off {
    False,
    /// What is refused is to switch it off.
    True,
    /// Only null.
    Null,
    /// One of these numbers.
    Numbers(&'static [f64]),
    Text(&'static str),
    /// An empty section.
    Empty,
    /// A section in which nothing is `enabled`.
    DisabledSection,
    /// A section in which this key is not given, false or 0.
    Switch(&'static str),
    /// A section that is on unless it says that it is not.
    SaysDisabled,
    /// Either switch: the key changes nothing, which is a note.
    Harmless,
}

impl Off {
    fn accepts(&self, value: &Value) -> bool {
        match self {
            _ if value.is_null() || value == "auto" => true,
            Self::False => *value == false,
            Self::True => *value == true,
            Self::Null => false,
            Self::Numbers(numbers) => {
                value.as_f64().is_some_and(|number| numbers.contains(&number))
            }
            Self::Text(text) => {
                value.as_str().is_some_and(|found| found.eq_ignore_ascii_case(text))
            }
            Self::Empty => value.as_object().is_some_and(serde_json::Map::is_empty),
            Self::DisabledSection => value.is_object() && is_disabled(value),
            Self::Switch(key) => value.is_object() && value.get(key).is_none_or(is_off),
            Self::SaysDisabled => value.get("enabled") == Some(&Value::Bool(false)),
            Self::Harmless => value.is_boolean(),
        }
    }
}

fn is_off(value: &Value) -> bool {
    value.is_null() || *value == false || *value == 0 || value == "auto"
}

/// Whether nothing in `value` is `enabled`.
fn is_disabled(value: &Value) -> bool {
    let Value::Object(section) = value else {
        return true;
    };
    section.iter().all(|(key, value)| match key.as_str() {
        "enabled" => is_off(value),
        _ => is_disabled(value),
    })
}

#[cfg(test)]
impl Refused {
    /// The row of the documentation's table.
    pub(super) fn documentation(&self) -> String {
        let accepted = match self.off {
            Off::False => "false",
            Off::True => "true",
            Off::Null => "null",
            Off::Numbers(_) => "the number that changes nothing",
            Off::Text(text) => text,
            Off::Empty => "an empty section",
            Off::DisabledSection => "a section that is not enabled",
            Off::Switch(_) => "a section that is off",
            Off::SaysDisabled => "a section with `enabled` false",
            Off::Harmless => "both, without effect",
        };
        format!("| `{}` | {accepted} | {} |", self.path, self.reason.replace('|', "\\|"))
    }
}

impl Refused {
    /// Reports what is wrong with `value`, which is at `path`.
    pub(super) fn judge(&self, path: &str, value: &Value, report: &mut Report) {
        if !self.off.accepts(value) {
            let problem = match value {
                Value::Object(_) | Value::Array(_) => self.reason.to_owned(),
                _ => format!("{value}: {}", self.reason),
            };
            report.mistake(path, problem);
        } else if matches!(self.off, Off::Harmless) && *value == true {
            report.note(format!("`{path}` has no effect: {}", self.reason));
        }
        check_inside(path, value, report);
    }
}

/// Reports unknown keys of a section that is refused, whether it is off or not.
fn check_inside(path: &str, value: &Value, report: &mut Report) {
    if let Value::Array(values) = value {
        return values.iter().for_each(|value| check_inside(path, value, report));
    }
    let (Value::Object(section), Some(known)) = (value, inside::keys(path)) else {
        return;
    };
    for (key, value) in section {
        let path = join(path, key);
        if known.contains(&"*") || known.contains(&key.as_str()) {
            check_inside(&path, value, report);
        } else {
            report.mistake(path, unknown(key, known.iter().copied()));
        }
    }
}

/// The row of a path.
pub(super) fn row(path: &str) -> Option<&'static Refused> {
    REFUSED.iter().find(|row| row.path == present(path))
}

/// The keys in the section at `path` that the table has.
pub(super) fn keys_of(path: &str) -> impl Iterator<Item = &'static str> {
    let section = present(path);
    REFUSED.iter().filter_map(move |row| match row.path.rsplit_once('.') {
        Some((parent, key)) => (parent == section).then_some(key),
        None => section.is_empty().then_some(row.path),
    })
}

/// `path` under the present name of its section.
fn present(path: &str) -> String {
    path.strip_prefix("bfloat16").map_or_else(|| path.to_owned(), |rest| format!("bf16{rest}"))
}

const fn doc(path: &'static str, off: Off, reason: &'static str) -> Refused {
    Refused { path, off, reason, source: Source::Documented }
}

const fn code(path: &'static str, off: Off, reason: &'static str) -> Refused {
    Refused { path, off, reason, source: Source::CodeOnly }
}

const QUANTIZED: &str = "quantized communication is not in this version; set it to false";
const FETCHING: &str = "parameters are fetched a unit at a time; leave it out";
const HALF_STATE: &str = "master weights and optimizer state are always f32; set it to false";
const OFFLOADED: &str = "offload to cpu is not in this version; leave it out";

/// Every key of DeepSpeed that is not honoured.
#[rustfmt::skip]
pub(super) const REFUSED: &[Refused] = &[
    // Batches and gradients.
    doc("managed_gradient_accumulation", Off::True, "steps are always taken at the boundary of accumulation; set it to true"),
    doc("sparse_gradients", Off::False, "gradients of embeddings are dense; set it to false"),
    doc("elasticity", Off::DisabledSection, "elastic batch sizes are not in this version; give train_batch_size"),
    code("dataloader_drop_last", Off::False, "no sample is dropped; set it to false"),
    code("disable_allgather", Off::False, "the collective cannot be chosen; set it to false"),
    code("seq_parallel_communication_data_type", Off::Text("fp32"), "sequence parallelism is not in this version; leave it out"),
    code("sequence_parallel_size", Off::Numbers(&[1.0]), "sequence parallelism is not in this version; leave it out"),
    code("data_parallel_size", Off::Null, "every rank is a data-parallel one; leave it out"),
    // Optimizers.
    code("optimizer.legacy_fusion", Off::False, "there is one implementation of each optimizer; set it to false"),
    code("zero_allow_untested_optimizer", Off::Harmless, "every optimizer here is tested with ZeRO"),
    code("zero_force_ds_cpu_optimizer", Off::Harmless, "it chooses an optimizer for offload, which is not in this version"),
    // Precision.
    doc("amp", Off::DisabledSection, "Apex is not in this version; use fp16 or bf16"),
    doc("torch_autocast", Off::DisabledSection, "autocast of PyTorch is not in this version; use fp16 or bf16"),
    doc("fp16.auto_cast", Off::False, "the model casts its own inputs; set it to false"),
    doc("fp16.fp16_master_weights_and_grads", Off::False, HALF_STATE),
    doc("bf16.bf16_master_weights_and_grads", Off::False, HALF_STATE),
    doc("bf16.bf16_optimizer_states", Off::False, HALF_STATE),
    code("bf16.immediate_grad_update", Off::False, "gradients are averaged once they are whole; set it to false"),
    code("bf16.check_grad_overflow", Off::True, "gradients are always checked; set it to true"),
    code("data_types.param_dtype", Off::Text("fp32"), "the precision of parameters follows from fp16 and bf16; leave it out"),
    code("data_types.buffer_dtype", Off::Text("fp32"), "the precision of buffers follows from fp16 and bf16; leave it out"),
    // ZeRO.
    doc("zero_optimization.allgather_partitions", Off::True, "shards are always gathered by all-gather; set it to true"),
    doc("zero_optimization.reduce_scatter", Off::True, "gradients are always reduce-scattered; set it to true"),
    doc("zero_optimization.load_from_fp32_weights", Off::True, "training resumes from the f32 weights; set it to true"),
    doc("zero_optimization.grad_hooks", Off::Null, "DeepSpeed's documentation names it, but its code refuses it; leave it out"),
    doc("zero_optimization.elastic_checkpoint", Off::False, "DeepSpeed has given it up, too; set it to false"),
    doc("zero_optimization.legacy_stage1", Off::False, "there is one stage 1; set it to false"),
    doc("zero_optimization.use_multi_rank_bucket_allreduce", Off::True, "buckets are reduce-scattered; leave it out"),
    doc("zero_optimization.zenflow", Off::Null, "ZenFlow is a form of offload, which is not in this version; leave it out"),
    doc("zero_optimization.stage3_model_persistence_threshold", Off::Numbers(&[i64::MAX as f64]), FETCHING),
    code("zero_optimization.model_persistence_threshold", Off::Numbers(&[i64::MAX as f64]), FETCHING),
    doc("zero_optimization.stage3_module_granularity_threshold", Off::Numbers(&[0.0]), FETCHING),
    code("zero_optimization.module_granularity_threshold", Off::Numbers(&[0.0]), FETCHING),
    doc("zero_optimization.stage3_use_all_reduce_for_fetch_params", Off::False, FETCHING),
    code("zero_optimization.use_all_reduce_for_fetch_params", Off::False, FETCHING),
    doc("zero_optimization.stage3_allgather_sequential", Off::False, FETCHING),
    code("zero_optimization.allgather_sequential", Off::False, FETCHING),
    doc("zero_optimization.leaf_module", Off::Empty, "units are those that the model declares; leave it out"),
    doc("zero_optimization.zero_hpz_partition_size", Off::Numbers(&[0.0, 1.0]), "a second partition of parameters is not in this version; set it to 1"),
    doc("zero_optimization.zero_quantized_weights", Off::False, QUANTIZED),
    doc("zero_optimization.zero_quantized_nontrainable_weights", Off::False, QUANTIZED),
    doc("zero_optimization.zero_quantized_gradients", Off::False, QUANTIZED),
    doc("zero_optimization.zeropp_loco_param", Off::Null, "quantized communication is not in this version; leave it out"),
    doc("zero_optimization.mics_shard_size", Off::Numbers(&[-1.0]), "MiCS is not in this version; set it to -1"),
    doc("zero_optimization.mics_hierarchical_params_gather", Off::False, "MiCS is not in this version; set it to false"),
    doc("zero_optimization.memory_efficient_linear", Off::Harmless, "linear layers keep no copy of their weights"),
    doc("zero_optimization.override_module_apply", Off::True, "it is about PyTorch's modules; leave it out"),
    doc("zero_optimization.pipeline_loading_checkpoint", Off::False, "a checkpoint is read a tensor at a time; set it to false"),
    doc("zero_optimization.log_trace_cache_warnings", Off::False, "there is no trace of modules to warn of; set it to false"),
    doc("zero_optimization.enable_sanity_checks", Off::False, "collectives are always checked; set it to false"),
    doc("zero_optimization.save_muon_momentum_buffer_in_memory", Off::False, "Muon is not in this version; set it to false"),
    code("allgather_size", Off::Null, "it is DeepSpeed's old form; write zero_optimization.allgather_bucket_size"),
    // Activation checkpointing.
    doc("activation_checkpointing.partition_activations", Off::False, "it splits activations over model-parallel ranks, and there are none; set it to false"),
    doc("activation_checkpointing.cpu_checkpointing", Off::False, OFFLOADED),
    doc("activation_checkpointing.contiguous_memory_optimization", Off::False, "checkpoints are not copied to one buffer; set it to false"),
    doc("activation_checkpointing.synchronize_checkpoint_boundary", Off::False, "checkpoints need no synchronization; set it to false"),
    doc("activation_checkpointing.profile", Off::False, "checkpoints are not timed by themselves; set it to false"),
    // Parallelism and models.
    doc("tensor_parallel", Off::Switch("autotp_size"), "tensor parallelism is not in this version; set autotp_size to 0"),
    doc("hybrid_engine", Off::DisabledSection, "it is about generation in the midst of training; set enabled to false"),
    doc("expert_parallel", Off::DisabledSection, "expert parallelism is not in this version; set enabled to false"),
    code("use_data_before_expert_parallelism", Off::False, "expert parallelism is not in this version; set it to false"),
    code("pipeline", Off::Empty, "pipeline parallelism is not in this version; leave it out"),
    doc("sparse_attention", Off::Null, "sparse attention is not in this version; leave it out"),
    doc("compile", Off::Switch("deepcompile"), "DeepCompile is about PyTorch's compiler; set deepcompile to false"),
    code("graph_harvesting", Off::False, "CUDA graphs are not in this version; set it to false"),
    code("progressive_layer_drop", Off::DisabledSection, "layers are not dropped; set enabled to false"),
    code("eigenvalue", Off::DisabledSection, "eigenvalues are not computed; set enabled to false"),
    code("quantize_training", Off::DisabledSection, "training with quantized weights is not in this version; leave it out"),
    code("weight_quantization", Off::SaysDisabled, "quantized weights are not in this version; leave it out"),
    doc("compression_training", Off::DisabledSection, "compression is not in this version; leave it out"),
    // Data.
    doc("data_efficiency", Off::DisabledSection, "data efficiency is not in this version; set enabled to false"),
    doc("curriculum_learning", Off::DisabledSection, "curricula are not in this version; set enabled to false"),
    // Measuring and logging.
    doc("wall_clock_breakdown", Off::False, "the times of a step are in the run's metrics and report; set it to false"),
    code("memory_breakdown", Off::False, "memory is in the run's report; set it to false"),
    doc("dump_state", Off::False, "resolved settings are in the run's folder; set it to false"),
    doc("flops_profiler", Off::DisabledSection, "operations are not counted; set enabled to false"),
    doc("comms_logger", Off::DisabledSection, "collectives are measured by `pyroclast bench`; set enabled to false"),
    doc("autotuning", Off::DisabledSection, "settings are not searched for; set enabled to false"),
    code("timers", Off::DisabledSection, "throughput is always in the metrics; leave it out"),
    code("log_level", Off::Null, "the log has one level; leave it out"),
    // Checkpoints.
    doc("checkpoint.load_universal", Off::False, "checkpoints of DeepSpeed are not read; set it to false"),
    doc("checkpoint.use_node_local_storage", Off::False, "ranks share the folder of checkpoints; set it to false"),
    doc("checkpoint.parallel_write.pipeline_stage", Off::False, "there are no pipeline stages; set it to false"),
    code("checkpoint.checkpoint_serialization", Off::Harmless, "it is about PyTorch's file format"),
    code("checkpoint.writer", Off::Null, "there is one writer of checkpoints; leave it out"),
    code("nebula", Off::DisabledSection, "Nebula is a service; set enabled to false"),
    code("datastates_ckpt", Off::False, "DataStates is a library of its own; leave it out"),
];
