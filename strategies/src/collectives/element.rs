//! Types that travel in collectives.

use crate::transport::Payload;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for u8 {}
}

/// A number that a collective can carry.
pub trait Element: sealed::Sealed + Copy + Send + 'static {
    /// The type's name in error messages.
    const DTYPE: &'static str;

    /// `target += source`, element by element. Bytes add modulo 256.
    fn add(target: &mut [Self], source: &[Self]);

    /// Makes a payload of numbers.
    fn wrap(values: Vec<Self>) -> Payload;

    /// The numbers of a payload of this type.
    fn unwrap(payload: Payload) -> Option<Vec<Self>>;
}

macro_rules! element {
    ($type:ty, $variant:ident, $name:literal, $add:expr) => {
        impl Element for $type {
            const DTYPE: &'static str = $name;

            fn add(target: &mut [Self], source: &[Self]) {
                for (t, s) in target.iter_mut().zip(source) {
                    *t = $add(*t, *s);
                }
            }

            fn wrap(values: Vec<Self>) -> Payload {
                Payload::$variant(values)
            }

            fn unwrap(payload: Payload) -> Option<Vec<Self>> {
                match payload {
                    Payload::$variant(values) => Some(values),
                    _ => None,
                }
            }
        }
    };
}

element!(f32, F32, "f32", |t: f32, s: f32| t + s);
element!(f64, F64, "f64", |t: f64, s: f64| t + s);
element!(u8, U8, "u8", u8::wrapping_add);
