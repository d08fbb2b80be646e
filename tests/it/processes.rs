//! A user's own training with each rank a process: this program once more, one test of it.

use std::io::Write;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::{Tensor, TensorData};
use pyroclast::{
    BoxError, DataModule, Loader, RankContext, Samples, StepOutput, TrainModule, Trainer,
    TrainerConfig,
};

/// A model that draws random numbers.
#[derive(Module, Debug)]
struct Dropping {
    linear: Linear,
    dropout: Dropout,
}

/// What goes wrong, and on which rank, by the environment's `TEST_SCENARIO`.
#[derive(Clone, Copy, PartialEq)]
enum Scenario {
    Fine,
    Error,
    Panic,
}

/// Trains, and keeps this rank's own losses.
struct Task {
    scenario: Scenario,
    losses: Mutex<Vec<f32>>,
}

impl TrainModule for Task {
    type Model = Dropping;
    type Batch = Vec<[f32; 16]>;

    fn configure_model(&self, rank: &RankContext) -> Result<Dropping, BoxError> {
        let linear = LinearConfig::new(16, 1).init(&rank.device);
        Ok(Dropping { linear, dropout: DropoutConfig::new(0.5).init() })
    }

    fn training_step(
        &self,
        model: &Dropping,
        batch: Vec<[f32; 16]>,
        rank: &RankContext,
    ) -> Result<StepOutput, BoxError> {
        let mut losses = self.losses.lock().unwrap_or_else(PoisonError::into_inner);
        match self.scenario {
            Scenario::Error if rank.rank == 1 && losses.len() == 2 => {
                return Err("out of cheese".into());
            }
            Scenario::Panic if rank.rank == 1 && losses.len() == 2 => panic!("out of cheese"),
            _ => {}
        }
        let shape = [batch.len(), 16];
        let input = Tensor::<2>::from_data(TensorData::new(batch.concat(), shape), &rank.device);
        let output = model.linear.forward(model.dropout.forward(input));
        let loss = (output - 1.0).powi_scalar(2).mean();
        losses.push(loss.clone().into_scalar::<f32>());
        Ok(loss.into())
    }
}

/// Equal samples, so that ranks differ in what they draw alone; counts its preparations.
#[derive(Clone)]
struct Ones {
    samples: Samples<[f32; 16]>,
}

impl DataModule for Ones {
    type Batch = Vec<[f32; 16]>;

    fn prepare_data(&self) -> Result<(), BoxError> {
        say("prepared");
        Ok(())
    }

    fn train(&self) -> Loader<Self::Batch> {
        self.samples.train()
    }
}

fn say(words: &str) {
    // Straight to the pipe, past the test harness.
    writeln!(std::io::stdout(), "TEST {words}").expect("somebody listens");
}

#[test]
#[ignore = "one rank of the other tests, in a process of its own"]
fn rank() {
    let variable = |name| std::env::var(name).unwrap_or_default();
    let scenario = match variable("TEST_SCENARIO").as_str() {
        "error" => Scenario::Error,
        "panic" => Scenario::Panic,
        _ => Scenario::Fine,
    };
    let config =
        TrainerConfig { max_steps: Some(5), deterministic: true, ..TrainerConfig::default() };
    let task = Task { scenario, losses: Mutex::default() };
    let data = Ones { samples: Samples::new(vec![[1.0; 16]; 64], 4) };
    match Trainer::new(config).and_then(|mut trainer| trainer.fit(&task, &data)) {
        Ok(fitted) => {
            let losses = task.losses.lock().unwrap_or_else(PoisonError::into_inner);
            say(&format!("steps {} losses {losses:?}", fitted.steps));
        }
        Err(error) => say(&format!("error {error}")),
    }
}

/// What each of `world` ranks says. `local` is how many of them are on one machine.
fn run(scenario: &str, world: usize, local: usize) -> Vec<Vec<String>> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    drop(listener);
    let start = |rank: usize| {
        Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "processes::rank", "--ignored", "--nocapture"])
            .env("TEST_SCENARIO", scenario)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world.to_string())
            .env("LOCAL_WORLD_SIZE", local.to_string())
            .env("MASTER_PORT", port.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a process")
    };
    let children: Vec<_> = (0..world).map(start).collect();
    let said = children.into_iter().map(|child| {
        let output = child.wait_with_output().expect("an end");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let words = text.lines().filter_map(|line| Some(line.split_once("TEST ")?.1.to_owned()));
        words.collect()
    });
    said.collect()
}

#[test]
fn ranks_that_are_processes_draw_from_generators_of_their_own() {
    let (first, again) = (run("fine", 2, 2), run("fine", 2, 2));
    assert_eq!(first, again, "a run repeats itself");
    assert!(first[1][0].starts_with("steps 5 losses ["), "{first:?}");
    assert_ne!(first[0].last(), first[1].last(), "ranks draw different masks");
}

#[test]
fn data_is_prepared_once_per_machine() {
    let prepared = |said: &Vec<String>| said.iter().filter(|word| *word == "prepared").count();
    for (local, expected) in [(4, [1, 0, 0, 0]), (2, [1, 0, 1, 0])] {
        let counts: Vec<usize> = run("fine", 4, local).iter().map(prepared).collect();
        assert_eq!(counts, expected, "{local} ranks on each machine");
    }
}

#[test]
fn a_failing_or_panicking_rank_ends_the_others_and_is_named() {
    for (scenario, own) in [
        ("error", "rank 1: training_step: out of cheese"),
        ("panic", "rank 1 panicked: out of cheese"),
    ] {
        let said = run(scenario, 3, 3);
        let errors: Vec<&String> = said.iter().filter_map(|words| words.last()).collect();
        assert_eq!(*errors[1], format!("error {own}"));
        for rank in [0, 2] {
            let expected = format!("error rank 1 failed: {own}");
            assert!(errors[rank].starts_with(&expected), "rank {rank}: {errors:?}");
        }
    }
}
