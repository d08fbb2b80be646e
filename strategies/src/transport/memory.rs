//! Ranks are threads of one process; a frame is moved through a channel without copying it.

use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, select_biased, unbounded};

use super::integrity::Seal;
use super::wire::{Stamp, Stamper};
use super::{Frame, MAX_BACKLOG, Pool, Transport};
use crate::abort::AbortSignal;
use crate::description::Description;
use crate::error::Error;

/// One rank's end of the channels.
#[derive(Debug)]
pub struct Endpoint {
    rank: usize,
    /// By peer. The entry for this rank itself is unused.
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    abort: AbortSignal,
    /// Shared by all ranks: who receives a buffer is not who took it.
    pool: Pool,
}

/// A frame, and how its receiver sees that it is the one that was sent.
#[derive(Debug)]
pub(crate) struct Parcel {
    pub(crate) frame: Frame,
    stamp: Option<Stamp>,
}

#[derive(Debug)]
struct Outgoing {
    parcels: Sender<Parcel>,
    stamper: Option<Stamper>,
}

#[derive(Debug)]
struct Incoming {
    parcels: Receiver<Parcel>,
    stamper: Option<Stamper>,
}

/// Connected endpoints for the ranks `0..world`.
#[must_use]
pub fn endpoints(world: usize) -> Vec<Endpoint> {
    connected(world, None, |_, _| unbounded())
}

/// As [`endpoints`], but each frame is numbered and has a CRC-32, as between processes: for those who
/// suspect their memory.
#[must_use]
pub fn checked_endpoints(world: usize) -> Vec<Endpoint> {
    connected(world, Some(Stamper::new(Seal::crc())), |_, _| unbounded())
}

/// Endpoints whose channels from one rank to another are the ends of what `wire` makes.
pub(crate) fn connected(
    world: usize,
    stamper: Option<Stamper>,
    wire: impl Fn(usize, usize) -> (Sender<Parcel>, Receiver<Parcel>),
) -> Vec<Endpoint> {
    let (abort, pool) = (AbortSignal::default(), Pool::default());
    let endpoint = |rank| Endpoint {
        rank,
        outgoing: vec![],
        incoming: vec![],
        abort: abort.clone(),
        pool: pool.clone(),
    };
    let mut all: Vec<Endpoint> = (0..world).map(endpoint).collect();
    for from in 0..world {
        for to in 0..world {
            let (sender, receiver) = wire(from, to);
            all[from].outgoing.push(Outgoing { parcels: sender, stamper: stamper.clone() });
            all[to].incoming.push(Incoming { parcels: receiver, stamper: stamper.clone() });
        }
    }
    all
}

impl Endpoint {
    fn aborted(&self, waiting_in: Description) -> Option<Error> {
        Some(self.abort.failure()?.seen_by(self.rank, waiting_in))
    }

    /// A peer that failed raises the signal before it drops its channels.
    fn departed(&self, peer: usize, waiting_in: Description) -> Error {
        let left = Error::PeerLeft { rank: self.rank, peer, waiting_in };
        self.aborted(waiting_in).unwrap_or(left)
    }
}

impl Transport for Endpoint {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.outgoing.len()
    }

    fn abort_signal(&self) -> &AbortSignal {
        &self.abort
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn send(&mut self, peer: usize, frame: Frame) -> Result<(), Error> {
        if let Some(error) = self.aborted(frame.description) {
            return Err(error);
        }
        let outgoing = &mut self.outgoing[peer];
        let stamp = outgoing.stamper.as_mut().map(|stamper| stamper.stamp(&frame));
        let waiting_in = frame.description;
        let sent = outgoing.parcels.send(Parcel { frame, stamp });
        // As in `recv`.
        sent.map_err(|_| self.departed(peer, waiting_in))
    }

    fn crowded(&self) -> Option<usize> {
        self.outgoing.iter().position(|outgoing| outgoing.parcels.len() > MAX_BACKLOG)
    }

    fn recv(
        &mut self,
        peer: usize,
        waiting_in: Description,
        deadline: Instant,
    ) -> Result<Frame, Error> {
        let rank = self.rank;
        let received = select_biased! {
            recv(self.abort.raised()) -> _ => None,
            recv(self.incoming[peer].parcels) -> parcel => parcel.ok(),
            default(deadline.saturating_duration_since(Instant::now())) => {
                return Err(Error::Timeout { rank, peer, waiting_in });
            }
        };
        let Some(Parcel { frame, stamp }) = received else {
            return Err(self.departed(peer, waiting_in));
        };
        let stamper = self.incoming[peer].stamper.as_mut();
        match stamper.map(|stamper| stamper.check(&frame, stamp.as_ref())).transpose() {
            Ok(_) => Ok(frame),
            Err(problem) => Err(Error::Damaged { rank, peer, waiting_in, problem }),
        }
    }
}
