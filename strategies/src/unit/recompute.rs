//! Activation checkpointing (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016): a
//! unit's forward pass keeps its inputs alone, and runs again in the backward pass.
//!
//! The first run is on tensors that have autodiff but are in no graph: layers that look whether their
//! device has it, as Burn's `Dropout` and `BatchNorm` do, must do in both runs what they do in training.
//! Running statistics follow the first run alone. The second draws the random numbers of the first.

use std::cell::Cell;

use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use pyroclast_kernels::interop;

use super::backend::Tape;
use super::leaves::{
    Joints, Lift, ParamGrad, detach_inputs, expect_params, lift_params, param_joints, take,
    track_inputs,
};
use super::tape::{bytes, exit_all, nested, roots_of};
use super::values::Values;
use super::{Installed, raise, raise_alone};
use crate::error::Error;
use crate::memory::Category;
use crate::run::Purpose;

thread_local! {
    /// Whether this thread is in the first run of a unit that will run again.
    static FIRST_RUN: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is in the first run of a unit that will run again. Units inside it need no tapes.
pub(super) fn in_first_run() -> bool {
    FIRST_RUN.get()
}

/// Ends the first run when dropped, also when it panics.
struct FirstRun;

impl FirstRun {
    fn begin() -> Self {
        FIRST_RUN.set(true);
        Self
    }
}

impl Drop for FirstRun {
    fn drop(&mut self) {
        FIRST_RUN.set(false);
    }
}

/// Runs `f`, and keeps its inputs to run it again. A unit that reports to nobody hands its parameters'
/// gradients to the caller's graph.
pub(super) fn forward<M, I: Values, O: Values>(
    module: &M,
    unit: (&'static str, Option<&Installed>),
    inputs: I,
    f: impl Fn(&M, I) -> O + Send + 'static,
) -> O
where
    M: Module + 'static,
{
    let (type_name, installed) = unit;
    let installed = installed.cloned();
    let (inputs, mut outer, tracked) = detach_inputs(inputs);
    let device = device_of(module, installed.as_ref());
    let draws = Draws::mark(&device);
    let mut call = 0;
    let output = {
        let mut filled = module.clone();
        let mut weights = None;
        if let Some(Installed { run, unit, .. }) = &installed {
            let begun = raise(run.forward(*unit, Purpose::Training), run);
            call = begun.call;
            if let Some(full) = &begun.weights {
                filled = run.fill(filled, *unit, full);
            }
            weights = begun.weights;
        }
        let module = lift_params(filled, &device, Lift::Untracked);
        let _first_run = FirstRun::begin();
        let output = f(&module, inputs.clone());
        drop((module, weights));
        output
    };
    let roots = roots_of(&output);
    if roots.iter().any(Option::is_some) {
        let error = Error::CapturedTensor { unit: type_name };
        return match &installed {
            Some(installed) => raise(Err(error), &installed.run),
            None => raise_alone(error),
        };
    }
    if installed.is_none() {
        outer.extend(param_joints(module));
    }
    let mut held = None;
    if let Some(Installed { run, unit, .. }) = &installed {
        run.buckets.forward_ran(*unit);
        held = Some(run.ledger.hold(Category::Activations, bytes(&inputs)));
    }
    let (module, of_graph) = (module.clone(), device.clone());
    let tape = Tape::new(roots.len(), move |grads| {
        let mut joints = Joints::default();
        let leaves = track_inputs(inputs, &tracked, &mut joints);
        let again = Again { module, installed: installed.as_ref(), call, device: &device };
        match again.weights() {
            Ok((module, weights)) => {
                if again.installed.is_none() {
                    expect_params(&module, &mut joints);
                }
                let output = draws.replay(&device, || f(&module, leaves));
                let mut grads = nested(roots_of(&output), grads);
                drop(output);
                let param_grads: Vec<ParamGrad> = match (&mut grads, again.installed) {
                    (Some(grads), Some(_)) => take(&module, grads),
                    _ => vec![],
                };
                drop((module, weights, held));
                let input_grads = joints.take(grads.as_mut());
                drop(grads);
                if let Some(Installed { run, unit, .. }) = again.installed {
                    run.backward_ran(*unit, call, param_grads);
                }
                input_grads
            }
            Err(error) => {
                if let Some(Installed { run, .. }) = again.installed {
                    run.fail(error);
                }
                joints.take(None)
            }
        }
    });
    let token = tape.enter(outer, &of_graph);
    exit_all(output, tape, token)
}

/// The second run.
struct Again<'a, M> {
    module: M,
    installed: Option<&'a Installed>,
    call: usize,
    device: &'a Device,
}

impl<M: Module> Again<'_, M> {
    /// The module with its parameters as leaves and running statistics of its own, and what its weights
    /// are a part of.
    fn weights(&self) -> Result<(M, Option<std::sync::Arc<crate::weights::FullUnit>>), Error> {
        let mut module = self.module.clone();
        let mut weights = None;
        if let Some(Installed { run, unit, .. }) = self.installed {
            weights = run.backward(*unit, self.call)?;
            if let Some(full) = &weights {
                module = run.fill(module, *unit, full);
            }
        }
        let detached = module.valid().train();
        Ok((lift_params(detached, self.device, Lift::Tracked), weights))
    }
}

/// The device of a unit's graph.
fn device_of<M: Module>(module: &M, installed: Option<&Installed>) -> Device {
    match installed {
        Some(installed) => installed.run.device.clone(),
        None => module.devices().into_iter().next().unwrap_or_else(Device::flex).autodiff(),
    }
}

/// The random numbers that a run draws. Burn's generator of a device belongs to the process and cannot be
/// asked for its state, but it can be given one.
#[derive(Clone, Copy, Debug)]
struct Draws {
    seed: u64,
}

impl Draws {
    /// Begins a run whose numbers can be drawn again.
    fn mark(device: &Device) -> Self {
        let seed = draw(device);
        device.seed(seed);
        Self { seed }
    }

    /// Runs `f` with the numbers of the run that was marked, and goes on with others.
    fn replay<R>(self, device: &Device, f: impl FnOnce() -> R) -> R {
        let onward = draw(device);
        device.seed(self.seed);
        let result = f();
        device.seed(onward);
        result
    }
}

/// A seed out of the device's generator.
fn draw(device: &Device) -> u64 {
    let device = device.clone().without_autodiff();
    let numbers = Tensor::<1>::random([4], Distribution::Default, &device);
    let mut seed = 0u64;
    // A device that fails here fails in all that follows, which says so.
    let _ = interop::read_all(vec![numbers], |_, values| {
        seed = values.iter().fold(0, |seed, value| {
            (seed ^ u64::from(value.to_bits())).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
    });
    seed
}

/// Takes the place of the unit's draw in a test.
#[cfg(test)]
pub(super) fn mark_for_test(device: &Device) -> u64 {
    Draws::mark(device).seed
}
