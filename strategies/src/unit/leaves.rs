//! Inputs and parameters of a unit as leaves of a graph of its own.
//!
//! A leaf that two graphs share would merge them, and Burn locks a graph for as long as its backward
//! pass runs: a unit's pass inside the model's would wait for itself.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, DispatchTensor, Gradients, Tensor};

use super::unshard::{Source, unsharded};
use super::values::{TensorMap, Values};
use crate::run::Run;
use crate::weights::on_device;

/// A parameter's gradient, flattened.
pub(crate) type ParamGrad = (ParamId, Tensor<1>);

/// Takes one leaf's gradient out of a backward pass.
type TakeGrad = Box<dyn FnOnce(Option<&mut Gradients>) -> DispatchTensor + Send>;

/// Tensors of the caller's graph that get gradients from a unit, and their leaves in the unit's.
#[derive(Default)]
pub(super) struct Joints {
    pub(super) outer: Vec<DispatchTensor>,
    take: Vec<TakeGrad>,
}

impl Joints {
    fn add<const D: usize>(&mut self, outer: Tensor<D>, leaf: &Tensor<D>) {
        self.outer.push(outer.into_dispatch());
        self.expect(leaf.clone());
    }

    fn expect<const D: usize>(&mut self, leaf: Tensor<D>) {
        self.take.push(Box::new(move |grads| {
            // A block may ignore an input; the caller's graph expects a gradient all the same.
            let grad = grads.and_then(|grads| leaf.grad_remove(grads));
            grad.unwrap_or_else(|| leaf.inner().zeros_like()).into_dispatch()
        }));
    }

    /// The gradients of all leaves; zeros without a backward pass.
    pub(super) fn take(self, mut grads: Option<&mut Gradients>) -> Vec<DispatchTensor> {
        self.take.into_iter().map(|take| take(grads.as_deref_mut())).collect()
    }
}

/// `tensor` as a leaf of a new graph on `device`.
fn leaf<const D: usize>(tensor: Tensor<D>, device: &Device, is_tracked: bool) -> Tensor<D> {
    on_device(tensor.inner(), device).set_require_grad(is_tracked)
}

/// The inputs as leaves, those that are tracked with a joint each.
pub(super) fn lift_inputs<V: Values>(inputs: V, device: &Device, joints: &mut Joints) -> V {
    inputs.map(&mut LiftInputs { device, joints })
}

struct LiftInputs<'a> {
    device: &'a Device,
    joints: &'a mut Joints,
}

impl TensorMap for LiftInputs<'_> {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let lifted = leaf(tensor.clone(), self.device, tensor.is_tracked());
        if tensor.is_tracked() {
            self.joints.add(tensor, &lifted);
        }
        lifted
    }
}

/// The inputs outside of any graph, and which of them were tracked.
pub(super) fn detach_inputs<V: Values>(
    inputs: V,
    device: &Device,
) -> (V, Vec<DispatchTensor>, Vec<bool>) {
    let mut detach = Detach { device, outer: vec![], tracked: vec![] };
    let detached = inputs.map(&mut detach);
    (detached, detach.outer, detach.tracked)
}

struct Detach<'a> {
    device: &'a Device,
    outer: Vec<DispatchTensor>,
    tracked: Vec<bool>,
}

impl TensorMap for Detach<'_> {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.tracked.push(tensor.is_tracked());
        if tensor.is_tracked() {
            self.outer.push(tensor.clone().into_dispatch());
        }
        leaf(tensor, self.device, false)
    }
}

/// Detached inputs as leaves again, tracked as they were.
pub(super) fn track_inputs<V: Values>(inputs: V, tracked: &[bool], joints: &mut Joints) -> V {
    inputs.map(&mut Track { tracked: tracked.iter(), joints })
}

struct Track<'a> {
    tracked: std::slice::Iter<'a, bool>,
    joints: &'a mut Joints,
}

impl TensorMap for Track<'_> {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let is_tracked = self.tracked.next().copied().unwrap_or(false);
        let lifted = tensor.set_require_grad(is_tracked);
        if is_tracked {
            self.joints.expect(lifted.clone());
        }
        lifted
    }
}

/// What becomes of a module's trainable parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lift {
    /// Leaves that get gradients.
    Tracked,
    /// Leaves that get none.
    Untracked,
}

/// Replaces every trainable parameter of `module` that has numbers by a leaf with the same value and
/// identity. Others stay as they are: a running statistic must go on being the one that the model holds.
pub(super) fn lift_params<M: Module>(module: M, device: &Device, lift: Lift) -> M {
    module.map(&mut LiftParams { device, lift })
}

struct LiftParams<'a> {
    device: &'a Device,
    lift: Lift,
}

impl ModuleMapper for LiftParams<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !has_numbers(&param) {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let lifted = on_device(tensor.inner(), self.device);
        let lifted = lifted.set_require_grad(self.lift == Lift::Tracked);
        Param::from_mapped_value(id, lifted, mapper)
    }
}

/// A parameter that is to be lifted: trainable, or another unit's weight, and not hollow. Weights that were
/// gathered have no autodiff; what is frozen has, and asks for no gradient.
fn has_numbers<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    param.is_initialized() && (param.is_tracked() || !param.is_autodiff())
}

/// Whether a module has parameters that are to be lifted.
pub(super) fn any_trained<M: Module>(module: &M) -> bool {
    let mut find = FindTrained(false);
    module.visit(&mut find);
    find.0
}

struct FindTrained(bool);

impl ModuleVisitor for FindTrained {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0 |= has_numbers(param);
    }
}

/// Replaces the parameters of a unit by weights that are not kept between forward and backward. Those
/// that the unit shares with others become leaves, whose gradients are to be taken out of its graph.
pub(super) fn unshard_params<M: Module>(
    module: M,
    run: &Run,
    unit: usize,
    source: &Source,
) -> (M, SharedLeaves) {
    let mut map = UnshardParams { run, unit, source, places: 0, shared: SharedLeaves(vec![]) };
    let module = module.map(&mut map);
    (module, map.shared)
}

type TakeParamGrad = Box<dyn FnOnce(&mut Gradients) -> Option<ParamGrad> + Send>;

/// Leaves of parameters that are not the unit's own.
pub(super) struct SharedLeaves(Vec<TakeParamGrad>);

impl SharedLeaves {
    /// Their gradients.
    pub(super) fn take(self, grads: &mut Gradients) -> Vec<ParamGrad> {
        self.0.into_iter().filter_map(|take| take(grads)).collect()
    }
}

struct UnshardParams<'a> {
    run: &'a Run,
    unit: usize,
    source: &'a Source,
    /// Places so far. Each has a tensor of its own, also where a parameter stands at several: their gradients
    /// are added up as all others are, and not by autodiff in the unit's type.
    places: usize,
    shared: SharedLeaves,
}

impl ModuleMapper for UnshardParams<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        let own = self.run.layout.stored(id).filter(|stored| stored.unit == self.unit);
        let Some(stored) = own else {
            let mut lift = LiftParams { device: &self.run.device, lift: Lift::Tracked };
            let param = lift.map_float(param);
            if param.is_initialized() && param.is_require_grad() {
                let leaf = param.base();
                self.shared.0.push(Box::new(move |grads| {
                    leaf.grad_remove(grads).map(|grad| (id, grad.reshape([-1])))
                }));
            }
            return param;
        };
        let weight = self.source.weight::<D>((id, self.places), stored);
        self.places += 1;
        self.run.mappers.filled(id, unsharded::<D>(weight, &self.run.device))
    }
}

/// Joints of a module's own parameters, for a unit that reports to nobody.
pub(super) fn param_joints<M: Module>(module: &M) -> Vec<DispatchTensor> {
    let mut visit = OuterParams { outer: vec![] };
    module.visit(&mut visit);
    visit.outer
}

struct OuterParams {
    outer: Vec<DispatchTensor>,
}

impl ModuleVisitor for OuterParams {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // One that stands at two places has a leaf for each, and gets the gradients of both.
        let tensor = param.base();
        if tensor.is_tracked() {
            self.outer.push(tensor.into_dispatch());
        }
    }
}

/// Expects gradients of the parameters of a lifted module, in the order of [`param_joints`].
pub(super) fn expect_params<M: Module>(lifted: &M, joints: &mut Joints) {
    lifted.visit(&mut ExpectParams { joints });
}

struct ExpectParams<'a> {
    joints: &'a mut Joints,
}

impl ModuleVisitor for ExpectParams<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        if tensor.is_tracked() {
            self.joints.expect(tensor);
        }
    }
}

/// Takes the gradients of the parameters of `module` out of `grads`.
pub(crate) fn take<M: Module>(module: &M, grads: &mut Gradients) -> Vec<ParamGrad> {
    let mut take = Take { grads, taken: Vec::new() };
    module.visit(&mut take);
    take.taken
}

struct Take<'a> {
    grads: &'a mut Gradients,
    taken: Vec<ParamGrad>,
}

impl ModuleVisitor for Take<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_initialized() || !param.is_require_grad() {
            return;
        }
        if let Some(grad) = param.base().grad_remove(self.grads) {
            self.taken.push((param.id, grad.reshape([-1])));
        }
    }
}
