//! `Unit`: the atom of communication, usually one transformer block.

mod backend;
mod tape;

pub(crate) use tape::{ParamGrad, take};

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::{Device, Tensor};

use crate::buckets::GradientBuckets;
use crate::error::Error;

/// Wraps a block of a model whose parameters are stored and communicated together.
///
/// Outside training a unit is transparent: it computes what its block computes, and its parameters
/// have the paths that they would have without it. In training the block's gradients are handed over
/// for reduction as soon as the backward pass has left the block, while the rest of it goes on.
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
#[derive(Debug, Default)]
pub(crate) struct UnitCell {
    installed: Mutex<Option<Installed>>,
}

/// The training run that a unit belongs to.
#[derive(Clone, Debug)]
pub(crate) struct Installed {
    pub(crate) buckets: Arc<GradientBuckets>,
    pub(crate) unit: usize,
}

impl UnitCell {
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
        Ok(())
    }

    /// Makes the unit transparent again, if it reports to `buckets`.
    pub(crate) fn uninstall(&self, buckets: &Arc<GradientBuckets>) {
        let mut current = self.installed.lock().unwrap_or_else(PoisonError::into_inner);
        current.take_if(|installed| Arc::ptr_eq(&installed.buckets, buckets));
    }

    fn installed(&self) -> Option<Installed> {
        self.installed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl<M: Module> Unit<M> {
    /// Declares `module` a unit.
    pub fn new(module: M) -> Self {
        Self { module, cell: Arc::default() }
    }

    /// The block.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Runs `f` on the block and `x`.
    ///
    /// `f` must reach the parameters of the block only through its first argument: a gradient that
    /// reaches them from elsewhere is refused ([`Error::LateGradient`]) when it comes too late.
    ///
    /// `f` must reach tensors that require gradients only through its second argument. Others
    /// (masks, say) it may capture. A captured tensor that requires a gradient would join the unit's
    /// graph to the caller's, and the backward pass would wait for itself: detach it first.
    pub fn forward<const I: usize, const O: usize>(
        &self,
        x: Tensor<I>,
        f: impl Fn(&M, Tensor<I>) -> Tensor<O> + Send + 'static,
    ) -> Tensor<O>
    where
        M: 'static,
    {
        match self.cell.installed() {
            Some(installed) if x.is_autodiff() => tape::forward(&self.module, installed, x, f),
            _ => f(&self.module, x),
        }
    }
}

thread_local! {
    /// The units around the module that this thread is traversing, innermost last. Burn's traversal
    /// cannot carry it: entering a unit must be invisible to Burn's own visitors.
    static ENCLOSING: RefCell<Vec<Arc<UnitCell>>> = const { RefCell::new(Vec::new()) };
}

/// The innermost unit around the parameter that this thread is visiting.
pub(crate) fn current() -> Option<Arc<UnitCell>> {
    ENCLOSING.with_borrow(|units| units.last().cloned())
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
        Self { module: self.module.fork(device), cell: self.cell }
    }

    fn to_device(self, device: &Device) -> Self {
        Self { module: self.module.to_device(device), cell: self.cell }
    }

    fn train(self) -> Self {
        Self { module: self.module.train(), cell: self.cell }
    }

    fn valid(&self) -> Self {
        Self { module: self.module.valid(), cell: Arc::clone(&self.cell) }
    }

    fn materialize(self) -> Self {
        Self { module: self.module.materialize(), cell: self.cell }
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

impl<M: ModuleDisplayDefault> ModuleDisplayDefault for Unit<M> {
    fn content(&self, content: Content) -> Option<Content> {
        self.module.content(content)
    }
}

impl<M: ModuleDisplay> ModuleDisplay for Unit<M> {}

#[cfg(test)]
mod tests;
