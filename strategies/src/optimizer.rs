//! The optimizer's view of a model: weights and state in flat buffers, stepped by ranges.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use pyroclast_kernels::numbers::{Float, Numbers, Real, Rounding, Slice, SliceMut};
use pyroclast_kernels::optimizer as kernels;

use crate::data_parallel::Setup;
use crate::events::{Event, Events};
use crate::layout::{ParamInfo, UnitLayout};
use crate::memory::{Category, Held};
use crate::run::Run;
use crate::stage::Stage;

/// An optimizer and its hyperparameters, apart from the learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Optimizer {
    /// Decoupled weight decay (Loshchilov and Hutter, 2019).
    AdamW {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the denominator.
        eps: f64,
        /// Weight decay of parameters whose group does not set its own.
        weight_decay: f64,
    },
    /// Stochastic gradient descent as in `torch.optim.SGD`.
    Sgd {
        /// Momentum factor.
        momentum: f64,
        /// Whether to look ahead along the momentum.
        nesterov: bool,
        /// L2 penalty of parameters whose group does not set its own.
        weight_decay: f64,
    },
}

impl Default for Optimizer {
    /// AdamW with beta 0.9 and 0.999, eps 1e-8 and weight decay 0.01.
    fn default() -> Self {
        Self::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
    }
}

impl Optimizer {
    /// Names of the state that the optimizer keeps for every parameter, as torch names it.
    #[must_use]
    pub fn state_names(&self) -> &'static [&'static str] {
        match self {
            Self::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            Self::Sgd { .. } => &["momentum_buffer"],
        }
    }

    /// Weight decay of parameters whose group does not set its own.
    #[must_use]
    pub fn weight_decay(&self) -> f64 {
        match *self {
            Self::AdamW { weight_decay, .. } | Self::Sgd { weight_decay, .. } => weight_decay,
        }
    }
}

/// Parameters that share settings which differ from the optimizer's.
#[derive(Clone)]
pub struct ParamGroup {
    /// What the group is called in messages and metrics.
    pub name: String,
    /// Weight decay in place of the optimizer's.
    pub weight_decay: Option<f64>,
    /// Factor on the learning rate.
    pub lr_factor: f64,
    matches: Arc<dyn Fn(&ParamInfo) -> bool + Send + Sync>,
}

impl ParamGroup {
    /// A group of the parameters for which `matches` holds, with the optimizer's own settings.
    /// A parameter belongs to the first group that matches it.
    pub fn new(
        name: impl Into<String>,
        matches: impl Fn(&ParamInfo) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), weight_decay: None, lr_factor: 1.0, matches: Arc::new(matches) }
    }

    /// Norms, biases and all other parameters of at most one dimension, without weight decay.
    #[must_use]
    pub fn no_decay() -> Self {
        Self::new("no_decay", |param| param.shape.len() <= 1).with_weight_decay(0.0)
    }

    /// Sets the group's weight decay.
    #[must_use]
    pub fn with_weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = Some(weight_decay);
        self
    }

    /// Multiplies the learning rate for this group.
    #[must_use]
    pub fn with_lr_factor(mut self, factor: f64) -> Self {
        self.lr_factor = factor;
        self
    }
}

impl fmt::Debug for ParamGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, weight_decay, lr_factor, .. } = self;
        write!(f, "ParamGroup({name}, weight_decay {weight_decay:?}, lr_factor {lr_factor})")
    }
}

/// What applies to one parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Settings {
    weight_decay: f64,
    lr_factor: f64,
}

/// With what a step is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// The learning rate.
    pub lr: f64,
    /// AdamW's betas in place of its own, where a schedule has a say in them. SGD has none.
    pub betas: Option<(f64, f64)>,
}

impl From<f64> for Rate {
    fn from(lr: f64) -> Self {
        Self { lr, betas: None }
    }
}

/// What one step applies to all parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update {
    scale: f64,
    rate: Rate,
    step: u64,
}

/// A unit's reduced gradients, and which of its parameters received one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gradients1d<'a> {
    pub(crate) gradients: Slice<'a>,
    pub(crate) seen: &'a [bool],
}

/// Optimizer state of all units.
#[derive(Debug)]
pub(crate) struct FlatOptimizer {
    optimizer: Optimizer,
    units: Vec<UnitState>,
    /// Most elements that are stepped at once.
    sub_group: usize,
    events: Events,
    /// Steps taken.
    steps: u64,
}

#[derive(Debug)]
struct UnitState {
    /// By parameter.
    settings: Vec<Settings>,
    /// The part of the unit's flat buffer that this rank steps. The vectors below hold it alone.
    owned: Range<usize>,
    /// What is stepped, where the model computes in another type.
    masters: Option<Numbers>,
    /// In the order of [`Optimizer::state_names`].
    state: Vec<Numbers>,
    _held: Held,
}

impl FlatOptimizer {
    /// State of zeros for what a rank owns under `stage`. `masters` has the master weights of each unit that
    /// has some.
    pub(crate) fn new(
        setup: &Setup,
        run: &Run,
        stage: Stage,
        masters: Vec<Option<Numbers>>,
    ) -> Self {
        let optimizer = setup.optimizer;
        let settings = |info: &ParamInfo| {
            let group = setup.groups.iter().find(|group| (group.matches)(info));
            Settings {
                weight_decay: group
                    .and_then(|group| group.weight_decay)
                    .unwrap_or(optimizer.weight_decay()),
                lr_factor: group.map_or(1.0, |group| group.lr_factor),
            }
        };
        let names = optimizer.state_names();
        let units = run.layout.units.iter().zip(masters).map(|(unit, masters)| {
            let owned = stage.owned(unit, &run.group);
            let zeros = |_| Numbers::zeros(unit.types.state(), owned.len());
            let state: Vec<Numbers> = names.iter().map(zeros).collect();
            let bytes = state.iter().chain(&masters).map(Numbers::bytes).sum();
            UnitState {
                settings: unit.params.iter().map(|slot| settings(&slot.info)).collect(),
                masters,
                state,
                owned,
                _held: run.ledger.hold(Category::Optimizer, bytes),
            }
        });
        Self {
            optimizer,
            units: units.collect(),
            sub_group: setup.sizes.sub_group.unwrap_or(usize::MAX),
            events: run.events.clone(),
            steps: 0,
        }
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }

    /// Begins the next step. Every unit is then stepped once. There is one step count for all
    /// parameters; torch counts for each parameter the steps in which it had a gradient.
    pub(crate) fn begin_step(&mut self, scale: f64, rate: Rate) -> Update {
        self.steps += 1;
        Update { scale, rate, step: self.steps }
    }

    /// Steps the owned part of those parameters of a unit that received a gradient. Weights and gradients
    /// are those of the owned part. `predivisor` is what the gradients were divided by.
    pub(crate) fn step_unit(
        &mut self,
        update: Update,
        (unit, layout): (usize, &UnitLayout),
        mut weights: SliceMut<'_>,
        Gradients1d { gradients, seen }: Gradients1d<'_>,
        predivisor: f64,
    ) {
        let rule = Rule { optimizer: self.optimizer, rate: update.rate, step: update.step };
        let state = &mut self.units[unit];
        let segments = segments(layout, &state.settings, seen);
        let parts = segments.into_iter().flat_map(|(range, settings)| {
            let range = within(&range, &state.owned);
            parts(range, self.sub_group).map(move |part| (part, settings))
        });
        for (range, settings) in parts.collect::<Vec<_>>() {
            self.events.push(Event::Step(range.len()));
            let given = weights.reborrow().part(range.clone());
            let (stepped, copy) = match &mut state.masters {
                Some(masters) => (masters.part_mut(range.clone()), Some(given)),
                None => (given, None),
            };
            let operands = kernels::Operands {
                weights: stepped,
                gradient: gradients.part(range.clone()),
                scale: update.scale * predivisor,
                copy,
                rounding: rounding(layout.types.params, update.step, unit),
                at: (state.owned.start + range.start) as u64,
            };
            match layout.types.state() {
                Float::F64 => rule.step::<f64>(operands, settings, &mut state.state, range),
                _ => rule.step::<f32>(operands, settings, &mut state.state, range),
            }
        }
    }

    /// Names of the state.
    pub(crate) fn state_names(&self) -> &'static [&'static str] {
        self.optimizer.state_names()
    }

    /// The state of the owned part of a unit, in the order of its names.
    pub(crate) fn state(&self, unit: usize) -> &[Numbers] {
        &self.units[unit].state
    }

    /// The owned part of a unit's master weights, if it has any.
    pub(crate) fn masters(&self, unit: usize) -> Option<&Numbers> {
        self.units[unit].masters.as_ref()
    }

    /// Overwrites the owned part of a unit's master weights, if it has any.
    pub(crate) fn set_masters(&mut self, unit: usize, owned: Slice<'_>) {
        if let Some(masters) = &mut self.units[unit].masters {
            masters.as_mut().copy_from(owned);
        }
    }

    /// One of the states of the owned part of a unit, by the position of its name.
    pub(crate) fn state_mut(&mut self, unit: usize, name: usize) -> &mut Numbers {
        &mut self.units[unit].state[name]
    }

    pub(crate) fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }
}

/// An optimizer in one of its steps.
struct Rule {
    optimizer: Optimizer,
    rate: Rate,
    step: u64,
}

impl Rule {
    /// Steps a range of weights that share settings, with that range of a unit's state.
    fn step<T: Real>(
        &self,
        operands: kernels::Operands<'_>,
        settings: Settings,
        state: &mut [Numbers],
        range: Range<usize>,
    ) {
        let (lr, weight_decay) = (self.rate.lr * settings.lr_factor, settings.weight_decay);
        let of_range =
            |numbers| &mut T::of_numbers(numbers).expect("state of its type")[range.clone()];
        match (self.optimizer, state) {
            (Optimizer::AdamW { beta1, beta2, eps, .. }, [exp_avg, exp_avg_sq]) => {
                let (beta1, beta2) = self.rate.betas.unwrap_or((beta1, beta2));
                let step = self.step;
                let adamw = kernels::AdamW { lr, beta1, beta2, eps, weight_decay, step };
                let (exp_avg, exp_avg_sq) = (of_range(exp_avg), of_range(exp_avg_sq));
                adamw.step(operands, kernels::AdamWState { exp_avg, exp_avg_sq });
            }
            (Optimizer::Sgd { momentum, nesterov, .. }, [buffer]) => {
                let sgd = kernels::Sgd { lr, momentum, nesterov, weight_decay };
                sgd.step(operands, kernels::SgdState { momentum: of_range(buffer) });
            }
            _ => unreachable!("a unit has one buffer per state name"),
        }
    }
}

/// How new weights are rounded that have no master weights. `bf16` has so few bits that most steps would be
/// rounded away.
fn rounding(params: Float, step: u64, unit: usize) -> Rounding {
    match params {
        Float::BF16 => {
            let seed = (step as u32).wrapping_mul(0x9e37_79b9) ^ (unit as u32).rotate_left(16);
            Rounding::Stochastic { seed }
        }
        _ => Rounding::Nearest,
    }
}

/// `range` in parts of at most `limit` elements.
fn parts(range: Range<usize>, limit: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(limit.max(1)).map(move |start| start..end.min(start.saturating_add(limit)))
}

/// The part of `range` that lies in `owned`, counted from the start of `owned`.
fn within(range: &Range<usize>, owned: &Range<usize>) -> Range<usize> {
    let inside = |at: usize| at.clamp(owned.start, owned.end) - owned.start;
    inside(range.start)..inside(range.end)
}

/// Ranges of neighbouring parameters that share settings, leaving out those without a gradient.
/// The padding between two parameters belongs to the first: its gradient is zero, so it stays zero.
fn segments(
    layout: &UnitLayout,
    settings: &[Settings],
    seen: &[bool],
) -> Vec<(Range<usize>, Settings)> {
    let mut segments: Vec<(Range<usize>, Settings)> = Vec::new();
    let mut previous_is_joined = false;
    for ((slot, settings), seen) in layout.params.iter().zip(settings).zip(seen) {
        match segments.last_mut() {
            Some((range, last)) if *seen && previous_is_joined && last == settings => {
                range.end = slot.range.end;
            }
            _ if *seen => segments.push((slot.range.clone(), *settings)),
            _ => {}
        }
        previous_is_joined = *seen;
    }
    segments
}
