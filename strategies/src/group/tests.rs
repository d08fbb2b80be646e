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

/// Whether `scripts/test --full` runs.
fn is_full() -> bool {
    std::env::var_os("PYROCLAST_FULL").is_some()
}

fn lengths(world: usize) -> Vec<usize> {
    let large = if is_full() { vec![1 << 18, (1 << 18) + 7] } else { vec![] };
    [vec![0, 1, world - 1, world, world + 1, 97, 1009], large].concat()
}

/// Lengths for the types that share their code with `f32`.
fn few_lengths(world: usize) -> Vec<usize> {
    if is_full() { lengths(world) } else { vec![0, world + 1, 97] }
}

/// Several segments whatever the length, but not thousands.
fn segments_for(len: usize) -> GroupOptions {
    if len > 5000 { GroupOptions::default() } else { small_segments() }
}

/// Numbers that are exact in `f32` however they are summed.
fn whole(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 31 + rank * 17) % 97) as f32).collect()
}

/// Numbers whose sum depends on the order.
fn rough(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 13) % 101) as f32 * 1e-3 + 0.1).collect()
}

/// What the tests need of a type: a value that no reduction over 8 ranks rounds.
trait Sample: Element {
    fn sample(rank: usize, i: usize) -> Self;
}

macro_rules! sample {
    ($($type:ty: $from:expr),*) => {
        $(impl Sample for $type {
            fn sample(rank: usize, i: usize) -> Self {
                $from((((i * 31 + rank * 17) % 7) + 1) as u8)
            }
        })*
    };
}

sample!(f32: f32::from, f64: f64::from, i32: i32::from, i64: i64::from, u8: |v: u8| v,
    half::f16: |v: u8| half::f16::from_f32(f32::from(v)),
    half::bf16: |v: u8| half::bf16::from_f32(f32::from(v % 3 + 1)));

fn samples<T: Sample>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| T::sample(rank, i)).collect()
}

/// The reduction of all ranks' samples, one element at a time, in partial results.
fn reference<T: Sample>(op: ReduceOp, world: usize, len: usize) -> Vec<T> {
    let one = |i: usize| {
        let mut partial = [T::sample(0, i).to_partial()];
        for rank in 1..world {
            T::Partial::combine(op, &mut partial, &[T::sample(rank, i).to_partial()]);
        }
        if op == ReduceOp::Mean {
            T::Partial::divide(&mut partial, world);
        }
        T::from_partial(partial[0])
    };
    (0..len).map(one).collect()
}

const OPS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

fn every_reduction<T: Sample>(world: usize, len: usize) {
    for op in OPS.into_iter().filter(|op| T::IS_FLOAT || *op != ReduceOp::Mean) {
        let expected = reference::<T>(op, world, len);
        let root = world - 1;
        for algorithm in [Algorithm::Auto, Algorithm::Ring, Algorithm::Doubling] {
            let options = GroupOptions { algorithm, ..segments_for(len) };
            let outcomes = ranks(world, &options, |group| {
                let mine = || samples::<T>(group.rank(), len);
                let all = group.all_reduce(mine(), op);
                let ring = group.ring_all_reduce(mine(), op);
                let scattered = group.reduce_scatter(mine(), op);
                let at_root = group.reduce(mine(), op, root);
                let wait = |pending: Pending<Vec<T>>| pending.wait().expect("a reduction");
                let shard = shard(len, world, group.rank());
                let scattered = wait(scattered)[shard.clone()] == expected[shard];
                let at_root = wait(at_root) == expected || group.rank() != root;
                (wait(all), wait(ring), scattered && at_root)
            });
            for (all, ring, others_hold) in outcomes {
                let what = format!("{} {} world {world}, len {len}", T::DTYPE, op.name());
                assert_eq!(all, expected, "{what}, {algorithm:?}");
                assert_eq!(ring, expected, "{what}");
                assert!(others_hold, "{what}");
            }
        }
    }
}

#[test]
fn every_reduction_of_every_type_equals_the_scalar_reference() {
    for world in 1..=8 {
        for len in lengths(world) {
            every_reduction::<f32>(world, len);
        }
        for len in few_lengths(world) {
            every_reduction::<f64>(world, len);
            every_reduction::<half::f16>(world, len);
            every_reduction::<half::bf16>(world, len);
            every_reduction::<i32>(world, len);
            every_reduction::<i64>(world, len);
            every_reduction::<u8>(world, len);
        }
    }
}

fn every_movement<T: Sample>(world: usize, len: usize) {
    let root = world / 2;
    let what = format!("{} world {world}, len {len}", T::DTYPE);
    let owner_of = |i: usize| (0..world).find(|r| shard(len, world, *r).contains(&i)).unwrap_or(0);
    let outcomes = ranks(world, &segments_for(len), |group| {
        let rank = group.rank();
        let mine = || samples::<T>(rank, len);
        let wait = |pending: Pending<Vec<T>>| pending.wait().expect("numbers");
        let gathered = wait(group.all_gather(mine()));
        let of_owners: Vec<T> = (0..len).map(|i| T::sample(owner_of(i), i)).collect();
        assert_eq!(gathered, of_owners, "all_gather, {what}");
        let at_root = wait(group.gather(mine(), root));
        assert!(rank != root || at_root == of_owners, "gather, {what}");
        let own = shard(len, world, rank);
        let scattered = wait(group.scatter(mine(), root))[own.clone()].to_vec();
        assert_eq!(scattered, samples::<T>(root, len)[own], "scatter, {what}");
        assert_eq!(wait(group.broadcast(mine(), root)), samples::<T>(root, len));
        // Rank r brings r elements more than rank 0.
        let parts = group.all_gather_uneven(samples::<T>(rank, len + rank)).wait().expect("parts");
        for (from, part) in parts.iter().enumerate() {
            assert_eq!(*part, samples::<T>(from, len + from), "all_gather_uneven, {what}");
        }
        let exchanged = wait(group.all_to_all(samples::<T>(rank, len * world)));
        for from in 0..world {
            let chunk = shard(len * world, world, from);
            let expected = &samples::<T>(from, len * world)[chunk.clone()];
            // What rank `from` had for this rank stood in the chunk of this rank.
            let theirs = &samples::<T>(from, len * world)[shard(len * world, world, rank)];
            assert_eq!(exchanged[chunk].len(), expected.len());
            assert_eq!(&exchanged[shard(len * world, world, from)], theirs, "all_to_all, {what}");
        }
        if world > 1 {
            let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
            let sent = group.send(mine(), next);
            let received = wait(group.recv(vec![T::ZERO; len], previous));
            sent.wait().expect("a send");
            assert_eq!(received, samples::<T>(previous, len), "send and recv, {what}");
        }
        group.barrier()
    });
    assert!(outcomes.iter().all(Result::is_ok));
}

#[test]
fn every_movement_of_every_type_brings_what_it_should() {
    for world in 1..=8 {
        for len in lengths(world) {
            every_movement::<f32>(world, len);
        }
        for len in few_lengths(world) {
            every_movement::<f64>(world, len);
            every_movement::<half::f16>(world, len);
            every_movement::<half::bf16>(world, len);
            every_movement::<i32>(world, len);
            every_movement::<i64>(world, len);
            every_movement::<u8>(world, len);
        }
    }
}

#[test]
fn half_precision_is_rounded_once() {
    // 2048 + 1 is no f16, so rounding after every addition would lose all ones.
    let sums = ranks(5, &small_segments(), |group| {
        let mine = if group.rank() == 0 { 2048.0 } else { 1.0 };
        group.all_reduce(vec![half::f16::from_f32(mine)], ReduceOp::Sum).wait().expect("a sum")
    });
    assert!(sums.iter().all(|sum| sum[0].to_f32() == 2052.0), "{sums:?}");
}

#[test]
fn a_rank_with_nan_is_seen_by_every_reduction_on_every_rank() {
    for op in OPS {
        for algorithm in [Algorithm::Ring, Algorithm::Doubling] {
            let options = GroupOptions { algorithm, ..small_segments() };
            let outcomes = ranks(3, &options, |group| {
                let mine = if group.rank() == 1 { f32::NAN } else { 1.0 };
                let outcome = group.all_reduce(vec![mine; 3], op).wait().expect("numbers");
                outcome.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            });
            assert!(outcomes[0].iter().all(|bits| f32::from_bits(*bits).is_nan()), "{op:?}");
            assert!(outcomes.iter().all(|bits| *bits == outcomes[0]), "{op:?}, {algorithm:?}");
        }
    }
}

#[test]
fn what_a_collective_cannot_do_is_refused() {
    let errors = ranks(2, &GroupOptions::default(), |group| {
        group.all_reduce(vec![1i32; 4], ReduceOp::Mean).wait().expect_err("no mean of integers")
    });
    assert!(errors.iter().any(|e| e.to_string().contains("use sum")), "{errors:?}");
    let errors = ranks(2, &GroupOptions::default(), |group| {
        group.all_to_all(vec![1u8; 3]).wait().expect_err("3 is no multiple of 2")
    });
    assert!(errors.iter().any(|e| e.to_string().contains("pad them")), "{errors:?}");
}

#[test]
fn all_ranks_and_all_runs_get_the_same_bits() {
    for world in [2, 3, 5] {
        let run = |options: &GroupOptions| {
            ranks(world, options, |group| {
                let sum = group
                    .all_reduce(rough(group.rank(), 1009), ReduceOp::Sum)
                    .wait()
                    .expect("a sum");
                sum.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            })
        };
        let first = run(&small_segments());
        assert!(first.iter().all(|bits| *bits == first[0]), "world {world}");
        assert_eq!(first, run(&GroupOptions::default()), "segments must not change a sum");
    }
}

#[test]
fn bytes_and_messages_are_those_of_the_ring() {
    for world in 2..=6 {
        for len in [0, world - 1, world, 97, 1009] {
            let traffic = ranks(world, &small_segments(), |group| {
                group
                    .ring_all_reduce(whole(group.rank(), len), ReduceOp::Sum)
                    .wait()
                    .expect("a sum");
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
        let pending: Vec<_> =
            (0..20).map(|i| group.all_reduce(vec![i as f32; 50], ReduceOp::Sum)).collect();
        // Waiting in another order than launching changes nothing.
        pending.into_iter().rev().map(|p| p.wait().expect("a sum")[0]).collect::<Vec<_>>()
    });
    let expected: Vec<f32> = (0..20).rev().map(|i| 3.0 * i as f32).collect();
    assert!(sums.iter().all(|sums| *sums == expected));
}

#[test]
fn ranks_in_different_collectives_get_both_descriptions() {
    let errors = ranks(2, &GroupOptions::default(), |group| match group.rank() {
        0 => group.all_reduce(vec![0.0f32; 8], ReduceOp::Sum).wait().expect_err("a mismatch"),
        _ => group.all_reduce(vec![0.0f64; 6], ReduceOp::Sum).wait().expect_err("a mismatch"),
    });
    let mismatch = errors.iter().find(|error| matches!(error, Error::Mismatch { .. }));
    let message = mismatch.expect("one rank sees it first").to_string();
    assert!(message.contains("all_reduce(sum) #0 of 8 f32"), "{message}");
    assert!(message.contains("all_reduce(sum) #0 of 6 f64"), "{message}");
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
        let waiting = (group.rank() == 0).then(|| group.all_reduce(vec![1.0f32; 4], ReduceOp::Sum));
        if group.rank() == 1 {
            group.abort_signal().raise(1, "out of cheese");
        }
        waiting.map(|pending| pending.wait().expect_err("rank 1 failed"))
    });
    let message = errors[0].as_ref().map(ToString::to_string).unwrap_or_default();
    assert!(message.starts_with("rank 1 failed: out of cheese"), "{message}");
    assert!(message.contains("rank 0 was in all_reduce(sum) #0 of 4 f32"), "{message}");
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
        group.all_reduce(vec![0u8; 3], ReduceOp::Sum).wait().expect_err("the group has failed")
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Aborted { .. })), "{errors:?}");
    let all_blame_the_first = errors.iter().all(|e| e.to_string().contains("rank 0 failed: first"));
    assert!(all_blame_the_first, "{errors:?}");
}
