//! How several ranks train one model.
//!
//! The ladder, each step knowing only those above it:
//!
//! 1. [`shard`]: which part of a buffer belongs to which rank. Pure.
//! 2. [`abort`], [`transport`]: moving frames between two ranks, and stopping all of them.
//! 3. [`collectives`]: plans (pure) and the executor that runs them on a transport.
//! 4. [`group`]: a rank's membership; collectives in launch order on a thread of their own.
//! 5. [`layout`]: parameters by path, stored in flat buffers, one per [`Unit`].
//! 6. [`parameters`]: a module's numbers by path. [`optimizer`]: master weights and state, stepped by ranges of those buffers.
//! 7. [`data_parallel`]: the strategy.
//!
//! This crate knows nothing of datasets, checkpoint files, command lines or processes.

pub mod abort;
mod buckets;
pub mod collectives;
pub mod data_parallel;
mod deadline;
mod description;
mod error;
pub mod group;
pub mod layout;
pub mod membership;
pub mod optimizer;
pub mod parameters;
pub mod shard;
mod stage;
pub mod store;
#[cfg(test)]
mod testing;
pub mod transport;
mod unit;

pub use buckets::{Counts, MicroBatch};
pub use collectives::{Algorithm, CostModel, Element, ReduceOp, Workload};
pub use data_parallel::{DataParallel, OptimizerSetup, StateEntry};
pub use description::{Description, Dtype, GroupId, Operation};
pub use error::Error;
pub use group::{GroupOptions, Mesh, Pending, ProcessGroup, Traffic};
pub use layout::{Layout, ParamInfo, ParamSlot, UnitLayout};
pub use optimizer::{Optimizer, ParamGroup};
pub use stage::Stage;
pub use unit::Unit;
