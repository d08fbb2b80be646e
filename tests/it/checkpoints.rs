use std::path::Path;

use pyroclast::checkpoint::{Checkpoint, newest};
use pyroclast::gpt::{GptTask, TextData};
use pyroclast::{CheckpointConfig, Error, Trainer, TrainerConfig};
use pyroclast_tests::{TINY, golden_text};

fn data(bytes: usize) -> TextData {
    let data = TextData::new(&golden_text()[..bytes], TINY.context, 0.1).expect("enough text");
    data.with_batch_size(4)
}

/// Trains, and returns the names in the folder of checkpoints.
fn saved(
    out: &Path,
    steps: u64,
    bytes: usize,
    change: impl FnOnce(&mut TrainerConfig),
) -> Result<Vec<String>, Error> {
    let mut config = TrainerConfig {
        max_steps: Some(steps),
        limit_val_batches: Some(1),
        out: Some(out.to_owned()),
        ..TrainerConfig::default()
    };
    change(&mut config);
    Trainer::new(config)?.fit(&GptTask::new(TINY), &data(bytes))?;
    let entries = std::fs::read_dir(out.join("checkpoints")).expect("the folder");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    Ok(names)
}

fn every(steps: u64, change: impl FnOnce(&mut CheckpointConfig)) -> CheckpointConfig {
    let mut config =
        CheckpointConfig { every_n_train_steps: Some(steps), ..CheckpointConfig::default() };
    change(&mut config);
    config
}

#[test]
fn checkpoints_are_made_at_their_steps_and_the_newest_or_all_are_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    for strategy in ["ddp", "zero3"] {
        let run = |name: &str, checkpoint: CheckpointConfig| {
            saved(&folder.path().join(strategy).join(name), 7, 20_000, |config| {
                (config.devices, config.strategy) = (2, strategy.into());
                config.checkpoint = checkpoint;
            })
        };
        assert_eq!(run("newest", every(2, |_| ())).expect("a run"), ["step-00000007"]);
        let all = run("all", every(2, |c| c.save_top_k = -1)).expect("a run");
        let steps = ["step-00000002", "step-00000004", "step-00000006", "step-00000007"];
        assert_eq!(all, steps);
        for (name, step) in all.iter().zip([2, 4, 6, 7]) {
            let path = folder.path().join(strategy).join("all/checkpoints").join(name);
            let read = Checkpoint::open(&path).expect("a checkpoint");
            read.verify().expect("a whole one");
            assert_eq!((read.manifest.step, read.manifest.world), (step, 2));
        }
        let none = run("none", every(2, |c| c.save_top_k = 0)).expect("a run");
        assert_eq!(none, ["step-00000007"], "the run's end is saved all the same");
        let last = run("last", every(3, |c| (c.save_top_k, c.save_last) = (0, true)));
        assert_eq!(last.expect("a run"), ["last", "step-00000007"]);
        let link = folder.path().join(strategy).join("last/checkpoints/last");
        assert_eq!(Checkpoint::open(&link).expect("a checkpoint").manifest.step, 7);
    }
}

#[test]
fn an_epochs_end_is_saved_by_default() {
    let folder = tempfile::tempdir().expect("a folder");
    // 900 bytes are 50 windows for training: 12 steps and a half.
    let all = |config: &mut TrainerConfig| config.checkpoint.save_top_k = -1;
    let names = saved(&folder.path().join("run"), 30, 900, all).expect("a run");
    assert_eq!(names, ["step-00000013", "step-00000025", "step-00000030"]);
}

#[test]
fn the_best_are_kept_and_a_run_that_continues_knows_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let checkpoint = every(2, |c| {
        (c.monitor, c.save_top_k) = (Some("train_loss".to_owned()), 2);
        c.filename = Some("{step}-{train_loss:.3f}".to_owned());
    });
    let first = |config: &mut TrainerConfig| config.checkpoint = checkpoint.clone();
    let names = saved(&out, 6, 20_000, first).expect("a run");
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(names[0].starts_with("step=4-train_loss=") && names[1].starts_with("step=6-"));
    let then = |config: &mut TrainerConfig| {
        config.checkpoint = checkpoint.clone();
        config.resume = Some("auto".to_owned());
    };
    let names = saved(&out, 10, 20_000, then).expect("a run");
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(names[0].starts_with("step=10-") && names[1].starts_with("step=8-"), "{names:?}");
    let found = newest(&out.join("checkpoints")).expect("a folder").expect("a checkpoint");
    assert!(found.ends_with(&names[0]), "by its step, not by its name");
}

#[test]
fn equal_names_are_told_apart() {
    let folder = tempfile::tempdir().expect("a folder");
    let change = |config: &mut TrainerConfig| {
        config.checkpoint = every(2, |c| (c.save_top_k, c.filename) = (-1, Some("gpt".to_owned())));
    };
    let names = saved(&folder.path().join("run"), 5, 20_000, change).expect("a run");
    assert_eq!(names, ["gpt", "gpt-v1", "gpt-v2"]);
}

#[test]
fn before_the_first_validation_its_metrics_choose_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let change = |config: &mut TrainerConfig| {
        config.val_check_interval = Some(4);
        config.checkpoint = every(2, |c| {
            (c.monitor, c.save_top_k) = (Some("val_loss".to_owned()), -1);
        });
    };
    let names = saved(&folder.path().join("run"), 7, 20_000, change).expect("a run");
    assert_eq!(names, ["step-00000004", "step-00000006", "step-00000007"]);
}

#[test]
fn a_metric_that_there_is_not_ends_the_run_with_those_there_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let change = |config: &mut TrainerConfig| {
        (config.devices, config.val_check_interval) = (2, Some(2));
        config.checkpoint = every(2, |c| c.monitor = Some("val_accuracy".to_owned()));
    };
    let error = saved(&folder.path().join("run"), 5, 20_000, change).expect_err("no such metric");
    let said = error.to_string();
    assert!(said.contains("there is no metric `val_accuracy`") && said.contains("train_loss"));
    assert!(error.is_misuse());
}
