//! Precision policies by name, and the types of numbers that they stand for.

use std::fmt;
use std::str::FromStr;

use pyroclast_kernels::numbers::Float;

/// Which numbers parameters, gradients and optimizer state are kept and computed in, by Lightning's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// `32-true`: everything in `f32`.
    #[default]
    F32True,
    /// `64-true`: everything in `f64`.
    F64True,
    /// `16-mixed`: units compute in `f16`, with master weights in `f32` and a loss scale.
    F16Mixed,
    /// `bf16-mixed`: units compute in `bf16`, with master weights in `f32`.
    BF16Mixed,
    /// `16-true`: everything in `f16`, but for the optimizer's state and arithmetic; with a loss scale.
    F16True,
    /// `bf16-true`: everything in `bf16`, but for the optimizer's state and arithmetic. New weights are
    /// rounded stochastically.
    BF16True,
}

/// The types of a unit's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Types {
    /// What the optimizer steps, and what is saved: master weights, where units compute in another type.
    pub params: Float,
    /// What a unit computes in: its weights, and its inputs, which are converted.
    pub compute: Float,
    /// What gradients are accumulated, and summed over ranks, in.
    pub reduce: Float,
    /// What a unit's outputs are converted to.
    pub output: Float,
    /// Running statistics.
    pub buffers: Float,
}

impl Default for Types {
    /// All `f32`.
    fn default() -> Self {
        Self::all(Float::F32)
    }
}

impl Types {
    /// All of one type, which must not be of 16 bits.
    const fn all(float: Float) -> Self {
        Self { params: float, compute: float, reduce: float, output: float, buffers: float }
    }

    /// Weights of 16 bits beside master weights. What lies outside of units sees `f32` alone.
    const fn mixed(compute: Float) -> Self {
        Self { compute, ..Self::all(Float::F32) }
    }

    /// Weights of 16 bits without master weights.
    const fn half(float: Float) -> Self {
        Self { reduce: Float::F32, ..Self::all(float) }
    }

    /// Whether weights are kept in two types: master weights, and a copy to compute with.
    #[must_use]
    pub fn has_masters(&self) -> bool {
        self.compute != self.params
    }

    /// What the optimizer's state is kept, and its arithmetic done, in.
    #[must_use]
    pub fn state(&self) -> Float {
        if self.params == Float::F64 { Float::F64 } else { Float::F32 }
    }

    /// The same for parameters outside of units, where nothing converts inputs: they compute in the type
    /// that they are stored in.
    #[must_use]
    pub fn outside_units(self) -> Self {
        Self { compute: self.params, output: self.params, ..self }
    }
}

/// Why a precision name was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrecisionError {
    /// A known policy that this version cannot run.
    #[error("precision `{0}` is not in this version; there are {all}", all = names())]
    NotInThisVersion(String),
    /// No policy has this name.
    #[error("unknown precision `{0}`; there are {all}", all = names())]
    Unknown(String),
    /// No type has this name.
    #[error("unknown type `{0}`; there are {all}", all = Float::ALL.map(Float::name).join(", "))]
    UnknownType(String),
}

/// Names that Lightning knows and this version does not build.
const NOT_YET: [&str; 2] = ["transformer-engine", "transformer-engine-float16"];

fn names() -> String {
    Precision::ALL.map(Precision::name).join(", ")
}

impl Precision {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::F32True,
        Self::F64True,
        Self::F16Mixed,
        Self::BF16Mixed,
        Self::F16True,
        Self::BF16True,
    ];

    /// The policy's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32True => "32-true",
            Self::F64True => "64-true",
            Self::F16Mixed => "16-mixed",
            Self::BF16Mixed => "bf16-mixed",
            Self::F16True => "16-true",
            Self::BF16True => "bf16-true",
        }
    }

    /// The types that it stands for.
    #[must_use]
    pub const fn types(self) -> Types {
        match self {
            Self::F32True => Types::all(Float::F32),
            Self::F64True => Types::all(Float::F64),
            Self::F16Mixed => Types::mixed(Float::F16),
            Self::BF16Mixed => Types::mixed(Float::BF16),
            Self::F16True => Types::half(Float::F16),
            Self::BF16True => Types::half(Float::BF16),
        }
    }

    /// Whether gradients are so small in its numbers that the loss is scaled up.
    #[must_use]
    pub fn scales_loss(self) -> bool {
        self.types().compute == Float::F16
    }
}

impl FromStr for Precision {
    type Err = PrecisionError;

    fn from_str(name: &str) -> Result<Self, PrecisionError> {
        // Lightning's short names.
        let name = match name {
            "32" => "32-true",
            "64" => "64-true",
            "16" => "16-mixed",
            "bf16" => "bf16-mixed",
            name => name,
        };
        match Self::ALL.into_iter().find(|precision| precision.name() == name) {
            Some(precision) => Ok(precision),
            None if NOT_YET.contains(&name) => {
                Err(PrecisionError::NotInThisVersion(name.to_owned()))
            }
            None => Err(PrecisionError::Unknown(name.to_owned())),
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The type of that name: `f64`, `f32`, `f16` or `bf16`, or DeepSpeed's `fp64`, `fp32`, `fp16`.
///
/// # Errors
///
/// [`PrecisionError::UnknownType`].
pub fn type_named(name: &str) -> Result<Float, PrecisionError> {
    let own = name.strip_prefix("fp").map(|bits| format!("f{bits}"));
    let own = own.as_deref().unwrap_or(name);
    let found = Float::ALL.into_iter().find(|float| float.name() == own);
    found.ok_or_else(|| PrecisionError::UnknownType(name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_or_refused_with_what_there_is() {
        for precision in Precision::ALL {
            assert_eq!(precision.name().parse(), Ok(precision));
        }
        assert_eq!("bf16".parse(), Ok(Precision::BF16Mixed));
        assert_eq!("16".parse(), Ok(Precision::F16Mixed));
        for name in NOT_YET {
            let refused = PrecisionError::NotInThisVersion(name.to_owned());
            assert_eq!(name.parse::<Precision>(), Err(refused));
        }
        let unknown = "31".parse::<Precision>().expect_err("no such precision").to_string();
        let all = "32-true, 64-true, 16-mixed, bf16-mixed, 16-true, bf16-true";
        assert_eq!(unknown, format!("unknown precision `31`; there are {all}"));
        assert_eq!(type_named("fp16"), Ok(Float::F16));
        assert_eq!(type_named("bf16"), Ok(Float::BF16));
        let unknown = type_named("f8").expect_err("no such type").to_string();
        assert_eq!(unknown, "unknown type `f8`; there are f64, f32, f16, bf16");
    }

    #[test]
    fn only_mixed_policies_keep_master_weights() {
        for precision in Precision::ALL {
            let types = precision.types();
            assert_eq!(types.has_masters(), precision.name().ends_with("mixed"), "{precision}");
            assert!(!types.outside_units().has_masters());
            assert!(!types.reduce.is_half() && !types.state().is_half());
            assert_eq!(precision.scales_loss(), precision.name().starts_with("16"));
        }
    }
}
