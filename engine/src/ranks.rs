//! Runs one function per rank, on threads or as the one rank of this process, so that a rank's
//! failure ends all of them.
//!
//! Each rank computes in a thread pool of its own with its share of the processor. In one pool for
//! all, ranks would queue behind each other's work; and a rank inside its pool hands work to it
//! without waking another thread first.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use pyroclast_strategies::transport::memory;
use pyroclast_strategies::{GroupOptions, ProcessGroup};

use crate::error::Error;

/// Runs `body` on `world` threads and returns what they return, in rank order. `state` makes what a
/// rank takes with it, on the calling thread.
///
/// # Errors
///
/// The error of the rank that failed first. The others are woken at once, and their own errors,
/// which only say so, are dropped.
pub(crate) fn run<S: Send, R: Send>(
    world: usize,
    options: &GroupOptions,
    mut state: impl FnMut(usize) -> S,
    body: impl Fn(Arc<ProcessGroup>, S) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let groups: Vec<Arc<ProcessGroup>> = memory::endpoints(world)
        .into_iter()
        .map(|endpoint| Arc::new(ProcessGroup::new(endpoint, options.clone())))
        .collect();
    let share = (rayon::current_num_threads() / world).max(1);
    let pools = (0..world).map(|rank| pool(rank, share)).collect::<Result<Vec<_>, Error>>()?;
    let outcomes: Vec<Result<R, Error>> = thread::scope(|scope| {
        let threads: Vec<_> = groups
            .iter()
            .zip(&pools)
            .enumerate()
            .map(|(rank, (group, pool))| {
                let (state, body) = (state(rank), &body);
                let run = move || pool.install(|| body(Arc::clone(group), state));
                thread::Builder::new()
                    .name(format!("rank-{rank}"))
                    .spawn_scoped(scope, move || guarded(rank, group, run))
                    .map_err(|error| {
                        group.abort_signal().raise(rank, &error);
                        Error::io("starting", format!("the thread of rank {rank}"))(error)
                    })
            })
            .collect();
        let join = |(rank, thread): (usize, Result<thread::ScopedJoinHandle<'_, _>, Error>)| {
            thread?.join().unwrap_or_else(|panic| Err(panicked(rank, panic)))
        };
        threads.into_iter().enumerate().map(join).collect()
    });
    let blamed = groups[0].abort_signal().failure().map(|failure| failure.rank);
    first_failure(outcomes, blamed)
}

/// Runs `body` as the one rank of this process, on `threads` threads.
///
/// # Errors
///
/// This rank's own error, of which the others are told.
pub(crate) fn run_one<R: Send>(
    group: &Arc<ProcessGroup>,
    threads: usize,
    body: impl FnOnce(Arc<ProcessGroup>) -> Result<R, Error> + Send,
) -> Result<R, Error> {
    let rank = group.rank();
    guarded(rank, group, || pool(rank, threads)?.install(|| body(Arc::clone(group))))
}

/// The threads that a rank computes with.
fn pool(rank: usize, threads: usize) -> Result<rayon::ThreadPool, Error> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(move |thread| format!("rank-{rank}-{thread}"))
        .build()
        .map_err(|error| {
            let path = format!("the threads of rank {rank}");
            Error::io("starting", path)(std::io::Error::other(error))
        })
}

/// Tells all ranks of a failure before anything of this rank is dropped.
fn guarded<R>(
    rank: usize,
    group: &ProcessGroup,
    body: impl FnOnce() -> Result<R, Error>,
) -> Result<R, Error> {
    let outcome =
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(panicked(rank, panic)));
    if let Err(error) = &outcome {
        group.abort_signal().raise(rank, error);
    }
    outcome
}

fn panicked(rank: usize, panic: Box<dyn Any + Send>) -> Error {
    // A unit's forward pass returns tensors, and so does a lazy parameter: they unwind with their errors.
    match panic.downcast::<Error>().map_err(|panic| panic.downcast()) {
        Ok(error) => *error,
        Err(Ok(error)) => Error::Strategy(*error),
        Err(Err(panic)) => Error::Panic { rank, message: panic_message(&*panic) },
    }
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|message| (*message).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

fn first_failure<R>(
    outcomes: Vec<Result<R, Error>>,
    blamed: Option<usize>,
) -> Result<Vec<R>, Error> {
    let Some(blamed) = blamed else { return outcomes.into_iter().collect() };
    let mut errors: Vec<(usize, Error)> = outcomes
        .into_iter()
        .enumerate()
        .filter_map(|(rank, outcome)| Some((rank, outcome.err()?)))
        .collect();
    let first = errors.iter().position(|(rank, _)| *rank == blamed).unwrap_or(0);
    Err(errors.swap_remove(first).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail(rank: usize) -> Error {
        Error::Task { rank, stage: "training_step", source: "out of cheese".into() }
    }

    #[test]
    fn results_come_in_rank_order() {
        let ranks = run(
            3,
            &GroupOptions::default(),
            |rank| rank * 10,
            |group, state| Ok((group.rank(), state)),
        );
        assert_eq!(ranks.expect("no rank fails"), [(0, 0), (1, 10), (2, 20)]);
    }

    #[test]
    fn the_first_failing_rank_is_blamed_and_wakes_the_others() {
        for failing in 0..3 {
            let outcome = run(
                3,
                &GroupOptions::default(),
                |_| (),
                |group, ()| {
                    if group.rank() == failing {
                        return Err(fail(failing));
                    }
                    // Never completes: the failing rank does not take part.
                    group.barrier().map_err(Error::from)
                },
            );
            let error = outcome.expect_err("a rank fails").to_string();
            assert_eq!(error, format!("rank {failing}: training_step: out of cheese"));
        }
    }

    #[test]
    fn a_rank_by_itself_tells_the_others_of_its_failure() {
        let groups: Vec<_> = memory::endpoints(2)
            .into_iter()
            .map(|endpoint| Arc::new(ProcessGroup::new(endpoint, GroupOptions::default())))
            .collect();
        let threads = run_one(&groups[1], 3, |_| Ok(rayon::current_num_threads()));
        assert_eq!(threads.expect("no failure"), 3);
        let failed = run_one(&groups[1], 1, |_| -> Result<(), Error> { panic!("shapes differ") });
        assert_eq!(failed.expect_err("a panic").to_string(), "rank 1 panicked: shapes differ");
        let woken = run_one(&groups[0], 1, |group| Ok(group.barrier()?));
        let woken = woken.expect_err("the other rank has failed").to_string();
        assert!(woken.contains("rank 1 failed: rank 1 panicked: shapes differ"), "{woken}");
    }

    #[test]
    fn a_panic_is_an_error_like_any_other() {
        let outcome: Result<Vec<()>, Error> = run(
            2,
            &GroupOptions::default(),
            |_| (),
            |group, ()| match group.rank() {
                1 => panic!("shapes differ"),
                _ => group.barrier().map_err(Error::from),
            },
        );
        let error = outcome.expect_err("a rank panics").to_string();
        assert_eq!(error, "rank 1 panicked: shapes differ");
    }
}
