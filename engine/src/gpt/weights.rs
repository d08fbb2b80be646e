//! Weights from elsewhere and for others, in PyTorch's names and layout or in Burn's.
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
use serde_json::{Map, Value};

use super::config::GptConfig;
use super::model::Gpt;
use crate::checkpoint::{self, Checkpoint, Lookup, Stored, Tensors, transpose, write_values};
use crate::error::Error;

/// Whose names and layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// PyTorch's.
    Torch,
    /// Burn's own.
    Burn,
}

impl Layout {
    fn stored(self, info: &ParamInfo) -> Stored {
        match self {
            Self::Torch => torch(info),
            Self::Burn => Stored { name: info.path.clone(), transposed: false },
        }
    }
}

/// Weights to begin with, read when they are needed.
#[derive(Clone, Debug)]
pub struct InitialWeights {
    tensors: Tensors,
    layout: Layout,
}

impl InitialWeights {
    /// Opens a file in PyTorch's layout, of safetensors or one that `torch.save` wrote; or a checkpoint, by its folder
    /// or its run's.
    ///
    /// # Errors
    ///
    /// [`Error::BadFile`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let tensors = Tensors::open(path, None)?;
        let layout = match tensors {
            Tensors::Checkpoint(_) => Layout::Burn,
            Tensors::Safetensors(_) | Tensors::Torch(_) => Layout::Torch,
        };
        Ok(Self { tensors, layout })
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
pub fn initialise(model: Gpt, weights: &InitialWeights) -> Result<Gpt, Error> {
    let (model, _) = found(model, &weights.tensors, weights.layout)
        .map_err(|problem| Error::setting("init_from", problem))?;
    Ok(model)
}

/// Makes a checkpoint at `to` of weights alone, which can be trained from, generated with and exported. Sizes are read
/// off the weights; `heads` they do not tell.
///
/// # Errors
///
/// [`Error::Config`] if they are not of a GPT or if there is something at `to`; [`Error::BadFile`]; [`Error::Io`].
pub fn import(tensors: &Tensors, layout: Layout, heads: usize, to: &Path) -> Result<(), Error> {
    let config = sizes(tensors, heads).map_err(|problem| Error::setting("from", problem))?;
    if let Some(mistake) = config.mistakes().into_iter().next() {
        return Err(Error::Config(vec![mistake]));
    }
    // Nothing of it is allocated.
    let model = Gpt::new(&config, &Device::flex());
    let (_, params) =
        found(model, tensors, layout).map_err(|problem| Error::setting("from", problem))?;
    let config = serde_json::to_value(config).unwrap_or_default();
    checkpoint::import(tensors, &params, config, to)
}

/// As [`import`], of any model, in Burn's names and layout, of which nothing else is known.
///
/// # Errors
///
/// As [`import`].
pub fn import_burn(tensors: &Tensors, to: &Path) -> Result<(), Error> {
    let params = tensors.names().into_iter().map(|name| {
        let shape = tensors.shape(name).unwrap_or_default().to_vec();
        let info = ParamInfo { path: name.to_owned(), shape };
        let stored = Layout::Burn.stored(&info);
        (info, stored)
    });
    checkpoint::import(tensors, &params.collect::<Vec<_>>(), Value::Object(Map::new()), to)
}

/// Sizes of the GPT that weights are of.
fn sizes(tensors: &Tensors, heads: usize) -> Result<GptConfig, String> {
    let matrix = |name: &str| match tensors.shape(name) {
        Some(&[rows, columns]) => Ok([rows, columns]),
        Some(shape) => Err(format!("`{name}` has shape {shape:?}, which is no matrix")),
        None => Err(match tensors.names().into_iter().find(|inner| inner.ends_with(name)) {
            Some(inner) => format!(
                "there is no `{name}`, but `{inner}`; name the dictionary that it is in with key"
            ),
            None => format!("there is no `{name}`, so these are not a GPT's weights"),
        }),
    };
    let [context, width] = matrix("pos.weight")?;
    let block = |name: &str| name.strip_prefix("blocks.")?.split('.').next()?.parse::<usize>().ok();
    let last = tensors.names().into_iter().filter_map(block).max();
    Ok(GptConfig { layers: last.map_or(0, |last| last.saturating_add(1)), heads, width, context })
}

/// The model, with the weights' numbers to come, and where each parameter's are.
fn found(
    model: Gpt,
    tensors: &Tensors,
    layout: Layout,
) -> Result<(Gpt, Vec<(ParamInfo, Stored)>), String> {
    let lookup = Lookup::new(tensors, |info: &ParamInfo| layout.stored(info));
    let mut read = ReadLazily { lookup, tensors, path: vec![], found: vec![] };
    let model = model.map(&mut read);
    let ReadLazily { lookup, found, .. } = read;
    let problem = |problem| format!("{}: {problem}", tensors.path().display());
    lookup.finish().map(|()| (model, found)).map_err(problem)
}

/// Makes parameters lazy, with a file's numbers to come.
struct ReadLazily<'a, F> {
    lookup: Lookup<'a, F>,
    tensors: &'a Tensors,
    path: Vec<String>,
    found: Vec<(ParamInfo, Stored)>,
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
        self.found.push((info.clone(), stored.clone()));
        let tensors = self.tensors.clone();
        let read = move |device: &Device, requires_grad: bool| {
            // A parameter cannot return an error: whoever runs the rank reports it.
            let numbers = stored.read_wide(&tensors);
            let numbers = numbers.unwrap_or_else(|error| resume_unwind(Box::new(error)));
            let shape = Shape::from(info.shape.clone());
            interop::tensor(numbers.as_slice(), shape, device).set_require_grad(requires_grad)
        };
        // All parameters of a GPT are trained.
        Param::uninitialized(param.id, read, device, true, shape)
    }
}

/// Writes a checkpoint's weights to `path`, a tensor at a time: in their own types, or all in `float`. PyTorch's layout is
/// that of a GPT.
///
/// # Errors
///
/// [`Error::BadFile`] if the checkpoint is damaged, [`Error::Io`] if the file cannot be written.
pub fn export(
    checkpoint: &Checkpoint,
    path: &Path,
    layout: Layout,
    float: Option<Float>,
) -> Result<(), Error> {
    checkpoint::export(checkpoint, path, float, |info| layout.stored(info))
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
