//! Stochastic gradient descent with momentum, in the form of `torch.optim.SGD`.

use super::pass::{Operands, pass};
use crate::numbers::Real;

/// Hyperparameters of one SGD step.
///
/// For every element, with `g = scale * gradient + weight_decay * w`:
///
/// ```text
/// b <- momentum * b + g
/// w <- w - lr * b                    (nesterov: w - lr * (g + momentum * b))
/// ```
///
/// A momentum buffer of zeros makes the first step torch's first step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate of this step.
    pub lr: f64,
    /// Momentum factor.
    pub momentum: f64,
    /// Whether to look ahead along the momentum.
    pub nesterov: bool,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
}

/// The momentum of the elements that one call updates.
#[derive(Debug)]
pub struct SgdState<'a, T> {
    /// Momentum buffer.
    pub momentum: &'a mut [T],
}

impl Sgd {
    /// Updates weights and `state` from the gradient.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    pub fn step<T: Real>(&self, operands: Operands<'_>, state: SgdState<'_, T>) {
        let (scale, lr) = (T::of(operands.scale), T::of(self.lr));
        let (mu, decay) = (T::of(self.momentum), T::of(self.weight_decay));
        let (of_gradient, of_momentum) =
            if self.nesterov { (T::of(1.0), mu) } else { (T::ZERO, T::of(1.0)) };
        pass(
            "SGD",
            operands,
            [state.momentum],
            #[inline(always)]
            |weights, gradient, [momentum]| {
                for ((w, g), b) in weights.iter_mut().zip(gradient).zip(momentum) {
                    let g = *g * scale + decay * *w;
                    *b = mu * *b + g;
                    *w = *w - lr * (of_gradient * g + of_momentum * *b);
                }
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::BLOCK;

    #[test]
    fn follows_the_scalar_reference() {
        for (momentum, nesterov, weight_decay) in
            [(0.0, false, 0.0), (0.9, false, 0.0), (0.9, true, 0.0), (0.9, true, 0.1)]
        {
            let sgd = Sgd { lr: 0.1, momentum, nesterov, weight_decay };
            let len = BLOCK + 5;
            let mut weights: Vec<f32> = (0..len).map(|i| (i % 7) as f32).collect();
            let mut buffer = vec![0.0f32; len];
            let gradient = |i: usize, t: usize| ((i * 3 + t * 5) % 11) as f64 * 0.1 - 0.5;
            for t in 0..5 {
                let g: Vec<f32> = (0..len).map(|i| 4.0 * gradient(i, t) as f32).collect();
                let operands = Operands::new(&mut weights[..], &g[..]).scaled(0.25);
                sgd.step(operands, SgdState { momentum: &mut buffer });
            }
            for i in [0, 1, 6, len - 1] {
                let (mut w, mut b) = ((i % 7) as f64, 0.0);
                for t in 0..5 {
                    let g = gradient(i, t) + weight_decay * w;
                    b = momentum * b + g;
                    w -= 0.1 * if nesterov { g + momentum * b } else { b };
                }
                let got = f64::from(weights[i]);
                assert!((got - w).abs() < 1e-5, "{sgd:?}, element {i}: {got} {w}");
            }
        }
    }
}
