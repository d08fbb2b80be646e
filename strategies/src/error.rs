//! What can go wrong between ranks and in a model's layout.

use pyroclast_kernels::numbers::Float;

use crate::description::Description;
use crate::policy::PolicyPurpose;

/// Errors of this crate.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another rank failed first; the group is unusable from then on.
    #[error("rank {rank} failed: {reason} (rank {observer} was in {waiting_in})")]
    Aborted {
        /// The rank that failed.
        rank: usize,
        /// Its error.
        reason: String,
        /// This rank.
        observer: usize,
        /// The collective that this rank was in.
        waiting_in: Description,
    },
    /// A peer closed the group while this rank was waiting for it.
    #[error("rank {rank} waited in {waiting_in}, but rank {peer} has left the group")]
    PeerLeft {
        /// This rank.
        rank: usize,
        /// The rank that is gone.
        peer: usize,
        /// The collective that this rank was in.
        waiting_in: Description,
    },
    /// A collective did not end before its deadline.
    #[error(
        "rank {rank} waited for rank {peer} in {waiting_in} until the deadline; \
         a longer limit is set by PYROCLAST_TIMEOUT"
    )]
    Timeout {
        /// This rank.
        rank: usize,
        /// The rank that it waited for, which may itself wait for another.
        peer: usize,
        /// The collective that this rank was in.
        waiting_in: Description,
    },
    /// Frames of a peer stopped coming although the peer is alive.
    #[error("rank {rank} lost the connection for frames to rank {peer} in {waiting_in}")]
    Disconnected {
        /// This rank.
        rank: usize,
        /// The rank at the other end.
        peer: usize,
        /// The collective that this rank was in.
        waiting_in: Description,
    },
    /// What arrived is not what the peer sent.
    #[error("rank {rank} received damaged data from rank {peer} in {waiting_in}: {problem}")]
    Damaged {
        /// This rank.
        rank: usize,
        /// The sender.
        peer: usize,
        /// The collective that this rank was in.
        waiting_in: Description,
        /// What was noticed.
        problem: &'static str,
    },
    /// The ranks of a job cannot find each other.
    #[error("{0}")]
    Membership(String),
    /// A setting keeps this rank from joining the others; another one would not.
    #[error("{0}")]
    Setting(String),
    /// Two ranks are in different collectives, or in one collective with different buffers.
    #[error("rank {rank} is in {mine}, but rank {peer} is in {theirs}")]
    Mismatch {
        /// This rank.
        rank: usize,
        /// The rank that disagrees.
        peer: usize,
        /// What this rank is doing.
        mine: Description,
        /// What the other rank is doing.
        theirs: Description,
    },
    /// Two ranks cut the same collective into different messages.
    #[error(
        "rank {rank} expected a message of {expected} elements from rank {peer} in {collective}, but it \
         has {found}; give every rank the same GroupOptions (segment size and algorithm)"
    )]
    SegmentMismatch {
        /// This rank.
        rank: usize,
        /// The rank that disagrees.
        peer: usize,
        /// The collective.
        collective: Description,
        /// Elements that should have come.
        expected: usize,
        /// Elements that came.
        found: usize,
    },
    /// A collective was called with arguments that it cannot have.
    #[error("rank {rank}: {collective}: {problem}")]
    Misuse {
        /// This rank.
        rank: usize,
        /// What was called.
        collective: Description,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// The rank's communication thread is gone.
    #[error("rank {rank}: the communication thread has ended")]
    GroupClosed {
        /// This rank.
        rank: usize,
    },
    /// Ranks built models with different parameters.
    #[error(
        "rank {rank} built a model whose parameters (paths, shapes or units) differ from rank 0's; \
         `configure_model` must build the same model on every rank"
    )]
    LayoutMismatch {
        /// This rank.
        rank: usize,
    },
    /// Trainable parameters received no gradient in a step.
    #[error(
        "rank {rank}: no gradient reached {}; use them in the loss or freeze them with `no_grad()`",
        paths.join(", ")
    )]
    UnusedParameters {
        /// This rank.
        rank: usize,
        /// Paths of the parameters.
        paths: Vec<String>,
    },
    /// A gradient of a unit's parameter did not come through the unit.
    #[error(
        "`{path}` belongs to a unit, but part of its gradient came from outside the unit, after the \
         unit's gradients had been reduced; reach a unit's parameters only inside `Unit::forward`, or \
         leave `{path}` out of the unit"
    )]
    LateGradient {
        /// Path of the parameter.
        path: String,
    },
    /// A model has nothing to train.
    #[error(
        "the model has no trainable float parameter; build it on a device with autodiff \
         (`context.device` in `configure_model`) and do not freeze all of it"
    )]
    NothingToTrain,
    /// A policy names units that the model does not have.
    #[error("{purpose}: no unit has the {what} `{name}`; there are {known}")]
    UnknownUnits {
        /// What the policy decides.
        purpose: PolicyPurpose,
        /// What the policy chooses by.
        what: &'static str,
        /// What it names.
        name: String,
        /// What there is.
        known: String,
    },
    /// A model declares more units than messages can tell apart.
    #[error(
        "the model has {units} units, and the limit is {limit}; choose fewer with a wrap policy"
    )]
    TooManyUnits {
        /// How many there are.
        units: usize,
        /// How many there may be.
        limit: usize,
    },
    /// A unit's function uses a tensor that requires a gradient and is none of its arguments.
    #[error(
        "the function of a unit of type `{unit}` captures a tensor that requires a gradient; pass it \
         as an argument of `Unit::forward`, in a tuple with the others, or `detach()` it"
    )]
    CapturedTensor {
        /// Type of the unit's block.
        unit: &'static str,
    },
    /// A unit that is stored with the one around it was given types of its own.
    #[error(
        "`{unit}` is stored with the unit around it, whose precision it has; choose it \
         with the wrap policy, too"
    )]
    TypesWithoutUnit {
        /// The unit's path.
        unit: String,
    },
    /// A unit mixes types of numbers.
    #[error(
        "unit `{unit}`, which computes in {compute}: {problem}; make constants in the type of the unit's \
         inputs (`.cast(x.dtype())`), or give the unit f32 with precision_overrides"
    )]
    MixedTypes {
        /// The unit's path.
        unit: String,
        /// What its weights and inputs are.
        compute: Float,
        /// What was found.
        problem: String,
    },
    /// A unit's output is NaN or infinite, and somebody asked to be told.
    #[error("unit `{unit}` on rank {rank}: its output is NaN or infinite, {inputs}")]
    Anomaly {
        /// The unit's path.
        unit: String,
        /// This rank.
        rank: usize,
        /// What its inputs are.
        inputs: &'static str,
    },
    /// Ranks took a step of different numbers of micro-batches.
    #[error(
        "rank {rank} ran {mine} micro-batches in this step, but rank {peer} ran {theirs}; every rank \
         must run as many (with weight 0 where its data has run out)"
    )]
    MicroBatches {
        /// This rank.
        rank: usize,
        /// How many it ran.
        mine: usize,
        /// The rank that disagrees.
        peer: usize,
        /// How many that one ran.
        theirs: usize,
    },
    /// A unit already belongs to another training run.
    #[error(
        "a unit of this model is already being trained by another rank or run; \
         `configure_model` must build a new model for each rank instead of cloning one"
    )]
    UnitInUse,
    /// Numbers could not be read from the device.
    #[error("reading {what}: {source}")]
    Read {
        /// What was read.
        what: String,
        /// Why it failed.
        source: pyroclast_kernels::interop::ReadError,
    },
    /// Values that were to be loaded do not fit the model.
    #[error("parameter `{path}` has {expected} elements, but {found} were given")]
    WrongLength {
        /// Path of the parameter.
        path: String,
        /// Elements of the parameter.
        expected: usize,
        /// Elements that were given.
        found: usize,
    },
    /// Values for a parameter are missing.
    #[error("no values were given for `{0}`")]
    MissingValues(String),
    /// A subgroup was asked for that the group cannot have.
    #[error(
        "rank {rank}: a subgroup's members are one or more ranks below {world}, in ascending order, \
         not {members:?}"
    )]
    BadMembers {
        /// This rank.
        rank: usize,
        /// What was asked for.
        members: Vec<usize>,
        /// Ranks of the group.
        world: usize,
    },
    /// A mesh was asked for that does not have as many places as the group has ranks.
    #[error("rank {rank}: a mesh of replicate {replicate} x shard {shard} is not {world} ranks")]
    BadMesh {
        /// This rank.
        rank: usize,
        /// Rows asked for.
        replicate: usize,
        /// Ranks asked for in each row.
        shard: usize,
        /// Ranks of the group.
        world: usize,
    },
}
