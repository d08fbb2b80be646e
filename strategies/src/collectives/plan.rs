//! Who sends what to whom, as data. A plan is one rank's part of a collective; it is made and
//! tested without any transport.
//!
//! A plan is a list of steps that the rank takes in order. Ring plans are pipelines: a range that is
//! received is combined with the rank's own numbers and passed on at once.
//!
//! Costs are given per rank for `W` ranks and `n` elements: steps that wait for each other, and
//! elements sent.
//!
//! | plan | steps | elements sent |
//! |---|---|---|
//! | [`all_reduce`] (ring) | `2 (W - 1)` | `2 n (W - 1) / W`, the least that any algorithm can do |
//! | [`all_reduce_doubling`] | `log2 W` (+ 2 where W is no power of two) | `n` per step |
//! | [`reduce_scatter`], [`all_gather`] | `W - 1` | `n (W - 1) / W` |
//! | [`broadcast`], [`reduce`] (chain) | `W - 1` | `n` |
//! | [`gather`], [`scatter`] | 1 | the shard; at the root of a scatter `n (W - 1) / W` |
//! | [`all_to_all`] | 1 | `n (W - 1) / W` |

use std::ops::Range;

use crate::shard::shard;

/// One rank's part of a collective.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// What to do, in order.
    pub steps: Vec<Step>,
}

/// One thing that a rank does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Sends a range of the buffer as it is now.
    Send {
        /// The receiver.
        to: usize,
        /// The range.
        range: Range<usize>,
    },
    /// Receives a range, combines it, and perhaps passes the outcome on.
    Receive {
        /// The sender.
        from: usize,
        /// The range of the buffer that arrives.
        range: Range<usize>,
        /// What happens to it.
        action: Action,
        /// Who gets the outcome next.
        forward: Option<usize>,
    },
}

/// What a rank does with a range that it receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Combine it with this rank's numbers only to pass it on; the buffer stays as it is.
    Pass,
    /// Combine it with this rank's numbers and keep the outcome.
    Finish,
    /// Keep what arrives in place of this rank's numbers.
    Replace,
}

/// Afterwards each rank holds the reduction of its own shard. A ring: the reduction of chunk `c`
/// starts at rank `c + 1` and ends at rank `c`, in ring order, so its rounding depends only on `W`.
#[must_use]
pub fn reduce_scatter(len: usize, world: usize, rank: usize) -> Plan {
    let ring = Ring { len, world, rank };
    let mut plan = Plan::default();
    if world > 1 {
        plan.steps.push(Step::Send { to: ring.next(), range: ring.chunk_behind(1) });
        plan.steps.extend((2..=world).map(|behind| Step::Receive {
            from: ring.previous(),
            range: ring.chunk_behind(behind),
            action: if behind == world { Action::Finish } else { Action::Pass },
            forward: (behind < world).then(|| ring.next()),
        }));
    }
    plan
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
    let behind = |places: usize| ranges[(rank + world - places) % world].clone();
    let mut plan = Plan::default();
    if world > 1 {
        let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
        plan.steps.push(Step::Send { to: next, range: behind(0) });
        plan.steps.extend((1..world).map(|places| Step::Receive {
            from: previous,
            range: behind(places),
            action: Action::Replace,
            forward: (places + 1 < world).then_some(next),
        }));
    }
    plan
}

/// Afterwards each rank holds the reduction over all ranks: a ring reduce-scatter whose last
/// segments start the all-gather as soon as they are summed (Patarasuk and Yuan, 2009). One rank
/// finishes a chunk and all others copy it, so every rank ends with the same bits.
#[must_use]
pub fn all_reduce(len: usize, world: usize, rank: usize) -> Plan {
    let ring = Ring { len, world, rank };
    let mut plan = reduce_scatter(len, world, rank);
    if let Some(Step::Receive { forward, .. }) = plan.steps.last_mut() {
        // The send that would start an all-gather is this forward.
        *forward = Some(ring.next());
        plan.steps.extend(all_gather(len, world, rank).steps.into_iter().skip(1));
    }
    plan
}

/// The same as [`all_reduce`] in fewer, larger steps: recursive doubling (Thakur, Rabenseifner and
/// Gropp, 2005). In each step two ranks exchange all they have; combining is symmetric, so both get
/// the same bits. Ranks beyond the largest power of two first hand their numbers to a partner, and
/// get the outcome from it.
#[must_use]
pub fn all_reduce_doubling(len: usize, world: usize, rank: usize) -> Plan {
    let power = if world.is_power_of_two() { world } else { world.next_power_of_two() / 2 };
    let whole = 0..len;
    let send = |to| Step::Send { to, range: whole.clone() };
    let receive =
        |from, action| Step::Receive { from, range: whole.clone(), action, forward: None };
    if rank >= power {
        let partner = rank - power;
        return Plan { steps: vec![send(partner), receive(partner, Action::Replace)] };
    }
    let extra = Some(rank + power).filter(|extra| *extra < world);
    let mut steps: Vec<Step> =
        extra.map(|extra| receive(extra, Action::Finish)).into_iter().collect();
    for bit in (0..power.ilog2()).map(|bit| 1 << bit) {
        steps.extend([send(rank ^ bit), receive(rank ^ bit, Action::Finish)]);
    }
    steps.extend(extra.map(send));
    Plan { steps }
}

/// Afterwards each rank holds `root`'s numbers. A chain, which segments turn into a pipeline.
#[must_use]
pub fn broadcast(len: usize, world: usize, rank: usize, root: usize) -> Plan {
    let ring = Ring { len, world, rank };
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
    Plan { steps: vec![step] }
}

/// Afterwards `root` holds the reduction over all ranks. A chain that starts behind the root.
#[must_use]
pub fn reduce(len: usize, world: usize, rank: usize, root: usize) -> Plan {
    let ring = Ring { len, world, rank };
    if world == 1 {
        return Plan::default();
    }
    let is_first = ring.previous() == root;
    let step = if is_first && rank != root {
        Step::Send { to: ring.next(), range: 0..len }
    } else {
        Step::Receive {
            from: ring.previous(),
            range: 0..len,
            action: if rank == root { Action::Finish } else { Action::Pass },
            forward: (rank != root).then(|| ring.next()),
        }
    };
    Plan { steps: vec![step] }
}

/// Afterwards `root` holds every rank's shard, each sent straight to it.
#[must_use]
pub fn gather(len: usize, world: usize, rank: usize, root: usize) -> Plan {
    if rank != root {
        return Plan { steps: vec![Step::Send { to: root, range: shard(len, world, rank) }] };
    }
    let others = (0..world).filter(|other| *other != root);
    Plan { steps: others.map(|other| replace(other, shard(len, world, other))).collect() }
}

/// Afterwards each rank holds its shard of `root`'s numbers, sent straight to it.
#[must_use]
pub fn scatter(len: usize, world: usize, rank: usize, root: usize) -> Plan {
    if rank != root {
        return Plan { steps: vec![replace(root, shard(len, world, rank))] };
    }
    let others = (0..world).filter(|other| *other != root);
    let send = |other| Step::Send { to: other, range: shard(len, world, other) };
    Plan { steps: others.map(send).collect() }
}

/// Afterwards shard `r` of each rank's buffer is what rank `r` had for it. `len` is a multiple of
/// `world`, so that what arrives fits where it left from.
#[must_use]
pub fn all_to_all(len: usize, world: usize, rank: usize) -> Plan {
    // Everything is sent before anything is received, so the exchange is in place.
    let others = || (1..world).map(move |distance| (rank + distance) % world);
    let send = |other| Step::Send { to: other, range: shard(len, world, other) };
    let receive = |other| replace(other, shard(len, world, other));
    Plan { steps: others().map(send).chain(others().map(receive)).collect() }
}

fn replace(from: usize, range: Range<usize>) -> Step {
    Step::Receive { from, range, action: Action::Replace, forward: None }
}

/// A rank's place in the ring.
struct Ring {
    len: usize,
    world: usize,
    rank: usize,
}

impl Ring {
    fn next(&self) -> usize {
        (self.rank + 1) % self.world
    }

    fn previous(&self) -> usize {
        (self.rank + self.world - 1) % self.world
    }

    /// The chunk owned by the rank that many places behind this one.
    fn chunk_behind(&self, places: usize) -> Range<usize> {
        shard(self.len, self.world, (self.rank + self.world - places) % self.world)
    }
}

#[cfg(test)]
mod tests;
