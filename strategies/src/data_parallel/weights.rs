//! From flat master weights back to a model's parameters.

use std::collections::{HashMap, VecDeque};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use pyroclast_kernels::interop;

use crate::error::Error;
use crate::group::{Pending, ProcessGroup};
use crate::layout::{Layout, UnitLayout, shape_of};
use crate::optimizer::FlatOptimizer;

/// Units whose weights are on their way while those of another are being used.
const AHEAD: usize = 1;

/// Where the weights of whole units come from.
pub(super) enum Weights<'a> {
    /// This rank's optimizer has all of them.
    Here(&'a FlatOptimizer),
    /// By unit.
    Given(&'a [Vec<f32>]),
    /// Each rank's optimizer has its shard.
    Gathered(Gather<'a>),
}

/// Gathers units in the order of the layout, the same on all ranks, and keeps each until all its
/// parameters have been served.
pub(super) struct Gather<'a> {
    group: &'a ProcessGroup,
    layout: &'a Layout,
    optimizer: &'a FlatOptimizer,
    to_launch: VecDeque<usize>,
    pending: HashMap<usize, Pending<Vec<f32>>>,
    full: HashMap<usize, Vec<f32>>,
    /// By unit: how often the traversal will come to one of its parameters.
    left: Vec<usize>,
}

impl<'a> Weights<'a> {
    /// Weights of which each rank's optimizer has its shard.
    pub(super) fn gathered(
        group: &'a ProcessGroup,
        layout: &'a Layout,
        optimizer: &'a FlatOptimizer,
    ) -> Self {
        let to_launch = (0..layout.units.len()).collect();
        let (pending, full) = (HashMap::new(), HashMap::new());
        let visits =
            |unit: &UnitLayout| unit.params.iter().map(|slot| 1 + slot.aliases.len()).sum();
        let left = layout.units.iter().map(visits).collect();
        let mut gather = Gather { group, layout, optimizer, to_launch, pending, full, left };
        // The root unit, and the first of the others.
        (0..=AHEAD).for_each(|_| gather.launch_next());
        Self::Gathered(gather)
    }

    fn of_unit(&mut self, unit: usize) -> Result<&[f32], Error> {
        match self {
            Self::Here(optimizer) => Ok(optimizer.master(unit)),
            Self::Given(weights) => Ok(&weights[unit]),
            Self::Gathered(gather) => gather.of_unit(unit),
        }
    }

    /// A parameter of the unit has been served.
    fn served(&mut self, unit: usize) {
        if let Self::Gathered(gather) = self {
            gather.left[unit] = gather.left[unit].saturating_sub(1);
            if gather.left[unit] == 0 {
                gather.full.remove(&unit);
            }
        }
    }
}

impl Gather<'_> {
    fn launch_next(&mut self) {
        if let Some(unit) = self.to_launch.pop_front() {
            let mut buffer = vec![0.0; self.layout.units[unit].len];
            buffer[self.optimizer.owned(unit).clone()].copy_from_slice(self.optimizer.master(unit));
            self.pending.insert(unit, self.group.all_gather(buffer));
        }
    }

    fn of_unit(&mut self, unit: usize) -> Result<&[f32], Error> {
        while !self.full.contains_key(&unit) {
            match self.pending.remove(&unit) {
                Some(pending) => {
                    self.launch_next();
                    self.full.insert(unit, pending.wait()?);
                }
                None if self.to_launch.is_empty() => {
                    let problem = "a parameter that the model did not have when it was laid out";
                    return Err(Error::MissingValues(problem.to_owned()));
                }
                None => self.launch_next(),
            }
        }
        Ok(&self.full[&unit])
    }

    /// Takes part in the gathers that this rank had no use for.
    fn finish(mut self) -> Result<(), Error> {
        while !self.to_launch.is_empty() {
            self.launch_next();
        }
        self.pending.into_values().try_for_each(|pending| pending.wait().map(drop))
    }
}

/// Replaces the numbers of trainable parameters.
pub(super) struct WriteBack<'a> {
    layout: &'a Layout,
    weights: Weights<'a>,
    error: Option<Error>,
}

impl<'a> WriteBack<'a> {
    pub(super) fn new(layout: &'a Layout, weights: Weights<'a>) -> Self {
        Self { layout, weights, error: None }
    }

    /// Gives `model` all weights, by unit.
    pub(super) fn all<M: Module>(
        model: M,
        layout: &'a Layout,
        weights: &'a [Vec<f32>],
    ) -> Result<M, Error> {
        Self::new(layout, Weights::Given(weights)).run(model)
    }

    pub(super) fn run<M: Module>(mut self, model: M) -> Result<M, Error> {
        let model = model.map(&mut self);
        if let Some(error) = self.error {
            return Err(error);
        }
        match self.weights {
            Weights::Gathered(gather) => gather.finish().map(|()| model),
            Weights::Here(_) | Weights::Given(_) => Ok(model),
        }
    }
}

impl ModuleMapper for WriteBack<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(place) = self.layout.locate(param.id).filter(|_| self.error.is_none()) else {
            return param;
        };
        let slot = self.layout.slot(place);
        match self.weights.of_unit(place.0) {
            Ok(unit) => {
                let values = &unit[slot.range.clone()];
                let param = param.map(|tensor| {
                    interop::tensor(values, shape_of(slot), &tensor.device()).require_grad()
                });
                self.weights.served(place.0);
                param
            }
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}
