//! Each section in native settings.

use serde_json::json;

use super::super::Context;
use super::{assert_mistakes, assert_note, read, read_with, setting};

#[test]
fn an_empty_file_has_the_defaults_of_deepspeed() {
    let translation = read("{}").expect("nothing is wrong");
    let expected = json!({"precision": "32-true", "strategy": "ddp", "gradient_clip_val": 1.0});
    assert_eq!(serde_json::Value::Object(translation.settings), expected);
    assert_eq!(
        translation.sources["gradient_clip_val"],
        "gradient_clipping (default of DeepSpeed)"
    );
    assert_note("{}", "since June 2026");
}

#[test]
fn adam_is_adamw_with_the_defaults_of_its_class() {
    for name in ["Adam", "AdamW", "adamw"] {
        let text = format!(r#"{{"optimizer": {{"type": "{name}"}}}}"#);
        let settings = read(&text).expect("nothing is wrong").settings;
        for (key, value) in [
            ("optimizer", json!("adamw")),
            ("decay_all", json!(true)),
            ("lr", json!(0.001)),
            ("beta1", json!(0.9)),
            ("beta2", json!(0.999)),
            ("eps", json!(1e-8)),
            ("weight_decay", json!(0.0)),
        ] {
            assert_eq!(settings[key], value, "{name} {key}");
        }
    }
    let torch = r#"{"optimizer": {"type": "AdamW", "params": {"torch_adam": true}}}"#;
    assert_eq!(setting(torch, "weight_decay"), 0.01);
}

#[test]
fn parameters_of_adamw_are_read() {
    let text = r#"{"optimizer": {"type": "AdamW", "params":
        {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": "auto"}}}"#;
    let translation = read(text).expect("nothing is wrong");
    assert_eq!(translation.settings["lr"], 3e-4);
    assert_eq!(translation.settings["beta1"], 0.8);
    assert_eq!(translation.settings["beta2"], 0.95);
    assert!(!translation.settings.contains_key("weight_decay"));
    assert_eq!(translation.sources["lr"], "optimizer.params.lr");
    assert_note(text, "weight_decay of the run applies");
}

#[test]
fn sgd_is_read() {
    let text = r#"{"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": true}}}"#;
    assert_eq!(setting(text, "momentum"), 0.9);
    assert_eq!(setting(text, "nesterov"), true);
    assert_mistakes(
        r#"{"optimizer": {"type": "SGD", "params": {"nesterov": true, "dampening": 0.1}}}"#,
        &["optimizer.params.dampening: ", "optimizer.params.nesterov: true needs momentum"],
    );
}

#[test]
fn optimizers_that_are_not_there_are_refused() {
    for later in ["Lamb", "OneBitAdam", "Muon", "Adagrad", "RMSprop"] {
        let text = format!(r#"{{"optimizer": {{"type": "{later}", "params": {{"x": 1}}}}}}"#);
        assert_mistakes(&text, &[&format!("optimizer.type: \"{later}\" is not in this version")]);
    }
    assert_mistakes(
        r#"{"optimizer": {"type": "AdmaW"}}"#,
        &["optimizer.type: \"AdmaW\" is unknown; did you mean \"AdamW\"?"],
    );
    assert_mistakes(r#"{"optimizer": {}}"#, &["optimizer.type: is missing"]);
    assert_mistakes(
        r#"{"optimizer": {"type": "Adam", "params": {"adam_w_mode": false, "betas": [0.9, 1],
            "amsgrad": true, "max_grad_norm": 1, "lr": -1}}}"#,
        &[
            "optimizer.params.adam_w_mode: false is Adam with L2",
            "optimizer.params.lr: -1 is out of range",
            "optimizer.params.max_grad_norm: ",
            "optimizer.params.betas: [0.9,1] is not two numbers",
            "optimizer.params.amsgrad: ",
        ],
    );
}

#[test]
fn schedules_have_all_their_parameters() {
    let schedule = |kind: &str, params: &str| {
        let text = format!(r#"{{"scheduler": {{"type": "{kind}", "params": {params}}}}}"#);
        setting(&text, "schedule")[kind].clone()
    };
    assert_eq!(
        schedule("WarmupLR", "{}"),
        json!({"warmup_min_lr": 0.0, "warmup_num_steps": 1000, "warmup_type": "log"})
    );
    assert_eq!(
        schedule("WarmupDecayLR", r#"{"total_num_steps": 9, "warmup_num_steps": 1}"#),
        json!({"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 2,
            "warmup_type": "log", "total_num_steps": 9})
    );
    assert_eq!(
        schedule("WarmupCosineLR", r#"{"total_num_steps": "auto", "warmup_type": "linear"}"#),
        json!({"warmup_min_ratio": 0.0, "warmup_num_steps": 1000, "cos_min_ratio": 0.0001,
            "warmup_type": "linear"})
    );
    assert_eq!(
        schedule("OneCycle", r#"{"cycle_min_lr": 0.1, "cycle_max_lr": [0.2]}"#),
        json!({"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "decay_lr_rate": 0.0,
            "cycle_first_step_size": 2000, "cycle_second_step_size": 2000,
            "cycle_first_stair_count": 0, "cycle_second_stair_count": 0, "decay_step_size": 0,
            "cycle_momentum": true, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9,
            "decay_mom_rate": 0.0})
    );
    assert_eq!(
        schedule("LRRangeTest", "{}"),
        json!({"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2000,
            "lr_range_test_step_rate": 1.0, "lr_range_test_staircase": false})
    );
}

#[test]
fn schedules_check_what_their_constructors_check() {
    assert_mistakes(
        r#"{"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 0, "warmup_type": "cubic"}}}"#,
        &[
            "scheduler.params.warmup_num_steps: 0 is out of range",
            "scheduler.params.warmup_type: \"cubic\" is none of log, linear",
            "scheduler.params.total_num_steps: is missing",
        ],
    );
    assert_mistakes(
        r#"{"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": [1, 2], "cycle_first_step_size": 0}}}"#,
        &[
            "scheduler.params.cycle_min_lr: is missing",
            "scheduler.params.cycle_max_lr: a list",
            "scheduler.params.cycle_first_step_size: 0",
        ],
    );
    assert_mistakes(
        r#"{"scheduler": {"type": "CosineAnnealingLR"}}"#,
        &["scheduler.type: \"CosineAnnealingLR\" is not in this version"],
    );
}

#[test]
fn precision_follows_the_section_that_is_enabled() {
    assert_eq!(setting(r#"{"fp16": {"enabled": true}}"#, "precision"), "16-mixed");
    assert_eq!(setting(r#"{"bf16": {"enabled": true}}"#, "precision"), "bf16-mixed");
    assert_eq!(setting(r#"{"bfloat16": {"enabled": true}}"#, "precision"), "bf16-mixed");
    assert_eq!(setting(r#"{"fp16": {"enabled": false}}"#, "precision"), "32-true");
    assert!(setting(r#"{"fp16": {"enabled": "auto"}}"#, "precision").is_null());
    assert!(setting(r#"{"bf16": {"enabled": true}}"#, "loss_scale").is_null());
    assert_eq!(
        setting(r#"{"fp16": {"enabled": true, "initial_scale_power": 12}}"#, "loss_scale"),
        json!({"deepspeed": {"initial_scale_power": 12, "loss_scale_window": 1000,
            "hysteresis": 2, "consecutive_hysteresis": false, "min_loss_scale": 1}})
    );
    let fixed = r#"{"fp16": {"enabled": true, "loss_scale": 128}}"#;
    assert_eq!(setting(fixed, "loss_scale"), 128.0);
    assert_mistakes(
        r#"{"fp16": {"enabled": true}, "bf16": {"enabled": true}}"#,
        &["fp16.enabled: true contradicts `bf16.enabled`"],
    );
}

#[test]
fn the_loss_scale_is_checked_as_in_deepspeed() {
    assert_mistakes(
        r#"{"fp16": {"enabled": true, "loss_scale_window": 0, "min_loss_scale": 0}}"#,
        &["fp16.loss_scale_window: 0", "fp16.min_loss_scale: 0"],
    );
    for unused in [r#""enabled": true, "loss_scale": 128"#, r#""enabled": false"#] {
        let text = format!(r#"{{"fp16": {{{unused}, "loss_scale_window": 0}}}}"#);
        assert!(read(&text).is_ok(), "{text}");
    }
    for wrong in ["true", "-1", "\"128\""] {
        let text = format!(r#"{{"fp16": {{"loss_scale": {wrong}}}}}"#);
        assert_mistakes(&text, &["fp16.loss_scale: "]);
    }
}

#[test]
fn zero_has_the_defaults_of_the_code() {
    let expected = |stage: u8| {
        json!({"zero": {
            "stage": stage,
            "ignore_unused_parameters": true,
            "contiguous_gradients": true,
            "reduce_bucket_size": 500_000_000,
            "allgather_bucket_size": 500_000_000,
            "overlap_comm": stage == 3,
            "round_robin_gradients": false,
            "sub_group_size": 1_000_000_000,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
        }})
    };
    for stage in 1..=3 {
        let text = format!(r#"{{"zero_optimization": {{"stage": {stage}}}}}"#);
        assert_eq!(setting(&text, "strategy"), expected(stage));
    }
    assert_eq!(setting(r#"{"zero_optimization": {"stage": 0}}"#, "strategy"), "ddp");
    assert_mistakes(
        r#"{"zero_optimization": true}"#,
        &["zero_optimization: true is DeepSpeed's old form; write {\"stage\": 1}"],
    );
}

#[test]
fn automatic_buckets_follow_the_width_of_the_model() {
    let text = r#"{"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}}"#;
    let translation = read_with(text, &Context { world: 2, hidden_size: Some(1024) });
    let zero = translation.expect("nothing is wrong").settings["strategy"]["zero"].clone();
    assert_eq!(zero["reduce_bucket_size"], 1_048_576);
    assert_eq!(zero["stage3_prefetch_bucket_size"], 943_718);
    assert_eq!(zero["stage3_param_persistence_threshold"], 10_240);
    assert_eq!(setting(text, "strategy")["zero"]["reduce_bucket_size"], 500_000_000);
    assert_note(text, "`zero_optimization.reduce_bucket_size` is \"auto\", which became 500000000");
}

#[test]
fn old_names_are_read_as_their_present_ones() {
    let text = r#"{"zero_optimization": {"stage": 3, "max_live_parameters": 7, "cpu_offload": false,
        "stage3_gather_fp16_weights_on_model_save": true}}"#;
    assert_eq!(setting(text, "strategy")["zero"]["stage3_max_live_parameters"], 7);
    assert_note(text, "is read as `zero_optimization.stage3_gather_16bit_weights_on_model_save`");
    assert_mistakes(
        r#"{"zero_optimization": {"cpu_offload": true, "cpu_offload_param": true, "offload_param": {}}}"#,
        &[
            "zero_optimization.cpu_offload: true is the old form of `zero_optimization.offload_optimizer`",
            "zero_optimization.cpu_offload_param: is the old form",
        ],
    );
}

#[test]
fn offload_is_refused_with_all_that_is_wrong_in_it() {
    assert_mistakes(
        r#"{"zero_optimization": {"stage": 2,
            "offload_optimizer": {"device": "nvme", "ratio": 0.5, "pin_memroy": true},
            "offload_param": {"device": "cpu", "buffer_count": -1}}}"#,
        &[
            "zero_optimization.offload_optimizer.device: offload to nvme is not in this version",
            "zero_optimization.offload_optimizer.nvme_path: ",
            "zero_optimization.offload_optimizer.ratio: 0.5 needs stage 3",
            "zero_optimization.offload_optimizer.pin_memroy: unknown key; did you mean `pin_memory`?",
            "zero_optimization.offload_param.buffer_count: -1",
            "zero_optimization.offload_param.device: offload to cpu",
            "zero_optimization.offload_param: needs stage 3",
        ],
    );
    let none = r#"{"zero_optimization": {"offload_optimizer": {"device": "none"}, "offload_param": null}}"#;
    assert_eq!(setting(none, "strategy"), "ddp");
}

#[test]
fn metrics_go_to_files_and_not_to_services() {
    let text = r#"{"csv_monitor": {"enabled": true, "output_path": "logs"}, "steps_per_print": 20,
        "tensorboard": {"enabled": true, "job_name": "run"}, "wandb": {"enabled": false}}"#;
    let csv = json!({"output_path": "logs", "job_name": "DeepSpeedJobName"});
    assert_eq!(setting(text, "csv_monitor"), csv);
    assert_eq!(setting(text, "tensorboard"), json!({"output_path": "", "job_name": "run"}));
    assert_eq!(setting(text, "log_every_n_steps"), 20);
    assert_mistakes(
        r#"{"wandb": {"enabled": true}, "comet": {"enabled": true, "modus": "get"}}"#,
        &[
            "wandb.enabled: true needs",
            "comet.enabled: true needs",
            "comet.modus: unknown key; did you mean `mode`?",
        ],
    );
}

#[test]
fn the_rest_is_honoured_or_refused() {
    let text = r#"{"gradient_clipping": 0.5, "prescale_gradients": true, "gradient_predivide_factor": 4.0,
        "gradient_allreduce_op": "MEAN", "communication_data_type": "fp32", "aio": {"thread_count": 2},
        "data_types": {"grad_accum_dtype": "fp32"}, "checkpoint": {"tag_validation": "warn"},
        "activation_checkpointing": {"number_checkpoints": 4, "profile": false}}"#;
    assert_eq!(setting(text, "gradient_clip_val"), 0.5);
    for note in [
        "prescale_gradients",
        "predivide",
        "thread_count",
        "`aio`",
        "does not switch",
        "tag_validation",
    ] {
        assert_note(text, note);
    }
    assert_eq!(setting(text, "reduce_dtype"), "f32");
    assert_eq!(setting(r#"{"communication_data_type": "bf16"}"#, "reduce_dtype"), "bf16");
    let accumulated = r#"{"data_types": {"grad_accum_dtype": "fp16"}}"#;
    assert_eq!(setting(accumulated, "reduce_dtype"), "f16");
    assert_mistakes(
        r#"{"communication_data_type": "fp16", "data_types": {"grad_accum_dtype": "fp32"}}"#,
        &["communication_data_type: \"fp16\", but `data_types.grad_accum_dtype` is \"fp32\""],
    );
    assert!(setting(r#"{"gradient_clipping": "auto"}"#, "gradient_clip_val").is_null());
    assert_mistakes(
        r#"{"gradient_allreduce_op": "sum", "communication_data_type": "fp8",
            "data_types": {"grad_accum_dtype": "int8"}, "aio": {"block_size": 0},
            "activation_checkpointing": {"cpu_checkpointing": true},
            "checkpoint": {"tag_validation": "loud", "load_universal": true}}"#,
        &[
            "gradient_allreduce_op: \"sum\" is not in this version",
            "communication_data_type: \"fp8\" is none of fp32, fp16, bf16",
            "data_types.grad_accum_dtype: \"int8\" is none of fp32, fp16, bf16",
            "aio.block_size: 0 is out of range; the least is 1",
            "activation_checkpointing.cpu_checkpointing: true: offload to cpu",
            "checkpoint.tag_validation: \"loud\" is none of",
            "checkpoint.load_universal: true: ",
        ],
    );
}

#[test]
fn values_in_quotes_are_pointed_out() {
    assert_mistakes(
        r#"{"fp16": {"enabled": "true"}, "steps_per_print": "10"}"#,
        &[
            "fp16.enabled: \"true\" is not a switch; write true or false; take it out of its quotes",
            "steps_per_print: \"10\" is not a number; take it out of its quotes",
        ],
    );
}
