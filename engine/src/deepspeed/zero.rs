//! The `zero_optimization` section.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::offload;
use super::section::Section;

const ELEMENTS: RangeInclusive<i64> = 0..=i64::MAX;
const SECTION: &str = "zero_optimization";
const HUNDRED_MILLION: i64 = 100_000_000;

/// Reads the ZeRO stage and its settings into `strategy`.
pub(super) fn read(file: &mut Section<'_, '_>, hidden_size: Option<usize>) {
    if let Some(old) = file.value(SECTION).and_then(Value::as_bool) {
        let stage = u8::from(old);
        let problem = format!("{old} is DeepSpeed's old form; write {{\"stage\": {stage}}}");
        return file.mistake(SECTION, problem);
    }
    let Some(mut zero) = file.section(SECTION) else {
        let source = "zero_optimization.stage (default of DeepSpeed)";
        return file.emit_from("strategy", "ddp", source.to_owned());
    };
    let stage = stage(&mut zero);
    let settings = settings(&mut zero, stage, hidden_size);
    deprecated(&mut zero);
    offload::read(&mut zero, stage);
    if stage == 0 {
        zero.emit("strategy", "ddp", "stage");
    } else {
        let strategy = Map::from_iter([("zero".to_owned(), Value::Object(settings))]);
        zero.emit("strategy", strategy, "stage");
    }
    zero.finish();
}

fn stage(zero: &mut Section<'_, '_>) -> i64 {
    let stage = zero.integer_or("stage", 0..=3, 0);
    if !zero.has("stage") {
        zero.note(format!("`{}` is not given and is 0: nothing is sharded", zero.at("stage")));
    }
    stage
}

fn settings(
    zero: &mut Section<'_, '_>,
    stage: i64,
    hidden_size: Option<usize>,
) -> Map<String, Value> {
    let mut settings = Map::new();
    let mut put = |key: &str, value: Value| drop(settings.insert(key.to_owned(), value));
    put("stage", stage.into());
    for (key, default) in [
        ("ignore_unused_parameters", true),
        ("contiguous_gradients", true),
        ("overlap_comm", stage == 3),
        ("round_robin_gradients", false),
    ] {
        put(key, zero.bool_or(key, default).into());
    }
    for (key, default) in
        [("allgather_bucket_size", 5 * HUNDRED_MILLION), ("sub_group_size", 10 * HUNDRED_MILLION)]
    {
        put(key, zero.integer_or(key, ELEMENTS, default).into());
    }
    for (key, other, default) in [
        ("stage3_max_live_parameters", "max_live_parameters", 10 * HUNDRED_MILLION),
        ("stage3_max_reuse_distance", "max_reuse_distance", 10 * HUNDRED_MILLION),
    ] {
        let name = zero.renamed(key, other);
        put(key, zero.integer_or(name, ELEMENTS, default).into());
    }
    let width = hidden_size.map(|hidden_size| Width(hidden_size as f64));
    let bucket = width.as_ref().map(Width::bucket);
    put("reduce_bucket_size", sized(zero, "reduce_bucket_size", bucket, 5 * HUNDRED_MILLION));
    let name = zero.renamed("stage3_prefetch_bucket_size", "prefetch_bucket_size");
    let prefetch = width.as_ref().map(Width::prefetch);
    put("stage3_prefetch_bucket_size", sized(zero, name, prefetch, HUNDRED_MILLION / 2));
    let name = zero.renamed("stage3_param_persistence_threshold", "param_persistence_threshold");
    let persistence = width.as_ref().map(Width::persistence);
    put("stage3_param_persistence_threshold", sized(zero, name, persistence, 100_000));
    settings
}

/// The model's width, and the sizes that the transformers integration takes for `"auto"`.
struct Width(f64);

impl Width {
    fn bucket(&self) -> i64 {
        (self.0 * self.0) as i64
    }

    /// In the integration's order of multiplication, which decides how the product is rounded.
    fn prefetch(&self) -> i64 {
        (0.9 * self.0 * self.0) as i64
    }

    fn persistence(&self) -> i64 {
        (10.0 * self.0) as i64
    }
}

/// A number of elements, of which `"auto"` follows from the model's width where that is known.
fn sized(
    zero: &mut Section<'_, '_>,
    key: &'static str,
    from_width: Option<i64>,
    default: i64,
) -> Value {
    let automatic = if zero.is_auto(key) { from_width } else { None };
    zero.integer_or(key, ELEMENTS, automatic.unwrap_or(default)).into()
}

/// Keys that DeepSpeed renamed or replaced.
fn deprecated(zero: &mut Section<'_, '_>) {
    let gather = "stage3_gather_16bit_weights_on_model_save";
    let mut name = zero.renamed(gather, "gather_16bit_weights_on_model_save");
    if name == gather {
        name = zero.renamed(gather, "stage3_gather_fp16_weights_on_model_save");
    }
    if zero.bool(name).is_some() {
        let path = zero.at(name);
        zero.note(format!("`{path}` has no effect: exported weights are always whole"));
    }
    let pinned = "cpu_offload_use_pin_memory";
    if zero.bool(pinned).is_some() {
        let path = zero.at(pinned);
        zero.note(format!(
            "`{path}` has no effect; `pin_memory` of `offload_optimizer` and `offload_param` \
             replaces it"
        ));
    }
    for (old, replacement) in
        [("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")]
    {
        let Some(offloads) = zero.bool(old) else {
            continue;
        };
        let path = zero.at(replacement);
        if zero.value(replacement).is_some() {
            zero.mistake(
                old,
                format!("is the old form of `{path}`, which is given, too; keep that"),
            );
        } else if offloads {
            let problem = format!(
                "true is the old form of `{path}`; offload to cpu is not in this version; leave it \
                 out"
            );
            zero.mistake(old, problem);
        } else {
            let old = zero.at(old);
            zero.note(format!("`{old}` is the old form of `{path}`; false is its default"));
        }
    }
}
