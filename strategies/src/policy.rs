//! Which of a model's declared units something applies to.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// Which declared units are chosen: those that are stored and communicated by themselves, say, or those
/// that recompute their activations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum UnitPolicy {
    /// Every one.
    #[default]
    All,
    /// None.
    None,
    /// Those whose block is of one of these types, such as `Block`.
    Types(Vec<String>),
    /// Those with at least so many elements in their parameters, units inside them included.
    MinParams(usize),
    /// Those whose parameters all stand below one of these paths, such as `blocks.0`.
    Paths(Vec<String>),
}

/// What is known of a declared unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnitFacts {
    /// Name of the block's type, without its module and parameters.
    pub(crate) type_name: &'static str,
    /// Paths of all float parameters below.
    pub(crate) paths: Vec<String>,
    /// Elements of trainable parameters below.
    pub(crate) elements: usize,
}

impl UnitPolicy {
    /// Which of the units are chosen for `purpose`.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownUnits`] if a type or path is none of any unit.
    pub(crate) fn choose(
        &self,
        purpose: PolicyPurpose,
        units: &[UnitFacts],
    ) -> Result<Vec<bool>, Error> {
        let known_or =
            |what, asked: &[String], known: &[String], is_known: &dyn Fn(&str) -> bool| match asked
                .iter()
                .find(|name| !is_known(name))
            {
                None => Ok(()),
                Some(name) => {
                    let (name, known) = (name.clone(), known.join(", "));
                    Err(Error::UnknownUnits { purpose, what, name, known })
                }
            };

        let by = |chosen: &dyn Fn(&UnitFacts) -> bool| units.iter().map(chosen).collect();
        match self {
            Self::All => Ok(by(&|_| true)),
            Self::None => Ok(by(&|_| false)),
            Self::MinParams(least) => Ok(by(&|unit| unit.elements >= *least)),
            Self::Types(names) => {
                let mut known: Vec<String> =
                    units.iter().map(|unit| unit.type_name.to_owned()).collect();
                known.sort_unstable();
                known.dedup();
                known_or("type", names, &known, &|name| known.iter().any(|known| known == name))?;
                Ok(by(&|unit| names.iter().any(|name| name == unit.type_name)))
            }
            Self::Paths(paths) => {
                let below = |path: &str, unit: &UnitFacts| {
                    let inside = |param: &String| {
                        param.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'))
                    };
                    !unit.paths.is_empty() && unit.paths.iter().all(inside)
                };
                let known: Vec<String> = units.iter().filter_map(UnitFacts::path).collect();
                let is_known = |path: &str| units.iter().any(|unit| below(path, unit));
                known_or("path", paths, &known, &is_known)?;
                Ok(by(&|unit| paths.iter().any(|path| below(path, unit))))
            }
        }
    }
}

impl UnitFacts {
    /// The path below which all its parameters stand.
    pub(crate) fn path(&self) -> Option<String> {
        let segments = |path: &str| path.split('.').map(str::to_owned).collect::<Vec<_>>();
        let mut common = segments(self.paths.first()?);
        common.pop();
        for path in &self.paths {
            let path = segments(path);
            let same = common.iter().zip(&path).take_while(|(a, b)| a == b).count();
            common.truncate(same);
        }
        Some(common.join("."))
    }
}

/// What a policy decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyPurpose {
    /// Which units are stored and communicated by themselves.
    Wrap,
    /// Which units recompute their activations.
    ActivationCheckpointing,
    /// Which units have types of their own.
    Precision,
}

impl fmt::Display for PolicyPurpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wrap => "the wrap policy",
            Self::ActivationCheckpointing => "activation checkpointing",
            Self::Precision => "precision overrides",
        })
    }
}

/// As [`FromStr`] reads it.
impl fmt::Display for UnitPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::None => f.write_str("none"),
            Self::Types(names) => write!(f, "types={}", names.join(",")),
            Self::MinParams(least) => write!(f, "min_params={least}"),
            Self::Paths(paths) => write!(f, "paths={}", paths.join(",")),
        }
    }
}

impl FromStr for UnitPolicy {
    type Err = String;

    /// Reads `all`, `none`, `types=Block,Head`, `paths=blocks.0,head` or `min_params=100000`.
    fn from_str(text: &str) -> Result<Self, String> {
        let list = |names: &str| -> Option<Vec<String>> {
            let named = |name: &str| Some(name.trim().to_owned()).filter(|name| !name.is_empty());
            names.split(',').map(named).collect()
        };
        let policy = match text.split_once('=') {
            None if text == "all" => Some(Self::All),
            None if text == "none" => Some(Self::None),
            Some(("types", names)) => list(names).map(Self::Types),
            Some(("paths", paths)) => list(paths).map(Self::Paths),
            Some(("min_params", least)) => least.trim().parse().ok().map(Self::MinParams),
            _ => None,
        };
        policy.ok_or_else(|| {
            format!(
                "`{text}` chooses no units; use all, none, types=A,B, paths=a.b,c or min_params=N"
            )
        })
    }
}

/// The last part of a type's name, without its parameters: `Block` of `my::model::Block<2>`.
pub(crate) fn short_type_name<T: ?Sized>() -> &'static str {
    let name = std::any::type_name::<T>();
    let name = &name[..name.find('<').unwrap_or(name.len())];
    name.rsplit("::").next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units() -> Vec<UnitFacts> {
        let unit = |type_name, path: &str, elements| UnitFacts {
            type_name,
            paths: vec![format!("{path}.weight"), format!("{path}.bias")],
            elements,
        };
        vec![unit("Block", "blocks.1", 10), unit("Head", "head", 5), unit("Block", "blocks.10", 20)]
    }

    #[test]
    fn units_are_chosen_by_type_size_and_path() {
        let wrap = PolicyPurpose::Wrap;
        let choose = |policy: UnitPolicy| policy.choose(wrap, &units()).expect("a known choice");
        assert_eq!(choose(UnitPolicy::All), [true, true, true]);
        assert_eq!(choose(UnitPolicy::None), [false, false, false]);
        assert_eq!(choose(UnitPolicy::Types(vec!["Block".into()])), [true, false, true]);
        assert_eq!(choose(UnitPolicy::MinParams(10)), [true, false, true]);
        assert_eq!(choose(UnitPolicy::Paths(vec!["blocks.1".into()])), [true, false, false]);
        assert_eq!(choose(UnitPolicy::Paths(vec!["blocks".into()])), [true, false, true]);
    }

    #[test]
    fn what_no_unit_is_called_is_refused_with_what_there_is() {
        let unknown = UnitPolicy::Types(vec!["Blok".into()]);
        let unknown = unknown.choose(PolicyPurpose::Wrap, &units());
        let text = unknown.expect_err("no such type").to_string();
        assert!(text.contains("`Blok`") && text.contains("Block, Head"), "{text}");
        let unknown = UnitPolicy::Paths(vec!["blocks.2".into()]);
        let unknown = unknown.choose(PolicyPurpose::Wrap, &units());
        let text = unknown.expect_err("no such path").to_string();
        assert!(text.contains("there are blocks.1, head, blocks.10"), "{text}");
    }

    #[test]
    fn policies_are_read_as_they_are_written() {
        for text in ["all", "none", "types=A,B", "paths=blocks.0", "min_params=100"] {
            assert_eq!(
                text.parse::<UnitPolicy>().map(|policy| policy.to_string()),
                Ok(text.into())
            );
        }
        for text in ["", "some", "min_params=-1", "type=A", "types=", "types=A,", "paths="] {
            assert!(text.parse::<UnitPolicy>().expect_err("no policy").contains(text));
        }
    }

    #[test]
    fn types_are_known_by_their_last_name() {
        assert_eq!(short_type_name::<Vec<Option<u8>>>(), "Vec");
        assert_eq!(short_type_name::<UnitFacts>(), "UnitFacts");
    }
}
