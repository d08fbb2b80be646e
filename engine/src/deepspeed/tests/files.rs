//! The files in `tests/deepspeed`: each right one, its three wrong ones, and those for later versions.
//!
//! `NAME.json` is right, and its first line may be `// settings: {...}`, native settings that it has.
//! `NAME.wrong-N.json` and `NAME.later.json` begin with one line `// expect: ...` for each mistake.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde_json::{Map, Value};

use super::read;

fn files() -> BTreeMap<String, String> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/deepspeed");
    let entries = fs::read_dir(folder).expect("the folder is there");
    entries
        .map(|entry| {
            let path = entry.expect("the entry can be read").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            (name, fs::read_to_string(path).expect("the file can be read"))
        })
        .collect()
}

fn is_wrong(name: &str) -> bool {
    name.contains(".wrong-") || name.contains(".later.")
}

#[test]
fn right_files_have_the_settings_that_they_name() {
    for (name, text) in files().iter().filter(|(name, _)| !is_wrong(name)) {
        let found = read(text).unwrap_or_else(|mistakes| panic!("{name}: {mistakes:#?}"));
        let first = text.lines().next().and_then(|line| line.strip_prefix("// settings: "));
        let Some(expected) = first else {
            continue;
        };
        let expected: Map<String, Value> = serde_json::from_str(expected).expect("it is JSON");
        for (key, value) in expected {
            let found = found.settings.get(&key).unwrap_or(&Value::Null);
            assert!(holds(found, &value), "{name}: {key} is {found}, not {value}");
        }
    }
}

/// Whether `found` is `expected`, or has all its entries.
fn holds(found: &Value, expected: &Value) -> bool {
    match expected.as_object() {
        Some(expected) => expected
            .iter()
            .all(|(key, expected)| found.get(key).is_some_and(|v| holds(v, expected))),
        None => found == expected,
    }
}

#[test]
fn wrong_files_have_just_the_mistakes_that_they_name() {
    for (name, text) in files().iter().filter(|(name, _)| is_wrong(name)) {
        let found = read(text).expect_err(name);
        let expected: Vec<&str> =
            text.lines().map_while(|line| line.strip_prefix("// expect: ")).collect();
        assert!(!expected.is_empty(), "{name} expects nothing");
        for part in &expected {
            assert!(found.iter().any(|found| found.contains(part)), "{name}: {part}: {found:#?}");
        }
        for mistake in &found {
            let is_expected = expected.iter().any(|part| mistake.contains(part));
            assert!(is_expected, "{name} has another mistake: {mistake}");
        }
    }
}

#[test]
fn every_right_file_has_three_wrong_ones() {
    let files = files();
    for name in files.keys().filter(|name| !is_wrong(name)) {
        let stem = name.strip_suffix(".json").expect("all files are JSON");
        for number in 1..=3 {
            let wrong = format!("{stem}.wrong-{number}.json");
            assert!(files.contains_key(&wrong), "{wrong} is missing");
        }
    }
}
