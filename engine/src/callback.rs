//! What the user's code is told while a run goes on.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::error::{BoxError, Error};
use crate::metrics::Metrics;
use crate::trainer::StopReason;

/// Callbacks' states by their keys.
pub(crate) type States = BTreeMap<String, Value>;

/// What a callback asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub enum Action {
    /// Go on.
    #[default]
    Continue,
    /// End the run after this step, with a checkpoint.
    Stop,
}

/// What is known when a run starts.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RunInfo {
    /// Trainable parameters.
    pub num_params: usize,
    /// Ranks.
    pub world: usize,
    /// Steps that were taken before (a resumed run).
    pub first_step: u64,
    /// Step at which the run ends.
    pub last_step: u64,
    /// Where the ranks compute.
    pub device: String,
}

/// Told of a run's events, on rank 0. A callback sees and may stop a run, but changes nothing in it.
pub trait Callback: Send {
    /// Before the first step.
    fn on_fit_start(&mut self, _run: &RunInfo) {}

    /// After each optimizer step.
    fn on_step_end(&mut self, _metrics: &Metrics) -> Action {
        Action::Continue
    }

    /// After each validation.
    fn on_validation_end(&mut self, _metrics: &Metrics) -> Action {
        Action::Continue
    }

    /// After the last step.
    fn on_fit_end(&mut self, _reason: StopReason) {}

    /// What a checkpoint holds of it; nothing, unless it says so.
    fn state(&self) -> Option<Value> {
        None
    }

    /// Takes up what a checkpoint held of it, before [`Self::on_fit_start`] of a run that is continued.
    ///
    /// # Errors
    ///
    /// Any error; it ends the run before its first step.
    fn load_state(&mut self, _state: &Value) -> Result<(), BoxError> {
        Ok(())
    }

    /// What its state is saved under: its type's name, unless it says otherwise. Two callbacks of one type that have
    /// states need different keys.
    fn state_key(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }
}

/// The states of all callbacks, and of those in `carried` that are not there.
///
/// # Errors
///
/// [`Error::Config`] if two have one key.
pub(crate) fn states(callbacks: &[Box<dyn Callback>], carried: &States) -> Result<States, Error> {
    let mut states = States::new();
    for callback in callbacks {
        let (key, Some(state)) = (callback.state_key(), callback.state()) else { continue };
        if states.insert(key.clone(), state).is_some() {
            let problem = format!("two have the state key `{key}`; give them different ones");
            return Err(Error::setting("callbacks", problem));
        }
    }
    for (key, state) in carried {
        states.entry(key.clone()).or_insert_with(|| state.clone());
    }
    Ok(states)
}

/// Gives each callback the state that a checkpoint holds of it.
///
/// # Errors
///
/// [`Error::Config`] with the callback's own.
pub(crate) fn load(callbacks: &mut [Box<dyn Callback>], states: &States) -> Result<(), Error> {
    for callback in callbacks {
        let key = callback.state_key();
        let Some(state) = states.get(&key) else { continue };
        callback.load_state(state).map_err(|error| {
            Error::setting("callbacks", format!("the state of `{key}` in the checkpoint: {error}"))
        })?;
    }
    Ok(())
}
