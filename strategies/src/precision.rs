//! In which types the units of a model keep their numbers.

use pyroclast_precision::{Precision, Types};

use crate::error::Error;
use crate::policy::{PolicyPurpose, UnitFacts, UnitPolicy};

/// The types of a model's units. Parameters outside of units compute in the type in which they are stored:
/// nothing converts what they are combined with.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitTypes {
    /// Of all units that have no types of their own.
    pub types: Types,
    /// Units with types of their own, such as norms that stay in `f32`. The last one that applies to a unit
    /// counts. The units must be stored by themselves.
    pub overrides: Vec<(UnitPolicy, Types)>,
}

/// All in `f32`.
pub(crate) static ALL_F32: UnitTypes =
    UnitTypes { types: Precision::F32True.types(), overrides: vec![] };

impl Default for UnitTypes {
    /// All in `f32`.
    fn default() -> Self {
        ALL_F32.clone()
    }
}

impl From<Types> for UnitTypes {
    fn from(types: Types) -> Self {
        Self { types, overrides: vec![] }
    }
}

impl UnitTypes {
    /// Whether some unit computes in another type than it is stored in.
    pub(crate) fn has_masters(&self) -> bool {
        let overrides = self.overrides.iter().map(|(_, types)| types);
        overrides.chain([&self.types]).any(Types::has_masters)
    }

    /// The types of each declared unit. `stored` says which of them are stored by themselves.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownUnits`] if an override names what there is not, [`Error::TypesWithoutUnit`] if it names
    /// a unit that is stored with the one around it.
    pub(crate) fn of_units(
        &self,
        units: &[UnitFacts],
        stored: &[bool],
    ) -> Result<Vec<Types>, Error> {
        let mut all = vec![self.types; units.len()];
        for (policy, types) in &self.overrides {
            let chosen = policy.choose(PolicyPurpose::Precision, units)?;
            for (unit, of_unit) in all.iter_mut().enumerate().filter(|(unit, _)| chosen[*unit]) {
                if !stored[unit] {
                    let unit = units[unit].path().unwrap_or_default();
                    return Err(Error::TypesWithoutUnit { unit });
                }
                *of_unit = *types;
            }
        }
        Ok(all)
    }
}
