//! Stacks of layers in which each layer is a [`Unit`](crate::Unit), and products of matrices.
//!
//! Burn's own stacks run through their layers inside one function, so no unit fits in them. These have
//! Burn's layers, paths and records, and shard and recompute layer by layer.
//!
//! [`matmul`] and [`linear`] are Burn's, but that on no device a long sum of `f16` numbers is rounded before
//! its end.

mod decoder;
mod encoder;
mod linear;

pub use decoder::{DecoderMasks, TransformerDecoder};
pub use encoder::TransformerEncoder;
pub use linear::{linear, matmul};
