//! Runs a plan on a transport.

use std::ops::Range;
use std::time::Instant;

use super::plan::{Action, Plan, Step};
use super::{Element, ReduceOp};
use crate::description::Description;
use crate::error::Error;
use crate::transport::{Frame, Transport};

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
/// A segment is copied once when this rank sends it; from then on the received allocation itself
/// travels, so passing a partial result on costs one operation per element and no copy.
pub(crate) fn execute<T: Element>(
    plan: &Plan,
    buffer: &mut [T],
    run: &mut Run<'_>,
) -> Result<(), Error> {
    for step in &plan.steps {
        match step {
            Step::Send { to, range } => {
                for segment in segments(range, run.segment) {
                    run.send(*to, buffer[segment].to_vec())?;
                }
            }
            Step::Receive { from, range, action, forward } => {
                for segment in segments(range, run.segment) {
                    run.receive(*from, &mut buffer[segment], *action, *forward)?;
                }
            }
            Step::Combine { ranks, range, forward } => {
                for segment in segments(range, run.segment) {
                    let own = &mut buffer[segment];
                    run.combine(ranks, own)?;
                    if let Some(to) = forward {
                        run.send(*to, own.to_vec())?;
                    }
                }
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
        let mut received: Vec<T> = self.take(from, own.len())?;
        match action {
            Action::Pass => T::combine(self.op(), &mut received, own),
            // Operands stand in rank order, so that two ranks that exchange their numbers get the
            // same bits, down to which NaN it is.
            Action::Finish if from < self.transport.rank() => {
                T::combine(self.op(), &mut received, own);
                own.copy_from_slice(&received);
            }
            Action::Finish => {
                T::combine(self.op(), own, &received);
                if forward.is_some() {
                    received.copy_from_slice(own);
                }
            }
            Action::Replace => own.copy_from_slice(&received),
        }
        forward.map_or(Ok(()), |to| self.send(to, received))
    }

    /// One segment of [`Step::Combine`].
    fn combine<T: Element>(&mut self, ranks: &[usize], own: &mut [T]) -> Result<(), Error> {
        let mut combined: Vec<T::Partial> = Vec::with_capacity(own.len());
        for rank in ranks {
            let received: Vec<T>;
            let part = if *rank == self.transport.rank() {
                T::partials(own)
            } else {
                received = self.take(*rank, own.len())?;
                T::partials(&received)
            };
            if combined.is_empty() {
                combined.extend_from_slice(&part);
            } else {
                T::Partial::combine(self.op(), &mut combined, &part);
            }
        }
        if self.op() == ReduceOp::Mean {
            T::Partial::divide(&mut combined, ranks.len());
        }
        T::round(&combined, own);
        Ok(())
    }

    fn send<T: Element>(&mut self, to: usize, values: Vec<T>) -> Result<(), Error> {
        let frame = Frame { description: self.description, payload: T::wrap(values) };
        self.transport.send(to, frame)
    }

    /// The next segment from a rank, which must be of this collective and have `len` elements.
    fn take<T: Element>(&mut self, from: usize, len: usize) -> Result<Vec<T>, Error> {
        let frame = self.transport.recv(from, self.description, self.deadline)?;
        let (rank, mine, theirs) = (self.transport.rank(), self.description, frame.description);
        if theirs != mine {
            return Err(Error::Mismatch { rank, peer: from, mine, theirs });
        }
        // Of another type are the numbers of a rank that runs another algorithm.
        let found = frame.payload.byte_len() / size_of::<T>();
        match T::unwrap(frame.payload) {
            Some(values) if values.len() == len => Ok(values),
            _ => Err(Error::SegmentMismatch {
                rank,
                peer: from,
                collective: mine,
                expected: len,
                found,
            }),
        }
    }
}

fn segments(range: &Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = range.end;
    range.clone().step_by(size).map(move |start| start..(start + size).min(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_cover_a_range_in_order() {
        let cut = |range| segments(&range, 4).collect::<Vec<_>>();
        assert_eq!(cut(3..12), [3..7, 7..11, 11..12]);
        assert!(cut(3..3).is_empty());
    }
}
