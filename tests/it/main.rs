//! Integration tests of the whole workspace, in one binary.

/// Losses, norms and weights equal PyTorch's.
mod torch;

/// Worlds of 1 to 4 ranks train the same model, and a run repeats itself bit by bit.
mod worlds;

/// Every way to share the work trains the same model.
mod parity;

/// Units draw random numbers once, and the same again.
mod dropout;

/// A run can be stopped, continued, and is continued exactly.
mod resume;

/// When checkpoints are made, and which are kept.
mod checkpoints;

/// Checkpoints that are written while training goes on, and what callbacks keep in them.
mod asynchronous;

/// Failures of user code end the whole run, with the right error first.
mod failures;

/// Ranks that are processes.
mod network;

/// Bytes from outside break nothing.
mod fuzz;

/// A user's own training with each rank a process.
mod processes;

/// A user's own module and data, with metrics, groups, odd sizes and uneven data.
mod own_model;

/// GPU devices compute what the CPU computes.
mod gpu;

/// Products of 16-bit matrices are summed in 32 bits.
mod matmul;

/// Numbers of 16 and of 64 bits, loss scales, and what happens where numbers end.
mod precision;

/// Which crate may use which, and other rules of the source tree.
mod workspace;
