//! Types that travel in collectives, and how they are combined.

use half::{bf16, f16};

use crate::description::Dtype;
use crate::transport::Payload;

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
/// Partial results travel in [`Element::Partial`]: half-precision numbers are combined in `f32` and
/// rounded once, at the end. All others are their own partial.
pub trait Element:
    sealed::Sealed + Copy + Send + Sync + PartialEq + std::fmt::Debug + 'static
{
    /// The type.
    const DTYPE: Dtype;
    /// Whether a mean makes sense.
    const IS_FLOAT: bool;
    /// What partial results travel in.
    type Partial: Element<Partial = Self::Partial>;

    /// Combines `source` into `target`, element by element. A mean is summed here and divided by
    /// [`Element::divide`].
    fn combine(op: ReduceOp, target: &mut [Self], source: &[Self]);

    /// Divides by the number of ranks. Integers stay as they are.
    fn divide(values: &mut [Self], ranks: usize);

    /// Zero.
    const ZERO: Self;

    /// The numbers themselves as partial results, where the types are the same.
    fn as_partial(values: &mut [Self]) -> Option<&mut [Self::Partial]>;

    /// The number as a partial result.
    fn to_partial(self) -> Self::Partial;

    /// A partial result, rounded.
    fn from_partial(partial: Self::Partial) -> Self;

    /// Makes a payload of numbers.
    fn wrap(values: Vec<Self>) -> Payload;

    /// The numbers of a payload of this type.
    fn unwrap(payload: Payload) -> Option<Vec<Self>>;
}

fn zip<T: Copy>(target: &mut [T], source: &[T], combine: impl Fn(T, T) -> T) {
    for (t, s) in target.iter_mut().zip(source) {
        *t = combine(*t, *s);
    }
}

macro_rules! payload {
    ($variant:ident) => {
        fn wrap(values: Vec<Self>) -> Payload {
            Payload::$variant(values)
        }

        fn unwrap(payload: Payload) -> Option<Vec<Self>> {
            match payload {
                Payload::$variant(values) => Some(values),
                _ => None,
            }
        }
    };
}

macro_rules! float {
    ($type:ty, $variant:ident) => {
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: Dtype = Dtype::$variant;
            const IS_FLOAT: bool = true;
            const ZERO: Self = 0.0;
            type Partial = Self;

            fn combine(op: ReduceOp, target: &mut [Self], source: &[Self]) {
                // The standard `min` and `max` drop NaN, and with it the news that a rank has one.
                let pick = |t: Self, s: Self, s_wins: bool| match () {
                    () if t.is_nan() => t,
                    () if s.is_nan() || s_wins => s,
                    () => t,
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

            fn as_partial(values: &mut [Self]) -> Option<&mut [Self]> {
                Some(values)
            }

            fn to_partial(self) -> Self {
                self
            }

            fn from_partial(partial: Self) -> Self {
                partial
            }

            payload!($variant);
        }
    };
}

macro_rules! half {
    ($type:ty, $variant:ident) => {
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: Dtype = Dtype::$variant;
            const IS_FLOAT: bool = true;
            const ZERO: Self = Self::ZERO;
            type Partial = f32;

            fn combine(op: ReduceOp, target: &mut [Self], source: &[Self]) {
                for (t, s) in target.iter_mut().zip(source) {
                    let mut partial = [t.to_f32()];
                    f32::combine(op, &mut partial, &[s.to_f32()]);
                    *t = Self::from_f32(partial[0]);
                }
            }

            fn divide(values: &mut [Self], ranks: usize) {
                values.iter_mut().for_each(|v| *v = Self::from_f32(v.to_f32() / ranks as f32));
            }

            fn as_partial(_values: &mut [Self]) -> Option<&mut [f32]> {
                None
            }

            fn to_partial(self) -> f32 {
                self.to_f32()
            }

            fn from_partial(partial: f32) -> Self {
                Self::from_f32(partial)
            }

            payload!($variant);
        }
    };
}

macro_rules! integer {
    ($type:ty, $variant:ident) => {
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: Dtype = Dtype::$variant;
            const IS_FLOAT: bool = false;
            const ZERO: Self = 0;
            type Partial = Self;

            fn combine(op: ReduceOp, target: &mut [Self], source: &[Self]) {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => zip(target, source, Self::wrapping_add),
                    ReduceOp::Product => zip(target, source, Self::wrapping_mul),
                    ReduceOp::Min => zip(target, source, Ord::min),
                    ReduceOp::Max => zip(target, source, Ord::max),
                }
            }

            fn divide(_values: &mut [Self], _ranks: usize) {}

            fn as_partial(values: &mut [Self]) -> Option<&mut [Self]> {
                Some(values)
            }

            fn to_partial(self) -> Self {
                self
            }

            fn from_partial(partial: Self) -> Self {
                partial
            }

            payload!($variant);
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
