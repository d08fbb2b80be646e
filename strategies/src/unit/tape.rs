//! A unit's forward pass in training: on a graph of its own, joined to the caller's.
//!
//! Burn runs a backward pass by depth, so an operation on a parameter, which is a leaf, would run
//! only after the whole model's backward. A graph per unit makes depth local: when the backward pass
//! reaches the unit, it runs the unit's graph to its end, hands over the gradients of the unit's
//! parameters, and goes on with the gradients of the unit's inputs.

use std::any::TypeId;
use std::sync::{Arc, PoisonError};

use burn::module::Module;
use burn::tensor::{Bool, DispatchTensor, Gradients, Int, Tensor};

use super::backend::{OutputGrads, Tape, inject};
use super::leaves::{
    Joints, Lift, ParamGrad, SharedLeaves, any_trained, lift_inputs, lift_params, take,
    unshard_params,
};
use super::passes::{self, Pass};
use super::unshard::Source;
use super::values::{TensorMap, Values};
use super::{Installed, UnitCell, raise};
use crate::error::Error;
use crate::memory::Category;
use crate::run::{Forward, Purpose, Run};
use crate::weights::FullUnit;

/// Where the weights of a pass are between forward and backward.
enum Weights<M> {
    /// In the leaves of the pass, which the module holds.
    Leaves { module: M, full: Option<Arc<FullUnit>> },
    /// Nowhere, but for those that the unit shares with others.
    Freed { source: Source, shared: SharedLeaves },
}

/// Runs `f`, and keeps what its backward pass needs, but for weights where `frees_weights`.
pub(super) fn forward<M, I: Values, O: Values>(
    module: &M,
    (installed, cell): (&Installed, &UnitCell),
    inputs: I,
    f: impl Fn(&M, I) -> O + 'static,
) -> O
where
    M: Module + 'static,
{
    let Installed { run, unit, frees_weights, .. } = installed.clone();
    let Forward { weights: full, call } = raise(run.forward(unit, Purpose::Training), &run);
    let filled = match &full {
        Some(full) => run.fill(module.clone(), (unit, full), Purpose::Training),
        None => module.clone(),
    };
    let filled = run.in_type_of(unit, filled);
    raise(check_captures(&filled, cell, &inputs, &f), &run);

    let mut joints = Joints::default();
    let held = run.ledger.hold(Category::Activations, bytes(&inputs));
    let leaves = lift_inputs(inputs, &run.device, &mut joints);
    let (output, weights) = match full {
        // Where nothing is trained, nothing is kept for a backward pass.
        Some(full) if frees_weights && (!joints.outer.is_empty() || any_trained(&filled)) => {
            let source = Source::default();
            source.open(full);
            let (module, shared) = unshard_params(filled, &run, unit, &source);
            let output = f(&module, leaves);
            source.close();
            (output, Weights::Freed { source, shared })
        }
        full => {
            let module = lift_params(filled, &run.device, Lift::Tracked);
            (f(&module, leaves), Weights::Leaves { module, full })
        }
    };
    let roots = roots_of(&output);
    if roots.iter().all(Option::is_none) {
        return output;
    }
    run.buckets.forward_ran(unit);
    let device = run.device.clone();
    let outer = std::mem::take(&mut joints.outer);
    let tape = Tape::new(roots.len(), move |grads| {
        let outcome = backward(&run, (unit, call), weights, (roots, grads));
        drop(held);
        match outcome {
            Ok((mut grads, param_grads)) => {
                let input_grads = joints.take(grads.as_mut());
                drop(grads);
                run.backward_ran(unit, call, param_grads);
                input_grads
            }
            Err(error) => {
                run.fail(error);
                joints.take(None)
            }
        }
    });
    let token = tape.enter(outer, &device);
    output.map(&mut Exits { tape, token, position: 0 })
}

/// Refuses a function that captures a tracked tensor. Such a tensor would join the unit's graph to the
/// caller's, and the backward pass would wait for itself. The first time that a unit runs a function, it
/// runs it before on tensors without autodiff: what is tracked all the same comes from elsewhere.
fn check_captures<M: Module, I: Values, O: Values, F: Fn(&M, I) -> O + 'static>(
    module: &M,
    cell: &UnitCell,
    inputs: &I,
    f: &F,
) -> Result<(), Error> {
    let checked = || cell.checked.lock().unwrap_or_else(PoisonError::into_inner);
    if checked().contains(&TypeId::of::<F>()) {
        return Ok(());
    }
    let inputs = inputs.clone().map(&mut WithoutAutodiff);
    let output = passes::within(Pass::Trial, || f(&module.valid(), inputs));
    if roots_of(&output).iter().any(Option::is_some) {
        return Err(Error::CapturedTensor { unit: cell.type_name });
    }
    checked().insert(TypeId::of::<F>());
    Ok(())
}

struct WithoutAutodiff;

impl TensorMap for WithoutAutodiff {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        tensor.without_autodiff()
    }

    fn int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        tensor.without_autodiff()
    }

    fn bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        tensor.without_autodiff()
    }
}

/// The unit's own backward pass: its gradients, and those of its parameters.
fn backward<M: Module>(
    run: &Run,
    (unit, call): (usize, usize),
    weights: Weights<M>,
    (roots, grads): (Roots, OutputGrads),
) -> Result<(Option<Gradients>, Vec<ParamGrad>), Error> {
    let again = run.backward(unit, call)?;
    match weights {
        Weights::Leaves { module, full } => {
            let mut grads = nested(roots, grads);
            let param_grads = grads.as_mut().map(|grads| take(&module, grads)).unwrap_or_default();
            drop((module, full, again));
            Ok((grads, param_grads))
        }
        Weights::Freed { source, shared } => {
            if let Some(again) = again {
                source.open(again);
            }
            let mut grads = nested(roots, grads);
            source.close();
            let mut param_grads = source.take_grads();
            param_grads.extend(grads.as_mut().map(|g| shared.take(g)).unwrap_or_default());
            Ok((grads, param_grads))
        }
    }
}

/// Outputs on the unit's graph, where they are tracked.
pub(super) type Roots = Vec<Option<DispatchTensor>>;

/// The float outputs of a unit, those that are tracked with their place in the unit's graph.
pub(super) fn roots_of<O: Values>(output: &O) -> Roots {
    let mut collect = CollectRoots(vec![]);
    let _ = output.clone().map(&mut collect);
    collect.0
}

struct CollectRoots(Roots);

impl TensorMap for CollectRoots {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.0.push(tensor.is_tracked().then(|| tensor.clone().into_dispatch()));
        tensor
    }
}

/// A backward pass from `roots` with the gradients that they have; none if none has any.
pub(super) fn nested(roots: Roots, grads: OutputGrads) -> Option<Gradients> {
    let injected = roots.into_iter().zip(grads).filter_map(|(root, grad)| Some((root?, grad?)));
    let total = injected.map(|(root, grad)| inject(root, grad)).reduce(|a, b| a + b)?;
    Some(total.backward())
}

/// Puts the tracked float outputs of a unit into the caller's graph.
struct Exits {
    tape: Tape,
    token: DispatchTensor,
    position: usize,
}

impl TensorMap for Exits {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.position += 1;
        match tensor.is_tracked() {
            true => self.tape.exit(&self.token, tensor.inner(), self.position - 1),
            false => tensor,
        }
    }
}

/// Bytes of float tensors.
pub(super) fn bytes<V: Values>(values: &V) -> usize {
    let mut count = CountBytes(0);
    let _ = values.clone().map(&mut count);
    count.0
}

struct CountBytes(usize);

impl TensorMap for CountBytes {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.0 += tensor.shape().num_elements() * tensor.dtype().size();
        tensor
    }
}

/// Puts all float outputs of an untracked pass into the caller's graph.
pub(super) fn exit_all<O: Values>(output: O, tape: Tape, token: DispatchTensor) -> O {
    output.map(&mut ExitAll { tape, token, position: 0 })
}

struct ExitAll {
    tape: Tape,
    token: DispatchTensor,
    position: usize,
}

impl TensorMap for ExitAll {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.position += 1;
        self.tape.exit(&self.token, tensor.inner(), self.position - 1)
    }
}
