//! Plans in which every rank receives from the rank before it and sends to the rank after it.

use std::ops::Range;

use super::{Action, Order, Pipeline, Plan, Step};
use crate::shard::shard;

/// Afterwards each rank holds the reduction of its own shard. A ring: the reduction of chunk `c`
/// starts at rank `c + 1` and ends at rank `c`, in ring order, so its rounding depends only on `W`.
#[must_use]
pub fn reduce_scatter(len: usize, world: usize, rank: usize) -> Plan {
    let ring = Ring { world, rank };
    let chunk_behind = |places| shard(len, world, ring.behind(places));
    if world == 1 {
        return Plan::default();
    }
    let mut steps = vec![Step::Send { to: ring.next(), range: chunk_behind(1) }];
    steps.extend((2..=world).map(|places| Step::Receive {
        from: ring.previous(),
        range: chunk_behind(places),
        action: if places == world { Action::Finish } else { Action::Pass },
        forward: (places < world).then(|| ring.next()),
    }));
    Plan::new(Order::Wave, steps, Pipeline { depth: world - 1, chunk: len.div_ceil(world) })
}

/// Afterwards each rank holds every rank's shard. A ring.
#[must_use]
pub fn all_gather(len: usize, world: usize, rank: usize) -> Plan {
    let shards: Vec<_> = (0..world).map(|owner| shard(len, world, owner)).collect();
    all_gather_ranges(&shards, rank)
}

/// As [`all_gather`], with the range of every rank given.
#[must_use]
pub fn all_gather_ranges(ranges: &[Range<usize>], rank: usize) -> Plan {
    let world = ranges.len();
    let ring = Ring { world, rank };
    if world == 1 {
        return Plan::default();
    }
    let mut steps = vec![Step::Send { to: ring.next(), range: ranges[rank].clone() }];
    steps.extend((1..world).map(|places| Step::Receive {
        from: ring.previous(),
        range: ranges[ring.behind(places)].clone(),
        action: Action::Replace,
        forward: (places + 1 < world).then(|| ring.next()),
    }));
    let chunk = ranges.iter().map(Range::len).max().unwrap_or_default();
    Plan::new(Order::Wave, steps, Pipeline { depth: world - 1, chunk })
}

/// Afterwards each rank holds the reduction over all ranks: a ring reduce-scatter whose last
/// segments start the all-gather as soon as they are summed (Patarasuk and Yuan, 2009). One rank
/// finishes a chunk and all others copy it, so every rank ends with the same bits.
#[must_use]
pub fn all_reduce(len: usize, world: usize, rank: usize) -> Plan {
    let mut plan = reduce_scatter(len, world, rank);
    let Some(phase) = plan.phases.last_mut() else { return plan };
    if let Some(Step::Receive { forward, .. }) = phase.steps.last_mut() {
        // The send that would start an all-gather is this forward.
        *forward = Some(Ring { world, rank }.next());
    }
    phase.steps.extend(all_gather(len, world, rank).steps().skip(1).cloned());
    plan.pipeline.depth = 2 * (world - 1);
    plan
}

/// Afterwards each rank holds `root`'s numbers. A chain, which segments turn into a pipeline.
#[must_use]
pub fn broadcast(len: usize, world: usize, rank: usize, root: usize) -> Plan {
    let ring = Ring { world, rank };
    if world == 1 {
        return Plan::default();
    }
    let step = if rank == root {
        Step::Send { to: ring.next(), range: 0..len }
    } else {
        Step::Receive {
            from: ring.previous(),
            range: 0..len,
            action: Action::Replace,
            forward: (ring.next() != root).then(|| ring.next()),
        }
    };
    Plan::new(Order::Wave, vec![step], Pipeline { depth: world - 1, chunk: len })
}

/// Afterwards `root` holds the reduction over all ranks. A chain that starts behind the root.
#[must_use]
pub fn reduce(len: usize, world: usize, rank: usize, root: usize) -> Plan {
    let ring = Ring { world, rank };
    if world == 1 {
        return Plan::default();
    }
    let is_first = ring.previous() == root;
    let step = if is_first {
        Step::Send { to: ring.next(), range: 0..len }
    } else {
        Step::Receive {
            from: ring.previous(),
            range: 0..len,
            action: if rank == root { Action::Finish } else { Action::Pass },
            forward: (rank != root).then(|| ring.next()),
        }
    };
    Plan::new(Order::Wave, vec![step], Pipeline { depth: world - 1, chunk: len })
}

/// A rank's place in the ring.
pub(super) struct Ring {
    pub(super) world: usize,
    pub(super) rank: usize,
}

impl Ring {
    pub(super) fn next(&self) -> usize {
        (self.rank + 1) % self.world
    }

    fn previous(&self) -> usize {
        self.behind(1)
    }

    /// The rank that many places behind this one.
    fn behind(&self, places: usize) -> usize {
        (self.rank + self.world - places) % self.world
    }
}
