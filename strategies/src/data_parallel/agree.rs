//! What ranks tell each other beside weights and gradients.

use std::collections::HashMap;

use burn::module::Module;
use pyroclast_kernels::gradient;

use super::{DataParallel, Unused};
use crate::collectives::ReduceOp;
use crate::error::Error;
use crate::group::ProcessGroup;
use crate::layout::Layout;
use crate::parameters::{self, NamedValues};
use crate::run::Run;
use crate::shard::shard;
use crate::stage::Stage;

/// Tells the other ranks of a failure, so that none waits for this one.
pub(super) fn told<T>(group: &ProcessGroup, outcome: Result<T, Error>) -> Result<T, Error> {
    outcome.inspect_err(|error| {
        group.abort_signal().raise(group.members()[group.rank()], error);
    })
}

/// All ranks learn whether all have rank 0's layout, so that none is left waiting.
pub(super) fn on_layout(layout: &Layout, group: &ProcessGroup) -> Result<(), Error> {
    let mine = layout.fingerprint().into_bytes();
    // The length goes first: a broadcast needs buffers of one length.
    let length = group.broadcast(vec![mine.len() as f64], 0).wait()?;
    let mut theirs = mine.clone();
    theirs.resize(length[0] as usize, 0);
    let differs = group.broadcast(theirs, 0).wait()? != mine;
    let differing = group.all_reduce(vec![f64::from(u8::from(differs))], ReduceOp::Sum).wait()?;
    if differs {
        return Err(Error::LayoutMismatch { rank: group.members()[group.rank()] });
    }
    if differing[0] > 0.0 {
        // The rank that differs raises its own error, which ends this barrier.
        group.barrier()?;
    }
    Ok(())
}

impl DataParallel {
    /// What the model holds beside what is laid out: buffers, and frozen parameters that are not sharded.
    pub(super) fn read_untrained<M: Module>(&self, model: &M) -> Result<Vec<NamedValues>, Error> {
        let layout = &self.run.layout;
        let valid = match self.run.is_sharded() {
            true => self.run.veiled(model.clone(), |model| model.valid()),
            false => model.valid(),
        };
        parameters::read_valid(&valid, |id| layout.stored(id).is_none())
    }

    /// Gives every rank [these](Self::read_untrained) as rank 0 has them. Other ranks do not draw theirs.
    pub(super) fn broadcast_untrained<M: Module>(&self, model: M) -> Result<M, Error> {
        let Run { layout, group, .. } = &*self.run;
        let named = match group.rank() {
            0 => self.read_untrained(&model)?,
            _ => parameters::shapes_where(&model, |id| layout.stored(id).is_none()),
        };
        let mut untrained = HashMap::new();
        for named in named {
            untrained.insert(named.id, group.broadcast(named.values, 0).wait()?);
        }
        parameters::write_where(model, |id, _| untrained.remove(&id))
    }

    /// Waits for the sums over ranks; agrees with the others on what this step was, and on the sum of
    /// squares.
    pub(super) fn reduced(&self) -> Result<f64, Error> {
        let (buckets, layout, group) = (&self.run.buckets, &self.run.layout, &self.run.group);
        let (world, rank) = (group.world(), group.rank());
        let (micro_batches, mut seen) = buckets.step_so_far();
        if self.unused == Unused::Refuse && world > 1 && seen.contains(&false) {
            let unused = layout.slots().zip(&seen).filter(|(_, seen)| !**seen);
            let paths = unused.map(|((_, slot), _)| slot.info.path.clone()).collect();
            return Err(Error::UnusedParameters { rank: group.members()[rank], paths });
        }
        buckets.finish_step()?;
        let told_of_use = if self.unused == Unused::Allow { seen.len() } else { 0 };
        let mut mine = vec![micro_batches as f64];
        mine.extend(seen.iter().take(told_of_use).map(|seen| f64::from(u8::from(*seen))));
        buckets.for_each(|_, gradients, _| {
            let own = match self.stage {
                // The whole is here: every rank sums up its part of it all the same.
                Stage::Nothing => &gradients[shard(gradients.len(), world, rank)],
                _ => gradients,
            };
            mine.push(gradient::sum_of_squares(own));
        });
        let len = mine.len();
        let mut all = vec![0.0; world * len];
        all[rank * len..][..len].copy_from_slice(&mine);
        let all = group.all_gather(all).wait()?;
        let of = |rank: usize| &all[rank * len..][..len];
        if let Some(peer) = (0..world).find(|peer| of(*peer)[0] != mine[0]) {
            let (mine, theirs) = (micro_batches, of(peer)[0] as usize);
            let (rank, peer) = (group.members()[rank], group.members()[peer]);
            return Err(Error::MicroBatches { rank, mine, peer, theirs });
        }
        for (param, seen) in seen.iter_mut().enumerate().take(told_of_use) {
            *seen = (0..world).any(|rank| of(rank)[1 + param] > 0.0);
        }
        buckets.set_seen(&seen);
        let sums = |rank: usize| &of(rank)[1 + told_of_use..];
        let of_unit = |unit: usize| -> f64 { (0..world).map(|rank| sums(rank)[unit]).sum() };
        Ok((0..layout.units.len()).map(of_unit).sum())
    }
}
