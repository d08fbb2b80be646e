//! Numbers in flight, in buffers that are used again.

use std::sync::{Arc, Mutex, PoisonError};

use crate::collectives::Element;
use crate::description::Dtype;

/// Numbers in flight. They lie in whole words, so that a buffer fits numbers of every type.
#[derive(Clone, Debug)]
pub struct Payload {
    words: Vec<u64>,
    dtype: Dtype,
    /// Bytes of the words that count.
    bytes: usize,
}

impl Payload {
    /// Type of the numbers.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The numbers as they lie in memory.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }

    /// As [`Self::bytes`], to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }

    /// The numbers, if they are of this type.
    #[must_use]
    pub fn numbers<T: Element>(&self) -> Option<&[T]> {
        (self.dtype == T::DTYPE).then(|| bytemuck::cast_slice(self.bytes()))
    }

    /// As [`Self::numbers`], to be changed.
    pub fn numbers_mut<T: Element>(&mut self) -> Option<&mut [T]> {
        (self.dtype == T::DTYPE).then(|| bytemuck::cast_slice_mut(self.bytes_mut()))
    }
}

/// Most buffers that wait to be used again, and the largest of them in bytes: together 64 MiB.
const MAX_BUFFERS: usize = 64;
const MAX_BUFFER_BYTES: usize = 1 << 20;

/// Buffers that have been used, the last one first: it is still in the cache, and its memory needs
/// neither clearing nor a page fault.
#[derive(Clone, Debug, Default)]
pub struct Pool(Arc<Mutex<Vec<Vec<u64>>>>);

impl Pool {
    /// A payload of `bytes` bytes, a multiple of the type's size, with whatever numbers.
    #[must_use]
    pub fn take(&self, dtype: Dtype, bytes: usize) -> Payload {
        let used = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut words = used.unwrap_or_default();
        let needed = bytes.div_ceil(size_of::<u64>());
        if words.capacity() < needed {
            words = vec![0; needed];
        }
        if words.len() < needed {
            words.resize(needed, 0);
        }
        Payload { words, dtype, bytes }
    }

    /// A payload of these numbers.
    #[must_use]
    pub fn copy_of<T: Element>(&self, numbers: &[T]) -> Payload {
        let mut payload = self.take(T::DTYPE, size_of_val(numbers));
        payload.bytes_mut().copy_from_slice(bytemuck::cast_slice(numbers));
        payload
    }

    /// Bytes of the buffers that wait to be used again.
    #[must_use]
    pub fn idle_bytes(&self) -> usize {
        let buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        buffers.iter().map(|words| words.capacity() * size_of::<u64>()).sum()
    }

    /// Takes a buffer back.
    pub fn put(&self, payload: Payload) {
        let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_small = payload.words.capacity() * size_of::<u64>() <= MAX_BUFFER_BYTES;
        if is_small && buffers.len() < MAX_BUFFERS {
            buffers.push(payload.words);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn numbers_of_every_type_come_back_from_one_buffer() {
        let pool = Pool::default();
        let first = pool.copy_of(&[1.5f64, -2.0]);
        assert_eq!(first.numbers::<f64>(), Some(&[1.5, -2.0][..]));
        assert_eq!(first.numbers::<f32>(), None, "they are of another type");
        pool.put(first);
        for len in [0, 1, 3, 8] {
            let halves = vec![f16::from_f32(0.5); len];
            let mut payload = pool.copy_of(&halves);
            assert_eq!(payload.bytes().len(), 2 * len);
            assert_eq!(payload.numbers::<f16>(), Some(&halves[..]));
            assert_eq!(payload.numbers_mut::<f16>().map(|n| n.len()), Some(len));
            assert!(payload.words.capacity() <= 2, "the buffer was used again");
            pool.put(payload);
        }
        assert_eq!(pool.copy_of(&[7u8; 100]).numbers::<u8>(), Some(&[7u8; 100][..]));
    }

    #[test]
    fn a_pool_keeps_few_and_small_buffers() {
        let pool = Pool::default();
        let many: Vec<Payload> = (0..2 * MAX_BUFFERS).map(|_| pool.take(Dtype::U8, 8)).collect();
        many.into_iter().for_each(|payload| pool.put(payload));
        let large = pool.take(Dtype::U8, MAX_BUFFER_BYTES + 8);
        pool.put(large);
        assert_eq!(pool.idle_bytes(), 8 * (MAX_BUFFERS - 1));
        let kept = pool.0.lock().expect("nobody panicked");
        assert_eq!(kept.len(), MAX_BUFFERS - 1);
        assert!(kept.iter().all(|words| words.len() == 1));
    }
}
