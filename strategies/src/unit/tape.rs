//! A unit's forward pass in training: on a graph of its own, joined to the caller's.
//!
//! Burn runs a backward pass by depth, so an operation on a parameter, which is a leaf, would run
//! only after the whole model's backward. A graph per unit makes depth local: when the backward pass
//! reaches the unit, it runs the unit's graph to its end, hands over the gradients of the unit's
//! parameters, and goes on with the gradient of the unit's input.
//!
//! The unit's parameters become leaves of their own for each forward pass. A leaf that two graphs
//! share would merge them, and Burn locks a graph for as long as its backward pass runs: a unit's
//! pass inside the model's would wait for itself.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Gradients, Tensor};

use super::Installed;
use super::backend::{Tape, inject, join};

/// A parameter's gradient, flattened.
pub(crate) type ParamGrad = (ParamId, Tensor<1>);

pub(super) fn forward<M, const I: usize, const O: usize>(
    module: &M,
    installed: Installed,
    x: Tensor<I>,
    f: impl Fn(&M, Tensor<I>) -> Tensor<O>,
) -> Tensor<O>
where
    M: Module + 'static,
{
    let input_is_tracked = x.is_tracked();
    let input = leaf(x.clone(), input_is_tracked);
    let module = module.clone().map(&mut FreshLeaves);
    let output = f(&module, input.clone());
    if !output.is_tracked() {
        return output;
    }
    installed.buckets.forward_ran(installed.unit);
    let plain_output = output.clone().inner();
    // The tape holds a whole module; a mutex makes it `Send` without asking `Module` to be `Sync`.
    let tape = Tape::new(move |grad| {
        let mut grads = inject(output, Tensor::from_dispatch(grad)).backward();
        let input_grad = input_is_tracked.then(|| {
            // A block may ignore its input; the caller's graph expects a gradient all the same.
            input.grad_remove(&mut grads).unwrap_or_else(|| input.clone().inner().zeros_like())
        });
        installed.buckets.unit_finished(installed.unit, take(&module, &mut grads));
        input_grad.map(Tensor::into_dispatch)
    });
    if input_is_tracked {
        join(x, plain_output, tape)
    } else {
        // Without a tracked input, only a leaf can put the unit into the caller's graph.
        join(Tensor::<1>::ones([1], &x.device()).require_grad(), plain_output, tape)
    }
}

/// Takes the gradients of the parameters of `module` out of `grads`.
pub(crate) fn take<M: Module>(module: &M, grads: &mut Gradients) -> Vec<ParamGrad> {
    let mut take = Take { grads, taken: Vec::new() };
    module.visit(&mut take);
    take.taken
}

/// `tensor` as a leaf of a new graph.
fn leaf<const D: usize>(tensor: Tensor<D>, tracked: bool) -> Tensor<D> {
    let strategy = tensor.gradient_checkpointing_strategy();
    let fresh = Tensor::from_inner(tensor.inner());
    let fresh = match strategy {
        Some(strategy) => fresh.with_gradient_checkpointing_strategy(strategy),
        None => fresh,
    };
    fresh.set_require_grad(tracked)
}

/// Replaces every trainable parameter by a leaf with the same value and identity. Others stay as
/// they are: a running statistic must go on being the one that the model holds.
struct FreshLeaves;

impl ModuleMapper for FreshLeaves {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, leaf(tensor, true), mapper)
    }
}

struct Take<'a> {
    grads: &'a mut Gradients,
    taken: Vec<ParamGrad>,
}

impl ModuleVisitor for Take<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            return;
        }
        if let Some(grad) = param.base().grad_remove(self.grads) {
            self.taken.push((param.id, grad.reshape([-1])));
        }
    }
}
