//! Conversions between types of numbers.

use half::bf16;
use rayon::prelude::*;

use super::{Float, Numbers, Real, Slice, SliceMut};
use crate::each;
use crate::parallel::{BLOCK, vectorized};

/// How a number becomes one of a type with fewer bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest, ties to even.
    #[default]
    Nearest,
    /// To `bf16`: up or down, with probabilities that make the expected value the number itself
    /// (Gupta et al., Deep Learning with Limited Numerical Precision, 2015). What is drawn depends on the
    /// seed and the number's position alone. Other types round to the nearest.
    Stochastic {
        /// What is drawn depends on it.
        seed: u32,
    },
}

#[inline(always)]
pub(super) fn widen_bf16(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Rounds to nearest, without a branch, so that it is vectorised. NaN stays NaN.
#[inline(always)]
pub(super) fn narrow_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
}

/// Rounds up where the bits that are cut off, plus as many random ones, carry.
#[inline(always)]
pub(super) fn stochastic_bf16(value: f32, seed: u32, at: u32) -> bf16 {
    let bits = value.to_bits();
    // The exponent of infinity and NaN must not be carried into.
    let is_special = bits & 0x7f80_0000 == 0x7f80_0000;
    let rounded = bits.wrapping_add(random(seed, at) & 0xffff) >> 16;
    let largest = (bits & 0x8000_0000) >> 16 | 0x7f7f;
    let finite = if rounded & 0x7f80 == 0x7f80 { largest } else { rounded };
    if is_special { narrow_bf16(value) } else { bf16::from_bits(finite as u16) }
}

/// 32 bits that depend on a seed and a position: the finalizer of MurmurHash3.
#[inline(always)]
fn random(seed: u32, at: u32) -> u32 {
    let mut bits = at.wrapping_mul(0x9e37_79b9) ^ seed;
    bits = (bits ^ (bits >> 16)).wrapping_mul(0x85eb_ca6b);
    bits = (bits ^ (bits >> 13)).wrapping_mul(0xc2b2_ae35);
    bits ^ (bits >> 16)
}

impl Slice<'_> {
    /// As numbers of another type, rounded to the nearest.
    #[must_use]
    pub fn cast(self, float: Float) -> Numbers {
        let mut numbers = Numbers::zeros(float, self.len());
        numbers.as_mut().copy_from(self);
        numbers
    }

    /// As `f64`, which has every number of all types.
    #[must_use]
    pub fn to_f64(self) -> Vec<f64> {
        let mut values = vec![0.0; self.len()];
        f64::widen(self, &mut values);
        values
    }

    /// As `f32`.
    #[must_use]
    pub fn to_f32(self) -> Vec<f32> {
        let mut values = vec![0.0; self.len()];
        f32::widen(self, &mut values);
        values
    }
}

impl Numbers {
    /// As numbers of another type, rounded to the nearest. They are copied only if the types differ.
    #[must_use]
    pub fn into_float(self, float: Float) -> Self {
        if self.float() == float { self } else { self.as_slice().cast(float) }
    }
}

impl SliceMut<'_> {
    /// Overwrites these numbers with as many, of whichever type, rounded to the nearest.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    pub fn copy_from(&mut self, source: Slice<'_>) {
        assert_eq!(self.len(), source.len(), "copy: lengths should agree");
        match (self, source) {
            (SliceMut::F64(target), Slice::F64(source)) => target.copy_from_slice(source),
            (SliceMut::F32(target), Slice::F32(source)) => target.copy_from_slice(source),
            (SliceMut::F16(target), Slice::F16(source)) => target.copy_from_slice(source),
            (SliceMut::BF16(target), Slice::BF16(source)) => target.copy_from_slice(source),
            (target, Slice::F64(source)) => narrow_all(source, target.reborrow()),
            (target, Slice::F32(source)) => narrow_all(source, target.reborrow()),
            (SliceMut::F64(target), source) => widen_all(source, target),
            (SliceMut::F32(target), source) => widen_all(source, target),
            (target, source) => narrow_all(&source.to_f32(), target.reborrow()),
        }
    }
}

fn narrow_all<T: Real>(source: &[T], target: SliceMut<'_>) {
    each!(SliceMut, target, target => {
        source.par_chunks(BLOCK).zip(target.par_chunks_mut(BLOCK)).for_each(|(source, target)| {
            vectorized(
                #[inline(always)]
                || T::narrow(source, target.into(), Rounding::Nearest, 0),
            );
        });
    });
}

fn widen_all<T: Real>(source: Slice<'_>, target: &mut [T]) {
    target.par_chunks_mut(BLOCK).enumerate().for_each(|(index, target)| {
        let start = index * BLOCK;
        let source = source.part(start..start + target.len());
        vectorized(
            #[inline(always)]
            || T::widen(source, target),
        );
    });
}

macro_rules! slices {
    ($($type:ty, $variant:ident;)*) => {
        $(
            impl<'a> From<&'a mut [$type]> for SliceMut<'a> {
                fn from(values: &'a mut [$type]) -> Self {
                    Self::$variant(values)
                }
            }

            impl<'a> From<&'a [$type]> for Slice<'a> {
                fn from(values: &'a [$type]) -> Self {
                    Self::$variant(values)
                }
            }
        )*
    };
}

slices! {
    f64, F64;
    f32, F32;
    half::f16, F16;
    bf16, BF16;
}
