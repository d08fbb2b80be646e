//! What a rank saves, and when.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use burn::module::Module;
use pyroclast_strategies::{DataParallel, ReduceOp};

use super::Rank;
use crate::callback::{self, Action};
use crate::checkpoint::{FORMAT, Manifest};
use crate::error::Error;
use crate::trainer::save::{Now, State, Wanted};

impl<T> Rank<'_, T> {
    /// Saves after a step, if a checkpoint is due.
    pub(super) fn save_if_due<M: Module>(
        &mut self,
        model: &M,
        strategy: &DataParallel,
        validated: bool,
    ) -> Result<(), Error> {
        let (step, epochs) = (self.progress.step, self.progress.epochs());
        let wanted = self.saver.wants(&self.group, &Now { step, epochs, validated })?;
        wanted.map_or(Ok(()), |wanted| self.save(model, strategy, wanted))
    }

    /// Saves the run, at its end.
    pub(super) fn save_at_end<M: Module>(
        &mut self,
        model: &M,
        strategy: &DataParallel,
    ) -> Result<(), Error> {
        let wanted = self.saver.wants_at_end(&self.group, self.progress.step)?;
        wanted.map_or(Ok(()), |wanted| self.save(model, strategy, wanted))?;
        self.saver.complete(&self.group)
    }

    fn save<M: Module>(
        &mut self,
        model: &M,
        strategy: &DataParallel,
        wanted: Wanted,
    ) -> Result<(), Error> {
        let (manifest, epochs) = (self.manifest()?, self.progress.epochs());
        let state = State { group: &self.group, strategy, model, manifest, epochs };
        self.saver.save(&state, wanted)
    }

    /// Whether any rank wants to stop, agreed on by all, so that none goes on alone. All learn as well whether all
    /// have written their files of a checkpoint, and complete it then.
    pub(super) fn agree_to_stop(&mut self, action: Action) -> Result<bool, Error> {
        let stop = action == Action::Stop || self.shared.stop.load(Ordering::Relaxed);
        let votes = [stop, self.saver.is_writing()].map(|vote| f64::from(u8::from(vote)));
        let votes = self.group.all_reduce(votes.to_vec(), ReduceOp::Max).wait()?;
        if votes[1] == 0.0 {
            self.saver.complete(&self.group)?;
        }
        Ok(votes[0] > 0.0)
    }

    /// What a checkpoint says of the run.
    fn manifest(&self) -> Result<Manifest, Error> {
        Ok(Manifest {
            format: FORMAT,
            step: self.progress.step,
            skipped: self.progress.skipped,
            scaler: self.scaler.skips().then(|| self.scaler.state()),
            samples: self.progress.samples,
            tokens: self.progress.tokens,
            dataset_len: self.progress.epoch_len,
            callbacks: callback::states(self.callbacks, &self.callback_states)?,
            kept: vec![],
            replaced: vec![],
            node_local: self.shared.plan.resolved.node_local,
            world: self.context.world,
            config: self.shared.config.clone(),
            tensors: BTreeMap::new(),
            files: BTreeMap::new(),
        })
    }
}
