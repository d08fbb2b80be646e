//! Data parallelism: every rank sees its own data, and gradients are summed. What the ranks hold in
//! shards is a [`Stage`]; there is one path for all of them.
//!
//! A single rank is the group of size one and takes the same path.

mod agree;
mod persist;
mod pieces;
mod setup;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::tensor::{Device, Gradients};
use pyroclast_kernels::gradient;
use pyroclast_kernels::numbers::Numbers;

pub use self::agree::Culprit;
pub use self::persist::StateEntry;
pub use self::pieces::{Piece, PieceOf, Pieces};
pub use self::setup::{Anomalies, Setup, Unused};
use crate::buckets::{Counts, GradientBuckets, MicroBatch};
use crate::error::Error;
use crate::events::Events;
use crate::gathers::Gathers;
use crate::group::ProcessGroup;
use crate::initialise::{Initialised, Place, initialise};
use crate::layout::{Buffers, FrozenParams, Kind, Layout, ROOT, Wrapping};
use crate::memory::{Category, Held, Ledger};
use crate::optimizer::{FlatOptimizer, Gradients1d, Rate, Update};
use crate::parcel::{self, Parcel};
use crate::policy::{PolicyPurpose, UnitFacts};
use crate::run::{Run, RunWeights};
use crate::sizes::{Overlap, Sizes};
use crate::stage::{AfterForward, Stage};
use crate::unit::{Installed, Seeds, Watch};
use crate::weights::{Weights, fill, hollow_out, lend};

/// One rank's part in the training of one model: layout, weights, gradient buckets and optimizer.
///
/// A step is: [`begin_step`](Self::begin_step); for each micro-batch
/// [`begin_micro_batch`](Self::begin_micro_batch), forward, backward,
/// [`collect`](Self::collect); then [`reduce`](Self::reduce) and [`step`](Self::step).
#[derive(Debug)]
pub struct DataParallel {
    stage: Stage,
    unused: Unused,
    sizes: Sizes,
    overlap: Overlap,
    run: Arc<Run>,
    /// What the model's parameters are views of, by unit, where they are not sharded.
    lent: Vec<Weights>,
    optimizer: FlatOptimizer,
    /// Counts the weights that the model shares.
    _held: Vec<Held>,
    /// Counts the buffers of messages.
    messages: Mutex<Option<Held>>,
}

/// What makes the step of the summed gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientScale {
    /// Factor that makes averages of the sums, clipped by their norm where they are, and takes the loss scale
    /// back.
    pub factor: f64,
    /// Largest absolute value of an averaged gradient's element.
    pub limit: Option<f64>,
}

impl From<f64> for GradientScale {
    fn from(factor: f64) -> Self {
        Self { factor, limit: None }
    }
}

impl DataParallel {
    /// Lays out `model`, gives every rank rank 0's numbers, and makes the model's units report to
    /// this run. Returns the model with those numbers; where parameters are sharded, without any.
    ///
    /// Lazy parameters are drawn on rank 0 alone, in the order in which the model is traversed.
    ///
    /// # Errors
    ///
    /// [`Error::NothingToTrain`], [`Error::LayoutMismatch`], [`Error::UnitInUse`],
    /// [`Error::UnknownUnits`], or what ended a collective. The other ranks are told.
    pub fn new<M: Module>(
        model: M,
        group: &Arc<ProcessGroup>,
        setup: &Setup,
    ) -> Result<(M, Self), Error> {
        agree::told(group, Self::begin(model, group, setup))
    }

    fn begin<M: Module>(
        model: M,
        group: &Arc<ProcessGroup>,
        setup: &Setup,
    ) -> Result<(M, Self), Error> {
        // One rank owns everything.
        let stage = if group.world() == 1 { Stage::Nothing } else { setup.stage };
        let is_sharded = stage.shards_parameters();
        let wrapping = Wrapping {
            wrap: &setup.wrap,
            frozen: if is_sharded { FrozenParams::InUnits } else { FrozenParams::InModel },
            persistence: if is_sharded { setup.sizes.persistence } else { 0 },
            order: setup.order,
            precision: &setup.precision,
        };
        let layout = Arc::new(Layout::wrapped(&model, group.world(), wrapping)?);
        let facts: Vec<_> = layout.declared().iter().map(|unit| unit.facts.clone()).collect();
        let recompute = setup
            .activation_checkpointing
            .choose(PolicyPurpose::ActivationCheckpointing, &facts)?;
        agree::on_layout(&layout, group)?;
        let device = model.devices().into_iter().next().unwrap_or_else(Device::flex).autodiff();
        let (ledger, events) = (Ledger::default(), Events::default());
        let place = Place { layout: &layout, group, stage, ledger: &ledger, device: &device };
        let Initialised { model, mappers, stored } = initialise(model, place)?;
        let (masters, stored): (Vec<_>, Vec<_>) =
            stored.into_iter().map(|unit| (unit.masters, unit.weights)).unzip();
        let buckets = GradientBuckets::new(&layout, group, (stage, setup), (&ledger, &events));
        let (lent, weights, held) = match is_sharded {
            true => {
                let gathers = Gathers::new(
                    &layout,
                    group,
                    (setup.gathering, setup.sizes),
                    (&ledger, &events),
                    (&device, stored),
                );
                (vec![], RunWeights::Sharded(Box::new(gathers)), vec![])
            }
            false => {
                let bytes = |values: &Buffers<Numbers>| values.trained.bytes();
                let held = ledger.hold(Category::ParametersFull, stored.iter().map(bytes).sum());
                let lend = |values: Buffers<Numbers>| lend(values.trained, &device);
                (stored.into_iter().map(lend).collect(), RunWeights::InModel, vec![held])
            }
        };
        let (group, ledger) = (Arc::clone(group), ledger);
        let (is_training, seeds) = (AtomicBool::default(), Mutex::default());
        let run = Run {
            layout,
            group,
            device,
            ledger,
            events,
            mappers,
            buckets,
            weights,
            converts: setup.precision.has_masters(),
            is_training,
            seeds,
        };
        let optimizer = FlatOptimizer::new(setup, &run, stage, masters);
        let run = Arc::new(run);
        let this = Self {
            stage,
            unused: setup.unused,
            sizes: setup.sizes,
            overlap: setup.overlap,
            run,
            lent,
            optimizer,
            _held: held,
            messages: Mutex::default(),
        };
        this.install(setup, &recompute, &facts)?;
        let model = this.converted(this.filled(model), setup.precision.types)?;
        let model = this.broadcast_untrained(model)?;
        Ok((model, this))
    }

    /// Makes the model's units report to this run.
    fn install(&self, setup: &Setup, recompute: &[bool], facts: &[UnitFacts]) -> Result<(), Error> {
        let declared = self.run.layout.declared().iter();
        for ((declared, recomputes), facts) in declared.zip(recompute).zip(facts) {
            let path: Arc<str> = facts.path().unwrap_or_default().into();
            if setup.anomalies == Anomalies::Detect {
                let rank = self.run.group.members()[self.run.group.rank()];
                declared.cell.watch(Some(Watch { path: Arc::clone(&path), rank }));
            }
            let Some(unit) = declared.unit else {
                // Stored with the unit around it, it still may recompute.
                declared.cell.set_recomputes_for_run(*recomputes);
                continue;
            };
            let frees_weights =
                self.run.is_sharded() && setup.gathering.after_forward == AfterForward::Free;
            let run = Arc::clone(&self.run);
            let recomputes = *recomputes;
            declared.cell.install(Installed { run, unit, path, frees_weights, recomputes })?;
        }
        Ok(())
    }

    /// Gives the model's parameters views of the whole weights, where this rank has them.
    fn filled<M: Module>(&self, model: M) -> M {
        let Run { layout, mappers, device, .. } = &*self.run;
        fill(model, (layout, mappers), device, |unit| self.lent.get(unit))
    }

    /// The layout of the trainable parameters.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.run.layout
    }

    /// What this rank holds.
    #[must_use]
    pub fn memory(&self) -> &Ledger {
        &self.run.ledger
    }

    /// Optimizer steps taken.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// What a unit's gradients were divided by before they were summed over ranks.
    fn predivisor(&self, unit: usize) -> f64 {
        self.run.layout.units[unit].predivisor(self.run.group.world())
    }

    fn gathers(&self) -> Option<&Gathers> {
        match &self.run.weights {
            RunWeights::InModel => None,
            RunWeights::Sharded(gathers) => Some(gathers),
        }
    }

    fn told<T>(&self, outcome: Result<T, Error>) -> Result<T, Error> {
        agree::told(&self.run.group, outcome)
    }

    /// Begins a pass over the model: where parameters are sharded, gives it those outside of units.
    ///
    /// # Errors
    ///
    /// What ended a collective. The other ranks are told.
    pub fn begin_pass<M: Module>(&self, model: M) -> Result<M, Error> {
        let Some(gathers) = self.gathers() else { return Ok(model) };
        let (root, persistent) = self.told(gathers.begin_pass())?;
        let Run { layout, mappers, device, .. } = &*self.run;
        let model = fill(model, (layout, mappers), device, |unit| match unit {
            ROOT => Some(&root.weights),
            unit if layout.persistent == Some(unit) => {
                persistent.as_ref().map(|full| &full.weights)
            }
            _ => None,
        });
        gathers.keep_root(root);
        Ok(model)
    }

    /// Ends a pass over the model: where parameters are sharded, frees those outside of units.
    ///
    /// # Errors
    ///
    /// What ended a collective. The other ranks are told.
    pub fn end_pass<M: Module>(&self, model: M) -> Result<M, Error> {
        let Some(gathers) = self.gathers() else { return Ok(model) };
        let Run { layout, device, .. } = &*self.run;
        let model = hollow_out(model, layout, device, |unit| layout.is_in_model(unit));
        self.told(gathers.end_pass())?;
        Ok(model)
    }

    /// Makes what units draw that recompute their activations depend on `seed` from here on. Without it they
    /// ask the device's generator for a seed each time.
    pub fn seed(&self, seed: u64) {
        let mut seeds = self.run.seeds.lock().unwrap_or_else(PoisonError::into_inner);
        *seeds = Some(Seeds::new(seed));
    }

    /// Starts a step.
    pub fn begin_step(&self) {
        self.run.ledger.begin_step();
        self.run.buckets.begin_step();
    }

    /// Starts a micro-batch, and [begins](Self::begin_pass) its pass over the model.
    ///
    /// # Errors
    ///
    /// What ended a collective. The other ranks are told.
    pub fn begin_micro_batch<M: Module>(
        &self,
        model: M,
        micro_batch: MicroBatch,
        counts: Counts,
    ) -> Result<M, Error> {
        self.run.buckets.begin_micro_batch(micro_batch, counts);
        self.run.is_training.store(true, Ordering::Relaxed);
        self.begin_pass(model)
    }

    /// Takes over the gradients of a backward pass, and [ends](Self::end_pass) the pass over the model.
    ///
    /// # Errors
    ///
    /// [`Error::LateGradient`], [`Error::Read`] if the device failed, or what ended a collective. The
    /// other ranks are told.
    pub fn collect<M: Module>(&self, model: M, grads: Gradients) -> Result<M, Error> {
        self.run.is_training.store(false, Ordering::Relaxed);
        self.told(self.run.buckets.backward_finished(&model, grads))?;
        self.end_pass(model)
    }

    /// Waits until gradients are summed over all ranks, and returns the sum of their squares. It is
    /// taken by unit and shard, and these are added in order, whoever holds them: every rank gets the
    /// same bits, under every [`Stage`].
    ///
    /// # Errors
    ///
    /// [`Error::UnusedParameters`] on several ranks where [`Unused`] refuses them,
    /// [`Error::MicroBatches`], or what ended a collective. The other ranks are told.
    pub fn reduce(&self) -> Result<f64, Error> {
        let sum = self.told(self.reduced());
        let messages = self.run.group.buffered_bytes();
        let mut held = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        *held = None;
        *held = Some(self.run.ledger.hold(Category::Communication, messages));
        sum
    }

    /// One optimizer step with the reduced gradients, scaled; returns the updated model. Where weights
    /// are stepped in shards and held whole, the ranks then give each other theirs.
    ///
    /// # Errors
    ///
    /// What ended a collective. The other ranks are told.
    pub fn step<M: Module>(
        &mut self,
        model: M,
        scale: impl Into<GradientScale>,
        rate: impl Into<Rate>,
    ) -> Result<M, Error> {
        let GradientScale { factor, limit } = scale.into();
        if let Some(limit) = limit {
            // Limiting the average is limiting the sum to as many times more.
            self.run.buckets.for_each(|unit, sums, _| {
                gradient::clamp(sums, limit / (factor * self.predivisor(unit)));
            });
        }
        let update = self.optimizer.begin_step(factor, rate.into());
        if self.run.is_sharded() {
            self.step_shards(update);
            return Ok(model);
        }
        let run = Arc::clone(&self.run);
        // Without the model's views the weights are stepped where they are.
        let model = hollow_out(model, &run.layout, &run.device, |_| true);
        let outcome = self.step_lent(update);
        self.told(outcome)?;
        Ok(self.filled(model))
    }

    fn step_shards(&mut self, update: Update) {
        let Self { run, optimizer, .. } = self;
        let RunWeights::Sharded(gathers) = &run.weights else { return };
        gathers.forget_persistent();
        run.buckets.for_each(|unit, gradients, seen| {
            let layout = &run.layout.units[unit];
            let predivisor = layout.predivisor(run.group.world());
            let gradients = Gradients1d { gradients: gradients.as_slice(), seen };
            gathers.with_shard(unit, Kind::Trained, |weights| {
                optimizer.step_unit(update, (unit, layout), weights, gradients, predivisor);
            });
        });
    }

    fn step_lent(&mut self, update: Update) -> Result<(), Error> {
        let Self { run, optimizer, stage, sizes, overlap, .. } = self;
        let mut whole: Vec<Numbers> =
            self.lent.drain(..).map(|lent| lent.trained.into_values()).collect();
        let buffers = run.layout.units.iter().map(|unit| (unit.len, unit.types.compute));
        let ends = parcel::ends(buffers, sizes.gather_bucket);
        let (mut stepped, mut parcels) = (vec![], vec![]);
        let mut error = None;
        run.buckets.for_each(|unit, gradients, seen| {
            let layout = &run.layout.units[unit];
            let owned = stage.owned(layout, &run.group);
            let gradients = Gradients1d { gradients: gradients.as_slice(), seen };
            let predivisor = layout.predivisor(run.group.world());
            let weights = whole[unit].part_mut(owned);
            optimizer.step_unit(update, (unit, layout), weights, gradients, predivisor);
            if *stage == Stage::Nothing {
                return;
            }
            if layout.len > 0 {
                stepped.push((unit, whole[unit].take()));
            }
            if ends[unit] && !stepped.is_empty() {
                // Other units are stepped while the ranks give each other these.
                let sizes = (run.group.world(), sizes.gather_bucket);
                let gather = |unit, weights| run.group.all_gather_unit(unit, weights);
                parcels.push(Parcel::send(std::mem::take(&mut stepped), sizes, gather));
            }
            if *overlap == Overlap::No {
                error = error.take().or(receive(&mut parcels, &mut whole).err());
            }
        });
        error.map_or(Ok(()), Err)?;
        receive(&mut parcels, &mut whole)?;
        self.lent = whole.into_iter().map(|weights| lend(weights, &run.device)).collect();
        Ok(())
    }

    /// Gives every rank rank 0's buffers, and the frozen parameters that are not sharded. Running
    /// statistics differ between ranks, which see different data, until this is called.
    ///
    /// # Errors
    ///
    /// [`Error::Read`], or what ended a collective. The other ranks are told.
    pub fn synchronize_buffers<M: Module>(&self, model: M) -> Result<M, Error> {
        if self.run.group.world() == 1 {
            return Ok(model);
        }
        self.told(self.broadcast_untrained(model))
    }
}

/// Waits for gathered weights.
fn receive(parcels: &mut Vec<Parcel>, whole: &mut [Numbers]) -> Result<(), Error> {
    for parcel in parcels.drain(..) {
        for (unit, weights) in parcel.wait()? {
            whole[unit] = weights;
        }
    }
    Ok(())
}

impl Drop for DataParallel {
    /// Makes the model's units transparent again.
    fn drop(&mut self) {
        for declared in self.run.layout.declared() {
            declared.cell.set_recomputes_for_run(false);
            declared.cell.watch(None);
            declared.cell.uninstall(&self.run);
        }
    }
}

#[cfg(test)]
mod tests;
