use std::thread;

use super::*;
use crate::collectives::{Algorithm, ReduceOp};

mod failures;
pub(crate) mod grid;
mod subgroups;
mod traffic;

/// Endpoints of the memory transport.
fn in_memory(world: usize) -> Vec<Box<dyn Transport>> {
    let boxed = |endpoint| Box::new(endpoint) as Box<dyn Transport>;
    memory::endpoints(world).into_iter().map(boxed).collect()
}

/// Runs `body` on every rank that `endpoints` connect, each in a thread of its own, and returns the
/// results in rank order.
fn ranks_over<R: Send>(
    endpoints: Vec<Box<dyn Transport>>,
    options: &GroupOptions,
    body: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = endpoints
            .into_iter()
            .map(|endpoint| {
                let body = &body;
                scope.spawn(move || body(ProcessGroup::over(endpoint, options.clone())))
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
    })
}

/// As [`ranks_over`], in memory.
fn ranks<R: Send>(
    world: usize,
    options: &GroupOptions,
    body: impl Fn(&ProcessGroup) -> R + Sync,
) -> Vec<R> {
    ranks_over(in_memory(world), options, |group| body(&group))
}

/// Segments of 16 bytes, so that short buffers have several.
fn small_segments() -> GroupOptions {
    GroupOptions { segment_bytes: Some(16), ..GroupOptions::default() }
}

/// Numbers that are exact in `f32` however they are summed.
fn whole(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 31 + rank * 17) % 97) as f32).collect()
}

/// All ways of an all-reduce, with each shape of a mesh that `world` ranks have.
pub(crate) fn algorithms(world: usize) -> Vec<Algorithm> {
    let rows = (2..world).filter(|row| world.is_multiple_of(*row));
    let meshes = rows.chain([1]).map(|shard| Algorithm::Hierarchical { shard });
    [Algorithm::Auto, Algorithm::Ring, Algorithm::Doubling, Algorithm::Direct]
        .into_iter()
        .chain(meshes)
        .collect()
}
