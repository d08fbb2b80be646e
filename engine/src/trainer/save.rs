//! Saving a run: every rank writes what it holds, rank 0 what makes a checkpoint of it.

use std::path::{Path, PathBuf};

use burn::module::Module;
use pyroclast_kernels::gradient;
use pyroclast_strategies::{DataParallel, PieceOf, ProcessGroup};

use crate::checkpoint::{Draft, Manifest, Written};
use crate::error::Error;

/// Writes a checkpoint into `folder`, which rank 0 alone need know, and returns its path. All ranks call it. Where
/// one of them fails all fail, and what was written is removed.
pub(super) fn save<M: Module>(
    (group, strategy): (&ProcessGroup, &DataParallel),
    model: &M,
    folder: Option<&Path>,
    manifest: Manifest,
) -> Result<Option<PathBuf>, Error> {
    let Some(folder) = told(group, folder)? else { return Ok(None) };
    let draft = Draft::new(&folder, manifest.step);
    let is_first = group.rank() == 0;
    let created = if is_first { draft.create() } else { Ok(()) };
    let outcome = agreed(group, created)
        .and_then(|()| agreed(group, seen(&draft)))
        .and_then(|()| write(group, strategy, model, &draft, manifest.step))
        .and_then(|written| {
            let finished = match is_first {
                true => draft.finish(&complete(manifest, written)).map(Some),
                false => Ok(None),
            };
            agreed(group, finished)
        });
    if outcome.is_err() && is_first {
        draft.discard();
    }
    outcome
}

/// The folder that rank 0 knows, on all ranks.
fn told(group: &ProcessGroup, folder: Option<&Path>) -> Result<Option<PathBuf>, Error> {
    let absolute = |path: &Path| std::path::absolute(path).map_err(Error::io("finding", path));
    let mine = folder.map(absolute).transpose()?;
    let text = mine.map(|path| path.into_os_string().into_encoded_bytes()).unwrap_or_default();
    // Only rank 0's counts.
    let text = if group.rank() == 0 { text } else { vec![] };
    let all = group.all_gather_uneven(text).wait()?;
    let first = all.into_iter().next().unwrap_or_default();
    let path = String::from_utf8(first).map_err(|_| {
        Error::setting("out", "is no text that every machine can read; name another folder")
    })?;
    Ok(Some(path).filter(|path| !path.is_empty()).map(PathBuf::from))
}

/// Whether this rank can write to the folder that rank 0 has made.
fn seen(draft: &Draft) -> Result<(), Error> {
    match draft.is_there() {
        true => Ok(()),
        false => Err(Error::setting(
            "out",
            format!(
                "{} is not on this machine, although rank 0 has just made it; name a folder that all machines \
                 share",
                draft.folder().display()
            ),
        )),
    }
}

/// Writes this rank's file; returns what each has written.
fn write<M: Module>(
    group: &ProcessGroup,
    strategy: &DataParallel,
    model: &M,
    draft: &Draft,
    step: u64,
) -> Result<Vec<Written>, Error> {
    let own = write_own(group.rank(), strategy, model, draft, step);
    let (text, own) = match own {
        Ok(written) => (serde_json::to_string(&written).unwrap_or_default(), Ok(())),
        Err(error) => (String::new(), Err(error)),
    };
    agreed(group, own)?;
    let all = group.all_gather_uneven(text.into_bytes()).wait()?;
    let read = |text: &Vec<u8>| serde_json::from_slice(text).unwrap_or_default();
    Ok(all.iter().map(read).collect())
}

fn write_own<M: Module>(
    rank: usize,
    strategy: &DataParallel,
    model: &M,
    draft: &Draft,
    step: u64,
) -> Result<Written, Error> {
    let mut shard = draft.shard(rank);
    let mut broken = None;
    strategy.own_pieces(model, |piece| {
        shard.announce(piece.of, piece.info, piece.range.start, piece.values);
        let is_finite = gradient::first_not_finite(piece.values).is_none();
        if piece.of == PieceOf::Weights && !is_finite && broken.is_none() {
            broken = Some(piece.info.path.clone());
        }
    })?;
    if let Some(path) = broken {
        return Err(Error::WeightsNotFinite { step, path });
    }
    let mut file = shard.begin()?;
    let mut outcome = Ok(());
    strategy.own_pieces(model, |piece| {
        if outcome.is_ok() {
            outcome = file.piece(piece.of, piece.info, piece.range.start, piece.values);
        }
    })?;
    outcome?;
    file.finish()
}

/// The manifest with what the ranks have written.
fn complete(mut manifest: Manifest, written: Vec<Written>) -> Manifest {
    manifest.world = written.len();
    for (rank, Written { file, tensors }) in written.into_iter().enumerate() {
        manifest.files.extend(file.map(|file| (crate::checkpoint::file_of(rank), file)));
        manifest.tensors.extend(tensors);
    }
    manifest
}

/// The outcome, if all ranks have succeeded; else this rank's own error, or the first of the others'.
fn agreed<T>(group: &ProcessGroup, outcome: Result<T, Error>) -> Result<T, Error> {
    let mine = outcome.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let all = group.all_gather_uneven(mine.into_bytes()).wait()?;
    let value = outcome?;
    match all.iter().position(|problem| !problem.is_empty()) {
        None => Ok(value),
        Some(rank) => {
            let problem = String::from_utf8_lossy(&all[rank]).into_owned();
            Err(Error::Saving { rank, problem })
        }
    }
}
