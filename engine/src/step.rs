//! One optimizer step, from top to bottom.

use pyroclast_kernels::interop;
use pyroclast_precision::{Verdict, seed};
use pyroclast_strategies::{DataParallel, MicroBatch, ProcessGroup};

use crate::data::MicroBatches;
use crate::error::{BoxError, Error};
use crate::task::{RankContext, StepOutput, TrainModule};

/// What a step needs beside the model and the data.
#[derive(Debug)]
pub(crate) struct StepSettings {
    /// The step's number, from 1.
    pub(crate) step: u64,
    pub(crate) micro_batches: usize,
    pub(crate) clip: Option<f64>,
    pub(crate) lr: f64,
}

/// What a step reports.
#[derive(Debug)]
pub(crate) struct StepReport {
    pub(crate) totals: Totals,
    pub(crate) grad_norm: f64,
}

/// Takes one step: forward and backward of each micro-batch, reduction, verdict, update.
pub(crate) fn optimizer_step<T: TrainModule>(
    (task, context): (&T, &RankContext),
    (model, batches): (T::Model, &MicroBatches<T::Batch>),
    (strategy, group): (&mut DataParallel, &ProcessGroup),
    settings: &StepSettings,
) -> Result<(T::Model, StepReport), Error> {
    let mut totals = Totals::default();
    strategy.begin_step();
    for micro_batch in 1..=settings.micro_batches {
        let is_last = micro_batch == settings.micro_batches;
        let data = batches.next().map_err(user(context, "the data module"))?;
        strategy.begin_micro_batch(if is_last {
            MicroBatch::Last
        } else {
            MicroBatch::Intermediate
        });
        let output = task
            .training_step(&model, data.batch, context)
            .map_err(user(context, "training_step"))?;
        let gradients = seed(output.loss.clone(), data.weight).backward();
        strategy.collect(&model, gradients)?;
        totals.add(output, data.weight)?;
    }
    // One factor carries the true average over micro-batches and ranks, and the clipping.
    let sum_of_squares = strategy.reduce()?;
    let totals = totals.all_reduce(group)?;
    let verdict = Verdict::new(sum_of_squares, totals.weight);
    if !verdict.is_finite() {
        let (step, norm) = (settings.step, verdict.norm());
        return Err(Error::NotFinite { step, loss: totals.loss(), norm });
    }
    let model = strategy.step(model, verdict.scale(settings.clip), settings.lr);
    Ok((model, StepReport { totals, grad_norm: verdict.norm() }))
}

/// Weighted sums over micro-batches, and then over ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Totals {
    pub(crate) weight: f64,
    weighted_loss: f64,
    /// By name.
    weighted_metrics: Vec<(String, f64)>,
}

impl Totals {
    /// Adds a micro-batch. Reads its loss, and so waits for the device.
    pub(crate) fn add(&mut self, output: StepOutput, weight: f64) -> Result<(), Error> {
        let mut loss = f64::NAN;
        let tensor = output.loss.without_autodiff().reshape([-1]);
        interop::read_all(vec![tensor], |_, values| {
            loss = values.iter().copied().map(f64::from).sum()
        })
        .map_err(|source| {
            let what = "the loss".to_owned();
            Error::Strategy(pyroclast_strategies::Error::Read { what, source })
        })?;
        self.weight += weight;
        // A batch that only keeps a rank in step counts nothing, whatever it computes.
        if weight > 0.0 {
            self.weighted_loss += weight * loss;
        }
        for (name, value) in output.metrics {
            let value = if weight > 0.0 { weight * value } else { 0.0 };
            match self.weighted_metrics.iter_mut().find(|(known, _)| *known == name) {
                Some((_, sum)) => *sum += value,
                None => self.weighted_metrics.push((name, value)),
            }
        }
        Ok(())
    }

    /// Sums over ranks.
    pub(crate) fn all_reduce(mut self, group: &ProcessGroup) -> Result<Self, Error> {
        self.weighted_metrics.sort_by(|(a, _), (b, _)| a.cmp(b));
        let metrics = self.weighted_metrics.iter().map(|(_, value)| *value);
        let local = [self.weight, self.weighted_loss].into_iter().chain(metrics).collect();
        let global = group.all_reduce::<f64>(local).wait()?;
        (self.weight, self.weighted_loss) = (global[0], global[1]);
        for ((_, value), global) in self.weighted_metrics.iter_mut().zip(&global[2..]) {
            *value = *global;
        }
        Ok(self)
    }

    /// Mean loss.
    pub(crate) fn loss(&self) -> f64 {
        self.weighted_loss / self.weight
    }

    /// Means of the named metrics.
    pub(crate) fn metrics(&self) -> impl Iterator<Item = (String, f64)> {
        self.weighted_metrics.iter().map(|(name, sum)| (name.clone(), sum / self.weight))
    }
}

/// Says where user code failed.
pub(crate) fn user(context: &RankContext, stage: &'static str) -> impl FnOnce(BoxError) -> Error {
    let rank = context.rank;
    move |source| Error::Task { rank, stage, source }
}
