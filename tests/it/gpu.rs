//! Without a device these tests print SKIP; `PYROCLAST_REQUIRE_GPU=1` makes that a failure.

use pyroclast::gpt::{GptTask, TextData};
use pyroclast::{Accelerator, Trainer, TrainerConfig};
use pyroclast_kernels::numbers::Float;
use pyroclast_tests::{Recorder, TINY, assert_close, golden_text};

/// The GPU accelerator to test, if there is one.
fn gpu(test: &str) -> Option<&'static str> {
    let reason = if cfg!(feature = "wgpu") {
        match Accelerator::Wgpu.device() {
            Ok(_) => return Some("wgpu"),
            Err(error) => error.to_string(),
        }
    } else {
        "built without the feature `wgpu`".to_owned()
    };
    let required = std::env::var("PYROCLAST_REQUIRE_GPU").is_ok_and(|value| value == "1");
    assert!(!required, "PYROCLAST_REQUIRE_GPU is set, but {reason}");
    skip(test, &reason);
    None
}

/// Says that a test, or a part of it, is left out, straight to the terminal: a test's captured output is not
/// shown when it passes.
pub(crate) fn skip(test: &str, reason: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "SKIP {test}: {reason}");
}

/// As [`gpu`], opened.
pub(crate) fn device(test: &str) -> Option<burn::tensor::Device> {
    let device = gpu(test).map(|_| Accelerator::Wgpu.device());
    device.map(|device| device.expect("a device that was there a moment ago"))
}

fn losses(accelerator: &str, devices: usize, optimizer: &str, precision: &str) -> Vec<f64> {
    let config = TrainerConfig {
        accelerator: accelerator.to_owned(),
        precision: precision.to_owned(),
        devices,
        optimizer: optimizer.to_owned(),
        lr: if optimizer == "sgd" { 0.1 } else { 1e-3 },
        max_steps: Some(4),
        limit_val_batches: Some(1),
        gradient_clip_val: Some(1.0),
        ..TrainerConfig::default()
    };
    let data = TextData::new(&golden_text(), TINY.context, 0.1)
        .expect("enough text")
        .with_batch_size(4 / devices);
    let mut task = GptTask::new(TINY);
    // Devices draw different random numbers, so both start from the golden weights.
    let initial = pyroclast_tests::golden("init.safetensors");
    task.initial =
        Some(pyroclast::gpt::weights::InitialWeights::open(&initial).expect("initial weights"));
    let rows = Recorder::default();
    let trainer = Trainer::new(config).expect("a configuration");
    { trainer.with_callback(rows.clone()) }.fit(&task, &data).expect("a run");
    let rows = rows.rows();
    assert_eq!(rows.len(), 5, "four steps and a validation");
    rows.iter().map(|row| row.loss.expect("a loss")).collect()
}

#[test]
fn a_gpu_trains_as_the_cpu_does() {
    let Some(gpu) = gpu("a_gpu_trains_as_the_cpu_does") else { return };
    for (devices, optimizer) in [(1, "adamw"), (2, "sgd")] {
        let cpu = losses("cpu", devices, optimizer, "32-true");
        let on_gpu = losses(gpu, devices, optimizer, "32-true");
        for (step, (got, expected)) in on_gpu.iter().zip(&cpu).enumerate() {
            let what = format!("{gpu}, {devices} ranks, {optimizer}, row {step}");
            assert_close(*got, *expected, 1e-3, &what);
        }
    }
}

#[test]
fn a_gpu_trains_in_16_bits_as_the_cpu_does_or_says_why_it_cannot() {
    let test = "a_gpu_trains_in_16_bits_as_the_cpu_does_or_says_why_it_cannot";
    let Some(gpu) = gpu(test) else { return };
    let device = device(test).expect("a device");
    for (precision, float) in
        [("16-mixed", Float::F16), ("bf16-mixed", Float::BF16), ("64-true", Float::F64)]
    {
        if float.is_half() && device.supports_dtype(float.dtype()) {
            let cpu = losses("cpu", 2, "sgd", precision);
            for (got, expected) in losses(gpu, 2, "sgd", precision).iter().zip(&cpu) {
                assert_close(*got, *expected, 1e-2, &format!("{gpu}, {precision}"));
            }
        } else {
            let config = TrainerConfig {
                accelerator: gpu.to_owned(),
                precision: precision.to_owned(),
                max_steps: Some(1),
                ..TrainerConfig::default()
            };
            let refused = Trainer::new(config).expect_err("it lacks the type").to_string();
            let says =
                format!("`{precision}` needs {float}, which this {gpu} device does not have");
            assert!(refused.contains(&says) && refused.contains("f32"), "{refused}");
        }
    }
}
