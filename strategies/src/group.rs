//! A rank's membership in a group: collectives in launch order, on a thread of their own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use crate::abort::AbortSignal;
use crate::collectives::plan::{self, Plan};
use crate::collectives::{Element, Run, execute};
use crate::error::{Description, Error};
use crate::transport::{Frame, Transport, memory};

/// Settings of a group.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// How long a rank waits for a peer within one collective. 10 minutes by default.
    pub timeout: Duration,
    /// Largest segment in bytes, at least 8. By default 256 KiB: small enough that a ring of ranks
    /// on one machine passes it on from the second-level cache.
    pub segment_bytes: usize,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), segment_bytes: 1 << 18 }
    }
}

/// What a rank has sent since its group was made.
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
/// rank, every collective of the group fails at once.
#[derive(Debug)]
pub struct ProcessGroup {
    rank: usize,
    world: usize,
    launcher: Mutex<Launcher>,
    abort: AbortSignal,
    traffic: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
}

/// Ten years: as good as none, and far from the end of the clock.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

type Job = Box<dyn FnOnce(&mut Worker) + Send>;

#[derive(Debug)]
struct Launcher {
    sequence: u64,
    /// `None` once the group is being closed.
    jobs: Option<Sender<Job>>,
}

#[derive(Debug, Default)]
struct Counters {
    messages: AtomicU64,
    bytes: AtomicU64,
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
    /// A member of the group that `transport` connects.
    #[must_use]
    pub fn new(transport: impl Transport + 'static, options: GroupOptions) -> Self {
        let (rank, world) = (transport.rank(), transport.world());
        let abort = transport.abort_signal().clone();
        let traffic = Arc::new(Counters::default());
        let counted = Counted { inner: Box::new(transport), counters: Arc::clone(&traffic) };
        let (jobs, queue) = unbounded::<Job>();
        let thread = std::thread::Builder::new()
            .name(format!("comm-{rank}"))
            .spawn(move || {
                let mut worker = Worker { transport: counted, options };
                for job in queue {
                    job(&mut worker);
                }
            })
            .expect("the operating system should start a communication thread");
        let launcher = Mutex::new(Launcher { sequence: 0, jobs: Some(jobs) });
        Self { rank, world, launcher, abort, traffic, thread: Some(thread) }
    }

    /// The group of a single rank. Collectives take the same path as everywhere and send nothing.
    #[must_use]
    pub fn single() -> Self {
        let mut endpoints = memory::endpoints(1);
        Self::new(endpoints.remove(0), GroupOptions::default())
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn world(&self) -> usize {
        self.world
    }

    /// What this rank has sent so far. Collectives in flight count as far as they have come.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        Traffic {
            messages: self.traffic.messages.load(Ordering::Relaxed),
            bytes: self.traffic.bytes.load(Ordering::Relaxed),
        }
    }

    /// The signal that ends the group on all ranks.
    #[must_use]
    pub fn abort_signal(&self) -> &AbortSignal {
        &self.abort
    }

    /// Sums `buffer` over all ranks. Every rank gets the same bits.
    pub fn all_reduce<T: Element>(&self, buffer: Vec<T>) -> Pending<Vec<T>> {
        self.launch("all_reduce", buffer, plan::all_reduce)
    }

    /// Gives every rank `root`'s numbers. All ranks pass a buffer of the same length.
    pub fn broadcast<T: Element>(&self, buffer: Vec<T>, root: usize) -> Pending<Vec<T>> {
        self.launch("broadcast", buffer, move |len, world, rank| {
            plan::broadcast(len, world, rank, root)
        })
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    ///
    /// Whatever ended the collective.
    pub fn barrier(&self) -> Result<(), Error> {
        // One byte per rank: an all-reduce ends on a rank only after all ranks have begun it.
        let arrived = vec![0u8; self.world];
        self.launch("barrier", arrived, plan::all_reduce).wait().map(drop)
    }

    fn launch<T: Element>(
        &self,
        operation: &'static str,
        mut buffer: Vec<T>,
        plan: impl FnOnce(usize, usize, usize) -> Plan + Send + 'static,
    ) -> Pending<Vec<T>> {
        let (answer, result) = bounded(1);
        let (rank, world) = (self.rank, self.world);
        // The lock spans number and queue: collectives run in the order of their numbers.
        let mut launcher = self.launcher.lock().unwrap_or_else(PoisonError::into_inner);
        let sequence = launcher.sequence;
        launcher.sequence += 1;
        let description =
            Description { operation, sequence, elements: buffer.len(), dtype: T::DTYPE };
        let job: Job = Box::new(move |worker| {
            let plan = plan(buffer.len(), world, rank);
            let outcome = worker.run(&plan, &mut buffer, description).map(|()| buffer);
            // Nobody waits any more if the rank has failed.
            let _ = answer.send(outcome);
        });
        if let Some(jobs) = &launcher.jobs {
            // A send fails only if the thread is gone; waiting reports that as `GroupClosed`.
            let _ = jobs.send(job);
        }
        Pending { rank, result }
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort.raise(self.rank, "the rank panicked");
        }
        self.launcher.get_mut().unwrap_or_else(PoisonError::into_inner).jobs = None;
        if let Some(thread) = self.thread.take() {
            // Its only panics would be in element arithmetic, and those have been reported.
            let _ = thread.join();
        }
    }
}

/// The communication thread's state.
struct Worker {
    transport: Counted,
    options: GroupOptions,
}

impl Worker {
    fn run<T: Element>(
        &mut self,
        plan: &Plan,
        buffer: &mut [T],
        description: Description,
    ) -> Result<(), Error> {
        let signal = self.transport.abort_signal().clone();
        if let Some(failure) = signal.failure() {
            return Err(Error::Aborted { rank: failure.rank, reason: failure.reason });
        }
        let mut run = Run {
            deadline: Instant::now() + self.options.timeout.min(LONGEST_TIMEOUT),
            transport: &mut self.transport,
            description,
            segment: (self.options.segment_bytes / size_of::<T>()).max(1),
        };
        let outcome = execute(plan, buffer, &mut run);
        if let Err(error) = &outcome {
            signal.raise(self.transport.rank(), error);
        }
        outcome
    }
}

/// Counts what passes through a transport.
#[derive(Debug)]
struct Counted {
    inner: Box<dyn Transport>,
    counters: Arc<Counters>,
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

#[cfg(test)]
mod tests;
