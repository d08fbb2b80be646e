//! Trains a module of your own on two ranks.
//!
//! ```text
//! cargo run --release -p pyroclast-examples --bin own_model
//! ```

use burn::nn::{Linear, LinearConfig, Relu};
use burn::{
    module::Module,
    tensor::{Device, Tensor, TensorData},
};
use pyroclast::{
    BoxError, DataModule, Dataset, Loader, RankContext, Sampling, StepOutput, TrainModule, Trainer,
    TrainerConfig, Unit,
};

/// A Burn module as you would write it. What is wrapped in a `Unit` is communicated together.
#[derive(Module, Debug)]
struct Mlp {
    layers: Vec<Unit<Linear>>,
    last: Linear,
}

impl Mlp {
    fn new(device: &Device) -> Self {
        let layer = |input, output| LinearConfig::new(input, output).init(device);
        Self { layers: vec![Unit::new(layer(1, 32)), Unit::new(layer(32, 32))], last: layer(32, 1) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = self
            .layers
            .iter()
            .fold(x, |x, unit| unit.forward(x, |layer, x| Relu::new().forward(layer.forward(x))));
        self.last.forward(hidden)
    }
}

/// Samples of a function on -1..1.
struct Sine;

impl Dataset for Sine {
    type Batch = Vec<f32>;

    fn len(&self) -> usize {
        512
    }

    fn batch(&self, indices: &[usize]) -> Result<Vec<f32>, BoxError> {
        Ok(indices.iter().map(|&i| i as f32 / 256.0 - 1.0).collect())
    }
}

#[derive(Clone)]
struct SineData;

impl DataModule for SineData {
    type Batch = Vec<f32>;

    fn train(&self) -> Loader<Vec<f32>> {
        Loader::new(Sine, 16).with_sampling(Sampling::Random)
    }
}

struct FitSine;

impl TrainModule for FitSine {
    type Model = Mlp;
    type Batch = Vec<f32>;

    fn configure_model(&self, context: &RankContext) -> Result<Mlp, BoxError> {
        Ok(Mlp::new(&context.device))
    }

    fn training_step(
        &self,
        model: &Mlp,
        batch: Vec<f32>,
        context: &RankContext,
    ) -> Result<StepOutput, BoxError> {
        let rows = batch.len();
        let x = Tensor::<2>::from_data(TensorData::new(batch, [rows, 1]), &context.device);
        let error = model.forward(x.clone()) - x.mul_scalar(3.0).sin();
        Ok(StepOutput::new(error.powi_scalar(2).mean()))
    }
}

fn main() -> anyhow::Result<()> {
    let config = TrainerConfig { max_epochs: Some(40), devices: 2, ..TrainerConfig::default() };
    let fitted = Trainer::new(config)?.fit(&FitSine, &SineData)?;
    let loss = fitted.last_train.and_then(|row| row.loss).unwrap_or(f64::NAN);
    anyhow::ensure!(loss < 0.05, "the loss is still {loss}");
    #[allow(clippy::print_stdout, reason = "an example speaks to its reader")]
    {
        println!("{} steps, loss {loss:.5}", fitted.steps);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_example_learns() {
        super::main().expect("the example should learn a sine");
    }
}
