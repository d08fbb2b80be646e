//! Passes over flat gradients.

use rayon::prelude::*;

use crate::parallel::{BLOCK, vectorized};

/// Elements summed into one partial of [`sum_of_squares`]. The grid of blocks starts at the
/// beginning of the slice, so equal slices give equal bits wherever they are summed; and it is as
/// fine as a flat buffer is aligned, so that no block spans two ranks' shards.
pub const NORM_BLOCK: usize = 128;

/// Independent partial sums inside a block, enough to fill the widest vector unit twice.
const LANES: usize = 16;

/// Adds `source` to `target`, element by element.
///
/// # Panics
///
/// If the lengths differ.
pub fn accumulate(target: &mut [f32], source: &[f32]) {
    assert_eq!(target.len(), source.len(), "accumulate: lengths should agree");
    target.par_chunks_mut(BLOCK).zip(source.par_chunks(BLOCK)).for_each(|(target, source)| {
        vectorized(
            #[inline(always)]
            || {
                for (t, s) in target.iter_mut().zip(source) {
                    *t += *s;
                }
            },
        );
    });
}

/// Limits every element to the range from `-limit` to `limit`.
///
/// # Panics
///
/// If `limit` is negative or NaN.
pub fn clamp(values: &mut [f32], limit: f32) {
    assert!(limit >= 0.0, "clamp: {limit} should be 0 or more");
    values.par_chunks_mut(BLOCK).for_each(|values| {
        vectorized(
            #[inline(always)]
            || values.iter_mut().for_each(|value| *value = value.clamp(-limit, limit)),
        );
    });
}

/// The sum of squares of `values`, in `f64`.
///
/// The result is finite exactly if every value is: the square of the largest `f32` is far below the
/// largest `f64`. One read therefore serves the gradient norm and the overflow check.
///
/// Partials of [`NORM_BLOCK`] elements are combined in block order, so the result does not depend on
/// the number of threads.
#[must_use]
pub fn sum_of_squares(values: &[f32]) -> f64 {
    let partials: Vec<f64> = values.par_chunks(BLOCK).flat_map_iter(partial_sums).collect();
    partials.iter().sum()
}

/// The sums of squares of the [`NORM_BLOCK`]s of a slice.
fn partial_sums(values: &[f32]) -> Vec<f64> {
    vectorized(
        #[inline(always)]
        || values.chunks(NORM_BLOCK).map(block_sum_of_squares).collect(),
    )
}

#[inline(always)]
fn block_sum_of_squares(block: &[f32]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    for chunk in block.chunks(LANES) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            let value = f64::from(*value);
            *lane += value * value;
        }
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ramp(len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919) % 1013) as f32 / 1013.0 - 0.5).collect()
    }

    #[test]
    fn sum_of_squares_matches_the_scalar_reference() {
        for len in [0, 1, LANES - 1, LANES + 1, NORM_BLOCK - 1, NORM_BLOCK, NORM_BLOCK + 1, 300_007]
        {
            let values = ramp(len);
            let expected: f64 = values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
            let got = sum_of_squares(&values);
            assert!(
                (got - expected).abs() <= 1e-12 * expected.max(1.0),
                "len {len}: {got} {expected}"
            );
        }
    }

    #[test]
    fn sum_of_squares_is_finite_exactly_if_every_value_is() {
        let mut values = vec![f32::MAX; 3 * NORM_BLOCK + 5];
        assert!(sum_of_squares(&values).is_finite());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, NORM_BLOCK, values.len() - 1] {
                let kept = std::mem::replace(&mut values[at], bad);
                assert!(!sum_of_squares(&values).is_finite(), "{bad} at {at} went unseen");
                values[at] = kept;
            }
        }
    }

    #[test]
    fn sum_of_squares_does_not_depend_on_threads() {
        let values = ramp(1_000_003);
        let sums: Vec<u64> = [1, 2, 3, 7]
            .into_iter()
            .map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                pool.expect("a thread pool should start")
                    .install(|| sum_of_squares(&values))
                    .to_bits()
            })
            .collect();
        assert!(sums.windows(2).all(|w| w[0] == w[1]), "{sums:?}");
    }

    #[test]
    fn clamp_limits_every_element() {
        let mut values = ramp(BLOCK + 5);
        clamp(&mut values, 0.25);
        let within = |(got, was): (&f32, f32)| *got == was.clamp(-0.25, 0.25);
        assert!(values.iter().zip(ramp(BLOCK + 5)).all(within));
    }

    #[test]
    fn accumulate_adds_every_element() {
        for len in [0, 1, BLOCK - 1, BLOCK + 1, 2 * BLOCK + 17] {
            let source = ramp(len);
            let mut target = source.clone();
            accumulate(&mut target, &source);
            assert!(target.iter().zip(&source).all(|(t, s)| *t == 2.0 * s), "len {len}");
        }
    }
}
