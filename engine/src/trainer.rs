//! `Trainer`: from a task and its data to a trained model.

mod agreement;
mod initialise;
mod progress;
mod rank;
mod save;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyroclast_strategies::ProcessGroup;

use crate::callback::Callback;
use crate::config::TrainerConfig;
use crate::data::DataModule;
use crate::environment::Environment;
use crate::error::Error;
use crate::metrics::Metrics;
use crate::output::RunFolder;
use crate::plan::Plan;
use crate::ranks;
use crate::task::TrainModule;

/// Trains models. Made from a [`TrainerConfig`], which it checks.
///
/// Ranks are threads of this process, unless its [`Environment`] says that it is itself one rank.
pub struct Trainer {
    plan: Plan,
    callbacks: Vec<Box<dyn Callback>>,
    stop: Arc<AtomicBool>,
    config: serde_json::Value,
    /// The group of all ranks, once this process has joined it.
    group: Option<Arc<ProcessGroup>>,
}

/// A trained model, and how the run went.
#[derive(Debug)]
#[non_exhaustive]
pub struct Fitted<M> {
    /// Rank 0's model, whole. Where each rank is a process and parameters are sharded, the other processes'
    /// is without its numbers.
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
    /// Checks `config`, and the environment of this process.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] with every mistake in it.
    pub fn new(config: TrainerConfig) -> Result<Self, Error> {
        Self::in_environment(config, &Environment::of_process()?)
    }

    /// Checks `config` against `environment`, in place of this process's.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub fn in_environment(config: TrainerConfig, environment: &Environment) -> Result<Self, Error> {
        let plan = Plan::new(&config, environment)?;
        let config = plan.to_json();
        Ok(Self { plan, callbacks: vec![], stop: Arc::default(), config, group: None })
    }

    /// Adds a callback. Callbacks are called on rank 0, in the order in which they were added.
    #[must_use]
    pub fn with_callback(mut self, callback: impl Callback + 'static) -> Self {
        self.add_callback(callback);
        self
    }

    /// As [`Self::with_callback`], to a trainer in use.
    pub fn add_callback(&mut self, callback: impl Callback + 'static) {
        self.callbacks.push(Box::new(callback));
    }

    /// Sets what `config.resolved.json` and checkpoints hold in place of the trainer's own settings.
    #[must_use]
    pub fn with_recorded_config(mut self, config: serde_json::Value) -> Self {
        self.config = config;
        self
    }

    /// Adds to what `config.resolved.json` and checkpoints hold. Ranks that are processes must all
    /// record the same.
    pub fn record(&mut self, setting: &str, value: impl Into<serde_json::Value>) {
        self.config[setting] = value.into();
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

    /// Joins the other ranks, where each is a process; [`Self::fit`] does so itself. A rank that
    /// joins before it reads its inputs can tell the others that it [failed](Self::fail) to.
    ///
    /// # Errors
    ///
    /// [`Error::Strategy`] if they cannot be reached or are not of this job.
    pub fn join(&mut self) -> Result<(), Error> {
        if let (Some(process), None) = (&self.plan.process, &self.group) {
            self.group = Some(process.join(&self.plan.group)?);
        }
        Ok(())
    }

    /// Ends all ranks that this process has joined, with `error` as the reason.
    pub fn fail(&self, error: &Error) {
        if let Some(group) = &self.group {
            group.abort_signal().raise(group.rank(), error);
        }
    }

    /// Trains the model of `task` on `data`.
    ///
    /// # Errors
    ///
    /// Where ranks are threads, the error of the one that failed first. Where this process is a rank,
    /// its own: an error of another rank names that one. All ranks are stopped at once.
    pub fn fit<T, D>(&mut self, task: &T, data: &D) -> Result<Fitted<T::Model>, Error>
    where
        T: TrainModule,
        D: DataModule<Batch = T::Batch>,
    {
        self.join()?;
        let plan = &self.plan;
        let device = plan.device().inspect_err(|error| self.fail(error))?;
        let writes = !plan.resolved.fast_dev_run;
        let folder = plan.resolved.out.as_ref().filter(|_| writes).map(RunFolder::at);
        let shared =
            rank::Shared { plan, task, device, folder, config: &self.config, stop: &self.stop };
        let mut callbacks = Some(&mut self.callbacks);
        // Callbacks run on rank 0 only; the other ranks get none.
        let mut state = |rank| (data.clone(), callbacks.take_if(|_| rank == 0));
        let body = |group, (data, callbacks): (D, Option<&mut Vec<Box<dyn Callback>>>)| {
            rank::fit(&shared, group, data, callbacks.map_or(&mut [], Vec::as_mut_slice))
        };
        let outcome = match (&plan.process, self.group.take()) {
            (Some(process), Some(group)) => {
                let state = state(process.rank);
                ranks::run_one(&group, process.threads(), |group| body(group, state))
                    .map(|fitted| vec![fitted])
            }
            _ => ranks::run(plan.world, &plan.group, state, body),
        };
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
