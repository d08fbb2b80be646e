use std::fs;
use std::sync::Mutex;

use super::*;
use crate::checkpoint::faults::{self, Fault};
use crate::checkpoint::newest;
use crate::gpt::text::Windows;
use crate::gpt::{Gpt, GptConfig, GptTask, TextData};
use crate::task::{RankContext, StepOutput, TrainModule};
use crate::{BoxError, Trainer, TrainerConfig};

/// A GPT whose rank `rank` has no room on its disk after so many calls from its first step on.
struct Full {
    gpt: GptTask,
    rank: usize,
    calls: u64,
    steps: Mutex<u64>,
}

impl TrainModule for Full {
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
        if context.rank == self.rank && context.device.is_autodiff() {
            let mut steps = self.steps.lock().expect("no panic");
            *steps += 1;
            // A rank is a thread, and so are its calls; it lends its faults to the thread that writes.
            faults::set((*steps == 1).then_some((self.calls, Fault::Once)));
        }
        self.gpt.training_step(model, batch, context)
    }
}

#[test]
fn a_disk_that_is_full_on_one_rank_ends_all_and_leaves_the_checkpoint_before() {
    let text: Vec<u8> = (0..4000u32).map(|i| b'a' + (i * i % 23) as u8).collect();
    let mut failures = 0;
    for strategy in ["ddp", "zero3"] {
        for rank in 0..3 {
            for (calls, async_save) in (0..12).flat_map(|calls| [(calls, false), (calls, true)]) {
                let folder = tempfile::tempdir().expect("a folder");
                let config = |max_steps, resume: Option<&str>| TrainerConfig {
                    devices: 3,
                    strategy: strategy.into(),
                    max_steps: Some(max_steps),
                    resume: resume.map(str::to_owned),
                    val_check_interval: Some(0),
                    out: Some(folder.path().join("run")),
                    checkpoint: CheckpointConfig {
                        every_n_train_steps: Some(1),
                        async_save,
                        ..CheckpointConfig::default()
                    },
                    ..TrainerConfig::default()
                };
                let gpt = GptTask::new(GptConfig { layers: 1, heads: 1, width: 8, context: 8 });
                let data = TextData::new(&text, 8, 0.1).expect("a text").with_batch_size(2);
                let trainer = Trainer::new(config(1, None)).expect("a configuration");
                { trainer }.fit(&gpt, &data).expect("the first step");
                let task = Full { gpt, rank, calls, steps: Mutex::new(0) };
                let trainer = Trainer::new(config(2, Some("auto"))).expect("a configuration");
                let outcome = { trainer }.fit(&task, &data);
                let checkpoints = folder.path().join("run/checkpoints");
                let found = newest(&checkpoints).expect("a folder").expect("a checkpoint");
                checkpoint::Checkpoint::open(&found).and_then(|c| c.verify()).expect("whole");
                let names: Vec<String> = fs::read_dir(&checkpoints)
                    .expect("the folder")
                    .map(|entry| {
                        entry.expect("an entry").file_name().to_string_lossy().into_owned()
                    })
                    .collect();
                // What was being removed may be left, and goes when the run is continued.
                let is_draft = |name: &String| name == ".step-00000002";
                assert!(!names.iter().any(is_draft), "{names:?}");
                if let Err(error) = outcome {
                    failures += 1;
                    let said = error.to_string();
                    assert!(
                        said.contains("no storage space") || said.contains("could not save"),
                        "{said}"
                    );
                }
            }
        }
    }
    // Creating, writing and syncing its file can fail on every rank, the rest on the first alone.
    assert!(failures >= 2 * 2 * 3 * 3, "{failures}");
}
