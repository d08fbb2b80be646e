use std::collections::{HashMap, VecDeque};

use super::*;
use crate::shard::shard;

/// Every element as the set of ranks that were combined into it.
type Sets = Vec<u64>;

/// Runs the plans of all ranks on sets instead of numbers. Combining two sets that share a rank
/// means that a rank was counted twice.
fn simulate(len: usize, plans: &[Plan]) -> Vec<Sets> {
    let whole = simulate_segments(len, plans, len.max(1));
    // However ranges are cut, both ends of a wire see one order, and nobody waits for ever.
    for segment in [1, 3] {
        assert_eq!(simulate_segments(len, plans, segment), whole, "segments of {segment}");
    }
    whole
}

fn simulate_segments(len: usize, plans: &[Plan], segment: usize) -> Vec<Sets> {
    let mut buffers: Vec<Sets> = (0..plans.len()).map(|r| vec![1 << r; len]).collect();
    let mut wires = Wires::new();
    let schedules: Vec<Vec<Task<'_>>> =
        plans.iter().map(|plan| plan.schedule(segment).collect()).collect();
    let mut done = vec![0; plans.len()];
    while done.iter().zip(&schedules).any(|(done, tasks)| *done < tasks.len()) {
        let before = done.clone();
        for (rank, tasks) in schedules.iter().enumerate() {
            while let Some(task) = tasks.get(done[rank]) {
                if !run(task, rank, &mut buffers[rank], &mut wires) {
                    break;
                }
                done[rank] += 1;
            }
        }
        assert_ne!(before, done, "the plans wait for each other");
    }
    assert!(wires.values().all(VecDeque::is_empty), "something was sent that nobody received");
    buffers
}

type Wires = HashMap<(usize, usize), VecDeque<(Range<usize>, Sets)>>;

/// Runs a task, unless what it waits for has not been sent yet.
fn run(task: &Task<'_>, rank: usize, buffer: &mut Sets, wires: &mut Wires) -> bool {
    let range = task.range.clone();
    let take = |wires: &mut Wires, from: usize| {
        let (sent, sets) = wires.get_mut(&(from, rank))?.pop_front()?;
        // In an exchange numbers land elsewhere than they left from.
        assert_eq!(sent.len(), range.len(), "another segment came first");
        let stays = matches!(task.step, Step::Receive { action, .. } if *action != Action::Replace);
        assert!(!stays || sent == range, "another segment came first");
        Some(sets)
    };
    let combine = |target: &mut Sets, source: &[u64]| {
        for (set, part) in target.iter_mut().zip(source) {
            assert_eq!(*set & part, 0, "a rank is counted twice");
            *set |= part;
        }
    };
    let (outcome, to) = match task.step {
        Step::Send { to, .. } => (buffer[range.clone()].to_vec(), Some(*to)),
        Step::Receive { from, action, forward, .. } => {
            let Some(mut received) = take(wires, *from) else { return false };
            if *action != Action::Replace {
                combine(&mut received, &buffer[range.clone()]);
            }
            if *action != Action::Pass {
                buffer[range.clone()].copy_from_slice(&received);
            }
            (received, *forward)
        }
        Step::Combine { ranks, forward, .. } => {
            let mut others = ranks.iter().filter(|other| **other != rank);
            if others.any(|other| wires.get(&(*other, rank)).is_none_or(VecDeque::is_empty)) {
                return false;
            }
            assert!(ranks.is_sorted() && ranks.contains(&rank), "not in rank order");
            let mut combined = vec![0; range.len()];
            for from in ranks {
                let part = take(wires, *from).unwrap_or_else(|| buffer[range.clone()].to_vec());
                combine(&mut combined, &part);
            }
            buffer[range.clone()].copy_from_slice(&combined);
            (combined, *forward)
        }
    };
    if let Some(to) = to {
        wires.entry((rank, to)).or_default().push_back((range.clone(), outcome));
    }
    true
}

/// Ranges that a plan sends.
fn sent(plan: &Plan) -> impl Iterator<Item = &Range<usize>> {
    plan.steps().filter_map(|step| match step {
        Step::Send { range, .. }
        | Step::Receive { range, forward: Some(_), .. }
        | Step::Combine { range, forward: Some(_), .. } => Some(range),
        _ => None,
    })
}

fn sent_elements(plan: &Plan) -> usize {
    sent(plan).map(Range::len).sum()
}

/// How often a plan waits for another rank.
fn waits(plan: &Plan) -> usize {
    plan.steps().filter(|step| !matches!(step, Step::Send { .. })).count()
}

fn check(plan: impl Fn(usize, usize, usize) -> Plan, expected: impl Fn(usize, usize, &Sets)) {
    for world in 1..=64 {
        for len in [0, 1, world - 1, world, world + 1, 97, 3 * world] {
            let plans: Vec<Plan> = (0..world).map(|rank| plan(len, world, rank)).collect();
            let pipeline = plans[0].pipeline;
            assert!(plans.iter().all(|plan| plan.pipeline == pipeline), "shapes differ");
            let largest = plans.iter().flat_map(sent).map(Range::len).max();
            assert!(largest.is_none_or(|largest| largest <= pipeline.chunk.max(1)));
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
    for plan in [all_reduce, all_reduce_doubling, all_reduce_direct] {
        check(plan, |world, _, buffer| {
            assert!(buffer.iter().all(|set| *set == everyone(world)));
        });
    }
}

/// All row lengths that divide a world.
fn rows(world: usize) -> impl Iterator<Item = usize> {
    (1..=world).filter(move |row| world.is_multiple_of(*row))
}

#[test]
fn a_mesh_counts_every_rank_once_everywhere_for_every_shape() {
    for world in 1..=64 {
        for row in rows(world) {
            for len in [0, 1, world - 1, world + 1, 97] {
                let plan = |rank| all_reduce_hierarchical(len, world, rank, row);
                let plans: Vec<Plan> = (0..world).map(plan).collect();
                assert!(plans.iter().all(|plan| plan.pipeline == plans[0].pipeline));
                for buffer in simulate(len, &plans) {
                    assert!(buffer.iter().all(|set| *set == everyone(world)), "{world}, {row}");
                }
            }
        }
    }
}

#[test]
fn a_mesh_waits_less_often_than_a_ring_and_sends_as_much() {
    for world in 1..=64 {
        let len = 5 * world;
        for (row, rank) in rows(world).flat_map(|row| (0..world).map(move |rank| (row, rank))) {
            let ring = all_reduce(len, world, rank);
            let mesh = all_reduce_hierarchical(len, world, rank, row);
            assert_eq!(waits(&ring), 2 * (world - 1));
            assert_eq!(waits(&mesh), 2 * (row - 1) + 2 * (world / row - 1));
            assert_eq!(sent_elements(&ring), 2 * (len - len / world));
            assert_eq!(sent_elements(&mesh), 2 * (len - len / world));
        }
    }
}

#[test]
fn a_direct_reduction_sends_each_owner_its_part_and_waits_once() {
    for (world, rank) in (2..=64).flat_map(|world| (0..world).map(move |rank| (world, rank))) {
        for len in [0, 1, world - 1, world + 1, 97] {
            let own = shard(len, world, rank).len();
            let next = shard(len, world, (rank + 1) % world).len();
            let scatter = reduce_scatter_direct(len, world, rank);
            assert_eq!((waits(&scatter), sent_elements(&scatter)), (1, len - own));
            let all = all_reduce_direct(len, world, rank);
            assert_eq!((waits(&all), sent_elements(&all)), (world, len - own + len - next));
        }
    }
}

#[test]
fn a_placed_plan_names_other_ranks_and_another_part_of_the_buffer() {
    // Ranks 1, 3 and 6 of 8 reduce the elements from 5 on.
    let members = [1, 3, 6];
    for plan in [all_reduce, all_reduce_doubling, all_reduce_direct] {
        let plans: Vec<Plan> = (0..8)
            .map(|global| match members.iter().position(|member| *member == global) {
                Some(rank) => plan(7, 3, rank).placed(5, |rank| members[rank]),
                None => Plan::default(),
            })
            .collect();
        for (rank, buffer) in simulate(12, &plans).iter().enumerate() {
            let reduced = if members.contains(&rank) { 0b0100_1010 } else { 1 << rank };
            assert!(buffer[..5].iter().all(|set| *set == 1 << rank));
            assert!(buffer[5..].iter().all(|set| *set == reduced));
        }
    }
}

#[test]
fn reduce_scatters_finish_the_own_shard_only() {
    for plan in [reduce_scatter, reduce_scatter_direct] {
        check(plan, |world, rank, buffer| {
            let own = shard(buffer.len(), world, rank);
            for (i, set) in buffer.iter().enumerate() {
                let expected = if own.contains(&i) { everyone(world) } else { 1 << rank };
                assert_eq!(*set, expected);
            }
        });
    }
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
