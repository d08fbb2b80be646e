//! Collectives that only move numbers.

use std::ops::Range;

use super::{Counts, Pending, ProcessGroup, What, next};
use crate::collectives::Element;
use crate::collectives::plan::{self, Plan};
use crate::description::{Description, Operation};
use crate::error::Error;

impl ProcessGroup {
    /// Gives every rank every rank's [shard](crate::shard::shard) of the buffer, in place.
    pub fn all_gather<T: Element>(&self, buffer: Vec<T>) -> Pending<Vec<T>> {
        self.movement(Operation::AllGather, buffer, plan::all_gather)
    }

    /// Gives every rank what each rank brings, of whatever length, in rank order.
    pub fn all_gather_uneven<T: Element>(&self, part: Vec<T>) -> Pending<Vec<Vec<T>>> {
        self.launch(Operation::AllGatherUneven, part, |call, part| {
            let (world, rank) = call.place();
            let description = call.description;
            let mut lengths = vec![0; world];
            lengths[rank] = part.len() as i64;
            // Lengths differ, so what the ranks agree on is first the world and then the sum.
            call.description = Description { elements: world, ..description };
            call.run(plan::all_gather(world, world, rank), &mut lengths)?;
            // What the others say is believed only as far as there is memory for it.
            let too_much = || format!("ranks bring {lengths:?} elements of {}", T::DTYPE);
            let Some(ranges) = consecutive(&lengths) else {
                return call.refuse(Some(too_much())).map(|()| vec![]);
            };
            let elements = ranges.last().map_or(0, |last| last.end);
            let mut buffer = vec![];
            let has_room = buffer.try_reserve_exact(elements).is_ok();
            call.refuse((!has_room).then(too_much))?;
            buffer.resize(elements, T::ZERO);
            buffer[ranges[rank].clone()].copy_from_slice(&part);
            call.description = Description { elements, ..description };
            call.run(plan::all_gather_ranges(&ranges, rank), &mut buffer)?;
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
        self.launch(Operation::AllToAll, buffer, |call, mut buffer| {
            let ((world, rank), len) = (call.place(), buffer.len());
            let ragged = !len.is_multiple_of(world);
            call.refuse(
                ragged
                    .then(|| format!("{len} elements are no multiple of {world} ranks; pad them")),
            )?;
            call.run(plan::all_to_all(len, world, rank), &mut buffer)?;
            Ok(buffer)
        })
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    ///
    /// Whatever ended the collective.
    pub fn barrier(&self) -> Result<(), Error> {
        // An all-reduce ends on a rank only after all ranks have begun it.
        let done: Pending<Vec<u8>> =
            self.movement(Operation::Barrier, vec![0u8], plan::all_reduce_doubling);
        done.wait().map(drop)
    }

    /// Sends `values` to `peer`, another rank of the group, which calls [`Self::recv`] with as many.
    pub fn send<T: Element>(&self, values: Vec<T>, peer: usize) -> Pending<()> {
        let number = |counts: &mut Counts| next(counts.sent.entry(peer).or_default());
        self.enqueue(Operation::Send.into(), values, number, move |call, mut values| {
            call.refuse(call.roster.peer_objection(peer))?;
            call.run(plan::send(values.len(), peer), &mut values)
        })
    }

    /// Receives what `peer`, another rank of the group, [sends](Self::send) next into `buffer`.
    pub fn recv<T: Element>(&self, buffer: Vec<T>, peer: usize) -> Pending<Vec<T>> {
        let number = |counts: &mut Counts| next(counts.received.entry(peer).or_default());
        self.enqueue(Operation::Send.into(), buffer, number, move |call, mut buffer| {
            call.refuse(call.roster.peer_objection(peer))?;
            call.run(plan::receive(buffer.len(), peer), &mut buffer)?;
            Ok(buffer)
        })
    }

    pub(super) fn movement<T: Element, R: From<Vec<T>> + Send + 'static>(
        &self,
        what: impl Into<What>,
        buffer: Vec<T>,
        plan: impl FnOnce(usize, usize, usize) -> Plan + Send + 'static,
    ) -> Pending<R> {
        self.launch(what, buffer, move |call, mut buffer| {
            let (world, rank) = call.place();
            call.run(plan(buffer.len(), world, rank), &mut buffer)?;
            Ok(buffer.into())
        })
    }
}

/// Ranges of these lengths, one after the other.
fn consecutive(lengths: &[i64]) -> Option<Vec<Range<usize>>> {
    let mut end = 0usize;
    let range = |len: &i64| {
        let start = end;
        end = end.checked_add(usize::try_from(*len).ok()?)?;
        Some(start..end)
    };
    lengths.iter().map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_none_can_have_are_no_ranges() {
        assert_eq!(consecutive(&[2, 0, 3]), Some(vec![0..2, 2..2, 2..5]));
        for lengths in [[-1, 1], [i64::MAX, i64::MAX], [0, i64::MIN]] {
            assert!(consecutive(&lengths).is_none_or(|r| r[1].end > usize::MAX / 2), "{lengths:?}");
        }
    }
}
