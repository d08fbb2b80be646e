//! Checkpoints that no run writes: of weights from elsewhere, or as another number of ranks would have written one.
//! Both are written a tensor at a time.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use pyroclast_kernels::numbers::Numbers;
use pyroclast_strategies::ParamInfo;
use pyroclast_strategies::shard::shard;
use serde_json::Value;

use super::{Checkpoint, Draft, FORMAT, Manifest, Stored, Tensors, Written};
use crate::error::Error;

/// A part of a parameter that is to be written.
struct Part<'a> {
    of: &'a str,
    info: ParamInfo,
    aliases: &'a [String],
    range: Range<usize>,
}

/// Makes a checkpoint at `path` of weights alone, in their own types and after no step. `config` is what is known of
/// the model.
///
/// # Errors
///
/// [`Error::Config`] if there is something at `path`, [`Error::BadFile`] if `source` is damaged, [`Error::Io`] if the
/// checkpoint cannot be written.
pub(crate) fn import(
    source: &Tensors,
    params: &[(ParamInfo, Stored)],
    config: Value,
    path: &Path,
) -> Result<(), Error> {
    let parts = params.iter().map(|(info, _)| {
        let range = 0..info.num_elements();
        Part { of: "weights", info: info.clone(), aliases: &[], range }
    });
    let parts: Vec<Part<'_>> = parts.collect();
    let stored: BTreeMap<&str, &Stored> =
        params.iter().map(|(info, stored)| (info.path.as_str(), stored)).collect();
    let read = |part: &Part<'_>| match stored.get(part.info.path.as_str()) {
        Some(stored) => stored.read(source),
        None => Ok(Numbers::default()),
    };
    let manifest = Manifest {
        format: FORMAT,
        step: 0,
        skipped: 0,
        scaler: None,
        samples: 0,
        tokens: 0,
        dataset_len: 0,
        callbacks: BTreeMap::new(),
        kept: vec![],
        replaced: vec![],
        node_local: false,
        world: 1,
        config,
        tensors: BTreeMap::new(),
        files: BTreeMap::new(),
    };
    write(path, manifest, |draft| Ok(vec![write_rank(draft, 0, &parts, &read)?]))
}

/// Writes the checkpoint to `path` as `world` ranks would have written it.
///
/// # Errors
///
/// [`Error::Config`] if there is something at `path`, [`Error::BadFile`] if the checkpoint is damaged, [`Error::Io`] if
/// the new one cannot be written.
pub fn reshard(checkpoint: &Checkpoint, path: &Path, world: usize) -> Result<(), Error> {
    let manifest =
        Manifest { node_local: false, files: BTreeMap::new(), ..checkpoint.manifest.clone() };
    let read = |part: &Part<'_>| {
        let numbers = checkpoint.read(part.of, &part.info.path, part.range.clone())?;
        Ok(numbers.unwrap_or_default())
    };
    write(path, manifest, |draft| {
        let ranks = 0..world;
        ranks.map(|rank| write_rank(draft, rank, &parts(checkpoint, rank, world), &read)).collect()
    })
}

/// What a rank has of a checkpoint.
fn parts(checkpoint: &Checkpoint, rank: usize, world: usize) -> Vec<Part<'_>> {
    let mut parts = vec![];
    for (path, tensor) in &checkpoint.manifest.tensors {
        let info = ParamInfo { path: path.clone(), shape: tensor.shape.clone() };
        let range = shard(info.num_elements(), world, rank);
        // A parameter without elements is rank 0's.
        if !range.is_empty() || (rank == 0 && info.num_elements() == 0) {
            let of = ["weights"].into_iter().chain(tensor.states.keys().map(String::as_str));
            parts.extend(of.map(|of| {
                let (info, range) = (info.clone(), range.clone());
                Part { of, info, aliases: &tensor.aliases, range }
            }));
        }
    }
    parts
}

/// Writes a checkpoint, whole or not at all.
fn write(
    path: &Path,
    manifest: Manifest,
    files: impl Fn(&Draft) -> Result<Vec<Written>, Error>,
) -> Result<(), Error> {
    let path = std::path::absolute(path).map_err(Error::io("finding", path))?;
    if path.exists() {
        return Err(Error::setting("to", format!("{} exists already", path.display())));
    }
    let draft = Draft::new(&path);
    draft.create()?;
    let finished = files(&draft).and_then(|written| draft.finish(&manifest.with_files(written)));
    if finished.is_err() {
        draft.discard();
    }
    finished
}

fn write_rank(
    draft: &Draft,
    rank: usize,
    parts: &[Part<'_>],
    read: &impl Fn(&Part<'_>) -> Result<Numbers, Error>,
) -> Result<Written, Error> {
    let mut file = draft.shard(rank);
    for part in parts {
        let numbers = read(part)?;
        file.announce(part.of, &part.info, part.range.start, numbers.as_slice());
        file.alias(&part.info.path, part.aliases);
    }
    let mut file = file.begin()?;
    for part in parts {
        let numbers = read(part)?;
        file.piece(part.of, &part.info, part.range.start, numbers.as_slice())?;
    }
    file.finish()
}
