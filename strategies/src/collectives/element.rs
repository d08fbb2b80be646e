//! Types that travel in collectives, and how they are combined.

use std::borrow::Cow;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::description::Dtype;

/// How the ranks' numbers become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum. Integers wrap.
    #[default]
    Sum,
    /// Their sum over the number of ranks. Floats only.
    Mean,
    /// The smallest; NaN if there is one.
    Min,
    /// The largest; NaN if there is one.
    Max,
    /// Their product. Integers wrap.
    Product,
}

impl ReduceOp {
    /// The name in error messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A number that a collective can carry.
///
/// Partial results are [`Element::Partial`]: half-precision numbers are combined in `f32` and rounded
/// once, at the end. All others are their own partial.
pub trait Element:
    sealed::Sealed + bytemuck::Pod + Send + Sync + PartialEq + std::fmt::Debug
{
    /// The type.
    const DTYPE: Dtype;
    /// What partial results are.
    type Partial: Element<Partial = Self::Partial>;

    /// Combines `source` into `target`, element by element. A mean is summed here and divided by
    /// [`Element::divide`].
    fn combine(op: ReduceOp, target: &mut [Self], source: &[Self]);

    /// Divides by the number of ranks. Integers stay as they are.
    fn divide(values: &mut [Self], ranks: usize);

    /// Zero.
    const ZERO: Self;

    /// The numbers themselves as partial results, where the types are the same.
    fn as_partials(values: &mut [Self]) -> Option<&mut [Self::Partial]>;

    /// The numbers as partial results, copied only where the types differ.
    fn partials(values: &[Self]) -> Cow<'_, [Self::Partial]>;

    /// Rounds partial results into `values`, which are as many.
    fn round(partials: &[Self::Partial], values: &mut [Self]);
}

fn zip<T: Copy>(target: &mut [T], source: &[T], combine: impl Fn(T, T) -> T) {
    for (t, s) in target.iter_mut().zip(source) {
        *t = combine(*t, *s);
    }
}

macro_rules! own_partials {
    () => {
        type Partial = Self;

        fn as_partials(values: &mut [Self]) -> Option<&mut [Self]> {
            Some(values)
        }

        fn partials(values: &[Self]) -> Cow<'_, [Self]> {
            Cow::Borrowed(values)
        }

        fn round(partials: &[Self], values: &mut [Self]) {
            values.copy_from_slice(partials);
        }
    };
}

macro_rules! float {
    ($type:ty, $variant:ident) => {
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: Dtype = Dtype::$variant;
            const ZERO: Self = 0.0;

            fn combine(op: ReduceOp, target: &mut [Self], source: &[Self]) {
                // The standard `min` and `max` drop NaN, and with it the news that a rank has one.
                let pick = |t: Self, s: Self, s_wins: bool| {
                    if !t.is_nan() & (s.is_nan() | s_wins) { s } else { t }
                };
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => zip(target, source, |t, s| t + s),
                    ReduceOp::Product => zip(target, source, |t, s| t * s),
                    ReduceOp::Min => {
                        zip(target, source, |t, s| pick(t, s, s.total_cmp(&t).is_lt()))
                    }
                    ReduceOp::Max => {
                        zip(target, source, |t, s| pick(t, s, s.total_cmp(&t).is_gt()))
                    }
                }
            }

            fn divide(values: &mut [Self], ranks: usize) {
                values.iter_mut().for_each(|value| *value /= ranks as Self);
            }

            own_partials!();
        }
    };
}

macro_rules! half {
    ($type:ty, $variant:ident) => {
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: Dtype = Dtype::$variant;
            const ZERO: Self = Self::ZERO;
            type Partial = f32;

            fn combine(op: ReduceOp, target: &mut [Self], source: &[Self]) {
                let mut partials = Self::partials(target).into_owned();
                f32::combine(op, &mut partials, &Self::partials(source));
                Self::round(&partials, target);
            }

            fn divide(values: &mut [Self], ranks: usize) {
                let mut partials = Self::partials(values).into_owned();
                f32::divide(&mut partials, ranks);
                Self::round(&partials, values);
            }

            fn as_partials(_values: &mut [Self]) -> Option<&mut [f32]> {
                None
            }

            fn partials(values: &[Self]) -> Cow<'_, [f32]> {
                Cow::Owned(values.to_f32_vec())
            }

            fn round(partials: &[f32], values: &mut [Self]) {
                values.convert_from_f32_slice(partials);
            }
        }
    };
}

macro_rules! integer {
    ($type:ty, $variant:ident) => {
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: Dtype = Dtype::$variant;
            const ZERO: Self = 0;

            fn combine(op: ReduceOp, target: &mut [Self], source: &[Self]) {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => zip(target, source, Self::wrapping_add),
                    ReduceOp::Product => zip(target, source, Self::wrapping_mul),
                    ReduceOp::Min => zip(target, source, Ord::min),
                    ReduceOp::Max => zip(target, source, Ord::max),
                }
            }

            fn divide(_values: &mut [Self], _ranks: usize) {}

            own_partials!();
        }
    };
}

float!(f32, F32);
float!(f64, F64);
half!(f16, F16);
half!(bf16, Bf16);
integer!(i32, I32);
integer!(i64, I64);
integer!(u8, U8);

#[cfg(test)]
mod tests {
    use super::*;

    fn combined<T: Element>(op: ReduceOp, target: T, source: T) -> T {
        let mut target = [target];
        T::combine(op, &mut target, &[source]);
        target[0]
    }

    #[test]
    fn the_smaller_and_larger_zero_are_told_apart_and_nan_wins() {
        for (a, b) in [(0.0f32, -0.0f32), (-0.0, 0.0)] {
            assert!(combined(ReduceOp::Min, a, b).is_sign_negative());
            assert!(combined(ReduceOp::Max, a, b).is_sign_positive());
        }
        for op in [ReduceOp::Min, ReduceOp::Max] {
            for other in [f64::NEG_INFINITY, 1.0, f64::INFINITY, f64::NAN] {
                assert!(combined(op, f64::NAN, other).is_nan(), "{op:?}, {other}");
                assert!(combined(op, other, f64::NAN).is_nan(), "{op:?}, {other}");
            }
            assert!(combined(op, f16::ONE, f16::NAN).is_nan());
        }
    }

    #[test]
    fn integers_wrap() {
        assert_eq!(combined(ReduceOp::Sum, i32::MAX, 1), i32::MIN);
        assert_eq!(combined(ReduceOp::Product, 16u8, 17), 16);
        assert_eq!(combined(ReduceOp::Sum, i64::MIN, -1), i64::MAX);
    }

    #[test]
    fn half_precision_is_widened_exactly_and_rounded_to_even() {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let mut back = vec![f16::ZERO; all.len()];
        f16::round(&f16::partials(&all), &mut back);
        let same = |(a, b): (&f16, &f16)| a.is_nan() && b.is_nan() || a.to_bits() == b.to_bits();
        assert!(all.iter().zip(&back).all(same));
        let mut rounded = [bf16::ZERO; 2];
        bf16::round(&[257.0, 259.0], &mut rounded);
        assert_eq!(rounded.map(bf16::to_f32), [256.0, 260.0]);
    }
}
