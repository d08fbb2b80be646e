//! Sharded training for Burn models.
//!
//! A [`TrainModule`] says how to build a model and what a step computes, a [`DataModule`] where the
//! batches come from, and a [`Trainer`] runs them on any number of ranks.
//!
//! In reading order: `step` (one optimizer step, from top to bottom), [`trainer`] (the loop around
//! it), [`data`] (which rank sees which sample), [`plan`] (configuration, checked once),
//! [`environment`] (whether this process is one of several ranks), [`checkpoint`], [`mod@bench`], and
//! [`gpt`], the model that the `pyroclast` binary trains.

pub mod bench;
pub mod callback;
pub mod checkpoint;
pub mod config;
pub mod data;
pub mod deepspeed;
pub mod device;
pub mod doctor;
pub mod environment;
pub mod error;
pub mod gpt;
pub mod loss_scale;
pub mod memory;
pub mod metrics;
pub mod monitor;
pub mod nn;
pub mod output;
pub mod plan;
mod ranks;
pub mod report;
pub mod schedule;
mod step;
pub mod strategy;
pub mod task;
pub mod trainer;

pub use callback::{Action, Callback, RunInfo};
pub use checkpoint::CheckpointConfig;
pub use config::TrainerConfig;
pub use data::sampler::{Sampler, Sampling};
pub use data::{DataModule, Dataset, Loader, Samples};
pub use device::Accelerator;
pub use environment::{Environment, ProcessRank};
pub use error::{BoxError, Error, Mistake};
pub use loss_scale::LossScaleConfig;
pub use metrics::{Metrics, Split};
pub use monitor::MonitorConfig;
pub use plan::Plan;
pub use schedule::ScheduleConfig;
pub use strategy::{
    DdpStrategy, FsdpStrategy, ShardingStrategy, Strategy, StrategyConfig, ZeroStrategy,
};
pub use task::{RankContext, StepOutput, TrainModule};
pub use trainer::{Fitted, StopReason, Trainer};

pub use pyroclast_precision as precision;
pub use pyroclast_precision::Precision;
pub use pyroclast_strategies as strategies;
pub use pyroclast_strategies::{Optimizer, ParamGroup, Unit};

/// Compiles and runs the README's program.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
