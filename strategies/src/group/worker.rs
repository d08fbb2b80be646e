//! The communication thread of a rank, and what a collective does there.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, unbounded};

use super::roster::Roster;
use crate::abort::AbortSignal;
use crate::collectives::plan::Plan;
use crate::collectives::{Element, Run, execute};
use crate::deadline;
use crate::description::{Description, GroupId};
use crate::error::Error;
use crate::transport::{Frame, Pool, Transport};

/// How often a rank looks whether others have caught up with what it has sent.
const LOOK: Duration = Duration::from_millis(1);

/// What runs on the communication thread.
pub(super) type Job = Box<dyn FnOnce(&mut Counted) + Send>;

/// The thread that owns a rank's transport and runs the collectives of all its groups in the order
/// in which they are launched. It ends when it is dropped, once all that was launched has run.
#[derive(Debug)]
pub(super) struct CommThread {
    pub(super) abort: AbortSignal,
    pub(super) traffic: Arc<Counters>,
    pub(super) pool: Pool,
    /// `None` once the thread is to end.
    jobs: Option<Sender<Job>>,
    handle: Option<JoinHandle<()>>,
}

impl CommThread {
    pub(super) fn start(transport: Box<dyn Transport>) -> Self {
        let (abort, pool) = (transport.abort_signal().clone(), transport.pool().clone());
        let traffic = Arc::new(Counters::default());
        let name = format!("comm-{}", transport.rank());
        let mut counted = Counted { inner: transport, counters: Arc::clone(&traffic) };
        let (jobs, queue) = unbounded::<Job>();
        let handle = std::thread::Builder::new()
            .name(name)
            .spawn(move || queue.into_iter().for_each(|job| job(&mut counted)))
            .expect("the operating system should start a communication thread");
        Self { abort, traffic, pool, jobs: Some(jobs), handle: Some(handle) }
    }

    pub(super) fn launch(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            // A send fails only if the thread is gone; waiting reports that as `GroupClosed`.
            let _ = jobs.send(job);
        }
    }
}

impl Drop for CommThread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(handle) = self.handle.take() {
            // Its only panics would be in element arithmetic, and those have been reported.
            let _ = handle.join();
        }
    }
}

/// A collective on the communication thread.
pub(super) struct Call<'a> {
    pub(super) transport: &'a mut Counted,
    pub(super) roster: &'a Roster,
    pub(super) description: Description,
}

impl Call<'_> {
    /// World and rank of the group.
    pub(super) fn place(&self) -> (usize, usize) {
        (self.roster.world(), self.roster.rank)
    }

    /// Runs `body`, unless the rank has failed; a body that fails fails all groups of all ranks.
    pub(super) fn guarded<R>(
        mut self,
        body: impl FnOnce(&mut Self) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let (rank, signal) = (self.roster.global_rank(), self.transport.abort_signal().clone());
        if let Some(failure) = signal.failure() {
            return Err(failure.seen_by(rank, self.description));
        }
        self.refuse(self.roster.objection(&self.description))
            .and_then(|()| body(&mut self))
            .inspect_err(|error| signal.raise(rank, error))
    }

    /// An error if there is an objection to this collective.
    pub(super) fn refuse(&self, objection: Option<String>) -> Result<(), Error> {
        let (rank, collective) = (self.roster.global_rank(), self.description);
        objection.map_or(Ok(()), |problem| Err(Error::Misuse { rank, collective, problem }))
    }

    /// Runs a plan whose ranks are those of the group.
    pub(super) fn run<T: Element>(&mut self, plan: Plan, buffer: &mut [T]) -> Result<(), Error> {
        let Roster { id, members, options, .. } = self.roster;
        let segment_bytes = options
            .segment_bytes
            .unwrap_or_else(|| options.costs.segment_bytes(plan.pipeline, size_of::<T>()));
        let mut run = Run {
            deadline: deadline::after(options.timeout),
            transport: self.transport,
            description: self.description,
            segment: (segment_bytes / size_of::<T>()).max(1),
        };
        wait_for_room(&mut run)?;
        // In the group of all ranks every rank is its own member.
        let plan = if *id == GroupId::WORLD { plan } else { plan.placed(0, |rank| members[rank]) };
        execute(&plan, buffer, &mut run)
    }
}

/// A rank that only sends would otherwise run ahead of the others, and fill its memory.
fn wait_for_room(run: &mut Run<'_>) -> Result<(), Error> {
    let Run { transport, description, deadline, .. } = run;
    let (rank, waiting_in) = (transport.rank(), *description);
    while let Some(peer) = transport.crowded() {
        if Instant::now() >= *deadline {
            return Err(Error::Timeout { rank, peer, waiting_in });
        }
        // The channel carries nothing: this waits for a while, or until a rank fails.
        let _ = transport.abort_signal().raised().recv_timeout(LOOK);
        if let Some(failure) = transport.abort_signal().failure() {
            return Err(failure.seen_by(rank, waiting_in));
        }
    }
    Ok(())
}

/// Counts what passes through a transport.
#[derive(Debug)]
pub(super) struct Counted {
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

    fn crowded(&self) -> Option<usize> {
        self.inner.crowded()
    }

    fn pool(&self) -> &Pool {
        self.inner.pool()
    }

    fn send(&mut self, peer: usize, frame: Frame) -> Result<(), Error> {
        self.counters.messages.fetch_add(1, Ordering::Relaxed);
        self.counters.bytes.fetch_add(frame.payload.bytes().len() as u64, Ordering::Relaxed);
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
