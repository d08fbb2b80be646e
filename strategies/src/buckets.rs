//! Gradients on their way from Burn's backward pass into flat buffers, and through the reduction.
//!
//! There is one bucket per unit. During the last micro-batch of a step, a unit's bucket is reduced
//! as soon as its gradients are final, while the backward pass goes on with the units before it.
//! Buckets are launched in one fixed order, last unit first and the root unit at the end, whatever
//! the order in which they become final: every rank must launch the same collectives in the same
//! order.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::Module;
use burn::tensor::Gradients;
use pyroclast_kernels::{gradient, interop};

use crate::collectives::ReduceOp;
use crate::error::Error;
use crate::group::{Pending, ProcessGroup};
use crate::layout::Layout;
use crate::stage::Stage;
use crate::unit::{ParamGrad, take};

/// Which micro-batch of a step is running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MicroBatch {
    /// More will follow: gradients are only accumulated.
    Intermediate,
    /// The last one: buckets are reduced as they become final.
    Last,
}

/// Whether a micro-batch's gradients count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// They do.
    Yes,
    /// The batch only keeps this rank in step with the others: whatever its gradients are, NaN
    /// included, they count as zero.
    No,
}

/// All of a step's gradients.
#[derive(Debug)]
pub(crate) struct GradientBuckets {
    layout: Arc<Layout>,
    group: Arc<ProcessGroup>,
    stage: Stage,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    buckets: Vec<Bucket>,
    micro_batch: MicroBatch,
    counts: Counts,
    /// Buckets not yet launched are those below this index.
    unlaunched: usize,
    /// What went wrong inside a backward pass, which cannot return it.
    error: Option<Error>,
}

#[derive(Debug)]
struct Bucket {
    storage: Storage,
    /// By parameter: whether a gradient has arrived in this step.
    seen: Vec<bool>,
    /// By parameter: whether `storage` has a gradient of it, or what an earlier step left there.
    written: Vec<bool>,
    /// Under [`Stage::Gradients`]: sums over ranks of the own shard. None before the first micro-batch.
    shard: Option<Vec<f32>>,
    /// Forward passes of the unit whose backward pass has not run.
    open: usize,
    is_final: bool,
}

#[derive(Debug)]
enum Storage {
    /// Local sums, or, after the reduction, sums over all ranks: all of them, or in the own shard.
    Here(Vec<f32>),
    /// Not needed until the unit's next backward pass.
    Freed,
    /// With the communication thread.
    InFlight(Pending<Vec<f32>>),
    /// Lost to an error.
    Lost,
}

impl Storage {
    fn here(&self) -> &[f32] {
        match self {
            Self::Here(values) => values,
            _ => &[],
        }
    }
}

impl GradientBuckets {
    pub(crate) fn new(layout: Arc<Layout>, group: Arc<ProcessGroup>, stage: Stage) -> Self {
        let bucket = |unit: &crate::UnitLayout| Bucket {
            storage: match stage {
                Stage::Gradients => Storage::Freed,
                Stage::Nothing | Stage::Optimizer => Storage::Here(vec![0.0; unit.len]),
            },
            seen: vec![false; unit.params.len()],
            written: vec![false; unit.params.len()],
            shard: None,
            open: 0,
            is_final: false,
        };
        let buckets: Vec<Bucket> = layout.units.iter().map(bucket).collect();
        let state = State {
            unlaunched: buckets.len(),
            buckets,
            micro_batch: MicroBatch::Last,
            counts: Counts::Yes,
            error: None,
        };
        Self { layout, group, stage, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a step: forgets the gradients of the last one.
    pub(crate) fn begin_step(&self) {
        let state = &mut *self.lock();
        state.unlaunched = state.buckets.len();
        for bucket in &mut state.buckets {
            bucket.seen.fill(false);
            bucket.written.fill(false);
            bucket.shard = None;
        }
    }

    /// Starts a micro-batch.
    pub(crate) fn begin_micro_batch(&self, micro_batch: MicroBatch, counts: Counts) {
        let state = &mut *self.lock();
        (state.micro_batch, state.counts) = (micro_batch, counts);
        for bucket in &mut state.buckets {
            (bucket.open, bucket.is_final) = (0, false);
        }
        if self.stage == Stage::Gradients {
            state.unlaunched = state.buckets.len();
        }
    }

    /// Whether buckets are reduced in this micro-batch.
    fn reduces(&self, state: &State) -> bool {
        state.micro_batch == MicroBatch::Last || self.stage == Stage::Gradients
    }

    /// A unit's forward pass has run, so one more backward pass of it is to be expected.
    pub(crate) fn forward_ran(&self, unit: usize) {
        self.lock().buckets[unit].open += 1;
    }

    /// A unit's backward pass has run and produced `grads`.
    pub(crate) fn unit_finished(&self, unit: usize, grads: Vec<ParamGrad>) {
        let state = &mut *self.lock();
        self.add(state, grads);
        let bucket = &mut state.buckets[unit];
        bucket.open = bucket.open.saturating_sub(1);
        bucket.is_final = bucket.open == 0;
        if self.reduces(state) {
            self.launch_final(state);
        }
    }

    /// The whole backward pass of a micro-batch has run; takes the root unit's gradients. Under
    /// [`Stage::Gradients`] it waits for the reductions, and frees what is not this rank's.
    ///
    /// # Errors
    ///
    /// What went wrong inside the backward pass, or what ended a collective.
    pub(crate) fn backward_finished<M: Module>(
        &self,
        model: &M,
        mut grads: Gradients,
    ) -> Result<(), Error> {
        let state = &mut *self.lock();
        self.add(state, take(model, &mut grads));
        state.error.take().map_or(Ok(()), Err)?;
        if self.stage != Stage::Gradients {
            return Ok(());
        }
        self.launch_all(state);
        for (bucket, unit) in state.buckets.iter_mut().zip(&self.layout.units) {
            let reduced = match std::mem::replace(&mut bucket.storage, Storage::Freed) {
                Storage::InFlight(pending) => pending.wait()?,
                _ => continue,
            };
            let own = &reduced[self.stage.owned(unit, &self.group)];
            match &mut bucket.shard {
                Some(sums) => gradient::accumulate(sums, own),
                None => bucket.shard = Some(own.to_vec()),
            }
        }
        Ok(())
    }

    /// Waits until every bucket holds the sum over all ranks.
    ///
    /// # Errors
    ///
    /// [`Error::UnusedParameters`] on several ranks, or what ended a collective.
    pub(crate) fn finish_step(&self) -> Result<(), Error> {
        let state = &mut *self.lock();
        self.zero_unseen(state)?;
        if self.stage == Stage::Gradients {
            return Ok(());
        }
        self.launch_all(state);
        for bucket in &mut state.buckets {
            bucket.storage = match std::mem::replace(&mut bucket.storage, Storage::Lost) {
                Storage::InFlight(pending) => Storage::Here(pending.wait()?),
                here => here,
            };
        }
        Ok(())
    }

    /// Hands what this rank owns of each unit's reduced gradients to `each`, with what is known of
    /// which parameters received one.
    pub(crate) fn for_each(&self, mut each: impl FnMut(usize, &[f32], &[bool])) {
        for (unit, bucket) in self.lock().buckets.iter().enumerate() {
            let owned = self.stage.owned(&self.layout.units[unit], &self.group);
            let gradients = match &bucket.shard {
                Some(shard) => shard,
                None => bucket.storage.here().get(owned).unwrap_or_default(),
            };
            each(unit, gradients, &bucket.seen);
        }
    }

    fn add(&self, state: &mut State, grads: Vec<ParamGrad>) {
        // Burn may hold gradients for leaves that are not this model's to train.
        let (places, tensors): (Vec<_>, Vec<_>) = grads
            .into_iter()
            .filter_map(|(id, grad)| Some((self.layout.locate(id)?, grad)))
            .unzip();
        let mut late = None;
        let read = interop::read_all(tensors, |position, values| {
            let (unit, param) = places[position];
            let slot = self.layout.slot(places[position]);
            let bucket = &mut state.buckets[unit];
            if let Storage::Freed = bucket.storage {
                bucket.storage = Storage::Here(vec![0.0; self.layout.units[unit].len]);
                bucket.written.fill(false);
            }
            let Storage::Here(sums) = &mut bucket.storage else {
                late = Some(Error::LateGradient { path: slot.info.path.clone() });
                return;
            };
            let sums = &mut sums[slot.range.clone()];
            bucket.seen[param] = true;
            let written = std::mem::replace(&mut bucket.written[param], true);
            match (state.counts, written) {
                (Counts::Yes, true) => gradient::accumulate(sums, values),
                (Counts::Yes, false) => sums.copy_from_slice(values),
                (Counts::No, true) => {}
                (Counts::No, false) => sums.fill(0.0),
            }
        });
        let read = read.map_err(|source| Error::Read { what: "gradients".to_owned(), source });
        if let Some(error) = read.err().or(late) {
            state.error.get_or_insert(error);
        }
    }

    /// Launches the reduction of every final bucket whose turn has come: from the last unit down to
    /// the root unit, which is the first.
    fn launch_final(&self, state: &mut State) {
        while let Some(unit) = state.unlaunched.checked_sub(1) {
            let bucket = &mut state.buckets[unit];
            let everything_written = bucket.written.iter().all(|written| *written);
            // Tied weights may add to the root until the very end.
            if !bucket.is_final || !everything_written && self.group.world() > 1 {
                return;
            }
            self.launch(bucket, unit);
            state.unlaunched = unit;
        }
    }

    /// Launches all reductions that have not been, in the same order.
    fn launch_all(&self, state: &mut State) {
        while let Some(unit) = state.unlaunched.checked_sub(1) {
            let bucket = &mut state.buckets[unit];
            bucket.is_final = true;
            self.launch(bucket, unit);
            state.unlaunched = unit;
        }
    }

    fn launch(&self, bucket: &mut Bucket, unit: usize) {
        let sums = match std::mem::replace(&mut bucket.storage, Storage::Lost) {
            Storage::Here(sums) => sums,
            // No gradient reached the unit in this micro-batch, but it may have on another rank.
            Storage::Freed => vec![0.0; self.layout.units[unit].len],
            other => {
                bucket.storage = other;
                return;
            }
        };
        bucket.storage = if self.group.world() == 1 {
            Storage::Here(sums)
        } else if self.stage == Stage::Nothing {
            Storage::InFlight(self.group.ring_all_reduce(sums, ReduceOp::Sum))
        } else {
            Storage::InFlight(self.group.reduce_scatter(sums, ReduceOp::Sum))
        };
    }

    /// Clears the ranges of parameters that no gradient reached, which on several ranks is an error.
    fn zero_unseen(&self, state: &mut State) -> Result<(), Error> {
        let mut paths = Vec::new();
        for (bucket, unit) in state.buckets.iter_mut().zip(&self.layout.units) {
            for (slot, _) in unit.params.iter().zip(&bucket.seen).filter(|(_, seen)| !**seen) {
                paths.push(slot.info.path.clone());
                if let Storage::Here(sums) = &mut bucket.storage {
                    sums[slot.range.clone()].fill(0.0);
                }
            }
        }
        if paths.is_empty() || self.group.world() == 1 {
            return Ok(());
        }
        Err(Error::UnusedParameters { rank: self.group.rank(), paths })
    }
}
