use std::thread;

use super::*;
use crate::shard::shard;

/// Runs `body` on every rank of a group of `world` threads and returns the results in rank order.
fn ranks<R: Send>(
    world: usize,
    options: &GroupOptions,
    body: impl Fn(&ProcessGroup) -> R + Sync,
) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = memory::endpoints(world)
            .into_iter()
            .map(|endpoint| {
                let group = ProcessGroup::new(endpoint, options.clone());
                let body = &body;
                scope.spawn(move || body(&group))
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
    })
}

/// Segments of 16 bytes, so that short buffers have several.
fn small_segments() -> GroupOptions {
    GroupOptions { segment_bytes: 16, ..GroupOptions::default() }
}

fn lengths(world: usize) -> Vec<usize> {
    vec![0, 1, world - 1, world, world + 1, 97, 1009]
}

/// Numbers that are exact in `f32` however they are summed.
fn whole(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 31 + rank * 17) % 97) as f32).collect()
}

/// Numbers whose sum depends on the order.
fn rough(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 13) % 101) as f32 * 1e-3 + 0.1).collect()
}

#[test]
fn all_reduce_equals_the_scalar_sum_everywhere() {
    for world in 1..=8 {
        for len in lengths(world) {
            let sums = ranks(world, &small_segments(), |group| {
                group.all_reduce(whole(group.rank(), len)).wait().expect("a sum")
            });
            let expected: Vec<f32> =
                (0..len).map(|i| (0..world).map(|rank| whole(rank, len)[i]).sum()).collect();
            assert!(sums.iter().all(|sum| *sum == expected), "world {world}, len {len}");
        }
    }
}

#[test]
fn all_ranks_and_all_runs_get_the_same_bits() {
    for world in [2, 3, 5] {
        let run = |options: &GroupOptions| {
            ranks(world, options, |group| {
                let sum = group.all_reduce(rough(group.rank(), 1009)).wait().expect("a sum");
                sum.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            })
        };
        let first = run(&small_segments());
        assert!(first.iter().all(|bits| *bits == first[0]), "world {world}");
        assert_eq!(first, run(&GroupOptions::default()), "segments must not change a sum");
    }
}

#[test]
fn broadcast_gives_every_rank_the_roots_numbers() {
    for world in 1..=6 {
        for len in lengths(world) {
            for root in [0, world - 1] {
                let received = ranks(world, &small_segments(), |group| {
                    group.broadcast(whole(group.rank(), len), root).wait().expect("numbers")
                });
                let expected = whole(root, len);
                assert!(received.iter().all(|r| *r == expected), "world {world}, len {len}");
            }
        }
    }
}

#[test]
fn other_types_travel_too() {
    let sums = ranks(3, &small_segments(), |group| {
        let rank = group.rank() as u8;
        let doubles = group.all_reduce(vec![f64::from(rank) + 0.5; 5]);
        let bytes = group.broadcast(vec![rank; 5], 2);
        (doubles.wait().expect("a sum"), bytes.wait().expect("bytes"))
    });
    assert!(sums.iter().all(|sum| *sum == (vec![4.5; 5], vec![2; 5])));
}

#[test]
fn bytes_and_messages_are_those_of_the_ring() {
    for world in 2..=6 {
        for len in [0, world - 1, world, 97, 1009] {
            let traffic = ranks(world, &small_segments(), |group| {
                group.all_reduce(whole(group.rank(), len)).wait().expect("a sum");
                group.traffic()
            });
            for (rank, traffic) in traffic.iter().enumerate() {
                // In the reduce-scatter a rank sends every chunk but its own; in the all-gather
                // every chunk but the next rank's.
                let next = (rank + 1) % world;
                let chunks =
                    (0..world).filter(|c| *c != rank).chain((0..world).filter(|c| *c != next));
                let sent: Vec<usize> = chunks.map(|c| shard(len, world, c).len()).collect();
                let bytes: usize = sent.iter().map(|elements| 4 * elements).sum();
                let messages: usize = sent.iter().map(|elements| elements.div_ceil(4)).sum();
                let expected = Traffic { messages: messages as u64, bytes: bytes as u64 };
                assert_eq!(*traffic, expected, "rank {rank} of {world}, len {len}");
            }
        }
    }
}

#[test]
fn launched_collectives_overlap_and_keep_their_order() {
    let sums = ranks(3, &small_segments(), |group| {
        let pending: Vec<_> = (0..20).map(|i| group.all_reduce(vec![i as f32; 50])).collect();
        // Waiting in another order than launching changes nothing.
        pending.into_iter().rev().map(|p| p.wait().expect("a sum")[0]).collect::<Vec<_>>()
    });
    let expected: Vec<f32> = (0..20).rev().map(|i| 3.0 * i as f32).collect();
    assert!(sums.iter().all(|sums| *sums == expected));
}

#[test]
fn ranks_in_different_collectives_get_both_descriptions() {
    let errors = ranks(2, &GroupOptions::default(), |group| match group.rank() {
        0 => group.all_reduce(vec![0.0f32; 8]).wait().expect_err("a mismatch"),
        _ => group.all_reduce(vec![0.0f64; 6]).wait().expect_err("a mismatch"),
    });
    let mismatch = errors.iter().find(|error| matches!(error, Error::Mismatch { .. }));
    let message = mismatch.expect("one rank sees it first").to_string();
    assert!(message.contains("all_reduce #0 of 8 f32"), "{message}");
    assert!(message.contains("all_reduce #0 of 6 f64"), "{message}");
}

#[test]
fn a_rank_that_leaves_ends_the_wait_of_the_others() {
    let errors = ranks(3, &GroupOptions::default(), |group| match group.rank() {
        2 => None,
        _ => Some(group.barrier().expect_err("rank 2 is gone")),
    });
    let left = errors.iter().flatten().find(|error| matches!(error, Error::PeerLeft { .. }));
    let message = left.expect("rank 0 waits for rank 2").to_string();
    assert!(message.contains("rank 2 has left the group"), "{message}");
}

#[test]
fn a_raised_signal_wakes_a_waiting_rank() {
    let errors = ranks(2, &GroupOptions::default(), |group| {
        let waiting = (group.rank() == 0).then(|| group.all_reduce(vec![1.0f32; 4]));
        if group.rank() == 1 {
            group.abort_signal().raise(1, "out of cheese");
        }
        waiting.map(|pending| pending.wait().expect_err("rank 1 failed"))
    });
    let expected = Error::Aborted { rank: 1, reason: "out of cheese".to_owned() };
    assert_eq!(errors[0], Some(expected));
}

#[test]
fn a_silent_rank_is_named_at_the_deadline() {
    let options = GroupOptions { timeout: Duration::from_millis(20), ..GroupOptions::default() };
    let (done, until) = bounded::<()>(0);
    let errors = ranks(2, &options, |group| match group.rank() {
        0 => {
            let error = group.barrier().expect_err("rank 1 is silent");
            done.send(()).expect("rank 1 should be waiting");
            Some(error)
        }
        _ => {
            until.recv().expect("rank 0 should come to its deadline");
            None
        }
    });
    let message = errors[0].as_ref().map(ToString::to_string).unwrap_or_default();
    assert!(message.contains("for rank 1 in barrier #0"), "{message}");
    assert!(message.contains("PYROCLAST_TIMEOUT"), "{message}");
}

#[test]
fn after_an_error_every_collective_fails_at_once() {
    let errors = ranks(2, &GroupOptions::default(), |group| {
        group.abort_signal().raise(0, "first");
        group.abort_signal().raise(1, "second");
        group.all_reduce(vec![0u8; 3]).wait().expect_err("the group has failed")
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Aborted { .. })), "{errors:?}");
    assert_eq!(errors[0], errors[1], "the first failure is the one that is blamed");
}
