//! Weights of a unit that keeps its activations from forward to backward, but not its weights.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::ParamId;
use burn::tensor::{Device, DispatchTensor, Tensor};

use super::ParamGrad;
use super::backend::unshard;
use crate::layout::{Kind, Stored, shape_of};
use crate::weights::FullUnit;

/// Bytes from which on a weight is a view of its unit's.
const LARGE: usize = 1 << 20;

/// Where the weights of one pass of a unit come from, while there are any, and where their gradients
/// go.
#[derive(Clone, Debug, Default)]
pub(super) struct Source(Arc<Mutex<Contents>>);

#[derive(Debug, Default)]
struct Contents {
    weights: Option<Arc<FullUnit>>,
    /// With the place that each is of.
    grads: Vec<(usize, ParamGrad)>,
}

impl Source {
    /// Makes the weights available.
    pub(super) fn open(&self, weights: Arc<FullUnit>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).weights = Some(weights);
    }

    /// Lets go of the weights.
    pub(super) fn close(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).weights = None;
    }

    /// The gradients that have come, in the order of their places: sums depend on it.
    pub(super) fn take_grads(&self) -> Vec<ParamGrad> {
        let mut contents = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut grads = std::mem::take(&mut contents.grads);
        grads.sort_by_key(|(place, _)| *place);
        grads.into_iter().map(|(_, grad)| grad).collect()
    }

    /// One of the weights, for one of the places where it stands.
    pub(super) fn weight<const D: usize>(
        &self,
        (id, place): (ParamId, usize),
        Stored { kind, slot, .. }: Stored<'_>,
    ) -> Weight {
        let (range, shape) = (slot.range.clone(), shape_of(slot));
        Weight {
            source: self.clone(),
            id,
            place,
            kind,
            make: Arc::new(move |full| {
                let (flat, range, shape) = (full.weights.of(kind), range.clone(), shape.clone());
                // Autodiff keeps small weights, a norm's for one, in ways that a unit cannot see. What it
                // keeps of a view would keep the whole unit's weights; the large ones are not worth a copy.
                match range.len() * flat.float().size() < LARGE {
                    true => flat.copy::<D>(range, shape).into_dispatch(),
                    false => flat.view::<D>(range, shape).into_dispatch(),
                }
            }),
            flatten: |grad| Tensor::<D>::from_dispatch(grad).reshape([-1]),
        }
    }
}

/// The tensor of a weight, on `device`, from which autodiff keeps nothing but a token.
pub(super) fn unsharded<const D: usize>(weight: Weight, device: &Device) -> Tensor<D> {
    // A frozen weight's, too: Burn makes a tensor again only if it is tracked.
    unshard(Tensor::ones([1], device).require_grad(), weight)
}

/// A weight of a unit.
#[derive(Clone)]
pub(super) struct Weight {
    source: Source,
    id: ParamId,
    place: usize,
    kind: Kind,
    make: Arc<dyn Fn(&FullUnit) -> DispatchTensor + Send + Sync>,
    flatten: fn(DispatchTensor) -> Tensor<1>,
}

impl Weight {
    /// Its tensor, without autodiff.
    pub(super) fn tensor(&self) -> DispatchTensor {
        let contents = self.source.0.lock().unwrap_or_else(PoisonError::into_inner);
        let full = contents.weights.as_ref().expect("a unit's weights are there while it runs");
        (self.make)(full)
    }

    pub(super) fn take_grad(&self, grad: DispatchTensor) {
        if self.kind == Kind::Frozen {
            return;
        }
        let grad = (self.flatten)(grad);
        let mut contents = self.source.0.lock().unwrap_or_else(PoisonError::into_inner);
        contents.grads.push((self.place, (self.id, grad)));
    }
}

impl fmt::Debug for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weight({})", self.id)
    }
}
