//! Products of 16-bit matrices are as exact as sums in `f32` are, on every device that has the type: where
//! sums are kept in 16 bits, long ones stop growing, and training does not converge.

use burn::tensor::{Device, Shape, Tensor};
use pyroclast::nn::matmul;
use pyroclast_kernels::interop;
use pyroclast_kernels::numbers::{Float, Numbers};

/// Terms of each sum.
const TERMS: usize = 16384;
const ROWS: usize = 5;
const COLUMNS: usize = 7;

/// Numbers of one sign, which 16-bit sums would lose, or of both.
fn numbers(len: usize, float: Float, lowest: f64) -> Numbers {
    let value = |i: usize| {
        let unit =
            ((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / 2f64.powi(24);
        lowest + unit * (1.0 - lowest)
    };
    Numbers::F64((0..len).map(value).collect()).into_float(float)
}

fn tensor(numbers: &Numbers, shape: [usize; 2], device: &Device) -> Tensor<2> {
    interop::tensor(numbers.as_slice(), Shape::from(shape), device)
}

fn read(tensor: Tensor<2>) -> Vec<f64> {
    let mut read = vec![];
    let flat = tensor.reshape([-1]);
    interop::read_all(vec![flat], |_, values| read = values.to_f64()).expect("a product");
    read
}

fn check(device: &Device, float: Float, name: &str) {
    for lowest in [0.0, -1.0] {
        let a = numbers(ROWS * TERMS, float, lowest);
        let b = numbers(TERMS * COLUMNS, float, lowest);
        let (x, y) = (a.as_slice().to_f64(), b.as_slice().to_f64());
        let left = tensor(&a, [ROWS, TERMS], device);
        let right = tensor(&b, [TERMS, COLUMNS], device);
        // As in a forward pass, and as in the two products of a backward pass, which transpose.
        let transposed = |tensor: &Tensor<2>, shape: [usize; 2]| {
            let turned = read(tensor.clone().transpose());
            let turned = Numbers::F64(turned).into_float(float);
            self::tensor(&turned, shape, device).transpose()
        };
        let (left_t, right_t) =
            (transposed(&left, [TERMS, ROWS]), transposed(&right, [COLUMNS, TERMS]));
        for (how, product) in [
            ("A B", matmul(left.clone(), right.clone())),
            ("A B^T", matmul(left, right_t)),
            ("A^T B", matmul(left_t, right)),
        ] {
            for (at, got) in read(product).into_iter().enumerate() {
                let (row, column) = (at / COLUMNS, at % COLUMNS);
                let term = |k: usize| x[row * TERMS + k] * y[k * COLUMNS + column];
                let exact: f64 = (0..TERMS).map(term).sum();
                let sizes: f64 = (0..TERMS).map(|k| term(k).abs()).sum();
                // Higham, Accuracy and Stability of Numerical Algorithms, section 3.1, and one rounding.
                let unit = f64::from(f32::EPSILON) / 2.0 * TERMS as f64;
                let last = if float == Float::F16 { 2f64.powi(-11) } else { 2f64.powi(-8) };
                let bound = unit / (1.0 - unit) * sizes + last * exact.abs();
                let error = (got - exact).abs();
                assert!(error <= bound, "{name}, {float}, {how}: {got} is {error} from {exact}");
            }
        }
    }
}

#[test]
fn products_of_halves_are_summed_in_f32() {
    let cpu = Device::flex();
    for float in [Float::F16, Float::BF16] {
        assert!(cpu.supports_dtype(float.dtype()), "the CPU has every type");
        check(&cpu, float, "cpu");
    }
    let test = "products_of_halves_are_summed_in_f32";
    let Some(gpu) = crate::gpu::device(test) else { return };
    for float in [Float::F16, Float::BF16] {
        match gpu.supports_dtype(float.dtype()) {
            true => check(&gpu, float, "gpu"),
            false => crate::gpu::skip(test, &format!("the device does not have {float}")),
        }
    }
}
