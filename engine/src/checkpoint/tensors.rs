//! A safetensors file whose tensors are read one at a time, so that no more of a model is in memory than
//! whoever reads it keeps.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use pyroclast_kernels::numbers::{Float, Numbers};

use crate::error::Error;

/// Bytes of the header's length, with which a file begins.
const PREFIX: u64 = 8;

/// Longest header that is read, in bytes: what the format allows.
const MAX_HEADER: u64 = 100_000_000;

/// An open file of floating-point tensors. Clones share it.
#[derive(Clone, Debug)]
pub struct TensorFile(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    path: PathBuf,
    file: Mutex<File>,
    tensors: BTreeMap<String, Place>,
}

/// A tensor's shape and where its numbers begin.
#[derive(Debug, PartialEq)]
struct Place {
    shape: Vec<usize>,
    float: Float,
    start: u64,
}

impl TensorFile {
    /// Opens a file, and reads which tensors there are.
    ///
    /// # Errors
    ///
    /// [`Error::BadFile`] if it cannot be read, is damaged, or has tensors of another type than [`Float`]
    /// names.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let bad = |problem: String| Error::bad_file(path, problem);
        let mut file = File::open(path).map_err(|error| bad(error.to_string()))?;
        let (metadata, start) = header(&mut file).map_err(bad)?;
        let mut tensors = BTreeMap::new();
        for (name, info) in metadata.tensors() {
            let TensorInfo { dtype, shape, data_offsets } = info;
            let float = float_of(*dtype).ok_or_else(|| {
                bad(format!("`{name}` is {dtype:?}; this version reads F64, F32, F16, BF16"))
            })?;
            let start = start + data_offsets.0 as u64;
            let place = Place { shape: shape.clone(), float, start };
            tensors.insert(name, place);
        }
        Ok(Self(Arc::new(Opened { path: path.to_owned(), file: Mutex::new(file), tensors })))
    }

    /// Where the file is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Names of the tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.0.tensors.get(name).map(|place| &place.shape[..])
    }

    /// Reads the numbers of a tensor, in row-major order.
    ///
    /// # Errors
    ///
    /// [`Error::BadFile`] if there is no such tensor, or if it cannot be read.
    pub fn read(&self, name: &str) -> Result<Numbers, Error> {
        let Opened { path, file, tensors } = &*self.0;
        let bad = |problem: String| Error::bad_file(path, problem);
        let Place { shape, float, start } =
            tensors.get(name).ok_or_else(|| bad(format!("there is no `{name}`")))?;
        let mut numbers = Numbers::zeros(*float, shape.iter().product());
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        let read = file
            .seek(SeekFrom::Start(*start))
            .and_then(|_| file.read_exact(numbers.as_mut().as_bytes()));
        read.map_err(|error| bad(format!("reading `{name}`: {error}")))?;
        if cfg!(target_endian = "big") {
            numbers.as_mut().as_bytes().chunks_mut(float.size()).for_each(<[u8]>::reverse);
        }
        Ok(numbers)
    }
}

/// The type that safetensors calls so, if it is one of floats.
pub(super) fn float_of(dtype: Dtype) -> Option<Float> {
    match dtype {
        Dtype::F64 => Some(Float::F64),
        Dtype::F32 => Some(Float::F32),
        Dtype::F16 => Some(Float::F16),
        Dtype::BF16 => Some(Float::BF16),
        _ => None,
    }
}

/// What a file holds, and where the numbers begin.
fn header(file: &mut File) -> Result<(Metadata, u64), String> {
    let io = |error: io::Error| error.to_string();
    let length = file.metadata().map_err(io)?.len();
    let mut prefix = [0; PREFIX as usize];
    file.read_exact(&mut prefix).map_err(|_| "is too short for a safetensors file".to_owned())?;
    let header = u64::from_le_bytes(prefix);
    let start = PREFIX.saturating_add(header);
    if header > MAX_HEADER || start > length {
        return Err(format!("its header should have {header} bytes, the file has {length}"));
    }
    let mut text = vec![0; header as usize];
    file.read_exact(&mut text).map_err(io)?;
    let metadata: Metadata =
        serde_json::from_slice(&text).map_err(|error| format!("its header: {error}"))?;
    // That tensors follow each other without gaps was checked with the header.
    let (expected, data) = (metadata.data_len(), length - start);
    match expected as u64 == data {
        true => Ok((metadata, start)),
        false => Err(format!("its tensors have {expected} bytes, the file {data} for them")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use pyroclast_kernels::numbers::Slice;

    use crate::checkpoint::write_values;

    fn opened(bytes: &[u8]) -> Result<TensorFile, Error> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.safetensors");
        fs::write(&path, bytes).expect("a file");
        TensorFile::open(&path)
    }

    fn with_header(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(vec![0; data]);
        bytes
    }

    #[test]
    fn tensors_are_read_one_at_a_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.safetensors");
        let half = Slice::F32(&[0.5, -3.0]).cast(Float::BF16);
        let entries = [
            ("b".to_owned(), vec![2, 2], Slice::F32(&[1.0, -0.0, f32::MIN_POSITIVE, 3.5])),
            ("a".to_owned(), vec![1], Slice::F64(&[1e-300])),
            ("half".to_owned(), vec![2], half.as_slice()),
            ("none".to_owned(), vec![0, 3], Slice::F32(&[])),
        ];
        write_values(&path, &entries).expect("writing");
        let file = TensorFile::open(&path).expect("opening");
        assert_eq!(file.names().collect::<Vec<_>>(), ["a", "b", "half", "none"]);
        for (name, shape, values) in entries {
            assert_eq!(file.shape(&name), Some(&shape[..]));
            assert_eq!(file.read(&name).expect("reading"), values.to_numbers());
        }
        let error = file.read("c").expect_err("no such tensor").to_string();
        assert!(error.contains("there is no `c`"), "{error}");
    }

    #[test]
    fn damaged_files_are_refused_before_anything_is_allocated() {
        let f32 = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        assert!(opened(&with_header(f32, 8)).is_ok());
        let huge = r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}}"#;
        let gap = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
        let backwards = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#;
        let i64 = r#"{"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#;
        let mut too_long = with_header(f32, 8);
        too_long[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        let damaged = [
            (vec![1, 2, 3], "too short"),
            (too_long, "header should have"),
            (with_header("{", 0), "its header"),
            (with_header(f32, 4), "the file 4"),
            (with_header(f32, 12), "the file 12"),
            (with_header(huge, 8), "overflow"),
            (with_header(gap, 8), "invalid offset"),
            (with_header(backwards, 8), "invalid offset"),
            (with_header(i64, 8), "I64"),
        ];
        for (bytes, problem) in damaged {
            let error = opened(&bytes).expect_err(problem).to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}
