//! Weights from anywhere: safetensors, PyTorch's own files, checkpoints.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use pyroclast_kernels::numbers::Numbers;

use super::{Checkpoint, TensorFile, TorchFile, newest};
use crate::error::Error;
use crate::output::RunFolder;

/// Tensors by name, read one at a time. Clones share the files.
#[derive(Clone, Debug)]
pub enum Tensors {
    /// A safetensors file.
    Safetensors(TensorFile),
    /// A file that `torch.save` wrote.
    Torch(TorchFile),
    /// A checkpoint.
    Checkpoint(Arc<Checkpoint>),
}

impl Tensors {
    /// Opens a file, by what it begins with; or the checkpoint in a folder, or the newest of the run in it. `key` is
    /// the dictionary in a PyTorch file that holds the tensors, if it has several.
    ///
    /// # Errors
    ///
    /// [`Error::BadFile`] if it is none of these, cannot be read, or is damaged.
    pub fn open(path: &Path, key: Option<&str>) -> Result<Self, Error> {
        if path.is_dir() {
            let newest = newest(&RunFolder::at(path).checkpoints())?;
            let path = newest.unwrap_or_else(|| path.to_owned());
            return Ok(Self::Checkpoint(Arc::new(Checkpoint::open(&path)?)));
        }
        if is_safetensors(path)? {
            return Ok(Self::Safetensors(TensorFile::open(path)?));
        }
        Ok(Self::Torch(TorchFile::open(path, key)?))
    }

    /// Where they are.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Safetensors(file) => file.path(),
            Self::Torch(file) => file.path(),
            Self::Checkpoint(checkpoint) => checkpoint.path(),
        }
    }

    /// Their names, in alphabetical order.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        match self {
            Self::Safetensors(file) => file.names().collect(),
            Self::Torch(file) => file.names().collect(),
            Self::Checkpoint(checkpoint) => {
                checkpoint.manifest.tensors.keys().map(String::as_str).collect()
            }
        }
    }

    /// The shape of a tensor.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        match self {
            Self::Safetensors(file) => file.shape(name),
            Self::Torch(file) => file.shape(name),
            Self::Checkpoint(checkpoint) => {
                checkpoint.manifest.tensors.get(name).map(|tensor| &tensor.shape[..])
            }
        }
    }

    /// Reads the numbers of a tensor, in row-major order and in their own type.
    ///
    /// # Errors
    ///
    /// [`Error::BadFile`] if there is no such tensor, or if it cannot be read.
    pub fn read(&self, name: &str) -> Result<Numbers, Error> {
        match self {
            Self::Safetensors(file) => file.read(name),
            Self::Torch(file) => file.read(name),
            Self::Checkpoint(checkpoint) => {
                let numbers = checkpoint.read_all("weights", name)?;
                let missing = || Error::bad_file(self.path(), format!("there is no `{name}`"));
                numbers.ok_or_else(missing)
            }
        }
    }
}

/// Whether a file begins as safetensors do: with the length of a header that is a JSON object.
fn is_safetensors(path: &Path) -> Result<bool, Error> {
    let bad = |error: std::io::Error| Error::bad_file(path, error.to_string());
    let mut start = vec![];
    File::open(path).map_err(bad)?.take(9).read_to_end(&mut start).map_err(bad)?;
    // Whatever has no such beginning is told apart by the reader of pickles.
    let is_named = path.extension().is_some_and(|extension| extension == "safetensors");
    Ok(is_named || start.get(8) == Some(&b'{'))
}
