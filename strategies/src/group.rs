//! A rank's membership in a group: collectives in launch order, on a thread of their own.

mod movements;
mod options;
mod reductions;
mod roster;
mod subgroups;
mod units;
mod worker;

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::{Receiver, bounded};

pub use self::options::GroupOptions;
pub use self::subgroups::Mesh;
use crate::abort::AbortSignal;
use crate::collectives::Element;
use crate::description::{Description, GroupId, Operation};
use crate::error::Error;
use crate::transport::{Transport, memory};
use roster::Roster;
use worker::{Call, CommThread};

/// What a rank has sent since its first group was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Messages sent.
    pub messages: u64,
    /// Bytes of payload sent.
    pub bytes: u64,
}

/// One rank's membership in a group of ranks that call the same collectives in the same order.
///
/// A collective is launched on the calling thread and runs on the rank's communication thread;
/// the caller goes on until it waits for the [`Pending`] result. After the first error, on whichever
/// rank, every collective of the group fails at once, as do those of all other groups of its ranks.
///
/// Ranks in arguments are ranks of the group; ranks in errors are those of the whole job. A rank has
/// left once it has dropped its last group.
#[derive(Debug)]
pub struct ProcessGroup {
    roster: Arc<Roster>,
    counts: Mutex<Counts>,
    /// Shared by the rank's groups; the last one to be dropped ends it.
    thread: Arc<CommThread>,
}

/// What a rank has done in a group.
#[derive(Debug, Default)]
struct Counts {
    collectives: u64,
    /// By peer: messages sent to it and received from it outside collectives.
    sent: HashMap<usize, u64>,
    received: HashMap<usize, u64>,
    subgroups: u64,
}

/// Which collective, and for which unit of a model.
#[derive(Clone, Copy, Debug)]
struct What {
    operation: Operation,
    unit: Option<u16>,
}

impl From<Operation> for What {
    fn from(operation: Operation) -> Self {
        Self { operation, unit: None }
    }
}

/// A collective that has been launched.
#[derive(Debug)]
#[must_use = "a collective's result, or its error, is only seen by waiting for it"]
pub struct Pending<T> {
    rank: usize,
    result: Receiver<Result<T, Error>>,
}

impl<T> Pending<T> {
    /// Waits until the collective has ended on this rank.
    ///
    /// # Errors
    ///
    /// Whatever ended the collective; the group is unusable afterwards.
    pub fn wait(self) -> Result<T, Error> {
        self.result.recv().unwrap_or(Err(Error::GroupClosed { rank: self.rank }))
    }
}

impl ProcessGroup {
    /// A member of the group of all ranks that `transport` connects.
    #[must_use]
    pub fn new(transport: impl Transport + 'static, options: GroupOptions) -> Self {
        Self::over(Box::new(transport), options)
    }

    /// As [`Self::new`], for whichever transport was chosen at run time.
    #[must_use]
    pub fn over(transport: Box<dyn Transport>, options: GroupOptions) -> Self {
        let (rank, members) = (transport.rank(), (0..transport.world()).collect());
        let roster = Arc::new(Roster { id: GroupId::WORLD, rank, members, options });
        let thread = Arc::new(CommThread::start(transport));
        Self { roster, counts: Mutex::new(Counts::default()), thread }
    }

    /// The group of a single rank. Collectives take the same path as everywhere and send nothing.
    #[must_use]
    pub fn single() -> Self {
        let mut endpoints = memory::endpoints(1);
        Self::new(endpoints.remove(0), GroupOptions::default())
    }

    /// This rank, counted within the group.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.roster.rank
    }

    /// Number of ranks in the group.
    #[must_use]
    pub fn world(&self) -> usize {
        self.roster.world()
    }

    /// The group's ranks as the whole job counts them, in ascending order. Errors name these.
    #[must_use]
    pub fn members(&self) -> &[usize] {
        &self.roster.members
    }

    /// What this rank has sent so far in all its groups. Collectives in flight count as far as they
    /// have come.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let counters = &self.thread.traffic;
        Traffic {
            messages: counters.messages.load(Ordering::Relaxed),
            bytes: counters.bytes.load(Ordering::Relaxed),
        }
    }

    /// Bytes of the buffers that messages are made of, while none is under way. Ranks that are threads
    /// share them.
    #[must_use]
    pub fn buffered_bytes(&self) -> usize {
        self.thread.pool.idle_bytes()
    }

    /// The signal that ends all groups on all ranks.
    #[must_use]
    pub fn abort_signal(&self) -> &AbortSignal {
        &self.thread.abort
    }

    /// Launches a collective of all ranks.
    fn launch<T: Element, R: Send + 'static>(
        &self,
        what: impl Into<What>,
        buffer: Vec<T>,
        body: impl FnOnce(&mut Call<'_>, Vec<T>) -> Result<R, Error> + Send + 'static,
    ) -> Pending<R> {
        let number = |counts: &mut Counts| next(&mut counts.collectives);
        self.enqueue(what.into(), buffer, number, body)
    }

    fn enqueue<T: Element, R: Send + 'static>(
        &self,
        What { operation, unit }: What,
        buffer: Vec<T>,
        number: impl FnOnce(&mut Counts) -> u64,
        body: impl FnOnce(&mut Call<'_>, Vec<T>) -> Result<R, Error> + Send + 'static,
    ) -> Pending<R> {
        let (answer, result) = bounded(1);
        let roster = Arc::clone(&self.roster);
        // The lock spans number and queue: collectives run in the order of their numbers.
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let (sequence, group) = (number(&mut counts), roster.id);
        let (elements, dtype) = (buffer.len(), T::DTYPE);
        let description = Description { operation, group, sequence, elements, dtype, unit };
        self.thread.launch(Box::new(move |transport| {
            let call = Call { transport, roster: &roster, description };
            // Nobody waits any more if the rank has failed.
            let _ = answer.send(call.guarded(|call| body(call, buffer)));
        }));
        Pending { rank: self.roster.global_rank(), result }
    }
}

/// Counts up, and returns the count before.
fn next(count: &mut u64) -> u64 {
    *count += 1;
    *count - 1
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.thread.abort.raise(self.roster.global_rank(), "the rank panicked");
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
