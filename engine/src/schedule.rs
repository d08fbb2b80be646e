//! Learning-rate schedules: the engine's own, and DeepSpeed's.

pub mod deepspeed;

use std::fmt;

use pyroclast_strategies::Rate;
use schemars::JsonSchema;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

pub use self::deepspeed::Scheduler;

/// What the user wrote: a name, or one of DeepSpeed's schedulers with its settings.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum ScheduleConfig {
    /// `constant` (the default), `linear` or `cosine`: the rate after warm-up. Text that starts with a
    /// brace is read as the JSON of a [`Scheduler`].
    Name(String),
    /// A scheduler with its settings: `{"WarmupLR": {"warmup_num_steps": 100}}`.
    Settings(Scheduler),
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self::Name("constant".to_owned())
    }
}

impl From<&str> for ScheduleConfig {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

impl From<Scheduler> for ScheduleConfig {
    fn from(scheduler: Scheduler) -> Self {
        Self::Settings(scheduler)
    }
}

impl<'de> Deserialize<'de> for ScheduleConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ReadConfig)
    }
}

/// Reads text as a name and everything else as settings, so that errors speak of the settings.
struct ReadConfig;

impl<'de> Visitor<'de> for ReadConfig {
    type Value = ScheduleConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a schedule's name, or one of DeepSpeed's schedulers with its settings")
    }

    fn visit_str<E>(self, name: &str) -> Result<ScheduleConfig, E> {
        Ok(name.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ScheduleConfig, A::Error> {
        Scheduler::deserialize(MapAccessDeserializer::new(map)).map(ScheduleConfig::Settings)
    }
}

/// How the learning rate changes over a run, after a linear warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// Stays where it is.
    Constant,
    /// Falls linearly, to reach 0 after the last step.
    Linear,
    /// Falls along half a cosine, to reach 0 after the last step (Loshchilov and Hutter, SGDR, 2017).
    Cosine,
}

/// The learning rate of every step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Highest rate of the engine's own schedules, and what DeepSpeed's scale.
    pub lr: f64,
    /// How it changes.
    pub shape: Shape,
}

/// How a learning rate changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// It rises linearly, and decays.
    Warmup {
        /// Steps over which the rate rises from 0; the step after them is the first at the full rate.
        steps: u64,
        /// What follows.
        decay: Decay,
    },
    /// As one of DeepSpeed's schedulers says.
    DeepSpeed(Scheduler),
}

impl Schedule {
    /// As it is written in a configuration.
    pub(crate) fn to_config(self) -> ScheduleConfig {
        match self.shape {
            Shape::DeepSpeed(scheduler) => scheduler.into(),
            Shape::Warmup { decay: Decay::Constant, .. } => "constant".into(),
            Shape::Warmup { decay: Decay::Linear, .. } => "linear".into(),
            Shape::Warmup { decay: Decay::Cosine, .. } => "cosine".into(),
        }
    }

    /// The rate of step `step`, counted from 1, of `total` steps.
    #[must_use]
    pub fn rate(&self, step: u64, total: u64) -> Rate {
        let (warmup, decay) = match &self.shape {
            Shape::Warmup { steps, decay } => (*steps, *decay),
            Shape::DeepSpeed(scheduler) => return scheduler.rate(self.lr, step, total),
        };
        // The first step's rate is not 0, so that it is not wasted.
        if step <= warmup {
            return (self.lr * step as f64 / (warmup as f64 + 1.0)).into();
        }
        let falling = total.saturating_sub(warmup).max(1);
        let progress = (step - warmup - 1) as f64 / falling as f64;
        let factor = match decay {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - progress,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        (self.lr * factor).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_rise_then_decay() {
        let rates = |decay| {
            let schedule = Schedule { lr: 1.0, shape: Shape::Warmup { steps: 3, decay } };
            (1..=7).map(|step| (schedule.rate(step, 7).lr * 1e4).round() / 1e4).collect::<Vec<_>>()
        };
        assert_eq!(rates(Decay::Constant), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(rates(Decay::Linear), [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]);
        assert_eq!(rates(Decay::Cosine), [0.25, 0.5, 0.75, 1.0, 0.8536, 0.5, 0.1464]);
    }

    #[test]
    fn without_warm_up_the_first_step_has_the_full_rate() {
        for decay in [Decay::Constant, Decay::Linear, Decay::Cosine] {
            let schedule = Schedule { lr: 0.1, shape: Shape::Warmup { steps: 0, decay } };
            assert_eq!(schedule.rate(1, 10), 0.1.into());
        }
    }
}
