//! A checkpoint's weights as one safetensors file, and a checkpoint as another number of ranks would write it: both
//! a tensor at a time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use pyroclast_kernels::numbers::Float;
use pyroclast_strategies::ParamInfo;
use pyroclast_strategies::shard::shard;

use super::write::{HeaderEntry, header_text, safetensors_name};
use super::{Checkpoint, Draft, Manifest, Stored, Written, file_of, sync, transpose};
use crate::error::Error;

/// Writes all weights and buffers to `path`, whole or not at all: in their own types or all in `float`, under the
/// names and in the layout that `stored` gives them.
///
/// # Errors
///
/// [`Error::BadFile`] if the checkpoint is damaged, [`Error::Io`] if the file cannot be written.
pub(crate) fn export(
    checkpoint: &Checkpoint,
    path: &Path,
    float: Option<Float>,
    stored: impl Fn(&ParamInfo) -> Stored,
) -> Result<(), Error> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".partial");
    let temporary = Path::new(&temporary);
    let written = write(checkpoint, temporary, float, stored)
        .and_then(|()| std::fs::rename(temporary, path).map_err(Error::io("renaming", temporary)));
    if written.is_err() {
        // The error that matters is the one that is returned.
        let _ = std::fs::remove_file(temporary);
    }
    written
}

fn write(
    checkpoint: &Checkpoint,
    path: &Path,
    float: Option<Float>,
    stored: impl Fn(&ParamInfo) -> Stored,
) -> Result<(), Error> {
    let (mut header, mut order, mut end) = (BTreeMap::new(), vec![], 0u64);
    let tensors = checkpoint.manifest.tensors.iter();
    // A parameter that stands at several paths is expected under each.
    let paths = tensors.flat_map(|(path, tensor)| {
        [path].into_iter().chain(&tensor.aliases).map(move |name| (path, name, tensor))
    });
    for (own, alias, tensor) in paths {
        let info = ParamInfo { path: alias.clone(), shape: tensor.shape.clone() };
        let (Stored { name, transposed }, mut shape) = (stored(&info), tensor.shape.clone());
        if transposed {
            shape.reverse();
        }
        let known = Float::ALL.into_iter().find(|float| float.name() == tensor.dtype);
        let float = float.or(known).unwrap_or_default();
        let start = end;
        end += (info.num_elements() * float.size()) as u64;
        let dtype = safetensors_name(float);
        header.insert(name, HeaderEntry { dtype, shape, data_offsets: [start, end] });
        order.push((own, info, float, transposed));
    }
    let file = File::create(path).map_err(Error::io("creating", path))?;
    let mut file = BufWriter::new(file);
    let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(Error::io("writing", path));
    let text = header_text(&header).map_err(Error::io("writing", path))?;
    put(&(text.len() as u64).to_le_bytes())?;
    put(text.as_bytes())?;
    for (own, info, float, transposed) in order {
        let numbers = checkpoint.read_all("weights", own)?.unwrap_or_default();
        let numbers = match (transposed, &info.shape[..]) {
            (true, &[rows, columns]) => transpose(&numbers, rows, columns),
            _ => numbers,
        };
        let mut numbers = numbers.into_float(float);
        let bytes = numbers.as_mut().as_bytes();
        if cfg!(target_endian = "big") {
            bytes.chunks_mut(float.size()).for_each(<[u8]>::reverse);
        }
        put(bytes)?;
    }
    file.into_inner()
        .map_err(|error| Error::io("writing", path)(io::Error::from(error.error().kind())))?;
    sync(path)
}

/// Writes the checkpoint to `path` as `world` ranks would have written it.
///
/// # Errors
///
/// [`Error::Config`] if there is something at `path`, [`Error::BadFile`] if the checkpoint is damaged, [`Error::Io`] if
/// the new one cannot be written.
pub fn reshard(checkpoint: &Checkpoint, path: &Path, world: usize) -> Result<(), Error> {
    let path = std::path::absolute(path).map_err(Error::io("finding", path))?;
    if path.exists() {
        return Err(Error::setting("to", format!("{} exists already", path.display())));
    }
    let draft = Draft::new(&path);
    draft.create()?;
    let written = (0..world).map(|rank| write_rank(checkpoint, &draft, (rank, world)));
    let finished = written.collect::<Result<Vec<Written>, Error>>().and_then(|written| {
        let files = written.into_iter().enumerate();
        let files = files.filter_map(|(rank, written)| Some((file_of(rank), written.file?)));
        let manifest = Manifest { world, files: files.collect(), ..checkpoint.manifest.clone() };
        draft.finish(&manifest)
    });
    if finished.is_err() {
        draft.discard();
    }
    finished.map(drop)
}

fn write_rank(
    checkpoint: &Checkpoint,
    draft: &Draft,
    (rank, world): (usize, usize),
) -> Result<Written, Error> {
    let mut pieces = vec![];
    for (path, tensor) in &checkpoint.manifest.tensors {
        let info = ParamInfo { path: path.clone(), shape: tensor.shape.clone() };
        let range = shard(info.num_elements(), world, rank);
        // A parameter without elements is rank 0's.
        if !range.is_empty() || (rank == 0 && info.num_elements() == 0) {
            let of = ["weights"].into_iter().chain(tensor.states.keys().map(String::as_str));
            pieces.extend(of.map(|of| (of, info.clone(), range.clone())));
        }
    }
    let read = |of: &str, info: &ParamInfo, range| checkpoint.read(of, &info.path, range);
    let mut file = draft.shard(rank);
    for (of, info, range) in &pieces {
        let numbers = read(of, info, range.clone())?.unwrap_or_default();
        file.announce(of, info, range.start, numbers.as_slice());
        file.alias(&info.path, &checkpoint.manifest.tensors[&info.path].aliases);
    }
    let mut file = file.begin()?;
    for (of, info, range) in &pieces {
        let numbers = read(of, info, range.clone())?.unwrap_or_default();
        file.piece(of, info, range.start, numbers.as_slice())?;
    }
    file.finish()
}
