//! Where a rank's checkpoints are, and whether it looks after them.

use std::path::PathBuf;

use pyroclast_strategies::ProcessGroup;

use crate::checkpoint::Manifest;
use crate::error::Error;
use crate::output::{RunFolder, Sharing};

/// A rank's part in the folder of its run.
#[derive(Clone, Debug)]
pub(in crate::trainer) struct Home {
    /// As this rank names it.
    folder: Option<RunFolder>,
    sharing: Sharing,
    role: Role,
}

/// What a rank does in the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// It makes, names and removes checkpoints, as one rank does for each folder.
    Keeper,
    /// It writes its file.
    Writer,
}

impl Home {
    /// Of the rank `rank`, the `local_rank`-th of its machine.
    pub(in crate::trainer) fn new(
        folder: Option<RunFolder>,
        sharing: Sharing,
        (rank, local_rank): (usize, usize),
    ) -> Self {
        let is_first = match sharing {
            Sharing::OneFolder => rank == 0,
            Sharing::NodeLocal => local_rank == 0,
        };
        let role = if is_first { Role::Keeper } else { Role::Writer };
        Self { folder, sharing, role }
    }

    pub(in crate::trainer) fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// The folder of the run, if it writes one.
    pub(in crate::trainer) fn folder(&self) -> Option<&RunFolder> {
        self.folder.as_ref()
    }

    /// The same, if this rank looks after it.
    pub(in crate::trainer) fn kept(&self) -> Option<&RunFolder> {
        self.folder().filter(|_| self.role == Role::Keeper)
    }

    pub(super) fn is_kept(&self) -> bool {
        self.kept().is_some()
    }

    /// The path here of the checkpoint that rank 0 has at `first`.
    pub(super) fn path_of(&self, first: PathBuf) -> Result<PathBuf, Error> {
        match (self.sharing, &self.folder) {
            (Sharing::OneFolder, _) => Ok(first),
            (Sharing::NodeLocal, Some(folder)) => {
                let path = folder.checkpoints().join(first.file_name().unwrap_or_default());
                std::path::absolute(&path).map_err(Error::io("finding", path))
            }
            (Sharing::NodeLocal, None) => {
                Err(Error::setting("out", "with node_local every rank needs one; name a folder"))
            }
        }
    }

    /// Rank 0's manifest, on all ranks that keep a folder.
    pub(super) fn shared(
        &self,
        manifest: Manifest,
        group: &ProcessGroup,
    ) -> Result<Manifest, Error> {
        if self.sharing == Sharing::OneFolder {
            return Ok(manifest);
        }
        let text = match group.rank() {
            0 => serde_json::to_vec(&manifest).unwrap_or_default(),
            _ => vec![],
        };
        let all = group.all_gather_uneven(text).wait()?;
        let read = serde_json::from_slice(all.first().map_or(&[], Vec::as_slice));
        read.map_err(|error| Error::Saving { rank: 0, problem: format!("its manifest: {error}") })
    }
}
