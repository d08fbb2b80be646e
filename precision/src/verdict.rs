//! From summed gradients to the one factor that the optimizer applies.

use burn::tensor::{FloatDType, Tensor};
use pyroclast_kernels::numbers::Float;

/// Added to the norm before dividing by it when clipping, as `torch.nn.utils.clip_grad_norm_` does.
const CLIP_EPS: f64 = 1e-6;

/// Multiplies a micro-batch's mean loss by the micro-batch's weight and the loss scale. Calling `backward` on
/// the result makes every gradient a weighted sum, to be divided once, in the optimizer. The product of a loss
/// of 16 bits is taken in `f32`, where it does not overflow.
#[must_use]
pub fn seed(loss: Tensor<1>, weight: f64, loss_scale: f64) -> Tensor<1> {
    let is_half = Float::of(loss.dtype()).is_some_and(Float::is_half);
    let loss = if is_half { loss.cast(FloatDType::F32) } else { loss };
    loss.mul_scalar(weight * loss_scale)
}

/// How averaged gradients are limited.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Clip {
    /// All by one factor, so that their global L2 norm is at most this, as
    /// `torch.nn.utils.clip_grad_norm_` does.
    Norm(f64),
    /// Each element to this absolute value, as `torch.nn.utils.clip_grad_value_` does.
    Value(f64),
}

/// What is known of a step's gradients once they are summed over micro-batches and ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    norm: f64,
    divisor: f64,
}

impl Verdict {
    /// From the sum of squares of the summed gradients, the sum of the micro-batches' weights, both over all
    /// ranks, and the loss scale that the backward passes had.
    #[must_use]
    pub fn new(sum_of_squares: f64, total_weight: f64, loss_scale: f64) -> Self {
        let divisor = total_weight * loss_scale;
        Self { norm: sum_of_squares.sqrt() / divisor, divisor }
    }

    /// Global L2 norm of the averaged gradient, before clipping.
    #[must_use]
    pub fn norm(&self) -> f64 {
        self.norm
    }

    /// Whether every gradient is finite and there is something to average over.
    #[must_use]
    pub fn is_finite(&self) -> bool {
        self.norm.is_finite()
    }

    /// The factor that turns summed gradients into averages, clipped where they are by their norm.
    #[must_use]
    pub fn scale(&self, clip: Option<Clip>) -> f64 {
        let clipped = match clip {
            Some(Clip::Norm(max_norm)) => (max_norm / (self.norm + CLIP_EPS)).min(1.0),
            Some(Clip::Value(_)) | None => 1.0,
        };
        clipped / self.divisor
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn gradients_below_the_limit_are_only_averaged() {
        let verdict = Verdict::new(16.0, 4.0, 1.0);
        assert_eq!(verdict.norm(), 1.0);
        assert_eq!(verdict.scale(None), 0.25);
        assert_eq!(verdict.scale(Some(Clip::Value(0.1))), 0.25, "elements are limited elsewhere");
        assert_eq!(verdict.scale(Some(Clip::Norm(1.5))), 0.25);
    }

    #[test]
    fn clipped_gradients_have_the_limit_as_norm() {
        let verdict = Verdict::new(16.0, 2.0, 1.0);
        let clipped = verdict.scale(Some(Clip::Norm(0.5))) * 16.0f64.sqrt();
        assert!((clipped - 0.5).abs() < 1e-6);
    }

    #[test]
    fn the_loss_scale_is_divided_out_before_clipping() {
        let (plain, scaled) = (Verdict::new(16.0, 2.0, 1.0), Verdict::new(16.0e6, 2.0, 1e3));
        assert_eq!(scaled.norm(), plain.norm());
        let clip = Some(Clip::Norm(0.5));
        assert!((scaled.scale(clip) * 1e3 - plain.scale(clip)).abs() < 1e-15);
    }

    #[test]
    fn a_loss_of_16_bits_is_scaled_beyond_their_range() {
        let loss = Tensor::<1>::full([1], 3.0, &Device::flex()).cast(FloatDType::F16);
        let scaled = seed(loss, 0.5, 65536.0);
        assert_eq!(scaled.into_scalar::<f32>(), 98304.0);
    }

    #[test]
    fn non_finite_sums_are_seen() {
        assert!(!Verdict::new(f64::NAN, 1.0, 1.0).is_finite());
        assert!(!Verdict::new(f64::INFINITY, 1.0, 1.0).is_finite());
        assert!(!Verdict::new(0.0, 0.0, 1.0).is_finite());
    }
}
