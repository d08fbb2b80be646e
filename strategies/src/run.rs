//! One rank's training run, as the units of its model see it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor};

use crate::buckets::GradientBuckets;
use crate::error::Error;
use crate::events::{Event, Events};
use crate::gathers::Gathers;
use crate::group::ProcessGroup;
use crate::layout::{Kind, Layout};
use crate::memory::Ledger;
use crate::parameters;
use crate::unit::{self, ParamGrad, Seeds};
use crate::weights::{FullUnit, Mappers, Weights, hollow};

/// What the units of a model report to.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) layout: Arc<Layout>,
    pub(crate) group: Arc<ProcessGroup>,
    /// With autodiff.
    pub(crate) device: Device,
    pub(crate) ledger: Ledger,
    pub(crate) events: Events,
    pub(crate) mappers: Mappers,
    pub(crate) buckets: GradientBuckets,
    pub(crate) weights: RunWeights,
    /// Whether units compute in different types.
    pub(crate) converts: bool,
    /// Whether a micro-batch is under way.
    pub(crate) is_training: AtomicBool,
    /// Where units that recompute get their seeds, if whoever trains has said.
    pub(crate) seeds: Mutex<Option<Seeds>>,
}

/// Where the weights of a unit are when it does not run.
#[derive(Debug)]
pub(crate) enum RunWeights {
    /// In the model.
    InModel,
    /// In shards.
    Sharded(Box<Gathers>),
}

/// A forward pass that has begun.
#[derive(Debug)]
pub(crate) struct Forward {
    /// The unit's weights, where the model does not hold them.
    pub(crate) weights: Option<Arc<FullUnit>>,
    /// By which the backward pass finds what belongs to it.
    pub(crate) call: usize,
}

/// Whether a forward pass will have a backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// It will not.
    Inference,
    /// It will.
    Training,
}

impl Run {
    fn gathers(&self) -> Option<&Gathers> {
        match &self.weights {
            RunWeights::InModel => None,
            RunWeights::Sharded(gathers) => Some(gathers),
        }
    }

    /// Whether a micro-batch is under way, so that units train whatever their inputs are.
    pub(crate) fn is_training(&self) -> bool {
        self.is_training.load(Ordering::Relaxed)
    }

    pub(crate) fn next_seed(&self) -> Option<u64> {
        let mut seeds = self.seeds.lock().unwrap_or_else(PoisonError::into_inner);
        seeds.as_mut().map(Seeds::next)
    }

    /// Whether the model's units are hollow.
    pub(crate) fn is_sharded(&self) -> bool {
        self.gathers().is_some()
    }

    /// Begins a unit's forward pass.
    ///
    /// # Errors
    ///
    /// What ended the collective that gathers its weights.
    pub(crate) fn forward(&self, unit: usize, purpose: Purpose) -> Result<Forward, Error> {
        let comes_back = purpose == Purpose::Training;
        let gathered = self.gathers().map(|gathers| gathers.forward(unit, comes_back));
        let gathered = gathered.transpose()?;
        self.events.push(Event::Forward(unit));
        Ok(match gathered {
            Some((weights, call)) => Forward { weights: Some(weights), call },
            None => Forward { weights: None, call: 0 },
        })
    }

    /// Begins the backward pass of a forward pass.
    ///
    /// # Errors
    ///
    /// As [`Self::forward`].
    pub(crate) fn backward(
        &self,
        unit: usize,
        call: usize,
    ) -> Result<Option<Arc<FullUnit>>, Error> {
        let weights = self.gathers().map(|gathers| gathers.backward(call)).transpose()?;
        self.events.push(Event::Backward(unit));
        Ok(weights)
    }

    /// Ends the backward pass of a forward pass.
    pub(crate) fn backward_ran(&self, unit: usize, call: usize, grads: Vec<ParamGrad>) {
        self.buckets.unit_finished(unit, grads);
        if let Some(gathers) = self.gathers() {
            gathers.backward_ran(call);
        }
    }

    /// Ends the run on all ranks with an error that a backward pass cannot return.
    pub(crate) fn fail(&self, error: Error) {
        self.group.abort_signal().raise(self.group.members()[self.group.rank()], &error);
        self.buckets.fail(error);
    }

    /// Gives the hollow parameters of a unit within `module` tensors that share its weights. They have
    /// no autodiff, but for frozen ones that are constants in training.
    pub(crate) fn fill<M: Module>(
        &self,
        module: M,
        (unit, full): (usize, &FullUnit),
        purpose: Purpose,
    ) -> M {
        module.map(&mut FillUnit { run: self, unit, weights: &full.weights, purpose })
    }

    /// Converts what a unit that computes in another type uses of the model's other parameters. Running
    /// statistics stay as they are.
    pub(crate) fn in_type_of<M: Module>(&self, unit: usize, module: M) -> M {
        let compute = self.layout.units[unit].types.compute;
        if !self.converts {
            return module;
        }
        parameters::convert(module, |id| {
            // A unit within this one converts what it uses itself.
            let is_inside = unit::enclosing().iter().any(|cell| cell.is_installed());
            (self.layout.is_converted(id) && !is_inside).then_some(compute)
        })
    }

    /// Lets `change` see `module` as if its hollow parameters had numbers: one each.
    pub(crate) fn veiled<M: Module>(&self, module: M, change: impl FnOnce(M) -> M) -> M {
        let mut veil = Veil { run: self, veiled: HashSet::new() };
        let module = change(module.map(&mut veil));
        module.map(&mut Unveil { run: self, veiled: &veil.veiled })
    }
}

struct FillUnit<'a> {
    run: &'a Run,
    unit: usize,
    weights: &'a Weights,
    purpose: Purpose,
}

impl ModuleMapper for FillUnit<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(stored) = self.run.layout.stored(param.id) else { return param };
        if stored.unit != self.unit {
            return param;
        }
        let tensor = match (stored.kind, self.purpose) {
            (Kind::Frozen, Purpose::Training) => self.weights.leaf(stored, &self.run.device),
            _ => self.weights.view(stored),
        };
        self.run.mappers.filled(param.id, tensor)
    }
}

struct Veil<'a> {
    run: &'a Run,
    veiled: HashSet<ParamId>,
}

impl ModuleMapper for Veil<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(stored) = self.run.layout.stored(param.id) else { return param };
        if param.is_initialized() {
            return param;
        }
        self.veiled.insert(param.id);
        let veil = Tensor::zeros([1; D], &self.run.device);
        let veil = veil.set_require_grad(stored.kind == Kind::Trained);
        self.run.mappers.filled(param.id, veil)
    }
}

struct Unveil<'a> {
    run: &'a Run,
    veiled: &'a HashSet<ParamId>,
}

impl ModuleMapper for Unveil<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.run.layout.stored(param.id) {
            Some(stored) if self.veiled.contains(&param.id) => {
                // Burn may have moved it, or taken its autodiff.
                hollow(param.id, stored, &param.base().device())
            }
            _ => param,
        }
    }
}
