//! What ranks tell each other while they save.

use std::path::{Path, PathBuf};

use pyroclast_strategies::ProcessGroup;

use crate::checkpoint::{Draft, Written};
use crate::error::Error;

/// What rank 0 thinks, on all ranks.
pub(super) fn first_decides(group: &ProcessGroup, decision: bool) -> Result<bool, Error> {
    Ok(group.broadcast(vec![u8::from(decision)], 0).wait()? == [1])
}

/// The path that rank 0 knows, on all ranks.
pub(super) fn told(group: &ProcessGroup, path: Option<PathBuf>) -> Result<PathBuf, Error> {
    let absolute = |path: &Path| std::path::absolute(path).map_err(Error::io("finding", path));
    let mine = path.as_deref().map(absolute).transpose()?;
    let text = mine.map(|path| path.into_os_string().into_encoded_bytes()).unwrap_or_default();
    // Only rank 0's counts.
    let text = if group.rank() == 0 { text } else { vec![] };
    let all = group.all_gather_uneven(text).wait()?;
    let path = String::from_utf8(all.into_iter().next().unwrap_or_default()).map_err(|_| {
        Error::setting("out", "is no text that every machine can read; name another folder")
    })?;
    Ok(PathBuf::from(path))
}

/// Whether this rank can write to the folder that the rank which keeps it has made.
pub(super) fn seen(draft: &Draft) -> Result<(), Error> {
    match draft.is_there() {
        true => Ok(()),
        false => Err(Error::setting(
            "out",
            format!(
                "{} is not on this machine, although rank 0 has just made it; name a folder that all machines \
                 share, or let each keep its own with node_local",
                draft.folder().display()
            ),
        )),
    }
}

/// What all ranks have written, if all have.
pub(super) fn exchanged(
    group: &ProcessGroup,
    own: Result<Written, Error>,
) -> Result<Vec<Written>, Error> {
    let (text, own) = match own {
        Ok(written) => (serde_json::to_string(&written).unwrap_or_default(), Ok(())),
        Err(error) => (String::new(), Err(error)),
    };
    agreed(group, own)?;
    let all = group.all_gather_uneven(text.into_bytes()).wait()?;
    let read = |text: &Vec<u8>| serde_json::from_slice(text).unwrap_or_default();
    Ok(all.iter().map(read).collect())
}

/// The outcome, if all ranks have succeeded; else this rank's own error, or the first of the others'.
pub(super) fn agreed<T>(group: &ProcessGroup, outcome: Result<T, Error>) -> Result<T, Error> {
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
