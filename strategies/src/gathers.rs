//! When a rank gathers the weights of which it holds a shard, and when it lets go of them.
//!
//! Every rank runs the same units in the same order, so every rank launches the same gathers in the
//! same order. What a gather is launched ahead for is the order of the last forward pass; where a pass
//! takes another turn, gathering ahead stops until the next one. The backward pass goes back the way
//! that the forward pass came.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::Device;
use pyroclast_kernels::flat::FlatTensor;
use pyroclast_kernels::numbers::{Numbers, SliceMut};

use crate::error::Error;
use crate::events::{Event, Events};
use crate::group::{Pending, ProcessGroup};
use crate::layout::{Buffers, Kind, Layout, ROOT, UnitLayout};
use crate::memory::{Category, Held, Ledger};
use crate::shard::shard;
use crate::sizes::Sizes;
use crate::stage::{AfterForward, BackwardPrefetch, Gathering};
use crate::weights::{FullUnit, Weights};

/// The shards of a rank, and the gathers that it takes part in.
#[derive(Debug)]
pub(crate) struct Gathers {
    layout: Arc<Layout>,
    group: Arc<ProcessGroup>,
    settings: Gathering,
    sizes: Sizes,
    ledger: Ledger,
    device: Device,
    events: Events,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By unit.
    shards: Vec<Shards>,
    /// Launched and not yet waited for, by unit.
    pending: BTreeMap<usize, InFlight>,
    /// Weights that stay whole for a while, by unit, and how many backward passes will use them.
    kept: HashMap<usize, (Arc<FullUnit>, usize)>,
    /// Units of the last forward pass, in order.
    expected: Vec<usize>,
    /// Units of this pass, in order.
    ran: Vec<usize>,
    /// How many of them the forward pass ran, once the backward pass has begun.
    forward_len: Option<usize>,
    diverged: bool,
    /// The weights of persistent parameters, from the first pass of a step to its end.
    persistent: Option<Arc<FullUnit>>,
}

/// A rank's own parts of a unit's flat buffers: trained weights in the type that the unit computes in (their
/// master weights are the optimizer's), frozen ones as they are stored.
#[derive(Debug)]
struct Shards {
    values: Buffers<Numbers>,
    _held: Held,
}

#[derive(Debug)]
struct InFlight {
    /// None for empty buffers.
    weights: Buffers<Option<Pending<Numbers>>>,
    held: Held,
}

impl InFlight {
    fn wait(self) -> Result<(Buffers<Numbers>, Held), Error> {
        let wait =
            |pending: Option<Pending<_>>| pending.map_or(Ok(Numbers::default()), Pending::wait);
        Ok((self.weights.try_map(|_, pending| wait(pending))?, self.held))
    }
}

impl Gathers {
    /// `shards` holds this rank's part of each unit.
    pub(crate) fn new(
        layout: &Arc<Layout>,
        group: &Arc<ProcessGroup>,
        (settings, sizes): (Gathering, Sizes),
        (ledger, events): (&Ledger, &Events),
        (device, shards): (&Device, Vec<Buffers<Numbers>>),
    ) -> Self {
        let held = |values: Buffers<Numbers>| {
            let bytes = values.trained.bytes() + values.frozen.bytes();
            Shards { _held: ledger.hold(Category::ParametersSharded, bytes), values }
        };
        let state = State { shards: shards.into_iter().map(held).collect(), ..State::default() };
        Self {
            layout: Arc::clone(layout),
            group: Arc::clone(group),
            settings,
            sizes,
            ledger: ledger.clone(),
            device: device.clone(),
            events: events.clone(),
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a pass over the model: gathers the root unit, the persistent one if it is not there, and the
    /// first of the others ahead.
    pub(crate) fn begin_pass(&self) -> Result<(Arc<FullUnit>, Option<Arc<FullUnit>>), Error> {
        let (root, persistent) = {
            let state = &mut *self.lock();
            // What a pass that was never ended has left is of other weights.
            (state.pending, state.kept) = (BTreeMap::new(), HashMap::new());
            (state.ran, state.forward_len, state.diverged) = (vec![], None, false);
            let root = self.take_or_launch(state, ROOT);
            let missing = self.layout.persistent.filter(|_| state.persistent.is_none());
            let persistent = missing.map(|unit| (unit, self.launch(state, unit)));
            self.launch_expected(state, 0);
            (root, persistent)
        };
        let root = self.arrived(ROOT, root)?;
        if let Some((unit, in_flight)) = persistent {
            let full = self.arrived(unit, in_flight)?;
            self.lock().persistent = Some(full);
        }
        let persistent = self.lock().persistent.clone();
        Ok((root, persistent))
    }

    /// Lets go of the persistent weights, which a step is about to change.
    pub(crate) fn forget_persistent(&self) {
        self.lock().persistent = None;
    }

    /// Ends a pass: waits for gathers that came to no use, and lets go of everything.
    pub(crate) fn end_pass(&self) -> Result<(), Error> {
        let state = &mut *self.lock();
        if let Some(forward_len) = state.forward_len {
            state.expected = state.ran[..forward_len].to_vec();
        }
        state.kept.clear();
        let pending = std::mem::take(&mut state.pending);
        pending.into_values().try_for_each(|in_flight| in_flight.wait().map(drop))
    }

    /// The weights for a unit's forward pass, and the pass's number, by which its backward pass will be
    /// known. `comes_back` says whether there will be one.
    pub(crate) fn forward(
        &self,
        unit: usize,
        comes_back: bool,
    ) -> Result<(Arc<FullUnit>, usize), Error> {
        let (call, keeps, in_flight) = {
            let state = &mut *self.lock();
            let call = state.ran.len();
            state.ran.push(unit);
            // A pass of inference may run through all units many times.
            let place = if comes_back { call } else { call % state.expected.len().max(1) };
            state.diverged |= state.expected.get(place) != Some(&unit);
            // What the backward pass will begin with is not worth freeing.
            let is_last = !state.diverged && place + 1 == state.expected.len();
            let is_kept = is_last || self.comes_back_soon(state, place);
            let keeps =
                comes_back && (is_kept || self.settings.after_forward == AfterForward::Keep);
            if let Some((full, uses)) = state.kept.get_mut(&unit) {
                *uses += usize::from(keeps);
                return Ok((Arc::clone(full), call));
            }
            let in_flight = self.take_or_launch(state, unit);
            self.launch_expected(state, place + 1);
            (call, keeps, in_flight)
        };
        let full = self.arrived(unit, in_flight)?;
        if keeps {
            self.lock().kept.insert(unit, (Arc::clone(&full), 1));
        }
        Ok((full, call))
    }

    /// The weights for the backward pass of a forward pass.
    pub(crate) fn backward(&self, call: usize) -> Result<Arc<FullUnit>, Error> {
        let (unit, source) = {
            let state = &mut *self.lock();
            state.forward_len.get_or_insert(state.ran.len());
            let unit = state.ran[call];
            let source = match state.kept.get(&unit) {
                Some((full, _)) => Ok(Arc::clone(full)),
                None => Err(self.take_or_launch(state, unit)),
            };
            if self.settings.backward_prefetch == BackwardPrefetch::Pre {
                self.launch_before(state, call);
            }
            (unit, source)
        };
        source.or_else(|in_flight| self.arrived(unit, in_flight))
    }

    /// A backward pass has run.
    pub(crate) fn backward_ran(&self, call: usize) {
        let state = &mut *self.lock();
        if self.settings.backward_prefetch == BackwardPrefetch::Post {
            self.launch_before(state, call);
        }
        let unit = state.ran[call];
        if let Some((_, uses)) = state.kept.get_mut(&unit) {
            *uses = uses.saturating_sub(1);
            if *uses == 0 {
                state.kept.remove(&unit);
            }
        }
    }

    /// Keeps the root unit's weights until the pass ends.
    pub(crate) fn keep_root(&self, root: Arc<FullUnit>) {
        self.lock().kept.insert(ROOT, (root, 1));
    }

    /// Hands this rank's part of one of a unit's buffers to `change`.
    pub(crate) fn with_shard(&self, unit: usize, kind: Kind, change: impl FnOnce(SliceMut<'_>)) {
        change(self.lock().shards[unit].values.of_mut(kind).as_mut());
    }

    /// A copy of this rank's part of one of a unit's buffers.
    pub(crate) fn own_part(&self, unit: usize, kind: Kind) -> Numbers {
        self.lock().shards[unit].values.of(kind).clone()
    }

    /// This rank's part of one of a unit's buffers, within a buffer for the whole of it, to compute with.
    fn buffer(&self, state: &State, unit: usize, kind: Kind) -> Numbers {
        let layout = &self.layout.units[unit];
        let (_, len) = layout.buffer(kind);
        let mut buffer = Numbers::zeros(layout.types.compute, len);
        let own = shard(len, self.group.world(), self.group.rank());
        buffer.part_mut(own).copy_from(state.shards[unit].values.of(kind).as_slice());
        buffer
    }

    fn take_or_launch(&self, state: &mut State, unit: usize) -> InFlight {
        state.pending.remove(&unit).unwrap_or_else(|| self.launch(state, unit))
    }

    fn launch(&self, state: &State, unit: usize) -> InFlight {
        let UnitLayout { len, frozen_len, types, .. } = self.layout.units[unit];
        let bytes = (len + frozen_len) * types.compute.size();
        let held = self.ledger.hold(Category::ParametersFull, bytes);
        self.events.push(Event::Gather(unit));
        let gather = |kind: Kind, len: usize| {
            let buffer = || self.buffer(state, unit, kind);
            (len > 0).then(|| self.group.all_gather_unit(unit, buffer()))
        };
        let (trained, frozen) = (gather(Kind::Trained, len), gather(Kind::Frozen, frozen_len));
        InFlight { weights: Buffers { trained, frozen }, held }
    }

    fn launch_ahead(&self, state: &mut State, unit: usize) {
        if !state.kept.contains_key(&unit) && !state.pending.contains_key(&unit) {
            let in_flight = self.launch(state, unit);
            state.pending.insert(unit, in_flight);
        }
    }

    /// Whether few enough elements are used between a forward pass, at `place` in the expected order, and
    /// its backward pass: those of all units after it, twice.
    fn comes_back_soon(&self, state: &State, place: usize) -> bool {
        let after = state.expected.get(place + 1..).filter(|_| !state.diverged);
        let between =
            after.map(|units| 2 * units.iter().map(|unit| self.elements(*unit)).sum::<usize>());
        between.is_some_and(|between| between < self.sizes.max_reuse_distance)
    }

    fn elements(&self, unit: usize) -> usize {
        self.layout.units[unit].num_elements()
    }

    /// Those of `units` that may be gathered ahead, while `current` runs.
    fn allowed_ahead(
        &self,
        state: &State,
        units: impl Iterator<Item = usize>,
        current: Option<usize>,
    ) -> Vec<usize> {
        let Sizes { prefetch, max_live, .. } = self.sizes;
        let count = match prefetch {
            None if self.settings.limit_all_gathers => 1,
            _ => usize::MAX,
        };
        let whole = state.kept.keys().chain(state.pending.keys()).copied().chain(current);
        let mut live: usize = whole.map(|unit| self.elements(unit)).sum();
        let mut ahead: usize = state.pending.keys().map(|unit| self.elements(*unit)).sum();
        // A unit that runs again at once is not gathered twice.
        let units = units.take(count).filter(|unit| Some(*unit) != current);
        let fits = |unit: &usize| {
            let is_here = state.kept.contains_key(unit) || state.pending.contains_key(unit);
            let elements = if is_here { 0 } else { self.elements(*unit) };
            live += elements;
            ahead += elements;
            prefetch.is_none_or(|limit| ahead <= limit)
                && max_live.is_none_or(|limit| live <= limit)
        };
        units.take_while(fits).collect()
    }

    /// Gathers ahead for the forward pass, which has come to `next` in the expected order.
    fn launch_expected(&self, state: &mut State, next: usize) {
        if !self.settings.forward_prefetch || state.diverged || state.forward_len.is_some() {
            return;
        }
        let current = state.ran.last().copied();
        let units = state.expected.iter().skip(next).copied();
        for unit in self.allowed_ahead(state, units, current) {
            self.launch_ahead(state, unit);
        }
    }

    /// Gathers ahead for the backward pass of the units that ran before this one.
    fn launch_before(&self, state: &mut State, call: usize) {
        // Within a second forward pass, what ran before is not what comes next.
        let is_of_forward = state.forward_len.is_some_and(|len| call < len);
        if !is_of_forward {
            return;
        }
        let ahead = if self.sizes.prefetch.is_some() { usize::MAX } else { 1 };
        let units = state.ran[..call].iter().rev().copied().take(ahead);
        for unit in self.allowed_ahead(state, units, Some(state.ran[call])) {
            self.launch_ahead(state, unit);
        }
    }

    fn arrived(&self, unit: usize, in_flight: InFlight) -> Result<Arc<FullUnit>, Error> {
        self.events.push(Event::GatherWait(unit));
        let (values, held) = in_flight.wait()?;
        let lend = |values: Numbers| FlatTensor::new(values, &self.device);
        let weights = Weights { trained: lend(values.trained), frozen: lend(values.frozen) };
        Ok(Arc::new(FullUnit { weights, _held: held }))
    }
}
