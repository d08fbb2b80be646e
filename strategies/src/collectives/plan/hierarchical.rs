//! Plans for meshes: ranks in rows of equal length.

use super::{Pipeline, Plan, all_gather, all_reduce, reduce_scatter};
use crate::shard::shard;

/// The same as [`all_reduce`] on a mesh whose rows are `row` ranks each: a ring reduce-scatter along
/// the row, a ring all-reduce of the own shard along the column, a ring all-gather along the row.
///
/// For `R` rows of `S` ranks a rank waits `2 (S - 1) + 2 (R - 1)` times instead of `2 (R S - 1)`, and
/// sends `2 n (S - 1) / S + 2 (n / S) (R - 1) / R = 2 n (W - 1) / W` elements, as in the flat ring.
///
/// # Panics
///
/// Unless `row` divides `world`.
#[must_use]
pub fn all_reduce_hierarchical(len: usize, world: usize, rank: usize, row: usize) -> Plan {
    assert!(world.is_multiple_of(row), "rows of {row} do not divide a world of {world}");
    let (rows, (own_row, own_column)) = (world / row, (rank / row, rank % row));
    let in_row = |column: usize| own_row * row + column;
    let in_column = |other_row: usize| other_row * row + own_column;
    let own = shard(len, row, own_column);
    let mut plan = reduce_scatter(len, row, own_column).placed(0, in_row);
    let along_column = all_reduce(own.len(), rows, own_row).placed(own.start, in_column);
    let along_row = all_gather(len, row, own_column).placed(0, in_row);
    plan.phases.extend(along_column.phases);
    plan.phases.extend(along_row.phases);
    // The three rings wait for each other, so one shape must do: that of the longer axis.
    let longer = row.max(rows);
    plan.pipeline = Pipeline { depth: longer - 1, chunk: len.div_ceil(longer) };
    plan
}
