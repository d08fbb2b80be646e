//! AdamW, "Decoupled Weight Decay Regularization" (Loshchilov and Hutter, 2019), with the update
//! order and the placement of epsilon of `torch.optim.AdamW`.

use rayon::prelude::*;

use crate::parallel::{BLOCK, vectorized};

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
/// It reads 16 and writes 12 bytes per element.
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
pub struct AdamWState<'a> {
    /// First moment.
    pub exp_avg: &'a mut [f32],
    /// Second moment.
    pub exp_avg_sq: &'a mut [f32],
}

/// The per-element constants of one step, rounded to `f32` once.
#[derive(Clone, Copy)]
struct Constants {
    decay: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    step_size: f32,
    denominator_scale: f32,
    eps: f32,
    scale: f32,
}

impl AdamW {
    /// Updates `weights` and `state` from `gradient`, which is multiplied by `scale` on the way in.
    ///
    /// # Panics
    ///
    /// If the lengths differ, or if the step is 0.
    pub fn step(&self, weights: &mut [f32], gradient: &[f32], scale: f32, state: AdamWState<'_>) {
        let len = weights.len();
        assert_eq!(len, gradient.len(), "AdamW: gradient length");
        assert_eq!(len, state.exp_avg.len(), "AdamW: first moment length");
        assert_eq!(len, state.exp_avg_sq.len(), "AdamW: second moment length");
        let constants = self.constants(scale);
        weights
            .par_chunks_mut(BLOCK)
            .zip(gradient.par_chunks(BLOCK))
            .zip(state.exp_avg.par_chunks_mut(BLOCK))
            .zip(state.exp_avg_sq.par_chunks_mut(BLOCK))
            .for_each(|(((w, g), m), v)| {
                vectorized(
                    #[inline(always)]
                    || update(&constants, w, g, m, v),
                );
            });
    }

    fn constants(&self, scale: f32) -> Constants {
        assert!(self.step > 0, "AdamW: steps count from 1");
        let t = self.step as f64;
        Constants {
            decay: (1.0 - self.lr * self.weight_decay) as f32,
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            step_size: (self.lr / (1.0 - self.beta1.powf(t))) as f32,
            denominator_scale: (1.0 / (1.0 - self.beta2.powf(t)).sqrt()) as f32,
            eps: self.eps as f32,
            scale,
        }
    }
}

#[inline(always)]
fn update(c: &Constants, weights: &mut [f32], gradient: &[f32], m: &mut [f32], v: &mut [f32]) {
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
            let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
            for t in 1..=20 {
                // Twice the gradient under half the scale must be the same step.
                let g: Vec<f32> = (0..len).map(|i| 2.0 * gradient(i, t) as f32).collect();
                let state = AdamWState { exp_avg: &mut m, exp_avg_sq: &mut v };
                AdamW { step: t, ..ADAMW }.step(&mut weights, &g, 0.5, state);
            }
            for (i, w) in weights.iter().enumerate() {
                let expected = reference(ADAMW, 20, start(i), |t| gradient(i, t));
                assert!((f64::from(*w) - expected).abs() < 2e-5, "len {len}, {i}: {w} {expected}");
            }
        }
    }

    #[test]
    fn a_zero_gradient_only_decays() {
        let (mut w, mut m, mut v) = ([2.0f32], [0.0], [0.0]);
        let state = AdamWState { exp_avg: &mut m, exp_avg_sq: &mut v };
        ADAMW.step(&mut w, &[0.0], 1.0, state);
        assert_eq!(w, [2.0 * (1.0 - 1e-3)]);
    }
}
