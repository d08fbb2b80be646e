//! Where every parameter lives: its identity is its path, its storage a range of its unit's flat
//! buffer. Frozen parameters have buffers of their own where they are sharded; where they are not, they
//! stay in the model.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Shape, Tensor};

use pyroclast_kernels::numbers::Float;
use pyroclast_precision::Types;

use crate::error::Error;
use crate::parameters;
use crate::policy::{PolicyPurpose, UnitFacts, UnitPolicy};
use crate::precision::{ALL_F32, UnitTypes};
use crate::sizes::ParamOrder;
use crate::unit::{self, UnitCell};

/// Elements to which the range of every parameter is aligned: 512 bytes of `f32`, the strictest
/// binding alignment among the devices that Burn drives (CUDA).
pub const ALIGNMENT: usize = 128;

/// Index of the unit that holds every parameter outside a declared [`Unit`](crate::Unit).
pub const ROOT: usize = 0;

/// What a parameter is, apart from its numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamInfo {
    /// Path in the module tree, such as `blocks.0.qkv.weight`.
    pub path: String,
    /// Shape of the tensor.
    pub shape: Vec<usize>,
}

impl ParamInfo {
    /// Elements of the tensor.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A parameter and its place.
#[derive(Clone, Debug)]
pub struct ParamSlot {
    /// Path and shape.
    pub info: ParamInfo,
    /// Further paths at which the same parameter stands (tied weights).
    pub aliases: Vec<String>,
    /// Elements of the flat buffer.
    pub range: Range<usize>,
    pub(crate) id: ParamId,
}

/// The parameters that are stored and communicated together.
#[derive(Clone, Debug, Default)]
pub struct UnitLayout {
    /// Trainable parameters, in the order in which the module is traversed.
    pub params: Vec<ParamSlot>,
    /// Elements of their flat buffer, padding included: a multiple of world x [`ALIGNMENT`].
    pub len: usize,
    /// Frozen parameters, where they are sharded. They have no gradient and no optimizer state.
    pub frozen: Vec<ParamSlot>,
    /// Elements of their flat buffer, as `len`.
    pub frozen_len: usize,
    /// Types of the unit's numbers.
    pub types: Types,
    /// Units around this one.
    pub(crate) around: Vec<usize>,
}

impl UnitLayout {
    /// What lies in one of the unit's flat buffers, and how long that is.
    pub(crate) fn buffer(&self, kind: Kind) -> (&[ParamSlot], usize) {
        match kind {
            Kind::Trained => (&self.params, self.len),
            Kind::Frozen => (&self.frozen, self.frozen_len),
        }
    }

    /// What a half-precision gradient is divided by before it is summed over ranks, so that the sum has the
    /// range of a mean: a power of two, by which dividing and multiplying are exact.
    pub(crate) fn predivisor(&self, world: usize) -> f64 {
        if self.types.reduce == Float::F16 { world.next_power_of_two() as f64 } else { 1.0 }
    }

    /// Elements of the trained parameters, without padding.
    pub(crate) fn num_elements(&self) -> usize {
        self.params.iter().map(|slot| slot.range.len()).sum()
    }

    /// Gives every parameter of a buffer its range.
    fn place(&mut self, kind: Kind, order: ParamOrder, world: usize) {
        let (params, len) = self.buffer_mut(kind);
        *params = order.arrange(std::mem::take(params), world);
        for slot in params.iter_mut() {
            slot.range = *len..*len + slot.info.num_elements();
            *len = slot.range.end.next_multiple_of(ALIGNMENT);
        }
        *len = len.next_multiple_of(world * ALIGNMENT);
    }

    fn buffer_mut(&mut self, kind: Kind) -> (&mut Vec<ParamSlot>, &mut usize) {
        match kind {
            Kind::Trained => (&mut self.params, &mut self.len),
            Kind::Frozen => (&mut self.frozen, &mut self.frozen_len),
        }
    }
}

/// Which of a unit's flat buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Trained,
    Frozen,
}

impl Kind {
    pub(crate) const ALL: [Self; 2] = [Self::Trained, Self::Frozen];
}

/// Something for each of a unit's flat buffers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffers<T> {
    pub(crate) trained: T,
    pub(crate) frozen: T,
}

impl<T> Buffers<T> {
    pub(crate) fn of(&self, kind: Kind) -> &T {
        match kind {
            Kind::Trained => &self.trained,
            Kind::Frozen => &self.frozen,
        }
    }

    pub(crate) fn of_mut(&mut self, kind: Kind) -> &mut T {
        match kind {
            Kind::Trained => &mut self.trained,
            Kind::Frozen => &mut self.frozen,
        }
    }

    /// What `each` makes of both.
    pub(crate) fn try_map<U, E>(
        self,
        mut each: impl FnMut(Kind, T) -> Result<U, E>,
    ) -> Result<Buffers<U>, E> {
        let trained = each(Kind::Trained, self.trained)?;
        Ok(Buffers { trained, frozen: each(Kind::Frozen, self.frozen)? })
    }
}

/// A parameter that lies in a flat buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored<'a> {
    pub(crate) unit: usize,
    pub(crate) kind: Kind,
    pub(crate) slot: &'a ParamSlot,
}

/// Where frozen parameters are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrozenParams {
    /// In the model, on every rank.
    InModel,
    /// In flat buffers.
    InUnits,
}

/// What decides where a parameter lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wrapping<'a> {
    /// Which declared units are stored by themselves.
    pub(crate) wrap: &'a UnitPolicy,
    pub(crate) frozen: FrozenParams,
    /// Parameters of at most so many elements have a unit of their own, which stays whole over a step.
    pub(crate) persistence: usize,
    pub(crate) order: ParamOrder,
    pub(crate) precision: &'a UnitTypes,
}

impl Default for Wrapping<'_> {
    fn default() -> Self {
        Self {
            wrap: &UnitPolicy::All,
            frozen: FrozenParams::InModel,
            persistence: 0,
            order: ParamOrder::Traversal,
            precision: &ALL_F32,
        }
    }
}

/// The layout of a whole model. Unit [`ROOT`] comes first, then declared units in traversal order, then
/// the unit of persistent parameters, if there is one.
#[derive(Clone, Debug)]
pub struct Layout {
    /// All units; a unit may be empty.
    pub units: Vec<UnitLayout>,
    /// The unit of small parameters, from all over the model, that stay whole over a step.
    pub(crate) persistent: Option<usize>,
    /// By identity: unit, buffer, and position in it.
    index: HashMap<ParamId, (usize, Kind, usize)>,
    /// Frozen parameters that stay in the model, where units compute in another type than theirs.
    frozen_in_model: HashSet<ParamId>,
    /// Every declared unit in traversal order.
    declared: Vec<Declared>,
}

/// A unit that the model declares.
#[derive(Clone, Debug)]
pub(crate) struct Declared {
    pub(crate) cell: Arc<UnitCell>,
    /// Its index in [`Layout::units`], if it is stored by itself.
    pub(crate) unit: Option<usize>,
    pub(crate) facts: UnitFacts,
}

/// Most units of a model: messages count them in 16 bits.
const MAX_UNITS: usize = u16::MAX as usize;

impl Layout {
    /// Lays out the trainable parameters of `model` for `world` ranks, every declared unit by itself.
    /// Lazy parameters stay lazy.
    ///
    /// A parameter that stands in several units is stored once, in the root unit.
    ///
    /// # Errors
    ///
    /// [`Error::NothingToTrain`] if no float parameter requires a gradient.
    pub fn of<M: Module>(model: &M, world: usize) -> Result<Self, Error> {
        Self::wrapped(model, world, Wrapping::default())
    }

    /// As [`Self::of`], with only those units by themselves that `wrapping` chooses. The parameters of the
    /// others belong to the unit around them.
    ///
    /// # Errors
    ///
    /// As [`Self::of`]; [`Error::UnknownUnits`] if the policy names what there is not.
    pub(crate) fn wrapped<M: Module>(
        model: &M,
        world: usize,
        wrapping: Wrapping<'_>,
    ) -> Result<Self, Error> {
        let (frozen, frozen_in_model) = match wrapping.frozen {
            FrozenParams::InUnits => (parameters::frozen(model), HashSet::new()),
            FrozenParams::InModel if wrapping.precision.has_masters() => {
                (HashSet::new(), parameters::frozen(model))
            }
            FrozenParams::InModel => (HashSet::new(), HashSet::new()),
        };
        let mut collect = Collect { frozen, ..Collect::default() };
        model.visit(&mut collect);
        if collect.found.iter().all(|found| found.kind == Kind::Frozen) {
            return Err(Error::NothingToTrain);
        }
        let facts: Vec<UnitFacts> = collect.cells.iter().map(|(_, facts)| facts.clone()).collect();
        let chosen = wrapping.wrap.choose(PolicyPurpose::Wrap, &facts)?;
        let types = wrapping.precision.of_units(&facts, &chosen)?;
        let count = chosen.iter().filter(|chosen| **chosen).count();
        if count >= MAX_UNITS {
            return Err(Error::TooManyUnits { units: count + 1, limit: MAX_UNITS });
        }
        let mut next = ROOT;
        let declared: Vec<Declared> = collect
            .cells
            .into_iter()
            .zip(chosen)
            .map(|((cell, facts), chosen)| {
                next += usize::from(chosen);
                Declared { cell, unit: chosen.then_some(next), facts }
            })
            .collect();
        let declared_units: Vec<Option<usize>> = declared.iter().map(|unit| unit.unit).collect();
        // The innermost of the units around a parameter that is stored by itself.
        let unit_of = |around: &[usize]| {
            around.iter().rev().find_map(|cell| declared[*cell].unit).unwrap_or(ROOT)
        };
        let persistent = (wrapping.persistence > 0).then_some(count + 1);
        let outside = wrapping.precision.types.outside_units();
        let empty = UnitLayout { types: outside, ..UnitLayout::default() };
        let mut units = vec![empty; count + 1 + usize::from(persistent.is_some())];
        for ((declared, around), types) in declared.iter().zip(&collect.around).zip(types) {
            if let Some(unit) = declared.unit {
                units[unit].types = types;
                units[unit].around = around.iter().filter_map(|o| declared_units[*o]).collect();
            }
        }
        for Found { around, kind, info, aliases, id } in collect.found {
            let places: Vec<usize> = around.iter().map(|around| unit_of(around)).collect();
            let is_tied_across = places.iter().any(|unit| *unit != places[0]);
            let at = match persistent {
                Some(unit) if info.num_elements() <= wrapping.persistence => unit,
                _ if is_tied_across => ROOT,
                _ => places[0],
            };
            let slot = ParamSlot { info, aliases, range: 0..0, id };
            units[at].buffer_mut(kind).0.push(slot);
        }
        for unit in &mut units {
            Kind::ALL.into_iter().for_each(|kind| unit.place(kind, wrapping.order, world));
        }
        let mut index = HashMap::new();
        for (unit, layout) in units.iter().enumerate() {
            for kind in Kind::ALL {
                let ids = layout.buffer(kind).0.iter().map(|slot| slot.id).enumerate();
                index.extend(ids.map(|(position, id)| (id, (unit, kind, position))));
            }
        }
        Ok(Self { units, persistent, index, frozen_in_model, declared })
    }

    /// Whether the model, and not a unit, holds a unit's weights during a pass.
    pub(crate) fn is_in_model(&self, unit: usize) -> bool {
        unit == ROOT || Some(unit) == self.persistent
    }

    /// Whether a parameter of the model is to be converted where it is used in a unit that computes in
    /// another type: those of other units are, and frozen ones. Running statistics are not.
    pub(crate) fn is_converted(&self, id: ParamId) -> bool {
        self.index.contains_key(&id) || self.frozen_in_model.contains(&id)
    }

    /// The place of a parameter, if it lies in a flat buffer: trainable parameters do, buffers do not.
    #[must_use]
    pub(crate) fn stored(&self, id: ParamId) -> Option<Stored<'_>> {
        let (unit, kind, position) = *self.index.get(&id)?;
        Some(Stored { unit, kind, slot: &self.units[unit].buffer(kind).0[position] })
    }

    /// Unit and position of a trainable parameter.
    #[must_use]
    pub(crate) fn locate(&self, id: ParamId) -> Option<(usize, usize)> {
        match *self.index.get(&id)? {
            (unit, Kind::Trained, position) => Some((unit, position)),
            (_, Kind::Frozen, _) => None,
        }
    }

    /// The place of a trainable parameter.
    #[must_use]
    pub(crate) fn slot(&self, (unit, position): (usize, usize)) -> &ParamSlot {
        &self.units[unit].params[position]
    }

    pub(crate) fn declared(&self) -> &[Declared] {
        &self.declared
    }

    /// The slots of all trainable parameters with the index of their unit.
    pub fn slots(&self) -> impl Iterator<Item = (usize, &ParamSlot)> {
        self.units
            .iter()
            .enumerate()
            .flat_map(|(unit, layout)| layout.params.iter().map(move |slot| (unit, slot)))
    }

    /// Elements of all trainable parameters, without padding.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.units.iter().map(UnitLayout::num_elements).sum()
    }

    /// A text that is equal on two ranks exactly if their layouts are.
    pub(crate) fn fingerprint(&self) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        let of_unit = |(unit, layout): (usize, &UnitLayout)| {
            let buffers = [&layout.params[..], &layout.frozen[..]];
            for ParamSlot { info, aliases, range, .. } in buffers.into_iter().flatten() {
                let (path, shape) = (&info.path, &info.shape);
                // Writing to a string cannot fail.
                let _ = writeln!(text, "{unit} {path} {shape:?} {aliases:?} {range:?}");
            }
            let _ = writeln!(text, "{:?}", layout.types);
        };
        self.units.iter().enumerate().for_each(of_unit);
        text
    }
}

struct Found {
    /// For each place where the parameter stands, the declared units around it, innermost last.
    around: Vec<Vec<usize>>,
    kind: Kind,
    info: ParamInfo,
    aliases: Vec<String>,
    id: ParamId,
}

#[derive(Default)]
struct Collect {
    /// Frozen parameters that lie in flat buffers.
    frozen: HashSet<ParamId>,
    path: Vec<String>,
    found: Vec<Found>,
    position: HashMap<ParamId, usize>,
    cells: Vec<(Arc<UnitCell>, UnitFacts)>,
    /// For each of `cells`, those around it.
    around: Vec<Vec<usize>>,
}

impl Collect {
    /// Indices of the declared units that are being traversed, innermost last.
    fn around(&mut self) -> Vec<usize> {
        unit::enclosing().into_iter().fold(vec![], |mut around, cell| {
            let index = self.index_of(cell, &around);
            around.push(index);
            around
        })
    }

    fn index_of(&mut self, cell: Arc<UnitCell>, around: &[usize]) -> usize {
        if let Some(known) = self.cells.iter().position(|(known, _)| Arc::ptr_eq(known, &cell)) {
            return known;
        }
        let type_name = cell.type_name();
        self.cells.push((cell, UnitFacts { type_name, ..UnitFacts::default() }));
        self.around.push(around.to_vec());
        self.cells.len() - 1
    }
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (around, path) = (self.around(), self.path.join("."));
        for cell in &around {
            self.cells[*cell].1.paths.push(path.clone());
        }
        let kind = match self.frozen.contains(&param.id) {
            true => Kind::Frozen,
            false if parameters::is_trainable(param) => Kind::Trained,
            false => return,
        };
        let info = ParamInfo { path, shape: param.lazy_shape().to_vec() };
        for cell in &around {
            self.cells[*cell].1.elements += info.shape.iter().product::<usize>();
        }
        if let Some(&first) = self.position.get(&param.id) {
            let found = &mut self.found[first];
            found.aliases.push(info.path);
            found.around.push(around);
            return;
        }
        self.position.insert(param.id, self.found.len());
        self.found.push(Found { around: vec![around], kind, info, aliases: vec![], id: param.id });
    }
}

/// The shape of a slot as Burn has it.
pub(crate) fn shape_of(slot: &ParamSlot) -> Shape {
    Shape::from(slot.info.shape.clone())
}
