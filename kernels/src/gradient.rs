//! Passes over flat gradients.

use half::{bf16, f16};
use rayon::prelude::*;

use crate::each;
use crate::numbers::{Real, Rounding, Slice, SliceMut};
use crate::parallel::{BLOCK, vectorized};

/// Elements summed into one partial of [`sum_of_squares`]. The grid of blocks starts at the
/// beginning of the slice, so equal slices give equal bits wherever they are summed; and it is as
/// fine as a flat buffer is aligned, so that no block spans two ranks' shards.
pub const NORM_BLOCK: usize = 128;

/// Independent partial sums inside a block, enough to fill the widest vector unit twice.
const LANES: usize = 16;

/// Whether all of some numbers are finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Finite {
    /// They are.
    All,
    /// At least one is NaN or infinite.
    NotAll,
}

impl Finite {
    fn all(blocks: impl ParallelIterator<Item = bool>) -> Self {
        // Every block is done, whatever the others are.
        match blocks.reduce(|| true, |a, b| a & b) {
            true => Self::All,
            false => Self::NotAll,
        }
    }
}

/// What becomes of numbers that a bucket has already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Onto {
    /// They are overwritten.
    Nothing,
    /// What comes is added to them.
    Sum,
}

/// Takes gradients into a bucket in the bucket's type: each is multiplied by `factor`, and added or
/// written, rounded once. Says whether what is there then is finite.
///
/// # Panics
///
/// If the lengths differ.
pub fn collect(target: SliceMut<'_>, source: Slice<'_>, factor: f32, onto: Onto) -> Finite {
    assert_eq!(target.len(), source.len(), "collect: lengths should agree");
    match target {
        SliceMut::F64(target) => collect_into(target, source, f64::from(factor), onto),
        SliceMut::F32(target) => collect_into(target, source, factor, onto),
        SliceMut::F16(target) => collect_half(target, source, factor, onto),
        SliceMut::BF16(target) => collect_half(target, source, factor, onto),
    }
}

/// Elements that are converted at a time.
const PIECE: usize = 1024;

fn collect_into<T: Real>(target: &mut [T], source: Slice<'_>, factor: T, onto: Onto) -> Finite {
    let block = |(index, target): (usize, &mut [T])| {
        let start = index * BLOCK;
        let source = source.part(start..start + target.len());
        vectorized(
            #[inline(always)]
            || {
                let mut wide = [T::ZERO; PIECE];
                let mut is_finite = true;
                for (index, target) in target.chunks_mut(PIECE).enumerate() {
                    let (start, len) = (index * PIECE, target.len());
                    let source = source.part(start..start + len);
                    let source = T::of_slice(source).unwrap_or_else(|| {
                        T::widen(source, &mut wide[..len]);
                        &wide[..len]
                    });
                    combine(target, source, factor, onto);
                    is_finite &= are_finite(target);
                }
                is_finite
            },
        )
    };
    Finite::all(target.par_chunks_mut(BLOCK).enumerate().map(block))
}

fn collect_half<H>(target: &mut [H], source: Slice<'_>, factor: f32, onto: Onto) -> Finite
where
    H: Copy + Send + Sync,
    for<'a> &'a [H]: Into<Slice<'a>>,
    for<'a> &'a mut [H]: Into<SliceMut<'a>>,
{
    let block = |(index, target): (usize, &mut [H])| {
        let start = index * BLOCK;
        let source = source.part(start..start + target.len());
        vectorized(
            #[inline(always)]
            || {
                let (mut sum, mut wide) = ([0.0f32; PIECE], [0.0f32; PIECE]);
                let mut is_finite = true;
                for (index, target) in target.chunks_mut(PIECE).enumerate() {
                    let (start, len) = (index * PIECE, target.len());
                    let (sum, wide) = (&mut sum[..len], &mut wide[..len]);
                    f32::widen(source.part(start..start + len), wide);
                    f32::widen((&*target).into(), sum);
                    combine(sum, wide, factor, onto);
                    f32::narrow(sum, target.into(), Rounding::Nearest, 0);
                    // Rounding may have made it infinite.
                    f32::widen((&*target).into(), sum);
                    is_finite &= are_finite(sum);
                }
                is_finite
            },
        )
    };
    Finite::all(target.par_chunks_mut(BLOCK).enumerate().map(block))
}

#[inline(always)]
fn combine<T: Real>(target: &mut [T], source: &[T], factor: T, onto: Onto) {
    match onto {
        Onto::Nothing => target.iter_mut().zip(source).for_each(|(t, s)| *t = *s * factor),
        Onto::Sum => target.iter_mut().zip(source).for_each(|(t, s)| *t = *t + *s * factor),
    }
}

/// What is finite is zero when it is multiplied by zero, and nothing else is.
#[inline(always)]
fn are_finite<T: Real>(values: &[T]) -> bool {
    let mut lanes = [T::ZERO; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane = *lane + *value * T::ZERO);
    }
    rest.iter().zip(&mut lanes).for_each(|(value, lane)| *lane = *lane + *value * T::ZERO);
    lanes.iter().all(|lane| *lane == T::ZERO)
}

/// Position of the first number that is NaN or infinite.
#[must_use]
pub fn first_not_finite(values: Slice<'_>) -> Option<usize> {
    each!(Slice, values, values => values.iter().position(|value| !value.is_finite()))
}

/// Limits every element to the range from `-limit` to `limit`.
///
/// # Panics
///
/// If `limit` is negative or NaN.
pub fn clamp(values: SliceMut<'_>, limit: f64) {
    assert!(limit >= 0.0, "clamp: {limit} should be 0 or more");
    match values {
        SliceMut::F64(values) => clamp_all(values, |value| value.clamp(-limit, limit)),
        SliceMut::F32(values) => {
            let limit = limit as f32;
            clamp_all(values, |value| value.clamp(-limit, limit));
        }
        SliceMut::F16(values) => {
            let limit = f16::from_f64(limit);
            clamp_all(values, |value| value.clamp(-limit, limit));
        }
        SliceMut::BF16(values) => {
            let limit = bf16::from_f64(limit);
            clamp_all(values, |value| value.clamp(-limit, limit));
        }
    }
}

fn clamp_all<T: Copy + Send>(values: &mut [T], clamp: impl Fn(T) -> T + Sync) {
    values.par_chunks_mut(BLOCK).for_each(|values| {
        vectorized(
            #[inline(always)]
            || values.iter_mut().for_each(|value| *value = clamp(*value)),
        );
    });
}

/// The sum of squares of `values`, in `f64`.
///
/// Of `f32` and narrower numbers, the result is finite exactly if every value is: the square of the largest
/// `f32` is far below the largest `f64`. One read therefore serves the gradient norm and the overflow check.
/// Of `f64` numbers it is finite only if all are below 1e154 or so.
///
/// Partials of [`NORM_BLOCK`] elements are combined in block order, so the result does not depend on
/// the number of threads.
#[must_use]
pub fn sum_of_squares(values: Slice<'_>) -> f64 {
    let blocks = values.len().div_ceil(BLOCK);
    let block = |index: usize| {
        let start = index * BLOCK;
        partial_sums(values.part(start..values.len().min(start + BLOCK)))
    };
    let partials: Vec<f64> = (0..blocks).into_par_iter().flat_map_iter(block).collect();
    partials.iter().sum()
}

/// The sums of squares of the [`NORM_BLOCK`]s of a slice.
fn partial_sums(values: Slice<'_>) -> Vec<f64> {
    vectorized(
        #[inline(always)]
        || match values {
            Slice::F64(values) => values.chunks(NORM_BLOCK).map(block_sum_of_squares).collect(),
            Slice::F32(values) => values.chunks(NORM_BLOCK).map(block_sum_of_squares).collect(),
            values => {
                let mut wide = vec![0.0; values.len()];
                f32::widen(values, &mut wide);
                wide.chunks(NORM_BLOCK).map(block_sum_of_squares).collect()
            }
        },
    )
}

#[inline(always)]
fn block_sum_of_squares<T: Copy + Into<f64>>(block: &[T]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    for chunk in block.chunks(LANES) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            let value: f64 = (*value).into();
            *lane += value * value;
        }
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::{Float, Numbers};

    fn ramp(len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919) % 1013) as f32 / 1013.0 - 0.5).collect()
    }

    #[test]
    fn sum_of_squares_matches_the_scalar_reference() {
        for len in [0, 1, LANES - 1, LANES + 1, NORM_BLOCK - 1, NORM_BLOCK, NORM_BLOCK + 1, 300_007]
        {
            let values = ramp(len);
            let expected: f64 = values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
            let got = sum_of_squares(Slice::F32(&values));
            assert!(
                (got - expected).abs() <= 1e-12 * expected.max(1.0),
                "len {len}: {got} {expected}"
            );
        }
    }

    #[test]
    fn sum_of_squares_is_finite_exactly_if_every_value_is() {
        let mut values = vec![f32::MAX; 3 * NORM_BLOCK + 5];
        assert!(sum_of_squares(Slice::F32(&values)).is_finite());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, NORM_BLOCK, values.len() - 1] {
                let kept = std::mem::replace(&mut values[at], bad);
                let unseen = sum_of_squares(Slice::F32(&values)).is_finite();
                assert!(!unseen, "{bad} at {at} went unseen");
                assert_eq!(first_not_finite(Slice::F32(&values)), Some(at));
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
                    .install(|| sum_of_squares(Slice::F32(&values)))
                    .to_bits()
            })
            .collect();
        assert!(sums.windows(2).all(|w| w[0] == w[1]), "{sums:?}");
    }

    #[test]
    fn clamp_limits_every_element_of_every_type() {
        for float in Float::ALL {
            let mut values = Numbers::F32(ramp(BLOCK + 5)).into_float(float);
            clamp(values.as_mut(), 0.25);
            let was = Slice::F32(&ramp(BLOCK + 5)).cast(float).as_slice().to_f64();
            let within = |(got, was): (f64, f64)| got == was.clamp(-0.25, 0.25);
            assert!(values.as_slice().to_f64().into_iter().zip(was).all(within), "{float}");
        }
    }

    #[test]
    fn sums_of_squares_of_every_type_are_those_of_their_numbers() {
        for float in Float::ALL {
            let values = Slice::F32(&ramp(3 * NORM_BLOCK + 7)).cast(float);
            let expected: f64 = values.as_slice().to_f64().iter().map(|v| v * v).sum();
            let got = sum_of_squares(values.as_slice());
            assert!((got - expected).abs() <= 1e-12 * expected, "{float}: {got} {expected}");
        }
    }

    #[test]
    fn gradients_are_collected_in_the_buckets_type() {
        for len in [0, 1, LANES + 1, PIECE + 3, BLOCK + 17] {
            for (bucket, gradient) in
                Float::ALL.into_iter().flat_map(|a| Float::ALL.map(|b| (a, b)))
            {
                let source = Slice::F32(&ramp(len)).cast(gradient);
                let mut target = Numbers::zeros(bucket, len);
                for (onto, times) in [(Onto::Nothing, 1.0), (Onto::Sum, 2.0)] {
                    let finite = collect(target.as_mut(), source.as_slice(), 0.5, onto);
                    assert_eq!(finite, Finite::All);
                    // Halves and doubles are exact.
                    let expected = source.as_slice().cast(bucket).as_slice().to_f64();
                    for (got, expected) in target.as_slice().to_f64().into_iter().zip(expected) {
                        assert_eq!(got, 0.5 * times * expected, "{gradient} into {bucket}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_noticed_as_it_is_collected() {
        for at in [0, 1, PIECE, BLOCK + 16] {
            let mut source = vec![0.25f32; BLOCK + 17];
            source[at] = 60_000.0;
            for (bucket, expected) in [
                (Float::F32, Finite::All),
                (Float::BF16, Finite::All),
                (Float::F16, Finite::NotAll),
            ] {
                let mut target = Numbers::zeros(bucket, source.len());
                let _ = collect(target.as_mut(), Slice::F32(&source), 1.0, Onto::Nothing);
                // Twice as much is too much for `f16`.
                let sum = collect(target.as_mut(), Slice::F32(&source), 1.0, Onto::Sum);
                assert_eq!(sum, expected, "{bucket} at {at}");
            }
            source[at] = f32::NAN;
            let mut target = Numbers::zeros(Float::F64, source.len());
            let finite = collect(target.as_mut(), Slice::F32(&source), 1.0, Onto::Nothing);
            assert_eq!(finite, Finite::NotAll);
        }
    }
}
