//! Fused optimizer steps over flat `f32` slices.
//!
//! Each step is one pass. The gradient is multiplied by a single factor on the way in; that factor
//! carries everything that scales gradients (true average over micro-batches and ranks, clipping,
//! loss scale), so that no other pass touches them.

mod adamw;
mod sgd;

pub use adamw::{AdamW, AdamWState};
pub use sgd::{Sgd, SgdState};
