//! One rank's part of a run, from its data to its last checkpoint.

mod checkpoints;

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::Device;
use pyroclast_precision::{AtMinimum, Scaler};
use pyroclast_strategies::{DataParallel, ProcessGroup, Rate};

use super::agreement::agree_on_settings;
use super::initialise::{Randomness, Started, check_identity, restore, start, to_continue};
use super::progress::Progress;
use super::save::{Home, Saver};
use super::{Fitted, StopReason};
use crate::callback::{self, Action, Callback, RunInfo};
use crate::data::loader::{self, Place};
use crate::data::{DataModule, Loader, MicroBatches};
use crate::error::Error;
use crate::memory::{self, MemorySample, StepMemory};
use crate::metrics::{Metrics, MetricsFile, Split, peak_rss_bytes};
use crate::monitor::Monitors;
use crate::output::RunFolder;
use crate::plan::Plan;
use crate::step::{Step, StepReport, Totals, optimizer_step, user};
use crate::task::{RankContext, TrainModule};
use crate::{device, report};

/// What all ranks share.
pub(super) struct Shared<'a, T> {
    pub(super) plan: &'a Plan,
    pub(super) task: &'a T,
    pub(super) device: Device,
    pub(super) folder: Option<RunFolder>,
    pub(super) config: &'a serde_json::Value,
    pub(super) stop: &'a AtomicBool,
}

/// A rank and its tools.
struct Rank<'a, T> {
    shared: &'a Shared<'a, T>,
    group: Arc<ProcessGroup>,
    context: RankContext,
    callbacks: &'a mut [Box<dyn Callback>],
    /// On rank 0, if the run writes anything.
    metrics: Option<MetricsFile>,
    /// Keeps other runs out of the folder, on ranks that look after one.
    lock: Option<File>,
    /// On rank 0.
    monitors: Monitors,
    randomness: Randomness,
    progress: Progress,
    scaler: Scaler,
    saver: Saver,
    /// What the checkpoint that the run came from holds of callbacks.
    callback_states: callback::States,
}

/// Runs a rank.
pub(super) fn fit<T, D>(
    shared: &Shared<'_, T>,
    group: Arc<ProcessGroup>,
    mut data: D,
    callbacks: &mut [Box<dyn Callback>],
) -> Result<Fitted<T::Model>, Error>
where
    T: TrainModule,
    D: DataModule<Batch = T::Batch>,
{
    let plan = shared.plan;
    let context = RankContext {
        rank: group.rank(),
        world: group.world(),
        device: shared.device.clone().autodiff(),
        dtype: plan.precision.types.types.output.dtype(),
    };
    let place = (context.rank, plan.local_rank(context.rank));
    let home = Home::new(shared.folder.clone(), plan.sharing(), place);
    if let Some(folder) = home.kept() {
        folder.refuse_taken(&plan.resume)?;
    }
    prepare(&mut data, place.1, &context, &group)?;
    let (train, validation) = (data.train(), data.validation());
    loader::check(&train, "training")?;
    validation.as_ref().map_or(Ok(()), |loader| loader::check(loader, "validation"))?;
    check_batch_size(plan, train.batch_size)?;

    if plan.process.is_some() {
        agree_on_settings(shared.config, train.dataset.len() as u64, &group)?;
    }
    let resumed = to_continue(&home, &plan.resume, &group)?;
    let Started { mut model, mut strategy, randomness } = start(shared, &context, &group)?;
    if let Some(checkpoint) = &resumed {
        check_identity(&checkpoint.manifest, shared.config, train.dataset.len() as u64)?;
        model = restore(model, &mut strategy, checkpoint)?;
    }
    let manifest = resumed.map(|checkpoint| checkpoint.manifest);
    let progress = Progress::new(plan, &train, manifest.as_ref());
    let mut scaler = Scaler::new(plan.precision.loss_scale);
    if let Some(state) = manifest.as_ref().and_then(|manifest| manifest.scaler) {
        scaler.restore(state);
    }
    let config = plan.resolved.checkpoint.clone();
    let saver = Saver::new(config, home, manifest.as_ref(), progress.epochs());
    let is_silent = context.rank > 0 || plan.resolved.fast_dev_run;
    let monitors = if is_silent { Monitors::none() } else { Monitors::open(&plan.resolved)? };
    let mut rank = Rank {
        shared,
        group,
        context,
        callbacks,
        metrics: None,
        lock: None,
        monitors,
        randomness,
        progress,
        scaler,
        saver,
        callback_states: manifest.map(|manifest| manifest.callbacks).unwrap_or_default(),
    };
    callback::load(rank.callbacks, &rank.callback_states)?;
    rank.open_output()?;
    rank.train(model, &mut strategy, &train, validation.as_ref())
}

/// Refuses a batch that is not as large as it should be: now that the ranks have met, all of its factors are
/// known.
fn check_batch_size(plan: &Plan, micro: usize) -> Result<(), Error> {
    let (accumulate, world) = (plan.resolved.accumulate_grad_batches, plan.world);
    let product = micro.saturating_mul(accumulate).saturating_mul(world);
    match plan.resolved.train_batch_size {
        Some(train) if train != product => Err(Error::setting(
            "train_batch_size",
            format!(
                "{train}, but {micro} (batch size of the loader) x {accumulate} \
                 (accumulate_grad_batches) x {world} (ranks) is {product}; make them agree, or leave it out"
            ),
        )),
        _ => Ok(()),
    }
}

/// Prepares the data once per machine, then opens it on every rank.
fn prepare<D: DataModule>(
    data: &mut D,
    local_rank: usize,
    context: &RankContext,
    group: &ProcessGroup,
) -> Result<(), Error> {
    if local_rank == 0 {
        data.prepare_data().map_err(user(context, "prepare_data"))?;
    }
    group.barrier()?;
    data.setup().map_err(user(context, "setup"))
}

impl<T: TrainModule> Rank<'_, T> {
    fn is_first(&self) -> bool {
        self.context.rank == 0
    }

    fn open_output(&mut self) -> Result<(), Error> {
        if let Some(folder) = self.saver.home().kept() {
            self.lock = Some(folder.create()?);
            // Another run may have come and gone since this was checked without the lock.
            folder.refuse_taken(&self.shared.plan.resume)?;
            self.saver.clean_up()?;
        }
        if let Some(folder) = self.shared.folder.as_ref().filter(|_| self.is_first()) {
            self.metrics = Some(MetricsFile::open(&folder.metrics(), self.progress.step)?);
            folder.write_config(self.shared.config)?;
        }
        Ok(())
    }

    fn train(
        &mut self,
        mut model: T::Model,
        strategy: &mut DataParallel,
        train: &Loader<T::Batch>,
        validation: Option<&Loader<T::Batch>>,
    ) -> Result<Fitted<T::Model>, Error> {
        let batches = MicroBatches::start(train, self.place());
        let info = RunInfo {
            num_params: strategy.layout().num_elements(),
            world: self.context.world,
            first_step: self.progress.first_step,
            last_step: self.progress.last_step,
            device: self.shared.plan.accelerator.to_string(),
        };
        self.callbacks.iter_mut().for_each(|callback| callback.on_fit_start(&info));
        let (mut last_train, mut last_validation) = (None, None);
        let mut reason = StopReason::Finished;
        while self.progress.step < self.progress.last_step && reason == StopReason::Finished {
            let started = Instant::now();
            self.reseed(strategy);
            let rate = self.rate();
            let step = Step {
                task: self.shared.task,
                context: &self.context,
                batches: &batches,
                group: &self.group,
                micro_batches: self.shared.plan.resolved.accumulate_grad_batches,
                clip: self.shared.plan.clip,
                rate,
                loss_scale: self.scaler.scale(),
            };
            let loss_scale = self.scaler.skips().then_some(step.loss_scale);
            let records = self.records_memory();
            if records {
                strategy.memory().record();
            }
            let (updated, report) = optimizer_step(&step, model, strategy)?;
            model = updated;
            if records {
                self.write_memory(strategy)?;
            }
            if let Err(error) = self.judge(strategy, &report)? {
                // All ranks see the same; the last good state is saved first.
                self.save_at_end(&model, strategy)?;
                self.group.barrier()?;
                return Err(error);
            }
            let mut action = Action::Continue;
            let mut row = self.advance(&report, rate.lr, started);
            row.loss_scale = loss_scale;
            row.memory = Some(memory::gather(strategy.memory(), &self.group)?);
            self.report(&row, &mut action, |callback, row| callback.on_step_end(row))?;
            last_train = Some(row);
            let due = validation.filter(|_| self.validation_is_due());
            if let Some(loader) = due {
                model = strategy.begin_pass(strategy.synchronize_buffers(model)?)?;
                let row = self.validate(&model, loader)?;
                model = strategy.end_pass(model)?;
                self.report(&row, &mut action, |callback, row| callback.on_validation_end(row))?;
                last_validation = Some(row);
            }
            self.save_if_due(&model, strategy, due.is_some())?;
            if self.agree_to_stop(action)? && self.progress.step < self.progress.last_step {
                reason = StopReason::Stopped;
            }
        }
        let model = strategy.synchronize_buffers(model)?;
        self.finish(&model, strategy, reason)?;
        let model = strategy.whole(model)?;
        Ok(Fitted { model, steps: self.progress.step, reason, last_train, last_validation })
    }

    /// Whether the next step is the one whose memory the report draws: the run's second, which does what
    /// all others do, or the last before the run ends.
    fn records_memory(&self) -> bool {
        let second = (self.progress.first_step + 2).min(self.progress.last_step);
        self.metrics.is_some() && self.progress.step + 1 == second
    }

    /// Writes what this rank held during the step that has just been taken.
    fn write_memory(&self, strategy: &DataParallel) -> Result<(), Error> {
        let Some(folder) = &self.shared.folder else { return Ok(()) };
        let samples = strategy.memory().recorded().into_iter().map(MemorySample::from).collect();
        let step = self.progress.step + 1;
        memory::write(folder, &StepMemory { step, rank: self.context.rank, samples })
    }

    fn place(&self) -> Place {
        let config = &self.shared.plan.resolved;
        Place {
            world: self.context.world,
            rank: self.context.rank,
            accumulate: config.accumulate_grad_batches,
            seed: config.seed,
            consumed: self.progress.samples,
            limit: self.progress.limit,
            steps: self.progress.last_step - self.progress.step,
        }
    }

    /// Learning rate of the next step.
    fn rate(&self) -> Rate {
        self.shared.plan.schedule.rate(self.progress.applied() + 1, self.progress.last_step)
    }

    /// Makes what a model draws depend on the seed, the step and the rank alone, so that a resumed
    /// run draws what the uninterrupted one does.
    fn reseed(&self, strategy: &DataParallel) {
        let step = (self.progress.step + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let rank = (self.context.rank as u64).wrapping_mul(0xd1b5_4a32_d192_ed03);
        let seed = self.shared.plan.resolved.seed ^ step ^ rank;
        strategy.seed(seed);
        if self.randomness == Randomness::OwnGenerator {
            self.shared.device.seed(seed);
        }
    }

    /// Says whether the run goes on after a step: where gradients are not finite, it does if a loss scale can
    /// be lowered.
    fn judge(
        &mut self,
        strategy: &DataParallel,
        report: &StepReport,
    ) -> Result<Result<(), Error>, Error> {
        let overflowed = !report.verdict.is_finite();
        let step = self.progress.step + 1;
        if overflowed && !self.scaler.skips() {
            let (loss, norm) = (report.totals.loss(), report.verdict.norm());
            return Ok(Err(Error::NotFinite { step, loss, norm, culprit: strategy.culprit()? }));
        }
        match self.scaler.update(overflowed) {
            Ok(()) => {
                self.progress.skipped += u64::from(overflowed);
                Ok(Ok(()))
            }
            Err(AtMinimum(scale)) => {
                let culprit = strategy.culprit()?;
                Ok(Err(Error::LossScaleAtMinimum { step, scale, culprit }))
            }
        }
    }

    /// Counts a step, and makes its row.
    fn advance(&mut self, report: &StepReport, lr: f64, started: Instant) -> Metrics {
        let seconds = started.elapsed().as_secs_f64();
        let samples = self.progress.next_samples();
        self.progress.step += 1;
        self.progress.samples += samples;
        let tokens = samples * self.progress.tokens_per_sample;
        self.progress.tokens += tokens;
        let in_use = device::bytes_in_use(&self.context.device);
        self.progress.peak_device_bytes = self.progress.peak_device_bytes.max(in_use);
        Metrics {
            grad_norm: finite(report.verdict.norm()),
            skipped: !report.verdict.is_finite(),
            lr: Some(lr),
            tokens_per_s: Some(tokens as f64 / seconds),
            step_ms: Some(seconds * 1e3),
            ..self.row(Split::Train, &report.totals)
        }
    }

    fn row(&self, split: Split, totals: &Totals) -> Metrics {
        let progress = &self.progress;
        Metrics {
            step: progress.step,
            epoch: progress.samples.saturating_sub(1) / progress.epoch_len,
            split,
            loss: finite(totals.loss()),
            grad_norm: None,
            lr: None,
            loss_scale: None,
            skipped: false,
            tokens: progress.tokens,
            tokens_per_s: None,
            step_ms: None,
            peak_rss_bytes: peak_rss_bytes(),
            peak_device_bytes: progress.peak_device_bytes,
            memory: None,
            named: totals.metrics().map(|(name, value)| (own_name(name), finite(value))).collect(),
        }
    }

    /// Logs a row and shows it to the callbacks.
    fn report(
        &mut self,
        row: &Metrics,
        action: &mut Action,
        call: impl Fn(&mut dyn Callback, &Metrics) -> Action,
    ) -> Result<(), Error> {
        if let Some(metrics) = &mut self.metrics {
            metrics.append(row)?;
        }
        self.monitors.record(row, self.progress.samples)?;
        self.saver.note(row);
        for callback in self.callbacks.iter_mut() {
            if call(&mut **callback, row) == Action::Stop {
                *action = Action::Stop;
            }
        }
        Ok(())
    }

    fn validation_is_due(&self) -> bool {
        let step = self.progress.step;
        let config = &self.shared.plan.resolved;
        match (self.shared.plan.validate_every, config.val_check_interval) {
            (Some(every), _) => step.is_multiple_of(every) || step == self.progress.last_step,
            (None, Some(_)) => false,
            (None, None) => step == self.progress.last_step,
        }
    }

    /// The mean loss over held-out data. A rank whose data ran out runs along with weight 0.
    fn validate(&self, model: &T::Model, loader: &Loader<T::Batch>) -> Result<Metrics, Error> {
        let model = model.valid();
        let device = self.shared.device.clone();
        let context = RankContext { device, ..self.context.clone() };
        let config = &self.shared.plan.resolved;
        let limit = loader.dataset.len() as u64;
        let all = limit.div_ceil((context.world * loader.batch_size) as u64);
        let limit_batches = if config.fast_dev_run { Some(1) } else { config.limit_val_batches };
        let steps = limit_batches.map_or(all, |batches| all.min(batches as u64));
        let place = Place { accumulate: 1, consumed: 0, limit, steps, ..self.place() };
        let batches = MicroBatches::start(loader, place);
        let mut totals = Totals::default();
        for _ in 0..steps {
            let data = batches.next().map_err(user(&context, "the validation data"))?;
            let output = self
                .shared
                .task
                .validation_step(&model, data.batch, &context)
                .map_err(user(&context, "validation_step"))?;
            totals.add(output, data.weight, &context)?;
        }
        let totals = totals.all_reduce(&self.group, &context)?;
        Ok(self.row(Split::Val, &totals))
    }

    /// The last checkpoint and the report; the other ranks wait for them.
    fn finish(
        &mut self,
        model: &T::Model,
        strategy: &DataParallel,
        reason: StopReason,
    ) -> Result<(), Error> {
        self.save_at_end(model, strategy)?;
        if self.is_first() {
            if let Some(folder) = &self.shared.folder {
                report::write(folder, self.shared.config)?;
            }
            self.callbacks.iter_mut().for_each(|callback| callback.on_fit_end(reason));
        }
        Ok(self.group.barrier()?)
    }
}

/// A number for a row: what is not finite is null there.
fn finite(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

/// A task's metric under a name that no key of a row has.
fn own_name(name: String) -> String {
    if Metrics::KEYS.contains(&name.as_str()) { format!("task_{name}") } else { name }
}
