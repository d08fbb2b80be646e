//! Moving frames between two ranks. A transport knows nothing of collectives.

mod address;
pub mod integrity;
pub mod memory;
pub mod tcp;
pub mod wire;

use std::time::Instant;

use crate::abort::AbortSignal;
use crate::description::{Description, Dtype};
use crate::error::Error;

pub use integrity::Integrity;

#[cfg(test)]
mod faults;

/// Most bytes of payload in one frame. What claims to be larger is refused before it is read.
pub const MAX_FRAME_BYTES: usize = 16 << 20;

/// Numbers in flight.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Payload {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
    /// 16-bit floats, IEEE.
    F16(Vec<half::f16>),
    /// 16-bit floats with the exponent of `f32`.
    Bf16(Vec<half::bf16>),
    /// 32-bit integers.
    I32(Vec<i32>),
    /// 64-bit integers.
    I64(Vec<i64>),
    /// Bytes.
    U8(Vec<u8>),
}

impl Payload {
    /// Type of the numbers.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::F64(_) => Dtype::F64,
            Self::F16(_) => Dtype::F16,
            Self::Bf16(_) => Dtype::Bf16,
            Self::I32(_) => Dtype::I32,
            Self::I64(_) => Dtype::I64,
            Self::U8(_) => Dtype::U8,
        }
    }

    /// Bytes that the numbers occupy.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        match self {
            Self::F32(v) => size_of_val(v.as_slice()),
            Self::F64(v) => size_of_val(v.as_slice()),
            Self::F16(v) => size_of_val(v.as_slice()),
            Self::Bf16(v) => size_of_val(v.as_slice()),
            Self::I32(v) => size_of_val(v.as_slice()),
            Self::I64(v) => size_of_val(v.as_slice()),
            Self::U8(v) => v.len(),
        }
    }
}

/// One message: a segment of a buffer, and the collective that it belongs to as its sender sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// The sender's view of the collective.
    pub description: Description,
    /// The segment.
    pub payload: Payload,
}

/// A rank's connections to all other ranks. Frames between two ranks arrive in the order in which
/// they were sent.
pub trait Transport: Send + std::fmt::Debug {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// The signal by which any rank stops all others.
    fn abort_signal(&self) -> &AbortSignal;

    /// Hands `frame` over for `peer`. Does not wait for the peer to receive it.
    ///
    /// # Errors
    ///
    /// [`Error::Aborted`] or [`Error::PeerLeft`].
    fn send(&mut self, peer: usize, frame: Frame) -> Result<(), Error>;

    /// The next frame from `peer`. `waiting_in` is what errors say this rank is doing.
    ///
    /// # Errors
    ///
    /// [`Error::Aborted`], [`Error::PeerLeft`], or [`Error::Timeout`] at the deadline.
    fn recv(
        &mut self,
        peer: usize,
        waiting_in: Description,
        deadline: Instant,
    ) -> Result<Frame, Error>;
}
