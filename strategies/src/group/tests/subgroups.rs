use std::time::Duration;

use super::*;
use crate::shard::shard;

/// The sum of what the given ranks bring, with numbers that no order of summing rounds.
fn sum_of(ranks: &[usize], len: usize) -> Vec<f32> {
    (0..len).map(|i| ranks.iter().map(|rank| whole(*rank, len)[i]).sum()).collect()
}

#[test]
fn both_axes_of_a_mesh_reduce_what_is_theirs() {
    for (replicate, row) in [(1, 5), (5, 1), (1, 1), (2, 2), (2, 3), (3, 2), (2, 4)] {
        for algorithm in [Algorithm::Auto, Algorithm::Ring, Algorithm::Direct] {
            let options = GroupOptions { algorithm, ..small_segments() };
            ranks(replicate * row, &options, |group| {
                let mesh = group.mesh(replicate, row).expect("a mesh of all ranks");
                let rank = group.rank();
                let (own_row, own_column) = (rank / row, rank % row);
                let in_row: Vec<usize> = (0..row).map(|column| own_row * row + column).collect();
                let in_column: Vec<usize> = (0..replicate).map(|r| r * row + own_column).collect();
                assert_eq!((mesh.shard.members(), mesh.shard.rank()), (&in_row[..], own_column));
                assert_eq!(
                    (mesh.replicate.members(), mesh.replicate.rank()),
                    (&in_column[..], own_row)
                );
                for len in [0, 1, row + 1, 97] {
                    let sum =
                        |group: &ProcessGroup| group.all_reduce(whole(rank, len), ReduceOp::Sum);
                    // Launched at once, waited for later: they run in this order on every rank.
                    let (row_sum, column_sum, all) =
                        (sum(&mesh.shard), sum(&mesh.replicate), sum(group));
                    let all_ranks: Vec<usize> = (0..replicate * row).collect();
                    assert_eq!(row_sum.wait().expect("a sum"), sum_of(&in_row, len));
                    assert_eq!(column_sum.wait().expect("a sum"), sum_of(&in_column, len));
                    assert_eq!(all.wait().expect("a sum"), sum_of(&all_ranks, len));
                    two_axis_reduction(&mesh, (group, len), &sum_of(&all_ranks, len));
                }
            });
        }
    }
}

/// Reduce-scatter along the row, all-reduce along the column, all-gather along the row.
fn two_axis_reduction(mesh: &Mesh, (group, len): (&ProcessGroup, usize), expected: &[f32]) {
    let own = shard(len, mesh.shard.world(), mesh.shard.rank());
    let scattered = mesh.shard.reduce_scatter(whole(group.rank(), len), ReduceOp::Sum);
    let mut buffer = scattered.wait().expect("a shard");
    let mine = buffer[own.clone()].to_vec();
    let reduced = mesh.replicate.all_reduce(mine, ReduceOp::Sum).wait().expect("a sum");
    buffer[own].copy_from_slice(&reduced);
    assert_eq!(mesh.shard.all_gather(buffer).wait().expect("a sum"), expected);
}

#[test]
fn a_subgroup_has_ranks_roots_and_peers_of_its_own() {
    let members = [3, 4, 6];
    // A rank that fails stops others in the middle of what it has finished itself.
    let all_are_done = std::sync::Barrier::new(members.len());
    ranks(7, &small_segments(), |group| {
        let subgroup = group.subgroup(&members).expect("three of seven ranks");
        assert_eq!(subgroup.is_some(), members.contains(&group.rank()));
        let Some(subgroup) = subgroup else { return };
        let rank = subgroup.rank();
        assert_eq!((subgroup.world(), members[rank]), (3, group.rank()));
        let of_root = subgroup.broadcast(whole(rank, 50), 2).wait().expect("numbers");
        assert_eq!(of_root, whole(2, 50));
        let sent = subgroup.send(whole(rank, 9), (rank + 1) % 3);
        let previous = (rank + 2) % 3;
        let received = subgroup.recv(vec![0.0; 9], previous).wait().expect("numbers");
        assert_eq!(received, whole(previous, 9));
        sent.wait().expect("a send");
        let parts = subgroup.all_gather_uneven(whole(rank, rank)).wait().expect("parts");
        assert_eq!(parts, [whole(0, 0), whole(1, 1), whole(2, 2)]);
        all_are_done.wait();
        let error = subgroup.broadcast(whole(rank, 5), 3).wait().expect_err("no rank 3");
        assert!(error.to_string().contains("root 3 is not one of the group's 3 ranks"), "{error}");
        match error {
            Error::Misuse { rank, .. } => assert_eq!(rank, group.rank()),
            Error::Aborted { rank, observer, .. } => {
                assert!(members.contains(&rank) && observer == group.rank(), "{rank}");
            }
            other => panic!("{other}"),
        }
    });
}

#[test]
fn a_subgroup_of_a_subgroup_counts_ranks_within_it() {
    let sums = ranks(6, &small_segments(), |group| {
        let odd = group.subgroup(&[1, 3, 5]).expect("half of the ranks")?;
        // Ranks 0 and 2 of the odd ones.
        let outer = odd.subgroup(&[0, 2]).expect("two of three")?;
        assert_eq!(outer.members(), [1, 5]);
        Some(outer.all_reduce(whole(group.rank(), 20), ReduceOp::Sum).wait().expect("a sum"))
    });
    for (rank, sum) in sums.into_iter().enumerate() {
        assert_eq!(sum, [1, 5].contains(&rank).then(|| sum_of(&[1, 5], 20)), "rank {rank}");
    }
}

#[test]
fn a_subgroup_is_no_mesh() {
    let forced = Algorithm::Hierarchical { shard: 2 };
    for (algorithm, mesh_shard) in [(Algorithm::Auto, Some(2)), (forced, None)] {
        let options = GroupOptions { algorithm, mesh_shard, ..GroupOptions::default() };
        ranks(4, &options, |group| {
            let Some(three) = group.subgroup(&[0, 1, 2]).expect("three of four") else { return };
            let sum = three.all_reduce(whole(group.rank(), 20), ReduceOp::Sum);
            assert_eq!(sum.wait().expect("a sum"), sum_of(&[0, 1, 2], 20));
        });
    }
}

#[test]
fn members_that_no_group_can_have_are_refused() {
    let group = ProcessGroup::single();
    for members in [vec![], vec![1], vec![0, 0], vec![0, usize::MAX]] {
        let error = group.subgroup(&members).expect_err("no such members");
        assert_eq!(error, Error::BadMembers { rank: 0, members: members.clone(), world: 1 });
    }
    ranks(3, &GroupOptions::default(), |group| {
        let error = group.subgroup(&[1, 0]).expect_err("descending").to_string();
        assert!(error.contains("below 3, in ascending order, not [1, 0]"), "{error}");
    });
}

#[test]
fn a_mesh_of_another_size_is_refused_with_all_numbers() {
    ranks(6, &GroupOptions::default(), |group| {
        for (replicate, shard) in [(2, 2), (0, 6), (6, 0), (usize::MAX, 2)] {
            let error = group.mesh(replicate, shard).expect_err("not six ranks");
            let rank = group.rank();
            assert_eq!(error, Error::BadMesh { rank, replicate, shard, world: 6 });
            let message = error.to_string();
            let words = format!("replicate {replicate} x shard {shard} is not 6 ranks");
            assert!(message.contains(&words), "{message}");
        }
    });
}

#[test]
fn groups_that_are_used_in_different_order_are_an_error_on_both_ends() {
    let errors = ranks(2, &GroupOptions::default(), |group| {
        let groups: Vec<ProcessGroup> =
            (0..2).filter_map(|_| group.subgroup(&[0, 1]).expect("both ranks")).collect();
        let (first, second) = match group.rank() {
            0 => (&groups[0], &groups[1]),
            _ => (&groups[1], &groups[0]),
        };
        let sum = |group: &ProcessGroup| group.all_reduce(vec![1u8; 4], ReduceOp::Sum);
        let (first, second) = (sum(first), sum(second));
        [first.wait(), second.wait()].map(|outcome| outcome.expect_err("another group"))
    });
    let mismatch = errors.iter().flatten().find(|error| matches!(error, Error::Mismatch { .. }));
    let message = mismatch.expect("one rank sees it first").to_string();
    assert_eq!(message.matches("in subgroup").count(), 2, "{message}");
}

#[test]
fn groups_that_are_made_in_different_order_are_an_error_on_both_ends() {
    let errors = ranks(3, &GroupOptions::default(), |group| {
        let (pair, all): ([usize; 2], [usize; 3]) = ([0, 1], [0, 1, 2]);
        let orders: [[&[usize]; 2]; 2] = [[&pair, &all], [&all, &pair]];
        let groups = orders[usize::from(group.rank() == 1)]
            .map(|members| group.subgroup(members).expect("members"));
        let of_all = groups.iter().flatten().find(|group| group.world() == 3)?;
        Some(of_all.all_reduce(vec![1u8; 4], ReduceOp::Sum).wait().expect_err("another group"))
    });
    assert!(errors.iter().all(Option::is_some));
    assert!(errors.iter().flatten().any(|e| matches!(e, Error::Mismatch { .. })), "{errors:?}");
}

#[test]
fn ranks_that_disagree_on_members_get_an_error() {
    let errors = ranks(3, &GroupOptions::default(), |group| {
        let members: &[usize] = if group.rank() == 0 { &[0, 1] } else { &[0, 1, 2] };
        let subgroup = group.subgroup(members).expect("members").expect("this rank is a member");
        subgroup.all_reduce(vec![1u8; 4], ReduceOp::Sum).wait().expect_err("other members")
    });
    assert!(errors.iter().any(|e| matches!(e, Error::Mismatch { .. })), "{errors:?}");
}

#[test]
fn a_failing_subgroup_fails_all_groups_and_names_ranks_of_the_job() {
    let options = GroupOptions { timeout: Duration::from_secs(60), ..GroupOptions::default() };
    let errors = ranks(4, &options, |group| {
        let mesh = group.mesh(2, 2).expect("four ranks");
        // Rank 3 calls something else than rank 2, its neighbour in the row.
        if group.rank() == 3 {
            let error = mesh.shard.all_gather(vec![0u8; 4]).wait().expect_err("a mismatch");
            return vec![error];
        }
        let in_row = mesh.shard.all_reduce(vec![0u8; 4], ReduceOp::Sum);
        let in_all = group.all_reduce(vec![0u8; 4], ReduceOp::Sum);
        let row_failed = in_row.wait().err();
        let all_failed = in_all.wait().expect_err("rank 3 has failed");
        let later = mesh.replicate.all_gather(vec![0u8]).wait().expect_err("all groups fail");
        row_failed.into_iter().chain([all_failed, later]).collect()
    });
    let all: Vec<&Error> = errors.iter().flatten().collect();
    let mismatch = all.iter().find(|error| matches!(error, Error::Mismatch { .. }));
    let (message, blamed) = match mismatch {
        Some(Error::Mismatch { rank, peer, .. }) => (all[0].to_string(), [*rank, *peer]),
        _ => panic!("a mismatch is seen first: {all:?}"),
    };
    assert!(blamed == [2, 3] || blamed == [3, 2], "{message}");
    for error in all.iter().filter(|error| matches!(error, Error::Aborted { .. })) {
        assert!(matches!(error, Error::Aborted { rank: 2 | 3, .. }), "{error}");
    }
}

#[test]
fn the_last_group_of_a_rank_ends_its_thread() {
    let errors = ranks_over(in_memory(2), &GroupOptions::default(), |group| {
        let first = group.subgroup(&[0, 1]).expect("both ranks").expect("this rank is a member");
        drop(group);
        let sum = first.all_reduce(vec![1u8], ReduceOp::Sum).wait();
        assert_eq!(sum, Ok(vec![2]), "a subgroup outlives the group it was made from");
        match first.rank() {
            0 => None,
            // Rank 0 drops its last group, and so leaves.
            _ => first.barrier().err(),
        }
    });
    assert!(matches!(errors[1], Some(Error::PeerLeft { rank: 1, peer: 0, .. })), "{errors:?}");
}

#[test]
fn a_rank_that_panics_with_a_subgroup_is_named() {
    let errors = thread::scope(|scope| {
        let threads: Vec<_> = in_memory(3)
            .into_iter()
            .map(|endpoint| {
                scope.spawn(move || {
                    let group = ProcessGroup::over(endpoint, GroupOptions::default());
                    let pair = group.subgroup(&[0, 2]).expect("two ranks");
                    assert_ne!(group.rank(), 2, "rank 2 panics as this test wants");
                    drop(group);
                    pair.map(|pair| pair.barrier().expect_err("rank 2 panicked"))
                })
            })
            .collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    assert!(errors[2].is_err());
    let message = errors[0].as_ref().ok().and_then(Option::as_ref).map(ToString::to_string);
    let message = message.unwrap_or_default();
    assert!(message.contains("rank 2 failed: the rank panicked"), "{message}");
}
