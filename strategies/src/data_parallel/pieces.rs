//! A run's numbers in pieces: each rank's own part of every parameter, by path and range. Written so, they can
//! be read again by ranks that share the work in any other way.

use std::ops::Range;

use burn::module::Module;
use pyroclast_kernels::flat::FlatTensor;
use pyroclast_kernels::numbers::{Float, Numbers, Slice};

use super::DataParallel;
use super::agree::told;
use crate::error::Error;
use crate::layout::{Kind, ParamInfo, ParamSlot};
use crate::parameters;
use crate::run::Run;
use crate::shard::shard;
use crate::stage::Stage;
use crate::weights::hollow_out;

/// What a piece is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PieceOf {
    /// A parameter, or a buffer: master weights, where there are some.
    Weights,
    /// One of the optimizer's states of a parameter, as torch names it.
    State(&'static str),
}

impl PieceOf {
    /// `weights`, or the state's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::State(name) => name,
        }
    }
}

/// Some of the numbers of one parameter.
#[derive(Clone, Debug)]
pub struct Piece<'a> {
    /// What they are.
    pub of: PieceOf,
    /// Of which parameter.
    pub info: &'a ParamInfo,
    /// Further paths at which it stands.
    pub aliases: &'a [String],
    /// Which of its elements, in row-major order.
    pub range: Range<usize>,
    /// As many as the range has.
    pub values: Slice<'a>,
}

/// Where a run's numbers come from. A parameter's are asked for by ranges of its elements, and each range once.
pub trait Pieces {
    /// The numbers of a range; none if there are none.
    ///
    /// # Errors
    ///
    /// Any error; it is passed on.
    fn read(
        &mut self,
        of: PieceOf,
        info: &ParamInfo,
        range: Range<usize>,
    ) -> Result<Option<Numbers>, Error>;
}

impl<F> Pieces for F
where
    F: FnMut(PieceOf, &ParamInfo, Range<usize>) -> Result<Option<Numbers>, Error>,
{
    fn read(
        &mut self,
        of: PieceOf,
        info: &ParamInfo,
        range: Range<usize>,
    ) -> Result<Option<Numbers>, Error> {
        self(of, info, range)
    }
}

impl DataParallel {
    /// Hands this rank's own part of the run to `each`: of every parameter and of the optimizer's state the
    /// elements in its shard, whether or not it holds others; and on rank 0 what the model holds beside them. No
    /// other rank is needed. What one rank has no other has, and together they have everything.
    ///
    /// # Errors
    ///
    /// [`Error::Read`] if a device fails.
    pub fn own_pieces<M: Module>(
        &self,
        model: &M,
        mut each: impl FnMut(Piece<'_>),
    ) -> Result<(), Error> {
        let Run { layout, group, .. } = &*self.run;
        for unit in 0..layout.units.len() {
            for kind in Kind::ALL {
                let (slots, len) = layout.units[unit].buffer(kind);
                let own = shard(len, group.world(), group.rank());
                if own.is_empty() {
                    // Parameters of no elements are in no shard.
                    if group.rank() == 0 && len == 0 {
                        slots.iter().for_each(|slot| self.empty_pieces(kind, slot, &mut each));
                    }
                    continue;
                }
                let (weights, start) = self.stored(unit, kind);
                cut(slots, &own, start, PieceOf::Weights, weights.as_slice(), &mut each);
                if kind == Kind::Trained {
                    let start = self.stage.owned(&layout.units[unit], group).start;
                    let names = self.optimizer.state_names().iter();
                    for (name, state) in names.zip(self.optimizer.state(unit)) {
                        cut(slots, &own, start, PieceOf::State(name), state.as_slice(), &mut each);
                    }
                }
            }
        }
        if group.rank() == 0 {
            for named in self.read_untrained(model)? {
                let (range, values) = (0..named.values.len(), named.values.as_slice());
                let (of, info) = (PieceOf::Weights, &named.info);
                each(Piece { of, info, aliases: &[], range, values });
            }
        }
        Ok(())
    }

    /// Path and shape of every parameter and buffer, in no certain order.
    #[must_use]
    pub fn param_infos<M: Module>(&self, model: &M) -> Vec<ParamInfo> {
        let layout = &self.run.layout;
        let stored = layout.units.iter().flat_map(|unit| unit.params.iter().chain(&unit.frozen));
        let untrained = parameters::shapes_where(model, |id| layout.stored(id).is_none());
        let untrained = untrained.into_iter().map(|named| named.info);
        stored.map(|slot| slot.info.clone()).chain(untrained).collect()
    }

    fn empty_pieces(&self, kind: Kind, slot: &ParamSlot, each: &mut impl FnMut(Piece<'_>)) {
        let states: &[&'static str] =
            if kind == Kind::Trained { self.optimizer.state_names() } else { &[] };
        let of = [PieceOf::Weights].into_iter().chain(states.iter().map(|n| PieceOf::State(n)));
        for of in of {
            let (info, aliases, values) = (&slot.info, &slot.aliases[..], Slice::F32(&[]));
            each(Piece { of, info, aliases, range: 0..0, values });
        }
    }

    /// What this rank stores of one of a unit's buffers as it is saved, and at which element that begins.
    fn stored(&self, unit: usize, kind: Kind) -> (Numbers, usize) {
        let Run { layout, group, .. } = &*self.run;
        let unit_layout = &layout.units[unit];
        let (_, len) = unit_layout.buffer(kind);
        match (kind, self.optimizer.masters(unit), self.gathers()) {
            (Kind::Trained, Some(masters), _) => {
                (masters.clone(), self.stage.owned(unit_layout, group).start)
            }
            (_, _, Some(gathers)) => {
                (gathers.own_part(unit, kind), shard(len, group.world(), group.rank()).start)
            }
            (Kind::Trained, None, None) => (self.lent[unit].trained.to_numbers(), 0),
            (Kind::Frozen, _, None) => (Numbers::default(), 0),
        }
    }

    /// Continues from saved numbers, after `steps` steps that changed the weights. Each rank asks for its own part
    /// alone, as [`Self::own_pieces`] names it; where it holds more, the others tell it. All ranks must call it.
    ///
    /// # Errors
    ///
    /// [`Error::MissingValues`], [`Error::WrongLength`], what `source` returns, or what ended a collective. The other
    /// ranks are told.
    pub fn restore<M: Module>(
        &mut self,
        model: M,
        steps: u64,
        source: &mut impl Pieces,
    ) -> Result<M, Error> {
        let run = std::sync::Arc::clone(&self.run);
        told(&run.group, self.restored(model, steps, source))
    }

    fn restored<M: Module>(
        &mut self,
        model: M,
        steps: u64,
        source: &mut impl Pieces,
    ) -> Result<M, Error> {
        self.optimizer.set_steps(steps);
        let run = std::sync::Arc::clone(&self.run);
        let Run { layout, group, device, .. } = &*run;
        let mut failed = None;
        let model = parameters::write_where(model, |id, info| {
            if layout.stored(id).is_some() || group.rank() > 0 || failed.is_some() {
                return None;
            }
            let read = read(source, PieceOf::Weights, info, 0..info.num_elements());
            read.map_err(|error| failed = Some(error)).ok()
        })?;
        failed.map_or(Ok(()), Err)?;
        let model = self.broadcast_untrained(model)?;
        let model = match self.gathers() {
            Some(gathers) => {
                gathers.forget_persistent();
                model
            }
            None => hollow_out(model, layout, device, |_| true),
        };
        for unit in 0..layout.units.len() {
            self.restore_state(unit, source)?;
            for kind in Kind::ALL {
                self.restore_weights((unit, kind), source)?;
            }
        }
        Ok(self.filled(model))
    }

    fn restore_state(&mut self, unit: usize, source: &mut impl Pieces) -> Result<(), Error> {
        let held = if self.stage == Stage::Nothing { Held::All } else { Held::Shard };
        for (position, name) in self.optimizer.state_names().iter().enumerate() {
            let float = self.optimizer.state(unit)[position].float();
            let of = (unit, Kind::Trained, PieceOf::State(name));
            let values = self.assembled(of, float, held, source)?;
            *self.optimizer.state_mut(unit, position) = values;
        }
        Ok(())
    }

    fn restore_weights(
        &mut self,
        (unit, kind): (usize, Kind),
        source: &mut impl Pieces,
    ) -> Result<(), Error> {
        let held = if self.run.is_sharded() { Held::Shard } else { Held::All };
        let types = self.run.layout.units[unit].types;
        let weights = self.assembled((unit, kind, PieceOf::Weights), types.params, held, source)?;
        let Run { layout, group, device, .. } = &*self.run;
        if kind == Kind::Trained {
            let owned = self.stage.owned(&layout.units[unit], group);
            let start = match held {
                Held::All => 0,
                Held::Shard => owned.start,
            };
            self.optimizer.set_masters(unit, weights.part(owned.start - start..owned.end - start));
        }
        match self.gathers() {
            Some(gathers) => gathers.with_shard(unit, kind, |mut shard| {
                shard.copy_from(weights.as_slice());
            }),
            None => {
                let weights = FlatTensor::new(weights.into_float(types.compute), device);
                *self.lent[unit].of_mut(kind) = weights;
            }
        }
        Ok(())
    }

    /// What this rank holds of one of a unit's buffers: it reads its own shard, and is told the others' if it holds
    /// them.
    fn assembled(
        &self,
        (unit, kind, of): (usize, Kind, PieceOf),
        float: Float,
        held: Held,
        source: &mut impl Pieces,
    ) -> Result<Numbers, Error> {
        let Run { layout, group, .. } = &*self.run;
        let (slots, len) = layout.units[unit].buffer(kind);
        let own = shard(len, group.world(), group.rank());
        let (buffer, start) = match held {
            Held::All => (len, own.start),
            Held::Shard => (own.len(), 0),
        };
        let mut numbers = Numbers::zeros(float, buffer);
        for slot in slots {
            let (of_slot, of_own) = overlap(&slot.range, &own);
            let values = read(source, of, &slot.info, of_slot)?;
            let target = start + of_own.start..start + of_own.end;
            numbers.part_mut(target).copy_from(values.as_slice());
        }
        match held {
            Held::All if len > 0 => group.all_gather_unit(unit, numbers).wait(),
            _ => Ok(numbers),
        }
    }
}

/// What a rank holds of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    All,
    Shard,
}

/// Hands the parts of `values` to `each` that are of `own`, by parameter. `values` begin at element `start` of the
/// flat buffer.
fn cut(
    slots: &[ParamSlot],
    own: &Range<usize>,
    start: usize,
    of: PieceOf,
    values: Slice<'_>,
    each: &mut impl FnMut(Piece<'_>),
) {
    for slot in slots {
        let (range, of_own) = overlap(&slot.range, own);
        let is_here =
            !range.is_empty() || (slot.range.is_empty() && own.contains(&slot.range.start));
        if is_here {
            let offset = own.start - start;
            let values = values.part(offset + of_own.start..offset + of_own.end);
            each(Piece { of, info: &slot.info, aliases: &slot.aliases, range, values });
        }
    }
}

/// What two ranges share, counted from the start of each.
fn overlap(a: &Range<usize>, b: &Range<usize>) -> (Range<usize>, Range<usize>) {
    let start = a.start.max(b.start).min(a.end.max(b.start));
    let end = a.end.min(b.end).max(start);
    match end > start {
        true => (start - a.start..end - a.start, start - b.start..end - b.start),
        false => (0..0, 0..0),
    }
}

/// The numbers of a range of a parameter.
fn read(
    source: &mut impl Pieces,
    of: PieceOf,
    info: &ParamInfo,
    range: Range<usize>,
) -> Result<Numbers, Error> {
    let expected = range.len();
    if expected == 0 && info.num_elements() > 0 {
        return Ok(Numbers::default());
    }
    let values = source.read(of, info, range)?;
    let values =
        values.ok_or_else(|| Error::MissingValues(format!("{}.{}", of.name(), info.path)))?;
    match values.len() == expected {
        true => Ok(values),
        false => {
            let (path, found) = (info.path.clone(), values.len());
            Err(Error::WrongLength { path, expected, found })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_overlap_where_they_do() {
        for (a, b, expected) in [
            (0..4, 2..8, (2..4, 0..2)),
            (2..8, 0..4, (0..2, 2..4)),
            (0..10, 3..5, (3..5, 0..2)),
            (3..5, 0..10, (0..2, 3..5)),
            (0..2, 5..9, (0..0, 0..0)),
            (5..9, 0..2, (0..0, 0..0)),
            (3..3, 0..9, (0..0, 0..0)),
        ] {
            assert_eq!(overlap(&a, &b), expected, "{a:?} {b:?}");
        }
    }
}
