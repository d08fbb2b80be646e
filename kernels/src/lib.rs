//! Buffers in, buffers out: the arithmetic of a training step on flat slices of floats.
//!
//! Nothing here knows about ranks, networks, files or policies. Six things live in this crate:
//!
//! * [`optimizer`]: fused optimizer steps ([`AdamW`](optimizer::AdamW), [`Sgd`](optimizer::Sgd)).
//!   One pass reads gradient, master weight and state, and writes master weight and state.
//! * [`numbers`]: buffers of `f64`, `f32`, `f16` or `bf16`, and conversions.
//! * [`gradient`]: accumulation, and the single read that yields both the sum of squares and the
//!   verdict whether every gradient is finite.
//! * [`copy`]: copies through and past the caches, which measure what memory allows.
//! * [`vectorized`]: any loop with the widest instruction set of the processor.
//! * [`interop`]: the only place that moves numbers between Burn tensors and flat slices.
//!
//! Every kernel is deterministic: its result depends neither on the number of threads nor on the
//! instruction set that the processor offers. Work is cut into fixed blocks, and a vector unit only
//! changes how many elements are in flight.
//!
//! ```
//! use pyroclast_kernels::optimizer::{Operands, Sgd, SgdState};
//!
//! let (mut weights, gradient, mut momentum) = ([1.0f32; 3], [0.5f32; 3], [0.0f32; 3]);
//! let sgd = Sgd { lr: 0.1, momentum: 0.9, nesterov: false, weight_decay: 0.0 };
//! let operands = Operands::new(&mut weights[..], &gradient[..]);
//! sgd.step(operands, SgdState { momentum: &mut momentum });
//! assert_eq!(weights, [0.95; 3]);
//! ```

pub mod copy;
pub mod flat;
pub mod gradient;
pub mod interop;
pub mod numbers;
pub mod optimizer;
mod parallel;

pub use parallel::vectorized;
