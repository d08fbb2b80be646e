//! A run's numbers, for whoever keeps them beyond it.

use burn::module::Module;
use pyroclast_kernels::flat::FlatTensor;
use pyroclast_kernels::numbers::Numbers;

use super::DataParallel;
use crate::error::Error;
use crate::layout::{Kind, Layout, ParamInfo};
use crate::parameters::NamedValues;
use crate::run::Run;
use crate::shard::shard;
use crate::stage::Stage;
use crate::weights::{Weights, fill};

/// One name of the optimizer's state for one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct StateEntry<'a> {
    /// Which state, as torch names it.
    pub name: &'static str,
    /// Of which parameter.
    pub info: &'a ParamInfo,
    /// As many numbers as the parameter has.
    pub values: Numbers,
}

impl DataParallel {
    /// The optimizer's state, on rank 0: for each of its [names](crate::Optimizer::state_names) and each
    /// trainable parameter, as many numbers as the parameter has. Other ranks get none, and must call
    /// it all the same.
    ///
    /// # Errors
    ///
    /// What ended a collective. The other ranks are told.
    pub fn state(&self) -> Result<Vec<StateEntry<'_>>, Error> {
        self.told(self.gather_state())
    }

    fn gather_state(&self) -> Result<Vec<StateEntry<'_>>, Error> {
        let group = &self.run.group;
        let mut entries = vec![];
        for (unit, layout) in self.run.layout.units.iter().enumerate() {
            let names = self.optimizer.state_names().iter().copied();
            for (name, own) in names.zip(self.optimizer.state(unit)) {
                let all = self.gather_owned(unit, own)?;
                if group.rank() == 0 {
                    entries.extend(layout.params.iter().map(|slot| StateEntry {
                        name,
                        info: &slot.info,
                        values: all.part(slot.range.clone()).to_numbers(),
                    }));
                }
            }
        }
        Ok(entries)
    }

    /// What the ranks own of one of a unit's buffers, whole on rank 0.
    fn gather_owned(&self, unit: usize, own: &Numbers) -> Result<Numbers, Error> {
        let (layout, group) = (&self.run.layout.units[unit], &self.run.group);
        if self.stage == Stage::Nothing || layout.len == 0 {
            return Ok(own.clone());
        }
        let mut all = Numbers::zeros(own.float(), layout.len);
        all.part_mut(self.stage.owned(layout, group)).copy_from(own.as_slice());
        group.gather_unit(unit, all).wait()
    }

    /// All float parameters and buffers of the model, on rank 0; of parameters with master weights, these. Other
    /// ranks get none, and must call it all the same.
    ///
    /// # Errors
    ///
    /// [`Error::Read`], or what ended a collective. The other ranks are told.
    pub fn parameters<M: Module>(&self, model: &M) -> Result<Vec<NamedValues>, Error> {
        self.told(self.gather_parameters(model))
    }

    fn gather_parameters<M: Module>(&self, model: &M) -> Result<Vec<NamedValues>, Error> {
        let Run { layout, group, .. } = &*self.run;
        let is_first = group.rank() == 0;
        let mut named = vec![];
        for (unit, kind) in buffers(layout) {
            let all = self.gather_whole(unit, kind)?;
            if is_first {
                let (slots, _) = layout.units[unit].buffer(kind);
                named.extend(slots.iter().map(|slot| NamedValues {
                    info: slot.info.clone(),
                    values: all.part(slot.range.clone()).to_numbers(),
                    id: slot.id,
                }));
            }
        }
        if is_first {
            named.extend(self.read_untrained(model)?);
        }
        Ok(named)
    }

    /// The whole model on rank 0, where it is sharded, with its master weights, where there are some; other
    /// ranks' stays as it is. It has to fit there.
    ///
    /// # Errors
    ///
    /// What ended a collective. The other ranks are told.
    pub fn whole<M: Module>(&self, model: M) -> Result<M, Error> {
        let Run { layout, group, mappers, device, .. } = &*self.run;
        let has_masters = layout.units.iter().any(|unit| unit.types.has_masters());
        if !self.run.is_sharded() && !has_masters {
            return Ok(model);
        }
        let gather = |unit, kind| self.told(self.gather_whole(unit, kind));
        let mut whole = vec![];
        for unit in 0..layout.units.len() {
            let (trained, frozen) = (gather(unit, Kind::Trained)?, gather(unit, Kind::Frozen)?);
            if group.rank() == 0 {
                let lend = |values: Numbers| FlatTensor::new(values, device);
                whole.push(Weights { trained: lend(trained), frozen: lend(frozen) });
            }
        }
        Ok(fill(model, (layout, mappers), device, |unit| whole.get(unit)))
    }

    /// One of a unit's buffers as it is saved, whole on rank 0.
    fn gather_whole(&self, unit: usize, kind: Kind) -> Result<Numbers, Error> {
        let Run { layout, group, .. } = &*self.run;
        let (_, len) = layout.units[unit].buffer(kind);
        match (kind, self.optimizer.masters(unit), self.gathers()) {
            _ if len == 0 => Ok(Numbers::default()),
            (Kind::Trained, Some(masters), _) => self.gather_owned(unit, masters),
            (_, _, Some(gathers)) => {
                let own = gathers.own_part(unit, kind);
                let mut all = Numbers::zeros(own.float(), len);
                let range = shard(len, group.world(), group.rank());
                all.part_mut(range).copy_from(own.as_slice());
                group.gather_unit(unit, all).wait()
            }
            (Kind::Trained, None, None) => Ok(self.lent[unit].trained.to_numbers()),
            (Kind::Frozen, None, None) | (Kind::Frozen, Some(_), None) => Ok(Numbers::default()),
        }
    }
}

/// Every flat buffer: its unit, and which of the unit's it is.
fn buffers(layout: &Layout) -> impl Iterator<Item = (usize, Kind)> + use<> {
    (0..layout.units.len()).flat_map(|unit| Kind::ALL.map(|kind| (unit, kind)))
}
