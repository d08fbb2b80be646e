//! Reading: any range of any parameter, from whichever files have it, verified block by block.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use burn::module::Module;
use pyroclast_kernels::numbers::{Float, Numbers};
use pyroclast_strategies::parameters;
use safetensors::tensor::Metadata;

use super::BLOCK;
use super::manifest::{FileEntry, Manifest};
use super::tensors::float_of;
use super::write::hash;
use crate::error::Error;

/// Longest header of a file that is read, in bytes: what the format allows.
const MAX_HEADER: u64 = 100_000_000;

/// A checkpoint that has been opened. Its numbers are read when they are asked for, a block at a time.
#[derive(Debug)]
pub struct Checkpoint {
    /// Everything but the numbers.
    pub manifest: Manifest,
    path: PathBuf,
    files: Vec<ShardFile>,
    /// Files that other machines have.
    elsewhere: Vec<String>,
    /// By what it is of, and path: the pieces in order.
    pieces: HashMap<(String, String), Vec<PieceAt>>,
}

/// Where a piece's numbers are.
#[derive(Clone, Copy, Debug)]
struct PieceAt {
    start: usize,
    len: usize,
    file: usize,
    offset: u64,
}

/// A file of numbers.
#[derive(Debug)]
struct ShardFile {
    path: PathBuf,
    entry: FileEntry,
    state: Mutex<(File, Option<Block>)>,
}

/// A block that has been verified.
#[derive(Debug)]
struct Block {
    number: u64,
    bytes: Vec<u8>,
}

impl ShardFile {
    fn open(path: PathBuf, entry: FileEntry) -> Result<Self, Error> {
        let bad = |problem: String| Error::bad_file(&path, problem);
        let file = File::open(&path).map_err(|error| bad(error.to_string()))?;
        let bytes = file.metadata().map_err(|error| bad(error.to_string()))?.len();
        if bytes != entry.bytes {
            return Err(bad(format!("has {bytes} bytes, but the manifest says {}", entry.bytes)));
        }
        Ok(Self { state: Mutex::new((file, None)), path, entry })
    }

    /// Reads bytes from `offset` on, of blocks that are as the manifest says.
    fn read(&self, mut offset: u64, mut target: &mut [u8]) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, cached) = &mut *state;
        while !target.is_empty() {
            let number = offset / BLOCK as u64;
            if cached.as_ref().is_none_or(|block| block.number != number) {
                *cached = Some(self.block(file, number)?);
            }
            let Some(block) = cached.as_ref() else { continue };
            let within = (offset % BLOCK as u64) as usize;
            let here = block.bytes.get(within..).unwrap_or_default();
            if here.is_empty() {
                return Err(Error::bad_file(&self.path, format!("ends before byte {offset}")));
            }
            let (now, later) = target.split_at_mut(here.len().min(target.len()));
            now.copy_from_slice(&here[..now.len()]);
            offset += now.len() as u64;
            target = later;
        }
        Ok(())
    }

    fn block(&self, file: &mut File, number: u64) -> Result<Block, Error> {
        let bad = |problem: String| Error::bad_file(&self.path, problem);
        let start = number * BLOCK as u64;
        let len = (self.entry.bytes.saturating_sub(start)).min(BLOCK as u64) as usize;
        let Some(expected) = self.entry.blocks.get(number as usize) else {
            return Err(bad(format!("ends before byte {start}")));
        };
        let mut bytes = vec![0; len];
        let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut bytes));
        read.map_err(|error| bad(format!("reading at byte {start}: {error}")))?;
        match hash(&bytes) == *expected {
            true => Ok(Block { number, bytes }),
            false => Err(bad(format!("bytes {start} to {} are damaged", start + len as u64))),
        }
    }

    /// The tensors, and where their numbers begin.
    fn header(&self) -> Result<(Metadata, u64), Error> {
        let bad = |problem: String| Error::bad_file(&self.path, problem);
        let mut prefix = [0; 8];
        self.read(0, &mut prefix)?;
        let len = u64::from_le_bytes(prefix);
        let start = len.saturating_add(8);
        if len > MAX_HEADER || start > self.entry.bytes {
            let bytes = self.entry.bytes;
            return Err(bad(format!("its header should have {len} bytes, the file has {bytes}")));
        }
        let mut text = vec![0; len as usize];
        self.read(8, &mut text)?;
        let metadata: Metadata =
            serde_json::from_slice(&text).map_err(|error| bad(format!("its header: {error}")))?;
        match metadata.data_len() as u64 == self.entry.bytes - start {
            true => Ok((metadata, start)),
            false => Err(bad(format!("its tensors have {} bytes", metadata.data_len()))),
        }
    }
}

impl Checkpoint {
    /// Opens the checkpoint in `path`, and checks that every number of every tensor is somewhere, once; or, of one
    /// that machines keep apart, that none of those here is twice. The numbers are verified when they are read.
    ///
    /// # Errors
    ///
    /// [`Error::BadFile`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let manifest = Manifest::read(path)?;
        let (mut files, mut elsewhere) = (vec![], vec![]);
        let mut pieces: HashMap<(String, String), Vec<PieceAt>> = HashMap::new();
        for (name, entry) in &manifest.files {
            if manifest.node_local && !path.join(name).exists() {
                elsewhere.push(name.clone());
                continue;
            }
            let (file, shard) = (files.len(), ShardFile::open(path.join(name), entry.clone())?);
            let (metadata, start) = shard.header()?;
            for (name, info) in metadata.tensors() {
                let bad =
                    |problem: &str| Error::bad_file(&shard.path, format!("`{name}` {problem}"));
                let (of, rest) = name.split_once('/').ok_or_else(|| bad("is no piece's name"))?;
                let (tensor, at) =
                    rest.rsplit_once('/').ok_or_else(|| bad("is no piece's name"))?;
                let at = at.parse().map_err(|_| bad("does not say where it begins"))?;
                let float = float_of(info.dtype).ok_or_else(|| bad("is not of floats"))?;
                let known = manifest.tensors.get(tensor).and_then(|tensor| tensor.dtype_of(of));
                match known {
                    None => return Err(bad("is not in the manifest")),
                    Some(dtype) if dtype != float.name() => {
                        return Err(bad(&format!("is {float}, but {dtype} in the manifest")));
                    }
                    Some(_) => {}
                }
                let [len] = info.shape[..] else { return Err(bad("is not flat")) };
                let offset = start + info.data_offsets.0 as u64;
                let piece = PieceAt { start: at, len, file, offset };
                pieces.entry((of.to_owned(), tensor.to_owned())).or_default().push(piece);
            }
            files.push(shard);
        }
        let this = Self { manifest, path: path.to_owned(), files, elsewhere, pieces };
        this.sorted()
    }

    /// Puts pieces in order, and checks that together they are whole.
    fn sorted(mut self) -> Result<Self, Error> {
        for (path, tensor) in &self.manifest.tensors {
            let elements = tensor.num_elements().unwrap_or_default();
            let states = tensor.states.keys().map(String::as_str);
            for of in ["weights"].into_iter().chain(states) {
                let pieces = self.pieces.entry((of.to_owned(), path.clone())).or_default();
                pieces.sort_by_key(|piece| (piece.start, piece.len));
                let may_lack = !self.elsewhere.is_empty();
                let follows = |end: usize, start: usize| end == start || may_lack && end < start;
                let mut end = Some(0usize);
                for piece in pieces.iter() {
                    end = end
                        .filter(|end| follows(*end, piece.start))
                        .and_then(|end| end.checked_add(piece.len));
                }
                if !end.is_some_and(|end| follows(end, elements)) {
                    let problem = format!(
                        "{of} of `{path}` should have {elements} elements; its pieces have gaps or overlap: \
                         was a rank's file of another checkpoint?"
                    );
                    return Err(Error::bad_file(&self.path, problem));
                }
            }
        }
        Ok(self)
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a range of a parameter's elements, in row-major order: of its `weights`, or of a state by its name.
    /// None if there is no such parameter or state.
    ///
    /// # Errors
    ///
    /// [`Error::BadFile`] if it cannot be read, is damaged, or has not so many elements.
    pub fn read(
        &self,
        of: &str,
        path: &str,
        range: Range<usize>,
    ) -> Result<Option<Numbers>, Error> {
        let Some(pieces) = self.pieces.get(&(of.to_owned(), path.to_owned())) else {
            return Ok(None);
        };
        let (float, has) = self.expected(of, path);
        if range.end > has {
            let problem = format!("{of} of `{path}` has {has} elements, not {}", range.end);
            return Err(Error::bad_file(&self.path, problem));
        }
        let shared = |piece: &PieceAt| {
            piece.start.max(range.start)..(piece.start + piece.len).min(range.end)
        };
        let here: usize = pieces.iter().map(|piece| shared(piece).len()).sum();
        if here < range.len() {
            let problem = format!(
                "{} elements of {of} of `{path}` are in files of other machines ({}); bring all machines' files into \
                 one folder",
                range.len() - here,
                self.elsewhere.join(", ")
            );
            return Err(Error::bad_file(&self.path, problem));
        }
        let mut numbers = Numbers::zeros(float, range.len());
        for piece in pieces {
            let Range { start, end } = shared(piece);
            if start < end {
                let offset = piece.offset + ((start - piece.start) * float.size()) as u64;
                let target = numbers.part_mut(start - range.start..end - range.start).as_bytes();
                self.files[piece.file].read(offset, target)?;
            }
        }
        if cfg!(target_endian = "big") {
            numbers.as_mut().as_bytes().chunks_mut(float.size()).for_each(<[u8]>::reverse);
        }
        Ok(Some(numbers))
    }

    /// The type and number of a parameter's elements, by the manifest.
    fn expected(&self, of: &str, path: &str) -> (Float, usize) {
        let tensor = self.manifest.tensors.get(path);
        let dtype = tensor.and_then(|tensor| tensor.dtype_of(of));
        let float = Float::ALL.into_iter().find(|float| Some(float.name()) == dtype);
        let elements = tensor.and_then(|tensor| tensor.num_elements());
        (float.unwrap_or_default(), elements.unwrap_or_default())
    }

    /// Names of the files that other machines have, where each keeps its own.
    #[must_use]
    pub fn elsewhere(&self) -> &[String] {
        &self.elsewhere
    }

    /// All of a parameter's elements, as [`Self::read`].
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    pub fn read_all(&self, of: &str, path: &str) -> Result<Option<Numbers>, Error> {
        let elements = self.manifest.tensors.get(path).and_then(|tensor| tensor.num_elements());
        self.read(of, path, 0..elements.unwrap_or_default())
    }

    /// Reads every byte of the files that are here, and checks that it is what was written.
    ///
    /// # Errors
    ///
    /// [`Error::BadFile`] with the first that is not.
    pub fn verify(&self) -> Result<(), Error> {
        for file in &self.files {
            let mut state = file.state.lock().unwrap_or_else(PoisonError::into_inner);
            for number in 0..file.entry.blocks.len() as u64 {
                file.block(&mut state.0, number)?;
            }
        }
        Ok(())
    }

    /// Gives `model` the checkpoint's numbers; those of 16 bits as `f32`, so that a model without a run computes
    /// in one type.
    ///
    /// # Errors
    ///
    /// What is wrong, if the checkpoint is damaged or of another model.
    pub fn fill<M: Module>(&self, model: M) -> Result<M, String> {
        let mut unused: BTreeMap<&str, ()> =
            self.manifest.tensors.keys().map(|path| (path.as_str(), ())).collect();
        let mut problem = None;
        let model = parameters::write(model, |info| {
            unused.remove(info.path.as_str());
            match self.fitting(&info.path, &info.shape) {
                Ok(numbers) => Some(numbers),
                Err(found) => {
                    problem.get_or_insert(found);
                    None
                }
            }
        });
        let left_over = || unused.keys().next().map(|path| format!("the model has no `{path}`"));
        problem.or_else(left_over).map_or(Ok(()), Err)?;
        model.map_err(|error| error.to_string())
    }

    fn fitting(&self, path: &str, shape: &[usize]) -> Result<Numbers, String> {
        let tensor = self.manifest.tensors.get(path);
        let tensor = tensor.ok_or_else(|| format!("`{path}` is missing"))?;
        if tensor.shape != shape {
            return Err(format!(
                "`{path}` has shape {:?}, but the model's has {shape:?}",
                tensor.shape
            ));
        }
        let numbers = self.read_all("weights", path).map_err(|error| error.to_string())?;
        let numbers = numbers.unwrap_or_default();
        let is_half = numbers.float().is_half();
        Ok(if is_half { numbers.into_float(Float::F32) } else { numbers })
    }
}
