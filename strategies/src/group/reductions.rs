//! Collectives that combine numbers.

use super::worker::Call;
use super::{Pending, ProcessGroup, What};
use crate::collectives::plan::{self, Plan};
use crate::collectives::{Algorithm, Element, ReduceOp, Workload};
use crate::description::Operation;
use crate::shard::shard;

impl ProcessGroup {
    /// Reduces `buffer` over all ranks. Every rank gets the same bits.
    ///
    /// Half-precision numbers are combined in `f32` and rounded once. How they travel, and in which
    /// order numbers are combined, is the [algorithm](Algorithm)'s affair.
    pub fn all_reduce<T: Element>(&self, buffer: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.reduction(Operation::AllReduce(op), buffer)
    }

    /// As [`Self::all_reduce`], the way a [`Self::reduce_scatter`] goes, whatever the size: bit for
    /// bit a [`Self::reduce_scatter`] followed by an [`Self::all_gather`].
    pub fn ring_all_reduce<T: Element>(&self, buffer: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.reduction(Operation::RingAllReduce(op), buffer)
    }

    /// Reduces `buffer` over all ranks; each rank gets its own [`shard`] of the
    /// outcome, in place. What the rest of the buffer holds afterwards is unspecified.
    ///
    /// Half-precision parts go straight to the owner, two bytes per element, all other numbers round
    /// a ring; [`Algorithm::for_shards`] says when this can be chosen.
    pub fn reduce_scatter<T: Element>(&self, buffer: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.reduction(Operation::ReduceScatter(op), buffer)
    }

    /// Reduces `buffer` over all ranks; `root` gets the outcome. What the other ranks' buffers hold
    /// afterwards is unspecified. Half precision travels as `f32`.
    pub fn reduce<T: Element>(&self, buffer: Vec<T>, op: ReduceOp, root: usize) -> Pending<Vec<T>> {
        self.reduction(Operation::Reduce { op, root }, buffer)
    }

    pub(super) fn reduction<T: Element, R: From<Vec<T>> + Send + 'static>(
        &self,
        what: impl Into<What>,
        buffer: Vec<T>,
    ) -> Pending<R> {
        self.launch(what, buffer, |call, mut buffer| {
            let reduction = Reduction::of::<T>(call, buffer.len());
            let plan = reduction.plan();
            if reduction.algorithm == Algorithm::Direct {
                // The owner of a chunk has divided and rounded it.
                call.run(plan, &mut buffer)?;
            } else if let Some(same) = T::as_partials(&mut buffer) {
                call.run(plan, same)?;
                reduction.divide(same);
            } else {
                let mut partials = T::partials(&buffer).into_owned();
                call.run(plan, &mut partials)?;
                reduction.divide(&mut partials);
                T::round(&partials, &mut buffer);
            }
            Ok(buffer.into())
        })
    }
}

/// A reduction of `len` elements, as one rank sees it.
struct Reduction {
    operation: Operation,
    algorithm: Algorithm,
    len: usize,
    world: usize,
    rank: usize,
}

impl Reduction {
    fn of<T: Element>(call: &Call<'_>, len: usize) -> Self {
        let (world, rank) = call.place();
        let (operation, options) = (call.description.operation, &call.roster.options);
        let mesh_shard = options.mesh_shard;
        let work = Workload { mesh_shard, ..Workload::new::<T>(len, world) };
        let algorithm = match operation {
            Operation::AllReduce(_) => options.algorithm.resolve(&work, &options.costs),
            Operation::Reduce { .. } => Algorithm::Ring,
            _ => options.algorithm.for_shards(&work),
        };
        Self { operation, algorithm, len, world, rank }
    }

    fn plan(&self) -> Plan {
        let Self { operation, algorithm, len, world, rank } = *self;
        match (operation, algorithm) {
            (Operation::Reduce { root, .. }, _) => plan::reduce(len, world, rank, root),
            (Operation::ReduceScatter(_), Algorithm::Direct) => {
                plan::reduce_scatter_direct(len, world, rank)
            }
            (Operation::ReduceScatter(_), _) => plan::reduce_scatter(len, world, rank),
            (_, Algorithm::Direct) => plan::all_reduce_direct(len, world, rank),
            (_, Algorithm::Doubling) => plan::all_reduce_doubling(len, world, rank),
            (_, Algorithm::Hierarchical { shard }) => {
                plan::all_reduce_hierarchical(len, world, rank, shard)
            }
            (_, Algorithm::Ring | Algorithm::Auto) => plan::all_reduce(len, world, rank),
        }
    }

    /// Makes means of the sums that this rank holds.
    fn divide<T: Element>(&self, sums: &mut [T]) {
        if self.operation.reduce_op() != Some(ReduceOp::Mean) {
            return;
        }
        let held = match self.operation {
            Operation::ReduceScatter(_) => shard(self.len, self.world, self.rank),
            _ => 0..self.len,
        };
        T::divide(&mut sums[held], self.world);
    }
}
