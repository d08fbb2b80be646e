//! Products whose sums are kept in `f32` at least, on every device.

use burn::nn::Linear;
use burn::tensor::{DType, Device, FloatDType, Tensor, module};

/// Whether Burn would round partial sums to 16 bits, so that a long sum is less exact than one in `f32` is: it
/// does for `f16` on the CPU.
fn rounds_partial_sums<const D: usize>(tensor: &Tensor<D>) -> bool {
    tensor.dtype() == DType::F16 && tensor.device().without_autodiff() == Device::flex()
}

/// The matrix product of tensors of one type, batched over the leading dimensions. Burn's, but that sums are
/// rounded once.
///
/// # Panics
///
/// As [`Tensor::matmul`] does: if the shapes do not go together.
#[must_use]
pub fn matmul<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    if !rounds_partial_sums(&a) {
        return a.matmul(b);
    }
    a.cast(FloatDType::F32).matmul(b.cast(FloatDType::F32)).cast(FloatDType::F16)
}

/// What `layer` makes of `input`, of shape `[..., in]`. Burn's, but that sums are rounded once.
///
/// # Panics
///
/// As [`Linear::forward`] does: if the input is not as wide as the layer.
#[must_use]
pub fn linear<const D: usize>(layer: &Linear, input: Tensor<D>) -> Tensor<D> {
    if !rounds_partial_sums(&input) {
        return layer.forward(input);
    }
    let wide = FloatDType::F32;
    let bias = layer.bias.as_ref().map(|bias| bias.val().cast(wide));
    module::linear(input.cast(wide), layer.weight.val().cast(wide), bias).cast(FloatDType::F16)
}
