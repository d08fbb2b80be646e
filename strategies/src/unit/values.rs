//! What a unit's function takes and returns.

use burn::tensor::{Bool, Int, Tensor};

/// Replaces the tensors of [`Values`].
pub trait TensorMap {
    /// A float tensor.
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D>;

    /// An integer tensor. Left as it is by default.
    fn int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        tensor
    }

    /// A boolean tensor. Left as it is by default.
    fn bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        tensor
    }
}

/// Tensors that go into a unit or come out of it: a float, integer or boolean tensor, or a tuple of up
/// to eight, an array, a `Vec` or an `Option` of such values.
///
/// A structure of tensors becomes one with an implementation that calls each field's.
///
/// ```
/// use burn::tensor::{Bool, Tensor};
/// use pyroclast_strategies::{TensorMap, Values};
///
/// #[derive(Clone)]
/// struct Sequence { x: Tensor<3>, mask: Tensor<2, Bool> }
///
/// impl Values for Sequence {
///     fn map(self, map: &mut impl TensorMap) -> Self {
///         Self { x: self.x.map(map), mask: self.mask.map(map) }
///     }
/// }
/// ```
pub trait Values: Clone + Send + 'static {
    /// Replaces every tensor, always in the same order.
    #[must_use]
    fn map(self, map: &mut impl TensorMap) -> Self;
}

impl<const D: usize> Values for Tensor<D> {
    fn map(self, map: &mut impl TensorMap) -> Self {
        map.float(self)
    }
}

impl<const D: usize> Values for Tensor<D, Int> {
    fn map(self, map: &mut impl TensorMap) -> Self {
        map.int(self)
    }
}

impl<const D: usize> Values for Tensor<D, Bool> {
    fn map(self, map: &mut impl TensorMap) -> Self {
        map.bool(self)
    }
}

impl<V: Values> Values for Vec<V> {
    fn map(self, map: &mut impl TensorMap) -> Self {
        self.into_iter().map(|value| Values::map(value, map)).collect()
    }
}

impl<V: Values> Values for Option<V> {
    fn map(self, map: &mut impl TensorMap) -> Self {
        self.map(|value| Values::map(value, map))
    }
}

impl<V: Values, const N: usize> Values for [V; N] {
    fn map(self, map: &mut impl TensorMap) -> Self {
        self.map(|value| Values::map(value, map))
    }
}

impl Values for () {
    fn map(self, _map: &mut impl TensorMap) -> Self {}
}

macro_rules! tuples {
    ($(($($name:ident),+))+) => {$(
        impl<$($name: Values),+> Values for ($($name,)+) {
            fn map(self, map: &mut impl TensorMap) -> Self {
                #[allow(non_snake_case, reason = "a value is named as its type")]
                let ($($name,)+) = self;
                ($(Values::map($name, map),)+)
            }
        }
    )+};
}

tuples! {
    (A)
    (A, B)
    (A, B, C)
    (A, B, C, D)
    (A, B, C, D, E)
    (A, B, C, D, E, F)
    (A, B, C, D, E, F, G)
    (A, B, C, D, E, F, G, H)
}
