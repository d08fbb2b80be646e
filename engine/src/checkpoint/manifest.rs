//! `checkpoint.json`: everything that is known of a checkpoint but its numbers.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use pyroclast_precision::ScalerState;
use serde::{Deserialize, Serialize};

use super::{BLOCK, Kept};
use crate::error::Error;

/// The version of the format that is written and read.
pub const FORMAT: u32 = 4;

/// The file's name.
pub(crate) const NAME: &str = "checkpoint.json";

/// Longest manifest that is read, in bytes.
const MAX_BYTES: u64 = 1 << 30;

/// What is known of a checkpoint before its numbers are read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the format.
    pub format: u32,
    /// Steps taken, skipped ones included.
    pub step: u64,
    /// Steps that were skipped because gradients overflowed.
    pub skipped: u64,
    /// The loss scale, where the precision has one.
    pub scaler: Option<ScalerState>,
    /// Samples consumed by all ranks.
    pub samples: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Samples of the training data.
    pub dataset_len: u64,
    /// What callbacks want to know again, by their keys.
    pub callbacks: BTreeMap<String, serde_json::Value>,
    /// Checkpoints of the run that are kept, this one included, and how good they are.
    pub kept: Vec<Kept>,
    /// Checkpoints that are removed once this one is there: after a crash some may be left.
    pub replaced: Vec<String>,
    /// Whether each machine has its own ranks' files alone.
    pub node_local: bool,
    /// Ranks that wrote it, each a file.
    pub world: usize,
    /// The resolved configuration of the run that wrote it.
    pub config: serde_json::Value,
    /// Parameters and buffers by path.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// Files by name.
    pub files: BTreeMap<String, FileEntry>,
}

/// A parameter or buffer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Further paths at which the same parameter stands.
    pub aliases: Vec<String>,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Type of its numbers, such as `f32`.
    pub dtype: String,
    /// Types of the optimizer's states of it, by name; none for what is not trained.
    pub states: BTreeMap<String, String>,
}

/// A file of numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its length.
    pub bytes: u64,
    /// SHA-256 of each [`BLOCK`] bytes, and of the rest, in hexadecimal.
    pub blocks: Vec<String>,
}

impl TensorEntry {
    /// Elements of the parameter.
    #[must_use]
    pub fn num_elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size))
    }

    /// The type of `of`: the weights, or a state.
    pub(super) fn dtype_of(&self, of: &str) -> Option<&str> {
        if of == "weights" { Some(&self.dtype) } else { self.states.get(of).map(String::as_str) }
    }
}

impl Manifest {
    /// Reads the manifest of the checkpoint in `folder`, and checks that it makes sense by itself.
    ///
    /// # Errors
    ///
    /// [`Error::BadFile`].
    pub fn read(folder: &Path) -> Result<Self, Error> {
        let path = folder.join(NAME);
        let bad = |problem: String| Error::bad_file(&path, problem);
        let file = File::open(&path).map_err(|error| bad(error.to_string()))?;
        let mut text = vec![];
        // One byte more than there may be tells that there are more.
        let read = file.take(MAX_BYTES + 1).read_to_end(&mut text);
        read.map_err(|error| bad(error.to_string()))?;
        if text.len() as u64 > MAX_BYTES {
            return Err(bad(format!("has more than {MAX_BYTES} bytes")));
        }
        // Another format may have other fields, so it is looked at alone before.
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let version: Version = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
        if version.format != FORMAT {
            let found = version.format;
            return Err(bad(format!("format {found}; this version reads format {FORMAT}")));
        }
        let manifest: Self = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
        manifest.check().map_err(bad)?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        if self.skipped > self.step {
            return Err(format!("{} of {} steps were skipped", self.skipped, self.step));
        }
        let expected: Vec<String> =
            (0..self.world.min(self.files.len() + 1)).map(file_of).collect();
        if !self.files.keys().eq(expected.iter()) {
            let names: Vec<&str> = self.files.keys().map(String::as_str).collect();
            return Err(format!("{} ranks wrote the files {}", self.world, names.join(", ")));
        }
        for (name, FileEntry { bytes, blocks }) in &self.files {
            if bytes.div_ceil(BLOCK as u64) != blocks.len() as u64 {
                return Err(format!("`{name}` has {bytes} bytes and {} blocks", blocks.len()));
            }
        }
        // They will be removed, so they must be names of folders beside this one.
        let is_name = |name: &&String| {
            !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
        };
        if let Some(name) = self.replaced.iter().find(|name| !is_name(name)) {
            return Err(format!("it has replaced `{name}`, which is no checkpoint's name"));
        }
        match self.tensors.iter().find(|(_, tensor)| tensor.num_elements().is_none()) {
            Some((path, tensor)) => Err(format!("`{path}` has the shape {:?}", tensor.shape)),
            None => Ok(()),
        }
    }
}

/// The file of a rank.
pub(crate) fn file_of(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}
