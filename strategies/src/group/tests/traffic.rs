use half::bf16;

use super::*;
use crate::collectives::Element;
use crate::shard::shard;

/// One rank's place in a world, and the length of its buffer.
#[derive(Clone, Copy)]
struct Case {
    world: usize,
    rank: usize,
    len: usize,
}

impl Case {
    /// Lengths of all chunks but that of `left_out`.
    fn chunks_but(self, left_out: usize) -> Vec<usize> {
        let others = (0..self.world).filter(|chunk| *chunk != left_out);
        others.map(|chunk| shard(self.len, self.world, chunk).len()).collect()
    }

    /// Chunks that a rank sends in a reduce-scatter: all but its own, which ends with it.
    fn scattered(self) -> Vec<usize> {
        self.chunks_but(self.rank)
    }

    /// Chunks that a rank sends in a ring all-gather: all but the next rank's, which starts there.
    fn gathered(self) -> Vec<usize> {
        self.chunks_but((self.rank + 1) % self.world)
    }

    fn reduced(self) -> Vec<usize> {
        [self.scattered(), self.gathered()].concat()
    }

    fn doubled(self) -> Vec<usize> {
        let power = 1 << self.world.ilog2();
        let steps = if self.rank >= power { 0 } else { self.world.ilog2() as usize };
        // Ranks beyond the power of two, and their partners, send one message more.
        let is_paired = self.rank >= power || self.rank + power < self.world;
        vec![self.len; steps + usize::from(is_paired)]
    }

    fn on_a_mesh(self, row: usize) -> Vec<usize> {
        let in_row = Case { world: row, rank: self.rank % row, ..self };
        let own = shard(self.len, row, in_row.rank).len();
        let in_column = Case { world: self.world / row, rank: self.rank / row, len: own };
        [in_row.scattered(), in_column.reduced(), in_row.gathered()].concat()
    }
}

/// Checks what every rank sends in `collective`, given the ranges that it should send and the bytes
/// of each element on the wire. Segments are 16 bytes.
fn check<R>(
    world: usize,
    algorithm: Algorithm,
    collective: impl Fn(&ProcessGroup, usize) -> Pending<R> + Sync,
    expected: impl Fn(Case) -> (Vec<usize>, usize),
) {
    let options = GroupOptions { algorithm, ..small_segments() };
    for len in [0, 1, world - 1, world, world + 1, 97, 1009] {
        let traffic = ranks(world, &options, |group| {
            collective(group, len).wait().expect("a collective");
            group.traffic()
        });
        for (rank, traffic) in traffic.iter().enumerate() {
            let (ranges, element_bytes) = expected(Case { world, rank, len });
            let bytes: usize = ranges.iter().map(|elements| elements * element_bytes).sum();
            let messages: usize = ranges.iter().map(|len| len.div_ceil(16 / element_bytes)).sum();
            let expected = Traffic { messages: messages as u64, bytes: bytes as u64 };
            assert_eq!(*traffic, expected, "rank {rank} of {world}, len {len}, {algorithm:?}");
        }
    }
}

fn bf16s(len: usize) -> Vec<bf16> {
    vec![bf16::ZERO; len]
}

fn all_reduce<T: Element>(group: &ProcessGroup, len: usize) -> Pending<Vec<T>> {
    group.all_reduce(vec![T::ZERO; len], ReduceOp::Sum)
}

fn ring_all_reduce<T: Element>(group: &ProcessGroup, len: usize) -> Pending<Vec<T>> {
    group.ring_all_reduce(vec![T::ZERO; len], ReduceOp::Sum)
}

fn reduce_scatter<T: Element>(group: &ProcessGroup, len: usize) -> Pending<Vec<T>> {
    group.reduce_scatter(vec![T::ZERO; len], ReduceOp::Sum)
}

#[test]
fn all_reduces_send_the_chunks_of_their_algorithm() {
    let chosen = |algorithm: &Algorithm| *algorithm != Algorithm::Auto;
    for world in 2..=8 {
        for algorithm in algorithms(world).into_iter().filter(chosen) {
            let sent = |case: Case| match algorithm {
                Algorithm::Doubling => case.doubled(),
                Algorithm::Hierarchical { shard } => case.on_a_mesh(shard),
                _ => case.reduced(),
            };
            // Half precision travels as `f32` except straight to the owner.
            let half_bytes = if algorithm == Algorithm::Direct { 2 } else { 4 };
            check(world, algorithm, all_reduce::<f32>, |case| (sent(case), 4));
            check(world, algorithm, all_reduce::<f64>, |case| (sent(case), 8));
            check(world, algorithm, all_reduce::<bf16>, |case| (sent(case), half_bytes));
        }
    }
}

#[test]
fn reductions_of_shards_send_half_precision_as_two_bytes() {
    for world in 2..=6 {
        for algorithm in [Algorithm::Auto, Algorithm::Direct, Algorithm::Doubling] {
            check(world, algorithm, reduce_scatter::<f32>, |case| (case.scattered(), 4));
            check(world, algorithm, reduce_scatter::<bf16>, |case| (case.scattered(), 2));
            check(world, algorithm, ring_all_reduce::<f32>, |case| (case.reduced(), 4));
            check(world, algorithm, ring_all_reduce::<bf16>, |case| (case.reduced(), 2));
        }
        check(world, Algorithm::Ring, reduce_scatter::<bf16>, |case| (case.scattered(), 4));
        check(world, Algorithm::Ring, ring_all_reduce::<bf16>, |case| (case.reduced(), 4));
    }
}

#[test]
fn movements_send_what_others_need() {
    for world in 2..=6 {
        let root = world / 2;
        let check = |collective: fn(&ProcessGroup, usize, usize) -> Pending<Vec<bf16>>,
                     expected: fn(Case, usize) -> Vec<usize>| {
            let collective = |group: &ProcessGroup, len: usize| collective(group, len, root);
            check(world, Algorithm::Auto, collective, |case| (expected(case, root), 2));
        };
        check(|group, len, _| group.all_gather(bf16s(len)), |case, _| case.gathered());
        check(
            |group, len, root| group.broadcast(bf16s(len), root),
            |case, root| match (case.rank + 1) % case.world {
                next if next == root => vec![],
                _ => vec![case.len],
            },
        );
        check(
            |group, len, root| group.gather(bf16s(len), root),
            |case, root| match case.rank {
                rank if rank == root => vec![],
                rank => vec![shard(case.len, case.world, rank).len()],
            },
        );
        check(
            |group, len, root| group.scatter(bf16s(len), root),
            |case, root| if case.rank == root { case.chunks_but(root) } else { vec![] },
        );
        check(
            |group, len, _| group.all_to_all(bf16s(len * group.world())),
            |case, _| vec![case.len; case.world - 1],
        );
    }
}

#[test]
fn a_reduce_sends_partial_results_along_the_chain() {
    for world in 2..=6 {
        let root = world - 1;
        let sent = |case: Case| if case.rank == root { vec![] } else { vec![case.len] };
        let reduce = |group: &ProcessGroup, len| group.reduce(vec![0u8; len], ReduceOp::Sum, root);
        check(world, Algorithm::Auto, reduce, |case| (sent(case), 1));
        let reduce =
            |group: &ProcessGroup, len| group.reduce(vec![bf16::ONE; len], ReduceOp::Sum, root);
        check(world, Algorithm::Auto, reduce, |case| (sent(case), 4));
    }
}

#[test]
fn auto_takes_the_algorithm_of_the_least_cost() {
    let mesh = GroupOptions { mesh_shard: Some(2), ..GroupOptions::default() };
    let bytes = |options: &GroupOptions, call: fn(&ProcessGroup) -> u64| ranks(4, options, call);
    fn sent<T: Element>(group: &ProcessGroup, len: usize) -> u64 {
        all_reduce::<T>(group, len).wait().expect("a sum");
        group.traffic().bytes
    }
    let flat = GroupOptions::default();
    // Two steps of doubling with all eight elements.
    assert_eq!(bytes(&flat, |group| sent::<f32>(group, 8)), [64; 4]);
    assert_eq!(bytes(&flat, |group| sent::<bf16>(group, 8)), [64; 4]);
    // Two passes of three quarters: around a ring, or straight to the owner in two bytes.
    let large = 1 << 18;
    assert_eq!(bytes(&flat, |group| sent::<f32>(group, 1 << 18)), [large * 6; 4]);
    assert_eq!(bytes(&flat, |group| sent::<bf16>(group, 1 << 18)), [large * 3; 4]);
    assert_eq!(bytes(&mesh, |group| sent::<f32>(group, 1 << 18)), [large * 6; 4]);
}
