//! Weights in PyTorch's names and layout.
//!
//! Burn stores a linear layer's weight as `[in, out]`, PyTorch as `[out, in]`; and Burn calls a
//! norm's weight and bias `gamma` and `beta`.

use std::panic::resume_unwind;
use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Shape, Tensor};
use pyroclast_kernels::interop;
use pyroclast_kernels::numbers::Float;
use pyroclast_strategies::ParamInfo;
use pyroclast_strategies::parameters::{self, NamedValues};

use super::model::Gpt;
use crate::checkpoint::{Checkpoint, Lookup, Stored, TensorFile, export, transpose, write_values};
use crate::error::Error;

/// Weights under PyTorch's names, read from a safetensors file when they are needed.
#[derive(Clone, Debug)]
pub struct TorchWeights(TensorFile);

impl TorchWeights {
    /// Opens a safetensors file.
    ///
    /// # Errors
    ///
    /// [`Error::BadFile`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        Ok(Self(TensorFile::open(path)?))
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

/// Makes the numbers of `weights` those of `model`. A parameter's are read when it is first used, which is
/// on one rank alone where several train.
///
/// # Errors
///
/// [`Error::Config`] if a weight is missing, of another shape, or unknown to the model.
pub fn from_torch(model: Gpt, weights: &TorchWeights) -> Result<Gpt, Error> {
    let file = &weights.0;
    let mut read = ReadLazily { lookup: Lookup::new(file, torch), file, path: vec![] };
    let model = model.map(&mut read);
    let origin = file.path().display();
    let fits = read.lookup.finish();
    fits.map_err(|problem| Error::setting("init_from", format!("{origin}: {problem}")))?;
    Ok(model)
}

/// Makes parameters lazy, with a file's numbers to come.
struct ReadLazily<'a, F> {
    lookup: Lookup<'a, F>,
    file: &'a TensorFile,
    path: Vec<String>,
}

impl<F: Fn(&ParamInfo) -> Stored> ModuleMapper for ReadLazily<'_, F> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (shape, device) = (param.lazy_shape(), param.lazy_device());
        let info = ParamInfo { path: self.path.join("."), shape: shape.to_vec() };
        let Some(stored) = self.lookup.find(&info) else { return param };
        let file = self.file.clone();
        let read = move |device: &Device, requires_grad: bool| {
            // A parameter cannot return an error: whoever runs the rank reports it.
            let numbers = stored.read(&file).unwrap_or_else(|error| resume_unwind(Box::new(error)));
            let shape = Shape::from(info.shape.clone());
            interop::tensor(numbers.as_slice(), shape, device).set_require_grad(requires_grad)
        };
        // All parameters of a GPT are trained.
        Param::uninitialized(param.id, read, device, true, shape)
    }
}

/// Writes the weights of a GPT's checkpoint to `path` under PyTorch's names and in its layout, a tensor at a time: in
/// their own types, or all in `float`.
///
/// # Errors
///
/// [`Error::BadFile`] if the checkpoint is damaged, [`Error::Io`] if the file cannot be written.
pub fn export_torch(
    checkpoint: &Checkpoint,
    path: &Path,
    float: Option<Float>,
) -> Result<(), Error> {
    export(checkpoint, path, float, torch)
}

/// As [`export_torch`], with Burn's paths and layout; of any model.
///
/// # Errors
///
/// As [`export_torch`].
pub fn export_burn(
    checkpoint: &Checkpoint,
    path: &Path,
    float: Option<Float>,
) -> Result<(), Error> {
    let own = |info: &ParamInfo| Stored { name: info.path.clone(), transposed: false };
    export(checkpoint, path, float, own)
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
        .map(|(name, shape, values)| (name.clone(), shape.clone(), values.as_slice()))
        .collect();
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".partial");
    let temporary = Path::new(&temporary);
    write_values(temporary, &entries)?;
    std::fs::rename(temporary, path).map_err(Error::io("renaming", temporary))
}
