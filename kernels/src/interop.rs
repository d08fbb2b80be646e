//! Between Burn tensors and flat slices. The only file of the workspace that reads a tensor's
//! numbers into host memory or makes a tensor from a slice of a flat buffer.

use burn::tensor::{DType, Device, Shape, Tensor, TensorData, Transaction};

use crate::each;
use crate::numbers::{Float, Slice};

/// Why numbers could not be read from a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadError {
    /// The tensor's numbers are not of a [`Float`] type; holds the type that it has.
    Type(DType),
    /// The device failed while executing or copying; holds its message.
    Device(String),
}

impl std::fmt::Display for ReadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Type(dtype) => write!(f, "expected floating-point numbers, found {dtype:?}"),
            Self::Device(message) => write!(f, "the device failed: {message}"),
        }
    }
}

impl std::error::Error for ReadError {}

/// Copies tensors of any one rank from their device to the host in a single round trip, and hands
/// each one's numbers to `each` in row-major order, with its position.
///
/// # Errors
///
/// [`ReadError::Type`] for numbers that are not of a [`Float`] type, [`ReadError::Device`] if the device fails.
pub fn read_all(
    tensors: Vec<Tensor<1>>,
    mut each: impl FnMut(usize, Slice<'_>),
) -> Result<(), ReadError> {
    let transaction = tensors.into_iter().fold(Transaction::default(), Transaction::register);
    let read =
        transaction.try_execute().map_err(|error| ReadError::Device(format!("{error:?}")))?;
    for (position, data) in read.iter().enumerate() {
        each(position, slice(data)?);
    }
    Ok(())
}

/// The numbers of a tensor that was read.
fn slice(data: &TensorData) -> Result<Slice<'_>, ReadError> {
    let wrong = |_| ReadError::Type(data.dtype());
    Ok(match Float::of(data.dtype()) {
        Some(Float::F64) => Slice::F64(data.as_slice().map_err(wrong)?),
        Some(Float::F32) => Slice::F32(data.as_slice().map_err(wrong)?),
        Some(Float::F16) => Slice::F16(data.as_slice().map_err(wrong)?),
        Some(Float::BF16) => Slice::BF16(data.as_slice().map_err(wrong)?),
        None => return Err(ReadError::Type(data.dtype())),
    })
}

/// A tensor of the given shape and the numbers' type on `device`, filled in row-major order.
///
/// # Panics
///
/// If the number of values is not the product of the shape.
#[must_use]
pub fn tensor<const D: usize>(values: Slice<'_>, shape: Shape, device: &Device) -> Tensor<D> {
    let dtype = values.float().dtype();
    let data = each!(Slice, values, values => TensorData::new(values.to_vec(), shape));
    Tensor::from_data(data, (device, dtype))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_every_type_survive_the_round_trip() {
        let device = Device::flex();
        let values: Vec<f32> = (0..24).map(|v| v as f32 * 0.5).collect();
        for float in Float::ALL {
            let values = Slice::F32(&values).cast(float);
            let cube = tensor::<3>(values.as_slice(), Shape::new([2, 3, 4]), &device);
            assert_eq!(cube.dtype(), float.dtype());
            let transposed = cube.clone().swap_dims(0, 2).reshape([-1]);
            let mut seen = Vec::new();
            read_all(vec![cube.reshape([-1]), transposed], |_, v| seen.push(v.to_numbers()))
                .expect("floats should be readable");
            assert_eq!(seen[0], values);
            assert_eq!(seen[1].part(0..4).to_f64(), [0.0, 6.0, 2.0, 8.0]);
        }
    }

    #[test]
    fn other_types_are_refused_by_name() {
        let flexible = tensor::<1>(Slice::F32(&[1.0]), Shape::new([1]), &Device::flex());
        let data = flexible.equal_elem(1.0).into_data();
        assert!(matches!(slice(&data), Err(ReadError::Type(DType::Bool(_)))));
    }
}
