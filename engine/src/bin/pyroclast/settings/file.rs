//! Settings from a file: TOML, JSON or YAML by its extension, with all of its mistakes at once.

use std::fmt;
use std::path::Path;

use pyroclast::config::explain;
use pyroclast::{Error, Mistake};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::{KEYS, Settings};
use crate::misuse;

/// Keys of a resolved configuration that follow from others.
const DERIVED: [&str; 4] = ["world", "initial_weights", "sources", "notes"];

/// The settings of a file by name. Those that are null are left out.
///
/// # Errors
///
/// [`Error::Config`] with every unknown key and every value of a wrong type.
pub(super) fn read(path: &Path) -> Result<Map<String, Value>, Error> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| misuse("config", format!("{}: {error}", path.display())))?;
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("toml");
    parse(extension, &text, path)
}

fn parse(extension: &str, text: &str, path: &Path) -> Result<Map<String, Value>, Error> {
    let refuse = |problem: String| misuse("config", format!("{}: {problem}", path.display()));
    let one_line = |error: String| refuse(error.lines().collect::<Vec<_>>().join(" "));
    let read = match extension {
        "json" => serde_json::from_str::<Unique>(text).map_err(|error| one_line(error.to_string())),
        "yaml" | "yml" => {
            serde_yaml_ng::from_str::<Unique>(text).map_err(|error| one_line(error.to_string()))
        }
        "toml" => toml::from_str::<Unique>(text).map_err(|error| one_line(error.to_string())),
        other => {
            Err(refuse(format!("`.{other}` is no kind of file that is read; use toml, json, yaml")))
        }
    };
    let settings = match read?.0 {
        Value::Object(settings) => settings,
        Value::Null => Map::new(),
        other => return Err(refuse(format!("expected settings by name, found {other}"))),
    };
    let settings: Map<String, Value> = settings
        .into_iter()
        .filter(|(key, value)| !value.is_null() && !DERIVED.contains(&key.as_str()))
        .collect();
    let mistakes: Vec<Mistake> =
        settings.iter().filter_map(|(key, value)| mistake(key, value, path)).collect();
    if mistakes.is_empty() { Ok(settings) } else { Err(Error::Config(mistakes)) }
}

/// What is wrong with one setting.
fn mistake(key: &str, value: &Value, path: &Path) -> Option<Mistake> {
    if !KEYS.contains(&key) {
        return Some(unknown(key, path));
    }
    let alone = Value::Object(Map::from_iter([(key.to_owned(), value.clone())]));
    let error = serde_json::from_value::<Settings>(alone).err()?;
    let problem = explain(&error.to_string());
    Some(Mistake::new(key, format!("{value} in {}: {problem}", path.display())))
}

fn unknown(key: &str, file: &Path) -> Mistake {
    let wanted = key.replace('-', "_");
    let likeness = |known: &&&str| strsim::jaro_winkler(known, &wanted);
    let nearest = KEYS.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    let nearest = nearest.copied().unwrap_or_default();
    let problem = format!("unknown key in {}; did you mean `{nearest}`?", file.display());
    Mistake::new(key, problem)
}

/// A value in which no key stands twice: the second would silently win.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ReadUnique).map(Self)
    }
}

struct ReadUnique;

impl<'de> Visitor<'de> for ReadUnique {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        // No setting may be NaN or infinite, and JSON has no such numbers: the text is of a wrong type.
        let number = serde_json::Number::from_f64(value);
        Ok(number.map_or_else(|| value.to_string().into(), Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = vec![];
        while let Some(Unique(value)) = items.next_element()? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some((key, Unique(value))) = entries.next_entry::<String, Unique>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("`{key}` stands there twice")));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_as(extension: &str, text: &str) -> Result<Map<String, Value>, Error> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(format!("run.{extension}"));
        std::fs::write(&path, text).expect("a file");
        read(&path)
    }

    #[test]
    fn three_languages_say_the_same() {
        let toml = "lr = 0.5\nmax_steps = 7\n[strategy.fsdp]\nlimit_all_gathers = false\n";
        let json = r#"{"lr": 0.5, "max_steps": 7, "max_epochs": null, "world": 2,
                       "strategy": {"fsdp": {"limit_all_gathers": false}}}"#;
        let yaml =
            "lr: 0.5 # a comment\nmax_steps: 7\nstrategy:\n  fsdp:\n    limit_all_gathers: false\n";
        let expected = read_as("toml", toml).expect("TOML");
        assert_eq!(expected["lr"], 0.5);
        assert_eq!(read_as("json", json).expect("JSON"), expected);
        for extension in ["yaml", "yml"] {
            assert_eq!(read_as(extension, yaml).expect("YAML"), expected);
        }
        assert_eq!(read_as("yaml", "").expect("nothing"), Map::new());
    }

    #[test]
    fn all_mistakes_of_a_file_are_reported_together() {
        let toml = "lr = \"fast\"\nmax_stepz = 7\ndevices = -1\nstrategy = { fsdp = { x = 1 } }\n";
        let Err(Error::Config(mistakes)) = read_as("toml", toml) else { panic!("four mistakes") };
        let said: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
        assert_eq!(said.len(), 4, "{said:?}");
        for expected in [
            "lr: \"fast\"",
            "did you mean `max_steps`?",
            "devices: -1",
            "unknown `x`; did you mean",
        ] {
            assert!(said.iter().any(|said| said.contains(expected)), "{expected}: {said:?}");
        }
    }

    #[test]
    fn no_text_makes_a_parser_panic() {
        let valid = [
            ("toml", "lr = 0.5\nmax_steps = 7\n[strategy.fsdp]\nlimit_all_gathers = false\n"),
            ("json", r#"{"lr": 0.5, "strategy": {"zero": {"stage": 2}}, "device_mesh": [1, 2]}"#),
            ("yaml", "lr: 0.5 # a comment\nstrategy:\n  fsdp:\n    limit_all_gathers: false\n"),
        ];
        // A linear congruential generator is all the randomness that this needs.
        let mut state = 1u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % below
        };
        for (extension, text) in valid {
            for _ in 0..2_000 {
                let mut bytes = text.as_bytes().to_vec();
                for _ in 0..1 + random(4) {
                    match random(3) {
                        0 => bytes.truncate(random(bytes.len() + 1)),
                        1 => bytes.insert(random(bytes.len() + 1), random(256) as u8),
                        _ if bytes.is_empty() => {}
                        _ => {
                            let at = random(bytes.len());
                            bytes[at] = random(256) as u8;
                        }
                    }
                }
                let _ = parse(extension, &String::from_utf8_lossy(&bytes), Path::new("a file"));
            }
        }
    }

    #[test]
    fn files_that_say_nothing_certain_are_refused() {
        for (extension, text, expected) in [
            ("json", r#"{"lr": 1, "lr": 2}"#, "`lr` stands there twice"),
            ("json", r#"{"strategy": {"fsdp": {}, "fsdp": {}}}"#, "`fsdp` stands there twice"),
            ("toml", "lr = 1\nlr = 2", "duplicate key"),
            ("yaml", "lr: 1\nlr: 2", "twice"),
            ("yaml", "- lr", "expected settings by name"),
            ("json", "[1]", "expected settings by name"),
            ("json", "{", "EOF"),
            ("ini", "lr=1", "`.ini` is no kind of file"),
        ] {
            let error = read_as(extension, text).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
