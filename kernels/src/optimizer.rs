//! Fused optimizer steps over flat slices.
//!
//! Each step is one pass. The gradient is multiplied by a single factor on the way in; that factor
//! carries everything that scales gradients (true average over micro-batches and ranks, clipping,
//! loss scale), so that no other pass touches them. Arithmetic is done in the type of the state, `f32` or
//! `f64`; weights and gradients of other types are converted on the way.

mod adamw;
mod pass;
mod sgd;

pub use adamw::{AdamW, AdamWState};
pub use pass::Operands;
pub use sgd::{Sgd, SgdState};
