//! Where every trainable parameter lives: its identity is its path, its storage a range of its
//! unit's flat buffer.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Shape, Tensor};

use crate::error::Error;
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

/// A trainable parameter and its place.
#[derive(Clone, Debug)]
pub struct ParamSlot {
    /// Path and shape.
    pub info: ParamInfo,
    /// Further paths at which the same parameter stands (tied weights).
    pub aliases: Vec<String>,
    /// Elements of the unit's flat buffer.
    pub range: Range<usize>,
}

/// The parameters that are stored and communicated together.
#[derive(Clone, Debug, Default)]
pub struct UnitLayout {
    /// In the order in which the module is traversed.
    pub params: Vec<ParamSlot>,
    /// Elements of the flat buffer, padding included: a multiple of world x [`ALIGNMENT`].
    pub len: usize,
}

/// The layout of a whole model. Unit [`ROOT`] comes first, then declared units in traversal order.
#[derive(Clone, Debug)]
pub struct Layout {
    /// All units; a unit may be empty.
    pub units: Vec<UnitLayout>,
    /// By identity: unit and position within its parameters.
    index: HashMap<ParamId, (usize, usize)>,
    /// The cells of the declared units, in the order of `units[1..]`.
    cells: Vec<Arc<UnitCell>>,
}

impl Layout {
    /// Lays out the trainable parameters of `model` for `world` ranks. Initialises lazy parameters.
    ///
    /// A parameter that stands in several units is stored once, in the root unit.
    ///
    /// # Errors
    ///
    /// [`Error::NothingToTrain`] if no float parameter requires a gradient.
    pub fn of<M: Module>(model: &M, world: usize) -> Result<Self, Error> {
        let mut collect = Collect::default();
        model.visit(&mut collect);
        if collect.found.is_empty() {
            return Err(Error::NothingToTrain);
        }
        let mut units = vec![UnitLayout::default(); collect.cells.len() + 1];
        let mut index = HashMap::new();
        for found in collect.found {
            let unit = &mut units[found.unit];
            let len = found.info.shape.iter().product::<usize>();
            let range = unit.len..unit.len + len;
            unit.len = range.end.next_multiple_of(ALIGNMENT);
            index.insert(found.id, (found.unit, unit.params.len()));
            let Found { info, aliases, .. } = found;
            unit.params.push(ParamSlot { info, aliases, range });
        }
        for unit in &mut units {
            unit.len = unit.len.next_multiple_of(world * ALIGNMENT);
        }
        Ok(Self { units, index, cells: collect.cells })
    }

    /// Unit and position of a trainable parameter; `None` for frozen parameters and buffers.
    #[must_use]
    pub(crate) fn locate(&self, id: ParamId) -> Option<(usize, usize)> {
        self.index.get(&id).copied()
    }

    /// The place of a trainable parameter.
    #[must_use]
    pub(crate) fn slot(&self, (unit, position): (usize, usize)) -> &ParamSlot {
        &self.units[unit].params[position]
    }

    pub(crate) fn cells(&self) -> &[Arc<UnitCell>] {
        &self.cells
    }

    /// All slots with the index of their unit.
    pub fn slots(&self) -> impl Iterator<Item = (usize, &ParamSlot)> {
        self.units
            .iter()
            .enumerate()
            .flat_map(|(unit, layout)| layout.params.iter().map(move |slot| (unit, slot)))
    }

    /// Elements of all trainable parameters, without padding.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.slots().map(|(_, slot)| slot.range.len()).sum()
    }

    /// A text that is equal on two ranks exactly if their layouts are.
    pub(crate) fn fingerprint(&self) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        for (unit, ParamSlot { info, aliases, range, .. }) in self.slots() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{unit} {} {:?} {aliases:?} {range:?}", info.path, info.shape);
        }
        text
    }
}

struct Found {
    unit: usize,
    info: ParamInfo,
    aliases: Vec<String>,
    id: ParamId,
}

#[derive(Default)]
struct Collect {
    path: Vec<String>,
    found: Vec<Found>,
    position: HashMap<ParamId, usize>,
    cells: Vec<Arc<UnitCell>>,
}

impl Collect {
    /// Index of the innermost unit that is being traversed.
    fn current_unit(&mut self) -> usize {
        let Some(cell) = unit::current() else { return ROOT };
        let known = self.cells.iter().position(|c| Arc::ptr_eq(c, &cell));
        1 + known.unwrap_or_else(|| {
            self.cells.push(cell);
            self.cells.len() - 1
        })
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
        if !param.is_require_grad() {
            return;
        }
        let (unit, path) = (self.current_unit(), self.path.join("."));
        if let Some(&first) = self.position.get(&param.id) {
            let found = &mut self.found[first];
            found.aliases.push(path);
            if found.unit != unit {
                found.unit = ROOT;
            }
            return;
        }
        self.position.insert(param.id, self.found.len());
        let info = ParamInfo { path, shape: param.shape().to_vec() };
        self.found.push(Found { unit, info, aliases: vec![], id: param.id });
    }
}

/// The shape of a slot as Burn has it.
pub(crate) fn shape_of(slot: &ParamSlot) -> Shape {
    Shape::from(slot.info.shape.clone())
}
