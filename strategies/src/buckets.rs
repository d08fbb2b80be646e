//! Gradients on their way from Burn's backward pass into flat buffers, and through the reduction.
//!
//! There is one bucket per unit. Every rank must launch the same reductions in the same order:
//!
//! * Where every rank holds all weights, each bucket is reduced as soon as it is final, while the backward
//!   pass goes on with the units before it; last unit first and the root unit at the end, whatever the
//!   order in which they become final. Ranks may run different units.
//! * Where weights are gathered, too, in the order in which units end: the same on every rank.
//!
//! A bucket's size in elements makes a message of several units, or several of one ([`Parcel`]).
//!
//! Where every rank holds all gradients, that happens in the last micro-batch of a step. Where they are
//! sharded, in every one. Its buffer is freed before the next unit's is filled.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::Module;
use burn::tensor::{Gradients, Tensor};
use pyroclast_kernels::gradient::{self, Finite, Onto};
use pyroclast_kernels::interop;
use pyroclast_kernels::numbers::{Numbers, SliceMut};

use crate::data_parallel::Setup;
use crate::error::Error;
use crate::events::{Event, Events};
use crate::group::ProcessGroup;
use crate::layout::{Layout, ROOT, UnitLayout};
use crate::memory::{Category, Held, Ledger};
use crate::parcel::Parcel;
use crate::sizes::Overlap;
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
    /// Elements of a message; none for those of a unit.
    limit: Option<usize>,
    overlap: Overlap,
    ledger: Ledger,
    events: Events,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    buckets: Vec<Bucket>,
    /// Units whose buckets are final and wait for more to fill a message.
    waiting: Vec<usize>,
    /// What is with the communication thread.
    parcels: Vec<Parcel>,
    micro_batch: MicroBatch,
    counts: Counts,
    /// Micro-batches of this step so far.
    micro_batches: usize,
    /// Of the buckets that are launched in fixed order, those not yet launched are below this index.
    unlaunched: usize,
    /// The first gradient of this step that is not finite: unit, parameter, and micro-batch, counted from 1.
    not_finite: Option<(usize, usize, usize)>,
    /// What went wrong inside a backward pass, which cannot return it.
    error: Option<Error>,
}

#[derive(Debug)]
struct Bucket {
    storage: Storage,
    /// Counts `storage`.
    held: Option<Held>,
    /// By parameter: whether a gradient has arrived in this step.
    seen: Vec<bool>,
    /// By parameter: whether `storage` has a gradient of it, or what an earlier step left there.
    written: Vec<bool>,
    /// Where gradients are sharded: sums over ranks of the own shard. None before the first
    /// micro-batch.
    shard: Option<(Numbers, Held)>,
    /// Forward passes of the unit whose backward pass has not run.
    open: usize,
    is_final: bool,
    /// Whether it was launched in this micro-batch.
    is_launched: bool,
}

#[derive(Debug)]
enum Storage {
    /// Local sums, or, after the reduction, sums over all ranks: all of them, or in the own shard.
    Here(Numbers),
    /// Not needed until the unit's next backward pass.
    Freed,
    /// With the communication thread.
    InFlight,
    /// Lost to an error.
    Lost,
}

impl GradientBuckets {
    pub(crate) fn new(
        layout: &Arc<Layout>,
        group: &Arc<ProcessGroup>,
        (stage, setup): (Stage, &Setup),
        (ledger, events): (&Ledger, &Events),
    ) -> Self {
        let bucket = |unit: &UnitLayout| {
            let mut bucket = Bucket {
                storage: Storage::Freed,
                held: None,
                seen: vec![false; unit.params.len()],
                written: vec![false; unit.params.len()],
                shard: None,
                open: 0,
                is_final: false,
                is_launched: false,
            };
            if !stage.shards_gradients() {
                bucket.allocate(unit, ledger);
            }
            bucket
        };
        let buckets: Vec<Bucket> = layout.units.iter().map(bucket).collect();
        let state = State {
            unlaunched: buckets.len(),
            buckets,
            waiting: vec![],
            parcels: vec![],
            micro_batch: MicroBatch::Last,
            counts: Counts::Yes,
            micro_batches: 0,
            not_finite: None,
            error: None,
        };
        Self {
            layout: Arc::clone(layout),
            group: Arc::clone(group),
            stage,
            limit: setup.sizes.reduce_bucket,
            overlap: setup.overlap,
            ledger: ledger.clone(),
            events: events.clone(),
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a step: forgets the gradients of the last one.
    pub(crate) fn begin_step(&self) {
        let state = &mut *self.lock();
        (state.unlaunched, state.micro_batches) = (state.buckets.len(), 0);
        state.not_finite = None;
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
        state.micro_batches += 1;
        if self.stage.shards_gradients() {
            state.unlaunched = state.buckets.len();
        }
        for bucket in &mut state.buckets {
            (bucket.open, bucket.is_final, bucket.is_launched) = (0, false, false);
        }
    }

    /// A unit's forward pass has run, so one more backward pass of it is to be expected.
    pub(crate) fn forward_ran(&self, unit: usize) {
        self.lock().buckets[unit].open += 1;
    }

    /// A unit's backward pass has run and produced `grads`.
    pub(crate) fn unit_finished(&self, unit: usize, grads: Vec<ParamGrad>) {
        let state = &mut *self.lock();
        if self.stage.shards_gradients() {
            // The unit before has had this one's whole backward pass for its reduction.
            self.land(state);
        }
        self.add(state, grads, unit);
        let bucket = &mut state.buckets[unit];
        bucket.open = bucket.open.saturating_sub(1);
        bucket.is_final = bucket.open == 0;
        match self.stage {
            // Weights are gathered in between: what is launched when follows the order of execution.
            Stage::Parameters if bucket.is_final => self.launch(state, unit),
            Stage::Parameters => {}
            Stage::Nothing | Stage::Optimizer if state.micro_batch != MicroBatch::Last => {}
            Stage::Nothing | Stage::Optimizer | Stage::Gradients => self.launch_final(state),
        }
    }

    /// Notes what went wrong inside a backward pass.
    pub(crate) fn fail(&self, error: Error) {
        self.lock().error.get_or_insert(error);
    }

    /// The whole backward pass of a micro-batch has run; takes the root unit's gradients. Where they
    /// are sharded it waits for the reductions, and frees what is not this rank's.
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
        if self.stage.shards_gradients() {
            self.land(state);
        }
        if state.error.is_none() {
            self.add(state, take(model, &mut grads), ROOT);
        }
        state.error.take().map_or(Ok(()), Err)?;
        if !self.stage.shards_gradients() {
            return Ok(());
        }
        for unit in (0..state.buckets.len()).rev() {
            let bucket = &state.buckets[unit];
            let is_here = matches!(bucket.storage, Storage::Here(_));
            if !bucket.is_launched || (is_here && !state.waiting.contains(&unit)) {
                self.launch(state, unit);
            }
        }
        state.unlaunched = 0;
        self.send(state);
        self.land(state);
        state.error.take().map_or(Ok(()), Err)
    }

    /// Waits until every bucket holds the sum over all ranks.
    ///
    /// # Errors
    ///
    /// What ended a collective.
    pub(crate) fn finish_step(&self) -> Result<(), Error> {
        if self.stage.shards_gradients() {
            return Ok(());
        }
        let state = &mut *self.lock();
        while let Some(unit) = state.unlaunched.checked_sub(1) {
            self.launch(state, unit);
            state.unlaunched = unit;
        }
        self.send(state);
        self.land(state);
        state.error.take().map_or(Ok(()), Err)
    }

    /// Micro-batches of this step, and for every parameter in the order of the layout whether a
    /// gradient has reached it on this rank.
    pub(crate) fn step_so_far(&self) -> (usize, Vec<bool>) {
        let state = self.lock();
        let seen = state.buckets.iter().flat_map(|bucket| bucket.seen.iter().copied()).collect();
        (state.micro_batches, seen)
    }

    /// Takes the parameters that a gradient has reached on any rank for those that it has reached here.
    pub(crate) fn set_seen(&self, seen: &[bool]) {
        let mut seen = seen.iter();
        for bucket in &mut self.lock().buckets {
            bucket.seen.iter_mut().zip(&mut seen).for_each(|(here, any)| *here = *any);
        }
    }

    /// The first gradient on this rank that was not finite in this step: unit, parameter, and micro-batch.
    pub(crate) fn not_finite(&self) -> Option<(usize, usize, usize)> {
        self.lock().not_finite
    }

    /// Hands what this rank owns of each unit's reduced gradients to `each`, with what is known of
    /// which parameters received one.
    pub(crate) fn for_each(&self, mut each: impl FnMut(usize, SliceMut<'_>, &[bool])) {
        for (unit, bucket) in self.lock().buckets.iter_mut().enumerate() {
            let owned = self.stage.owned(&self.layout.units[unit], &self.group);
            let gradients = match (&mut bucket.shard, &mut bucket.storage) {
                (Some((shard, _)), _) => shard.as_mut(),
                (None, Storage::Here(sums)) => sums.part_mut(owned),
                (None, _) => SliceMut::F32(&mut []),
            };
            each(unit, gradients, &bucket.seen);
        }
    }

    fn add(&self, state: &mut State, grads: Vec<ParamGrad>, from: usize) {
        // Burn may hold gradients for leaves that are not this model's to train.
        let (places, tensors): (Vec<_>, Vec<_>) = grads
            .into_iter()
            .filter_map(|(id, grad)| Some((self.layout.locate(id)?, grad)))
            .unzip();
        let bytes = |grad: &Tensor<1>| grad.shape().num_elements() * grad.dtype().size();
        let bytes = tensors.iter().map(bytes).sum();
        let _held = self.ledger.hold(Category::Gradients, bytes);
        let counts = state.counts;
        let mut late = None;
        let read = interop::read_all(tensors, |position, values| {
            let (unit, param) = places[position];
            let slot = self.layout.slot(places[position]);
            let bucket = &mut state.buckets[unit];
            let is_late = bucket.is_launched && from != unit;
            if let Storage::Freed = bucket.storage {
                bucket.allocate(&self.layout.units[unit], &self.ledger);
            }
            let (false, Storage::Here(sums)) = (is_late, &mut bucket.storage) else {
                late = Some(Error::LateGradient { path: slot.info.path.clone() });
                return;
            };
            let sums = sums.part_mut(slot.range.clone());
            bucket.seen[param] = true;
            let written = std::mem::replace(&mut bucket.written[param], true);
            match (counts, written) {
                (Counts::Yes, written) => {
                    let onto = if written { Onto::Sum } else { Onto::Nothing };
                    let factor = 1.0 / self.layout.units[unit].predivisor(self.group.world());
                    if gradient::collect(sums, values, factor as f32, onto) == Finite::NotAll {
                        state.not_finite.get_or_insert((unit, param, state.micro_batches));
                    }
                }
                (Counts::No, true) => {}
                (Counts::No, false) => sums.clear(),
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
            // Tied weights may add to the root until the very end, and a unit may run once more within
            // the second forward pass of one around it.
            let around = &self.layout.units[unit].around;
            let is_closed = around.iter().all(|outer| state.buckets[*outer].open == 0);
            if !state.buckets[unit].is_final || !is_closed || unit == ROOT {
                return;
            }
            self.launch(state, unit);
            state.unlaunched = unit;
        }
    }

    /// Gives a bucket that is final to its message, and sends that if it is full.
    fn launch(&self, state: &mut State, unit: usize) {
        let (bucket, layout) = (&mut state.buckets[unit], &self.layout.units[unit]);
        bucket.is_launched = true;
        if layout.len == 0 {
            return;
        }
        if let Storage::Freed = bucket.storage {
            // No gradient reached the unit in this micro-batch, but it may have on another rank.
            bucket.allocate(layout, &self.ledger);
        }
        let len_of = |units: &[usize]| units.iter().map(|unit| self.layout.units[*unit].len).sum();
        let waiting: usize = len_of(&state.waiting);
        let limit = self.limit.unwrap_or(0);
        let is_of_type =
            |other: &usize| self.layout.units[*other].types.reduce == layout.types.reduce;
        let fits = waiting + layout.len <= limit && state.waiting.iter().all(is_of_type);
        if waiting > 0 && !fits {
            self.send(state);
        }
        state.waiting.push(unit);
        if len_of(&state.waiting) >= limit {
            self.send(state);
        }
    }

    /// Sends the buckets that wait.
    fn send(&self, state: &mut State) {
        let units = std::mem::take(&mut state.waiting);
        let mut buffers = vec![];
        for unit in units {
            let (bucket, layout) = (&mut state.buckets[unit], &self.layout.units[unit]);
            let Storage::Here(sums) = &mut bucket.storage else { continue };
            let unwritten =
                layout.params.iter().zip(&bucket.written).filter(|(_, written)| !**written);
            unwritten.for_each(|(slot, _)| sums.part_mut(slot.range.clone()).clear());
            if self.group.world() > 1 {
                self.events.push(Event::Reduce(unit));
                buffers.push((unit, sums.take()));
                bucket.storage = Storage::InFlight;
            }
        }
        if buffers.is_empty() {
            return;
        }
        let sizes = (self.group.world(), self.limit);
        state.parcels.push(Parcel::send(buffers, sizes, |unit, sums| match self.stage {
            Stage::Nothing => self.group.all_reduce_unit(unit, sums),
            _ => self.group.reduce_scatter_unit(unit, sums),
        }));
        if self.overlap == Overlap::No {
            self.land(state);
        }
    }

    /// Waits for the reductions that are under way, and keeps what this rank holds of each. What goes wrong
    /// is noted.
    fn land(&self, state: &mut State) {
        for parcel in std::mem::take(&mut state.parcels) {
            let units: Vec<usize> = parcel.units().collect();
            units.iter().for_each(|unit| self.events.push(Event::ReduceWait(*unit)));
            match parcel.wait() {
                Ok(reduced) => {
                    for (unit, reduced) in reduced {
                        self.keep(&mut state.buckets[unit], &self.layout.units[unit], reduced);
                    }
                }
                Err(error) => {
                    units.iter().for_each(|unit| state.buckets[*unit].storage = Storage::Lost);
                    state.error.get_or_insert(error);
                }
            }
        }
    }

    /// Keeps reduced gradients: all of them, or the own shard.
    fn keep(&self, bucket: &mut Bucket, layout: &UnitLayout, reduced: Numbers) {
        if !self.stage.shards_gradients() {
            bucket.storage = Storage::Here(reduced);
            return;
        }
        let own = reduced.part(self.stage.owned(layout, &self.group));
        match &mut bucket.shard {
            Some((sums, _)) => {
                // Whether the step's sums are finite is asked when all are there.
                let _ = gradient::collect(sums.as_mut(), own, 1.0, Onto::Sum);
            }
            None => {
                let own = own.to_numbers();
                let held = self.ledger.hold(Category::Gradients, own.bytes());
                bucket.shard = Some((own, held));
            }
        }
        (bucket.storage, bucket.held) = (Storage::Freed, None);
    }
}

impl Bucket {
    /// Makes room for the unit's gradients.
    fn allocate(&mut self, unit: &UnitLayout, ledger: &Ledger) {
        let sums = Numbers::zeros(unit.types.reduce, unit.len);
        self.held = Some(ledger.hold(Category::Gradients, sums.bytes()));
        self.storage = Storage::Here(sums);
        self.written.fill(false);
    }
}
