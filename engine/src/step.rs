//! One optimizer step, from top to bottom.

use pyroclast_kernels::interop;
use pyroclast_precision::{Clip, Verdict, seed};
use pyroclast_strategies::{
    Counts, DataParallel, GradientScale, MicroBatch, ProcessGroup, Rate, ReduceOp,
};

use crate::data::MicroBatches;
use crate::error::{BoxError, Error};
use crate::task::{RankContext, StepOutput, TrainModule};

/// What a step needs beside the model.
#[derive(Debug)]
pub(crate) struct Step<'a, T: TrainModule> {
    pub(crate) task: &'a T,
    pub(crate) context: &'a RankContext,
    pub(crate) batches: &'a MicroBatches<T::Batch>,
    pub(crate) group: &'a ProcessGroup,
    pub(crate) micro_batches: usize,
    pub(crate) clip: Option<Clip>,
    pub(crate) rate: Rate,
    /// What the losses of the step are multiplied by.
    pub(crate) loss_scale: f64,
}

/// What a step found, the same on every rank.
#[derive(Debug)]
pub(crate) struct StepReport {
    pub(crate) totals: Totals,
    pub(crate) verdict: Verdict,
}

/// Takes one step: forward and backward of each micro-batch, reduction, verdict, update. Gradients
/// that are not finite update nothing; the report says so.
pub(crate) fn optimizer_step<T: TrainModule>(
    step: &Step<'_, T>,
    mut model: T::Model,
    strategy: &mut DataParallel,
) -> Result<(T::Model, StepReport), Error> {
    let mut totals = Totals::default();
    strategy.begin_step();
    for micro_batch in 1..=step.micro_batches {
        let data = step.batches.next().map_err(user(step.context, "the data module"))?;
        let position = match micro_batch == step.micro_batches {
            true => MicroBatch::Last,
            false => MicroBatch::Intermediate,
        };
        let counts = if data.weight > 0.0 { Counts::Yes } else { Counts::No };
        model = strategy.begin_micro_batch(model, position, counts)?;
        let output = step
            .task
            .training_step(&model, data.batch, step.context)
            .map_err(user(step.context, "training_step"))?;
        let gradients = seed(output.loss.clone(), data.weight, step.loss_scale).backward();
        model = strategy.collect(model, gradients)?;
        totals.add(output, data.weight, step.context)?;
    }
    let sum_of_squares = strategy.reduce()?;
    let totals = totals.all_reduce(step.group, step.context)?;
    let verdict = Verdict::new(sum_of_squares, totals.weight, step.loss_scale);
    // One factor carries the true average over micro-batches and ranks, the loss scale, and the clipping.
    let model = match verdict.is_finite() {
        true => {
            let limit = match step.clip {
                Some(Clip::Value(limit)) => Some(limit),
                Some(Clip::Norm(_)) | None => None,
            };
            let scale = GradientScale { factor: verdict.scale(step.clip), limit };
            strategy.step(model, scale, step.rate)?
        }
        false => model,
    };
    Ok((model, StepReport { totals, verdict }))
}

/// Weighted sums over micro-batches, and then over ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Totals {
    pub(crate) weight: f64,
    weighted_loss: f64,
    /// By name, in the order of names. None before the first micro-batch.
    weighted_metrics: Option<Vec<(String, f64)>>,
}

impl Totals {
    /// Adds a micro-batch. Reads its loss, and so waits for the device.
    pub(crate) fn add(
        &mut self,
        output: StepOutput,
        weight: f64,
        context: &RankContext,
    ) -> Result<(), Error> {
        let wrong = |problem: String| user(context, "what the step returned")(problem.into());
        let StepOutput { loss, mut metrics } = output;
        if loss.dims() != [1] {
            let dims = loss.dims();
            return Err(wrong(format!("a loss has 1 element, but this one has shape {dims:?}")));
        }
        metrics.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut value = f64::NAN;
        interop::read_all(vec![loss.without_autodiff()], |_, read| value = read.to_f64()[0])
            .map_err(|source| {
                let what = "the loss".to_owned();
                Error::Strategy(pyroclast_strategies::Error::Read { what, source })
            })?;
        // A batch that only keeps a rank in step counts nothing, whatever it computes.
        let weighted = |value: f64| if weight > 0.0 { weight * value } else { 0.0 };
        self.weight += weight;
        self.weighted_loss += weighted(value);
        let sums = self
            .weighted_metrics
            .get_or_insert_with(|| metrics.iter().map(|(name, _)| (name.clone(), 0.0)).collect());
        if !sums.iter().map(|(name, _)| name).eq(metrics.iter().map(|(name, _)| name)) {
            return Err(wrong("every micro-batch must return the same named metrics".to_owned()));
        }
        for ((_, sum), (_, value)) in sums.iter_mut().zip(metrics) {
            *sum += weighted(value);
        }
        Ok(())
    }

    /// Sums over ranks.
    pub(crate) fn all_reduce(
        mut self,
        group: &ProcessGroup,
        context: &RankContext,
    ) -> Result<Self, Error> {
        let mut metrics = self.weighted_metrics.take().unwrap_or_default();
        let names = fingerprint(&metrics);
        let global =
            group.all_reduce(vec![self.weight, self.weighted_loss, names], ReduceOp::Sum).wait()?;
        (self.weight, self.weighted_loss) = (global[0], global[1]);
        if global[2] != names * group.world() as f64 {
            let problem = "every rank must return the same named metrics";
            return Err(user(context, "what the step returned")(problem.into()));
        }
        if !metrics.is_empty() {
            let values = metrics.iter().map(|(_, value)| *value).collect();
            let global = group.all_reduce::<f64>(values, ReduceOp::Sum).wait()?;
            for ((_, value), global) in metrics.iter_mut().zip(global) {
                *value = global;
            }
        }
        self.weighted_metrics = Some(metrics);
        Ok(self)
    }

    /// Mean loss.
    pub(crate) fn loss(&self) -> f64 {
        self.weighted_loss / self.weight
    }

    /// Means of the named metrics.
    pub(crate) fn metrics(&self) -> impl Iterator<Item = (String, f64)> {
        let metrics = self.weighted_metrics.iter().flatten();
        metrics.map(|(name, sum)| (name.clone(), sum / self.weight))
    }
}

/// A number that differs for different names, small enough that sums over ranks are exact.
fn fingerprint(metrics: &[(String, f64)]) -> f64 {
    f64::from(hash(metrics.iter().flat_map(|(name, _)| name.bytes().chain([0]))))
}

/// FNV-1a.
pub(crate) fn hash(bytes: impl Iterator<Item = u8>) -> u32 {
    bytes.fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Says where user code failed.
pub(crate) fn user(context: &RankContext, stage: &'static str) -> impl FnOnce(BoxError) -> Error {
    let rank = context.rank;
    move |source| Error::Task { rank, stage, source }
}
