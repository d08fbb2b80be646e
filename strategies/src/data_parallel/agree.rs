//! What ranks tell each other beside weights and gradients.

use std::collections::HashMap;
use std::fmt;

use burn::module::Module;
use pyroclast_kernels::numbers::Numbers;
use pyroclast_kernels::{each, gradient};
use pyroclast_precision::Types;

use super::{DataParallel, Unused};
use crate::collectives::ReduceOp;
use crate::error::Error;
use crate::group::ProcessGroup;
use crate::layout::{Layout, ParamSlot};
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

    /// Running statistics, and frozen parameters that stay in the model, in the types that they are to have.
    pub(super) fn converted<M: Module>(&self, model: M, types: Types) -> Result<M, Error> {
        let convert = |model: M| {
            let frozen = parameters::frozen(&model);
            parameters::convert(model, |id| match frozen.contains(&id) {
                true => Some(types.params),
                false => Some(types.buffers).filter(|_| self.run.layout.stored(id).is_none()),
            })
        };
        if types == Types::default() {
            return Ok(model);
        }
        Ok(match self.run.is_sharded() {
            true => self.run.veiled(model, convert),
            false => convert(model),
        })
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
            let values =
                each!(Numbers, named.values, values => Numbers, group.broadcast(values, 0).wait()?);
            untrained.insert(named.id, values);
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
        buckets.for_each(|unit, gradients, _| {
            let own = match self.stage {
                // The whole is here: every rank sums up its part of it all the same.
                Stage::Nothing => gradients.as_slice().part(shard(gradients.len(), world, rank)),
                _ => gradients.as_slice(),
            };
            mine.push(gradient::sum_of_squares(own) * self.predivisor(unit).powi(2));
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

    /// Where gradients that are not finite come from: the first parameter in the first micro-batch on the first
    /// rank whose own was not, or, if each rank's are finite, the first whose sum is not. None if all are
    /// finite. All ranks must call it, between [`Self::reduce`] and [`Self::step`].
    ///
    /// # Errors
    ///
    /// What ended a collective. The other ranks are told.
    pub fn culprit(&self) -> Result<Option<Culprit>, Error> {
        told(&self.run.group, self.find_culprit())
    }

    fn find_culprit(&self) -> Result<Option<Culprit>, Error> {
        const NONE: i64 = i64::MAX;
        let Run { buckets, layout, group, .. } = &*self.run;
        let own = buckets.not_finite().map(|(unit, param, micro_batch)| [micro_batch, unit, param]);
        let own = own.map_or([NONE; 3], |own| own.map(|number| number as i64));
        let mut in_sum = [NONE; 2];
        buckets.for_each(|unit, gradients, _| {
            let start = self.stage.owned(&layout.units[unit], group).start;
            if let (NONE, Some(at)) = (in_sum[0], gradient::first_not_finite(gradients.as_slice()))
            {
                let is_before = |slot: &ParamSlot| slot.range.start <= start + at;
                let param = layout.units[unit].params.iter().rposition(is_before).unwrap_or(0);
                in_sum = [unit as i64, param as i64];
            }
        });
        let (world, rank) = (group.world(), group.rank());
        let mut all = vec![0; 5 * world];
        all[5 * rank..][..3].copy_from_slice(&own);
        all[5 * rank + 3..][..2].copy_from_slice(&in_sum);
        let all = group.all_gather(all).wait()?;
        let of = |rank: usize| &all[5 * rank..][..5];
        let path =
            |unit: i64, param: i64| layout.slot((unit as usize, param as usize)).info.path.clone();
        let first = (0..world).map(|rank| (of(rank)[0], rank)).min().filter(|first| first.0 < NONE);
        if let Some((micro_batch, rank)) = first {
            let source = Some((group.members()[rank], micro_batch as usize));
            return Ok(Some(Culprit { path: path(of(rank)[1], of(rank)[2]), source }));
        }
        let in_sums = (0..world).map(|rank| (of(rank)[3], of(rank)[4])).min();
        let in_sums = in_sums.filter(|(unit, _)| *unit < NONE);
        Ok(in_sums.map(|(unit, param)| Culprit { path: path(unit, param), source: None }))
    }
}

/// A parameter whose gradient is NaN or infinite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Culprit {
    /// The parameter's path.
    pub path: String,
    /// The rank, and the micro-batch, counted from 1, in which it became so. None if each rank's gradient is
    /// finite, and their sum is not.
    pub source: Option<(usize, usize)>,
}

impl fmt::Display for Culprit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, source } = self;
        match source {
            Some((rank, micro_batch)) => {
                write!(f, "the gradient of `{path}` on rank {rank}, in micro-batch {micro_batch}")
            }
            None => write!(f, "the sum over ranks and micro-batches of the gradients of `{path}`"),
        }
    }
}
