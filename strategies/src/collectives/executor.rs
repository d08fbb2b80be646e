//! Runs a plan on a transport.

use std::time::Instant;

use super::plan::{Action, Plan, Step, Task};
use super::{Element, ReduceOp};
use crate::description::Description;
use crate::error::Error;
use crate::transport::{Frame, Payload, Transport};

/// One collective on one rank's transport.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    pub(crate) transport: &'a mut dyn Transport,
    pub(crate) description: Description,
    /// Elements per segment, at least 1.
    pub(crate) segment: usize,
    pub(crate) deadline: Instant,
}

/// Runs `plan` on `buffer`, in place.
///
/// A segment is copied once when this rank sends it; from then on the buffer that was received itself
/// travels, so passing a partial result on costs one operation per element and no copy.
pub(crate) fn execute<T: Element>(
    plan: &Plan,
    buffer: &mut [T],
    run: &mut Run<'_>,
) -> Result<(), Error> {
    for Task { step, range } in plan.schedule(run.segment) {
        let own = &mut buffer[range];
        match step {
            Step::Send { to, .. } => run.send_copy(*to, own)?,
            Step::Receive { from, action, forward, .. } => {
                run.receive(*from, own, *action, *forward)?;
            }
            Step::Combine { ranks, forward, .. } => {
                run.combine(ranks, own)?;
                forward.map_or(Ok(()), |to| run.send_copy(to, own))?;
            }
        }
    }
    Ok(())
}

impl Run<'_> {
    /// How this collective combines; the numbers of one that has no say are zeros.
    fn op(&self) -> ReduceOp {
        self.description.operation.reduce_op().unwrap_or_default()
    }

    /// One segment of [`Step::Receive`].
    fn receive<T: Element>(
        &mut self,
        from: usize,
        own: &mut [T],
        action: Action,
        forward: Option<usize>,
    ) -> Result<(), Error> {
        let mut payload = self.take::<T>(from, own.len())?;
        let received = numbers::<T>(&mut payload);
        match action {
            Action::Pass => T::combine(self.op(), received, own),
            // Operands stand in rank order, so that two ranks that exchange their numbers get the
            // same bits, down to which NaN it is.
            Action::Finish if from < self.transport.rank() => {
                T::combine(self.op(), received, own);
                own.copy_from_slice(received);
            }
            Action::Finish => {
                T::combine(self.op(), own, received);
                if forward.is_some() {
                    received.copy_from_slice(own);
                }
            }
            Action::Replace => own.copy_from_slice(received),
        }
        match forward {
            Some(to) => self.send(to, payload),
            None => {
                self.transport.pool().put(payload);
                Ok(())
            }
        }
    }

    /// One segment of [`Step::Combine`].
    fn combine<T: Element>(&mut self, ranks: &[usize], own: &mut [T]) -> Result<(), Error> {
        let mut combined: Vec<T::Partial> = Vec::with_capacity(own.len());
        let op = self.op();
        let mut add = |part: &[T]| match combined.is_empty() {
            true => combined.extend_from_slice(&T::partials(part)),
            false => T::Partial::combine(op, &mut combined, &T::partials(part)),
        };
        for rank in ranks {
            if *rank == self.transport.rank() {
                add(own);
                continue;
            }
            let mut payload = self.take::<T>(*rank, own.len())?;
            add(numbers(&mut payload));
            self.transport.pool().put(payload);
        }
        if self.op() == ReduceOp::Mean {
            T::Partial::divide(&mut combined, ranks.len());
        }
        T::round(&combined, own);
        Ok(())
    }

    fn send_copy<T: Element>(&mut self, to: usize, values: &[T]) -> Result<(), Error> {
        let payload = self.transport.pool().copy_of(values);
        self.send(to, payload)
    }

    fn send(&mut self, to: usize, payload: Payload) -> Result<(), Error> {
        self.transport.send(to, Frame { description: self.description, payload })
    }

    /// The next segment from a rank, which must be of this collective and have `len` elements.
    fn take<T: Element>(&mut self, from: usize, len: usize) -> Result<Payload, Error> {
        let frame = self.transport.recv(from, self.description, self.deadline)?;
        let (rank, mine, theirs) = (self.transport.rank(), self.description, frame.description);
        if theirs != mine {
            return Err(Error::Mismatch { rank, peer: from, mine, theirs });
        }
        // Of another type are the numbers of a rank that runs another algorithm.
        if frame.payload.numbers::<T>().is_some_and(|numbers| numbers.len() == len) {
            return Ok(frame.payload);
        }
        let found = frame.payload.bytes().len() / size_of::<T>();
        let (peer, collective) = (from, mine);
        Err(Error::SegmentMismatch { rank, peer, collective, expected: len, found })
    }
}

/// The numbers of a payload that has been checked to have this type.
fn numbers<T: Element>(payload: &mut Payload) -> &mut [T] {
    payload.numbers_mut().expect("`take` has checked the type")
}
