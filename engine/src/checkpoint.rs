//! Checkpoints: one folder each, written whole or not at all, by all ranks together.
//!
//! ```text
//! checkpoints/step-00001000/
//!     rank-00000.safetensors   what rank 0 holds of every parameter and state: `<of>/<path>/<first element>`
//!     rank-00001.safetensors   what rank 1 holds
//!     checkpoint.json          the manifest: shapes and types by path, checksums by file, step, configuration
//! ```
//!
//! Each rank writes its own shards, and no rank gathers another's. Pieces are known by path and range, so a
//! checkpoint can be read by any number of ranks under any strategy. Everything is written under a temporary
//! name, synced, and renamed; the manifest comes last. A crash leaves at most a folder whose name starts with a
//! dot, which is never read. Numbers are verified as they are read. `docs/checkpoint-format.md` has every byte.

mod disk;
mod export;
mod keep;
mod lookup;
mod manifest;
mod pickle;
mod read;
mod rewrite;
mod source;
mod tensors;
mod write;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use pyroclast_kernels::numbers::{Float, Slice};
use safetensors::tensor::{Dtype, TensorView};
use sha2::{Digest, Sha256};

#[cfg(test)]
pub(crate) use self::disk::faults;
pub(crate) use self::export::export;
pub use self::keep::{CheckpointConfig, Kept};
pub(crate) use self::keep::{Keeper, Moment, Scores, name};
pub(crate) use self::lookup::{Lookup, Stored, transpose};
pub use self::manifest::{FORMAT, FileEntry, Manifest, TensorEntry};
pub use self::pickle::TorchFile;
pub use self::read::Checkpoint;
pub(crate) use self::rewrite::import;
pub use self::rewrite::reshard;
pub use self::source::Tensors;
pub use self::tensors::TensorFile;
pub(crate) use self::write::{Draft, Shard, Written, remove};
use crate::error::Error;

/// Bytes that have a checksum of their own.
pub const BLOCK: usize = 4 << 20;

/// A tensor to write: name, shape, numbers.
pub(crate) type Entry<'a> = (String, Vec<usize>, Slice<'a>);

/// The newest checkpoint under `folder`, if there is one: that of the highest step.
///
/// # Errors
///
/// [`Error::Io`] if the folder exists but cannot be read.
pub fn newest(folder: &Path) -> Result<Option<PathBuf>, Error> {
    Ok(by_step(folder)?.pop().map(|(_, path)| path))
}

/// The checkpoints under `folder` and their steps, the newest last.
pub(crate) fn by_step(folder: &Path) -> Result<Vec<(u64, PathBuf)>, Error> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => return Err(Error::io("reading", folder)(error)),
    };
    let mut found = vec![];
    for entry in entries {
        let entry = entry.map_err(Error::io("reading", folder))?;
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let name = entry.file_name().to_string_lossy().into_owned();
        // What is not complete has a name that starts with a dot.
        if !is_folder || name.starts_with('.') {
            continue;
        }
        let step = match name.strip_prefix("step-").and_then(|step| step.parse::<u64>().ok()) {
            Some(step) => Some(step),
            // Its name may be anything; a folder without a manifest is none.
            None => Manifest::read(&entry.path()).ok().map(|manifest| manifest.step),
        };
        found.extend(step.map(|step| (step, entry.path())));
    }
    found.sort();
    Ok(found)
}

/// Writes named numbers as safetensors, synced to the disk.
pub(crate) fn write_values(path: &Path, entries: &[Entry<'_>]) -> Result<(), Error> {
    let views = entries
        .iter()
        .map(|(name, shape, values)| {
            let dtype = match values.float() {
                Float::F64 => Dtype::F64,
                Float::F32 => Dtype::F32,
                Float::F16 => Dtype::F16,
                Float::BF16 => Dtype::BF16,
            };
            Ok((name.as_str(), TensorView::new(dtype, shape.clone(), values.as_bytes())?))
        })
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>();
    views
        .and_then(|views| safetensors::serialize_to_file(views, None, path))
        .map_err(|error| Error::io("writing", path)(io::Error::other(error)))?;
    sync(path)
}

/// The SHA-256 of a file, in hexadecimal.
///
/// # Errors
///
/// [`Error::Io`].
pub fn checksum(path: &Path) -> Result<String, Error> {
    let mut file = File::open(path).map_err(Error::io("opening", path))?;
    let mut hasher = Sha256::new();
    io::copy(&mut file, &mut hasher).map_err(Error::io("reading", path))?;
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Waits until a file or folder is on the disk.
fn sync(path: &Path) -> Result<(), Error> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::io("syncing", path))
}

#[cfg(test)]
mod tests;
