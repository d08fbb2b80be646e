//! A flat buffer of numbers that lends parts of itself to a model as tensors.

use std::ops::Range;

use burn::tensor::{Device, Shape, Tensor, TensorData};

use crate::numbers::{Float, Numbers};
use crate::{each, interop};

/// Numbers of which tensors are made. Where tensors live in host memory they share the buffer's;
/// other devices get copies, and the buffer stays on the host.
#[derive(Debug)]
pub struct FlatTensor {
    memory: Memory,
    float: Float,
    /// Without autodiff.
    device: Device,
}

#[derive(Debug)]
enum Memory {
    /// The tensor's storage is the buffer, and views share it.
    Shared(Box<Tensor<1>>),
    Host(Numbers),
}

impl FlatTensor {
    /// Takes `values` over, without copying them, for tensors on `device`.
    #[must_use]
    pub fn new(values: impl Into<Numbers>, device: &Device) -> Self {
        let (values, device) = (values.into(), device.clone().without_autodiff());
        let (float, shape) = (values.float(), [values.len()]);
        let memory = match device == Device::flex() {
            true => {
                let data = each!(Numbers, values, values => TensorData::new(values, shape));
                Memory::Shared(Box::new(Tensor::from_data(data, (&device, float.dtype()))))
            }
            false => Memory::Host(values),
        };
        Self { memory, float, device }
    }

    /// The numbers' type.
    #[must_use]
    pub fn float(&self) -> Float {
        self.float
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
            Memory::Shared(_) if range.is_empty() => {
                Tensor::empty(shape, (&self.device, self.float.dtype()))
            }
            Memory::Shared(tensor) => Tensor::clone(tensor).slice([range]).reshape(shape),
            Memory::Host(values) => interop::tensor(values.part(range), shape, &self.device),
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
                Tensor::<1>::from_data(data, (&self.device, self.float.dtype())).reshape(shape)
            }
            Memory::Host(values) => interop::tensor(values.part(range), shape, &self.device),
        }
    }

    /// A copy of the numbers.
    ///
    /// # Panics
    ///
    /// As [`Self::into_values`].
    #[must_use]
    pub fn to_numbers(&self) -> Numbers {
        match &self.memory {
            Memory::Shared(tensor) => read(tensor.to_data(), self.float),
            Memory::Host(values) => values.clone(),
        }
    }

    /// The numbers. They are copied only if there are tensors that still share them.
    ///
    /// # Panics
    ///
    /// If host memory cannot be read, which does not happen.
    #[must_use]
    pub fn into_values(self) -> Numbers {
        let tensor = match self.memory {
            Memory::Shared(tensor) => tensor,
            Memory::Host(values) => return values,
        };
        read(tensor.into_data(), self.float)
    }
}

fn read(data: TensorData, float: Float) -> Numbers {
    let is = "the buffer holds numbers of its type in host memory";
    match float {
        Float::F64 => Numbers::F64(data.try_into_vec().expect(is)),
        Float::F32 => Numbers::F32(data.try_into_vec().expect(is)),
        Float::F16 => Numbers::F16(data.try_into_vec().expect(is)),
        Float::BF16 => Numbers::BF16(data.try_into_vec().expect(is)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::Slice;

    fn start(values: &Numbers) -> *const u8 {
        values.as_slice().as_bytes().as_ptr()
    }

    #[test]
    fn views_share_the_buffer_and_give_it_back_in_every_type() {
        for float in Float::ALL {
            let values = Numbers::F32((0..24u8).map(f32::from).collect()).into_float(float);
            let at = start(&values);
            let flat = FlatTensor::new(values, &Device::flex().autodiff());
            let view = flat.view::<2>(6..12, Shape::new([2, 3]));
            assert_eq!(view.dtype(), float.dtype());
            let mut seen = vec![];
            interop::read_all(vec![view.clone().reshape([-1])], |_, read| seen = read.to_f64())
                .expect("floats");
            assert_eq!(seen, [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]);
            let empty = flat.view::<2>(4..4, Shape::new([0, 3]));
            assert_eq!((empty.dims(), empty.dtype()), ([0, 3], float.dtype()));
            assert!(!view.is_autodiff());
            let copy = flat.copy::<1>(23..24, Shape::new([1]));
            drop(view);
            assert_eq!(start(&flat.into_values()), at, "nobody shares it, so nothing is copied");
            assert_eq!((copy.dtype(), copy.into_scalar::<f32>()), (float.dtype(), 23.0));
        }
    }

    #[test]
    fn a_buffer_that_is_still_shared_is_copied() {
        let flat = FlatTensor::new(vec![1.0f32, 2.0], &Device::flex());
        let view = flat.view::<1>(0..1, Shape::new([1]));
        let mut values = flat.into_values();
        values.part_mut(0..1).copy_from(Slice::F32(&[5.0]));
        assert_eq!(view.into_scalar::<f32>(), 1.0);
    }
}
