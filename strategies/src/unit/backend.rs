//! The two operations that a unit adds to Burn's backends.
//!
//! Burn's backward pass starts from ones, runs by depth, and offers no hooks. Both operations use
//! the one opening it has: an operation with a backward step of its own.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension};
use burn::tensor::{DispatchTensor, Tensor};

/// A unit's backward pass: takes the gradient of the unit's output and returns that of its input,
/// or `None` if nobody asks for it. Runs once.
#[derive(Clone)]
pub(crate) struct Tape(Arc<Mutex<Option<TapeFn>>>);

type TapeFn = Box<dyn FnOnce(DispatchTensor) -> Option<DispatchTensor> + Send>;

impl Tape {
    pub(crate) fn new(
        run: impl FnOnce(DispatchTensor) -> Option<DispatchTensor> + Send + 'static,
    ) -> Self {
        Self(Arc::new(Mutex::new(Some(Box::new(run)))))
    }

    fn run(&self, grad: DispatchTensor) -> Option<DispatchTensor> {
        let run = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        run.expect("Burn should run each backward step once")(grad)
    }
}

impl fmt::Debug for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tape")
    }
}

/// Joins `output`, which a unit computed on a graph of its own, to the graph of `parent`.
pub(crate) fn join<const P: usize, const O: usize>(
    parent: Tensor<P>,
    output: Tensor<O>,
    tape: Tape,
) -> Tensor<O> {
    let (parent, output) = (parent.into_dispatch(), output.into_dispatch());
    Tensor::from_dispatch(<Dispatch as UnitBackend>::join(parent, output, tape))
}

/// A scalar whose backward pass gives `y` the gradient `grad`.
pub(crate) fn inject<const D: usize>(y: Tensor<D>, grad: Tensor<D>) -> Tensor<1> {
    let (y, grad) = (y.into_dispatch(), grad.into_dispatch());
    Tensor::from_dispatch(<Dispatch as UnitBackend>::inject(y, grad))
}

#[cfg_attr(not(any(feature = "wgpu", feature = "cuda")), backend_extension(Autodiff, Flex))]
#[cfg_attr(any(feature = "wgpu", feature = "cuda"), backend_extension(Autodiff, Flex, Cube))]
pub(crate) trait UnitBackend: Backend {
    fn join(parent: FloatTensor<Self>, output: FloatTensor<Self>, tape: Tape) -> FloatTensor<Self>;

    fn inject(y: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self>;

    fn run_tape(grad: FloatTensor<Self>, tape: Tape) -> Option<FloatTensor<Self>>;
}

/// Outside autodiff there is nothing to join, and a gradient is a plain tensor that the tape takes.
macro_rules! plain_backend {
    ($backend:ty) => {
        impl UnitBackend for $backend {
            fn join(
                _parent: FloatTensor<Self>,
                output: FloatTensor<Self>,
                _tape: Tape,
            ) -> FloatTensor<Self> {
                output
            }

            fn inject(_y: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
                grad
            }

            fn run_tape(grad: FloatTensor<Self>, tape: Tape) -> Option<FloatTensor<Self>> {
                // The const rank is only a type here; both ends agree on the tensor's own shape.
                let grad = Tensor::<1>::from_primitive::<Self>(grad).into_dispatch();
                tape.run(grad).map(|input_grad| {
                    Tensor::<1>::from_dispatch(input_grad)
                        .try_into_primitive::<Self>()
                        .expect("a gradient should be on the device of its tensor")
                })
            }
        }
    };
}

plain_backend!(burn::backend::Flex);
#[cfg(any(feature = "wgpu", feature = "cuda"))]
plain_backend!(burn::backend::Cube);

impl<B: UnitBackend, C: CheckpointStrategy> UnitBackend for Autodiff<B, C> {
    fn join(parent: FloatTensor<Self>, output: FloatTensor<Self>, tape: Tape) -> FloatTensor<Self> {
        match Join.prepare::<C>([parent.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(tape, output.into_primitive()),
            OpsKind::UnTracked(prep) => prep.finish(output.into_primitive()),
        }
    }

    fn inject(y: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        let grad = grad.into_primitive();
        match Inject.prepare::<C>([y.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(grad.clone(), grad),
            OpsKind::UnTracked(prep) => prep.finish(grad),
        }
    }

    fn run_tape(_grad: FloatTensor<Self>, _tape: Tape) -> Option<FloatTensor<Self>> {
        unreachable!("backward steps run on the backend below autodiff")
    }
}

#[derive(Debug)]
struct Join;

impl<B: UnitBackend> Backward<B, 1> for Join {
    type State = Tape;

    fn backward(self, ops: Ops<Tape, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let [parent] = ops.parents;
        if let (Some(input_grad), Some(parent)) = (B::run_tape(grad, ops.state), parent) {
            grads.register::<B>(parent.id, input_grad);
        }
    }
}

#[derive(Debug)]
struct Inject;

impl<B: UnitBackend> Backward<B, 1> for Inject {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let _ones = grads.consume::<B>(&ops.node);
        if let [Some(parent)] = ops.parents {
            grads.register::<B>(parent.id, ops.state);
        }
    }
}
