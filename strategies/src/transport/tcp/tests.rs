pub(crate) mod relay;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::thread;

use super::*;
use crate::store::MemoryStore;
use crate::{GroupOptions, ProcessGroup, ReduceOp};

/// Endpoints of `world` ranks that are threads, connected over this machine's own addresses.
pub(crate) fn endpoints(world: usize, options: &TcpOptions) -> Vec<Endpoint> {
    let store = MemoryStore::default();
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let joined = join_all(world, |rank| connect(rank, world, ip, &store, options));
    joined.into_iter().collect::<Result<_, _>>().expect("all ranks should connect")
}

fn join_all<R: Send>(world: usize, join: impl Fn(usize) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let join = &join;
                scope.spawn(move || join(rank))
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
    })
}

/// The sum over all ranks of as many ones.
fn sum(endpoint: Endpoint, len: usize) -> Result<Vec<f32>, Error> {
    let group = ProcessGroup::new(endpoint, GroupOptions::default());
    group.all_reduce(vec![1.0f32; len], ReduceOp::Sum).wait()
}

fn secret(text: &str) -> Option<JobSecret> {
    Some(JobSecret::new(text).expect("a secret of 16 bytes or more"))
}

/// A port that was free a moment ago, as `host:port`.
fn free(ip: IpAddr) -> String {
    let listener = std::net::TcpListener::bind((ip, 0)).expect("a port");
    listener.local_addr().expect("an address").to_string()
}

#[test]
fn processes_meet_at_rank_0_over_ipv4_and_ipv6() {
    for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        for (secret, integrity) in
            [(None, Integrity::Auto), (secret("0123456789abcdef"), Integrity::Keyed)]
        {
            let options =
                TcpOptions { secret, integrity, sockets_per_peer: 3, ..TcpOptions::default() };
            let master = free(ip);
            let sums = join_all(3, |rank| sum(join(rank, 3, &master, &options)?, 100_000));
            assert!(sums.iter().all(|sum| *sum == Ok(vec![3.0; 100_000])), "{ip}");
        }
    }
}

#[test]
fn a_rank_alone_needs_nobody() {
    let master = free(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let endpoint = join(0, 1, &master, &TcpOptions::default()).expect("one rank");
    assert_eq!(sum(endpoint, 5), Ok(vec![1.0; 5]));
}

#[test]
fn large_frames_pass_in_both_directions_at_once() {
    // Larger than all buffers of the system: a rank that only wrote would never be read.
    let sums: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = endpoints(2, &TcpOptions::default())
            .into_iter()
            .map(|endpoint| scope.spawn(|| sum(endpoint, 8 << 20)))
            .collect();
        threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
    });
    for sum in sums {
        assert!(sum.expect("a sum").iter().all(|v| *v == 2.0));
    }
}

#[test]
fn ranks_that_do_not_fit_together_say_why_on_all_sides() {
    type Change = fn(usize, &mut TcpOptions);
    // A rank without the secret is a stranger, whose reasons are nobody's business.
    let cases: [(Change, &str); 4] = [
        (|rank, o| o.integrity = [Integrity::Keyed, Integrity::Crc][rank], "settings"),
        (|rank, o| o.secret = secret(["0123456789abcdef", "fedcba9876543210"][rank]), "secret"),
        (|rank, o| o.sockets_per_peer = rank + 1, "settings"),
        (|rank, o| o.interface = (rank == 1).then(|| "nonesuch0".to_owned()), "nonesuch0"),
    ];
    for (change, expected) in cases {
        let master = free(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let errors = join_all(2, |rank| {
            let limit = Duration::from_secs(60);
            let mut options = TcpOptions { join_timeout: limit, ..TcpOptions::default() };
            change(rank, &mut options);
            join(rank, 2, &master, &options).map(drop).expect_err("they do not fit").to_string()
        });
        assert!(errors[1].contains(expected), "{errors:?}");
        assert!(expected == "secret" || errors[0].contains(expected), "{errors:?}");
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let master = free(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let options = TcpOptions { join_timeout: Duration::from_secs(2), ..TcpOptions::default() };
    let errors = join_all(2, |rank| {
        join(rank, 3, &master, &options).map(drop).expect_err("rank 2 is missing").to_string()
    });
    let names = |error: &String| error.contains("[2]") || error.contains("rank 2 did not join");
    assert!(errors.iter().all(names), "{errors:?}");
    let error = join(1, 2, &master, &options).map(drop).expect_err("no rank 0").to_string();
    assert!(error.contains(&master) && error.contains("could not be reached"), "{error}");
}

#[test]
fn settings_out_of_range_are_refused() {
    let refused = |rank, world, change: fn(&mut TcpOptions)| {
        let mut options = TcpOptions::default();
        change(&mut options);
        join(rank, world, "127.0.0.1:1", &options).map(drop).expect_err("wrong").to_string()
    };
    assert!(refused(0, 0, |_| ()).contains("WORLD_SIZE is 0"));
    assert!(refused(2, 2, |_| ()).contains("RANK is 2"));
    assert!(refused(0, 2, |o| o.sockets_per_peer = 17).contains("1 to 16"));
    assert!(refused(0, 2, |o| o.heartbeat = Duration::ZERO).contains("heartbeat"));
}

#[test]
fn ranks_that_only_send_can_leave() {
    // Each rank believes that it is the root, and sends more than all buffers of the system hold.
    let outcomes: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = endpoints(2, &TcpOptions::default())
            .into_iter()
            .map(|endpoint| {
                scope.spawn(|| {
                    let group = ProcessGroup::new(endpoint, GroupOptions::default());
                    let root = group.rank();
                    group.broadcast(vec![1.0f32; 16 << 20], root).wait().map(drop)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
    });
    assert_eq!(outcomes, [Ok(()), Ok(())], "nobody receives, so nobody sees the mistake");
}

#[test]
fn limits_may_be_as_long_as_they_like() {
    let forever = Duration::MAX;
    let options = TcpOptions {
        heartbeat: forever,
        join_timeout: forever,
        linger: forever,
        ..TcpOptions::default()
    };
    let sums: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = endpoints(2, &options)
            .into_iter()
            .map(|endpoint| scope.spawn(|| sum(endpoint, 5)))
            .collect();
        threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
    });
    assert!(sums.iter().all(|sum| *sum == Ok(vec![2.0; 5])), "{sums:?}");
}

#[test]
fn a_failure_reaches_all_ranks_with_its_reason() {
    let errors: Vec<String> = thread::scope(|scope| {
        let threads: Vec<_> = endpoints(3, &TcpOptions::default())
            .into_iter()
            .map(|endpoint| {
                scope.spawn(|| {
                    let group = ProcessGroup::new(endpoint, GroupOptions::default());
                    if group.rank() == 2 {
                        group.abort_signal().raise(2, "out of cheese");
                    }
                    group.barrier().expect_err("rank 2 failed").to_string()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
    });
    for error in errors {
        assert!(error.starts_with("rank 2 failed: out of cheese"), "{error}");
    }
}

#[test]
fn a_rank_that_leaves_early_is_told_apart_from_one_that_died() {
    let all_are_there = std::sync::Barrier::new(3);
    let errors: Vec<Option<Error>> = thread::scope(|scope| {
        let threads: Vec<_> = endpoints(3, &TcpOptions::default())
            .into_iter()
            .map(|endpoint| {
                scope.spawn(|| {
                    let group = ProcessGroup::new(endpoint, GroupOptions::default());
                    group.barrier().expect("all are there");
                    all_are_there.wait();
                    let stays = group.rank() != 1;
                    stays.then(|| group.barrier().expect_err("rank 1 is gone"))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
    });
    let left = |e: &Error| matches!(e, Error::PeerLeft { peer: 1, .. });
    assert!(errors.iter().flatten().any(left), "{errors:?}");
}

/// Every collective of every type over sockets.
mod collectives {
    use super::*;
    use crate::collectives::Algorithm;
    use crate::group::tests::grid::{few_segments, grid, lengths};

    fn boxed(world: usize, options: &TcpOptions) -> Vec<Box<dyn Transport>> {
        let boxed = |endpoint| Box::new(endpoint) as Box<dyn Transport>;
        endpoints(world, options).into_iter().map(boxed).collect()
    }

    #[test]
    fn equal_the_scalar_reference() {
        for world in 1..=8 {
            // One algorithm for each world, and every way of checking frames, in turn.
            let ways = [Algorithm::Auto, Algorithm::Ring, Algorithm::Doubling, Algorithm::Direct];
            let integrity = [Integrity::Crc, Integrity::Keyed][world % 2];
            let sockets_per_peer = 1 + world % 3;
            let options = TcpOptions { integrity, sockets_per_peer, ..TcpOptions::default() };
            for algorithm in if is_full() { &ways[..] } else { &ways[world % 4..][..1] } {
                grid(boxed(world, &options), &few_segments(*algorithm), &lengths(world));
            }
        }
    }

    #[test]
    fn of_large_buffers_equal_the_scalar_reference() {
        const MEBIBYTE: usize = 1 << 18;
        for world in [2, 3] {
            let options = TcpOptions { sockets_per_peer: world - 1, ..TcpOptions::default() };
            grid(boxed(world, &options), &GroupOptions::default(), &[MEBIBYTE + 7]);
        }
    }

    fn is_full() -> bool {
        std::env::var_os("PYROCLAST_FULL").is_some()
    }
}
