//! A DeepSpeed file (`ds_config.json`) in Pyroclast's own settings.
//!
//! What DeepSpeed's file says is honoured or refused, never ignored: [`translate`] gives every mistake
//! of the file at once, under DeepSpeed's own names, and notes on what the file leaves to defaults.
//! Where DeepSpeed's documentation and its code differ, the code is followed.
//!
//! In reading order: `parse` (text to a tree), `section` (how one level is read), one file for each
//! group of sections, and `refused` (the table of everything that is not in this version).

pub mod batch;
mod monitors;
mod offload;
mod optimizer;
mod parse;
mod precision;
mod refused;
mod scheduler;
mod section;
mod sections;
#[cfg(test)]
mod tests;
mod zero;

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use self::section::{Report, Section};
use crate::error::Mistake;

/// What the translation has to know of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// Number of ranks.
    pub world: usize,
    /// Width of the model, from which the bucket sizes that are `"auto"` follow.
    pub hidden_size: Option<usize>,
}

/// A DeepSpeed file in native settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Translation {
    /// Native settings by name.
    pub settings: Map<String, Value>,
    /// Where each native setting comes from, as a path in the DeepSpeed file.
    pub sources: BTreeMap<String, String>,
    /// What the user should know: what `"auto"` became, which defaults apply because the file is
    /// DeepSpeed's, and which keys have no effect and why.
    pub notes: Vec<String>,
}

/// Translates the text of a DeepSpeed file.
///
/// # Errors
///
/// All mistakes of the file. Their settings are paths in it, such as `zero_optimization.stage`, or
/// `deepspeed` for text that is not JSON.
pub fn translate(text: &str, context: &Context) -> Result<Translation, Vec<Mistake>> {
    let parsed = parse::parse(text).map_err(|mistake| vec![mistake])?;
    let mut report = Report::new(parsed.duplicates);
    let mut file = Section::root(&parsed.settings, &mut report);
    batch::read(&mut file, context.world);
    optimizer::read(&mut file);
    scheduler::read(&mut file);
    precision::read(&mut file);
    zero::read(&mut file, context.hidden_size);
    sections::read(&mut file);
    monitors::read(&mut file);
    file.finish();
    report.into_translation()
}
