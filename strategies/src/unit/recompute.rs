//! Activation checkpointing (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016): a
//! unit's forward pass keeps its inputs alone, and runs again in the backward pass.
//!
//! The first run is on tensors that have autodiff but are in no graph: layers that look whether their
//! device has it, as Burn's `Dropout` and `BatchNorm` do, must do in both runs what they do in training.
//! Running statistics follow the first run alone. The second draws the random numbers of the first.

use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, DispatchTensor, Tensor};

use super::backend::{OutputGrads, Tape};
use super::draws::Draws;
use super::leaves::{
    Joints, Lift, ParamGrad, detach_inputs, expect_params, lift_params, param_joints, take,
    track_inputs,
};
use super::passes::{self, Pass};
use super::tape::{bytes, exit_all, nested, roots_of};
use super::values::Values;
use super::{Installed, UnitCell, raise, raise_alone};
use crate::error::Error;
use crate::memory::Category;
use crate::parameters;
use crate::run::Purpose;
use crate::weights::FullUnit;

/// Runs `f`, and keeps its inputs to run it again. A unit that reports to nobody hands its parameters'
/// gradients to the caller's graph.
pub(super) fn forward<M, I: Values, O: Values>(
    module: &M,
    (cell, installed): (&Arc<UnitCell>, Option<&Installed>),
    inputs: I,
    f: impl Fn(&M, I) -> O + Send + 'static,
) -> O
where
    M: Module + 'static,
{
    let device = device_of(module, installed);
    // Before anything else: it makes lazy parameters draw their numbers.
    let params = if installed.is_none() { param_joints(module) } else { vec![] };
    let (inputs, mut outer, tracked) = detach_inputs(inputs, &device);
    outer.extend(params);
    let draws = Draws::of(cell, &device);
    let (output, call) = {
        let begun = installed.map(|i| raise(i.run.forward(i.unit, Purpose::Training), &i.run));
        let (weights, call) = begun.map_or((None, 0), |begun| (begun.weights, begun.call));
        let filled = filled(module.clone(), installed, weights.as_deref());
        let module = lift_params(filled, &device, Lift::Untracked);
        let run = || draws.run(|| f(&module, inputs.clone()));
        (passes::within(Pass::FirstRun, run), call)
    };
    if roots_of(&output).iter().any(Option::is_some) {
        let error = Error::CapturedTensor { unit: cell.type_name };
        return match installed {
            Some(installed) => raise(Err(error), &installed.run),
            None => raise_alone(error),
        };
    }
    let held = installed.map(|Installed { run, unit, .. }| {
        run.buckets.forward_ran(*unit);
        run.ledger.hold(Category::Activations, bytes(&inputs))
    });
    let again = Again {
        module: module.clone(),
        cell: Arc::clone(cell),
        installed: installed.cloned(),
        call,
        device: device.clone(),
        draws,
    };
    let tape = Tape::new(roots_of(&output).len(), move |grads| {
        let _held = held;
        again.backward(inputs, &tracked, grads, f)
    });
    let token = tape.enter(outer, &device);
    exit_all(output, tape, token)
}

/// The module with the weights that were gathered for it, if any were.
fn filled<M: Module>(module: M, installed: Option<&Installed>, weights: Option<&FullUnit>) -> M {
    match (installed, weights) {
        (Some(Installed { run, unit, .. }), Some(full)) => {
            run.in_type_of(*unit, run.fill(module, (*unit, full), Purpose::Training))
        }
        (Some(Installed { run, unit, .. }), None) => run.in_type_of(*unit, module),
        (None, _) => module,
    }
}

/// The second run.
struct Again<M> {
    module: M,
    cell: Arc<UnitCell>,
    installed: Option<Installed>,
    call: usize,
    device: Device,
    draws: Draws,
}

impl<M: Module> Again<M> {
    fn backward<I: Values, O: Values>(
        self,
        inputs: I,
        tracked: &[bool],
        grads: OutputGrads,
        f: impl Fn(&M, I) -> O,
    ) -> Vec<DispatchTensor> {
        let mut joints = Joints::default();
        let leaves = track_inputs(inputs, tracked, &mut joints);
        let installed = self.installed.as_ref();
        let gathered = installed.map(|i| i.run.backward(i.unit, self.call)).transpose();
        let weights = match (gathered, installed) {
            (Ok(weights), _) => weights.flatten(),
            (Err(error), installed) => {
                installed.iter().for_each(|installed| installed.run.fail(error.clone()));
                return joints.take(None);
            }
        };
        let filled = filled(self.module, installed, weights.as_deref());
        let module = lift_params(filled, &self.device, Lift::Tracked);
        if installed.is_none() {
            expect_params(&module, &mut joints);
        }
        let statistics = Statistics::of(&module);
        let output = self.draws.again(&self.cell, || f(&module, leaves));
        statistics.restore(&module);
        let mut grads = nested(roots_of(&output), grads);
        drop(output);
        let param_grads: Vec<ParamGrad> = match (&mut grads, installed) {
            (Some(grads), Some(_)) => take(&module, grads),
            _ => vec![],
        };
        drop((module, weights));
        let input_grads = joints.take(grads.as_mut());
        drop(grads);
        if let Some(Installed { run, unit, .. }) = installed {
            run.backward_ran(*unit, self.call, param_grads);
        }
        input_grads
    }
}

/// The running statistics of a module, which modules that are clones of each other share.
struct Statistics(Vec<(ParamId, DispatchTensor)>);

impl Statistics {
    fn of<M: Module>(module: &M) -> Self {
        // Burn applies the last update when a module is put into validation.
        let _synchronized = module.valid();
        let mut read = ReadStatistics(vec![]);
        module.visit(&mut read);
        Self(read.0)
    }

    /// Takes back what has happened since.
    fn restore<M: Module>(self, module: &M) {
        if !self.0.is_empty() {
            let _synchronized = module.valid();
            // Burn's running statistics change in place.
            let _restored = module.clone().map(&mut RestoreStatistics(self.0));
        }
    }
}

/// Reads what is not trained: running statistics, and frozen parameters, which stay as they are.
struct ReadStatistics(Vec<(ParamId, DispatchTensor)>);

impl ModuleVisitor for ReadStatistics {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_initialized() && !parameters::is_trainable(param) {
            self.0.push((param.id, param.base().into_dispatch()));
        }
    }
}

struct RestoreStatistics(Vec<(ParamId, DispatchTensor)>);

impl ModuleMapper for RestoreStatistics {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.0.iter().find(|(id, _)| *id == param.id) {
            Some((id, value)) => Param::initialized(*id, Tensor::from_dispatch(value.clone())),
            None => param,
        }
    }
}

/// The device of a unit's graph.
pub(super) fn device_of<M: Module>(module: &M, installed: Option<&Installed>) -> Device {
    match installed {
        Some(installed) => installed.run.device.clone(),
        None => module.devices().into_iter().next().unwrap_or_else(Device::flex).autodiff(),
    }
}
