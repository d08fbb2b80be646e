//! The pass that all optimizers make: blocks over threads, and within a block pieces that stay in the
//! first-level cache while they are converted, stepped and converted back.

use rayon::prelude::*;

use crate::numbers::{Real, Rounding, Slice, SliceMut};
use crate::parallel::{BLOCK, vectorized};

/// What one step reads and writes, beside the optimizer's state. All are of one length.
#[derive(Debug)]
pub struct Operands<'a> {
    /// The weights that are stepped: master weights, or where there are none the model's own.
    pub weights: SliceMut<'a>,
    /// The gradient.
    pub gradient: Slice<'a>,
    /// Multiplies the gradient.
    pub scale: f64,
    /// Gets the new weights, rounded to the nearest, in a type of its own.
    pub copy: Option<SliceMut<'a>>,
    /// How weights of a type other than the state's are rounded.
    pub rounding: Rounding,
    /// Position of the first weight, by which stochastic rounding draws.
    pub at: u64,
}

impl<'a> Operands<'a> {
    /// Weights without a copy, rounded to the nearest.
    pub fn new(weights: impl Into<SliceMut<'a>>, gradient: impl Into<Slice<'a>>) -> Self {
        Self {
            weights: weights.into(),
            gradient: gradient.into(),
            scale: 1.0,
            copy: None,
            rounding: Rounding::Nearest,
            at: 0,
        }
    }

    /// Multiplies the gradient.
    #[must_use]
    pub fn scaled(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    fn check(&self, what: &str) {
        let len = self.weights.len();
        assert_eq!(len, self.gradient.len(), "{what}: gradient length");
        if let Some(copy) = &self.copy {
            assert_eq!(len, copy.len(), "{what}: length of the copy");
        }
    }

    fn split_at(self, len: usize) -> (Self, Self) {
        let Self { weights, gradient, scale, copy, rounding, at } = self;
        let (weights, other_weights) = weights.split_at(len);
        let (gradient, other_gradient) = gradient.split_at(len);
        let (copy, other_copy) = copy.map(|copy| copy.split_at(len)).unzip();
        let first = Self { weights, gradient, scale, copy, rounding, at };
        let at = at + len as u64;
        let others = Self {
            weights: other_weights,
            gradient: other_gradient,
            scale,
            copy: other_copy,
            rounding,
            at,
        };
        (first, others)
    }
}

/// Elements that are converted at a time.
const PIECE: usize = 1024;

/// Makes the pass. `update` steps weights by gradients that are not yet scaled, with `N` states.
pub(super) fn pass<T: Real, const N: usize>(
    what: &str,
    operands: Operands<'_>,
    states: [&mut [T]; N],
    update: impl Fn(&mut [T], &[T], [&mut [T]; N]) + Sync,
) {
    operands.check(what);
    for state in &states {
        assert_eq!(operands.weights.len(), state.len(), "{what}: length of the state");
    }
    blocks(operands, states).into_par_iter().for_each(|(operands, states)| {
        vectorized(
            #[inline(always)]
            || block(operands, states, &update),
        );
    });
}

type Block<'a, T, const N: usize> = (Operands<'a>, [&'a mut [T]; N]);

fn blocks<'a, T, const N: usize>(
    mut operands: Operands<'a>,
    mut states: [&'a mut [T]; N],
) -> Vec<Block<'a, T, N>> {
    let mut blocks = vec![];
    while !operands.weights.is_empty() {
        let len = operands.weights.len().min(BLOCK);
        let (first, others) = operands.split_at(len);
        operands = others;
        let of_first =
            states.each_mut().map(|state| state.split_off_mut(..len).unwrap_or_default());
        blocks.push((first, of_first));
    }
    blocks
}

#[inline(always)]
fn block<T: Real, const N: usize>(
    operands: Operands<'_>,
    states: [&mut [T]; N],
    update: &impl Fn(&mut [T], &[T], [&mut [T]; N]),
) {
    let Operands { mut weights, gradient, mut copy, rounding, at, .. } = operands;
    if let (Some(weights), Some(gradient), None) =
        (T::of_slice_mut(&mut weights), T::of_slice(gradient), &copy)
    {
        return update(weights, gradient, states);
    }
    let (mut wide_weights, mut wide_gradient) = ([T::ZERO; PIECE], [T::ZERO; PIECE]);
    let mut states = states;
    for start in (0..gradient.len()).step_by(PIECE) {
        let len = PIECE.min(gradient.len() - start);
        let piece = start..start + len;
        let states = states.each_mut().map(|state| &mut state[piece.clone()]);
        let gradient = gradient.part(piece.clone());
        let gradient = T::of_slice(gradient).unwrap_or_else(|| {
            T::widen(gradient, &mut wide_gradient[..len]);
            &wide_gradient[..len]
        });
        let mut weights = weights.reborrow().part(piece.clone());
        let new: &[T] = match T::of_slice_mut(&mut weights) {
            Some(weights) => {
                update(weights, gradient, states);
                weights
            }
            None => {
                let wide = &mut wide_weights[..len];
                T::widen(weights.as_slice(), wide);
                update(wide, gradient, states);
                T::narrow(wide, weights, rounding, at + start as u64);
                wide
            }
        };
        if let Some(copy) = &mut copy {
            T::narrow(new, copy.reborrow().part(piece), Rounding::Nearest, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::{Float, Numbers};
    use crate::optimizer::{AdamW, AdamWState};

    const ADAMW: AdamW =
        AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, step: 3 };

    fn ramp(len: usize, factor: f32) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919) % 1013) as f32 * factor - 0.5).collect()
    }

    /// Masters, moments and a copy after one step.
    fn stepped(len: usize, gradient: &Numbers, copy: Option<Float>) -> (Vec<f32>, Option<Numbers>) {
        let mut weights = ramp(len, 1e-3);
        let (mut m, mut v) = (ramp(len, 1e-4), vec![0.25; len]);
        let mut copy = copy.map(|float| Numbers::zeros(float, len));
        let operands = Operands {
            copy: copy.as_mut().map(Numbers::as_mut),
            ..Operands::new(&mut weights[..], gradient.as_slice()).scaled(0.5)
        };
        ADAMW.step(operands, AdamWState { exp_avg: &mut m, exp_avg_sq: &mut v });
        (weights, copy)
    }

    #[test]
    fn gradients_of_every_type_step_as_if_they_were_converted_before() {
        for len in [0, 1, PIECE - 1, PIECE + 1, BLOCK + PIECE + 3] {
            for float in [Float::F16, Float::BF16] {
                let half = Numbers::F32(ramp(len, 2e-3)).into_float(float);
                let (expected, _) = stepped(len, &half.clone().into_float(Float::F32), None);
                for copy in [None, Some(Float::F16), Some(Float::BF16)] {
                    let (weights, copied) = stepped(len, &half, copy);
                    assert!(weights == expected, "{float}, {len}, {copy:?}");
                    let rounded = copy.map(|float| Slice::F32(&expected).cast(float));
                    assert!(copied == rounded, "{float}, {len}, {copy:?}");
                }
            }
        }
    }

    #[test]
    fn weights_of_their_own_type_are_rounded_once_however_the_pass_is_cut() {
        let len = BLOCK + 5;
        let gradient = ramp(len, 2e-3);
        for float in [Float::F16, Float::BF16] {
            for rounding in [Rounding::Nearest, Rounding::Stochastic { seed: 9 }] {
                let start = Numbers::F32(ramp(len, 1e-3)).into_float(float);
                let step = |weights: &mut Numbers, range: std::ops::Range<usize>| {
                    let (mut m, mut v) = (vec![0.0f32; range.len()], vec![0.0f32; range.len()]);
                    let at = range.start as u64;
                    let operands = Operands {
                        rounding,
                        at,
                        ..Operands::new(weights.part_mut(range.clone()), &gradient[range])
                    };
                    ADAMW.step(operands, AdamWState { exp_avg: &mut m, exp_avg_sq: &mut v });
                };
                let (mut whole, mut cut) = (start.clone(), start.clone());
                step(&mut whole, 0..len);
                step(&mut cut, 0..777);
                step(&mut cut, 777..len);
                assert!(whole == cut, "{float} {rounding:?}");
                let changed = whole.as_slice().to_f32();
                let moved = start.as_slice().to_f32().into_iter().zip(changed);
                assert!(moved.into_iter().all(|(before, after)| (before - after).abs() < 0.04));
            }
        }
    }

    #[test]
    fn stochastic_rounding_moves_weights_that_the_nearest_would_leave() {
        let len = 4096;
        let adamw = AdamW { lr: 1e-4, weight_decay: 0.0, ..ADAMW };
        let mean = |rounding| {
            let mut weights = Numbers::F32(vec![1.0; len]).into_float(Float::BF16);
            let (mut m, mut v) = (vec![0.0f32; len], vec![0.0f32; len]);
            for step in 1..=50 {
                let rounding = match rounding {
                    Rounding::Nearest => Rounding::Nearest,
                    Rounding::Stochastic { .. } => Rounding::Stochastic { seed: step },
                };
                let gradient = vec![1.0f32; len];
                let operands =
                    Operands { rounding, ..Operands::new(weights.as_mut(), &gradient[..]) };
                let state = AdamWState { exp_avg: &mut m, exp_avg_sq: &mut v };
                AdamW { step: u64::from(step), ..adamw }.step(operands, state);
            }
            weights.as_slice().to_f64().iter().sum::<f64>() / len as f64
        };
        assert_eq!(mean(Rounding::Nearest), 1.0);
        let stochastic = mean(Rounding::Stochastic { seed: 0 });
        assert!((stochastic - 0.995).abs() < 5e-4, "{stochastic}");
    }
}
