//! Next-byte prediction as a training task.

use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use pyroclast_kernels::numbers::Float;
use pyroclast_strategies::ParamGroup;

use super::config::{GptConfig, VOCABULARY};
use super::model::Gpt;
use super::text::Windows;
use super::weights::{self, InitialWeights};
use crate::error::BoxError;
use crate::task::{RankContext, StepOutput, TrainModule};

/// Which parameters are decayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decay {
    /// Matrices and embeddings.
    #[default]
    Matrices,
    /// All of them, as torch does when it is given no groups.
    All,
}

/// Trains a [`Gpt`].
#[derive(Clone, Debug)]
pub struct GptTask {
    /// Sizes of the model.
    pub config: GptConfig,
    /// Initial weights in place of random ones.
    pub initial: Option<InitialWeights>,
    /// Which parameters are decayed.
    pub decay: Decay,
}

impl GptTask {
    /// A task with random initial weights.
    #[must_use]
    pub fn new(config: GptConfig) -> Self {
        Self { config, initial: None, decay: Decay::default() }
    }

    /// A new model on `device`.
    ///
    /// # Errors
    ///
    /// If the initial weights are not of this model.
    pub fn model(&self, device: &Device) -> Result<Gpt, crate::Error> {
        let model = Gpt::new(&self.config, device);
        match &self.initial {
            Some(initial) => weights::initialise(model, initial),
            None => Ok(model),
        }
    }
}

impl TrainModule for GptTask {
    type Model = Gpt;
    type Batch = Windows;

    fn configure_model(&self, context: &RankContext) -> Result<Gpt, BoxError> {
        Ok(self.model(&context.device)?)
    }

    fn training_step(
        &self,
        model: &Gpt,
        batch: Windows,
        context: &RankContext,
    ) -> Result<StepOutput, BoxError> {
        let (inputs, targets) = batch.split();
        let shape = [batch.rows(), batch.context()];
        let to_device = |tokens: Vec<i32>| {
            Tensor::<2, Int>::from_data(TensorData::new(tokens, shape), &context.device)
        };
        let logits = model.forward(to_device(inputs));
        // Sums of exponentials need more bits than 16.
        let is_half = Float::of(logits.dtype()).is_some_and(Float::is_half);
        let logits = if is_half { logits.cast(FloatDType::F32) } else { logits };
        let tokens = shape[0] * shape[1];
        let log_probabilities = log_softmax(logits.reshape([tokens, VOCABULARY]), 1);
        let of_target = log_probabilities.gather(1, to_device(targets).reshape([tokens, 1]));
        Ok(StepOutput::new(of_target.mean().neg()))
    }

    fn optimizer_groups(&self) -> Vec<ParamGroup> {
        match self.decay {
            Decay::Matrices => vec![ParamGroup::no_decay()],
            Decay::All => vec![],
        }
    }
}
