//! `Unit`: the atom of sharding and communication, usually one transformer block.

mod backend;
mod draws;
mod leaves;
mod passes;
mod recompute;
mod tape;
mod types;
mod unshard;
mod values;

pub(crate) use draws::Seeds;
pub(crate) use leaves::{ParamGrad, take};
pub(crate) use types::Watch;
pub use values::{TensorMap, Values};

use std::any::TypeId;
use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    Param,
};
use burn::tensor::{Bool, Device, Int, Tensor};

use self::draws::Draws;
use self::leaves::Lift;
use self::passes::Pass;
use crate::error::Error;
use crate::policy::short_type_name;
use crate::run::{Purpose, Run};

/// Wraps a block of a model whose parameters are stored and communicated together.
///
/// Outside training a unit is transparent: it computes what its block computes, and its parameters
/// have the paths that they would have without it. In training the block's gradients are handed over
/// for reduction as soon as the backward pass has left the block, while the rest of it goes on; and
/// where parameters are sharded, the block has them only while it runs.
///
/// ```
/// use burn::{module::Module, nn::{Linear, LinearConfig}, tensor::{Device, Tensor}};
/// use pyroclast_strategies::Unit;
///
/// #[derive(Module, Debug)]
/// struct Mlp { layers: Vec<Unit<Linear>> }
///
/// impl Mlp {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.layers.iter().fold(x, |x, unit| unit.forward(x, |layer, x| layer.forward(x)))
///     }
/// }
///
/// let device = Device::flex();
/// let layer = || Unit::new(LinearConfig::new(4, 4).init(&device));
/// let mlp = Mlp { layers: vec![layer(), layer()] };
/// assert_eq!(mlp.forward(Tensor::ones([1, 4], &device)).dims(), [1, 4]);
/// ```
#[derive(Clone, Debug)]
pub struct Unit<M> {
    module: M,
    cell: Arc<UnitCell>,
}

/// The identity of a unit. Clones of a unit share it.
#[derive(Debug)]
pub(crate) struct UnitCell {
    type_name: &'static str,
    /// Whether it recomputes its activations whatever a run says.
    recomputes: AtomicBool,
    /// Whether it does so for a run that stores it with the unit around it.
    recomputes_for_run: AtomicBool,
    /// Whether its block draws random numbers in training.
    draws: AtomicBool,
    /// Functions that are known to capture no tracked tensor.
    checked: Mutex<HashSet<TypeId>>,
    installed: Mutex<Option<Installed>>,
    /// Set where NaN and infinity are looked for.
    watch: Mutex<Option<Watch>>,
}

/// The training run that a unit belongs to.
#[derive(Clone, Debug)]
pub(crate) struct Installed {
    pub(crate) run: Arc<Run>,
    /// Its index in the run's layout.
    pub(crate) unit: usize,
    /// Its path in the model.
    pub(crate) path: Arc<str>,
    /// Whether weights are freed between forward and backward.
    pub(crate) frees_weights: bool,
    /// Whether activations are recomputed.
    pub(crate) recomputes: bool,
}

impl UnitCell {
    fn new<M: Module>(module: &M) -> Self {
        let mut dropout = FindDropout(false);
        module.visit(&mut dropout);
        Self {
            type_name: short_type_name::<M>(),
            draws: AtomicBool::new(dropout.0),
            recomputes: AtomicBool::new(false),
            recomputes_for_run: AtomicBool::new(false),
            checked: Mutex::default(),
            installed: Mutex::new(None),
            watch: Mutex::new(None),
        }
    }

    pub(crate) fn type_name(&self) -> &'static str {
        self.type_name
    }

    /// Makes a unit that is stored with the one around it recompute its activations, or not.
    pub(crate) fn set_recomputes_for_run(&self, recomputes: bool) {
        self.recomputes_for_run.store(recomputes, Ordering::Relaxed);
    }

    fn draws(&self) -> bool {
        self.draws.load(Ordering::Relaxed)
    }

    fn recomputes(&self) -> bool {
        let flags = [&self.recomputes, &self.recomputes_for_run];
        flags.into_iter().any(|flag| flag.load(Ordering::Relaxed))
    }

    /// Makes the unit report to `installed`.
    ///
    /// # Errors
    ///
    /// [`Error::UnitInUse`] if it reports to somebody already.
    pub(crate) fn install(&self, installed: Installed) -> Result<(), Error> {
        let mut current = self.installed.lock().unwrap_or_else(PoisonError::into_inner);
        if current.is_some() {
            return Err(Error::UnitInUse);
        }
        *current = Some(installed);
        // Looking for captures may gather weights, so all ranks must do it in the same run.
        self.checked.lock().unwrap_or_else(PoisonError::into_inner).clear();
        Ok(())
    }

    /// Makes the unit transparent again, if it reports to `run`.
    pub(crate) fn uninstall(&self, run: &Arc<Run>) {
        let mut current = self.installed.lock().unwrap_or_else(PoisonError::into_inner);
        current.take_if(|installed| Arc::ptr_eq(&installed.run, run));
    }

    /// Makes the unit look for NaN and infinity in what it returns, or not.
    pub(crate) fn watch(&self, watch: Option<Watch>) {
        *self.watch.lock().unwrap_or_else(PoisonError::into_inner) = watch;
    }

    fn watched(&self) -> Option<Watch> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the unit reports to a run.
    pub(crate) fn is_installed(&self) -> bool {
        self.installed.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn installed(&self) -> Option<Installed> {
        self.installed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl<M: Module> Unit<M> {
    /// Declares `module` a unit.
    pub fn new(module: M) -> Self {
        let cell = Arc::new(UnitCell::new(&module));
        Self { module, cell }
    }

    /// Makes the unit recompute its activations in the backward pass instead of keeping them (activation
    /// checkpointing), with any strategy and with none.
    ///
    /// What Burn's `Dropout` draws is drawn again; a block that draws otherwise
    /// [says so](Self::with_random_draws). Where several ranks are threads of one process they share its
    /// generator, and a block that draws must not be recomputed.
    #[must_use]
    pub fn with_activation_checkpointing(self) -> Self {
        self.cell.recomputes.store(true, Ordering::Relaxed);
        self
    }

    /// Declares that the block draws random numbers, other than with Burn's `Dropout`, which is known to:
    /// where the unit recomputes its activations, the generator of its device is given the same seed twice.
    #[must_use]
    pub fn with_random_draws(self) -> Self {
        self.cell.draws.store(true, Ordering::Relaxed);
        self
    }

    /// The block. While a run shards its parameters, they are not here but in the first argument of the
    /// function given to [`Self::forward`].
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Runs `f` on the block and `inputs`: a tensor, or [several](Values) in a tuple.
    ///
    /// `f` must reach the parameters of the block only through its first argument: a gradient that
    /// reaches them from elsewhere is refused ([`Error::LateGradient`]) when it comes too late.
    ///
    /// Where the unit computes in another type than its caller, `f` gets its float inputs in the unit's, and
    /// its outputs are converted to what the caller expects. `f` must return numbers of either.
    ///
    /// `f` must reach tensors that require gradients only through its second argument. Others
    /// (masks, say) it may capture. It may run more than once, and must do the same each time.
    ///
    /// # Panics
    ///
    /// In training, with an [`Error`] as the payload: [`Error::CapturedTensor`] if `f` captures a tensor
    /// that requires a gradient, [`Error::MixedTypes`], [`Error::Anomaly`], or what ended a collective.
    pub fn forward<I: Values, O: Values, F>(&self, inputs: I, f: F) -> O
    where
        F: Fn(&M, I) -> O + Send + 'static,
        M: 'static,
    {
        let watch = self.cell.watched().filter(|_| passes::current() != Pass::Trial);
        let Some(watch) = watch else { return self.converted(inputs, f) };
        let given = inputs.clone();
        let outputs = self.converted(inputs, f);
        match watch.check(&given, &outputs) {
            Ok(()) => outputs,
            Err(error) => raise_for(error, self.cell.installed().as_ref()),
        }
    }

    /// Runs the unit in its own type of numbers, where it has one.
    fn converted<I: Values, O: Values, F>(&self, inputs: I, f: F) -> O
    where
        F: Fn(&M, I) -> O + Send + 'static,
        M: 'static,
    {
        let Some(installed) = self.cell.installed() else { return self.run(None, inputs, f) };
        let types = installed.run.layout.units[installed.unit].types;
        let inputs = types::cast(inputs, types.compute);
        let run = || self.run(Some(installed.clone()), inputs, f);
        let outputs = types::without_mixing(&installed.path, types, run);
        match outputs {
            Ok(outputs) => types::cast(outputs, types.output),
            Err(error) => raise(Err(error), &installed.run),
        }
    }

    fn run<I: Values, O: Values, F>(&self, installed: Option<Installed>, inputs: I, f: F) -> O
    where
        F: Fn(&M, I) -> O + Send + 'static,
        M: 'static,
    {
        let recomputes = self.cell.recomputes() || installed.as_ref().is_some_and(|i| i.recomputes);
        // Inputs may be constants, such as tokens, while the parameters are trained.
        let is_training =
            installed.as_ref().is_some_and(|i| i.run.is_training()) || has_autodiff(&inputs);
        match (passes::current(), installed) {
            (Pass::Trial, Some(installed)) => self.infer(&installed, None, inputs, f),
            (Pass::FirstRun, installed) if is_training => {
                let untracked = |inputs| match &installed {
                    Some(installed) => self.infer(installed, Some(Lift::Untracked), inputs, f),
                    None => f(&self.module, inputs),
                };
                // The second run will draw as a unit that recomputes does.
                match recomputes {
                    true => {
                        let device = recompute::device_of(&self.module, installed.as_ref());
                        Draws::of(&self.cell, &device).run(|| untracked(inputs))
                    }
                    false => untracked(inputs),
                }
            }
            (Pass::Own, installed) if is_training && recomputes => {
                recompute::forward(&self.module, (&self.cell, installed.as_ref()), inputs, f)
            }
            (Pass::Own, Some(installed)) if is_training => {
                tape::forward(&self.module, (&installed, &self.cell), inputs, f)
            }
            (_, Some(installed)) => self.infer(&installed, None, inputs, f),
            (_, None) => f(&self.module, inputs),
        }
    }

    /// A pass without a backward pass, on parameters without autodiff or lifted to it.
    fn infer<I: Values, O: Values>(
        &self,
        Installed { run, unit, .. }: &Installed,
        lift: Option<Lift>,
        inputs: I,
        f: impl Fn(&M, I) -> O,
    ) -> O {
        let filled = match run.is_sharded() {
            true => raise(run.forward(*unit, Purpose::Inference), run).weights,
            false => None,
        };
        let purpose = if lift.is_some() { Purpose::Training } else { Purpose::Inference };
        let module = match &filled {
            Some(full) => run.fill(self.module.clone(), (*unit, full), purpose),
            None => self.module.clone(),
        };
        let module = run.in_type_of(*unit, module);
        match lift {
            Some(lift) => f(&leaves::lift_params(module, &run.device, lift), inputs),
            None => f(&module, inputs),
        }
    }

    /// Changes the module as Burn does, which must not touch parameters that are elsewhere.
    fn changed(self, change: impl FnOnce(M) -> M) -> Self {
        let module = match self.cell.installed() {
            Some(installed) if installed.run.is_sharded() => {
                installed.run.veiled(self.module, change)
            }
            _ => change(self.module),
        };
        Self { module, cell: self.cell }
    }
}

/// Returns what a collective brought, or unwinds with its error: a forward pass returns tensors.
fn raise<T>(outcome: Result<T, Error>, run: &Run) -> T {
    outcome.unwrap_or_else(|error| {
        run.fail(error.clone());
        raise_alone(error)
    })
}

fn raise_for(error: Error, installed: Option<&Installed>) -> ! {
    if let Some(installed) = installed {
        installed.run.fail(error.clone());
    }
    raise_alone(error)
}

fn raise_alone(error: Error) -> ! {
    // Without the message of a panic: whoever runs the forward pass reports the error.
    std::panic::resume_unwind(Box::new(error))
}

/// Whether any unit of `model` was declared with activation checkpointing.
pub fn any_recomputes<M: Module>(model: &M) -> bool {
    let mut find = FindRecomputing(false);
    model.visit(&mut find);
    find.0
}

/// Looks for Burn's `Dropout`.
struct FindDropout(bool);

impl ModuleVisitor for FindDropout {
    fn enter_module(&mut self, _name: &str, container: &str) {
        self.0 |= container.ends_with("Dropout");
    }
}

struct FindRecomputing(bool);

impl ModuleVisitor for FindRecomputing {
    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        self.0 |= enclosing().iter().any(|cell| cell.recomputes());
    }
}

/// Whether any tensor of `values` has autodiff, tracked or not.
fn has_autodiff<V: Values>(values: &V) -> bool {
    let mut find = FindAutodiff(false);
    let _ = values.clone().map(&mut find);
    find.0
}

struct FindAutodiff(bool);

impl TensorMap for FindAutodiff {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.0 |= tensor.is_autodiff();
        tensor
    }

    fn int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        self.0 |= tensor.is_autodiff();
        tensor
    }

    fn bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        self.0 |= tensor.is_autodiff();
        tensor
    }
}

thread_local! {
    /// The units around the module that this thread is traversing, innermost last. Burn's traversal
    /// cannot carry it: entering a unit must be invisible to Burn's own visitors.
    static ENCLOSING: RefCell<Vec<Arc<UnitCell>>> = const { RefCell::new(Vec::new()) };
}

/// The units around the parameter that this thread is visiting, innermost last.
pub(crate) fn enclosing() -> Vec<Arc<UnitCell>> {
    ENCLOSING.with_borrow(Clone::clone)
}

/// Leaves the unit when dropped, also when a visitor panics.
struct Enclosed;

impl Enclosed {
    fn in_unit(cell: &Arc<UnitCell>) -> Self {
        ENCLOSING.with_borrow_mut(|units| units.push(Arc::clone(cell)));
        Self
    }
}

impl Drop for Enclosed {
    fn drop(&mut self) {
        ENCLOSING.with_borrow_mut(|units| units.pop());
    }
}

impl<M: Module> Module for Unit<M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.module.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.changed(|module| module.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.changed(|module| module.to_device(device))
    }

    fn train(self) -> Self {
        self.changed(Module::train)
    }

    fn valid(&self) -> Self {
        self.clone().changed(|module| module.valid())
    }

    fn materialize(self) -> Self {
        self.changed(Module::materialize)
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let _enclosed = Enclosed::in_unit(&self.cell);
        self.module.visit(visitor);
    }

    fn map<Mapper: ModuleMapper>(self, mapper: &mut Mapper) -> Self {
        let _enclosed = Enclosed::in_unit(&self.cell);
        Self { module: self.module.map(mapper), cell: self.cell }
    }
}

impl<M: Module + ModuleDisplayDefault> ModuleDisplayDefault for Unit<M> {
    fn content(&self, content: Content) -> Option<Content> {
        match self.cell.installed() {
            // Burn looks at the numbers to print a shape.
            Some(installed) if installed.run.is_sharded() => {
                content.set_top_level_type(self.cell.type_name).add_formatted(&"sharded").optional()
            }
            _ => self.module.content(content),
        }
    }
}

impl<M: Module + ModuleDisplay> ModuleDisplay for Unit<M> {}

#[cfg(test)]
mod tests;
