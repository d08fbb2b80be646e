use std::path::Path;
use std::sync::{Arc, Mutex};

use pyroclast::checkpoint::{Checkpoint, newest};
use pyroclast::gpt::text::Windows;
use pyroclast::gpt::{Gpt, GptTask, TextData};
use pyroclast::{
    BoxError, Callback, CheckpointConfig, Error, RankContext, StepOutput, TrainModule, Trainer,
    TrainerConfig,
};
use pyroclast_tests::{TINY, golden_text};
use serde_json::{Value, json};

/// Whether training waits for a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Saves {
    Now,
    Meanwhile,
}

fn data() -> TextData {
    let data = TextData::new(&golden_text()[..20_000], TINY.context, 0.1).expect("enough text");
    data.with_batch_size(2)
}

/// A run that saves after every step, and keeps all.
fn config(out: &Path, steps: u64, saves: Saves) -> TrainerConfig {
    TrainerConfig {
        max_steps: Some(steps),
        val_check_interval: Some(0),
        out: Some(out.to_owned()),
        checkpoint: CheckpointConfig {
            every_n_train_steps: Some(1),
            save_top_k: -1,
            async_save: saves == Saves::Meanwhile,
            ..CheckpointConfig::default()
        },
        ..TrainerConfig::default()
    }
}

fn names(out: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(out.join("checkpoints")).expect("the folder");
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.expect("an entry").file_name().to_string_lossy().into_owned()
    };
    let mut names: Vec<String> = entries.map(name).collect();
    names.sort();
    names
}

#[test]
fn what_is_written_meanwhile_is_what_is_written_at_once() {
    for (strategy, devices, precision) in [
        ("ddp", 1, "32-true"),
        ("ddp", 3, "32-true"),
        ("zero1", 2, "bf16-mixed"),
        ("zero3", 3, "32-true"),
        ("fsdp", 2, "16-mixed"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let run = |name: &str, saves, resume: bool, steps| {
            let config = TrainerConfig {
                strategy: strategy.into(),
                devices,
                precision: precision.to_owned(),
                resume: resume.then(|| "auto".to_owned()),
                ..config(&folder.path().join(name), steps, saves)
            };
            let trainer = Trainer::new(config).expect("a configuration");
            { trainer }.fit(&GptTask::new(TINY), &data()).expect("a run");
        };
        run("now", Saves::Now, false, 4);
        run("meanwhile", Saves::Meanwhile, false, 2);
        run("meanwhile", Saves::Meanwhile, true, 4);
        let (now, meanwhile) = (folder.path().join("now"), folder.path().join("meanwhile"));
        assert_eq!(names(&now), names(&meanwhile));
        for name in names(&now) {
            let open = |out: &Path| {
                let read = Checkpoint::open(&out.join("checkpoints").join(&name)).expect("whole");
                read.verify().expect("as it was written");
                (read.manifest.files, read.manifest.tensors)
            };
            assert_eq!(open(&now), open(&meanwhile), "{strategy} {devices} {precision} {name}");
        }
    }
}

#[test]
fn the_newest_and_the_last_are_kept_as_if_training_waited() {
    for saves in [Saves::Now, Saves::Meanwhile] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut config = config(folder.path(), 7, saves);
        (config.checkpoint.every_n_train_steps, config.devices) = (Some(2), 2);
        (config.checkpoint.save_top_k, config.checkpoint.save_last) = (1, true);
        Trainer::new(config)
            .expect("a configuration")
            .fit(&GptTask::new(TINY), &data())
            .expect("a run");
        assert_eq!(names(folder.path()), ["last", "step-00000007"], "{saves:?}");
    }
}

/// Fails in one rank's step, while the checkpoint of the step before may still be on its way.
struct FailsAt(GptTask, Mutex<u64>);

impl TrainModule for FailsAt {
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
        if context.rank == 0 {
            let mut steps = self.1.lock().expect("no panic");
            *steps += 1;
            if *steps == 4 {
                return Err("the fourth batch is bad".into());
            }
        }
        self.0.training_step(model, batch, context)
    }
}

#[test]
fn a_run_that_fails_meanwhile_leaves_a_whole_checkpoint_to_continue_from() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = |resume: bool| TrainerConfig {
        devices: 3,
        strategy: "zero3".into(),
        resume: resume.then(|| "auto".to_owned()),
        ..config(folder.path(), 5, Saves::Meanwhile)
    };
    let task = FailsAt(GptTask::new(TINY), Mutex::new(0));
    let outcome = Trainer::new(config(false)).expect("a configuration").fit(&task, &data());
    let error = outcome.expect_err("a bad batch");
    assert!(error.to_string().contains("the fourth batch is bad"), "{error}");
    let found = newest(&folder.path().join("checkpoints")).expect("a folder").expect("one");
    let read = Checkpoint::open(&found).expect("a whole one");
    read.verify().expect("as it was written");
    assert!((2..=3).contains(&read.manifest.step), "that of step 3 was on its way");
    let trainer = Trainer::new(config(true)).expect("a configuration");
    assert_eq!({ trainer }.fit(&task, &data()).expect("the rest").steps, 5);
    let all = ["1", "2", "3", "4", "5"].map(|step| format!("step-0000000{step}"));
    assert!(names(folder.path()).iter().all(|name| all.contains(name)), "no draft is left");
}

/// Counts steps, under a key, from what a checkpoint says.
struct Counts {
    key: &'static str,
    steps: Arc<Mutex<u64>>,
}

impl Callback for Counts {
    fn on_step_end(&mut self, _: &pyroclast::Metrics) -> pyroclast::Action {
        *self.steps.lock().expect("no panic") += 1;
        pyroclast::Action::Continue
    }

    fn state(&self) -> Option<Value> {
        Some(json!({ "steps": *self.steps.lock().expect("no panic") }))
    }

    fn load_state(&mut self, state: &Value) -> Result<(), BoxError> {
        let steps = state["steps"].as_u64().ok_or("`steps` is no number")?;
        *self.steps.lock().expect("no panic") = steps;
        Ok(())
    }

    fn state_key(&self) -> String {
        self.key.to_owned()
    }
}

#[test]
fn callbacks_go_on_from_their_states() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = |steps, keys: &[&'static str]| {
        let config = TrainerConfig {
            devices: 2,
            resume: Some("auto".to_owned()),
            ..config(folder.path(), steps, Saves::Now)
        };
        let counts: Vec<Arc<Mutex<u64>>> = keys.iter().map(|_| Arc::default()).collect();
        let mut trainer = Trainer::new(config).expect("a configuration");
        for (key, steps) in keys.iter().zip(&counts) {
            trainer = trainer.with_callback(Counts { key, steps: Arc::clone(steps) });
        }
        trainer.fit(&GptTask::new(TINY), &data())?;
        Ok::<_, Error>(counts.iter().map(|steps| *steps.lock().expect("no panic")).collect())
    };
    let counted = |steps, keys: &[&'static str]| -> Vec<u64> { run(steps, keys).expect("a run") };
    assert_eq!(counted(2, &["a", "b"]), [2, 2]);
    assert_eq!(counted(3, &["b"]), [3]);
    // What nobody took up is not lost; what is new begins anew.
    assert_eq!(counted(5, &["a", "b", "c"]), [4, 5, 2]);
    let error: Error = run(6, &["a", "a"]).map(|_: Vec<u64>| ()).expect_err("one key for two");
    assert!(error.to_string().contains("two have the state key `a`"), "{error}");

    let manifest = folder.path().join("checkpoints/step-00000005/checkpoint.json");
    let text = std::fs::read_to_string(&manifest).expect("the manifest");
    let mut changed: Value = serde_json::from_str(&text).expect("JSON");
    changed["callbacks"]["a"] = json!({ "steps": "many" });
    std::fs::write(&manifest, changed.to_string()).expect("a manifest");
    let error: Error = run(6, &["a"]).map(|_: Vec<u64>| ()).expect_err("a bad state");
    let said = error.to_string();
    assert!(said.contains("state of `a`") && said.contains("`steps` is no number"), "{said}");
}
