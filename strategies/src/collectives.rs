//! Collectives as pure plans, and the one executor that runs any of them on a transport.
//!
//! Vocabulary: a buffer is cut into one *chunk* per rank; a chunk is cut into *segments*, so that a
//! rank passes the first segment on while the second is still arriving.

mod algorithm;
mod costs;
mod element;
mod executor;
pub mod plan;

pub use algorithm::{Algorithm, Workload};
pub use costs::CostModel;
pub use element::{Element, ReduceOp};
pub(crate) use executor::{Run, execute};
