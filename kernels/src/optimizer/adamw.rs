//! AdamW, "Decoupled Weight Decay Regularization" (Loshchilov and Hutter, 2019), with the update
//! order and the placement of epsilon of `torch.optim.AdamW`.

use super::pass::{Operands, pass};
use crate::numbers::Real;

/// Hyperparameters of one AdamW step, as the step count `t` (from 1) resolves them.
///
/// For every element, with `g = scale * gradient`:
///
/// ```text
/// w <- w * (1 - lr * weight_decay)
/// m <- beta1 * m + (1 - beta1) * g
/// v <- beta2 * v + (1 - beta2) * g * g
/// w <- w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// ```
///
/// All in `f32`, it reads 16 and writes 12 bytes per element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator, outside the square root.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// The step's number, counted from 1.
    pub step: u64,
}

/// The moments of the elements that one call updates.
#[derive(Debug)]
pub struct AdamWState<'a, T> {
    /// First moment.
    pub exp_avg: &'a mut [T],
    /// Second moment.
    pub exp_avg_sq: &'a mut [T],
}

/// The per-element constants of one step, rounded once.
#[derive(Clone, Copy)]
struct Constants<T> {
    decay: T,
    beta1: T,
    one_minus_beta1: T,
    beta2: T,
    one_minus_beta2: T,
    step_size: T,
    denominator_scale: T,
    eps: T,
    scale: T,
}

impl AdamW {
    /// Updates weights and `state` from the gradient.
    ///
    /// # Panics
    ///
    /// If the lengths differ, or if the step is 0.
    pub fn step<T: Real>(&self, operands: Operands<'_>, state: AdamWState<'_, T>) {
        let constants = self.constants(operands.scale);
        let states = [state.exp_avg, state.exp_avg_sq];
        pass(
            "AdamW",
            operands,
            states,
            #[inline(always)]
            |weights, gradient, [m, v]| update(&constants, weights, gradient, m, v),
        );
    }

    fn constants<T: Real>(&self, scale: f64) -> Constants<T> {
        assert!(self.step > 0, "AdamW: steps count from 1");
        let t = self.step as f64;
        Constants {
            decay: T::of(1.0 - self.lr * self.weight_decay),
            beta1: T::of(self.beta1),
            one_minus_beta1: T::of(1.0 - self.beta1),
            beta2: T::of(self.beta2),
            one_minus_beta2: T::of(1.0 - self.beta2),
            step_size: T::of(self.lr / (1.0 - self.beta1.powf(t))),
            denominator_scale: T::of(1.0 / (1.0 - self.beta2.powf(t)).sqrt()),
            eps: T::of(self.eps),
            scale: T::of(scale),
        }
    }
}

#[inline(always)]
fn update<T: Real>(c: &Constants<T>, weights: &mut [T], gradient: &[T], m: &mut [T], v: &mut [T]) {
    for (((w, g), m), v) in weights.iter_mut().zip(gradient).zip(m).zip(v) {
        let g = *g * c.scale;
        *m = c.beta1 * *m + c.one_minus_beta1 * g;
        *v = c.beta2 * *v + c.one_minus_beta2 * g * g;
        let denominator = v.sqrt() * c.denominator_scale + c.eps;
        *w = *w * c.decay - c.step_size * *m / denominator;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::BLOCK;

    const ADAMW: AdamW =
        AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, step: 1 };

    /// The update rule in `f64`, one element at a time.
    fn reference(adamw: AdamW, steps: u64, weight: f64, gradient: impl Fn(u64) -> f64) -> f64 {
        let (mut w, mut m, mut v) = (weight, 0.0, 0.0);
        for t in 1..=steps {
            let g = gradient(t);
            w *= 1.0 - adamw.lr * adamw.weight_decay;
            m = adamw.beta1 * m + (1.0 - adamw.beta1) * g;
            v = adamw.beta2 * v + (1.0 - adamw.beta2) * g * g;
            let m_hat = m / (1.0 - adamw.beta1.powf(t as f64));
            let v_hat = v / (1.0 - adamw.beta2.powf(t as f64));
            w -= adamw.lr * m_hat / (v_hat.sqrt() + adamw.eps);
        }
        w
    }

    #[test]
    fn many_steps_follow_the_scalar_reference() {
        for len in [1, 7, 64, BLOCK + 3] {
            let start = |i: usize| (i % 13) as f64 * 0.1 - 0.6;
            let gradient = |i: usize, t: u64| ((i as u64 * 31 + t * 17) % 29) as f64 * 0.05 - 0.7;
            let mut weights: Vec<f32> = (0..len).map(|i| start(i) as f32).collect();
            let (mut m, mut v) = (vec![0.0f32; len], vec![0.0; len]);
            for t in 1..=20 {
                // Twice the gradient under half the scale must be the same step.
                let g: Vec<f32> = (0..len).map(|i| 2.0 * gradient(i, t) as f32).collect();
                let state = AdamWState { exp_avg: &mut m, exp_avg_sq: &mut v };
                let operands = Operands::new(&mut weights[..], &g[..]).scaled(0.5);
                AdamW { step: t, ..ADAMW }.step(operands, state);
            }
            for (i, w) in weights.iter().enumerate() {
                let expected = reference(ADAMW, 20, start(i), |t| gradient(i, t));
                assert!((f64::from(*w) - expected).abs() < 2e-5, "len {len}, {i}: {w} {expected}");
            }
        }
    }

    #[test]
    fn a_zero_gradient_only_decays() {
        let (mut w, mut m, mut v) = ([2.0f32], [0.0f32], [0.0]);
        let state = AdamWState { exp_avg: &mut m, exp_avg_sq: &mut v };
        ADAMW.step(Operands::new(&mut w[..], &[0.0f32][..]), state);
        assert_eq!(w, [2.0 * (1.0 - 1e-3)]);
    }

    #[test]
    fn f64_follows_the_reference_to_its_own_precision() {
        let (mut w, mut m, mut v) = ([0.5f64], [0.0f64], [0.0]);
        for t in 1..=20 {
            let gradient = [(t as f64 * 0.7).sin()];
            let state = AdamWState { exp_avg: &mut m, exp_avg_sq: &mut v };
            AdamW { step: t, ..ADAMW }.step(Operands::new(&mut w[..], &gradient[..]), state);
        }
        let expected = reference(ADAMW, 20, 0.5, |t| (t as f64 * 0.7).sin());
        assert!((w[0] - expected).abs() < 1e-15, "{} {expected}", w[0]);
    }
}
