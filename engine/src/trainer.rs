//! `Trainer`: from a task and its data to a trained model.

mod initialise;
mod progress;
mod rank;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pyroclast_strategies::GroupOptions;

use crate::callback::Callback;
use crate::config::TrainerConfig;
use crate::data::DataModule;
use crate::error::Error;
use crate::metrics::Metrics;
use crate::output::RunFolder;
use crate::plan::Plan;
use crate::ranks;
use crate::task::TrainModule;

/// Environment variable: seconds that a rank waits for another within one collective; also how long
/// the others wait for rank 0 to prepare data or to save.
const TIMEOUT: &str = "PYROCLAST_TIMEOUT";

/// Trains models. Made from a [`TrainerConfig`], which it checks.
pub struct Trainer {
    plan: Plan,
    callbacks: Vec<Box<dyn Callback>>,
    stop: Arc<AtomicBool>,
    config: serde_json::Value,
}

/// A trained model, and how the run went.
#[derive(Debug)]
#[non_exhaustive]
pub struct Fitted<M> {
    /// Rank 0's model, which all ranks hold.
    pub model: M,
    /// Optimizer steps taken, those of earlier runs included.
    pub steps: u64,
    /// Why the run ended.
    pub reason: StopReason,
    /// The last training step's row; none if a resumed run had nothing left to do.
    pub last_train: Option<Metrics>,
    /// The last validation's row.
    pub last_validation: Option<Metrics>,
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// `max_steps` or `max_epochs` was reached.
    Finished,
    /// A callback or the stop flag asked for it.
    Stopped,
}

impl Trainer {
    /// Checks `config`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] with every mistake in it.
    pub fn new(config: TrainerConfig) -> Result<Self, Error> {
        let plan = Plan::new(&config)?;
        let config = plan.to_json();
        Ok(Self { plan, callbacks: vec![], stop: Arc::default(), config })
    }

    /// Adds a callback. Callbacks are called in the order in which they were added.
    #[must_use]
    pub fn with_callback(mut self, callback: impl Callback + 'static) -> Self {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// Sets what `config.resolved.json` and checkpoints hold in place of the trainer's own settings.
    #[must_use]
    pub fn with_recorded_config(mut self, config: serde_json::Value) -> Self {
        self.config = config;
        self
    }

    /// Setting this flag ends the run after the current step, with a checkpoint.
    #[must_use]
    pub fn stop_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stop)
    }

    /// What will run.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Trains the model of `task` on `data`.
    ///
    /// # Errors
    ///
    /// The error of the rank that failed first; all others are stopped at once.
    pub fn fit<T, D>(&mut self, task: &T, data: &D) -> Result<Fitted<T::Model>, Error>
    where
        T: TrainModule,
        D: DataModule<Batch = T::Batch>,
    {
        let plan = &self.plan;
        let device = plan.accelerator.device()?;
        let writes = !plan.resolved.fast_dev_run;
        let folder = plan.resolved.out.as_ref().filter(|_| writes).map(RunFolder::at);
        if let Some(folder) = &folder {
            folder.refuse_taken(&plan.resume)?;
        }
        let options = GroupOptions { timeout: timeout()?, ..GroupOptions::default() };
        let shared =
            rank::Shared { plan, task, device, folder, config: &self.config, stop: &self.stop };
        let mut callbacks = Some(&mut self.callbacks);
        // Callbacks run on rank 0 only; the other ranks get none.
        let state = |rank| (data.clone(), callbacks.take_if(|_| rank == 0));
        let outcome = ranks::run(plan.world, &options, state, |group, (data, callbacks)| {
            rank::fit(&shared, group, data, callbacks.map_or(&mut [], Vec::as_mut_slice))
        });
        // The flag has done its work; another run with this trainer starts afresh.
        self.stop.store(false, Ordering::Relaxed);
        outcome?.into_iter().next().ok_or_else(|| Error::setting("devices", "there is no rank"))
    }
}

impl std::fmt::Debug for Trainer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Trainer({:?}, {} callbacks)", self.plan, self.callbacks.len())
    }
}

fn timeout() -> Result<Duration, Error> {
    let Ok(text) = std::env::var(TIMEOUT) else { return Ok(GroupOptions::default().timeout) };
    match text.parse::<f64>().map(Duration::try_from_secs_f64) {
        Ok(Ok(timeout)) if !timeout.is_zero() => Ok(timeout),
        _ => Err(Error::setting(TIMEOUT, format!("`{text}` is not a number of seconds above 0"))),
    }
}
