//! Moving frames between two ranks. A transport knows nothing of collectives.

mod address;
pub mod integrity;
pub mod memory;
mod payload;
pub mod tcp;
pub mod wire;

use std::time::Instant;

use crate::abort::AbortSignal;
use crate::description::Description;
use crate::error::Error;

pub use integrity::Integrity;
pub use payload::{Payload, Pool};

#[cfg(test)]
mod faults;

/// Most bytes of payload in one frame. What claims to be larger is refused before it is read.
pub const MAX_FRAME_BYTES: usize = 16 << 20;

/// Most frames that wait for one peer when a collective begins.
pub const MAX_BACKLOG: usize = 64;

/// One message: a segment of a buffer, and the collective that it belongs to as its sender sees it.
#[derive(Clone, Debug)]
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

    /// Buffers for frames. Whoever is done with a frame puts its payload there.
    fn pool(&self) -> &Pool;

    /// A peer for which more than [`MAX_BACKLOG`] frames wait, if there is one. Sending never waits,
    /// since within one collective two ranks may send to each other before either receives; so a rank
    /// looks here before it begins the next one.
    fn crowded(&self) -> Option<usize>;

    /// Hands `frame` over for `peer`. Does not wait for the peer to receive it.
    ///
    /// # Errors
    ///
    /// [`Error::Aborted`], [`Error::PeerLeft`], [`Error::Disconnected`], or [`Error::Misuse`] for a
    /// frame of more than [`MAX_FRAME_BYTES`].
    fn send(&mut self, peer: usize, frame: Frame) -> Result<(), Error>;

    /// The next frame from `peer`. `waiting_in` is what errors say this rank is doing.
    ///
    /// # Errors
    ///
    /// [`Error::Aborted`], [`Error::PeerLeft`], [`Error::Disconnected`], [`Error::Damaged`], or
    /// [`Error::Timeout`] at the deadline.
    fn recv(
        &mut self,
        peer: usize,
        waiting_in: Description,
        deadline: Instant,
    ) -> Result<Frame, Error>;
}
