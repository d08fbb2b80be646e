use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;

use pyroclast::checkpoint::Checkpoint;
use pyroclast::gpt::text::Windows;
use pyroclast::gpt::{Gpt, GptTask, TextData};
use pyroclast::strategies::parameters;
use pyroclast::{
    BoxError, Error, Fitted, LossScaleConfig, Metrics, RankContext, Split, StepOutput, TrainModule,
    Trainer, TrainerConfig,
};
use pyroclast_tests::{Recorder, TINY, assert_close, golden, golden_text};

/// A GPT whose gradients overflow on one rank in certain steps, counted from 1.
struct Overflowing {
    gpt: GptTask,
    rank: usize,
    overflows: fn(usize) -> bool,
    /// Steps so far, by rank.
    steps: Mutex<HashMap<usize, usize>>,
}

impl Overflowing {
    fn new(rank: usize, overflows: fn(usize) -> bool) -> Self {
        Self { gpt: gpt(), rank, overflows, steps: Mutex::default() }
    }
}

impl TrainModule for Overflowing {
    type Model = Gpt;
    type Batch = Windows;

    fn configure_model(&self, context: &RankContext) -> Result<Gpt, BoxError> {
        self.gpt.configure_model(context)
    }

    fn training_step(
        &self,
        model: &Gpt,
        batch: Windows,
        context: &RankContext,
    ) -> Result<StepOutput, BoxError> {
        let output = self.gpt.training_step(model, batch, context)?;
        if !context.device.is_autodiff() {
            return Ok(output);
        }
        let mut steps = self.steps.lock().expect("no panic");
        let step = steps.entry(context.rank).or_default();
        *step += 1;
        let overflows = context.rank == self.rank && (self.overflows)(*step);
        // Too much for f16, not for f32: the loss stays a number.
        let factor = if overflows { 1e12 } else { 1.0 };
        Ok(StepOutput::new(output.loss.mul_scalar(factor)))
    }
}

/// The golden weights: all runs start alike.
fn gpt() -> GptTask {
    let mut task = GptTask::new(TINY);
    let initial = pyroclast::gpt::weights::InitialWeights::open(&golden("init.safetensors"));
    task.initial = Some(initial.expect("initial weights"));
    task
}

fn data() -> TextData {
    let data = TextData::new(&golden_text(), TINY.context, 0.1).expect("enough text");
    data.with_batch_size(2)
}

fn config(precision: &str, steps: u64) -> TrainerConfig {
    TrainerConfig {
        precision: precision.to_owned(),
        max_steps: Some(steps),
        limit_val_batches: Some(2),
        warmup_steps: 4,
        lr: 1e-2,
        ..TrainerConfig::default()
    }
}

fn torch_rule(settings: &str) -> LossScaleConfig {
    let json = format!(r#"{{"torch": {settings}}}"#);
    serde_json::from_str(&json).expect("a rule")
}

type Run<M> = Result<(Fitted<M>, Vec<Metrics>), Error>;

fn run<T: TrainModule<Batch = Windows>>(config: TrainerConfig, task: &T) -> Run<T::Model> {
    let rows = Recorder::default();
    let trainer = Trainer::new(config)?;
    let fitted = trainer.with_callback(rows.clone()).fit(task, &data())?;
    let train = rows.rows().into_iter().filter(|row| row.split == Split::Train).collect();
    Ok((fitted, train))
}

fn weights(model: &Gpt) -> Vec<Vec<u32>> {
    let named = parameters::read(model).expect("weights");
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    named.iter().map(|named| bits(named.values.as_slice().to_f32())).collect()
}

fn column<T>(rows: &[Metrics], of: impl Fn(&Metrics) -> T) -> Vec<T> {
    rows.iter().map(of).collect()
}

const STRATEGIES: [&str; 5] = ["ddp", "zero1", "zero2", "zero3", "fsdp"];

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all_and_changes_nothing() {
    for strategy in STRATEGIES {
        let config = |steps| TrainerConfig {
            devices: 3,
            strategy: strategy.into(),
            // No more than the model can take without overflow of its own.
            loss_scale: torch_rule(r#"{"init_scale": 8192}"#),
            ..config("16-mixed", steps)
        };
        let skipping = Overflowing::new(1, |step| step <= 3);
        let (fitted, rows) = run(config(3), &skipping).expect("three steps");
        assert_eq!(column(&rows, |row| row.skipped), [true; 3], "{strategy}");
        let scales = [8192.0, 4096.0, 2048.0].map(Some);
        assert_eq!(column(&rows, |row| row.loss_scale), scales, "{strategy}");
        assert!(rows.iter().all(|row| row.grad_norm.is_none() && row.loss.is_some()));
        let initial = gpt().model(&burn::tensor::Device::flex()).expect("a model");
        assert_eq!(weights(&fitted.model), weights(&initial), "{strategy}");

        // Steps that follow are the first ones: rates, moments and bias correction have waited.
        let (_, rows) = run(config(6), &Overflowing::new(1, |step| step <= 3)).expect("a run");
        let scaled =
            TrainerConfig { loss_scale: torch_rule(r#"{"init_scale": 1024}"#), ..config(3) };
        let (_, plain) = run(scaled, &Overflowing::new(1, |_| false)).expect("a run");
        assert_eq!(column(&rows[3..], |row| row.lr), column(&plain, |row| row.lr), "{strategy}");
        assert_eq!(column(&rows, |row| row.skipped), [true, true, true, false, false, false]);
        assert_eq!(rows[3].lr, Some(1e-2 / 5.0));
    }
}

#[test]
fn a_skipped_step_leaves_the_optimizers_state_and_count_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let config = TrainerConfig { out: Some(out.clone()), ..config("16-mixed", 3) };
    run(config, &Overflowing::new(0, |_| true)).expect("three skipped steps");
    let saved = Checkpoint::open(&out.join("checkpoints/step-00000003"));
    let saved = saved.expect("a checkpoint");
    assert_eq!((saved.manifest.step, saved.manifest.skipped), (3, 3));
    assert_eq!(saved.manifest.scaler.expect("a scale").scale, 8192.0);
    for (path, tensor) in &saved.manifest.tensors {
        assert_eq!(tensor.states.len(), 2, "{path}");
        for name in tensor.states.keys() {
            let state = saved.read_all(name, path).expect("numbers").expect("a state");
            assert!(state.as_slice().to_f32().iter().all(|value| *value == 0.0), "{name} {path}");
        }
    }
}

#[test]
fn overflow_forever_ends_after_exactly_as_many_steps_as_the_rule_says() {
    let deepspeed: LossScaleConfig =
        serde_json::from_str(r#"{"deepspeed": {}}"#).expect("DeepSpeed's rule");
    let least = torch_rule(r#"{"init_scale": 8, "min_loss_scale": 2}"#);
    for (loss_scale, steps, scale) in
        [(LossScaleConfig::default(), 17, 1.0), (deepspeed, 18, 1.0), (least, 3, 2.0)]
    {
        let config = TrainerConfig { devices: 2, loss_scale, ..config("16-mixed", 100) };
        let error = run(config, &Overflowing::new(1, |_| true)).map(drop).expect_err("overflow");
        match &error {
            Error::LossScaleAtMinimum { step, scale: at, culprit } => {
                assert_eq!((*step, *at), (steps, scale));
                let culprit = culprit.as_ref().expect("a culprit");
                assert_eq!(culprit.source, Some((1, 1)));
                assert_eq!(culprit.path, "head.weight");
            }
            other => panic!("{other}"),
        }
        let text = error.to_string();
        assert!(text.contains("first the gradient of `head.weight` on rank 1, in micro-batch 1"));
    }
}

#[test]
fn a_static_scale_skips_and_stays() {
    let config =
        TrainerConfig { loss_scale: LossScaleConfig::Static(512.0), ..config("16-mixed", 4) };
    let (_, rows) = run(config, &Overflowing::new(0, |step| step == 2)).expect("a run");
    assert_eq!(column(&rows, |row| row.skipped), [false, true, false, false]);
    assert_eq!(column(&rows, |row| row.loss_scale), [Some(512.0); 4]);
}

#[test]
fn the_step_in_which_the_scale_grows_has_the_gradients_of_any_other() {
    let run = |loss_scale: LossScaleConfig| {
        let config = TrainerConfig { loss_scale, ..config("16-mixed", 6) };
        run(config, &gpt()).expect("a run").1
    };
    let growing = run(torch_rule(r#"{"init_scale": 1024, "growth_interval": 2}"#));
    let fixed = run(LossScaleConfig::Static(1024.0));
    let scales = [1024.0, 1024.0, 2048.0, 2048.0, 4096.0, 4096.0].map(Some);
    assert_eq!(column(&growing, |row| row.loss_scale), scales);
    for (growing, fixed) in growing.iter().zip(&fixed) {
        let (norm, expected) =
            (growing.grad_norm.expect("a norm"), fixed.grad_norm.expect("a norm"));
        // A scale of another step would be a factor of two.
        assert_close(norm, expected, 2e-3, &format!("step {}", growing.step));
        assert_close(growing.loss.expect("a loss"), fixed.loss.expect("a loss"), 1e-3, "loss");
    }
}

#[test]
fn a_run_in_16_bits_is_continued_bit_by_bit() {
    let folder = tempfile::tempdir().expect("a folder");
    for precision in ["16-mixed", "bf16-mixed", "bf16-true", "16-true", "64-true"] {
        let config = |name: &str, steps| TrainerConfig {
            out: Some(folder.path().join(precision).join(name)),
            devices: 2,
            strategy: "zero3".into(),
            warmup_steps: 0,
            loss_scale: match precision {
                "16-mixed" | "16-true" => torch_rule(r#"{"growth_interval": 3, "init_scale": 64}"#),
                _ => LossScaleConfig::default(),
            },
            ..config(precision, steps)
        };
        // An overflow ends a run that has no loss scale.
        let overflows = precision.starts_with("16");
        let task = |before: usize| {
            let skipped = if overflows { before } else { 100 + before };
            let steps = Mutex::new([(0, skipped), (1, skipped)].into());
            Overflowing { steps, ..Overflowing::new(1, |step| step == 2) }
        };
        let (whole, rows) = run(config("whole", 8), &task(0)).expect(precision);
        run(config("parts", 5), &task(0)).expect(precision);
        let resumed = TrainerConfig { resume: Some("auto".to_owned()), ..config("parts", 8) };
        let (parts, continued) = run(resumed, &task(5)).expect(precision);
        assert_eq!(weights(&parts.model), weights(&whole.model), "{precision}");
        let columns: [fn(&Metrics) -> Option<f64>; 3] =
            [|row| row.loss, |row| row.loss_scale, |row| row.lr];
        for of in columns {
            assert_eq!(column(&continued, of), column(&rows[5..], of), "{precision}");
        }
    }
}

fn validation(precision: &str, change: impl FnOnce(&mut TrainerConfig)) -> f64 {
    let mut config = TrainerConfig { limit_val_batches: Some(20), ..config(precision, 60) };
    if precision.starts_with("16") {
        // Skipped steps at the start would make it another training.
        config.loss_scale = torch_rule(r#"{"init_scale": 512}"#);
    }
    change(&mut config);
    let (fitted, _) = run(config, &gpt()).expect(precision);
    fitted.last_validation.and_then(|row| row.loss).expect("a validation")
}

#[test]
fn sixteen_bits_train_as_32_do() {
    let expected = validation("32-true", |_| ());
    for precision in ["bf16-mixed", "16-mixed"] {
        assert_close(validation(precision, |_| ()), expected, 0.01, precision);
        let kept = |config: &mut TrainerConfig| {
            config.precision_overrides =
                [("types=LayerNorm", "32-true"), ("paths=head", "32-true")]
                    .map(|(units, precision)| (units.to_owned(), precision.to_owned()))
                    .into();
        };
        assert_close(validation(precision, kept), expected, 0.01, precision);
        let reduced = |config: &mut TrainerConfig| {
            config.devices = 2;
            config.strategy = "zero2".into();
            config.reduce_dtype = Some(if precision == "16-mixed" { "f16" } else { "bf16" }.into());
        };
        let two = validation("32-true", |config| config.devices = 2);
        assert_close(validation(precision, reduced), two, 0.01, precision);
    }
    // Without master weights it is near enough to be training.
    for precision in ["bf16-true", "16-true"] {
        assert_close(validation(precision, |_| ()), expected, 0.05, precision);
    }
}

#[test]
fn gradients_that_are_not_finite_are_named_in_every_precision() {
    struct Broken(GptTask);
    impl TrainModule for Broken {
        type Model = Gpt;
        type Batch = Windows;

        fn configure_model(&self, context: &RankContext) -> Result<Gpt, BoxError> {
            self.0.configure_model(context)
        }

        fn training_step(
            &self,
            model: &Gpt,
            batch: Windows,
            context: &RankContext,
        ) -> Result<StepOutput, BoxError> {
            let output = self.0.training_step(model, batch, context)?;
            let factor = if context.rank == 1 { f64::INFINITY } else { 1.0 };
            Ok(StepOutput::new(output.loss.mul_scalar(factor)))
        }
    }
    for precision in ["32-true", "bf16-mixed", "bf16-true", "64-true"] {
        let config =
            TrainerConfig { devices: 2, accumulate_grad_batches: 2, ..config(precision, 5) };
        let error = run(config, &Broken(gpt())).map(drop).expect_err("an infinite gradient");
        assert!(matches!(error, Error::NotFinite { step: 1, .. }), "{error}");
        let named = "first the gradient of `head.weight` on rank 1, in micro-batch 1";
        assert!(error.to_string().contains(named), "{precision}: {error}");
    }
}

#[test]
fn the_first_unit_that_returns_no_numbers_is_found_when_asked_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let weights = folder.path().join("broken.safetensors");
    break_weights(&golden("init.safetensors"), &weights, "blocks.1.fc.weight");
    let mut task = GptTask::new(TINY);
    let broken = pyroclast::gpt::weights::InitialWeights::open(&weights);
    task.initial = Some(broken.expect("weights"));
    for precision in ["32-true", "bf16-mixed"] {
        let config = TrainerConfig { detect_anomaly: true, ..config(precision, 5) };
        let error = run(config, &task).map(drop).expect_err("an infinite output").to_string();
        assert!(
            error.contains("unit `blocks.1` on rank 0") && error.contains("the first"),
            "{error}"
        );
    }
}

/// Copies a file of weights, with one number of one tensor infinite.
fn break_weights(from: &Path, to: &Path, name: &str) {
    let mut bytes = std::fs::read(from).expect("weights");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("weights");
    let data = file.tensor(name).expect("a tensor").data();
    let start = data.as_ptr() as usize - bytes.as_ptr() as usize;
    bytes[start..start + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    std::fs::write(to, bytes).expect("weights");
}
