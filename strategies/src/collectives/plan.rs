//! Who sends what to whom, as data. A plan is one rank's part of a collective; it is made and
//! tested without any transport.
//!
//! Every plan here is a pipeline: a rank may start by sending a range of its own, and from then on
//! each range that it receives is combined with its own numbers and passed on, or kept.
//!
//! Ring all-reduce (Patarasuk and Yuan, 2009) as reduce-scatter followed by all-gather. With `W`
//! ranks and `n` elements, each rank takes `2 (W - 1)` steps and sends `2 n (W - 1) / W` elements,
//! which is the least that any algorithm can do. The sum of chunk `c` starts at rank `c + 1` and
//! ends at rank `c`, in ring order: its rounding depends only on `W`, and because one rank finishes
//! it and all others copy, every rank ends with the same bits.

use std::ops::Range;

use crate::shard::shard;

/// One rank's part of a collective.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// A range to send before anything is received: the receiver, and the range.
    pub start: Option<(usize, Range<usize>)>,
    /// What to receive, in order.
    pub hops: Vec<Hop>,
}

/// One range received, combined and perhaps passed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hop {
    /// The sender.
    pub from: usize,
    /// The range of the buffer that arrives.
    pub range: Range<usize>,
    /// What happens to it.
    pub action: Action,
    /// Who gets the outcome next.
    pub forward: Option<usize>,
}

/// What a rank does with a range that it receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Add this rank's numbers to the partial sum that passes through; the buffer stays as it is.
    Pass,
    /// Add this rank's numbers and keep the sum.
    Finish,
    /// Keep what arrives in place of this rank's numbers.
    Replace,
}

/// Afterwards each rank holds the sum of its own shard.
#[must_use]
pub fn reduce_scatter(len: usize, world: usize, rank: usize) -> Plan {
    if world == 1 {
        return Plan::default();
    }
    let ring = Ring { len, world, rank };
    let hops = (2..=world)
        .map(|behind| Hop {
            from: ring.previous(),
            range: ring.chunk_behind(behind),
            action: if behind == world { Action::Finish } else { Action::Pass },
            forward: (behind < world).then(|| ring.next()),
        })
        .collect();
    Plan { start: Some((ring.next(), ring.chunk_behind(1))), hops }
}

/// Afterwards each rank holds every rank's shard.
#[must_use]
pub fn all_gather(len: usize, world: usize, rank: usize) -> Plan {
    if world == 1 {
        return Plan::default();
    }
    let ring = Ring { len, world, rank };
    Plan { start: Some((ring.next(), ring.chunk_behind(0))), hops: ring.gather_hops() }
}

/// Afterwards each rank holds the sum over all ranks: a reduce-scatter whose last segments start
/// the all-gather as soon as they are summed.
#[must_use]
pub fn all_reduce(len: usize, world: usize, rank: usize) -> Plan {
    let mut plan = reduce_scatter(len, world, rank);
    if let Some(own) = plan.hops.last_mut() {
        let ring = Ring { len, world, rank };
        own.forward = Some(ring.next());
        plan.hops.extend(ring.gather_hops());
    }
    plan
}

/// Afterwards each rank holds `root`'s numbers. A chain: `W - 1` steps, and each rank but the last
/// sends `n` elements once; segments make it take little longer than one send of the whole.
#[must_use]
pub fn broadcast(len: usize, world: usize, rank: usize, root: usize) -> Plan {
    if world == 1 {
        return Plan::default();
    }
    let ring = Ring { len, world, rank };
    if rank == root {
        return Plan { start: Some((ring.next(), 0..len)), hops: vec![] };
    }
    let hop = Hop {
        from: ring.previous(),
        range: 0..len,
        action: Action::Replace,
        forward: (ring.next() != root).then(|| ring.next()),
    };
    Plan { start: None, hops: vec![hop] }
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

    /// Receives every other rank's chunk, the nearest first, and passes on all but the last.
    fn gather_hops(&self) -> Vec<Hop> {
        (1..self.world)
            .map(|behind| Hop {
                from: self.previous(),
                range: self.chunk_behind(behind),
                action: Action::Replace,
                forward: (behind + 1 < self.world).then(|| self.next()),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};

    use super::*;

    /// Every element as the set of ranks that were summed into it.
    type Sets = Vec<u64>;

    /// Runs the plans of all ranks on sets instead of numbers. Summing two sets that share a rank
    /// means that a rank was counted twice.
    fn simulate(len: usize, plans: &[Plan]) -> Vec<Sets> {
        let mut buffers: Vec<Sets> = (0..plans.len()).map(|r| vec![1 << r; len]).collect();
        let mut wires: HashMap<(usize, usize), VecDeque<Sets>> = HashMap::new();
        for (rank, plan) in plans.iter().enumerate() {
            if let Some((to, range)) = plan.start.clone() {
                wires.entry((rank, to)).or_default().push_back(buffers[rank][range].to_vec());
            }
        }
        let mut done = vec![0; plans.len()];
        while done.iter().zip(plans).any(|(done, plan)| *done < plan.hops.len()) {
            let before = done.clone();
            for (rank, plan) in plans.iter().enumerate() {
                let Some(hop) = plan.hops.get(done[rank]) else { continue };
                let wire = wires.entry((hop.from, rank)).or_default();
                let Some(mut received) = wire.pop_front() else { continue };
                let own = &mut buffers[rank][hop.range.clone()];
                assert_eq!(received.len(), own.len());
                if hop.action != Action::Replace {
                    for (theirs, mine) in received.iter_mut().zip(own.iter()) {
                        assert_eq!(*theirs & *mine, 0, "a rank is counted twice");
                        *theirs |= *mine;
                    }
                }
                if hop.action != Action::Pass {
                    own.copy_from_slice(&received);
                }
                if let Some(to) = hop.forward {
                    wires.entry((rank, to)).or_default().push_back(received);
                }
                done[rank] += 1;
            }
            assert_ne!(before, done, "the plans wait for each other");
        }
        assert!(wires.values().all(VecDeque::is_empty), "something was sent that nobody received");
        buffers
    }

    fn check(
        plan: impl Fn(usize, usize, usize) -> Plan,
        expected: impl Fn(usize, usize, &Sets, usize),
    ) {
        for world in 1..=64 {
            for len in [0, 1, world - 1, world, world + 1, 97, 3 * world] {
                let plans: Vec<Plan> = (0..world).map(|rank| plan(len, world, rank)).collect();
                for (rank, buffer) in simulate(len, &plans).iter().enumerate() {
                    expected(world, rank, buffer, len);
                }
            }
        }
    }

    fn everyone(world: usize) -> u64 {
        u64::MAX >> (64 - world)
    }

    #[test]
    fn all_reduce_counts_every_rank_once_everywhere() {
        check(all_reduce, |world, _, buffer, _| {
            assert!(buffer.iter().all(|set| *set == everyone(world)));
        });
    }

    #[test]
    fn reduce_scatter_finishes_the_own_shard_only() {
        check(reduce_scatter, |world, rank, buffer, len| {
            let own = shard(len, world, rank);
            for (i, set) in buffer.iter().enumerate() {
                let expected = if own.contains(&i) { everyone(world) } else { 1 << rank };
                assert_eq!(*set, expected);
            }
        });
    }

    #[test]
    fn all_gather_copies_every_shard() {
        check(all_gather, |world, _, buffer, len| {
            for owner in 0..world {
                assert!(buffer[shard(len, world, owner)].iter().all(|set| *set == 1 << owner));
            }
        });
    }

    #[test]
    fn broadcast_copies_the_root() {
        for root in [0, 1, 5] {
            check(
                |len, world, rank| broadcast(len, world, rank, root % world),
                |world, _, buffer, _| {
                    assert!(buffer.iter().all(|set| *set == 1 << (root % world)));
                },
            );
        }
    }
}
