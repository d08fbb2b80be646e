//! The communication thread of a rank: runs plans on a transport, and counts what it sends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::GroupOptions;
use crate::abort::AbortSignal;
use crate::collectives::plan::Plan;
use crate::collectives::{Element, ReduceOp, Run, execute};
use crate::description::Description;
use crate::error::Error;
use crate::transport::{Frame, Transport};

/// Ten years: as good as none, and far from the end of the clock.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The communication thread's state.
pub(super) struct Worker {
    pub(super) transport: Counted,
    pub(super) options: GroupOptions,
    /// Of the collective that is running.
    pub(super) op: ReduceOp,
}

impl Worker {
    /// World and rank.
    pub(super) fn place(&self) -> (usize, usize) {
        (self.transport.world(), self.transport.rank())
    }

    /// Runs a job, unless the group has failed; a job that fails fails the group.
    pub(super) fn guarded<R>(
        &mut self,
        description: Description,
        job: impl FnOnce(&mut Self) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let signal = self.transport.abort_signal().clone();
        if let Some(failure) = signal.failure() {
            return Err(failure.seen_by(self.transport.rank(), description));
        }
        job(self).inspect_err(|error| signal.raise(self.transport.rank(), error))
    }

    pub(super) fn run<T: Element>(
        &mut self,
        plan: &Plan,
        buffer: &mut [T],
        description: Description,
    ) -> Result<(), Error> {
        let mut run = Run {
            deadline: Instant::now() + self.options.timeout.min(LONGEST_TIMEOUT),
            transport: &mut self.transport,
            description,
            op: self.op,
            segment: (self.options.segment_bytes / size_of::<T>()).max(1),
        };
        execute(plan, buffer, &mut run)
    }
}

/// Counts what passes through a transport.
#[derive(Debug)]
pub(super) struct Counted {
    pub(super) inner: Box<dyn Transport>,
    pub(super) counters: Arc<Counters>,
}

impl Transport for Counted {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn abort_signal(&self) -> &AbortSignal {
        self.inner.abort_signal()
    }

    fn send(&mut self, peer: usize, frame: Frame) -> Result<(), Error> {
        self.counters.messages.fetch_add(1, Ordering::Relaxed);
        self.counters.bytes.fetch_add(frame.payload.byte_len() as u64, Ordering::Relaxed);
        self.inner.send(peer, frame)
    }

    fn recv(
        &mut self,
        peer: usize,
        waiting_in: Description,
        deadline: Instant,
    ) -> Result<Frame, Error> {
        self.inner.recv(peer, waiting_in, deadline)
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) messages: AtomicU64,
    pub(super) bytes: AtomicU64,
}
