//! Ranks are threads of one process; a frame is moved through a channel without copying it.

use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, select_biased, unbounded};

use super::{Frame, Transport};
use crate::abort::AbortSignal;
use crate::description::Description;
use crate::error::Error;

/// One rank's end of the channels.
#[derive(Debug)]
pub struct Endpoint {
    rank: usize,
    /// By peer. The entry for this rank itself is unused.
    outgoing: Vec<Sender<Frame>>,
    incoming: Vec<Receiver<Frame>>,
    abort: AbortSignal,
}

/// Connected endpoints for the ranks `0..world`.
#[must_use]
pub fn endpoints(world: usize) -> Vec<Endpoint> {
    let abort = AbortSignal::default();
    let mut all: Vec<Endpoint> = (0..world)
        .map(|rank| Endpoint { rank, outgoing: vec![], incoming: vec![], abort: abort.clone() })
        .collect();
    for from in 0..world {
        for to in 0..world {
            let (sender, receiver) = unbounded();
            all[from].outgoing.push(sender);
            all[to].incoming.push(receiver);
        }
    }
    all
}

impl Endpoint {
    fn aborted(&self, waiting_in: Description) -> Option<Error> {
        Some(self.abort.failure()?.seen_by(self.rank, waiting_in))
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

    fn send(&mut self, peer: usize, frame: Frame) -> Result<(), Error> {
        if let Some(error) = self.aborted(frame.description) {
            return Err(error);
        }
        self.outgoing[peer].send(frame).map_err(|unsent| Error::PeerLeft {
            rank: self.rank,
            peer,
            waiting_in: unsent.into_inner().description,
        })
    }

    fn recv(
        &mut self,
        peer: usize,
        waiting_in: Description,
        deadline: Instant,
    ) -> Result<Frame, Error> {
        let started = Instant::now();
        let received = select_biased! {
            recv(self.abort.raised()) -> _ => None,
            recv(self.incoming[peer]) -> frame => Some(frame),
            default(deadline.saturating_duration_since(started)) => {
                let waited = started.elapsed();
                return Err(Error::Timeout { rank: self.rank, peer, waiting_in, waited });
            }
        };
        match received {
            Some(Ok(frame)) => Ok(frame),
            // A peer that failed raises the signal before it drops its channels.
            _ => Err(self.aborted(waiting_in).unwrap_or(Error::PeerLeft {
                rank: self.rank,
                peer,
                waiting_in,
            })),
        }
    }
}
