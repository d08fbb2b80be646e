//! A rank's own file of a checkpoint: written before training goes on, or from a copy while it does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

use burn::module::Module;
use pyroclast_kernels::gradient;
use pyroclast_kernels::numbers::Numbers;
use pyroclast_strategies::{ParamInfo, Piece, PieceOf};

use super::State;
#[cfg(test)]
use crate::checkpoint::faults;
use crate::checkpoint::{Shard, Written};
use crate::error::Error;

/// When a rank's file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// Before training goes on.
    Now,
    /// From a copy in host memory, while training goes on.
    Meanwhile,
}

/// A rank's file.
#[derive(Debug)]
pub(super) enum RankFile {
    /// Written, or not.
    Done(Result<Written, Error>),
    /// Being written, by a thread that stops when it is told that nobody waits for it any more.
    UnderWay { thread: JoinHandle<Result<Written, Error>>, is_abandoned: Arc<AtomicBool> },
}

impl RankFile {
    /// Begins to write what this rank holds, or writes all of it.
    pub(super) fn begin<M: Module>(state: &State<'_, M>, shard: Shard, when: When) -> Self {
        let step = state.manifest.step;
        let outcome = match when {
            When::Now => {
                let pieces = |each: &mut dyn FnMut(Piece<'_>)| {
                    Ok(state.strategy.own_pieces(state.model, each)?)
                };
                write(shard, step, pieces, || true)
            }
            When::Meanwhile => match copied(state).and_then(|copies| start(shard, step, copies)) {
                Ok(under_way) => return under_way,
                Err(error) => Err(error),
            },
        };
        Self::Done(outcome)
    }

    pub(super) fn is_written(&self) -> bool {
        match self {
            Self::Done(_) => true,
            Self::UnderWay { thread, .. } => thread.is_finished(),
        }
    }

    /// What was written.
    pub(super) fn wait(self) -> Result<Written, Error> {
        match self {
            Self::Done(outcome) => outcome,
            Self::UnderWay { thread, .. } => {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }
        }
    }

    /// Ends the writing, as soon as it may end.
    pub(super) fn abandon(self) {
        if let Self::UnderWay { thread, is_abandoned } = self {
            is_abandoned.store(true, Ordering::Relaxed);
            // Its error is not why the run has failed.
            let _ = thread.join();
        }
    }
}

/// A piece whose numbers do not change any more.
struct Copied {
    of: PieceOf,
    info: ParamInfo,
    aliases: Vec<String>,
    start: usize,
    values: Numbers,
}

/// This rank's pieces: as many bytes more as its file has.
fn copied<M: Module>(state: &State<'_, M>) -> Result<Vec<Copied>, Error> {
    let mut copies = vec![];
    state.strategy.own_pieces(state.model, |piece| {
        let Piece { of, info, aliases, range, values } = piece;
        let (info, aliases, start) = (info.clone(), aliases.to_vec(), range.start);
        copies.push(Copied { of, info, aliases, start, values: values.to_numbers() });
    })?;
    Ok(copies)
}

fn start(shard: Shard, step: u64, copies: Vec<Copied>) -> Result<RankFile, Error> {
    let is_abandoned = Arc::new(AtomicBool::new(false));
    let goes_on = {
        let is_abandoned = Arc::clone(&is_abandoned);
        move || !is_abandoned.load(Ordering::Relaxed)
    };
    let folder = shard.path().to_owned();
    #[cfg(test)]
    let faults = faults::here();
    let body = move || {
        #[cfg(test)]
        faults::share(faults);
        let pieces = |each: &mut dyn FnMut(Piece<'_>)| {
            for Copied { of, info, aliases, start, values } in &copies {
                let range = *start..start + values.len();
                each(Piece { of: *of, info, aliases, range, values: values.as_slice() });
            }
            Ok(())
        };
        write(shard, step, pieces, goes_on)
    };
    let thread = Builder::new().name("checkpoint".to_owned()).spawn(body);
    let thread = thread.map_err(Error::io("starting a thread to write", folder))?;
    Ok(RankFile::UnderWay { thread, is_abandoned })
}

/// Writes the pieces that `pieces` hands out, which it does twice and in the same order: once to announce them.
fn write(
    mut shard: Shard,
    step: u64,
    pieces: impl Fn(&mut dyn FnMut(Piece<'_>)) -> Result<(), Error>,
    goes_on: impl Fn() -> bool,
) -> Result<Written, Error> {
    let mut broken = None;
    pieces(&mut |piece| {
        shard.announce(piece.of.name(), piece.info, piece.range.start, piece.values);
        shard.alias(&piece.info.path, piece.aliases);
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
    pieces(&mut |piece| {
        if outcome.is_ok() && goes_on() {
            outcome = file.piece(piece.of.name(), piece.info, piece.range.start, piece.values);
        }
    })?;
    outcome?;
    file.finish()
}
