//! A rank's membership in a group: collectives in launch order, on a thread of their own.

mod worker;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use crate::abort::AbortSignal;
use crate::collectives::plan::{self, Action, Plan, Step};
use crate::collectives::{Algorithm, Element, ReduceOp};
use crate::description::{Description, GroupId, Operation};
use crate::error::Error;
use crate::transport::{Transport, memory};
use worker::{Counted, Counters, Worker};

/// Settings of a group.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// How long a rank waits for a peer within one collective. 10 minutes by default.
    pub timeout: Duration,
    /// Largest segment in bytes, at least 8. By default 256 KiB: small enough that a ring of ranks
    /// on one machine passes it on from the second-level cache.
    pub segment_bytes: usize,
    /// How all-reduces are done. By default whichever is cheaper for their size.
    pub algorithm: Algorithm,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            segment_bytes: 1 << 18,
            algorithm: Algorithm::Auto,
        }
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

type Job = Box<dyn FnOnce(&mut Worker) + Send>;

#[derive(Debug)]
struct Launcher {
    sequence: u64,
    /// By peer: messages sent to it and received from it outside collectives.
    sent: Vec<u64>,
    received: Vec<u64>,
    /// `None` once the group is being closed.
    jobs: Option<Sender<Job>>,
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
                let mut worker = Worker { transport: counted, options, op: ReduceOp::Sum };
                for job in queue {
                    job(&mut worker);
                }
            })
            .expect("the operating system should start a communication thread");
        let launcher = Mutex::new(Launcher {
            sequence: 0,
            sent: vec![0; world],
            received: vec![0; world],
            jobs: Some(jobs),
        });
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

    /// Reduces `buffer` over all ranks. Every rank gets the same bits.
    pub fn all_reduce<T: Element>(&self, buffer: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.reduction(Operation::AllReduce(op), buffer, op, |worker, len, partial_bytes| {
            let (world, rank) = worker.place();
            match worker.options.algorithm.resolve(len * partial_bytes, world) {
                Algorithm::Doubling => plan::all_reduce_doubling(len, world, rank),
                _ => plan::all_reduce(len, world, rank),
            }
        })
    }

    /// As [`Self::all_reduce`], always by the ring: bit for bit a [`Self::reduce_scatter`] followed
    /// by an [`Self::all_gather`].
    pub fn ring_all_reduce<T: Element>(&self, buffer: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.reduction(Operation::RingAllReduce(op), buffer, op, |worker, len, _| {
            let (world, rank) = worker.place();
            plan::all_reduce(len, world, rank)
        })
    }

    /// Reduces `buffer` over all ranks; each rank gets its own [shard](crate::shard::shard) of the
    /// outcome, in place. What the rest of the buffer holds afterwards is unspecified.
    pub fn reduce_scatter<T: Element>(&self, buffer: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.reduction(Operation::ReduceScatter(op), buffer, op, |worker, len, _| {
            let (world, rank) = worker.place();
            plan::reduce_scatter(len, world, rank)
        })
    }

    /// Reduces `buffer` over all ranks; `root` gets the outcome. What the other ranks' buffers hold
    /// afterwards is unspecified.
    pub fn reduce<T: Element>(&self, buffer: Vec<T>, op: ReduceOp, root: usize) -> Pending<Vec<T>> {
        self.reduction(Operation::Reduce { op, root }, buffer, op, move |worker, len, _| {
            let (world, rank) = worker.place();
            plan::reduce(len, world, rank, root)
        })
    }

    /// Gives every rank every rank's [shard](crate::shard::shard) of the buffer, in place.
    pub fn all_gather<T: Element>(&self, buffer: Vec<T>) -> Pending<Vec<T>> {
        self.movement(Operation::AllGather, buffer, plan::all_gather)
    }

    /// Gives every rank what each rank brings, of whatever length, in rank order.
    pub fn all_gather_uneven<T: Element>(&self, part: Vec<T>) -> Pending<Vec<Vec<T>>> {
        self.launch(Operation::AllGatherUneven, part, |worker, part, description| {
            let (world, rank) = worker.place();
            let mut lengths = vec![0; world];
            lengths[rank] = part.len() as i64;
            let description = Description { elements: world, ..description };
            worker.run(&plan::all_gather(world, world, rank), &mut lengths, description)?;
            let mut end = 0;
            let mut range = |len: &i64| {
                let start = end;
                end += usize::try_from(*len).unwrap_or_default();
                start..end
            };
            let ranges: Vec<_> = lengths.iter().map(&mut range).collect();
            let mut buffer = vec![T::ZERO; end];
            buffer[ranges[rank].clone()].copy_from_slice(&part);
            let description = Description { elements: end, ..description };
            worker.run(&plan::all_gather_ranges(&ranges, rank), &mut buffer, description)?;
            Ok(ranges.into_iter().map(|range| buffer[range].to_vec()).collect())
        })
    }

    /// Gives every rank `root`'s numbers. All ranks pass a buffer of the same length.
    pub fn broadcast<T: Element>(&self, buffer: Vec<T>, root: usize) -> Pending<Vec<T>> {
        self.movement(Operation::Broadcast { root }, buffer, move |len, world, rank| {
            plan::broadcast(len, world, rank, root)
        })
    }

    /// Gives `root` every rank's [shard](crate::shard::shard) of the buffer, in place.
    pub fn gather<T: Element>(&self, buffer: Vec<T>, root: usize) -> Pending<Vec<T>> {
        self.movement(Operation::Gather { root }, buffer, move |len, world, rank| {
            plan::gather(len, world, rank, root)
        })
    }

    /// Gives every rank its [shard](crate::shard::shard) of `root`'s buffer, in place.
    pub fn scatter<T: Element>(&self, buffer: Vec<T>, root: usize) -> Pending<Vec<T>> {
        self.movement(Operation::Scatter { root }, buffer, move |len, world, rank| {
            plan::scatter(len, world, rank, root)
        })
    }

    /// Exchanges shards: afterwards shard `r` of each rank's buffer is what rank `r` had for it. The
    /// length must be a multiple of the world.
    pub fn all_to_all<T: Element>(&self, buffer: Vec<T>) -> Pending<Vec<T>> {
        self.launch(Operation::AllToAll, buffer, |worker, mut buffer, collective| {
            let (world, rank) = worker.place();
            let len = buffer.len();
            if !len.is_multiple_of(world) {
                let problem = format!("{len} elements are no multiple of {world} ranks; pad them");
                return Err(Error::Misuse { rank, collective, problem });
            }
            worker.run(&plan::all_to_all(len, world, rank), &mut buffer, collective)?;
            Ok(buffer)
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
        self.movement(Operation::Barrier, arrived, plan::all_reduce).wait().map(drop)
    }

    /// Sends `values` to `peer`, which calls [`Self::recv`] with as many.
    pub fn send<T: Element>(&self, values: Vec<T>, peer: usize) -> Pending<()> {
        let count = |launcher: &mut Launcher| next(&mut launcher.sent[peer]);
        self.enqueue(Operation::Send, values, count, move |worker, mut values, description| {
            let range = 0..values.len();
            let plan = Plan { steps: vec![Step::Send { to: peer, range }] };
            worker.run(&plan, &mut values, description)
        })
    }

    /// Receives what `peer` [sends](Self::send) next into `buffer`.
    pub fn recv<T: Element>(&self, buffer: Vec<T>, peer: usize) -> Pending<Vec<T>> {
        let count = |launcher: &mut Launcher| next(&mut launcher.received[peer]);
        self.enqueue(Operation::Send, buffer, count, move |worker, mut buffer, description| {
            let range = 0..buffer.len();
            let step = Step::Receive { from: peer, range, action: Action::Replace, forward: None };
            worker.run(&Plan { steps: vec![step] }, &mut buffer, description)?;
            Ok(buffer)
        })
    }

    /// A collective that combines numbers, in the type of its partial results.
    fn reduction<T: Element>(
        &self,
        operation: Operation,
        buffer: Vec<T>,
        op: ReduceOp,
        plan: impl FnOnce(&Worker, usize, usize) -> Plan + Send + 'static,
    ) -> Pending<Vec<T>> {
        self.launch(operation, buffer, move |worker, mut buffer, description| {
            let (world, rank) = worker.place();
            if op == ReduceOp::Mean && !T::IS_FLOAT {
                let problem = format!("a mean of {} has no exact value; use sum", T::DTYPE);
                return Err(Error::Misuse { rank, collective: description, problem });
            }
            let plan = plan(worker, buffer.len(), size_of::<T::Partial>());
            worker.op = op;
            // Most types are their own partial, and then the buffer itself is reduced.
            if let Some(same) = T::as_partial(&mut buffer) {
                worker.run(&plan, same, description)?;
                if op == ReduceOp::Mean {
                    T::Partial::divide(same, world);
                }
                return Ok(buffer);
            }
            let mut partial: Vec<T::Partial> = buffer.iter().map(|v| v.to_partial()).collect();
            worker.run(&plan, &mut partial, description)?;
            if op == ReduceOp::Mean {
                T::Partial::divide(&mut partial, world);
            }
            for (value, partial) in buffer.iter_mut().zip(partial) {
                *value = T::from_partial(partial);
            }
            Ok(buffer)
        })
    }

    /// A collective that only moves numbers.
    fn movement<T: Element>(
        &self,
        operation: Operation,
        buffer: Vec<T>,
        plan: impl FnOnce(usize, usize, usize) -> Plan + Send + 'static,
    ) -> Pending<Vec<T>> {
        self.launch(operation, buffer, move |worker, mut buffer, description| {
            let (world, rank) = worker.place();
            worker.op = ReduceOp::Sum;
            worker.run(&plan(buffer.len(), world, rank), &mut buffer, description)?;
            Ok(buffer)
        })
    }

    /// Launches a collective of all ranks.
    fn launch<T: Element, R: Send + 'static>(
        &self,
        operation: Operation,
        buffer: Vec<T>,
        body: impl FnOnce(&mut Worker, Vec<T>, Description) -> Result<R, Error> + Send + 'static,
    ) -> Pending<R> {
        let count = |launcher: &mut Launcher| next(&mut launcher.sequence);
        self.enqueue(operation, buffer, count, body)
    }

    fn enqueue<T: Element, R: Send + 'static>(
        &self,
        operation: Operation,
        buffer: Vec<T>,
        count: impl FnOnce(&mut Launcher) -> u64,
        body: impl FnOnce(&mut Worker, Vec<T>, Description) -> Result<R, Error> + Send + 'static,
    ) -> Pending<R> {
        let (answer, result) = bounded(1);
        // The lock spans number and queue: collectives run in the order of their numbers.
        let mut launcher = self.launcher.lock().unwrap_or_else(PoisonError::into_inner);
        let sequence = count(&mut launcher);
        let elements = buffer.len();
        let description =
            Description { operation, group: GroupId::WORLD, sequence, elements, dtype: T::DTYPE };
        let job: Job = Box::new(move |worker| {
            let outcome = worker.guarded(description, |worker| body(worker, buffer, description));
            // Nobody waits any more if the rank has failed.
            let _ = answer.send(outcome);
        });
        if let Some(jobs) = &launcher.jobs {
            // A send fails only if the thread is gone; waiting reports that as `GroupClosed`.
            let _ = jobs.send(job);
        }
        Pending { rank: self.rank, result }
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
            self.abort.raise(self.rank, "the rank panicked");
        }
        self.launcher.get_mut().unwrap_or_else(PoisonError::into_inner).jobs = None;
        if let Some(thread) = self.thread.take() {
            // Its only panics would be in element arithmetic, and those have been reported.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
