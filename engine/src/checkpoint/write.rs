//! Writing: every rank its own file, rank 0 the manifest, which makes a checkpoint of them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use pyroclast_kernels::numbers::{Float, Slice};
use pyroclast_strategies::ParamInfo;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::manifest::{self, FileEntry, Manifest, TensorEntry, file_of};
use super::{BLOCK, disk};
use crate::error::Error;

/// Where a checkpoint is while it is written, and where it will be.
#[derive(Clone, Debug)]
pub(crate) struct Draft {
    temporary: PathBuf,
    path: PathBuf,
}

/// What one rank has written.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Written {
    pub(crate) file: Option<FileEntry>,
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
}

impl Manifest {
    /// With what all ranks have written, in their order.
    pub(crate) fn with_files(mut self, written: Vec<Written>) -> Self {
        self.world = written.len();
        for (rank, Written { file, tensors }) in written.into_iter().enumerate() {
            self.files.extend(file.map(|file| (file_of(rank), file)));
            self.tensors.extend(tensors);
        }
        self
    }
}

impl Draft {
    /// Of the checkpoint that will be at `path`.
    pub(crate) fn new(path: &Path) -> Self {
        Self { temporary: hidden(path), path: path.to_owned() }
    }

    /// Makes the folder, on rank 0, before anybody writes. What a crash has left there is removed.
    pub(crate) fn create(&self) -> Result<(), Error> {
        if self.temporary.exists() {
            disk::remove_folder(&self.temporary)?;
        }
        disk::create_folder(&self.temporary)
    }

    /// Whether the folder that rank 0 has made can be seen from here.
    pub(crate) fn is_there(&self) -> bool {
        self.temporary.is_dir()
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.temporary
    }

    /// Where the checkpoint will be.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Begins a rank's file.
    pub(crate) fn shard(&self, rank: usize) -> Shard {
        Shard { path: self.temporary.join(file_of(rank)), header: Header::default() }
    }

    /// Writes the manifest, on rank 0, once all ranks have written their files; and gives the checkpoint its
    /// name.
    pub(crate) fn finish(&self, manifest: &Manifest) -> Result<(), Error> {
        let path = self.temporary.join(manifest::NAME);
        let text = serde_json::to_vec_pretty(manifest)
            .map_err(|error| Error::io("writing", &path)(io::Error::from(error)))?;
        let mut file = disk::create(&path)?;
        disk::write(&mut file, &path, &text)?;
        disk::sync(&path)?;
        disk::sync(&self.temporary)?;
        disk::rename(&self.temporary, &self.path)?;
        if let Some(parent) = self.path.parent() {
            disk::sync(parent)?;
        }
        Ok(())
    }

    /// Removes what was written, after a failure.
    pub(crate) fn discard(&self) {
        if self.temporary.exists() {
            // The error that matters is the one that came before.
            let _ = disk::remove_folder(&self.temporary);
        }
    }
}

/// The name beside `path` under which it is not a checkpoint.
fn hidden(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}"))
}

/// Removes a checkpoint: at once it is none, whatever happens while its files are removed.
pub(crate) fn remove(path: &Path) -> Result<(), Error> {
    let hidden = hidden(path);
    if hidden.exists() {
        disk::remove_folder(&hidden)?;
    }
    disk::rename(path, &hidden)?;
    disk::remove_folder(&hidden)
}

/// The header of a safetensors file.
#[derive(Debug, Default)]
struct Header {
    tensors: BTreeMap<String, HeaderEntry>,
    order: Vec<String>,
    end: u64,
    written: BTreeMap<String, TensorEntry>,
}

/// A tensor in the header of a safetensors file.
#[derive(Debug, Serialize)]
pub(super) struct HeaderEntry {
    pub(super) dtype: &'static str,
    pub(super) shape: Vec<usize>,
    pub(super) data_offsets: [u64; 2],
}

/// The header's text. The format allows spaces at the end, so that numbers begin at a multiple of 8.
pub(super) fn header_text(tensors: &BTreeMap<String, HeaderEntry>) -> io::Result<String> {
    let text = serde_json::to_string(tensors)?;
    Ok(format!("{text:width$}", width = text.len().next_multiple_of(8)))
}

/// A rank's file that is about to be written. Its pieces are announced before they are written, in the same
/// order: so no more than one is in memory.
#[derive(Debug)]
pub(crate) struct Shard {
    path: PathBuf,
    header: Header,
}

impl Shard {
    /// Where the file will be.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Announces a piece: `len` numbers from element `start` of a parameter.
    pub(crate) fn announce(&mut self, of: &str, info: &ParamInfo, start: usize, values: Slice<'_>) {
        let header = &mut self.header;
        let name = piece_name(of, &info.path, start);
        let end = header.end + (values.len() * values.float().size()) as u64;
        let entry = HeaderEntry {
            dtype: safetensors_name(values.float()),
            shape: vec![values.len()],
            data_offsets: [header.end, end],
        };
        header.end = end;
        header.order.push(name.clone());
        header.tensors.insert(name, entry);
        let tensor = header.written.entry(info.path.clone()).or_insert_with(|| TensorEntry {
            aliases: vec![],
            shape: info.shape.clone(),
            dtype: String::new(),
            states: BTreeMap::new(),
        });
        let float = values.float().name().to_owned();
        match of {
            "weights" => tensor.dtype = float,
            state => drop(tensor.states.insert(state.to_owned(), float)),
        }
    }

    /// Says where else a parameter stands that has been announced.
    pub(crate) fn alias(&mut self, path: &str, aliases: &[String]) {
        if let Some(tensor) = self.header.written.get_mut(path) {
            tensor.aliases = aliases.to_vec();
        }
    }

    /// Creates the file, and writes its header.
    pub(crate) fn begin(self) -> Result<ShardFile, Error> {
        let text = header_text(&self.header.tensors).map_err(Error::io("writing", &self.path))?;
        let file = disk::create(&self.path)?;
        let mut shard = ShardFile {
            path: self.path,
            file,
            order: self.header.order.into_iter(),
            tensors: self.header.written,
            block: vec![],
            hashes: vec![],
            bytes: 0,
        };
        shard.write(&(text.len() as u64).to_le_bytes())?;
        shard.write(text.as_bytes())?;
        Ok(shard)
    }
}

/// A rank's file that is being written.
#[derive(Debug)]
pub(crate) struct ShardFile {
    path: PathBuf,
    file: File,
    order: std::vec::IntoIter<String>,
    tensors: BTreeMap<String, TensorEntry>,
    /// What is not written yet.
    block: Vec<u8>,
    hashes: Vec<String>,
    bytes: u64,
}

impl ShardFile {
    /// Writes the next of the pieces that were announced.
    ///
    /// # Panics
    ///
    /// If another was announced.
    pub(crate) fn piece(
        &mut self,
        of: &str,
        info: &ParamInfo,
        start: usize,
        values: Slice<'_>,
    ) -> Result<(), Error> {
        let name = piece_name(of, &info.path, start);
        assert_eq!(self.order.next(), Some(name), "pieces are written as they were announced");
        if cfg!(target_endian = "big") {
            let size = values.float().size();
            let swapped = values.as_bytes().chunks(size).flat_map(|number| number.iter().rev());
            return self.write(&swapped.copied().collect::<Vec<u8>>());
        }
        self.write(values.as_bytes())
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK - self.block.len()));
            self.block.extend_from_slice(now);
            bytes = later;
            if self.block.len() == BLOCK {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        if !self.block.is_empty() {
            disk::write(&mut self.file, &self.path, &self.block)?;
            self.hashes.push(hash(&self.block));
            self.bytes += self.block.len() as u64;
            self.block.clear();
        }
        Ok(())
    }

    /// Waits until everything is on the disk.
    pub(crate) fn finish(mut self) -> Result<Written, Error> {
        self.flush()?;
        disk::sync(&self.path)?;
        let file = FileEntry { bytes: self.bytes, blocks: self.hashes };
        Ok(Written { file: Some(file), tensors: self.tensors })
    }
}

/// What a piece is called in its file.
pub(super) fn piece_name(of: &str, path: &str, start: usize) -> String {
    format!("{of}/{path}/{start}")
}

pub(super) fn safetensors_name(float: Float) -> &'static str {
    match float {
        Float::F64 => "F64",
        Float::F32 => "F32",
        Float::F16 => "F16",
        Float::BF16 => "BF16",
    }
}

/// The SHA-256 of some bytes, in hexadecimal.
pub(super) fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
