//! A model's first numbers: drawn on rank 0 unit by unit, given to the ranks that store them, and
//! dropped. On no rank is the whole model ever in memory, unless it stores the whole model.

use std::collections::HashSet;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor};
use pyroclast_kernels::interop;
use pyroclast_kernels::numbers::{Numbers, Slice};

use crate::error::Error;
use crate::group::ProcessGroup;
use crate::layout::{Buffers, Kind, Layout, Stored, UnitLayout};
use crate::memory::{Category, Held, Ledger};
use crate::shard::shard;
use crate::stage::Stage;
use crate::weights::{Mappers, hollow};

/// What initialisation leaves.
pub(crate) struct Initialised<M> {
    /// Without the numbers of the parameters that are laid out.
    pub(crate) model: M,
    pub(crate) mappers: Mappers,
    /// By unit.
    pub(crate) stored: Vec<StoredUnit>,
}

/// What this rank stores of a unit.
#[derive(Debug, Default)]
pub(crate) struct StoredUnit {
    /// All weights, or their shards; the trained ones in the type that the unit computes in.
    pub(crate) weights: Buffers<Numbers>,
    /// What the optimizer steps, where that is of another type: the own part.
    pub(crate) masters: Option<Numbers>,
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
    let staged = |kind| {
        let left = |unit: &UnitLayout| unit.buffer(kind).0.len();
        units.iter().map(|unit| Staged { left: left(unit), values: None }).collect()
    };
    let mut map = Initialise {
        place,
        staged: Buffers { trained: staged(Kind::Trained), frozen: staged(Kind::Frozen) },
        stored: units.iter().map(|_| StoredUnit::default()).collect(),
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
    /// By unit.
    staged: Buffers<Vec<Staged>>,
    stored: Vec<StoredUnit>,
    mappers: Mappers,
    seen: HashSet<ParamId>,
    error: Option<Error>,
}

/// A flat buffer whose parameters are being collected.
struct Staged {
    /// Parameters to come.
    left: usize,
    values: Option<(Numbers, Held)>,
}

impl Initialise<'_> {
    fn is_first(&self) -> bool {
        self.place.group.rank() == 0
    }

    /// Takes the numbers of a parameter into its flat buffer, on the rank that has them.
    fn stage<const D: usize>(
        &mut self,
        Stored { unit, kind, slot }: Stored<'_>,
        param: Param<Tensor<D>>,
    ) -> Result<(), Error> {
        let Place { layout, ledger, .. } = self.place;
        let UnitLayout { types, .. } = layout.units[unit];
        let (len, range) = (layout.units[unit].buffer(kind).1, slot.range.clone());
        let staged = &mut self.staged.of_mut(kind)[unit];
        staged.left -= 1;
        let (values, _) = staged.values.get_or_insert_with(|| {
            let held = ledger.hold(Category::ParametersFull, len * types.params.size());
            (Numbers::zeros(types.params, len), held)
        });
        if self.place.group.rank() == 0 {
            let tensor = param.consume().1.without_autodiff().reshape([-1]);
            let take = |_, read: Slice<'_>| values.part_mut(range.clone()).copy_from(read);
            interop::read_all(vec![tensor], take)
                .map_err(|source| Error::Read { what: "parameters".to_owned(), source })?;
        }
        if staged.left == 0 { self.deliver(unit, kind) } else { Ok(()) }
    }

    /// Gives every rank what it stores of a buffer that is complete.
    fn deliver(&mut self, unit: usize, kind: Kind) -> Result<(), Error> {
        let Place { layout, group, stage, .. } = self.place;
        let staged = &mut self.staged.of_mut(kind)[unit];
        let Some((values, _held)) = staged.values.take() else { return Ok(()) };
        let len = values.len();
        if len == 0 {
            return Ok(());
        }
        let values = match stage.shards_parameters() {
            true => {
                let scattered = group.scatter_unit(unit, values).wait()?;
                scattered.part(shard(len, group.world(), group.rank())).to_numbers()
            }
            false => group.broadcast_unit(unit, values).wait()?,
        };
        let (unit_layout, stored) = (&layout.units[unit], &mut self.stored[unit]);
        let types = unit_layout.types;
        *stored.weights.of_mut(kind) = match kind {
            Kind::Trained if types.has_masters() => {
                let weights = values.as_slice().cast(types.compute);
                stored.masters = Some(match stage.shards_parameters() {
                    true => values,
                    false => values.part(stage.owned(unit_layout, group)).to_numbers(),
                });
                weights
            }
            _ => values,
        };
        Ok(())
    }
}

impl ModuleMapper for Initialise<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let Some(stored) = self.place.layout.stored(param.id) else {
            if self.is_first() {
                // Frozen parameters that stay in the model take their turn in the drawing.
                let _ = param.base();
            }
            return param;
        };
        let id = param.id;
        let hollow = hollow(id, stored, self.place.device);
        if self.seen.insert(id) {
            self.mappers.keep(&param);
            self.error = self.stage(stored, param).err();
        }
        hollow
    }
}
