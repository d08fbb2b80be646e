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

use crate::error::Error;
use crate::group::Pending;

/// A unit's number and its buffer.
pub(crate) type UnitBuffer = (usize, Vec<f32>);

/// Buffers on their way.
#[derive(Debug)]
pub(crate) struct Parcel {
    buffers: Vec<UnitBuffer>,
    world: usize,
    messages: Vec<(Range<usize>, Pending<Vec<f32>>)>,
}

impl Parcel {
    /// Sends buffers, whose lengths are multiples of `world`, in messages of at most `limit` elements, or
    /// of one column. Without a limit there is one message.
    pub(crate) fn send(
        mut buffers: Vec<UnitBuffer>,
        (world, limit): (usize, Option<usize>),
        mut send: impl FnMut(usize, Vec<f32>) -> Pending<Vec<f32>>,
    ) -> Self {
        let columns = buffers.iter().map(|(_, buffer)| buffer.len() / world).sum();
        let width = limit.map_or(columns, |limit| limit / world).clamp(1, columns.max(1));
        let messages = match &mut buffers[..] {
            // The buffer itself is the message.
            [(unit, buffer)] if width == columns => {
                vec![(0..columns, send(*unit, std::mem::take(buffer)))]
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
                buffers => unpack(&values, buffers, world, range),
            }
        }
        Ok(buffers)
    }
}

/// After which of the buffers, given by their lengths, a message ends: as many as fit share one. Without
/// a limit each has its own.
pub(crate) fn ends(lens: impl Iterator<Item = usize>, limit: Option<usize>) -> Vec<bool> {
    let (limit, lens) = (limit.unwrap_or(0), lens.collect::<Vec<_>>());
    let mut waiting = 0;
    let next = lens.iter().skip(1).copied().chain([usize::MAX]);
    let ends = lens.iter().zip(next).map(|(len, next)| {
        waiting += len;
        let is_full = waiting.saturating_add(next) > limit;
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

fn pack(buffers: &[UnitBuffer], world: usize, columns: Range<usize>) -> Vec<f32> {
    let mut packed = Vec::with_capacity(world * columns.len());
    for (buffer, part) in parts(lens(buffers), world, columns) {
        packed.extend_from_slice(&buffers[buffer].1[part]);
    }
    packed
}

fn unpack(packed: &[f32], buffers: &mut [UnitBuffer], world: usize, columns: Range<usize>) {
    let mut rest = packed;
    for (buffer, part) in parts(lens(buffers), world, columns) {
        let (values, after) = rest.split_at(part.len());
        buffers[buffer].1[part].copy_from_slice(values);
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::all_of;

    #[test]
    fn packed_columns_keep_every_elements_owner() {
        let number = |unit: usize, len: usize| {
            (unit, (0..len).map(|at| (unit * 100 + at) as f32).collect::<Vec<_>>())
        };
        let buffers = vec![number(3, 6), number(2, 4)];
        assert_eq!(pack(&buffers, 2, 1..4), [301.0, 302.0, 200.0, 304.0, 305.0, 202.0]);
        let mut empty = vec![(3, vec![0.0; 6]), (2, vec![0.0; 4])];
        for columns in [0..2, 2..3, 3..5] {
            unpack(&pack(&buffers, 2, columns.clone()), &mut empty, 2, columns);
        }
        assert_eq!(empty, buffers);
    }

    #[test]
    fn as_many_as_fit_share_a_message() {
        let ends = |limit| ends([3, 4, 2, 9, 1].into_iter(), limit);
        assert_eq!(ends(None), [true; 5]);
        assert_eq!(ends(Some(7)), [false, true, true, true, true]);
        assert_eq!(ends(Some(10)), [false, false, true, false, true]);
        assert_eq!(ends(Some(100)), [false, false, false, false, true]);
    }

    #[test]
    fn sums_do_not_depend_on_how_they_are_sent() {
        let sum = |limit: Option<usize>| {
            all_of(3, |group| {
                let buffer = |unit: usize, len: usize| {
                    let value = |at| 0.1 * (at + unit) as f32 / (1 + group.rank()) as f32;
                    (unit, (0..len).map(value).collect::<Vec<f32>>())
                };
                let buffers = vec![buffer(2, 30), buffer(1, 12)];
                let before = group.traffic().messages;
                let send = |unit: usize, values: Vec<f32>| group.all_reduce_unit(unit, values);
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
