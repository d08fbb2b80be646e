use pyroclast::gpt::text::Windows;
use pyroclast::gpt::{Gpt, GptTask, TextData};
use pyroclast::{BoxError, Error, RankContext, StepOutput, TrainModule, Trainer, TrainerConfig};
use pyroclast_tests::{TINY, golden_text};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How a rank fails.
#[derive(Clone, Copy, PartialEq)]
enum Failure {
    Error,
    Panic,
    NotANumber,
}

/// A GPT whose `rank` fails in its `step`-th training step.
struct Failing {
    gpt: GptTask,
    rank: usize,
    step: usize,
    failure: Failure,
    taken: AtomicUsize,
}

impl TrainModule for Failing {
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
        let mine = context.rank == self.rank;
        let fails = mine && self.taken.fetch_add(1, Ordering::Relaxed) + 1 == self.step;
        let output = self.gpt.training_step(model, batch, context)?;
        match self.failure {
            Failure::Error if fails => Err("out of cheese".into()),
            Failure::Panic if fails => panic!("out of cheese"),
            Failure::NotANumber if fails => Ok(StepOutput::new(output.loss.mul_scalar(f64::NAN))),
            _ => Ok(output),
        }
    }
}

fn run(world: usize, rank: usize, step: usize, failure: Failure) -> Error {
    run_into(None, world, rank, step, failure)
}

fn run_into(out: Option<&Path>, world: usize, rank: usize, step: usize, failure: Failure) -> Error {
    let config = TrainerConfig {
        devices: world,
        max_steps: Some(5),
        out: out.map(Path::to_owned),
        ..TrainerConfig::default()
    };
    let gpt = GptTask::new(TINY);
    let task = Failing { gpt, rank, step, failure, taken: AtomicUsize::new(0) };
    let data = TextData::new(&golden_text(), TINY.context, 0.1).expect("enough text");
    let data = data.with_batch_size(2);
    Trainer::new(config).expect("a configuration").fit(&task, &data).expect_err("a rank fails")
}

#[test]
fn a_failing_step_ends_the_run_with_its_own_error() {
    for world in 1..=4 {
        for rank in 0..world {
            for step in [1, 3] {
                let error = run(world, rank, step, Failure::Error);
                let expected = format!("rank {rank}: training_step: out of cheese");
                assert_eq!(error.to_string(), expected);
                assert!(!error.is_misuse());
            }
        }
    }
}

#[test]
fn a_panic_ends_the_run_like_an_error() {
    for rank in 0..3 {
        let error = run(3, rank, 2, Failure::Panic).to_string();
        assert_eq!(error, format!("rank {rank} panicked: out of cheese"));
    }
}

#[test]
fn a_run_whose_gradients_are_no_numbers_keeps_its_last_good_state() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let error = run_into(Some(&out), 2, 1, 3, Failure::NotANumber);
    assert!(matches!(error, Error::NotFinite { step: 3, .. }), "{error}");
    assert!(out.join("checkpoints/step-00000002/checkpoint.json").is_file());
}

#[test]
fn a_loss_that_is_no_number_ends_the_run_before_anything_is_updated() {
    for world in [1, 3] {
        match run(world, world - 1, 3, Failure::NotANumber) {
            Error::NotFinite { step: 3, loss, .. } => assert!(loss.is_nan()),
            other => panic!("world {world}: {other}"),
        }
    }
}
