//! Weights in PyTorch's names and layout.
//!
//! Burn stores a linear layer's weight as `[in, out]`, PyTorch as `[out, in]`; and Burn calls a
//! norm's weight and bias `gamma` and `beta`.

use std::path::Path;

use pyroclast_strategies::ParamInfo;
use pyroclast_strategies::parameters::{self, NamedValues};

use super::model::Gpt;
use crate::checkpoint::{Stored, Values, fill, read_values, transpose, write_values};
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
fn torch(info: &ParamInfo) -> Stored {
    let (layer, name) = info.path.rsplit_once('.').unwrap_or(("", &info.path));
    let name = match name {
        "gamma" => "weight",
        "beta" => "bias",
        other => other,
    };
    let is_embedding = matches!(layer, "tok" | "pos");
    Stored { name: format!("{layer}.{name}"), transposed: info.shape.len() == 2 && !is_embedding }
}

/// Gives `model` the numbers of `weights`.
///
/// # Errors
///
/// [`Error::Config`] if a weight is missing, of another shape, or unknown to the model.
pub fn from_torch(model: Gpt, weights: &TorchWeights) -> Result<Gpt, Error> {
    fill(model, &weights.values, torch)
        .map_err(|problem| Error::setting("init_from", format!("{}: {problem}", weights.origin)))
}

/// Writes the weights of `model` as safetensors: whole or not at all.
///
/// # Errors
///
/// [`Error::Io`] if the file cannot be written.
pub fn save_torch(model: &Gpt, path: &Path) -> Result<(), Error> {
    let mut stored = Vec::new();
    for NamedValues { info, values, .. } in parameters::read(model)? {
        let Stored { name, transposed } = torch(&info);
        stored.push(match (transposed, &info.shape[..]) {
            (true, &[rows, columns]) => {
                (name, vec![columns, rows], transpose(&values, rows, columns))
            }
            _ => (name, info.shape, values),
        });
    }
    let entries: Vec<_> = stored
        .iter()
        .map(|(name, shape, values)| (name.clone(), shape.clone(), &values[..]))
        .collect();
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".partial");
    let temporary = Path::new(&temporary);
    write_values(temporary, &entries)?;
    std::fs::rename(temporary, path).map_err(Error::io("renaming", temporary))
}
