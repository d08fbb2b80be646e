//! Every collective of every type against a scalar reference, on whatever transport.

use half::{bf16, f16};

use super::*;
use crate::collectives::Element;
use crate::shard::shard;

/// Runs every collective of every type, with every reduction and each of `lengths`, on one group
/// over `endpoints`, and compares all outcomes with the scalar reference.
pub(crate) fn grid(endpoints: Vec<Box<dyn Transport>>, options: &GroupOptions, lengths: &[usize]) {
    ranks_over(endpoints, options, |group| {
        for len in lengths {
            every_collective::<f32>(&group, *len);
            every_collective::<f64>(&group, *len);
            every_collective::<f16>(&group, *len);
            every_collective::<bf16>(&group, *len);
            every_collective::<i32>(&group, *len);
            every_collective::<i64>(&group, *len);
            every_collective::<u8>(&group, *len);
        }
    });
}

/// Lengths at which chunks are empty, ragged, even, and longer than a segment.
pub(crate) fn lengths(world: usize) -> [usize; 7] {
    [0, 1, world - 1, world, world + 1, 97, 1009]
}

/// Several segments per chunk at the largest of [`lengths`], but not hundreds.
pub(crate) fn few_segments(algorithm: Algorithm) -> GroupOptions {
    GroupOptions { segment_bytes: Some(128), algorithm, ..GroupOptions::default() }
}

fn every_collective<T: Sample>(group: &ProcessGroup, len: usize) {
    let is_exact = |op: &ReduceOp| T::DTYPE.is_float() || *op != ReduceOp::Mean;
    for op in OPS.into_iter().filter(is_exact) {
        every_reduction::<T>(group, len, op);
    }
    every_movement::<T>(group, len);
    every_exchange::<T>(group, len);
}

fn every_reduction<T: Sample>(group: &ProcessGroup, len: usize, op: ReduceOp) {
    let (world, rank) = (group.world(), group.rank());
    let what = format!("{}, {} x {len}, world {world}", op.name(), T::DTYPE);
    let expected = reference::<T>(op, world, len);
    let mine = || samples::<T>(rank, len);
    let root = world - 1;
    let all = group.all_reduce(mine(), op);
    let ring = group.ring_all_reduce(mine(), op);
    let scattered = group.reduce_scatter(mine(), op);
    let at_root = group.reduce(mine(), op, root);
    assert!(wait(all) == expected, "all_reduce, {what}, {:?}", group.roster.options.algorithm);
    assert!(wait(ring) == expected, "ring_all_reduce, {what}");
    let own = shard(len, world, rank);
    assert!(wait(scattered)[own.clone()] == expected[own], "reduce_scatter, {what}");
    assert!(wait(at_root) == expected || rank != root, "reduce, {what}");
}

fn every_movement<T: Sample>(group: &ProcessGroup, len: usize) {
    let (world, rank) = (group.world(), group.rank());
    let what = format!("{} x {len}, world {world}", T::DTYPE);
    let mine = || samples::<T>(rank, len);
    let root = world / 2;
    let gathered = group.all_gather(mine());
    let at_root = group.gather(mine(), root);
    let scattered = group.scatter(mine(), root);
    let broadcast = group.broadcast(mine(), root);
    // Rank r brings r elements more than rank 0.
    let uneven = group.all_gather_uneven(samples::<T>(rank, len + rank));
    let of_owners: Vec<T> = (0..world)
        .flat_map(|owner| shard(len, world, owner).map(move |i| T::sample(owner, i)))
        .collect();
    assert!(wait(gathered) == of_owners, "all_gather, {what}");
    assert!(wait(at_root) == of_owners || rank != root, "gather, {what}");
    let own = shard(len, world, rank);
    assert!(wait(scattered)[own.clone()] == samples::<T>(root, len)[own], "scatter, {what}");
    assert!(wait(broadcast) == samples::<T>(root, len), "broadcast, {what}");
    for (from, part) in wait(uneven).iter().enumerate() {
        assert!(*part == samples::<T>(from, len + from), "all_gather_uneven, {what}");
    }
}

fn every_exchange<T: Sample>(group: &ProcessGroup, len: usize) {
    let (world, rank) = (group.world(), group.rank());
    let what = format!("{} x {len}, world {world}", T::DTYPE);
    let exchanged = wait(group.all_to_all(samples::<T>(rank, len * world)));
    for (from, chunk) in (0..world).map(|from| (from, shard(len * world, world, from))) {
        // What rank `from` had for this rank stood in the chunk of this rank.
        let for_this_rank = shard(len * world, world, rank).map(|i| T::sample(from, i));
        assert!(exchanged[chunk].iter().copied().eq(for_this_rank), "all_to_all, {what}");
    }
    if world > 1 {
        let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
        let sent = group.send(samples::<T>(rank, len), next);
        let received = wait(group.recv(vec![T::ZERO; len], previous));
        wait(sent);
        assert!(received == samples::<T>(previous, len), "send and recv, {what}");
    }
    group.barrier().expect("a barrier");
}

fn wait<R>(pending: Pending<R>) -> R {
    pending.wait().expect("a collective")
}

const OPS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

/// Elements after which samples repeat, so that the references of large buffers cost little.
const PERIOD: usize = 97;

/// What the tests need of a type: small whole numbers, and arithmetic apart from the collectives'.
trait Sample: Element + PartialOrd {
    fn small(value: u8) -> Self;
    fn exact(self) -> f64;
    fn rounded(exact: f64) -> Self;

    /// A value that no reduction over 8 ranks rounds before it is finished.
    fn sample(rank: usize, i: usize) -> Self {
        Self::small((((i % PERIOD) * 31 + rank * 17) % 7 + 1) as u8)
    }
}

macro_rules! sample {
    ($($type:ty: $small:expr, $exact:expr, $rounded:expr;)*) => {
        $(impl Sample for $type {
            fn small(value: u8) -> Self {
                $small(value)
            }

            fn exact(self) -> f64 {
                $exact(self)
            }

            fn rounded(exact: f64) -> Self {
                $rounded(exact)
            }
        })*
    };
}

sample!(
    f32: f32::from, f64::from, |v| v as f32;
    f64: f64::from, |v| v, |v| v;
    f16: f16::from, f16::to_f64, |v| f16::from_f32(v as f32);
    bf16: bf16::from, bf16::to_f64, |v| bf16::from_f32(v as f32);
    i32: i32::from, f64::from, |v| v as i32;
    i64: i64::from, |v| v as f64, |v| v as i64;
    u8: |v| v, f64::from, |v| v as u32 as u8;
);

fn samples<T: Sample>(rank: usize, len: usize) -> Vec<T> {
    periodic(len, |i| T::sample(rank, i))
}

fn periodic<T: Copy>(len: usize, value: impl Fn(usize) -> T) -> Vec<T> {
    let first: Vec<T> = (0..len.min(PERIOD)).map(value).collect();
    first.iter().copied().cycle().take(len).collect()
}

/// The reduction of all ranks' samples, one element at a time.
fn reference<T: Sample>(op: ReduceOp, world: usize, len: usize) -> Vec<T> {
    periodic(len, |i| {
        let all = (0..world).map(|rank| T::sample(rank, i).exact());
        T::rounded(match op {
            ReduceOp::Sum => all.sum(),
            ReduceOp::Mean => all.sum::<f64>() / world as f64,
            ReduceOp::Product => all.product(),
            ReduceOp::Min => all.fold(f64::INFINITY, f64::min),
            ReduceOp::Max => all.fold(f64::NEG_INFINITY, f64::max),
        })
    })
}

#[test]
fn every_collective_equals_the_scalar_reference() {
    for world in 1..=8 {
        for algorithm in algorithms(world) {
            grid(in_memory(world), &few_segments(algorithm), &lengths(world));
        }
    }
}

#[test]
fn large_buffers_equal_the_scalar_reference() {
    // A mebibyte of `f32`, with segments as the cost model cuts them.
    let large = 1 << 18;
    for (world, mesh_shard) in [(3, None), (4, Some(2))] {
        let options = GroupOptions { mesh_shard, ..GroupOptions::default() };
        grid(in_memory(world), &options, &[large + 7]);
    }
    if std::env::var_os("PYROCLAST_FULL").is_none() {
        return;
    }
    for world in 1..=8 {
        for algorithm in algorithms(world) {
            let options = GroupOptions { algorithm, ..GroupOptions::default() };
            grid(in_memory(world), &options, &[large, large + 7]);
        }
    }
}

/// Numbers whose sum depends on the order.
fn rough(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 13) % 101) as f32 * 1e-3 + 0.1).collect()
}

fn rough_halves<T: Element<Partial = f32>>(rank: usize, len: usize) -> Vec<T> {
    let mut values = vec![T::ZERO; len];
    T::round(&rough(rank, len), &mut values);
    values
}

#[test]
fn all_ranks_all_runs_and_all_segments_give_the_same_bits() {
    for world in [2, 3, 5, 6, 8] {
        for algorithm in algorithms(world) {
            let run = |segment_bytes| {
                let options = GroupOptions { segment_bytes, algorithm, ..GroupOptions::default() };
                ranks(world, &options, |group| {
                    let (rank, op) = (group.rank(), ReduceOp::Mean);
                    let sum = wait(group.all_reduce(rough(rank, 1009), op));
                    let bits: Vec<u32> = sum.iter().map(|v| v.to_bits()).collect();
                    let f16s = wait(group.all_reduce(rough_halves::<f16>(rank, 1009), op));
                    let bf16s = wait(group.all_reduce(rough_halves::<bf16>(rank, 1009), op));
                    (bits, f16s, bf16s)
                })
            };
            let first = run(Some(16));
            let what = format!("{algorithm:?}, world {world}");
            assert!(first.iter().all(|bits| *bits == first[0]), "ranks differ: {what}");
            assert!(first == run(Some(16)), "runs differ: {what}");
            assert!(first == run(None), "segments must not change a sum: {what}");
        }
    }
}

#[test]
fn a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather_bit_for_bit() {
    fn check<T: Element>(group: &ProcessGroup, mine: Vec<T>) {
        let (op, what) = (ReduceOp::Mean, T::DTYPE);
        let scattered = wait(group.reduce_scatter(mine.clone(), op));
        let in_two_steps = wait(group.all_gather(scattered));
        let in_one = wait(group.ring_all_reduce(mine.clone(), op));
        assert!(in_one == in_two_steps, "ring_all_reduce of {what}");
        if group.roster.options.algorithm == Algorithm::Direct {
            assert!(wait(group.all_reduce(mine, op)) == in_two_steps, "all_reduce of {what}");
        }
    }
    for world in 2..=6 {
        for algorithm in algorithms(world) {
            ranks(world, &few_segments(algorithm), |group| {
                let rank = group.rank();
                check(group, rough(rank, 1009));
                check(group, rough_halves::<f16>(rank, 1009));
                check(group, rough_halves::<bf16>(rank, 1009));
            });
        }
    }
}

#[test]
fn an_owner_combines_in_rank_order() {
    let options = few_segments(Algorithm::Direct);
    let (world, len) = (5, 1009);
    let in_rank_order: Vec<f32> = (0..len)
        .map(|i| (1..world).fold(rough(0, len)[i], |sum, rank| sum + rough(rank, len)[i]))
        .collect();
    for sum in ranks(world, &options, |group| {
        wait(group.all_reduce(rough(group.rank(), len), ReduceOp::Sum))
    }) {
        assert!(sum.iter().zip(&in_rank_order).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn half_precision_is_rounded_once() {
    // 2048 + 1 is no f16, so rounding after every addition would lose all ones.
    for algorithm in algorithms(6) {
        let sums = ranks(6, &few_segments(algorithm), |group| {
            let mine = vec![f16::from_f32(if group.rank() == 0 { 2048.0 } else { 1.0 })];
            let all = wait(group.all_reduce(mine.clone(), ReduceOp::Sum));
            let ring = wait(group.ring_all_reduce(mine.clone(), ReduceOp::Sum));
            let at_root = wait(group.reduce(mine, ReduceOp::Sum, 0));
            let at_root = if group.rank() == 0 { at_root[0] } else { all[0] };
            [all[0], ring[0], at_root].map(f16::to_f32)
        });
        // 2053 itself is half-way between two of them.
        assert!(sums.iter().all(|sums| *sums == [2052.0; 3]), "{algorithm:?}: {sums:?}");
    }
}

#[test]
fn a_rank_with_nan_is_seen_by_every_reduction_on_every_rank() {
    for op in OPS {
        for algorithm in algorithms(4) {
            let outcomes = ranks(4, &few_segments(algorithm), |group| {
                let mine = if group.rank() == 1 { f32::NAN } else { 1.0 };
                let all = wait(group.all_reduce(vec![mine; 5], op));
                let half = wait(group.all_reduce(vec![bf16::from_f32(mine); 5], op));
                assert!(half.iter().all(|v| v.is_nan()), "{op:?}, {algorithm:?}");
                all.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            });
            assert!(outcomes[0].iter().all(|bits| f32::from_bits(*bits).is_nan()), "{op:?}");
            assert!(outcomes.iter().all(|bits| *bits == outcomes[0]), "{op:?}, {algorithm:?}");
        }
    }
}

#[test]
fn launched_collectives_overlap_and_keep_their_order() {
    let sums = ranks(3, &small_segments(), |group| {
        let pending: Vec<_> =
            (0..20).map(|i| group.all_reduce(vec![i as f32; 50], ReduceOp::Sum)).collect();
        // Waiting in another order than launching changes nothing.
        pending.into_iter().rev().map(|pending| wait(pending)[0]).collect::<Vec<_>>()
    });
    let expected: Vec<f32> = (0..20).rev().map(|i| 3.0 * i as f32).collect();
    assert!(sums.iter().all(|sums| *sums == expected));
}
