//! A checkpoint's weights as one safetensors file, written a tensor at a time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use pyroclast_kernels::numbers::Float;
use pyroclast_strategies::ParamInfo;

use super::write::{HeaderEntry, header_text, safetensors_name};
use super::{Checkpoint, Stored, sync, transpose};
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
