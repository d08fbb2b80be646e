//! Stacks of layers in which each layer is a [`Unit`](crate::Unit).
//!
//! Burn's own stacks run through their layers inside one function, so no unit fits in them. These have
//! Burn's layers, paths and records, and shard and recompute layer by layer.

mod decoder;
mod encoder;

pub use decoder::{DecoderMasks, TransformerDecoder};
pub use encoder::TransformerEncoder;
