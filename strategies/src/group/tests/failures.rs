use std::time::Duration;

use super::*;

#[test]
fn ranks_in_different_collectives_get_both_descriptions() {
    let errors = ranks(2, &GroupOptions::default(), |group| match group.rank() {
        0 => group.all_reduce(vec![0.0f32; 8], ReduceOp::Sum).wait().expect_err("a mismatch"),
        _ => group.all_reduce(vec![0.0f64; 6], ReduceOp::Sum).wait().expect_err("a mismatch"),
    });
    let mismatch = errors.iter().find(|error| matches!(error, Error::Mismatch { .. }));
    let message = mismatch.expect("one rank sees it first").to_string();
    assert!(message.contains("all_reduce(sum) #0 of 8 f32"), "{message}");
    assert!(message.contains("all_reduce(sum) #0 of 6 f64"), "{message}");
}

#[test]
fn ranks_with_different_options_are_told_to_agree() {
    let with = |algorithm, segment_bytes| GroupOptions {
        algorithm,
        segment_bytes: Some(segment_bytes),
        ..GroupOptions::default()
    };
    let disagreeing = [
        // Other segments, and numbers of another type on the wire.
        (with(Algorithm::Ring, 16), with(Algorithm::Ring, 64)),
        (with(Algorithm::Direct, 64), with(Algorithm::Ring, 64)),
    ];
    for (first, second) in disagreeing {
        let endpoints = in_memory(2).into_iter().zip([first, second]);
        let errors: Vec<Error> = thread::scope(|scope| {
            let threads: Vec<_> = endpoints
                .map(|(endpoint, options)| {
                    scope.spawn(|| {
                        let group = ProcessGroup::over(endpoint, options);
                        let mine = vec![half::bf16::ONE; 100];
                        group.ring_all_reduce(mine, ReduceOp::Sum).wait().expect_err("a mismatch")
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
        });
        assert!(errors.iter().any(|e| matches!(e, Error::SegmentMismatch { .. })), "{errors:?}");
        assert!(errors.iter().all(|e| e.to_string().contains("same GroupOptions")), "{errors:?}");
    }
}

/// What every rank says of a misuse that all commit.
fn refused<R: std::fmt::Debug + Send>(
    world: usize,
    call: impl Fn(&ProcessGroup) -> Pending<R> + Sync,
) -> Vec<Error> {
    refused_with(world, &GroupOptions::default(), call)
}

fn refused_with<R: std::fmt::Debug + Send>(
    world: usize,
    options: &GroupOptions,
    call: impl Fn(&ProcessGroup) -> Pending<R> + Sync,
) -> Vec<Error> {
    let errors = ranks(world, options, |group| call(group).wait().expect_err("a misuse"));
    assert!(errors.iter().any(|error| matches!(error, Error::Misuse { .. })), "{errors:?}");
    errors
}

fn all_say(errors: &[Error], words: &str) {
    assert!(errors.iter().all(|error| error.to_string().contains(words)), "{errors:?}");
}

#[test]
fn what_a_collective_cannot_do_is_refused() {
    all_say(&refused(2, |group| group.all_reduce(vec![1i32; 4], ReduceOp::Mean)), "use sum");
    all_say(&refused(2, |group| group.reduce_scatter(vec![1u8; 4], ReduceOp::Mean)), "use sum");
    all_say(&refused(2, |group| group.all_to_all(vec![1u8; 3])), "3 elements are no multiple of 2");
}

#[test]
fn a_root_that_is_no_rank_is_refused() {
    for (world, root) in [(1, 1), (3, 3), (3, usize::MAX)] {
        let words = format!("root {root} is not one of the group's {world} ranks");
        let buffer = || vec![1.0f32; 4];
        all_say(&refused(world, |group| group.broadcast(buffer(), root)), &words);
        all_say(&refused(world, |group| group.gather(buffer(), root)), &words);
        all_say(&refused(world, |group| group.scatter(buffer(), root)), &words);
        all_say(&refused(world, |group| group.reduce(buffer(), ReduceOp::Max, root)), &words);
    }
}

#[test]
fn a_root_that_only_one_rank_gets_wrong_ends_all() {
    let errors = ranks(3, &GroupOptions::default(), |group| {
        let root = if group.rank() == 1 { 3 } else { 0 };
        group.broadcast(vec![1u8; 4], root).wait().map(drop).err()
    });
    assert!(matches!(errors[1], Some(Error::Misuse { rank: 1, .. })), "{errors:?}");
    assert!(errors[2].is_some(), "rank 2 waits for rank 1: {errors:?}");
}

#[test]
fn a_rank_that_fails_ends_the_wait_of_the_others_even_if_it_stays() {
    let options = GroupOptions { timeout: Duration::from_secs(20), ..GroupOptions::default() };
    let (done, until) = bounded::<()>(0);
    let errors = ranks(2, &options, |group| match group.rank() {
        0 => {
            let error = group.barrier().expect_err("rank 1 has failed");
            done.send(()).expect("rank 1 should be waiting");
            error
        }
        _ => {
            let error = group.broadcast(vec![1u8], 2).wait().expect_err("no rank 2");
            until.recv().expect("rank 0 should be told");
            error
        }
    });
    assert!(matches!(errors[0], Error::Aborted { rank: 1, observer: 0, .. }), "{errors:?}");
}

#[test]
fn a_peer_that_is_no_other_rank_is_refused() {
    for (world, peer) in [(1, 1), (3, 3), (3, usize::MAX)] {
        let words = format!("peer {peer} is not one of the group's {world} ranks");
        all_say(&refused(world, |group| group.send(vec![1.0f32; 4], peer)), &words);
        all_say(&refused(world, |group| group.recv(vec![1.0f32; 4], peer)), &words);
    }
    let errors = refused(2, |group| group.send(vec![1u8], group.rank()));
    all_say(&errors, "of 2 ranks is this rank itself");
    let errors = refused(1, |group| group.recv(vec![1u8], 0));
    all_say(&errors, "peer 0 of 1 ranks is this rank itself");
}

#[test]
fn a_mesh_that_the_ranks_are_not_is_refused() {
    for row in [0, 2, 4] {
        let sum = |group: &ProcessGroup| group.all_reduce(vec![1.0f32; 4], ReduceOp::Sum);
        let mesh = GroupOptions { mesh_shard: Some(row), ..GroupOptions::default() };
        let words = format!("mesh_shard: rows of {row} do not divide 3 ranks");
        all_say(&refused_with(3, &mesh, sum), &words);
        let algorithm = Algorithm::Hierarchical { shard: row };
        let forced = GroupOptions { algorithm, ..GroupOptions::default() };
        let words = format!("Algorithm::Hierarchical: rows of {row} do not divide 3 ranks");
        all_say(&refused_with(3, &forced, sum), &words);
    }
}

#[test]
fn a_rank_that_leaves_ends_the_wait_of_the_others() {
    let errors = ranks(3, &GroupOptions::default(), |group| match group.rank() {
        2 => None,
        _ => Some(group.barrier().expect_err("rank 2 is gone")),
    });
    let left = errors.iter().flatten().find(|error| matches!(error, Error::PeerLeft { .. }));
    let message = left.expect("rank 0 waits for rank 2").to_string();
    assert!(message.contains("rank 2 has left the group"), "{message}");
}

#[test]
fn a_raised_signal_wakes_a_waiting_rank() {
    let errors = ranks(2, &GroupOptions::default(), |group| {
        let waiting = (group.rank() == 0).then(|| group.all_reduce(vec![1.0f32; 4], ReduceOp::Sum));
        if group.rank() == 1 {
            group.abort_signal().raise(1, "out of cheese");
        }
        waiting.map(|pending| pending.wait().expect_err("rank 1 failed"))
    });
    let message = errors[0].as_ref().map(ToString::to_string).unwrap_or_default();
    assert!(message.starts_with("rank 1 failed: out of cheese"), "{message}");
    assert!(message.contains("rank 0 was in all_reduce(sum) #0 of 4 f32"), "{message}");
}

#[test]
fn a_silent_rank_is_named_at_the_deadline() {
    let options = GroupOptions { timeout: Duration::from_millis(20), ..GroupOptions::default() };
    let (done, until) = bounded::<()>(0);
    let errors = ranks(2, &options, |group| match group.rank() {
        0 => {
            let error = group.barrier().expect_err("rank 1 is silent");
            done.send(()).expect("rank 1 should be waiting");
            Some(error)
        }
        _ => {
            until.recv().expect("rank 0 should come to its deadline");
            None
        }
    });
    let message = errors[0].as_ref().map(ToString::to_string).unwrap_or_default();
    assert!(message.contains("for rank 1 in barrier #0"), "{message}");
    assert!(message.contains("PYROCLAST_TIMEOUT"), "{message}");
}

#[test]
fn after_an_error_every_collective_fails_at_once() {
    let errors = ranks(2, &GroupOptions::default(), |group| {
        group.abort_signal().raise(0, "first");
        group.abort_signal().raise(1, "second");
        group.all_reduce(vec![0u8; 3], ReduceOp::Sum).wait().expect_err("the group has failed")
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Aborted { .. })), "{errors:?}");
    let all_blame_the_first = errors.iter().all(|e| e.to_string().contains("rank 0 failed: first"));
    assert!(all_blame_the_first, "{errors:?}");
}

#[test]
fn a_group_that_sends_nothing_fails_after_an_error_all_the_same() {
    let group = ProcessGroup::single();
    assert_eq!(group.all_reduce(vec![1u8], ReduceOp::Sum).wait(), Ok(vec![1]));
    group.abort_signal().raise(0, "it is over");
    let error = group.all_reduce(vec![1u8], ReduceOp::Sum).wait().expect_err("it has failed");
    assert!(error.to_string().contains("it is over"), "{error}");
}
