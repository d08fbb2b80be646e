//! How one level of the file is read: which keys were, and what is wrong with their values.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::{Translation, refused};
use crate::error::Mistake;

/// What the translation has come to so far.
#[derive(Debug)]
pub(super) struct Report {
    mistakes: Vec<Mistake>,
    translation: Translation,
}

impl Report {
    pub(super) fn new(mistakes: Vec<Mistake>) -> Self {
        Self { mistakes, translation: Translation::default() }
    }

    pub(super) fn mistake(&mut self, path: impl Into<String>, problem: impl Into<String>) {
        self.mistakes.push(Mistake::new(path, problem));
    }

    pub(super) fn note(&mut self, note: impl Into<String>) {
        self.translation.notes.push(note.into());
    }

    pub(super) fn into_translation(self) -> Result<Translation, Vec<Mistake>> {
        if self.mistakes.is_empty() { Ok(self.translation) } else { Err(self.mistakes) }
    }
}

/// Whether names are told apart by their case.
#[derive(Clone, Copy, Debug)]
pub(super) enum Case {
    Exact,
    Any,
}

/// One level of the file. A value that is null or `"auto"` counts as not given.
pub(super) struct Section<'file, 'run> {
    values: &'file Map<String, Value>,
    path: String,
    known: Vec<&'static str>,
    report: &'run mut Report,
}

impl<'file, 'run> Section<'file, 'run> {
    pub(super) fn root(values: &'file Map<String, Value>, report: &'run mut Report) -> Self {
        Self { values, path: String::new(), known: Vec::new(), report }
    }

    /// The path of `key` in the file.
    pub(super) fn at(&self, key: &str) -> String {
        join(&self.path, key)
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// How many mistakes there are so far, in the whole file.
    pub(super) fn mistakes(&self) -> usize {
        self.report.mistakes.len()
    }

    pub(super) fn mistake(&mut self, key: &str, problem: impl Into<String>) {
        self.report.mistake(join(&self.path, key), problem);
    }

    pub(super) fn mistake_at(&mut self, path: impl Into<String>, problem: impl Into<String>) {
        self.report.mistake(path, problem);
    }

    pub(super) fn note(&mut self, note: impl Into<String>) {
        self.report.note(note);
    }

    /// Gives the native setting `native` a value that `key` stands for.
    pub(super) fn emit(&mut self, native: &str, value: impl Into<Value>, key: &str) {
        self.emit_from(native, value, self.at(key));
    }

    /// Gives the native setting `native` a value whose origin takes words.
    pub(super) fn emit_from(&mut self, native: &str, value: impl Into<Value>, source: String) {
        self.report.translation.settings.insert(native.to_owned(), value.into());
        self.report.translation.sources.insert(native.to_owned(), source);
    }

    /// The native setting `native`, if it was given a value.
    pub(super) fn emitted(&self, native: &str) -> Option<&Value> {
        self.report.translation.settings.get(native)
    }

    /// Whether `key` is there, whatever its value.
    pub(super) fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    pub(super) fn is_auto(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(|value| value == "auto")
    }

    /// The value of `key`, which is known from here on.
    pub(super) fn value(&mut self, key: &'static str) -> Option<&'file Value> {
        self.known.push(key);
        self.values.get(key).filter(|value| !value.is_null() && *value != "auto")
    }

    pub(super) fn bool(&mut self, key: &'static str) -> Option<bool> {
        let value = self.value(key)?;
        if value.as_bool().is_none() {
            self.mistake(
                key,
                format!("{value} is not a switch; write true or false{}", bare(value)),
            );
        }
        value.as_bool()
    }

    pub(super) fn integer(&mut self, key: &'static str, range: RangeInclusive<i64>) -> Option<i64> {
        let value = self.value(key)?;
        let Some(integer) = whole(value) else {
            let wanted = if value.is_f64() { "a whole number (of 64 bits)" } else { "a number" };
            self.mistake(key, format!("{value} is not {wanted}{}", bare(value)));
            return None;
        };
        if range.contains(&integer) {
            return Some(integer);
        }
        let limit = match *range.end() {
            i64::MAX => format!("the least is {}", range.start()),
            end => format!("choose {} to {end}", range.start()),
        };
        self.mistake(key, format!("{value} is out of range; {limit}"));
        None
    }

    pub(super) fn number(&mut self, key: &'static str, range: RangeInclusive<f64>) -> Option<f64> {
        let value = self.value(key)?;
        let Some(number) = value.as_f64() else {
            self.mistake(key, format!("{value} is not a number{}", bare(value)));
            return None;
        };
        if range.contains(&number) {
            return Some(number);
        }
        let limit = match (*range.start(), *range.end()) {
            (start, f64::MAX) => format!("the least is {start}"),
            (start, end) => format!("choose {start} to {end}"),
        };
        self.mistake(key, format!("{value} is out of range; {limit}"));
        None
    }

    pub(super) fn text(&mut self, key: &'static str) -> Option<&'file str> {
        let value = self.value(key)?;
        if value.as_str().is_none() {
            self.mistake(key, format!("{value} is not text; put it in quotes"));
        }
        value.as_str()
    }

    /// The one of `choices` that the value is, in whatever case.
    pub(super) fn choice(
        &mut self,
        key: &'static str,
        choices: &[&'static str],
    ) -> Option<&'static str> {
        let found = self.text(key)?;
        let choice = choices.iter().copied().find(|choice| choice.eq_ignore_ascii_case(found));
        if choice.is_none() {
            self.mistake(key, format!("\"{found}\" is none of {}", choices.join(", ")));
        }
        choice
    }

    /// The `type` that decides how the rest of the section is read, one of `known` or `later`.
    pub(super) fn kind(
        &mut self,
        case: Case,
        known: &[&'static str],
        later: &[&'static str],
    ) -> Option<&'static str> {
        let there_are = format!("there are {}", known.join(", "));
        if self.value("type").is_none() {
            self.mistake("type", format!("is missing; {there_are}"));
            return None;
        }
        let name = self.text("type")?;
        let is = |candidate: &&&'static str| match case {
            Case::Exact => **candidate == name,
            Case::Any => candidate.eq_ignore_ascii_case(name),
        };
        if let Some(kind) = known.iter().find(is) {
            return Some(kind);
        }
        let problem = if later.iter().any(|candidate| is(&candidate)) {
            format!("\"{name}\" is not in this version; {there_are}")
        } else {
            let known = known.iter().chain(later).copied();
            let hint = nearest(name, known).map(|nearest| format!("did you mean \"{nearest}\"? "));
            format!("\"{name}\" is unknown; {}{there_are}", hint.unwrap_or_default())
        };
        self.mistake("type", problem);
        None
    }

    pub(super) fn bool_or(&mut self, key: &'static str, default: bool) -> bool {
        let found = self.bool(key);
        self.or(key, found, default)
    }

    pub(super) fn integer_or(
        &mut self,
        key: &'static str,
        range: RangeInclusive<i64>,
        default: i64,
    ) -> i64 {
        let found = self.integer(key, range);
        self.or(key, found, default)
    }

    pub(super) fn number_or(
        &mut self,
        key: &'static str,
        range: RangeInclusive<f64>,
        default: f64,
    ) -> f64 {
        let found = self.number(key, range);
        self.or(key, found, default)
    }

    fn or<T: Display>(&mut self, key: &str, found: Option<T>, default: T) -> T {
        if self.is_auto(key) {
            let path = self.at(key);
            self.note(format!("`{path}` is \"auto\", which became {default}"));
        }
        found.unwrap_or(default)
    }

    /// The section inside this one.
    pub(super) fn section(&mut self, key: &'static str) -> Option<Section<'file, '_>> {
        let value = self.value(key)?;
        let path = self.at(key);
        let Some(values) = value.as_object() else {
            self.mistake(key, format!("{value} is not a section; write {{...}}"));
            return None;
        };
        Some(Section { values, path, known: Vec::new(), report: self.report })
    }

    /// The section inside this one, empty where there is none.
    pub(super) fn section_or_empty(&mut self, key: &'static str) -> Section<'file, '_> {
        static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);
        let path = self.at(key);
        let value = self.value(key);
        let values = value.and_then(Value::as_object);
        if let (Some(value), None) = (value, values) {
            self.mistake(key, format!("{value} is not a section; write {{...}}"));
        }
        let values = values.unwrap_or(&EMPTY);
        Section { values, path, known: Vec::new(), report: self.report }
    }

    /// `key`, or the other name that it goes by if the file uses that one.
    pub(super) fn renamed(&mut self, key: &'static str, other: &'static str) -> &'static str {
        if !self.has(other) {
            return key;
        }
        let path = self.at(key);
        if self.has(key) {
            self.value(key);
            self.mistake(
                other,
                format!("is another name of `{path}`, which is given, too; keep one"),
            );
        } else {
            let name = self.at(other);
            self.note(format!("`{name}` is read as `{path}`, its present name"));
        }
        other
    }

    /// Reports the keys that nothing has read.
    pub(super) fn finish(self) {
        let unread = self.values.iter().filter(|(key, _)| !self.known.contains(&key.as_str()));
        for (key, value) in unread {
            let path = join(&self.path, key);
            match refused::row(&path) {
                Some(row) => row.judge(&path, value, self.report),
                None => {
                    let known = self.known.iter().copied().chain(refused::keys_of(&self.path));
                    self.report.mistake(path, unknown(key, known));
                }
            }
        }
    }
}

pub(super) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// What is wrong with a key that is none of `known`.
pub(super) fn unknown<'k>(key: &str, known: impl Iterator<Item = &'k str>) -> String {
    match nearest(key, known) {
        Some(nearest) => format!("unknown key; did you mean `{nearest}`?"),
        None => "unknown key; remove it".to_owned(),
    }
}

/// The one of `known` that `name` is most like, if it is like any.
pub(super) fn nearest<'k>(name: &str, known: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    let likeness = |known: &str| strsim::jaro_winkler(known, name);
    let nearest = known.max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    nearest.filter(|nearest| likeness(nearest) > 0.7)
}

/// A number that is whole, in whatever notation: `5e8` is 500000000.
fn whole(value: &Value) -> Option<i64> {
    let exact = 2f64.powi(63);
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && (-exact..exact).contains(&number)).then_some(number as i64)
    })
}

/// The hint for text that would do without its quotes.
fn bare(value: &Value) -> &'static str {
    let inside = value.as_str().map(serde_json::from_str::<Value>);
    match inside {
        Some(Ok(Value::Bool(_) | Value::Number(_))) => "; take it out of its quotes",
        _ => "",
    }
}
