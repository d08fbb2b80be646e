//! Weights in PyTorch's names and layout.
//!
//! Burn stores a linear layer's weight as `[in, out]`, PyTorch as `[out, in]`; and Burn calls a
//! norm's weight and bias `gamma` and `beta`.

use std::collections::BTreeMap;
use std::path::Path;

use pyroclast_strategies::{ParamInfo, parameters};

use super::model::Gpt;
use crate::checkpoint::{Values, read_values, write_values};
use crate::error::Error;

/// Weights under PyTorch's names, with where they came from.
#[derive(Clone, Debug)]
pub struct TorchWeights {
    values: Values,
    origin: String,
}

impl TorchWeights {
    /// Reads a safetensors file.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] or [`Error::BadFile`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        Ok(Self { values: read_values(path)?, origin: path.display().to_string() })
    }
}

/// What a parameter is called in PyTorch, and whether its matrix is transposed there.
fn torch_name(info: &ParamInfo) -> (String, bool) {
    let (layer, name) = info.path.rsplit_once('.').unwrap_or(("", &info.path));
    let name = match name {
        "gamma" => "weight",
        "beta" => "bias",
        other => other,
    };
    let is_embedding = matches!(layer, "tok" | "pos");
    (format!("{layer}.{name}"), info.shape.len() == 2 && !is_embedding)
}

/// Gives `model` the numbers of `weights`.
///
/// # Errors
///
/// [`Error::Config`] if a weight is missing, of another shape, or unknown to the model.
pub fn from_torch(model: Gpt, weights: &TorchWeights) -> Result<Gpt, Error> {
    let mut unused: BTreeMap<&String, _> = weights.values.iter().collect();
    let mut problem = None;
    let model = parameters::write(model, |info| {
        let (name, transposed) = torch_name(info);
        let expected: Vec<usize> = match transposed {
            true => info.shape.iter().rev().copied().collect(),
            false => info.shape.clone(),
        };
        match unused.remove(&name) {
            Some((shape, values)) if *shape == expected => Some(match transposed {
                true => transpose(values, shape[0], shape[1]),
                false => values.clone(),
            }),
            Some((shape, _)) => {
                let wrong = format!("`{name}` has shape {shape:?}, but the model has {expected:?}");
                problem.get_or_insert(wrong);
                None
            }
            None => {
                problem.get_or_insert(format!("`{name}` is missing"));
                None
            }
        }
    })?;
    let unknown = || unused.keys().next().map(|name| format!("the model has no `{name}`"));
    match problem.or_else(unknown) {
        Some(problem) => Err(Error::setting("init_from", format!("{}: {problem}", weights.origin))),
        None => Ok(model),
    }
}

/// Writes the weights of `model` as safetensors.
///
/// # Errors
///
/// [`Error::Io`] if the file cannot be written.
pub fn save_torch(model: &Gpt, path: &Path) -> Result<(), Error> {
    let mut entries = Vec::new();
    for mut named in parameters::read(model)? {
        let (name, transposed) = torch_name(&named.info);
        if let (true, [rows, columns]) = (transposed, &mut named.info.shape[..]) {
            named.values = transpose(&named.values, *rows, *columns);
            std::mem::swap(rows, columns);
        }
        entries.push((name, named));
    }
    let entries: Vec<_> = entries
        .iter()
        .map(|(name, named)| (name.clone(), named.info.shape.clone(), &named.values[..]))
        .collect();
    write_values(path, &entries)
}

/// A row-major matrix of `rows` rows, transposed.
fn transpose(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
}
