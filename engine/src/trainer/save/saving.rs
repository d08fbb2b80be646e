//! A checkpoint on its way to the disk: every rank writes its own file, now or while training goes on, and once all
//! are there, rank 0 makes a checkpoint of them.

use std::path::PathBuf;

use burn::module::Module;
use pyroclast_strategies::ProcessGroup;

use super::State;
use super::file::{RankFile, When};
use super::home::Home;
use super::together::{agreed, exchanged, seen, told};
use crate::checkpoint::{Draft, Manifest};
use crate::error::Error;

/// A checkpoint that is being written.
#[derive(Debug)]
pub(super) struct Saving {
    draft: Draft,
    /// But for what the ranks write.
    manifest: Manifest,
    file: RankFile,
}

impl Saving {
    /// Begins a checkpoint at `path`, which rank 0 alone need know. All ranks call it. Where one fails all fail, and
    /// nothing is left.
    pub(super) fn begin<M: Module>(
        state: &State<'_, M>,
        (home, path): (&Home, Option<PathBuf>),
        manifest: Manifest,
        when: When,
    ) -> Result<Self, Error> {
        let group = state.group;
        let path = home.path_of(told(group, path)?);
        let draft = agreed(group, path.map(|path| Draft::new(&path)))?;
        let created = if home.is_kept() { draft.create() } else { Ok(()) };
        let usable = agreed(group, created).and_then(|()| agreed(group, seen(&draft)));
        if let Err(error) = usable {
            discard(&draft, home);
            return Err(error);
        }
        let file = RankFile::begin(state, draft.shard(group.rank()), when);
        Ok(Self { draft, manifest, file })
    }

    /// The checkpoint's name.
    pub(super) fn name(&self) -> PathBuf {
        PathBuf::from(self.draft.path().file_name().unwrap_or_default())
    }

    /// Whether this rank's file is written, or has failed to be.
    pub(super) fn is_written(&self) -> bool {
        self.file.is_written()
    }

    /// Waits for all ranks' files, and makes a checkpoint of them; returns its manifest, as ranks that keep a folder
    /// know it. All ranks call it. Where one fails all fail, and what was written is removed.
    pub(super) fn finish(self, group: &ProcessGroup, home: &Home) -> Result<Manifest, Error> {
        let Self { draft, manifest, file } = self;
        let outcome = exchanged(group, file.wait()).and_then(|written| {
            let manifest = home.shared(manifest.with_files(written), group)?;
            let finished = if home.is_kept() { draft.finish(&manifest) } else { Ok(()) };
            agreed(group, finished).map(|()| manifest)
        });
        if outcome.is_err() {
            discard(&draft, home);
        }
        outcome
    }

    /// Gives up, where the run has failed: the ranks cannot agree any more.
    pub(super) fn abandon(self, home: &Home) {
        self.file.abandon();
        discard(&self.draft, home);
    }
}

fn discard(draft: &Draft, home: &Home) {
    if home.is_kept() {
        draft.discard();
    }
}
