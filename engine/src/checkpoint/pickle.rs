//! PyTorch's own files, `.pt` and `.pth`: pickles, of which nothing is executed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pyroclast_kernels::numbers::{Float, Numbers};
use pytorch_reader::{DType, PytorchReader, Tensor};

use crate::error::Error;

/// An open file that `torch.save` wrote. Clones share it. Big-endian files are refused.
#[derive(Clone, Debug)]
pub struct TorchFile(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    path: PathBuf,
    tensors: BTreeMap<String, (Float, Tensor)>,
}

impl TorchFile {
    /// Opens a file, and reads which tensors there are: all of it, by their paths through its dictionaries, or those
    /// of the dictionary at `key`.
    ///
    /// # Errors
    ///
    /// [`Error::BadFile`] if it cannot be read, is damaged, or has tensors of another type than [`Float`] names.
    pub fn open(path: &Path, key: Option<&str>) -> Result<Self, Error> {
        let bad = |problem: String| Error::bad_file(path, problem);
        let reader = match key {
            Some(key) => PytorchReader::with_top_level_key(path, key),
            None => PytorchReader::new(path),
        };
        let reader = reader.map_err(|error| bad(error.to_string()))?;
        let mut tensors = BTreeMap::new();
        for (name, tensor) in reader.into_tensors() {
            let float = float_of(tensor.dtype()).ok_or_else(|| {
                let dtype = tensor.dtype();
                bad(format!("`{name}` is {dtype:?}; this version reads F64, F32, F16, BF16"))
            })?;
            tensors.insert(name, (float, tensor));
        }
        Ok(Self(Arc::new(Opened { path: path.to_owned(), tensors })))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0.path
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.tensors.keys().map(String::as_str)
    }

    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.0.tensors.get(name).map(|(_, tensor)| tensor.shape())
    }

    pub(super) fn read(&self, name: &str) -> Result<Numbers, Error> {
        let bad = |problem: String| Error::bad_file(&self.0.path, problem);
        let (float, tensor) =
            self.0.tensors.get(name).ok_or_else(|| bad(format!("there is no `{name}`")))?;
        let bytes = tensor.read().map_err(|error| bad(error.to_string()))?;
        let mut numbers = Numbers::zeros(*float, tensor.num_elements());
        numbers.as_mut().as_bytes().copy_from_slice(&bytes);
        Ok(numbers)
    }
}

fn float_of(dtype: DType) -> Option<Float> {
    match dtype {
        DType::F64 => Some(Float::F64),
        DType::F32 => Some(Float::F32),
        DType::F16 => Some(Float::F16),
        DType::BF16 => Some(Float::BF16),
        _ => None,
    }
}
