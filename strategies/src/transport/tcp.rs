//! Ranks are processes, on one machine or many; frames travel over TCP.
//!
//! Every two ranks share one control connection (heartbeats, aborts, goodbyes) and one or more
//! connections for frames. Frames go round over those, so their order is known without being sent. A
//! thread per connection and direction keeps the network busy while the communication thread combines
//! numbers, and nobody can deadlock: a rank always reads, whatever it is writing.

mod lane;
mod mesh;
mod pulse;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crossbeam_channel::select_biased;

use super::wire::WireError;
use super::{Frame, Integrity, MAX_BACKLOG, MAX_FRAME_BYTES, Pool, Transport, address};
use crate::abort::AbortSignal;
use crate::deadline;
use crate::description::Description;
use crate::error::Error;
use crate::membership::JobSecret;
use crate::store::{Store, TcpStore};
use lane::Lane;
pub use mesh::{MAX_WORLD, MIN_HEARTBEAT};
use pulse::Pulse;

/// How much later than a connection for frames the control connection of a lost peer may close; and how
/// long a rank that leaves waits for others to say that they have heard it.
const GRACE: Duration = Duration::from_secs(3);

/// Most sockets for frames between two ranks.
pub const MAX_SOCKETS: usize = 16;

/// Settings of the transport. Those that two ranks must share are checked when they connect.
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// What all ranks know. Without one, only addresses of this machine are listened on.
    pub secret: Option<JobSecret>,
    /// Name or address of the interface to use; by default the one that reaches rank 0.
    pub interface: Option<String>,
    /// Connections for frames between two ranks, 1 to [`MAX_SOCKETS`]. 1 by default; more help where
    /// one connection does not fill the network.
    pub sockets_per_peer: usize,
    /// How frames are checked.
    pub integrity: Integrity,
    /// A rank that says nothing for so long has failed. 30 seconds by default.
    pub heartbeat: Duration,
    /// How long ranks wait for each other at the start. 5 minutes by default.
    pub join_timeout: Duration,
    /// How long a rank that leaves waits for others to read what it has sent. 10 minutes by default.
    pub linger: Duration,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            secret: None,
            interface: None,
            sockets_per_peer: 1,
            integrity: Integrity::Auto,
            heartbeat: Duration::from_secs(30),
            join_timeout: Duration::from_secs(300),
            linger: Duration::from_secs(600),
        }
    }
}

/// One rank's connections to all others.
#[derive(Debug)]
pub struct Endpoint {
    rank: usize,
    /// By peer; this rank's own entry has no lanes.
    links: Vec<Link>,
    pulse: Pulse,
    pool: Pool,
    abort: AbortSignal,
    heartbeat: Duration,
    linger: Duration,
}

/// The connections for frames with one peer.
#[derive(Debug, Default)]
struct Link {
    lanes: Vec<Lane>,
    sent: usize,
    received: usize,
}

/// Joins a job of `world` ranks. Rank 0 hosts the rendezvous at `master` (`host:port`), an address of
/// its machine; all others join it there, in any order, and then all connect to each other.
///
/// # Errors
///
/// [`Error::Membership`] if a setting is wrong, the ranks cannot reach each other before the deadline,
/// or one of them fails meanwhile.
pub fn join(
    rank: usize,
    world: usize,
    master: &str,
    options: &TcpOptions,
) -> Result<Endpoint, Error> {
    mesh::check(rank, world, options)?;
    let deadline = deadline::after(options.join_timeout);
    let at = address::resolve(master)?;
    let secret = options.secret.clone().unwrap_or_else(JobSecret::open);
    let store = match rank {
        0 => TcpStore::host(at, world, &secret)?,
        _ => TcpStore::join(at, (rank, world), &secret, deadline)?,
    };
    let ip = match &options.interface {
        Some(interface) => address::of_interface(interface, at.ip())
            .inspect_err(|error| store.fail(rank, &error.to_string()))?,
        None => store.local_address().ip(),
    };
    let place = mesh::Place { rank, world, ip, deadline };
    mesh::join(&place, &store, options)
}

/// Connects this rank, reachable under `ip`, to all others that use the same store.
///
/// # Errors
///
/// As [`join`].
pub fn connect(
    rank: usize,
    world: usize,
    ip: IpAddr,
    store: &dyn Store,
    options: &TcpOptions,
) -> Result<Endpoint, Error> {
    mesh::check(rank, world, options)?;
    let place = mesh::Place { rank, world, ip, deadline: deadline::after(options.join_timeout) };
    mesh::join(&place, store, options)
}

impl Endpoint {
    fn aborted(&self, waiting_in: Description) -> Option<Error> {
        Some(self.abort.failure()?.seen_by(self.rank, waiting_in))
    }

    /// Why no more frames come from a peer, or go to it: its control connection tells.
    fn departed(&self, peer: usize, waiting_in: Description) -> Error {
        let rank = self.rank;
        let is_decided = select_biased! {
            recv(self.abort.raised()) -> _ => true,
            recv(self.pulse.departure(peer)) -> _ => true,
            default(GRACE.min(self.heartbeat)) => false,
        };
        match (self.aborted(waiting_in), is_decided) {
            (Some(error), _) => error,
            (None, true) => Error::PeerLeft { rank, peer, waiting_in },
            (None, false) => Error::Disconnected { rank, peer, waiting_in },
        }
    }
}

impl Transport for Endpoint {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.links.len()
    }

    fn abort_signal(&self) -> &AbortSignal {
        &self.abort
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn crowded(&self) -> Option<usize> {
        let backlog = |link: &Link| link.lanes.iter().map(Lane::backlog).sum::<usize>();
        self.links.iter().position(|link| backlog(link) > MAX_BACKLOG)
    }

    fn send(&mut self, peer: usize, frame: Frame) -> Result<(), Error> {
        let collective = frame.description;
        if let Some(error) = self.aborted(collective) {
            return Err(error);
        }
        let len = frame.payload.bytes().len();
        if len > MAX_FRAME_BYTES {
            let problem = format!(
                "a segment of {len} bytes; the limit of segment_bytes is {MAX_FRAME_BYTES}"
            );
            return Err(Error::Misuse { rank: self.rank, collective, problem });
        }
        let link = &mut self.links[peer];
        let lane = link.sent % link.lanes.len();
        link.sent += 1;
        if link.lanes[lane].send(frame) { Ok(()) } else { Err(self.departed(peer, collective)) }
    }

    fn recv(
        &mut self,
        peer: usize,
        waiting_in: Description,
        deadline: Instant,
    ) -> Result<Frame, Error> {
        let rank = self.rank;
        let link = &self.links[peer];
        let lane = &link.lanes[link.received % link.lanes.len()];
        let received = select_biased! {
            recv(self.abort.raised()) -> _ => None,
            recv(lane.incoming()) -> frame => frame.ok(),
            default(deadline.saturating_duration_since(Instant::now())) => {
                return Err(Error::Timeout { rank, peer, waiting_in });
            }
        };
        match received {
            Some(Ok(frame)) => {
                self.links[peer].received += 1;
                Ok(frame)
            }
            Some(Err(WireError::Damaged(problem))) => {
                Err(Error::Damaged { rank, peer, waiting_in, problem })
            }
            _ => Err(self.departed(peer, waiting_in)),
        }
    }
}

impl Drop for Endpoint {
    /// Hands over what was sent, says goodbye, and closes all connections. Ends early if a rank fails.
    fn drop(&mut self) {
        let deadline = deadline::after(self.linger);
        self.links.iter_mut().flat_map(|link| &mut link.lanes).for_each(Lane::finish);
        let lanes = self.links.iter().flat_map(|link| &link.lanes);
        lanes.for_each(|lane| lane.wait_until_written(&self.abort, deadline));
        // A peer that lives answers at once.
        self.pulse.leave(GRACE.min(self.heartbeat));
    }
}

#[cfg(test)]
pub(crate) mod tests;
