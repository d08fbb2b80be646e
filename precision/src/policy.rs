//! Precision policies by name.

use std::str::FromStr;

/// Which numbers parameters, gradients and optimizer state are kept and computed in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// `32-true`: everything in `f32`.
    #[default]
    F32True,
}

/// Names that Lightning knows and this version does not build yet.
const NOT_YET: [&str; 5] = ["16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"];

/// Why a precision name was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrecisionError {
    /// A known policy that this version cannot run.
    #[error("precision `{0}` is not in this version; use `32-true`")]
    NotInThisVersion(String),
    /// No policy has this name.
    #[error("unknown precision `{0}`; this version has `32-true`")]
    Unknown(String),
}

impl Precision {
    /// The policy's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32True => "32-true",
        }
    }
}

impl FromStr for Precision {
    type Err = PrecisionError;

    fn from_str(name: &str) -> Result<Self, PrecisionError> {
        match name {
            "32-true" | "32" => Ok(Self::F32True),
            _ if NOT_YET.contains(&name) => Err(PrecisionError::NotInThisVersion(name.to_owned())),
            _ => Err(PrecisionError::Unknown(name.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_or_refused() {
        assert_eq!("32-true".parse(), Ok(Precision::F32True));
        assert_eq!("32".parse(), Ok(Precision::F32True));
        for name in NOT_YET {
            let refused = PrecisionError::NotInThisVersion(name.to_owned());
            assert_eq!(name.parse::<Precision>(), Err(refused));
        }
        assert_eq!("31".parse::<Precision>(), Err(PrecisionError::Unknown("31".to_owned())));
    }
}
