//! Data parallelism: every rank sees its own data, and gradients are summed. What the ranks hold in
//! shards is a [`Stage`]; there is one path for all of them.
//!
//! A single rank is the group of size one and takes the same path.

mod weights;

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Gradients;
use pyroclast_kernels::gradient;

use crate::buckets::{Counts, GradientBuckets, MicroBatch};
use crate::collectives::ReduceOp;
use crate::error::Error;
use crate::group::ProcessGroup;
use crate::layout::{Layout, ParamInfo};
use crate::optimizer::{FlatOptimizer, Gradients1d, Optimizer, ParamGroup};
use crate::parameters;
use crate::shard::shard;
use crate::stage::Stage;
use crate::unit::Installed;
use weights::{Weights, WriteBack};

/// One rank's part in the training of one model: layout, gradient buckets and optimizer.
///
/// A step is: [`begin_step`](Self::begin_step); for each micro-batch
/// [`begin_micro_batch`](Self::begin_micro_batch), forward, backward,
/// [`collect`](Self::collect); then [`reduce`](Self::reduce) and [`step`](Self::step).
#[derive(Debug)]
pub struct DataParallel {
    group: Arc<ProcessGroup>,
    stage: Stage,
    layout: Arc<Layout>,
    buckets: Arc<GradientBuckets>,
    optimizer: FlatOptimizer,
}

/// The optimizer, the groups of parameters for which it has other settings, and what is sharded.
#[derive(Clone, Debug, Default)]
pub struct OptimizerSetup {
    /// What each rank holds only its own shard of.
    pub stage: Stage,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Groups, of which the first that matches a parameter applies to it.
    pub groups: Vec<ParamGroup>,
}

impl DataParallel {
    /// Lays out `model`, gives every rank rank 0's numbers, and makes the model's units report to
    /// this run. Returns the model with those numbers.
    ///
    /// # Errors
    ///
    /// [`Error::NothingToTrain`], [`Error::LayoutMismatch`], [`Error::UnitInUse`], or what ended a
    /// collective. The other ranks are told.
    pub fn new<M: Module>(
        model: M,
        group: &Arc<ProcessGroup>,
        setup: &OptimizerSetup,
    ) -> Result<(M, Self), Error> {
        told(group, Self::begin(model, group, setup))
    }

    fn begin<M: Module>(
        model: M,
        group: &Arc<ProcessGroup>,
        setup: &OptimizerSetup,
    ) -> Result<(M, Self), Error> {
        let layout = Arc::new(Layout::of(&model, group.world())?);
        check_same_layout(&layout, group)?;
        // One rank owns everything.
        let stage = if group.world() == 1 { Stage::Nothing } else { setup.stage };
        let weights = flatten(&model, &layout)?
            .into_iter()
            .map(|unit| group.broadcast(unit, 0).wait())
            .collect::<Result<Vec<_>, Error>>()?;
        let model = broadcast_untrained(model, &layout, group)?;
        let model = WriteBack::all(model, &layout, &weights)?;
        let owned = layout.units.iter().zip(weights).map(|(unit, weights)| {
            let owned = stage.owned(unit, group);
            let own =
                if stage == Stage::Nothing { weights } else { weights[owned.clone()].to_vec() };
            (owned, own)
        });
        let optimizer =
            FlatOptimizer::new(setup.optimizer, &setup.groups, &layout, owned.collect());
        let (group, shared) = (Arc::clone(group), Arc::clone(&layout));
        let buckets = Arc::new(GradientBuckets::new(shared, Arc::clone(&group), stage));
        let this = Self { group, stage, layout, buckets, optimizer };
        for (unit, cell) in this.layout.cells().iter().enumerate() {
            cell.install(Installed { buckets: Arc::clone(&this.buckets), unit: unit + 1 })?;
        }
        Ok((model, this))
    }

    /// The layout of the trainable parameters.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Optimizer steps taken.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Starts a step.
    pub fn begin_step(&self) {
        self.buckets.begin_step();
    }

    /// Starts a micro-batch. During the last one, units are reduced as their gradients become final.
    pub fn begin_micro_batch(&self, micro_batch: MicroBatch, counts: Counts) {
        self.buckets.begin_micro_batch(micro_batch, counts);
    }

    /// Takes over the gradients of a backward pass.
    ///
    /// # Errors
    ///
    /// [`Error::LateGradient`], [`Error::Read`] if the device failed, or under [`Stage::Gradients`] what
    /// ended a collective. The other ranks are told.
    pub fn collect<M: Module>(&self, model: &M, grads: Gradients) -> Result<(), Error> {
        told(&self.group, self.buckets.backward_finished(model, grads))
    }

    /// Waits until gradients are summed over all ranks, and returns the sum of their squares. It is
    /// taken by unit and shard, and these are added in order, whoever holds them: every rank gets the
    /// same bits, under every [`Stage`].
    ///
    /// # Errors
    ///
    /// [`Error::UnusedParameters`] on several ranks, or what ended a collective. The other ranks are
    /// told.
    pub fn reduce(&self) -> Result<f64, Error> {
        told(&self.group, self.buckets.finish_step())?;
        told(&self.group, self.sum_of_squares())
    }

    fn sum_of_squares(&self) -> Result<f64, Error> {
        let (world, rank) = (self.group.world(), self.group.rank());
        let units = self.layout.units.len();
        // By rank and unit.
        let mut sums = vec![0.0; world * units];
        self.buckets.for_each(|unit, gradients, _| match self.stage {
            Stage::Nothing => {
                for owner in 0..world {
                    let own = shard(gradients.len(), world, owner);
                    sums[owner * units + unit] = gradient::sum_of_squares(&gradients[own]);
                }
            }
            Stage::Optimizer | Stage::Gradients => {
                sums[rank * units + unit] = gradient::sum_of_squares(gradients);
            }
        });
        if self.stage != Stage::Nothing {
            sums = self.group.all_gather(sums).wait()?;
        }
        let of_unit = |unit: usize| -> f64 { (0..world).map(|r| sums[r * units + unit]).sum() };
        Ok((0..units).map(of_unit).sum())
    }

    /// One optimizer step with the reduced gradients times `scale`; returns the updated model. Where
    /// weights are stepped in shards, the ranks then give each other theirs.
    ///
    /// # Errors
    ///
    /// What ended a collective. The other ranks are told.
    pub fn step<M: Module>(&mut self, model: M, scale: f32, lr: f64) -> Result<M, Error> {
        let Self { optimizer, layout, buckets, .. } = self;
        let update = optimizer.begin_step(scale, lr);
        buckets.for_each(|unit, gradients, seen| {
            optimizer.step_unit(update, unit, &layout.units[unit], Gradients1d { gradients, seen });
        });
        told(&self.group, self.write_back(model))
    }

    /// Gives every rank rank 0's frozen parameters and buffers. Running statistics differ between
    /// ranks, which see different data, until this is called.
    ///
    /// # Errors
    ///
    /// [`Error::Read`], or what ended a collective.
    pub fn synchronize_buffers<M: Module>(&self, model: M) -> Result<M, Error> {
        if self.group.world() == 1 {
            return Ok(model);
        }
        broadcast_untrained(model, &self.layout, &self.group)
    }

    /// The optimizer's state, on rank 0: for each of its [names](Optimizer::state_names) and each
    /// trainable parameter, as many numbers as the parameter has. Other ranks get none, and must call
    /// it all the same.
    ///
    /// # Errors
    ///
    /// What ended a collective. The other ranks are told.
    pub fn state(&self) -> Result<Vec<StateEntry<'_>>, Error> {
        told(&self.group, self.gather_state())
    }

    fn gather_state(&self) -> Result<Vec<StateEntry<'_>>, Error> {
        let mut entries = vec![];
        for (unit, layout) in self.layout.units.iter().enumerate() {
            let names = self.optimizer.state_names().iter().copied();
            for (name, own) in names.zip(self.optimizer.state(unit)) {
                let all = match self.stage {
                    Stage::Nothing => own.clone(),
                    Stage::Optimizer | Stage::Gradients => {
                        let mut all = vec![0.0; layout.len];
                        all[self.optimizer.owned(unit).clone()].copy_from_slice(own);
                        self.group.gather(all, 0).wait()?
                    }
                };
                if self.group.rank() == 0 {
                    entries.extend(layout.params.iter().map(|slot| StateEntry {
                        name,
                        info: &slot.info,
                        values: all[slot.range.clone()].to_vec(),
                    }));
                }
            }
        }
        Ok(entries)
    }

    /// Continues from the numbers that `model` now has, after `steps` steps. `find` gets a state's
    /// name and a parameter's path.
    ///
    /// # Errors
    ///
    /// [`Error::MissingValues`] or [`Error::WrongLength`], or [`Error::Read`] if the device failed.
    pub fn restore<M: Module>(
        &mut self,
        model: M,
        steps: u64,
        mut find: impl FnMut(&str, &str) -> Option<Vec<f32>>,
    ) -> Result<M, Error> {
        self.optimizer.set_steps(steps);
        for (unit, weights) in flatten(&model, &self.layout)?.into_iter().enumerate() {
            self.optimizer.set_master(unit, &weights);
        }
        for (unit, slot) in self.layout.slots() {
            let path = &slot.info.path;
            for (position, name) in self.optimizer.state_names().iter().enumerate() {
                let values = find(name, path)
                    .ok_or_else(|| Error::MissingValues(format!("{name}.{path}")))?;
                if values.len() != slot.range.len() {
                    let (path, expected) = (path.clone(), slot.range.len());
                    return Err(Error::WrongLength { path, expected, found: values.len() });
                }
                self.optimizer.set_state(unit, position, &slot.range, &values);
            }
        }
        Ok(model)
    }

    /// Gives the model the master weights.
    fn write_back<M: Module>(&self, model: M) -> Result<M, Error> {
        let weights = match self.stage {
            Stage::Nothing => Weights::Here(&self.optimizer),
            Stage::Optimizer | Stage::Gradients => {
                Weights::gathered(&self.group, &self.layout, &self.optimizer)
            }
        };
        WriteBack::new(&self.layout, weights).run(model)
    }
}

/// One name of the optimizer's state for one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct StateEntry<'a> {
    /// Which state, as torch names it.
    pub name: &'static str,
    /// Of which parameter.
    pub info: &'a ParamInfo,
    /// As many numbers as the parameter has.
    pub values: Vec<f32>,
}

impl Drop for DataParallel {
    /// Makes the model's units transparent again.
    fn drop(&mut self) {
        for cell in self.layout.cells() {
            cell.uninstall(&self.buckets);
        }
    }
}

/// Tells the other ranks of a failure, so that none waits for this one.
fn told<T>(group: &ProcessGroup, outcome: Result<T, Error>) -> Result<T, Error> {
    outcome.inspect_err(|error| group.abort_signal().raise(group.rank(), error))
}

/// All ranks learn whether all have rank 0's layout, so that none is left waiting.
fn check_same_layout(layout: &Layout, group: &ProcessGroup) -> Result<(), Error> {
    let mine = layout.fingerprint().into_bytes();
    // The length goes first: a broadcast needs buffers of one length.
    let length = group.broadcast(vec![mine.len() as f64], 0).wait()?;
    let mut theirs = mine.clone();
    theirs.resize(length[0] as usize, 0);
    let differs = group.broadcast(theirs, 0).wait()? != mine;
    let differing = group.all_reduce(vec![f64::from(u8::from(differs))], ReduceOp::Sum).wait()?;
    if differs {
        return Err(Error::LayoutMismatch { rank: group.rank() });
    }
    if differing[0] > 0.0 {
        // The rank that differs raises its own error, which ends this barrier.
        group.barrier()?;
    }
    Ok(())
}

/// The model's trainable numbers, one flat buffer per unit.
fn flatten<M: Module>(model: &M, layout: &Layout) -> Result<Vec<Vec<f32>>, Error> {
    let mut flat: Vec<Vec<f32>> = layout.units.iter().map(|unit| vec![0.0; unit.len]).collect();
    for named in parameters::read_where(model, |id| layout.locate(id).is_some())? {
        if let Some(place) = layout.locate(named.id) {
            flat[place.0][layout.slot(place).range.clone()].copy_from_slice(&named.values);
        }
    }
    Ok(flat)
}

/// Gives every rank rank 0's frozen parameters and buffers.
fn broadcast_untrained<M: Module>(
    model: M,
    layout: &Layout,
    group: &ProcessGroup,
) -> Result<M, Error> {
    let mut untrained = HashMap::new();
    for named in parameters::read_where(&model, |id| layout.locate(id).is_none())? {
        untrained.insert(named.id, group.broadcast(named.values, 0).wait()?);
    }
    parameters::write_where(model, |id, _| untrained.remove(&id))
}

#[cfg(test)]
mod tests;
