//! Between Burn tensors and flat slices. The only file of the workspace that reads a tensor's
//! numbers into host memory or makes a tensor from a slice of a flat buffer.

use burn::tensor::{DType, Device, Shape, Tensor, TensorData, Transaction};

/// Why numbers could not be read from a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadError {
    /// The tensor is not `f32`; holds the type that it has.
    Type(DType),
    /// The device failed while executing or copying; holds its message.
    Device(String),
}

impl std::fmt::Display for ReadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Type(dtype) => write!(f, "expected f32 numbers, found {dtype:?}"),
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
/// [`ReadError::Type`] for numbers other than `f32`, [`ReadError::Device`] if the device fails.
pub fn read_all(
    tensors: Vec<Tensor<1>>,
    mut each: impl FnMut(usize, &[f32]),
) -> Result<(), ReadError> {
    let transaction = tensors.into_iter().fold(Transaction::default(), Transaction::register);
    let read =
        transaction.try_execute().map_err(|error| ReadError::Device(format!("{error:?}")))?;
    for (position, data) in read.iter().enumerate() {
        each(position, data.as_slice().map_err(|_| ReadError::Type(data.dtype()))?);
    }
    Ok(())
}

/// A tensor of the given shape on `device`, filled from `values` in row-major order.
///
/// # Panics
///
/// If the number of values is not the product of the shape.
#[must_use]
pub fn tensor<const D: usize>(values: &[f32], shape: Shape, device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (device, DType::F32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_the_round_trip() {
        let device = Device::flex();
        let values: Vec<f32> = (0..24).map(|v| v as f32 * 0.5).collect();
        let cube = tensor::<3>(&values, Shape::new([2, 3, 4]), &device);
        let transposed = cube.clone().swap_dims(0, 2).reshape([-1]);
        let mut seen = Vec::new();
        read_all(vec![cube.reshape([-1]), transposed], |_, v| seen.push(v.to_vec()))
            .expect("f32 tensors should be readable");
        assert_eq!(seen[0], values);
        assert_eq!(&seen[1][..4], [0.0, 6.0, 2.0, 8.0]);
    }

    #[test]
    fn other_types_are_refused_by_name() {
        let half = tensor::<1>(&[1.0], Shape::new([1]), &Device::flex())
            .cast(burn::tensor::FloatDType::F16);
        assert_eq!(read_all(vec![half], |_, _| ()), Err(ReadError::Type(DType::F16)));
    }
}
