use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Tensor, TensorData};
use pyroclast::{
    BoxError, DataModule, Dataset, Error, Loader, ParamGroup, RankContext, Sampler, Sampling,
    StepOutput, TrainModule, Trainer, TrainerConfig,
};
use pyroclast_tests::{Recorder, assert_close};

/// Points of a line with noise that has no mean.
#[derive(Clone)]
struct Points {
    len: usize,
    prepared: Arc<AtomicUsize>,
    opened: Arc<AtomicUsize>,
    sampling: Sampling,
}

impl Points {
    fn new(len: usize) -> Self {
        let sampling = Sampling::Sequential;
        Self { len, prepared: Arc::default(), opened: Arc::default(), sampling }
    }
}

struct Line(usize);

impl Dataset for Line {
    type Batch = Vec<[f32; 2]>;

    fn len(&self) -> usize {
        self.0
    }

    fn batch(&self, indices: &[usize]) -> Result<Self::Batch, BoxError> {
        let point = |&i: &usize| {
            let x = i as f32 / self.0 as f32;
            [x, 3.0 * x - 1.0 + if i % 2 == 0 { 0.1 } else { -0.1 }]
        };
        Ok(indices.iter().map(point).collect())
    }
}

impl DataModule for Points {
    type Batch = Vec<[f32; 2]>;

    fn prepare_data(&self) -> Result<(), BoxError> {
        assert_eq!(self.opened.load(Ordering::SeqCst), 0, "no rank opens before it is prepared");
        self.prepared.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn setup(&mut self) -> Result<(), BoxError> {
        assert_eq!(self.prepared.load(Ordering::SeqCst), 1);
        self.opened.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn train(&self) -> Loader<Self::Batch> {
        Loader::new(Line(self.len), 5).with_sampling(self.sampling.clone())
    }

    fn validation(&self) -> Option<Loader<Self::Batch>> {
        Some(Loader::new(Line(7), 3))
    }
}

/// A model without units.
struct Regression;

impl TrainModule for Regression {
    type Model = Linear;
    type Batch = Vec<[f32; 2]>;

    fn configure_model(&self, context: &RankContext) -> Result<Linear, BoxError> {
        Ok(LinearConfig::new(1, 1).init(&context.device))
    }

    fn training_step(
        &self,
        model: &Linear,
        batch: Self::Batch,
        context: &RankContext,
    ) -> Result<StepOutput, BoxError> {
        let column = |column: usize| {
            let numbers: Vec<f32> = batch.iter().map(|point| point[column]).collect();
            let shape = [numbers.len(), 1];
            Tensor::<2>::from_data(TensorData::new(numbers, shape), &context.device)
        };
        let difference = model.forward(column(0)) - column(1);
        let mean = batch.iter().map(|p| f64::from(p[0])).sum::<f64>() / batch.len() as f64;
        let loss = difference.powi_scalar(2).mean();
        Ok(StepOutput::new(loss).with_metric("mean_x", mean))
    }
}

fn config(devices: usize) -> TrainerConfig {
    TrainerConfig {
        devices,
        optimizer: "sgd".to_owned(),
        lr: 0.1,
        max_epochs: Some(40),
        ..TrainerConfig::default()
    }
}

#[test]
fn a_line_is_learned_on_any_number_of_ranks() {
    for world in 1..=4 {
        let (points, rows) = (Points::new(23), Recorder::default());
        let trainer = Trainer::new(config(world)).expect("a configuration");
        let fitted =
            { trainer.with_callback(rows.clone()) }.fit(&Regression, &points).expect("a run");
        let number = |tensor: Tensor<1>| f64::from(tensor.into_scalar::<f32>());
        let slope = number(fitted.model.weight.val().without_autodiff().reshape([1]));
        assert_close(slope, 3.0, 0.2, &format!("slope on {world} ranks"));
        assert_eq!(points.prepared.load(Ordering::SeqCst), 1);
        assert_eq!(points.opened.load(Ordering::SeqCst), world);
        // The validation data ends in the middle of a batch, and before some ranks.
        let validation = fitted.last_validation.expect("a validation");
        let expected = (0..7).map(|i| f64::from(i as f32 / 7.0)).sum::<f64>() / 7.0;
        assert_close(
            validation.named["mean_x"].expect("a mean"),
            expected,
            1e-9,
            "a mean over held-out data",
        );
        assert_eq!(rows.rows().last().map(|row| row.tokens), Some(40 * 23));
    }
}

struct Sharded;

impl Sampler for Sharded {
    fn order(&self, _epoch: u64, len: usize) -> Vec<usize> {
        (0..len).collect()
    }

    fn num_replicas(&self) -> usize {
        2
    }
}

struct Backwards;

impl Sampler for Backwards {
    fn order(&self, _epoch: u64, len: usize) -> Vec<usize> {
        (0..len).rev().collect()
    }
}

#[test]
fn the_users_order_is_taken_and_a_sharded_sampler_refused() {
    let fit = |sampling| {
        let points = Points { sampling, ..Points::new(20) };
        let rows = Recorder::default();
        let config = TrainerConfig { max_steps: Some(1), ..config(2) };
        let trainer = Trainer::new(config).expect("a configuration");
        { trainer.with_callback(rows.clone()) }.fit(&Regression, &points).map(|_| rows.rows())
    };
    let rows = fit(Sampling::Custom(Arc::new(Backwards))).expect("a run");
    assert_close(
        rows[0].named["mean_x"].expect("a mean"),
        14.5 / 20.0,
        1e-6,
        "the last ten samples",
    );
    let error = fit(Sampling::Custom(Arc::new(Sharded))).expect_err("a sharded sampler");
    assert!(matches!(error, Error::Data(_)), "{error}");
    assert!(error.to_string().contains("already sharded over 2 replicas"), "{error}");
}

#[test]
fn data_without_samples_is_refused() {
    let mut trainer = Trainer::new(config(2)).expect("a configuration");
    let error = trainer.fit(&Regression, &Points::new(0)).expect_err("no samples").to_string();
    assert!(error.contains("the training data holds no sample"), "{error}");
}

struct Groups(fn() -> Vec<ParamGroup>);

impl TrainModule for Groups {
    type Model = Linear;
    type Batch = Vec<[f32; 2]>;

    fn configure_model(&self, context: &RankContext) -> Result<Linear, BoxError> {
        Regression.configure_model(context)
    }

    fn training_step(
        &self,
        model: &Linear,
        batch: Self::Batch,
        context: &RankContext,
    ) -> Result<StepOutput, BoxError> {
        let output = Regression.training_step(model, batch, context)?;
        // No gradient: what moves a weight is its decay.
        Ok(StepOutput::new(output.loss.mul_scalar(0.0)))
    }

    fn optimizer_groups(&self) -> Vec<ParamGroup> {
        (self.0)()
    }
}

#[test]
fn groups_set_decay_and_rate_by_parameter() {
    type Table = [(fn() -> Vec<ParamGroup>, f64); 4];
    let table: Table = [
        (|| vec![], 0.9),
        (|| vec![ParamGroup::no_decay()], 0.9),
        (|| vec![ParamGroup::new("all", |_| true).with_weight_decay(0.0)], 1.0),
        (|| vec![ParamGroup::new("slow", |p| p.path == "weight").with_lr_factor(0.5)], 0.95),
    ];
    for (groups, expected) in table {
        let fit = |steps| {
            let config = TrainerConfig {
                optimizer: "adamw".to_owned(),
                weight_decay: Some(1.0),
                max_steps: Some(steps),
                ..config(1)
            };
            let mut trainer = Trainer::new(config).expect("a configuration");
            let fitted = trainer.fit(&Groups(groups), &Points::new(20)).expect("a run");
            f64::from(
                fitted.model.weight.val().without_autodiff().reshape([1]).into_scalar::<f32>(),
            )
        };
        let (once, twice) = (fit(1), fit(2));
        assert_close(twice / once, expected, 1e-5, "the factor of one step");
    }
}
