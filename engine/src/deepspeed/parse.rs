//! The text of a DeepSpeed file as a tree: JSON with comments and trailing commas, no key twice.

use std::cell::RefCell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::Mistake;

/// A file that is JSON.
#[derive(Debug)]
pub(super) struct Parsed {
    /// Settings by name.
    pub(super) settings: Map<String, Value>,
    /// Keys that stand twice in one section.
    pub(super) duplicates: Vec<Mistake>,
}

/// The settings in `text`.
pub(super) fn parse(text: &str) -> Result<Parsed, Mistake> {
    let refuse = |problem: String| Mistake::new("deepspeed", problem);
    let plain = strip(text.trim_start_matches('\u{feff}')).map_err(refuse)?;
    if !plain.trim_start().starts_with('{') {
        let problem = "the file does not begin with `{`; a DeepSpeed file is JSON (base64, which \
                       DeepSpeed also reads, is not supported)";
        return Err(refuse(problem.to_owned()));
    }
    let duplicates = RefCell::default();
    let mut json = serde_json::Deserializer::from_str(&plain);
    let read = Unique { path: String::new(), duplicates: &duplicates }
        .deserialize(&mut json)
        .and_then(|value| json.end().map(|()| value));
    match read.map_err(|error| refuse(one_line(&error)))? {
        Value::Object(settings) => Ok(Parsed { settings, duplicates: duplicates.into_inner() }),
        other => Err(refuse(format!("expected settings by name, found {other}"))),
    }
}

fn one_line(error: &serde_json::Error) -> String {
    error.to_string().lines().collect::<Vec<_>>().join(" ")
}

/// Where the state machine of [`strip`] is.
enum State {
    Plain,
    Text,
    /// After a backslash in text.
    Escape,
    LineComment,
    /// In a comment that began on this line.
    BlockComment(usize),
}

/// `text` with blanks for comments and trailing commas, so that lines and columns stay the same.
fn strip(text: &str) -> Result<String, String> {
    let mut plain: Vec<char> = Vec::with_capacity(text.len());
    let mut state = State::Plain;
    let mut line = 1;
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        line += usize::from(character == '\n');
        let blank = if character == '\n' { '\n' } else { ' ' };
        let next = characters.peek().copied();
        let (kept, after) = match (state, character) {
            (State::Plain, '"') => (character, State::Text),
            (State::Plain, '#') => (' ', State::LineComment),
            (State::Plain, '/') if next == Some('/') => (' ', State::LineComment),
            (State::Plain, '/') if next == Some('*') => {
                characters.next();
                plain.push(' ');
                (' ', State::BlockComment(line))
            }
            (State::Plain, '}' | ']') => {
                drop_trailing_comma(&mut plain);
                (character, State::Plain)
            }
            (State::Plain, _) => (character, State::Plain),
            (State::Text, '\\') => (character, State::Escape),
            (State::Text, '"') => (character, State::Plain),
            (State::Text | State::Escape, _) => (character, State::Text),
            (State::LineComment, '\n') => ('\n', State::Plain),
            (State::LineComment, _) => (' ', State::LineComment),
            (State::BlockComment(_), '*') if next == Some('/') => {
                characters.next();
                plain.push(' ');
                (' ', State::Plain)
            }
            (State::BlockComment(begin), _) => (blank, State::BlockComment(begin)),
        };
        plain.push(kept);
        state = after;
    }
    match state {
        State::BlockComment(begin) => {
            Err(format!("the comment that begins on line {begin} does not end; close it with `*/`"))
        }
        _ => Ok(plain.into_iter().collect()),
    }
}

/// Blanks the comma before a closing bracket, unless no value is before it.
fn drop_trailing_comma(plain: &mut [char]) {
    let mut before = plain.iter_mut().rev().filter(|character| !character.is_whitespace());
    let Some(comma) = before.next().filter(|last| **last == ',') else {
        return;
    };
    if before.next().is_some_and(|value| !matches!(value, '[' | '{' | ',' | ':')) {
        *comma = ' ';
    }
}

/// Reads a value and notes keys that stand twice: the second would silently win.
struct Unique<'a> {
    path: String,
    duplicates: &'a RefCell<Vec<Mistake>>,
}

impl Unique<'_> {
    fn inside(&self, key: &str) -> Self {
        let path = match self.path.as_str() {
            "" => key.to_owned(),
            path => format!("{path}.{key}"),
        };
        Self { path, duplicates: self.duplicates }
    }
}

impl<'de> DeserializeSeed<'de> for Unique<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique<'_> {
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

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number is not finite"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) =
            sequence.next_element_seed(self.inside(&values.len().to_string()))?
        {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut values = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if key.is_empty() {
                return Err(A::Error::custom("a key is empty"));
            }
            let inside = self.inside(&key);
            let path = inside.path.clone();
            let value = entries.next_value_seed(inside)?;
            if let Some(first) = values.get(&key) {
                let problem = format!("stands twice, as {first} and as {value}; keep one");
                self.duplicates.borrow_mut().push(Mistake::new(path, problem));
            } else {
                values.insert(key, value);
            }
        }
        Ok(values.into())
    }
}
