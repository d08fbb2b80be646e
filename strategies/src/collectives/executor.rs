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
    pub(crate) op: ReduceOp,
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
    let rank = run.transport.rank();
    for step in &plan.steps {
        match step {
            Step::Send { to, range } => {
                for segment in segments(range, run.segment) {
                    run.send(*to, buffer[segment].to_vec())?;
                }
            }
            Step::Receive { from, range, action, forward } => {
                for segment in segments(range, run.segment) {
                    let own = &mut buffer[segment];
                    let mut received: Vec<T> = run.recv(*from, own.len())?;
                    match action {
                        Action::Pass => T::combine(run.op, &mut received, own),
                        // Operands stand in rank order, so that two ranks that exchange their
                        // numbers get the same bits, down to which NaN it is.
                        Action::Finish if *from < rank => {
                            T::combine(run.op, &mut received, own);
                            own.copy_from_slice(&received);
                        }
                        Action::Finish => {
                            T::combine(run.op, own, &received);
                            received.copy_from_slice(own);
                        }
                        Action::Replace => own.copy_from_slice(&received),
                    }
                    if let Some(to) = forward {
                        run.send(*to, received)?;
                    }
                }
            }
        }
    }
    Ok(())
}

impl Run<'_> {
    fn send<T: Element>(&mut self, to: usize, values: Vec<T>) -> Result<(), Error> {
        let frame = Frame { description: self.description, payload: T::wrap(values) };
        self.transport.send(to, frame)
    }

    fn recv<T: Element>(&mut self, from: usize, len: usize) -> Result<Vec<T>, Error> {
        let frame = self.transport.recv(from, self.description, self.deadline)?;
        let theirs = frame.description;
        let (rank, mine) = (self.transport.rank(), self.description);
        match T::unwrap(frame.payload) {
            Some(values) if theirs == mine && values.len() == len => Ok(values),
            Some(values) if theirs == mine => Err(Error::SegmentMismatch {
                rank,
                peer: from,
                collective: mine,
                expected: len,
                found: values.len(),
            }),
            _ => Err(Error::Mismatch { rank, peer: from, mine, theirs }),
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
