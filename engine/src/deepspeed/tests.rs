//! What the translation accepts, refuses and survives.

mod batches;
mod documented;
mod files;
mod noise;
mod settings;
mod text;

use serde_json::Value;

use super::{Context, Translation, translate};

/// Translates for two ranks and a model of unknown width.
fn read(text: &str) -> Result<Translation, Vec<String>> {
    read_with(text, &Context { world: 2, hidden_size: None })
}

fn read_with(text: &str, context: &Context) -> Result<Translation, Vec<String>> {
    translate(text, context)
        .map_err(|mistakes| mistakes.iter().map(ToString::to_string).collect::<Vec<_>>())
}

/// The native setting `key` of a file that is right.
fn setting(text: &str, key: &str) -> Value {
    let translation = read(text).unwrap_or_else(|mistakes| panic!("{text}: {mistakes:?}"));
    translation.settings.get(key).cloned().unwrap_or_default()
}

/// The mistakes of a file that is wrong.
fn mistakes(text: &str) -> Vec<String> {
    read(text).expect_err("the file is wrong")
}

/// Asserts that `text` has just the mistakes that begin so.
#[track_caller]
fn assert_mistakes(text: &str, expected: &[&str]) {
    let found = mistakes(text);
    let fits = |(found, expected): (&String, &&str)| found.starts_with(*expected);
    let fits = found.len() == expected.len() && found.iter().zip(expected).all(fits);
    assert!(fits, "{text}: {found:#?}");
}

/// Asserts that a note of the file contains `part`.
#[track_caller]
fn assert_note(text: &str, part: &str) {
    let notes = read(text).unwrap_or_else(|mistakes| panic!("{text}: {mistakes:?}")).notes;
    assert!(notes.iter().any(|note| note.contains(part)), "{text}: {notes:#?}");
}
