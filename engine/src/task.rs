//! What the user brings: how to build a model, and what a step computes.

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use pyroclast_strategies::ParamGroup;

use crate::error::BoxError;

/// A training task: Lightning's `LightningModule`, apart from the model itself. One value serves all
/// ranks.
pub trait TrainModule: Send + Sync {
    /// Any Burn module.
    type Model: Module + 'static;
    /// What a step gets from the [`DataModule`](crate::DataModule).
    type Batch: Send + 'static;

    /// Builds the model. Runs on every rank; afterwards all ranks get rank 0's numbers.
    ///
    /// # Errors
    ///
    /// Any error ends the run.
    fn configure_model(&self, context: &RankContext) -> Result<Self::Model, BoxError>;

    /// The mean loss of a micro-batch.
    ///
    /// # Errors
    ///
    /// Any error ends the run, on all ranks.
    fn training_step(
        &self,
        model: &Self::Model,
        batch: Self::Batch,
        context: &RankContext,
    ) -> Result<StepOutput, BoxError>;

    /// The mean loss of a held-out batch; the same as training by default. The model is in its
    /// validation state, without autodiff.
    ///
    /// # Errors
    ///
    /// Any error ends the run, on all ranks.
    fn validation_step(
        &self,
        model: &Self::Model,
        batch: Self::Batch,
        context: &RankContext,
    ) -> Result<StepOutput, BoxError> {
        self.training_step(model, batch, context)
    }

    /// Parameters with settings of their own. By default norms, biases and other 1-D parameters are
    /// not decayed.
    fn optimizer_groups(&self) -> Vec<ParamGroup> {
        vec![ParamGroup::no_decay()]
    }
}

/// Where a step runs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RankContext {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// The rank's device: with autodiff in training, without in validation.
    pub device: Device,
    /// Type of floats outside of units: `f32`, but for precisions such as `64-true`. A float tensor that is made
    /// with `(&context.device, context.dtype)` goes with what units return.
    pub dtype: DType,
}

/// What a step returns.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StepOutput {
    /// Mean loss, one element.
    pub loss: Tensor<1>,
    /// Named numbers, averaged over micro-batches and ranks with the same weights as the loss.
    pub metrics: Vec<(String, f64)>,
}

impl StepOutput {
    /// Only a loss.
    #[must_use]
    pub fn new(loss: Tensor<1>) -> Self {
        Self { loss, metrics: Vec::new() }
    }

    /// Adds a named number. Every micro-batch of every rank must add the same names. In
    /// `metrics.jsonl` a name of the engine's own, such as `loss`, gets `task_` before it.
    #[must_use]
    pub fn with_metric(mut self, name: impl Into<String>, value: f64) -> Self {
        self.metrics.push((name.into(), value));
        self
    }
}

impl From<Tensor<1>> for StepOutput {
    fn from(loss: Tensor<1>) -> Self {
        Self::new(loss)
    }
}
