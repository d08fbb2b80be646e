use std::path::Path;

use pyroclast::gpt::{GptConfig, GptTask, TextData};
use pyroclast::strategies::parameters;
use pyroclast::{
    Action, Callback, CheckpointConfig, Error, Metrics, StopReason, Trainer, TrainerConfig,
};
use pyroclast_tests::{TINY, golden_text};

fn data(batch_size: usize) -> TextData {
    TextData::new(&golden_text(), TINY.context, 0.1)
        .expect("enough text")
        .with_batch_size(batch_size)
}

fn config(out: &Path, steps: u64) -> TrainerConfig {
    TrainerConfig {
        max_steps: Some(steps),
        limit_val_batches: Some(2),
        out: Some(out.to_owned()),
        ..TrainerConfig::default()
    }
}

fn bits(model: &pyroclast::gpt::Gpt) -> Vec<u32> {
    let named = parameters::read(model).expect("f32 weights");
    named.iter().flat_map(|n| n.values.as_slice().to_f32().into_iter().map(f32::to_bits)).collect()
}

fn losses(out: &Path) -> Vec<(u64, String)> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
    let rows: Vec<Metrics> =
        text.lines().map(|line| serde_json::from_str(line).expect("a row")).collect();
    rows.iter().map(|row| (row.step, format!("{:?} {:?}", row.split, row.loss))).collect()
}

#[test]
fn a_run_continued_is_the_uninterrupted_run_bit_by_bit() {
    let folder = tempfile::tempdir().expect("a folder");
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let task = GptTask::new(TINY);
    let fit = |config| Trainer::new(config).expect("a configuration").fit(&task, &data(4));
    let expected = fit(config(&whole, 9)).expect("the whole run");
    // A constant rate: the schedule does not depend on where the first part ends.
    fit(config(&parts, 5)).expect("the first part");
    let resumed = TrainerConfig { resume: Some("auto".to_owned()), ..config(&parts, 9) };
    let fitted = fit(resumed).expect("the second part");
    assert_eq!(fitted.steps, 9);
    assert_eq!(bits(&fitted.model), bits(&expected.model));
    let train = |out| {
        losses(out).into_iter().filter(|(_, row)| row.starts_with("Train")).collect::<Vec<_>>()
    };
    assert_eq!(train(&parts), train(&whole));
}

#[test]
fn a_run_may_continue_at_another_world() {
    let folder = tempfile::tempdir().expect("a folder");
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let task = GptTask::new(TINY);
    let fit =
        |config, batch| Trainer::new(config).expect("a configuration").fit(&task, &data(batch));
    let expected = fit(config(&whole, 8), 6).expect("the whole run").last_train.expect("a row");
    fit(config(&parts, 4), 6).expect("the first part");
    let resumed =
        TrainerConfig { resume: Some("auto".to_owned()), devices: 3, ..config(&parts, 8) };
    let fitted = fit(resumed, 2).expect("the second part").last_train.expect("a row");
    assert_eq!((fitted.step, fitted.tokens), (expected.step, expected.tokens));
    let difference = fitted.loss.expect("a loss") - expected.loss.expect("a loss");
    assert!(difference.abs() < 1e-5, "{difference}");
}

#[test]
fn a_run_may_continue_under_another_strategy() {
    let folder = tempfile::tempdir().expect("a folder");
    let task = GptTask::new(TINY);
    let fit = |out: &str, strategy: &str, steps, resume: bool| {
        let config = TrainerConfig {
            strategy: strategy.into(),
            devices: 2,
            resume: resume.then(|| "auto".to_owned()),
            ..config(&folder.path().join(out), steps)
        };
        Trainer::new(config).expect("a configuration").fit(&task, &data(3)).expect("a run")
    };
    let expected = bits(&fit("whole", "ddp", 6, false).model);
    for (out, first, second) in [
        ("a", "zero3", "zero3"),
        ("b", "ddp", "fsdp"),
        ("c", "fsdp", "zero1"),
        ("d", "zero2", "ddp"),
    ] {
        fit(out, first, 3, false);
        let continued = fit(out, second, 6, true);
        assert_eq!(bits(&continued.model), expected, "{first}, then {second}");
    }
}

struct StopAt(u64);

impl Callback for StopAt {
    fn on_step_end(&mut self, metrics: &Metrics) -> Action {
        if metrics.step == self.0 { Action::Stop } else { Action::Continue }
    }
}

#[test]
fn a_callback_stops_all_ranks_after_its_step_with_a_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let config = TrainerConfig { devices: 2, ..config(&out, 50) };
    let trainer = Trainer::new(config).expect("a configuration").with_callback(StopAt(3));
    let fitted = { trainer }.fit(&GptTask::new(TINY), &data(2)).expect("a stopped run");
    assert_eq!((fitted.steps, fitted.reason), (3, StopReason::Stopped));
    assert!(out.join("checkpoints/step-00000003/checkpoint.json").is_file());
    assert!(out.join("report.html").is_file());
}

#[test]
fn a_second_run_does_not_mix_with_the_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let fit =
        |config| Trainer::new(config).expect("a configuration").fit(&GptTask::new(TINY), &data(2));
    fit(config(&out, 1)).expect("the first run");
    let error = fit(config(&out, 1)).expect_err("the folder is taken");
    assert!(error.is_misuse() && error.to_string().contains("holds a run already"), "{error}");
    let missing = TrainerConfig { resume: Some("nowhere".into()), ..config(&out, 2) };
    assert!(matches!(fit(missing), Err(Error::Config(_))));
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let fit = |config, model| {
        Trainer::new(config).expect("a configuration").fit(&GptTask::new(model), &data(2))
    };
    fit(config(&out, 1), TINY).expect("the first run");
    for other in [GptConfig { width: 64, ..TINY }, GptConfig { layers: 1, ..TINY }] {
        let resumed = TrainerConfig { resume: Some("auto".to_owned()), ..config(&out, 2) };
        let error = fit(resumed, other).expect_err("another model");
        let said = error.to_string();
        assert!(error.is_misuse() && said.contains("the checkpoint is of another model"), "{said}");
    }
}

#[test]
fn a_checkpoint_of_another_training_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let fit = |config, data: &TextData| {
        Trainer::new(config).expect("a configuration").fit(&GptTask::new(TINY), data)
    };
    fit(config(&out, 1), &data(2)).expect("the first run");
    let resumed = || TrainerConfig { resume: Some("auto".to_owned()), ..config(&out, 2) };
    let other_text = TextData::new(&golden_text()[..20_000], TINY.context, 0.1).expect("a text");
    let table = [
        (fit(TrainerConfig { seed: 3, ..resumed() }, &data(2)), "seed"),
        (fit(TrainerConfig { optimizer: "sgd".to_owned(), ..resumed() }, &data(2)), "optimizer"),
        (fit(resumed(), &other_text), "data"),
    ];
    for (outcome, setting) in table {
        let error = outcome.expect_err(setting);
        assert!(error.is_misuse() && error.to_string().starts_with(setting), "{error}");
    }
    assert!(fit(resumed(), &data(2)).is_ok(), "the refusals left the run as it was");
}

#[test]
fn two_histories_do_not_meet_in_one_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    let fit = |config: TrainerConfig| {
        // All are kept, so that there is an older one.
        let checkpoint = CheckpointConfig { save_top_k: -1, ..CheckpointConfig::default() };
        let config = TrainerConfig { checkpoint, ..config };
        Trainer::new(config).expect("a configuration").fit(&GptTask::new(TINY), &data(2))
    };
    let from = |path: &Path| Some(path.to_string_lossy().into_owned());
    fit(config(&a, 2)).expect("run a");
    fit(config(&b, 3)).expect("run b");
    let resume = from(&a.join("checkpoints/step-00000002"));
    let error = fit(TrainerConfig { resume: resume.clone(), ..config(&b, 5) }).expect_err("b is b");
    assert!(error.to_string().contains("newest checkpoint is not"), "{error}");
    assert_eq!(losses(&b).len(), 4, "run b is as it was");
    fit(TrainerConfig { resume: from(&a), ..config(&a, 4) })
        .expect("a run's folder means its newest");
    let error = fit(TrainerConfig { resume, ..config(&a, 5) }).expect_err("an older step");
    assert!(error.to_string().contains("newest checkpoint is not"), "{error}");
    let nothing_left = fit(TrainerConfig { resume: from(&a), ..config(&a, 4) });
    assert_eq!(nothing_left.expect("nothing to do").steps, 4);
}

#[test]
fn weights_that_are_no_numbers_are_not_saved() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let fit = |lr| {
        let config = TrainerConfig { lr, val_check_interval: Some(0), ..config(&out, 1) };
        Trainer::new(config).expect("a configuration").fit(&GptTask::new(TINY), &data(2))
    };
    let error = fit(1e39).expect_err("weights out of range");
    assert!(matches!(error, Error::WeightsNotFinite { step: 1, .. }), "{error}");
    assert_eq!(std::fs::read_dir(out.join("checkpoints")).expect("the folder").count(), 0);
}

/// Losses of the steps from `first` on.
fn losses_from(out: &Path, first: u64) -> Vec<f64> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
    let rows = text.lines().map(|line| serde_json::from_str::<Metrics>(line).expect("a row"));
    let rows = rows.filter(|row| row.split == pyroclast::Split::Train && row.step >= first);
    rows.map(|row| row.loss.expect("a loss")).collect()
}

/// Saved by some ranks under a strategy, a run continues under any other with any number of ranks: the same
/// samples, none twice and none left out, and the same losses.
#[test]
fn what_any_ranks_save_any_others_continue() {
    let ways = ["single", "ddp", "zero1", "zero2", "zero3", "fsdp"];
    let folder = tempfile::tempdir().expect("a folder");
    let task = GptTask::new(TINY);
    // 12 samples a step, whoever takes them.
    let fit = |out: &Path, (way, world): (&str, usize), steps, resume: bool| {
        let config = TrainerConfig {
            strategy: way.into(),
            devices: world,
            resume: resume.then(|| "auto".to_owned()),
            ..config(out, steps)
        };
        let trainer = Trainer::new(config).expect("a configuration");
        { trainer }.fit(&task, &data(12 / world)).expect("a run");
    };
    let whole = folder.path().join("whole");
    fit(&whole, ("single", 1), 6, false);
    let expected = losses_from(&whole, 4);
    let is_full = std::env::var_os("PYROCLAST_FULL").is_some();
    let place = |way: &str, world: usize| if way == "single" { 1 } else { world };
    for (from, first) in ways.iter().enumerate() {
        for (to, second) in ways.iter().enumerate() {
            for (saves, loads) in (1..=4).flat_map(|a| (1..=4).map(move |b| (a, b))) {
                // A cover in which every way meets every other, and every world every other.
                let is_covered =
                    (from + to + saves) % 4 == loads % 4 && (from + 2 * to) % 4 == saves % 4;
                if !(is_full || is_covered) {
                    continue;
                }
                let what = format!("{first} on {saves}, then {second} on {loads}");
                let out = folder.path().join(what.replace(' ', "-"));
                fit(&out, (first, place(first, saves)), 3, false);
                fit(&out, (second, place(second, loads)), 6, true);
                let got = losses_from(&out, 4);
                assert_eq!(got.len(), expected.len(), "{what}");
                for (got, expected) in got.iter().zip(&expected) {
                    assert!((got - expected).abs() < 1e-5, "{what}: {got} {expected}");
                }
            }
        }
    }
}

/// A run may continue in another precision: master weights are the same numbers.
#[test]
fn a_run_may_continue_in_another_precision() {
    let folder = tempfile::tempdir().expect("a folder");
    let task = GptTask::new(TINY);
    let fit = |out: &str, precision: &str, steps, resume: bool| {
        let config = TrainerConfig {
            precision: precision.to_owned(),
            resume: resume.then(|| "auto".to_owned()),
            ..config(&folder.path().join(out), steps)
        };
        Trainer::new(config).expect("a configuration").fit(&task, &data(6)).expect("a run")
    };
    fit("whole", "32-true", 8, false);
    let expected = losses_from(&folder.path().join("whole"), 6);
    for (first, second, tolerance) in [
        ("64-true", "32-true", 1e-5),
        ("32-true", "64-true", 1e-5),
        ("32-true", "bf16-mixed", 2e-2),
    ] {
        let out = format!("{first}-{second}");
        fit(&out, first, 5, false);
        fit(&out, second, 8, true);
        for (got, expected) in losses_from(&folder.path().join(&out), 6).iter().zip(&expected) {
            assert!((got - expected).abs() < tolerance, "{out}: {got} {expected}");
        }
    }
}
