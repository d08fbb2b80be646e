//! A model's first numbers: drawn on rank 0 unit by unit, given to the ranks that store them, and
//! dropped. On no rank is the whole model ever in memory, unless it stores the whole model.

use std::collections::HashSet;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor};
use pyroclast_kernels::interop;

use crate::error::Error;
use crate::group::ProcessGroup;
use crate::layout::Layout;
use crate::memory::{Category, Held, Ledger};
use crate::shard::shard;
use crate::stage::Stage;
use crate::weights::{Mappers, hollow};

/// What initialisation leaves.
pub(crate) struct Initialised<M> {
    /// Without the numbers of its trainable parameters.
    pub(crate) model: M,
    pub(crate) mappers: Mappers,
    /// By unit, what this rank stores: everything, or its shard.
    pub(crate) stored: Vec<Vec<f32>>,
}

/// Where an initialisation happens.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) group: &'a ProcessGroup,
    pub(crate) stage: Stage,
    pub(crate) ledger: &'a Ledger,
    pub(crate) device: &'a Device,
}

/// Gives every rank rank 0's numbers. Rank 0 draws the model's lazy parameters in the order in which the
/// model is traversed, whatever is sharded; other ranks do not draw theirs.
///
/// # Errors
///
/// [`Error::Read`], or what ended a collective.
pub(crate) fn initialise<M: Module>(model: M, place: Place<'_>) -> Result<Initialised<M>, Error> {
    let units = &place.layout.units;
    let staged = units.iter().map(|unit| Staged { left: unit.params.len(), values: None });
    let mut map = Initialise {
        place,
        staged: staged.collect(),
        stored: vec![vec![]; units.len()],
        mappers: Mappers::default(),
        seen: HashSet::new(),
        error: None,
    };
    let model = model.map(&mut map);
    match map.error {
        Some(error) => Err(error),
        None => Ok(Initialised { model, mappers: map.mappers, stored: map.stored }),
    }
}

struct Initialise<'a> {
    place: Place<'a>,
    staged: Vec<Staged>,
    stored: Vec<Vec<f32>>,
    mappers: Mappers,
    seen: HashSet<ParamId>,
    error: Option<Error>,
}

/// A unit whose parameters are being collected.
struct Staged {
    /// Parameters to come.
    left: usize,
    values: Option<(Vec<f32>, Held)>,
}

impl Initialise<'_> {
    fn is_first(&self) -> bool {
        self.place.group.rank() == 0
    }

    /// Takes the numbers of a parameter into its unit's buffer, on the rank that has them.
    fn stage<const D: usize>(
        &mut self,
        (unit, position): (usize, usize),
        param: Param<Tensor<D>>,
    ) -> Result<(), Error> {
        let Place { layout, ledger, .. } = self.place;
        let (layout, range) = (&layout.units[unit], layout.slot((unit, position)).range.clone());
        let staged = &mut self.staged[unit];
        staged.left -= 1;
        let (values, _) = staged.values.get_or_insert_with(|| {
            let held = ledger.hold(Category::ParametersFull, layout.len * size_of::<f32>());
            (vec![0.0; layout.len], held)
        });
        if self.place.group.rank() == 0 {
            let tensor = param.consume().1.without_autodiff().reshape([-1]);
            interop::read_all(vec![tensor], |_, read| values[range.clone()].copy_from_slice(read))
                .map_err(|source| Error::Read { what: "parameters".to_owned(), source })?;
        }
        if self.staged[unit].left == 0 { self.deliver(unit) } else { Ok(()) }
    }

    /// Gives every rank what it stores of a unit that is complete.
    fn deliver(&mut self, unit: usize) -> Result<(), Error> {
        let Place { group, stage, .. } = self.place;
        let Some((values, _held)) = self.staged[unit].values.take() else { return Ok(()) };
        let len = values.len();
        if len == 0 {
            return Ok(());
        }
        self.stored[unit] = match stage.shards_parameters() {
            true => {
                let scattered = group.scatter_unit(unit, values).wait()?;
                scattered[shard(len, group.world(), group.rank())].to_vec()
            }
            false => group.broadcast_unit(unit, values).wait()?,
        };
        Ok(())
    }
}

impl ModuleMapper for Initialise<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let Some(place) = self.place.layout.locate(param.id) else {
            if self.is_first() {
                // Frozen parameters take their turn in the drawing.
                let _ = param.base();
            }
            return param;
        };
        let id = param.id;
        let hollow = hollow(id, self.place.layout.slot(place), self.place.device);
        if self.seen.insert(id) {
            self.mappers.keep(&param);
            self.error = self.stage(place, param).err();
        }
        hollow
    }
}
