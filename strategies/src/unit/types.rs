//! Types of numbers, and their finiteness, at a unit's boundary.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn::tensor::{FloatDType, Tensor};
use pyroclast_kernels::numbers::Float;
use pyroclast_kernels::{gradient, interop};
use pyroclast_precision::Types;

use super::values::{TensorMap, Values};
use crate::error::Error;

/// Float tensors in another type, in the graph that they are in.
pub(super) fn cast<V: Values>(values: V, to: Float) -> V {
    values.map(&mut Cast(to))
}

struct Cast(Float);

impl TensorMap for Cast {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        match tensor.dtype() == self.0.dtype() {
            true => tensor,
            false => tensor.cast(FloatDType::from(self.0.dtype())),
        }
    }
}

/// Runs a unit, and refuses what mixes types: an operation within it, which Burn's CPU backend ends with a
/// panic, or an output that is of neither the unit's type nor its caller's.
pub(super) fn without_mixing<O: Values>(
    path: &str,
    types: Types,
    run: impl FnOnce() -> O,
) -> Result<O, Error> {
    let mixed = |problem: String| {
        let (unit, compute) = (path.to_owned(), types.compute);
        Err(Error::MixedTypes { unit, compute, problem })
    };
    let outputs = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(outputs) => outputs,
        Err(payload) => match of_types(&*payload) {
            Some(problem) => return mixed(problem),
            None => resume_unwind(payload),
        },
    };
    let mut find = FindOther { types, found: None };
    let _ = outputs.clone().map(&mut find);
    match find.found {
        Some(found) => mixed(format!("it returned {found}")),
        None => Ok(outputs),
    }
}

/// What a panic says, if it is about types.
fn of_types(payload: &(dyn Any + Send)) -> Option<String> {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied())?;
    // A panic of a tensor of a wrong type is worded differently by each operation.
    text.contains("dtype").then(|| text.split_whitespace().collect::<Vec<_>>().join(" "))
}

struct FindOther {
    types: Types,
    found: Option<String>,
}

impl TensorMap for FindOther {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let Types { compute, output, .. } = self.types;
        if ![compute.dtype(), output.dtype()].contains(&tensor.dtype()) {
            let found = Float::of(tensor.dtype()).map_or("other numbers", Float::name);
            self.found.get_or_insert_with(|| found.to_owned());
        }
        tensor
    }
}

/// Looks for NaN and infinity.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    pub(crate) path: Arc<str>,
    pub(crate) rank: usize,
}

impl Watch {
    /// Refuses outputs that are not finite.
    pub(super) fn check<I: Values, O: Values>(&self, inputs: &I, outputs: &O) -> Result<(), Error> {
        if are_finite(outputs) {
            return Ok(());
        }
        let inputs = match are_finite(inputs) {
            true => "and its inputs are finite: it is the first",
            false => "and so is what it was given, by what runs outside of units",
        };
        Err(Error::Anomaly { unit: self.path.to_string(), rank: self.rank, inputs })
    }
}

fn are_finite<V: Values>(values: &V) -> bool {
    let mut find = FindNotFinite(false);
    let _ = values.clone().map(&mut find);
    !find.0
}

struct FindNotFinite(bool);

impl TensorMap for FindNotFinite {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let flat = tensor.clone().without_autodiff().reshape([-1]);
        // A device that cannot be read fails in all that follows, which says so.
        let _ = interop::read_all(vec![flat], |_, values| {
            self.0 |= gradient::first_not_finite(values).is_some();
        });
        tensor
    }
}
