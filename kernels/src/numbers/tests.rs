use super::convert::{narrow_bf16, stochastic_bf16};
use super::*;

/// Numbers of all magnitudes, special ones, and neighbours of ties.
fn awkward() -> Vec<f32> {
    let special =
        [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE];
    let near = (0..4000u32).map(|i| f32::from_bits(i.wrapping_mul(0x0010_0ffb) ^ (i << 15)));
    special.into_iter().chain(near).collect()
}

fn same(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

#[test]
fn conversions_are_those_of_the_types_own() {
    let source = Numbers::F32(awkward());
    for float in Float::ALL {
        let converted = source.as_slice().cast(float);
        assert_eq!((converted.float(), converted.len()), (float, source.len()));
        for (got, value) in converted.as_slice().to_f64().into_iter().zip(awkward()) {
            let expected = match float {
                Float::F64 | Float::F32 => f64::from(value),
                Float::F16 => f64::from(f16::from_f32(value)),
                Float::BF16 => f64::from(bf16::from_f32(value)),
            };
            assert!(same(got, expected), "{value} as {float}: {got} {expected}");
        }
        let back = converted.as_slice().cast(Float::F64).into_float(float);
        for (got, expected) in
            back.as_slice().to_f64().into_iter().zip(converted.as_slice().to_f64())
        {
            assert!(same(got, expected), "{float} and back: {got} {expected}");
        }
    }
}

#[test]
fn stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average() {
    for value in [1.003_f32, -0.017, 3.0e38, f32::MAX, 1e-40, 0.0] {
        let (count, exact) = (20_000u32, f64::from(value));
        let mut sum = 0.0;
        for at in 0..count {
            let rounded = stochastic_bf16(value, 7, at);
            let down = bf16::from_bits((value.to_bits() >> 16) as u16);
            let up = bf16::from_bits((value.to_bits() >> 16) as u16 + 1);
            let up = if up.is_finite() { up } else { down };
            assert!(rounded == down || rounded == up, "{value}: {rounded}");
            sum += f64::from(rounded);
        }
        let ulp = f64::from(value.abs()) / 128.0;
        let mean = sum / f64::from(count);
        if value < 3.3e38 {
            assert!((mean - exact).abs() <= ulp * 0.02 + 1e-42, "{value}: {mean}");
        }
    }
    assert!(stochastic_bf16(f32::NAN, 1, 1).is_nan());
    assert_eq!(stochastic_bf16(f32::NEG_INFINITY, 1, 1), bf16::NEG_INFINITY);
    assert_eq!(stochastic_bf16(1.5, 3, 9), narrow_bf16(1.5), "it has no bits to lose");
}

#[test]
fn parts_are_views_and_types_are_kept_apart() {
    let mut numbers = Numbers::zeros(Float::BF16, 10);
    numbers.part_mut(2..5).copy_from(Slice::F32(&[1.0, 2.0, 3.0]));
    assert_eq!(numbers.part(1..6).to_f32(), [0.0, 1.0, 2.0, 3.0, 0.0]);
    assert_eq!((numbers.bytes(), numbers.float().is_half()), (20, true));
    numbers.extend(Slice::BF16(&[bf16::ONE]));
    let all = numbers.take();
    assert_eq!((all.len(), numbers.len(), numbers.float()), (11, 0, Float::BF16));
    assert_eq!(Float::of(DType::F16), Some(Float::F16));
    assert_eq!(Float::of(DType::I32), None);
}

#[test]
#[should_panic(expected = "f32 numbers added to f16")]
fn numbers_of_another_type_are_not_added() {
    Numbers::zeros(Float::F16, 1).extend(Slice::F32(&[1.0]));
}
