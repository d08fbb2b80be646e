//! A flat buffer of numbers that lends parts of itself to a model as tensors.

use std::ops::Range;

use burn::tensor::{DType, Device, Shape, Tensor, TensorData};

use crate::interop;

/// Numbers of which tensors are made. Where tensors live in host memory they share the buffer's;
/// other devices get copies, and the buffer stays on the host.
#[derive(Debug)]
pub struct FlatTensor {
    memory: Memory,
    /// Without autodiff.
    device: Device,
}

#[derive(Debug)]
enum Memory {
    /// The tensor's storage is the buffer, and views share it.
    Shared(Box<Tensor<1>>),
    Host(Vec<f32>),
}

impl FlatTensor {
    /// Takes `values` over, without copying them, for tensors on `device`.
    #[must_use]
    pub fn new(values: Vec<f32>, device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        let memory = match device == Device::flex() {
            true => {
                let shape = [values.len()];
                let data = TensorData::new(values, shape);
                Memory::Shared(Box::new(Tensor::from_data(data, (&device, DType::F32))))
            }
            false => Memory::Host(values),
        };
        Self { memory, device }
    }

    /// The numbers of `range` as a tensor without autodiff, which shares the buffer's memory where it
    /// can.
    ///
    /// # Panics
    ///
    /// If the range is not within the buffer or has not as many elements as the shape.
    #[must_use]
    pub fn view<const D: usize>(&self, range: Range<usize>, shape: Shape) -> Tensor<D> {
        match &self.memory {
            Memory::Shared(_) if range.is_empty() => Tensor::empty(shape, &self.device),
            Memory::Shared(tensor) => Tensor::clone(tensor).slice([range]).reshape(shape),
            Memory::Host(values) => interop::tensor(&values[range], shape, &self.device),
        }
    }

    /// As [`Self::view`], in memory of its own.
    ///
    /// # Panics
    ///
    /// As [`Self::view`].
    #[must_use]
    pub fn copy<const D: usize>(&self, range: Range<usize>, shape: Shape) -> Tensor<D> {
        match &self.memory {
            Memory::Shared(tensor) => {
                let data = Tensor::clone(tensor).slice([range]).into_data();
                Tensor::<1>::from_data(data, (&self.device, DType::F32)).reshape(shape)
            }
            Memory::Host(values) => interop::tensor(&values[range], shape, &self.device),
        }
    }

    /// The numbers. They are copied only if there are tensors that still share them.
    ///
    /// # Panics
    ///
    /// If host memory cannot be read, which does not happen.
    #[must_use]
    pub fn into_values(self) -> Vec<f32> {
        match self.memory {
            Memory::Shared(tensor) => {
                tensor.into_data().try_into_vec().expect("the buffer holds f32 in host memory")
            }
            Memory::Host(values) => values,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_share_the_buffer_and_give_it_back() {
        let values: Vec<f32> = (0..24u8).map(f32::from).collect();
        let start = values.as_ptr();
        let flat = FlatTensor::new(values, &Device::flex().autodiff());
        let view = flat.view::<2>(6..12, Shape::new([2, 3]));
        assert_eq!(
            view.to_data().as_slice::<f32>().ok(),
            Some(&[6.0, 7.0, 8.0, 9.0, 10.0, 11.0][..])
        );
        assert_eq!(flat.view::<2>(4..4, Shape::new([0, 3])).dims(), [0, 3]);
        assert!(!view.is_autodiff());
        let copy = flat.copy::<1>(23..24, Shape::new([1]));
        drop(view);
        let values = flat.into_values();
        assert_eq!(values.as_ptr(), start, "nobody shares it, so nothing is copied");
        assert_eq!(copy.into_scalar::<f32>(), 23.0);
    }

    #[test]
    fn a_buffer_that_is_still_shared_is_copied() {
        let flat = FlatTensor::new(vec![1.0, 2.0], &Device::flex());
        let view = flat.view::<1>(0..1, Shape::new([1]));
        let mut values = flat.into_values();
        values[0] = 5.0;
        assert_eq!(view.into_scalar::<f32>(), 1.0);
    }
}
