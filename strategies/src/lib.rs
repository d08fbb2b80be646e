//! How several ranks train one model.
//!
//! The ladder, each step knowing only those above it:
//!
//! 1. [`shard`]: which part of a buffer belongs to which rank. Pure.
//! 2. [`membership`], [`store`]: who belongs to a job, and where its ranks find each other.
//! 3. [`abort`], [`transport`]: moving frames between two ranks, and stopping all of them.
//! 4. [`collectives`]: plans (pure) and the executor that runs them on a transport.
//! 5. [`group`]: a rank's place in a group; collectives in launch order on a thread of their own.
//! 6. [`layout`]: parameters by path, stored in flat buffers, one per [`Unit`].
//! 7. [`parameters`]: a module's numbers by path. [`optimizer`]: master weights and state, stepped by ranges of those buffers.
//! 8. [`Stage`]: what is sharded. [`memory`]: what is held for what. [`data_parallel`]: the strategy.
//!
//! This crate knows nothing of datasets, checkpoint files or command lines, and starts no processes.

pub mod abort;
mod buckets;
pub mod collectives;
pub mod data_parallel;
mod deadline;
mod description;
mod error;
mod events;
mod gathers;
pub mod group;
mod initialise;
pub mod layout;
pub mod membership;
pub mod memory;
pub mod optimizer;
pub mod parameters;
mod parcel;
mod policy;
mod precision;
mod run;
pub mod shard;
mod sizes;
mod stage;
pub mod store;
#[cfg(test)]
mod testing;
pub mod transport;
mod unit;
mod weights;

pub use buckets::{Counts, MicroBatch};
pub use collectives::{Algorithm, CostModel, Element, ReduceOp, Workload};
pub use data_parallel::{
    Anomalies, Culprit, DataParallel, GradientScale, Piece, PieceOf, Pieces, Setup, StateEntry,
    Unused,
};
pub use description::{Description, Dtype, GroupId, Operation};
pub use error::Error;
pub use group::{GroupOptions, Mesh, Pending, ProcessGroup, Traffic};
pub use layout::{Layout, ParamInfo, ParamSlot, UnitLayout};
pub use memory::Ledger;
pub use optimizer::{Optimizer, ParamGroup, Rate};
pub use policy::{PolicyPurpose, UnitPolicy};
pub use precision::UnitTypes;
pub use sizes::{Overlap, ParamOrder, Sizes};
pub use stage::{AfterForward, BackwardPrefetch, Gathering, Stage};
pub use unit::{TensorMap, Unit, Values, any_recomputes};
