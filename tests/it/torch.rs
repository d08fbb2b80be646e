//! `tests/torch/make_goldens.py` trained the same model in PyTorch.

use std::collections::BTreeMap;

use pyroclast::gpt::weights::{InitialWeights, save_torch};
use pyroclast::gpt::{GptConfig, GptTask, TextData};
use pyroclast::{Sampling, Split, Trainer, TrainerConfig};
use pyroclast_tests::{Recorder, assert_close, golden, golden_text};
use serde::Deserialize;

#[derive(Deserialize)]
struct Goldens {
    model: GptConfig,
    batch: usize,
    val_split: f64,
    steps: u64,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    optimizer: String,
    lr: f64,
    weight_decay: f64,
    clip: f64,
    accumulate: usize,
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    val_loss: f64,
    params_file: Option<String>,
}

fn goldens(file: &str) -> Goldens {
    let text = std::fs::read_to_string(golden(file)).expect("the golden file");
    serde_json::from_str(&text).expect("the golden file's own format")
}

/// How near to torch's the numbers of a precision are.
struct Tolerance {
    precision: &'static str,
    losses: f64,
    norms: f64,
}

/// Mistakes as small as a forgotten weight decay move losses by 1e-4; rounding by 1e-6.
const SINGLE: Tolerance = Tolerance { precision: "32-true", losses: 1e-5, norms: 1e-4 };
const DOUBLE: Tolerance = Tolerance { precision: "64-true", losses: 1e-9, norms: 1e-9 };

/// Trains a case on `world` ranks. Micro-batches and ranks are interchangeable: three ranks take the
/// samples of three accumulated micro-batches.
fn check(
    goldens: &Goldens,
    case: &Case,
    (world, accumulate): (usize, usize),
    tolerance: &Tolerance,
) {
    let what = format!("{} on {world} ranks", case.name);
    let config = TrainerConfig {
        devices: world,
        optimizer: case.optimizer.clone(),
        lr: case.lr,
        weight_decay: Some(case.weight_decay),
        gradient_clip_val: Some(case.clip),
        accumulate_grad_batches: accumulate,
        max_steps: Some(goldens.steps),
        precision: tolerance.precision.to_owned(),
        ..TrainerConfig::default()
    };
    let mut task = GptTask::new(goldens.model);
    task.initial =
        Some(InitialWeights::open(&golden("init.safetensors")).expect("initial weights"));
    let data = TextData::new(&golden_text(), goldens.model.context, goldens.val_split)
        .expect("enough text")
        .with_batch_size(goldens.batch)
        .with_sampling(Sampling::Sequential);
    let rows = Recorder::default();
    let trainer = Trainer::new(config).expect("a valid configuration");
    let fitted = trainer.with_callback(rows.clone()).fit(&task, &data).expect(&what);

    let rows = rows.rows();
    let train: Vec<_> = rows.iter().filter(|row| row.split == Split::Train).collect();
    assert_eq!(train.len(), case.losses.len());
    for ((row, loss), norm) in train.iter().zip(&case.losses).zip(&case.grad_norms) {
        let at = format!("{what}, step {}", row.step);
        let (losses, norms) = (tolerance.losses, tolerance.norms);
        assert_close(row.loss.expect("a loss"), *loss, losses, &format!("{at}: loss"));
        assert_close(row.grad_norm.expect("a norm"), *norm, norms, &format!("{at}: norm"));
    }
    let validation = fitted.last_validation.and_then(|row| row.loss).expect("a validation");
    assert_close(validation, case.val_loss, tolerance.losses, &format!("{what}: validation loss"));

    let Some(file) = &case.params_file else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let saved = folder.path().join("weights.safetensors");
    save_torch(&fitted.model, &saved).expect("saved weights");
    let (got, expected) = (read(&saved), read(&golden(file)));
    assert_eq!(got.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, expected) in &expected {
        assert_eq!(got[name].len(), expected.len(), "{name}");
        for (got, expected) in got[name].iter().zip(expected) {
            assert_close(f64::from(*got), f64::from(*expected), 2e-5, &format!("{what}: {name}"));
        }
    }
}

fn read(path: &std::path::Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(path).expect("a weights file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let number = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    file.iter()
        .map(|(name, view)| (name.to_owned(), view.data().chunks_exact(4).map(number).collect()))
        .collect()
}

#[test]
fn one_rank_trains_as_torch_does() {
    let goldens = goldens("torch.json");
    assert!(goldens.cases.len() >= 8);
    for case in &goldens.cases {
        check(&goldens, case, (1, case.accumulate), &SINGLE);
    }
}

#[test]
fn three_ranks_train_as_torch_does_with_three_micro_batches() {
    let goldens = goldens("torch.json");
    let accumulated: Vec<_> = goldens.cases.iter().filter(|case| case.accumulate == 3).collect();
    assert!(accumulated.len() >= 4);
    for case in accumulated {
        check(&goldens, case, (3, 1), &SINGLE);
    }
}

#[test]
fn double_precision_is_torchs_to_nine_digits() {
    let goldens = goldens("torch_f64.json");
    assert!(goldens.cases.len() >= 3);
    for case in &goldens.cases {
        check(&goldens, case, (1, case.accumulate), &DOUBLE);
    }
}
