//! The operations that a unit adds to Burn's backends.
//!
//! Burn's backward pass starts from ones, runs by depth, and offers no hooks. A unit uses the one
//! opening it has, operations with backward steps of their own:
//!
//! ```text
//! anchor -> enter -> enter -> exit  -> output 0
//!             ^        ^   \
//!          input 0  input 1 -> exit -> output 1
//! ```
//!
//! By depth all exits come first, and leave the gradients of the outputs on the [`Tape`]. The last
//! enter comes next: it runs the tape, which makes the gradients of the inputs of them; each enter
//! passes on the one of its input. The token between them carries nothing.

use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::autodiff::{
    NodeId,
    checkpoint::{
        base::Checkpointer,
        retro_forward::RetroForward,
        state::BackwardStates,
        strategy::{BalancedCheckpointing, CheckpointStrategy},
    },
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{Device, DispatchTensor, Tensor};

use super::unshard::Weight;

/// The gradients of a unit's outputs, where there are any.
pub(super) type OutputGrads = Vec<Option<DispatchTensor>>;

/// The gradients of a unit's inputs.
pub(super) type InputGrads = Vec<DispatchTensor>;

type TapeFn = Box<dyn FnOnce(OutputGrads) -> InputGrads + Send>;

/// A unit's backward pass. Runs once.
#[derive(Clone)]
pub(super) struct Tape(Arc<Mutex<TapeState>>);

struct TapeState {
    run: Option<TapeFn>,
    output_grads: OutputGrads,
    input_grads: Vec<Option<DispatchTensor>>,
}

impl Tape {
    /// A tape for so many outputs.
    pub(super) fn new(
        outputs: usize,
        run: impl FnOnce(OutputGrads) -> InputGrads + Send + 'static,
    ) -> Self {
        Self(Arc::new(Mutex::new(TapeState {
            run: Some(Box::new(run)),
            output_grads: (0..outputs).map(|_| None).collect(),
            input_grads: vec![],
        })))
    }

    fn lock(&self) -> MutexGuard<'_, TapeState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leave(&self, output: usize, grad: DispatchTensor) {
        self.lock().output_grads[output] = Some(grad);
    }

    fn input_grad(&self, input: usize) -> Option<DispatchTensor> {
        let state = &mut *self.lock();
        if let Some(run) = state.run.take() {
            let grads = run(std::mem::take(&mut state.output_grads));
            state.input_grads = grads.into_iter().map(Some).collect();
        }
        state.input_grads.get_mut(input)?.take()
    }

    /// Puts `inputs` before the tape, on `device`; returns the token for its outputs.
    pub(super) fn enter(&self, inputs: Vec<DispatchTensor>, device: &Device) -> DispatchTensor {
        // A leaf puts the unit into the caller's graph also where no input does.
        let anchor = || Tensor::<1>::ones([1], device).require_grad().into_dispatch();
        let inputs = if inputs.is_empty() { vec![anchor()] } else { inputs };
        inputs.into_iter().enumerate().fold(anchor(), |token, (position, input)| {
            <Dispatch as UnitBackend>::enter(token, input, self.clone(), position)
        })
    }

    /// An output of the unit in the caller's graph.
    pub(super) fn exit<const D: usize>(
        &self,
        token: &DispatchTensor,
        output: Tensor<D>,
        position: usize,
    ) -> Tensor<D> {
        let (token, output) = (token.clone(), output.into_dispatch());
        Tensor::from_dispatch(<Dispatch as UnitBackend>::exit(
            token,
            output,
            self.clone(),
            position,
        ))
    }
}

impl fmt::Debug for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tape")
    }
}

/// A scalar whose backward pass gives `y` the gradient `grad`.
pub(super) fn inject(y: DispatchTensor, grad: DispatchTensor) -> Tensor<1> {
    Tensor::from_dispatch(<Dispatch as UnitBackend>::inject(y, grad))
}

/// A weight whose tensor is not kept for the backward pass but made again there. `token` is a leaf.
pub(super) fn unshard<const D: usize>(token: Tensor<1>, weight: Weight) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as UnitBackend>::unshard(token.into_dispatch(), weight))
}

#[cfg_attr(not(any(feature = "wgpu", feature = "cuda")), backend_extension(Autodiff, Flex))]
#[cfg_attr(any(feature = "wgpu", feature = "cuda"), backend_extension(Autodiff, Flex, Cube))]
pub(super) trait UnitBackend: Backend {
    fn enter(
        token: FloatTensor<Self>,
        input: FloatTensor<Self>,
        tape: Tape,
        position: usize,
    ) -> FloatTensor<Self>;

    fn exit(
        token: FloatTensor<Self>,
        output: FloatTensor<Self>,
        tape: Tape,
        position: usize,
    ) -> FloatTensor<Self>;

    fn inject(y: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self>;

    fn unshard(token: FloatTensor<Self>, weight: Weight) -> FloatTensor<Self>;
}

/// Between a backend's tensors and Burn's own.
pub(super) trait Bridge: Backend {
    fn lift(tensor: FloatTensor<Self>) -> DispatchTensor;

    fn lower(tensor: DispatchTensor) -> FloatTensor<Self>;
}

/// Without autodiff there is nothing to join.
macro_rules! plain_backend {
    ($backend:ty) => {
        impl Bridge for $backend {
            fn lift(tensor: FloatTensor<Self>) -> DispatchTensor {
                // The const rank is only a type here; both ends agree on the tensor's own shape.
                Tensor::<1>::from_primitive::<Self>(tensor).into_dispatch()
            }

            fn lower(tensor: DispatchTensor) -> FloatTensor<Self> {
                Tensor::<1>::from_dispatch(tensor)
                    .try_into_primitive::<Self>()
                    .expect("a gradient or weight should be on the device of its tensor")
            }
        }

        impl UnitBackend for $backend {
            fn enter(
                token: FloatTensor<Self>,
                _input: FloatTensor<Self>,
                _tape: Tape,
                _position: usize,
            ) -> FloatTensor<Self> {
                token
            }

            fn exit(
                _token: FloatTensor<Self>,
                output: FloatTensor<Self>,
                _tape: Tape,
                _position: usize,
            ) -> FloatTensor<Self> {
                output
            }

            fn inject(_y: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
                grad
            }

            fn unshard(_token: FloatTensor<Self>, weight: Weight) -> FloatTensor<Self> {
                Self::lower(weight.tensor())
            }
        }
    };
}

plain_backend!(burn::backend::Flex);
#[cfg(any(feature = "wgpu", feature = "cuda"))]
plain_backend!(burn::backend::Cube);

impl<B: UnitBackend + Bridge, C: CheckpointStrategy> UnitBackend for Autodiff<B, C> {
    fn enter(
        token: FloatTensor<Self>,
        input: FloatTensor<Self>,
        tape: Tape,
        position: usize,
    ) -> FloatTensor<Self> {
        match Enter.prepare::<C>([token.node(), input.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((tape, position), token.into_primitive()),
            OpsKind::UnTracked(prep) => prep.finish(token.into_primitive()),
        }
    }

    fn exit(
        token: FloatTensor<Self>,
        output: FloatTensor<Self>,
        tape: Tape,
        position: usize,
    ) -> FloatTensor<Self> {
        match Exit.prepare::<C>([token.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((tape, position), output.into_primitive()),
            OpsKind::UnTracked(prep) => prep.finish(output.into_primitive()),
        }
    }

    fn inject(y: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        let grad = grad.into_primitive();
        // All that counts is that it has one element, and these it has.
        let one = B::float_ones([1].into(), &grad.device(), grad.dtype().into());
        match Inject.prepare::<C>([y.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(grad, one),
            OpsKind::UnTracked(prep) => prep.finish(one),
        }
    }

    fn unshard(token: FloatTensor<Self>, weight: Weight) -> FloatTensor<Self> {
        let again = Again::<B> { token: token.id(), weight: weight.clone(), backend: PhantomData };
        let tensor = B::lower(weight.tensor());
        let prepared = Unshard
            .prepare::<BalancedCheckpointing>([token.node()])
            .memory_bound()
            .retro_forward(again)
            .parents([&token])
            .stateful();
        match prepared {
            OpsKind::Tracked(prep) => prep.finish(weight, tensor),
            OpsKind::UnTracked(prep) => prep.finish(tensor),
        }
    }
}

#[derive(Debug)]
struct Enter;

impl<B: Bridge> Backward<B, 2> for Enter {
    type State = (Tape, usize);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (tape, position) = ops.state;
        let grad = tape.input_grad(position);
        if let ([_, Some(input)], Some(grad)) = (ops.parents, grad) {
            grads.register::<B>(input.id, B::lower(grad));
        }
    }
}

#[derive(Debug)]
struct Exit;

impl<B: Bridge> Backward<B, 1> for Exit {
    type State = (Tape, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (tape, position) = ops.state;
        tape.leave(position, B::lift(grads.consume::<B>(&ops.node)));
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

#[derive(Debug)]
struct Unshard;

impl<B: Bridge> Backward<B, 1> for Unshard {
    type State = Weight;

    fn backward(self, ops: Ops<Weight, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        ops.state.take_grad(B::lift(grads.consume::<B>(&ops.node)));
    }
}

/// Makes a weight's tensor again.
struct Again<B> {
    token: NodeId,
    weight: Weight,
    backend: PhantomData<fn() -> B>,
}

impl<B> fmt::Debug for Again<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Again({:?})", self.weight)
    }
}

impl<B: Bridge> RetroForward for Again<B> {
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        // Burn counts how often each parent's state is asked for.
        let _token = states.get_state::<FloatTensor<B>>(&self.token);
        states.save(out, B::lower(self.weight.tensor()));
    }
}
