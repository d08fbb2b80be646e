//! What all ranks see when the connection between two of them misbehaves, on either transport.

use std::net::{IpAddr, Ipv4Addr};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::Transport;
use super::integrity::Seal;
use super::memory::{self, Parcel};
use super::tcp::tests::relay::{Detour, Fault};
use super::tcp::{self, TcpOptions};
use super::wire::Stamper;
use crate::store::{MemoryStore, Store};
use crate::{Error, GroupOptions, ProcessGroup, ReduceOp};

/// The connection between ranks 0 and 1 is the one that fails; rank 2 has a good one to both.
const WORLD: usize = 3;
const ROUNDS: usize = 12;
const ELEMENTS: usize = 30_000;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Memory,
    Tcp,
}

/// Endpoints with a fault between ranks 0 and 1, some rounds after the start.
fn endpoints(kind: Kind, fault: Fault) -> Vec<Box<dyn Transport>> {
    match kind {
        Kind::Memory => {
            let stamper = Some(Stamper::new(Seal::crc()));
            let wire = |from, to| match (from, to) {
                (0, 1) | (1, 0) => detour(fault, 10),
                _ => unbounded(),
            };
            let boxed = |endpoint| Box::new(endpoint) as Box<dyn Transport>;
            memory::connected(WORLD, stamper, wire).into_iter().map(boxed).collect()
        }
        Kind::Tcp => over_tcp(fault, 400_000),
    }
}

fn over_tcp(fault: Fault, after: usize) -> Vec<Box<dyn Transport>> {
    // Long enough that a busy machine is not taken for a dead one.
    let heartbeat = Duration::from_secs(if fault == Fault::StallAll { 10 } else { 60 });
    let options = TcpOptions { heartbeat, ..TcpOptions::default() };
    let store = MemoryStore::default();
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..WORLD)
            .map(|rank| {
                let store: Box<dyn Store> = match rank {
                    1 => Box::new(Detour { store: store.clone(), fault, after }),
                    _ => Box::new(store.clone()),
                };
                let options = &options;
                scope.spawn(move || tcp::connect(rank, WORLD, ip, store.as_ref(), options))
            })
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Result<tcp::Endpoint, Error>>| {
            Box::new(thread.join().expect("no panic").expect("a connection")) as Box<dyn Transport>
        };
        threads.into_iter().map(join).collect()
    })
}

/// A channel that misbehaves after some frames.
fn detour(fault: Fault, after: usize) -> (Sender<Parcel>, Receiver<Parcel>) {
    let (sender, near) = unbounded::<Parcel>();
    let (far, receiver) = unbounded();
    thread::spawn(move || {
        for (number, mut parcel) in near.iter().enumerate() {
            match fault {
                Fault::Delay => thread::park_timeout(Duration::from_millis(2)),
                Fault::Stall | Fault::StallAll if number >= after => continue,
                Fault::Drop if number == after => continue,
                Fault::CloseFrames | Fault::CloseAll if number >= after => return,
                Fault::Corrupt if number == after => {
                    parcel.frame.payload.bytes_mut()[0] ^= 0x10;
                }
                _ => {}
            }
            if far.send(parcel).is_err() {
                return;
            }
        }
    });
    (sender, receiver)
}

/// What each rank ends with.
fn run(kind: Kind, fault: Fault, timeout: Duration) -> Vec<Result<(), Error>> {
    let options = GroupOptions { timeout, ..GroupOptions::default() };
    thread::scope(|scope| {
        let threads: Vec<_> = endpoints(kind, fault)
            .into_iter()
            .map(|endpoint| {
                let options = options.clone();
                scope.spawn(move || {
                    let group = ProcessGroup::over(endpoint, options);
                    for _ in 0..ROUNDS {
                        let ones = vec![1.0f32; ELEMENTS];
                        let sum = group.all_reduce(ones, ReduceOp::Sum).wait()?;
                        assert!(
                            sum.iter().all(|v| *v == WORLD as f32),
                            "a wrong sum went unnoticed"
                        );
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
    })
}

const LONG: Duration = Duration::from_secs(120);
const KINDS: [Kind; 2] = [Kind::Memory, Kind::Tcp];

/// Every rank's error, which names the collective that the rank was in.
fn errors(kind: Kind, fault: Fault, timeout: Duration) -> Vec<Error> {
    let outcomes = run(kind, fault, timeout);
    let errors: Vec<Error> = outcomes
        .into_iter()
        .map(|outcome| outcome.expect_err("all ranks should get an error"))
        .collect();
    for error in &errors {
        let message = error.to_string();
        let names_the_collective = message.contains("all_reduce(sum) #");
        assert!(
            names_the_collective && message.contains("30000 f32"),
            "{kind:?} {fault:?}: {message}"
        );
    }
    errors
}

/// The error of the rank that noticed. All others must have been told of it.
fn noticed(kind: Kind, fault: Fault, timeout: Duration) -> Error {
    let errors = errors(kind, fault, timeout);
    let first = errors.iter().find(|error| !matches!(error, Error::Aborted { .. }));
    first.unwrap_or(&errors[0]).clone()
}

/// Whether an error is about ranks 0 and 1.
fn is_between(rank: usize, peer: usize) -> bool {
    (rank, peer) == (0, 1) || (rank, peer) == (1, 0)
}

#[test]
fn a_slow_connection_is_no_failure() {
    for kind in KINDS {
        assert!(run(kind, Fault::Delay, LONG).iter().all(Result::is_ok), "{kind:?}");
    }
}

#[test]
fn frames_that_stop_coming_end_at_the_deadline() {
    for kind in KINDS {
        let error = noticed(kind, Fault::Stall, Duration::from_secs(2));
        assert!(matches!(error, Error::Timeout { .. }), "{kind:?}: {error}");
        assert!(error.to_string().contains("PYROCLAST_TIMEOUT"), "{error}");
    }
}

#[test]
fn lost_and_changed_data_is_noticed_and_never_summed() {
    for kind in KINDS {
        for fault in [Fault::Drop, Fault::Corrupt] {
            match noticed(kind, fault, LONG) {
                Error::Damaged { rank, peer, .. } if is_between(rank, peer) => {}
                other => panic!("{kind:?} {fault:?}: {other}"),
            }
        }
    }
}

#[test]
fn a_closed_connection_for_frames_is_noticed() {
    for kind in KINDS {
        match noticed(kind, Fault::CloseFrames, LONG) {
            // A channel is all that connects two threads. A process whose heartbeats still come has
            // neither left nor died.
            Error::PeerLeft { rank, peer, .. } | Error::Disconnected { rank, peer, .. }
                if is_between(rank, peer) => {}
            other => panic!("{kind:?}: {other}"),
        }
    }
}

#[test]
fn a_rank_whose_connections_close_has_died() {
    match noticed(Kind::Tcp, Fault::CloseAll, LONG) {
        Error::Aborted { rank: 0 | 1, reason, .. } => {
            assert!(reason.contains("closed without a goodbye"), "{reason}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_rank_that_is_silent_on_all_connections_has_stopped() {
    let errors = errors(Kind::Tcp, Fault::StallAll, LONG);
    // Whoever notices first leaves, which the other side of the relay may see before it notices too.
    let is_silence = |error: &Error| match error {
        Error::Aborted { rank: 0 | 1, reason, .. } => {
            reason.contains("heard nothing from it for 10s")
                && reason.contains("PYROCLAST_HEARTBEAT")
        }
        other => panic!("{other}"),
    };
    assert!(errors.iter().any(is_silence), "{errors:?}");
}
