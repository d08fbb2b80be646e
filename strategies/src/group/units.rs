//! Collectives of a model's units. Both ends of a message say for which unit it is: ranks that run
//! different units are told so, also where the units are of one size.

use pyroclast_kernels::each;
use pyroclast_kernels::numbers::Numbers;

use super::{Pending, ProcessGroup, What};
use crate::collectives::{ReduceOp, plan};
use crate::description::Operation;

impl ProcessGroup {
    /// As [`Self::all_gather`].
    pub(crate) fn all_gather_unit(&self, unit: usize, buffer: Numbers) -> Pending<Numbers> {
        let what = of(unit, Operation::AllGather);
        each!(Numbers, buffer, buffer => self.movement(what, buffer, plan::all_gather))
    }

    /// As [`Self::gather`] to rank 0.
    pub(crate) fn gather_unit(&self, unit: usize, buffer: Numbers) -> Pending<Numbers> {
        let what = of(unit, Operation::Gather { root: 0 });
        let plan = |len, world, rank| plan::gather(len, world, rank, 0);
        each!(Numbers, buffer, buffer => self.movement(what, buffer, plan))
    }

    /// As [`Self::broadcast`] from rank 0.
    pub(crate) fn broadcast_unit(&self, unit: usize, buffer: Numbers) -> Pending<Numbers> {
        let what = of(unit, Operation::Broadcast { root: 0 });
        let plan = |len, world, rank| plan::broadcast(len, world, rank, 0);
        each!(Numbers, buffer, buffer => self.movement(what, buffer, plan))
    }

    /// As [`Self::scatter`] from rank 0.
    pub(crate) fn scatter_unit(&self, unit: usize, buffer: Numbers) -> Pending<Numbers> {
        let what = of(unit, Operation::Scatter { root: 0 });
        let plan = |len, world, rank| plan::scatter(len, world, rank, 0);
        each!(Numbers, buffer, buffer => self.movement(what, buffer, plan))
    }

    /// As [`Self::ring_all_reduce`], summing.
    pub(crate) fn all_reduce_unit(&self, unit: usize, buffer: Numbers) -> Pending<Numbers> {
        let what = of(unit, Operation::RingAllReduce(ReduceOp::Sum));
        each!(Numbers, buffer, buffer => self.reduction(what, buffer))
    }

    /// As [`Self::reduce_scatter`], summing.
    pub(crate) fn reduce_scatter_unit(&self, unit: usize, buffer: Numbers) -> Pending<Numbers> {
        let what = of(unit, Operation::ReduceScatter(ReduceOp::Sum));
        each!(Numbers, buffer, buffer => self.reduction(what, buffer))
    }
}

fn of(unit: usize, operation: Operation) -> What {
    // A layout has no more units than this counts.
    What { operation, unit: u16::try_from(unit).ok() }
}
