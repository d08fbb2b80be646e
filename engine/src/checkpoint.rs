//! Checkpoints: one folder each, written whole or not at all.
//!
//! A checkpoint of this version holds the whole model, written by rank 0:
//!
//! ```text
//! checkpoints/step-00001000/
//!     model.safetensors        every float parameter and buffer by path, in Burn's layout
//!     optimizer.safetensors    `<state>.<path>` for each of the optimizer's states
//!     checkpoint.json          step, samples consumed, configuration, checksums
//! ```
//!
//! It is written under a temporary name, synced, and renamed, never over another; `checkpoint.json` carries the SHA-256
//! of the other files. A crash leaves at most a folder whose name starts with a dot, which is never
//! read.

mod tensors;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use burn::module::Module;
use pyroclast_kernels::each;
use pyroclast_kernels::numbers::{Float, Numbers, Slice};
use pyroclast_precision::ScalerState;
use pyroclast_strategies::{ParamInfo, parameters};
use safetensors::tensor::{Dtype, TensorView};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use self::tensors::TensorFile;
use crate::error::Error;

pub(crate) const FORMAT: u32 = 2;
const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const MANIFEST: &str = "checkpoint.json";

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
    /// The resolved configuration of the run that wrote it.
    pub config: serde_json::Value,
    /// SHA-256 of each file, in hexadecimal.
    pub checksums: BTreeMap<String, String>,
}

/// A tensor to write: name, shape, numbers.
pub(crate) type Entry<'a> = (String, Vec<usize>, Slice<'a>);

/// A checkpoint that has been opened and verified. Its numbers are read when they are asked for.
#[derive(Debug)]
pub struct Checkpoint {
    /// Everything but the numbers.
    pub manifest: Manifest,
    /// Parameters and buffers by path.
    pub model: TensorFile,
    /// Optimizer state by `<state>.<path>`.
    pub optimizer: TensorFile,
}

/// Writes a checkpoint under `folder` and returns its path. What a failure leaves behind is removed.
pub(crate) fn save(
    folder: &Path,
    manifest: Manifest,
    model: &[Entry<'_>],
    optimizer: &[Entry<'_>],
) -> Result<PathBuf, Error> {
    let name = format!("step-{:08}", manifest.step);
    let (temporary, path) = (folder.join(format!(".{name}")), folder.join(&name));
    if temporary.exists() {
        fs::remove_dir_all(&temporary).map_err(Error::io("removing", &temporary))?;
    }
    let written = write(&temporary, manifest, model, optimizer)
        .and_then(|()| fs::rename(&temporary, &path).map_err(Error::io("renaming", &temporary)));
    if written.is_err() {
        // The error that matters is the one that is returned.
        let _ = fs::remove_dir_all(&temporary);
    }
    written.and_then(|()| sync(folder)).map(|()| path)
}

fn write(
    folder: &Path,
    mut manifest: Manifest,
    model: &[Entry<'_>],
    optimizer: &[Entry<'_>],
) -> Result<(), Error> {
    fs::create_dir(folder).map_err(Error::io("creating", folder))?;
    for (file, entries) in [(MODEL, model), (OPTIMIZER, optimizer)] {
        write_values(&folder.join(file), entries)?;
        manifest.checksums.insert(file.to_owned(), checksum(&folder.join(file))?);
    }
    let path = folder.join(MANIFEST);
    serde_json::to_string_pretty(&manifest)
        .map_err(io::Error::from)
        .and_then(|text| fs::write(&path, text))
        .map_err(Error::io("writing", &path))?;
    sync(&path)?;
    sync(folder)
}

/// Opens and verifies the checkpoint in `path`.
///
/// # Errors
///
/// [`Error::Io`] if a file cannot be read, [`Error::BadFile`] if one is damaged or of another format.
pub fn load(path: &Path) -> Result<Checkpoint, Error> {
    let manifest_path = path.join(MANIFEST);
    let text = fs::read(&manifest_path).map_err(|error| Error::bad_file(&manifest_path, error))?;
    let manifest: Manifest =
        serde_json::from_slice(&text).map_err(|error| Error::bad_file(&manifest_path, error))?;
    if manifest.format != FORMAT {
        let found = manifest.format;
        let problem = format!("format {found}; this version reads format {FORMAT}");
        return Err(Error::bad_file(&manifest_path, problem));
    }
    let read = |file: &str| {
        let file_path = path.join(file);
        let expected = manifest.checksums.get(file);
        if expected != Some(&checksum(&file_path)?) {
            return Err(Error::bad_file(&file_path, "its checksum is not the manifest's"));
        }
        TensorFile::open(&file_path)
    };
    Ok(Checkpoint { model: read(MODEL)?, optimizer: read(OPTIMIZER)?, manifest })
}

/// How a file stores a parameter.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) name: String,
    /// Whether a matrix is stored with rows and columns exchanged.
    pub(crate) transposed: bool,
}

impl Stored {
    /// Reads the numbers, in Burn's layout; those of 16 bits as `f32`, which has all of them.
    pub(crate) fn read(&self, file: &TensorFile) -> Result<Numbers, Error> {
        let numbers = file.read(&self.name)?;
        let is_half = numbers.float().is_half();
        let numbers = if is_half { numbers.into_float(Float::F32) } else { numbers };
        Ok(match (self.transposed, file.shape(&self.name)) {
            (true, Some(&[rows, columns])) => transpose(&numbers, rows, columns),
            _ => numbers,
        })
    }
}

/// Finds numbers for parameters and buffers, and notes what does not fit.
pub(crate) struct Lookup<'a, F> {
    file: &'a TensorFile,
    stored: F,
    unused: BTreeSet<&'a str>,
    problem: Option<String>,
}

impl<'a, F: Fn(&ParamInfo) -> Stored> Lookup<'a, F> {
    pub(crate) fn new(file: &'a TensorFile, stored: F) -> Self {
        Self { file, stored, unused: file.names().collect(), problem: None }
    }

    /// Where the numbers of one parameter are.
    pub(crate) fn find(&mut self, info: &ParamInfo) -> Option<Stored> {
        let stored = (self.stored)(info);
        let name = &stored.name;
        self.unused.remove(name.as_str());
        let mut expected = info.shape.clone();
        if stored.transposed {
            expected.reverse();
        }
        let problem = match self.file.shape(name) {
            Some(shape) if *shape == expected => return Some(stored),
            Some(shape) => {
                format!("`{name}` has shape {shape:?}, but the model's has {expected:?}")
            }
            None => format!("`{name}` is missing"),
        };
        self.problem.get_or_insert(problem);
        None
    }

    /// The numbers of one parameter, in Burn's layout.
    pub(crate) fn numbers(&mut self, info: &ParamInfo) -> Option<Numbers> {
        match self.find(info)?.read(self.file) {
            Ok(numbers) => Some(numbers),
            Err(error) => {
                self.problem.get_or_insert(error.to_string());
                None
            }
        }
    }

    /// What is wrong, if a parameter was missing or of another shape, or if something is left over.
    pub(crate) fn finish(self) -> Result<(), String> {
        let left_over = || self.unused.first().map(|name| format!("the model has no `{name}`"));
        self.problem.or_else(left_over).map_or(Ok(()), Err)
    }
}

/// Gives every parameter and buffer of `model` its numbers from `file`, in which `stored` finds it.
///
/// # Errors
///
/// What is wrong, if a parameter is missing or of another shape, or if something is left over.
pub(crate) fn fill<M: Module>(
    model: M,
    file: &TensorFile,
    stored: impl Fn(&ParamInfo) -> Stored,
) -> Result<M, String> {
    let mut lookup = Lookup::new(file, stored);
    let model = parameters::write(model, |info| lookup.numbers(info));
    lookup.finish()?;
    model.map_err(|error| error.to_string())
}

/// A row-major matrix of `rows` rows, transposed.
pub(crate) fn transpose(values: &Numbers, rows: usize, columns: usize) -> Numbers {
    each!(Numbers, values, values => Numbers, {
        (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
    })
}

/// As a checkpoint stores it.
pub(crate) fn by_path(info: &ParamInfo) -> Stored {
    Stored { name: info.path.clone(), transposed: false }
}

impl Checkpoint {
    /// Gives `model` the checkpoint's numbers.
    ///
    /// # Errors
    ///
    /// What is wrong, if the checkpoint is of another model.
    pub fn fill<M: Module>(&self, model: M) -> Result<M, String> {
        fill(model, &self.model, by_path)
    }
}

/// The newest checkpoint under `folder`, if there is one.
///
/// # Errors
///
/// [`Error::Io`] if the folder exists but cannot be read.
pub fn newest(folder: &Path) -> Result<Option<PathBuf>, Error> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("reading", folder)(error)),
    };
    let mut newest = None;
    for entry in entries {
        let entry = entry.map_err(Error::io("reading", folder))?;
        let name = entry.file_name();
        let step = name.to_str().and_then(|n| n.strip_prefix("step-")?.parse::<u64>().ok());
        newest = newest.max(step.map(|step| (step, entry.path())));
    }
    Ok(newest.map(|(_, path)| path))
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
mod tests {
    use super::*;

    fn manifest(step: u64) -> Manifest {
        Manifest {
            format: FORMAT,
            step,
            skipped: 0,
            scaler: None,
            samples: 7,
            tokens: 70,
            dataset_len: 40,
            config: serde_json::json!({"lr": 0.1}),
            checksums: BTreeMap::new(),
        }
    }

    fn entries(values: &[f32]) -> Vec<Entry<'_>> {
        vec![("a.weight".to_owned(), vec![2, 2], Slice::F32(values))]
    }

    #[test]
    fn a_checkpoint_survives_the_round_trip() {
        let folder = tempfile::tempdir().expect("a folder");
        let values = [1.0, f32::MIN_POSITIVE, -0.0, 3.5];
        let path = save(folder.path(), manifest(12), &entries(&values), &entries(&values))
            .expect("saving");
        let read = load(&path).expect("loading");
        assert_eq!((read.manifest.step, read.manifest.samples), (12, 7));
        for file in [read.model, read.optimizer] {
            assert_eq!(file.shape("a.weight"), Some(&[2, 2][..]));
            assert_eq!(file.read("a.weight").expect("numbers"), values.to_vec().into());
        }
    }

    #[test]
    fn the_newest_complete_checkpoint_is_found() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(newest(&folder.path().join("none")).expect("no folder"), None);
        for step in [9, 100, 20] {
            save(folder.path(), manifest(step), &[], &[]).expect("saving");
        }
        fs::create_dir(folder.path().join(".step-00000200")).expect("a crashed checkpoint");
        let found = newest(folder.path()).expect("a folder").expect("a checkpoint");
        assert!(found.ends_with("step-00000100"));
    }

    #[test]
    fn damage_is_noticed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = save(folder.path(), manifest(1), &entries(&[1.0; 4]), &[]).expect("saving");
        let file = path.join(MODEL);
        let mut bytes = fs::read(&file).expect("the model");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&file, bytes).expect("damage");
        let error = load(&path).expect_err("a flipped bit").to_string();
        assert!(error.contains("checksum"), "{error}");
        fs::write(path.join(MANIFEST), "{}").expect("damage");
        assert!(matches!(load(&path), Err(Error::BadFile { .. })));
    }
}
