//! Buffers of several units in one message, or of one unit in several: what a bucket's size in elements
//! asks for.
//!
//! Every buffer is cut into equal shards, one per rank. Laid side by side, the shards of each rank are a
//! row of a matrix, and a message is a range of its columns:
//!
//! ```text
//!            unit 3    unit 2
//! rank 0    a a a a | b b b b
//! rank 1    a a a a | b b b b
//!           \___________/        one message of 2 x 6 elements
//! ```
//!
//! So each element has the owner that it has in a message of its own, and is summed in the same order.

use std::ops::Range;

use pyroclast_kernels::numbers::{Float, Numbers, Slice};

use crate::error::Error;
use crate::group::Pending;

/// A unit's number and its buffer.
pub(crate) type UnitBuffer = (usize, Numbers);

/// Buffers on their way.
#[derive(Debug)]
pub(crate) struct Parcel {
    buffers: Vec<UnitBuffer>,
    world: usize,
    messages: Vec<(Range<usize>, Pending<Numbers>)>,
}

impl Parcel {
    /// Sends buffers of one type, whose lengths are multiples of `world`, in messages of at most `limit` elements, or
    /// of one column. Without a limit there is one message.
    pub(crate) fn send(
        mut buffers: Vec<UnitBuffer>,
        (world, limit): (usize, Option<usize>),
        mut send: impl FnMut(usize, Numbers) -> Pending<Numbers>,
    ) -> Self {
        let columns = buffers.iter().map(|(_, buffer)| buffer.len() / world).sum();
        let width = limit.map_or(columns, |limit| limit / world).clamp(1, columns.max(1));
        let messages = match &mut buffers[..] {
            // The buffer itself is the message.
            [(unit, buffer)] if width == columns => {
                vec![(0..columns, send(*unit, buffer.take()))]
            }
            buffers => {
                let unit = buffers[0].0;
                let starts = (0..columns).step_by(width);
                let ranges = starts.map(|start| start..(start + width).min(columns));
                ranges
                    .map(|range| (range.clone(), send(unit, pack(buffers, world, range))))
                    .collect()
            }
        };
        Self { buffers, world, messages }
    }

    /// The units whose buffers these are.
    pub(crate) fn units(&self) -> impl Iterator<Item = usize> {
        self.buffers.iter().map(|(unit, _)| *unit)
    }

    /// Waits for all messages, and returns the buffers with what came.
    ///
    /// # Errors
    ///
    /// What ended a collective.
    pub(crate) fn wait(self) -> Result<Vec<UnitBuffer>, Error> {
        let Self { mut buffers, world, messages } = self;
        for (range, message) in messages {
            let values = message.wait()?;
            match &mut buffers[..] {
                [(_, buffer)] if buffer.is_empty() => *buffer = values,
                buffers => unpack(values.as_slice(), buffers, world, range),
            }
        }
        Ok(buffers)
    }
}

/// After which of the buffers, given by their lengths and types, a message ends: as many as fit share one, if
/// they are of one type. Without a limit each has its own.
pub(crate) fn ends(
    buffers: impl Iterator<Item = (usize, Float)>,
    limit: Option<usize>,
) -> Vec<bool> {
    let (limit, buffers) = (limit.unwrap_or(0), buffers.collect::<Vec<_>>());
    let mut waiting = 0;
    let next = buffers.iter().skip(1).map(Some).chain([None]);
    let ends = buffers.iter().zip(next).map(|((len, float), next)| {
        waiting += len;
        let fits = |(len, of_next): &(usize, Float)| of_next == float && waiting + len <= limit;
        let is_full = !next.is_some_and(fits);
        waiting = if is_full { 0 } else { waiting };
        is_full
    });
    ends.collect()
}

/// For each row and buffer, the part of a range of columns that lies in it: which elements of the buffer.
fn parts(
    lens: Vec<usize>,
    world: usize,
    columns: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    (0..world).flat_map(move |row| {
        let mut start = 0;
        let in_row = lens.iter().enumerate().map(|(buffer, len)| {
            let width = len / world;
            let within = |column: usize| column.clamp(start, start + width) - start;
            let part = row * width + within(columns.start)..row * width + within(columns.end);
            start += width;
            (buffer, part)
        });
        in_row.filter(|(_, part)| !part.is_empty()).collect::<Vec<_>>()
    })
}

fn lens(buffers: &[UnitBuffer]) -> Vec<usize> {
    buffers.iter().map(|(_, buffer)| buffer.len()).collect()
}

fn pack(buffers: &[UnitBuffer], world: usize, columns: Range<usize>) -> Numbers {
    let float = buffers.first().map_or(Float::F32, |(_, buffer)| buffer.float());
    let mut packed = Numbers::zeros(float, 0);
    for (buffer, part) in parts(lens(buffers), world, columns) {
        packed.extend(buffers[buffer].1.part(part));
    }
    packed
}

fn unpack(packed: Slice<'_>, buffers: &mut [UnitBuffer], world: usize, columns: Range<usize>) {
    let mut start = 0;
    for (buffer, part) in parts(lens(buffers), world, columns) {
        let end = start + part.len();
        buffers[buffer].1.part_mut(part).copy_from(packed.part(start..end));
        start = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::all_of;

    #[test]
    fn packed_columns_keep_every_elements_owner() {
        let number = |unit: usize, len: usize| {
            let numbers = (0..len).map(|at| (unit * 100 + at) as f32).collect();
            (unit, Numbers::F32(numbers))
        };
        let buffers = vec![number(3, 6), number(2, 4)];
        let packed = pack(&buffers, 2, 1..4).as_slice().to_f32();
        assert_eq!(packed, [301.0, 302.0, 200.0, 304.0, 305.0, 202.0]);
        let zeros = |len| Numbers::zeros(Float::F32, len);
        let mut empty = vec![(3, zeros(6)), (2, zeros(4))];
        for columns in [0..2, 2..3, 3..5] {
            unpack(pack(&buffers, 2, columns.clone()).as_slice(), &mut empty, 2, columns);
        }
        assert_eq!(empty, buffers);
    }

    #[test]
    fn as_many_as_fit_share_a_message() {
        let of_type = |len| (len, Float::F32);
        let ends = |limit| ends([3, 4, 2, 9, 1].map(of_type).into_iter(), limit);
        assert_eq!(ends(None), [true; 5]);
        assert_eq!(ends(Some(7)), [false, true, true, true, true]);
        assert_eq!(ends(Some(10)), [false, false, true, false, true]);
        assert_eq!(ends(Some(100)), [false, false, false, false, true]);
        let mixed = [(3, Float::BF16), (4, Float::BF16), (2, Float::F32), (9, Float::F32)];
        assert_eq!(super::ends(mixed.into_iter(), Some(100)), [false, true, false, true]);
    }

    #[test]
    fn sums_do_not_depend_on_how_they_are_sent() {
        let sum = |limit: Option<usize>| {
            all_of(3, |group| {
                let buffer = |unit: usize, len: usize| {
                    let value = |at| 0.1 * (at + unit) as f32 / (1 + group.rank()) as f32;
                    (unit, Numbers::F32((0..len).map(value).collect()))
                };
                let buffers = vec![buffer(2, 30), buffer(1, 12)];
                let before = group.traffic().messages;
                let send = |unit: usize, values: Numbers| group.all_reduce_unit(unit, values);
                let sums = match limit {
                    None => buffers
                        .into_iter()
                        .flat_map(|b| Parcel::send(vec![b], (3, None), send).wait().expect("sums"))
                        .collect(),
                    limit => Parcel::send(buffers, (3, limit), send).wait()?,
                };
                Ok((sums, group.traffic().messages - before))
            })
        };
        let apart = sum(None);
        for (limit, messages) in [(42, 1), (100, 1), (21, 2), (3, 14), (1, 14)] {
            let sent = sum(Some(limit));
            assert_eq!(sent[0].0, apart[0].0, "{limit}");
            assert_eq!(sent[0].1 * 2, apart[0].1 * messages, "{limit}");
        }
    }
}
