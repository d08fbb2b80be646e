//! Sections and keys that are read by themselves: clipping, averaging of gradients, logging, drives,
//! activation checkpointing, checkpoints.

use super::section::Section;

const FLOATS: [&str; 3] = ["fp32", "fp16", "bf16"];

/// Reads all of them.
pub(super) fn read(file: &mut Section<'_, '_>) {
    gradient_clipping(file);
    if let Some(steps) = file.integer("steps_per_print", 1..=i64::MAX) {
        file.emit("log_every_n_steps", steps, "steps_per_print");
    }
    if file.integer("vocabulary_size", 1..=i64::MAX).is_some() {
        file.note("`vocabulary_size` has no effect: the model has its own");
    }
    averaging(file);
    aio(file);
    activation_checkpointing(file);
    checkpoint(file);
}

fn gradient_clipping(file: &mut Section<'_, '_>) {
    const KEY: &str = "gradient_clipping";
    const NATIVE: &str = "gradient_clip_val";
    if let Some(limit) = file.number(KEY, 0.0..=f64::MAX) {
        file.emit(NATIVE, limit, KEY);
    } else if file.is_auto(KEY) {
        file.note(format!("`{KEY}` is \"auto\": {NATIVE} of the run applies, by default none"));
    } else {
        file.emit_from(NATIVE, 1.0, format!("{KEY} (default of DeepSpeed)"));
        file.note(format!(
            "`{KEY}` is not given and is 1.0, DeepSpeed's default since June 2026 (0.0 before, which \
             is no clipping)"
        ));
    }
}

/// How gradients of the ranks become one.
fn averaging(file: &mut Section<'_, '_>) {
    for (key, is_given) in [
        ("prescale_gradients", file.bool("prescale_gradients").is_some()),
        (
            "gradient_predivide_factor",
            file.number("gradient_predivide_factor", f64::MIN_POSITIVE..=f64::MAX).is_some(),
        ),
    ] {
        if is_given {
            file.note(format!(
                "`{key}` has no effect: the engine divides gradients once, and before it sums them only in f16"
            ));
        }
    }
    if file.choice("gradient_allreduce_op", &["mean", "sum"]) == Some("sum") {
        let problem = "\"sum\" is not in this version; gradients are averaged: use \"mean\", and \
                       multiply lr if the sum is meant";
        file.mistake("gradient_allreduce_op", problem);
    }
    reduce_dtype(file);
}

/// In which type gradients are added up: over micro-batches and over ranks it is the same.
fn reduce_dtype(file: &mut Section<'_, '_>) {
    const KEY: &str = "communication_data_type";
    const ACCUMULATED: &str = "data_types.grad_accum_dtype";
    let communicated = file.choice(KEY, &FLOATS);
    let mut accumulated = None;
    if let Some(mut types) = file.section("data_types") {
        accumulated = types.choice("grad_accum_dtype", &FLOATS);
        types.finish();
    }
    match (communicated, accumulated) {
        (Some(communicated), Some(accumulated)) if communicated != accumulated => file.mistake(
            KEY,
            format!(
                "\"{communicated}\", but `{ACCUMULATED}` is \"{accumulated}\"; gradients are accumulated \
                 and communicated in one type here: give both the same, or leave one out"
            ),
        ),
        (Some(float), _) => file.emit("reduce_dtype", own_name(float), KEY),
        (None, Some(float)) => {
            file.emit_from("reduce_dtype", own_name(float), ACCUMULATED.to_owned());
        }
        (None, None) => file.note(format!(
            "`{KEY}` is not given: gradients are summed in f32, where DeepSpeed sums them in the type of \
             `fp16` or `bf16`"
        )),
    }
}

fn own_name(float: &str) -> String {
    float.replace("fp", "f")
}

/// Settings of the drive, which only offload to NVMe would use.
fn aio(file: &mut Section<'_, '_>) {
    let Some(mut aio) = file.section("aio") else {
        return;
    };
    for key in ["block_size", "queue_depth"] {
        aio.integer(key, 1..=i64::MAX);
    }
    let threads = aio.renamed("intra_op_parallelism", "thread_count");
    aio.integer(threads, 1..=i64::MAX);
    for key in ["single_submit", "overlap_events", "use_gds"] {
        aio.bool(key);
    }
    aio.note("`aio` has no effect: nothing lies on a drive without offload to nvme");
    aio.finish();
}

fn activation_checkpointing(file: &mut Section<'_, '_>) {
    let Some(mut section) = file.section("activation_checkpointing") else {
        return;
    };
    if section.integer("number_checkpoints", 1..=i64::MAX).is_some() {
        let path = section.at("number_checkpoints");
        section.note(format!(
            "`{path}` has no effect: it sizes the buffer of contiguous_memory_optimization"
        ));
    }
    section.note(
        "the section `activation_checkpointing` does not switch checkpointing on, in DeepSpeed \
         neither; here the setting `activation_checkpointing` does",
    );
    section.finish();
}

fn checkpoint(file: &mut Section<'_, '_>) {
    let Some(mut checkpoint) = file.section("checkpoint") else {
        return;
    };
    if let Some(mode) = checkpoint.choice("tag_validation", &["Ignore", "Warn", "Fail"]) {
        let path = checkpoint.at("tag_validation");
        checkpoint.note(format!(
            "`{path}` {mode} has no effect: one rank names a checkpoint for all of them"
        ));
    }
    if let Some(parallel) = checkpoint.section("parallel_write") {
        parallel.finish();
    }
    checkpoint.finish();
}
