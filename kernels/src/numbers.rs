//! Flat buffers of numbers whose type is known at run time, and conversions between types.

mod convert;
mod real;

use std::fmt;
use std::ops::Range;

use burn::tensor::DType;
use half::{bf16, f16};

pub use self::convert::Rounding;
pub use self::real::Real;

/// A type of floating-point numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Float {
    /// IEEE 754 double precision.
    F64,
    /// IEEE 754 single precision.
    #[default]
    F32,
    /// IEEE 754 half precision: 11 bits of precision, numbers up to 65,504.
    F16,
    /// The upper half of an `f32`: 8 bits of precision, the range of `f32`.
    BF16,
}

impl Float {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::F64, Self::F32, Self::F16, Self::BF16];

    /// Bytes of a number.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// Whether it is of 16 bits.
    #[must_use]
    pub fn is_half(self) -> bool {
        self.size() == 2
    }

    /// The name, such as `bf16`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }

    /// Burn's name for it.
    #[must_use]
    pub fn dtype(self) -> DType {
        match self {
            Self::F64 => DType::F64,
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::BF16 => DType::BF16,
        }
    }

    /// What Burn calls so, if it is one of these.
    #[must_use]
    pub fn of(dtype: DType) -> Option<Self> {
        Self::ALL.into_iter().find(|float| float.dtype() == dtype)
    }
}

impl fmt::Display for Float {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A flat buffer of numbers of one type.
#[derive(Clone, PartialEq)]
pub enum Numbers {
    /// Of type [`Float::F64`].
    F64(Vec<f64>),
    /// Of type [`Float::F32`].
    F32(Vec<f32>),
    /// Of type [`Float::F16`].
    F16(Vec<f16>),
    /// Of type [`Float::BF16`].
    BF16(Vec<bf16>),
}

/// A part of [`Numbers`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Slice<'a> {
    /// Of type [`Float::F64`].
    F64(&'a [f64]),
    /// Of type [`Float::F32`].
    F32(&'a [f32]),
    /// Of type [`Float::F16`].
    F16(&'a [f16]),
    /// Of type [`Float::BF16`].
    BF16(&'a [bf16]),
}

/// A part of [`Numbers`], to be changed.
#[derive(Debug)]
pub enum SliceMut<'a> {
    /// Of type [`Float::F64`].
    F64(&'a mut [f64]),
    /// Of type [`Float::F32`].
    F32(&'a mut [f32]),
    /// Of type [`Float::F16`].
    F16(&'a mut [f16]),
    /// Of type [`Float::BF16`].
    BF16(&'a mut [bf16]),
}

/// The same expression for numbers of whichever type: `each!(Slice, slice, values => values.len())`. With
/// a second enum's name before the expression, the result is of the same type there.
#[macro_export]
macro_rules! each {
    ($from:ident, $numbers:expr, $values:ident => $to:ident, $body:expr) => {
        match $numbers {
            $from::F64($values) => $to::F64($body),
            $from::F32($values) => $to::F32($body),
            $from::F16($values) => $to::F16($body),
            $from::BF16($values) => $to::BF16($body),
        }
    };
    ($from:ident, $numbers:expr, $values:ident => $body:expr) => {
        match $numbers {
            $from::F64($values) => $body,
            $from::F32($values) => $body,
            $from::F16($values) => $body,
            $from::BF16($values) => $body,
        }
    };
}

impl Numbers {
    /// So many zeros.
    #[must_use]
    pub fn zeros(float: Float, len: usize) -> Self {
        match float {
            Float::F64 => Self::F64(vec![0.0; len]),
            Float::F32 => Self::F32(vec![0.0; len]),
            Float::F16 => Self::F16(vec![f16::ZERO; len]),
            Float::BF16 => Self::BF16(vec![bf16::ZERO; len]),
        }
    }

    /// Their type.
    #[must_use]
    pub fn float(&self) -> Float {
        self.as_slice().float()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        each!(Self, self, values => values.len())
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all of them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len() * self.float().size()
    }

    /// All of them.
    #[must_use]
    pub fn as_slice(&self) -> Slice<'_> {
        each!(Self, self, values => Slice, values)
    }

    /// All of them, to be changed.
    pub fn as_mut(&mut self) -> SliceMut<'_> {
        each!(Self, self, values => SliceMut, values)
    }

    /// Those of a range.
    ///
    /// # Panics
    ///
    /// If the range is not within the buffer.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Slice<'_> {
        each!(Self, self, values => Slice, &values[range])
    }

    /// Those of a range, to be changed.
    ///
    /// # Panics
    ///
    /// If the range is not within the buffer.
    pub fn part_mut(&mut self, range: Range<usize>) -> SliceMut<'_> {
        each!(Self, self, values => SliceMut, &mut values[range])
    }

    /// Takes them out, and leaves none.
    #[must_use]
    pub fn take(&mut self) -> Self {
        each!(Self, self, values => Numbers, std::mem::take(values))
    }

    /// Adds numbers of the same type at the end.
    ///
    /// # Panics
    ///
    /// If they are of another type.
    pub fn extend(&mut self, part: Slice<'_>) {
        match (self, part) {
            (Self::F64(all), Slice::F64(part)) => all.extend_from_slice(part),
            (Self::F32(all), Slice::F32(part)) => all.extend_from_slice(part),
            (Self::F16(all), Slice::F16(part)) => all.extend_from_slice(part),
            (Self::BF16(all), Slice::BF16(part)) => all.extend_from_slice(part),
            (all, part) => panic!("{} numbers added to {}", part.float(), all.float()),
        }
    }
}

impl From<Vec<f64>> for Numbers {
    fn from(values: Vec<f64>) -> Self {
        Self::F64(values)
    }
}

impl From<Vec<f32>> for Numbers {
    fn from(values: Vec<f32>) -> Self {
        Self::F32(values)
    }
}

impl From<Vec<f16>> for Numbers {
    fn from(values: Vec<f16>) -> Self {
        Self::F16(values)
    }
}

impl From<Vec<bf16>> for Numbers {
    fn from(values: Vec<bf16>) -> Self {
        Self::BF16(values)
    }
}

impl Default for Numbers {
    /// None.
    fn default() -> Self {
        Self::F32(vec![])
    }
}

impl fmt::Debug for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, float) = (self.len(), self.float());
        match count {
            0..=8 => each!(Self, self, values => values.fmt(f)),
            _ => write!(f, "{count} {float} numbers"),
        }
    }
}

impl<'a> Slice<'a> {
    /// Their type.
    #[must_use]
    pub fn float(&self) -> Float {
        match self {
            Self::F64(_) => Float::F64,
            Self::F32(_) => Float::F32,
            Self::F16(_) => Float::F16,
            Self::BF16(_) => Float::BF16,
        }
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        each!(Self, self, values => values.len())
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Those of a range.
    ///
    /// # Panics
    ///
    /// If the range is not within them.
    #[must_use]
    pub fn part(self, range: Range<usize>) -> Self {
        each!(Self, self, values => Self, &values[range])
    }

    /// The first `len` and the others.
    pub(crate) fn split_at(self, len: usize) -> (Self, Self) {
        (self.part(0..len), self.part(len..self.len()))
    }

    /// A copy.
    #[must_use]
    pub fn to_numbers(self) -> Numbers {
        each!(Self, self, values => Numbers, values.to_vec())
    }

    /// The bytes as they lie in memory.
    #[must_use]
    pub fn as_bytes(self) -> &'a [u8] {
        each!(Self, self, values => bytemuck::cast_slice(values))
    }
}

impl<'a> SliceMut<'a> {
    /// Their type.
    #[must_use]
    pub fn float(&self) -> Float {
        self.as_slice().float()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// As they are now.
    #[must_use]
    pub fn as_slice(&self) -> Slice<'_> {
        each!(Self, self, values => Slice, values)
    }

    /// Those of a range.
    ///
    /// # Panics
    ///
    /// If the range is not within them.
    pub fn part(self, range: Range<usize>) -> Self {
        each!(Self, self, values => Self, &mut values[range])
    }

    /// The same, for a shorter time.
    pub fn reborrow(&mut self) -> SliceMut<'_> {
        each!(Self, self, values => SliceMut, values)
    }

    /// The first `len` and the others.
    pub(crate) fn split_at(self, len: usize) -> (Self, Self) {
        match self {
            Self::F64(values) => {
                let (first, others) = values.split_at_mut(len);
                (Self::F64(first), Self::F64(others))
            }
            Self::F32(values) => {
                let (first, others) = values.split_at_mut(len);
                (Self::F32(first), Self::F32(others))
            }
            Self::F16(values) => {
                let (first, others) = values.split_at_mut(len);
                (Self::F16(first), Self::F16(others))
            }
            Self::BF16(values) => {
                let (first, others) = values.split_at_mut(len);
                (Self::BF16(first), Self::BF16(others))
            }
        }
    }

    /// The bytes as they lie in memory, to be changed.
    #[must_use]
    pub fn as_bytes(self) -> &'a mut [u8] {
        each!(Self, self, values => bytemuck::cast_slice_mut(values))
    }

    /// Makes all of them zero.
    pub fn clear(self) {
        match self {
            Self::F64(values) => values.fill(0.0),
            Self::F32(values) => values.fill(0.0),
            Self::F16(values) => values.fill(f16::ZERO),
            Self::BF16(values) => values.fill(bf16::ZERO),
        }
    }
}

#[cfg(test)]
mod tests;
