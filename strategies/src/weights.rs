//! Between a model's parameters and the flat buffers in which their numbers are stored.
//!
//! A parameter whose numbers the model does not hold at the moment is *hollow*: Burn's lazy parameter,
//! with identity and shape but without a tensor. Using one is an error that says where it belongs.

use std::any::Any;
use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId, ParamMapper};
use burn::tensor::{Device, Tensor};
use pyroclast_kernels::flat::FlatTensor;
use pyroclast_kernels::numbers::Numbers;

use crate::layout::{Buffers, Kind, Layout, Stored, shape_of};
use crate::memory::Held;
use crate::parameters;

/// A unit's weights, in its flat buffers.
pub(crate) type Weights = Buffers<FlatTensor>;

impl Weights {
    /// The tensor of a parameter, without autodiff, which shares the buffer's memory where it can.
    pub(crate) fn view<const D: usize>(&self, Stored { kind, slot, .. }: Stored<'_>) -> Tensor<D> {
        self.of(kind).view(slot.range.clone(), shape_of(slot))
    }

    /// As [`Self::view`], on `device`: a leaf if the parameter is trained, a constant if it is frozen.
    pub(crate) fn leaf<const D: usize>(&self, stored: Stored<'_>, device: &Device) -> Tensor<D> {
        let tensor = on_device(self.view(stored), device);
        tensor.set_require_grad(stored.kind == Kind::Trained)
    }
}

/// A unit's trained weights, to be lent to a model.
pub(crate) fn lend(trained: Numbers, device: &Device) -> Weights {
    let frozen = FlatTensor::new(Numbers::default(), device);
    Weights { trained: FlatTensor::new(trained, device), frozen }
}

/// A unit's whole weights, gathered.
#[derive(Debug)]
pub(crate) struct FullUnit {
    pub(crate) weights: Weights,
    pub(crate) _held: Held,
}

/// What Burn keeps beside each parameter's tensor, which hollow parameters cannot.
#[derive(Debug, Default)]
pub(crate) struct Mappers(HashMap<ParamId, Box<dyn Any + Send + Sync>>);

impl Mappers {
    pub(crate) fn keep<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.insert(param.id, Box::new(parameters::mapper_of(param)));
    }

    fn get<const D: usize>(&self, id: ParamId) -> ParamMapper<Tensor<D>> {
        let mapper = self.0.get(&id).and_then(|mapper| mapper.downcast_ref());
        mapper.cloned().unwrap_or_default()
    }

    /// The parameter with a tensor again.
    pub(crate) fn filled<const D: usize>(
        &self,
        id: ParamId,
        tensor: Tensor<D>,
    ) -> Param<Tensor<D>> {
        Param::from_mapped_value(id, tensor, self.get(id))
    }
}

/// A parameter without its numbers.
pub(crate) fn hollow<const D: usize>(
    id: ParamId,
    Stored { kind, slot, .. }: Stored<'_>,
    device: &Device,
) -> Param<Tensor<D>> {
    let path = slot.info.path.clone();
    let gone = move |_: &Device, _| -> Tensor<D> {
        panic!(
            "the parameter `{path}` is sharded, and its numbers are not here: inside a unit reach it \
             through the first argument of the function given to `Unit::forward`, outside of units \
             during a micro-batch"
        )
    };
    Param::uninitialized(id, gone, device.clone(), kind == Kind::Trained, shape_of(slot))
}

/// Takes the numbers of every parameter of the chosen units out of `model`.
pub(crate) fn hollow_out<M: Module>(
    model: M,
    layout: &Layout,
    device: &Device,
    chosen: impl Fn(usize) -> bool,
) -> M {
    model.map(&mut HollowOut { layout, device, chosen })
}

struct HollowOut<'a, F> {
    layout: &'a Layout,
    device: &'a Device,
    chosen: F,
}

impl<F: Fn(usize) -> bool> ModuleMapper for HollowOut<'_, F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.layout.stored(param.id) {
            Some(stored) if (self.chosen)(stored.unit) => hollow(param.id, stored, self.device),
            _ => param,
        }
    }
}

/// Gives the parameters of those units for which `of_unit` has weights tensors that share them, as
/// leaves.
pub(crate) fn fill<'a, M: Module>(
    model: M,
    (layout, mappers): (&'a Layout, &'a Mappers),
    device: &'a Device,
    of_unit: impl Fn(usize) -> Option<&'a Weights>,
) -> M {
    model.map(&mut Fill { layout, mappers, device, of_unit })
}

struct Fill<'a, F> {
    layout: &'a Layout,
    mappers: &'a Mappers,
    device: &'a Device,
    of_unit: F,
}

impl<'a, F: Fn(usize) -> Option<&'a Weights>> ModuleMapper for Fill<'a, F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(stored) = self.layout.stored(param.id) else { return param };
        let Some(weights) = (self.of_unit)(stored.unit) else { return param };
        self.mappers.filled(param.id, weights.leaf(stored, self.device))
    }
}

/// A tensor without autodiff as one of `device`, which may have it.
pub(crate) fn on_device<const D: usize>(tensor: Tensor<D>, device: &Device) -> Tensor<D> {
    match device.gradient_checkpointing_strategy() {
        Some(strategy) => tensor.autodiff().with_gradient_checkpointing_strategy(strategy),
        None => tensor,
    }
}
