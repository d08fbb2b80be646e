//! Types that arithmetic is done in.

use std::ops::{Add, Div, Mul, Sub};

use half::slice::HalfFloatSliceExt;

use super::convert::{Rounding, narrow_bf16, stochastic_bf16, widen_bf16};
use super::{Float, Numbers, Slice, SliceMut};

/// A number that kernels compute with: `f32` or `f64`.
pub trait Real:
    Copy
    + Send
    + Sync
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + sealed::Sealed
{
    /// The type.
    const FLOAT: Float;
    /// Zero.
    const ZERO: Self;

    /// The nearest number of this type.
    fn of(value: f64) -> Self;

    /// Its square root.
    #[must_use]
    fn sqrt(self) -> Self;

    /// The numbers of a slice, if they are of this type.
    fn of_slice(slice: Slice<'_>) -> Option<&[Self]>;

    /// The numbers of a slice, if they are of this type, to be changed.
    fn of_slice_mut<'a>(slice: &'a mut SliceMut<'_>) -> Option<&'a mut [Self]>;

    /// The numbers of a buffer, if they are of this type, to be changed.
    fn of_numbers(numbers: &mut Numbers) -> Option<&mut [Self]>;

    /// Converts the numbers of `source` into as many of `target`.
    fn widen(source: Slice<'_>, target: &mut [Self]);

    /// Rounds the numbers of `source` into as many of `target`. `at` is the position of the first one, which
    /// stochastic rounding draws by.
    fn narrow(source: &[Self], target: SliceMut<'_>, rounding: Rounding, at: u64);
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

#[inline(always)]
fn map<A: Copy, B>(source: &[A], target: &mut [B], convert: impl Fn(A) -> B) {
    target.iter_mut().zip(source).for_each(|(target, source)| *target = convert(*source));
}

impl Real for f32 {
    const FLOAT: Float = Float::F32;
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn of(value: f64) -> Self {
        value as Self
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        self.sqrt()
    }

    #[inline(always)]
    fn of_slice(slice: Slice<'_>) -> Option<&[Self]> {
        if let Slice::F32(values) = slice { Some(values) } else { None }
    }

    #[inline(always)]
    fn of_slice_mut<'a>(slice: &'a mut SliceMut<'_>) -> Option<&'a mut [Self]> {
        if let SliceMut::F32(values) = slice { Some(values) } else { None }
    }

    fn of_numbers(numbers: &mut Numbers) -> Option<&mut [Self]> {
        if let Numbers::F32(values) = numbers { Some(values) } else { None }
    }

    #[inline(always)]
    fn widen(source: Slice<'_>, target: &mut [Self]) {
        match source {
            Slice::F64(source) => map(source, target, |value| value as Self),
            Slice::F32(source) => target.copy_from_slice(source),
            Slice::F16(source) => source.convert_to_f32_slice(target),
            Slice::BF16(source) => map(source, target, widen_bf16),
        }
    }

    #[inline(always)]
    fn narrow(source: &[Self], target: SliceMut<'_>, rounding: Rounding, at: u64) {
        match (target, rounding) {
            (SliceMut::F64(target), _) => map(source, target, f64::from),
            (SliceMut::F32(target), _) => target.copy_from_slice(source),
            (SliceMut::F16(target), _) => target.convert_from_f32_slice(source),
            (SliceMut::BF16(target), Rounding::Nearest) => map(source, target, narrow_bf16),
            (SliceMut::BF16(target), Rounding::Stochastic { seed }) => {
                for (offset, (target, source)) in target.iter_mut().zip(source).enumerate() {
                    *target = stochastic_bf16(*source, seed, at as u32 + offset as u32);
                }
            }
        }
    }
}

impl Real for f64 {
    const FLOAT: Float = Float::F64;
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn of(value: f64) -> Self {
        value
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        self.sqrt()
    }

    #[inline(always)]
    fn of_slice(slice: Slice<'_>) -> Option<&[Self]> {
        if let Slice::F64(values) = slice { Some(values) } else { None }
    }

    #[inline(always)]
    fn of_slice_mut<'a>(slice: &'a mut SliceMut<'_>) -> Option<&'a mut [Self]> {
        if let SliceMut::F64(values) = slice { Some(values) } else { None }
    }

    fn of_numbers(numbers: &mut Numbers) -> Option<&mut [Self]> {
        if let Numbers::F64(values) = numbers { Some(values) } else { None }
    }

    #[inline(always)]
    fn widen(source: Slice<'_>, target: &mut [Self]) {
        match source {
            Slice::F64(source) => target.copy_from_slice(source),
            Slice::F32(source) => map(source, target, Self::from),
            Slice::F16(source) => map(source, target, Self::from),
            Slice::BF16(source) => map(source, target, Self::from),
        }
    }

    #[inline(always)]
    fn narrow(source: &[Self], target: SliceMut<'_>, rounding: Rounding, at: u64) {
        match target {
            SliceMut::F64(target) => target.copy_from_slice(source),
            SliceMut::F32(target) => map(source, target, |value| value as f32),
            SliceMut::F16(target) => map(source, target, half::f16::from_f64),
            target @ SliceMut::BF16(_) => {
                // The second rounding is of numbers that no training in `f64` asks for.
                let source: Vec<f32> = source.iter().map(|value| *value as f32).collect();
                f32::narrow(&source, target, rounding, at);
            }
        }
    }
}
