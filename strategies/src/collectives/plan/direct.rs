//! Plans in which numbers go straight to where they are needed.

use std::ops::Range;

use super::ring::{Ring, all_gather};
use super::{Action, Order, Pipeline, Plan, Step};
use crate::shard::shard;

/// Afterwards each rank holds the reduction of its own shard: every rank sends each owner its part,
/// as it is, and the owner combines them all in rank order and rounds once. All parts leave at once,
/// so up to `n (W - 1) / W` elements per rank are on their way.
#[must_use]
pub fn reduce_scatter_direct(len: usize, world: usize, rank: usize) -> Plan {
    if world == 1 {
        return Plan::default();
    }
    let mut steps = sends(len, world, rank);
    let (ranks, range) = ((0..world).collect(), shard(len, world, rank));
    steps.push(Step::Combine { ranks, range, forward: None });
    Plan::new(Order::OneByOne, steps, Pipeline { depth: 1, chunk: len.div_ceil(world) })
}

/// Afterwards each rank holds the reduction over all ranks: [`reduce_scatter_direct`], whose
/// segments start a ring [`all_gather`] as soon as they are combined. The owner rounds a chunk and
/// all others copy it, so every rank ends with the same bits.
#[must_use]
pub fn all_reduce_direct(len: usize, world: usize, rank: usize) -> Plan {
    let mut plan = reduce_scatter_direct(len, world, rank);
    let Some(phase) = plan.phases.last_mut() else { return plan };
    if let Some(Step::Combine { forward, .. }) = phase.steps.last_mut() {
        // The send that would start an all-gather is this forward.
        *forward = Some(Ring { world, rank }.next());
    }
    phase.steps.extend(all_gather(len, world, rank).steps().skip(1).cloned());
    plan.pipeline.depth = world;
    plan
}

/// Afterwards shard `r` of each rank's buffer is what rank `r` had for it. `len` is a multiple of
/// `world`, so that what arrives fits where it left from.
#[must_use]
pub fn all_to_all(len: usize, world: usize, rank: usize) -> Plan {
    // Everything is sent before anything is received, so the exchange is in place.
    let mut steps = sends(len, world, rank);
    steps.extend(others(world, rank).map(|other| replace(other, shard(len, world, other))));
    Plan::new(Order::OneByOne, steps, Pipeline { depth: 1, chunk: len / world })
}

/// Afterwards `root` holds every rank's shard.
#[must_use]
pub fn gather(len: usize, world: usize, rank: usize, root: usize) -> Plan {
    let steps = if rank == root {
        others(world, root).map(|other| replace(other, shard(len, world, other))).collect()
    } else {
        vec![Step::Send { to: root, range: shard(len, world, rank) }]
    };
    Plan::new(Order::OneByOne, steps, Pipeline { depth: 1, chunk: len.div_ceil(world) })
}

/// Afterwards each rank holds its shard of `root`'s numbers.
#[must_use]
pub fn scatter(len: usize, world: usize, rank: usize, root: usize) -> Plan {
    let steps = if rank == root {
        sends(len, world, root)
    } else {
        vec![replace(root, shard(len, world, rank))]
    };
    Plan::new(Order::OneByOne, steps, Pipeline { depth: 1, chunk: len.div_ceil(world) })
}

/// Sends the whole buffer to one rank, which [`receive`]s it.
#[must_use]
pub fn send(len: usize, to: usize) -> Plan {
    let steps = vec![Step::Send { to, range: 0..len }];
    Plan::new(Order::OneByOne, steps, Pipeline { depth: 1, chunk: len })
}

/// Receives the whole buffer from one rank, which [`send`]s it.
#[must_use]
pub fn receive(len: usize, from: usize) -> Plan {
    Plan::new(Order::OneByOne, vec![replace(from, 0..len)], Pipeline { depth: 1, chunk: len })
}

/// Sends every other rank its shard.
fn sends(len: usize, world: usize, rank: usize) -> Vec<Step> {
    others(world, rank).map(|to| Step::Send { to, range: shard(len, world, to) }).collect()
}

fn replace(from: usize, range: Range<usize>) -> Step {
    Step::Receive { from, range, action: Action::Replace, forward: None }
}

/// All other ranks, each rank beginning with its successor, so that they do not all begin with the
/// same one.
fn others(world: usize, rank: usize) -> impl Iterator<Item = usize> {
    (1..world).map(move |places| (rank + places) % world)
}
