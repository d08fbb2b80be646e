use std::collections::{HashMap, VecDeque};

use super::*;

/// Every element as the set of ranks that were combined into it.
type Sets = Vec<u64>;

/// Runs the plans of all ranks on sets instead of numbers. Combining two sets that share a rank
/// means that a rank was counted twice.
fn simulate(len: usize, plans: &[Plan]) -> Vec<Sets> {
    let mut buffers: Vec<Sets> = (0..plans.len()).map(|r| vec![1 << r; len]).collect();
    let mut wires: HashMap<(usize, usize), VecDeque<Sets>> = HashMap::new();
    let mut done = vec![0; plans.len()];
    while done.iter().zip(plans).any(|(done, plan)| *done < plan.steps.len()) {
        let before = done.clone();
        for (rank, plan) in plans.iter().enumerate() {
            let buffer = &mut buffers[rank];
            match plan.steps.get(done[rank]) {
                None => continue,
                Some(Step::Send { to, range }) => {
                    wires.entry((rank, *to)).or_default().push_back(buffer[range.clone()].to_vec());
                }
                Some(Step::Receive { from, range, action, forward }) => {
                    let wire = wires.entry((*from, rank)).or_default();
                    let Some(mut received) = wire.pop_front() else { continue };
                    let own = &mut buffer[range.clone()];
                    assert_eq!(received.len(), own.len());
                    if *action != Action::Replace {
                        for (theirs, mine) in received.iter_mut().zip(own.iter()) {
                            assert_eq!(*theirs & *mine, 0, "a rank is counted twice");
                            *theirs |= *mine;
                        }
                    }
                    if *action != Action::Pass {
                        own.copy_from_slice(&received);
                    }
                    if let Some(to) = forward {
                        wires.entry((rank, *to)).or_default().push_back(received);
                    }
                }
            }
            done[rank] += 1;
        }
        assert_ne!(before, done, "the plans wait for each other");
    }
    assert!(wires.values().all(VecDeque::is_empty), "something was sent that nobody received");
    buffers
}

fn check(plan: impl Fn(usize, usize, usize) -> Plan, expected: impl Fn(usize, usize, &Sets)) {
    for world in 1..=64 {
        for len in [0, 1, world - 1, world, world + 1, 97, 3 * world] {
            let plans: Vec<Plan> = (0..world).map(|rank| plan(len, world, rank)).collect();
            for (rank, buffer) in simulate(len, &plans).iter().enumerate() {
                expected(world, rank, buffer);
            }
        }
    }
}

fn everyone(world: usize) -> u64 {
    u64::MAX >> (64 - world)
}

#[test]
fn all_reduces_count_every_rank_once_everywhere() {
    for plan in [all_reduce, all_reduce_doubling] {
        check(plan, |world, _, buffer| {
            assert!(buffer.iter().all(|set| *set == everyone(world)));
        });
    }
}

#[test]
fn reduce_scatter_finishes_the_own_shard_only() {
    check(reduce_scatter, |world, rank, buffer| {
        let own = shard(buffer.len(), world, rank);
        for (i, set) in buffer.iter().enumerate() {
            let expected = if own.contains(&i) { everyone(world) } else { 1 << rank };
            assert_eq!(*set, expected);
        }
    });
}

#[test]
fn all_gather_copies_every_shard() {
    check(all_gather, |world, _, buffer| {
        for owner in 0..world {
            assert!(buffer[shard(buffer.len(), world, owner)].iter().all(|s| *s == 1 << owner));
        }
    });
}

#[test]
fn broadcast_copies_the_root_and_reduce_counts_everyone_there() {
    for root in [0, 1, 5] {
        check(
            |len, world, rank| broadcast(len, world, rank, root % world),
            |world, _, buffer| assert!(buffer.iter().all(|set| *set == 1 << (root % world))),
        );
        check(
            |len, world, rank| reduce(len, world, rank, root % world),
            |world, rank, buffer| {
                let expected = if rank == root % world { everyone(world) } else { 1 << rank };
                assert!(buffer.iter().all(|set| *set == expected));
            },
        );
    }
}

#[test]
fn gather_and_scatter_move_shards_to_and_from_the_root() {
    for root in [0, 1, 5] {
        check(
            |len, world, rank| gather(len, world, rank, root % world),
            |world, rank, buffer| {
                for owner in 0..world {
                    let from = if rank == root % world { owner } else { rank };
                    let part = &buffer[shard(buffer.len(), world, owner)];
                    assert!(part.iter().all(|set| *set == 1 << from));
                }
            },
        );
        check(
            |len, world, rank| scatter(len, world, rank, root % world),
            |world, rank, buffer| {
                for owner in 0..world {
                    let from = if rank == owner { root % world } else { rank };
                    let part = &buffer[shard(buffer.len(), world, owner)];
                    assert!(part.iter().all(|set| *set == 1 << from));
                }
            },
        );
    }
}

#[test]
fn all_to_all_brings_every_rank_its_part_of_all_others() {
    for world in 1..=64 {
        for chunk in [0, 1, 3] {
            let len = chunk * world;
            let plans: Vec<Plan> = (0..world).map(|rank| all_to_all(len, world, rank)).collect();
            for buffer in simulate(len, &plans) {
                for owner in 0..world {
                    assert!(buffer[shard(len, world, owner)].iter().all(|s| *s == 1 << owner));
                }
            }
        }
    }
}
