//! A store that rank 0 hosts for ranks that are processes.
//!
//! Requests and answers are messages of a keyed [channel](crate::membership), one answer per request:
//!
//! ```text
//! set   1 | length of the name u16 | name | value            -> 0 | or 1 or 2 | what is wrong
//! get   2 | length of the name u16 | name | milliseconds u64 -> 0 | value, or 1 | what is wrong
//! fail  3 | 0u16                                             -> 0 | why a rank cannot join, or nothing
//! ```

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::{MAX_NAME, MemoryStore, Store};
use crate::deadline;
use crate::error::Error;
use crate::membership::JobSecret;
use crate::membership::channel::Direction;
use crate::membership::dial::Dial;
use crate::membership::door::{self, Door, Host, Member};
use crate::membership::handshake::{Claim, Keys, Purpose, Refusal, Settings};

const SET: u8 = 1;
const GET: u8 = 2;
const FAILURE: u8 = 3;
const DONE: u8 = 0;
const FAILED: u8 = 1;
const REFUSED: u8 = 2;

/// How much longer a rank waits for the host's answer than the host for the value.
const SLACK: Duration = Duration::from_secs(10);

/// The store as one rank sees it.
#[derive(Debug)]
pub struct TcpStore(Side);

#[derive(Debug)]
enum Side {
    Host { values: MemoryStore, door: Door, counter: Arc<Counter> },
    Guest { connection: Mutex<Connection>, local: SocketAddr },
}

/// Serves the ranks.
#[derive(Debug)]
struct Counter {
    world: u32,
    values: MemoryStore,
    /// By rank; `None` once the store is closed.
    guests: Mutex<Option<BTreeMap<u32, TcpStream>>>,
    /// Requests that have been read and not been answered.
    open: Mutex<usize>,
    answered: Condvar,
}

#[derive(Debug)]
struct Connection {
    rank: usize,
    stream: TcpStream,
    outgoing: Direction,
    incoming: Direction,
}

impl TcpStore {
    /// Hosts the store of `world` ranks, as rank 0.
    ///
    /// # Errors
    ///
    /// [`Error::Membership`] if `address` cannot be listened on, or is beyond this machine and there
    /// is no secret.
    pub fn host(address: SocketAddr, world: usize, secret: &JobSecret) -> Result<Self, Error> {
        let values = MemoryStore::default();
        let counter = Arc::new(Counter {
            world: world as u32,
            values: values.clone(),
            guests: Mutex::new(Some(BTreeMap::new())),
            open: Mutex::default(),
            answered: Condvar::new(),
        });
        let advice = "MASTER_ADDR must be an address of the machine on which rank 0 runs";
        let door = Door::open(address, advice, secret, Arc::clone(&counter))?;
        Ok(Self(Side::Host { values, door, counter }))
    }

    /// Joins the store that rank 0 hosts at `address`, and waits for it until the deadline.
    ///
    /// # Errors
    ///
    /// [`Error::Membership`] if it cannot be reached or does not let this rank in.
    pub fn join(
        address: SocketAddr,
        (rank, world): (usize, usize),
        secret: &JobSecret,
        deadline: Instant,
    ) -> Result<Self, Error> {
        let claim = Claim {
            purpose: Purpose::Store,
            rank: rank as u32,
            peer: 0,
            world: world as u32,
            job: [0; 16],
            settings: Settings::default(),
        };
        let may_go_on = &|| Ok(());
        let dial = Dial { address, from: None, secret, deadline, may_go_on };
        let (stream, keys) = dial.connect(&claim)?;
        let local = stream.local_addr().map_err(|error| lost(rank, &error))?;
        let connection = Mutex::new(Connection::new(rank, stream, &keys));
        Ok(Self(Side::Guest { connection, local }))
    }

    /// The own address by which the other ranks reach this one.
    #[must_use]
    pub fn local_address(&self) -> SocketAddr {
        match &self.0 {
            Side::Host { door, .. } => door.address(),
            Side::Guest { local, .. } => *local,
        }
    }
}

impl Store for TcpStore {
    fn set(&self, name: &str, value: &[u8]) -> Result<(), Error> {
        super::check(name, value)?;
        match &self.0 {
            Side::Host { values, .. } => values.set(name, value),
            Side::Guest { connection, .. } => {
                lock(connection).request(SET, name, value, None).map(drop)
            }
        }
    }

    fn failure(&self) -> Result<Option<String>, Error> {
        match &self.0 {
            Side::Host { values, .. } => values.failure(),
            Side::Guest { connection, .. } => {
                let reason = lock(connection).request(FAILURE, "", &[], None)?;
                Ok((!reason.is_empty()).then(|| super::text(&reason)))
            }
        }
    }

    fn get(&self, name: &str, deadline: Instant) -> Result<Vec<u8>, Error> {
        super::check(name, &[])?;
        match &self.0 {
            Side::Host { values, .. } => values.get(name, deadline),
            Side::Guest { connection, .. } => {
                let left = deadline.saturating_duration_since(Instant::now());
                let milliseconds = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
                let body = milliseconds.to_le_bytes();
                lock(connection).request(GET, name, &body, Some(left + SLACK))
            }
        }
    }
}

impl Drop for TcpStore {
    /// Lets the guests have the answers to what they have asked, and closes.
    fn drop(&mut self) {
        if let Side::Host { counter, .. } = &self.0 {
            let has_failed = matches!(counter.values.failure(), Ok(Some(_)));
            counter.fail(0, "it has closed its store");
            counter.wait_until_answered();
            if has_failed {
                // Ranks that wait for each other ask five times a second, and are to learn why.
                thread::park_timeout(Duration::from_secs(1));
            }
            let guests = counter.guests().take();
            guests.iter().flatten().for_each(|(_, stream)| door::close(stream));
        }
    }
}

fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lost(rank: usize, error: &io::Error) -> Error {
    Error::Membership(format!("rank {rank} lost the connection to rank 0's store: {error}"))
}

impl Connection {
    fn new(rank: usize, stream: TcpStream, keys: &Keys) -> Self {
        let (outgoing, incoming) = (Direction::new(keys.outgoing), Direction::new(keys.incoming));
        Self { rank, stream, outgoing, incoming }
    }

    fn request(
        &mut self,
        kind: u8,
        name: &str,
        body: &[u8],
        patience: Option<Duration>,
    ) -> Result<Vec<u8>, Error> {
        let length = (name.len() as u16).to_le_bytes();
        let message = [&[kind], &length[..], name.as_bytes(), body].concat();
        let exchange = |connection: &mut Self| {
            connection.stream.set_read_timeout(Some(patience.unwrap_or(SLACK)))?;
            connection.outgoing.write(&mut connection.stream, &message)?;
            connection.incoming.read(&mut connection.stream)
        };
        let answer = exchange(self).map_err(|error| lost(self.rank, &error))?;
        match answer.split_first() {
            Some((&DONE, value)) => Ok(value.to_vec()),
            Some((&REFUSED, problem)) => Err(Error::Setting(super::text(problem))),
            Some((_, problem)) => Err(Error::Membership(super::text(problem))),
            None => Err(lost(self.rank, &io::ErrorKind::InvalidData.into())),
        }
    }
}

impl Counter {
    fn guests(&self) -> MutexGuard<'_, Option<BTreeMap<u32, TcpStream>>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, member: Member) -> io::Result<()> {
        let Member { keys, mut stream, .. } = member;
        let (mut outgoing, mut incoming) =
            (Direction::new(keys.outgoing), Direction::new(keys.incoming));
        loop {
            let request = incoming.read(&mut stream)?;
            *self.open() += 1;
            let answer = match self.answer(&request) {
                Ok(value) => [&[DONE], &value[..]].concat(),
                Err(Error::Setting(problem)) => [&[REFUSED], problem.as_bytes()].concat(),
                Err(error) => [&[FAILED], error.to_string().as_bytes()].concat(),
            };
            let written = outgoing.write(&mut stream, &answer);
            *self.open() -= 1;
            self.answered.notify_all();
            written?;
        }
    }

    fn open(&self) -> MutexGuard<'_, usize> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A guest that does not take its answer is not waited for.
    fn wait_until_answered(&self) {
        let limit = Duration::from_secs(2);
        drop(self.answered.wait_timeout_while(self.open(), limit, |open| *open > 0));
    }

    fn answer(&self, request: &[u8]) -> Result<Vec<u8>, Error> {
        let (kind, name, body) = parse(request)
            .ok_or_else(|| Error::Membership("the store got a request that is none".to_owned()))?;
        match kind {
            SET => self.values.set(name, body).map(|()| vec![]),
            FAILURE => Ok(self.values.failure()?.unwrap_or_default().into_bytes()),
            _ => {
                let milliseconds = body.try_into().map_or(0, u64::from_le_bytes);
                self.values.get(name, deadline::after(Duration::from_millis(milliseconds)))
            }
        }
    }
}

fn parse(request: &[u8]) -> Option<(u8, &str, &[u8])> {
    let (kind, rest) = request.split_first()?;
    let (length, rest) = rest.split_at_checked(2)?;
    let length = usize::from(u16::from_le_bytes(length.try_into().ok()?));
    let (name, body) = rest.split_at_checked(length)?;
    let is_known = [SET, GET, FAILURE].contains(kind);
    (is_known && length <= MAX_NAME).then_some((*kind, std::str::from_utf8(name).ok()?, body))
}

impl Host for Counter {
    fn admit(&self, claim: &Claim) -> Result<(), Refusal> {
        if claim.peer != 0 || claim.purpose != Purpose::Store {
            return Err(Refusal::OtherRank(0));
        }
        if claim.world != self.world {
            // A member, so all are to know: it will not come back, and they would wait for it.
            let problem =
                format!("WORLD_SIZE is {} there, but {} on rank 0", claim.world, self.world);
            self.fail(claim.rank, &problem);
            return Err(Refusal::OtherWorld(self.world));
        }
        let is_known =
            self.guests().as_ref().is_some_and(|guests| guests.contains_key(&claim.rank));
        if claim.rank == 0 || claim.rank >= self.world || is_known {
            return Err(Refusal::Taken);
        }
        Ok(())
    }

    fn welcome(&self, member: Member) {
        let rank = member.claim.rank;
        let Ok(handle) = member.stream.try_clone() else { return };
        let Some(earlier) = self.guests().as_mut().map(|guests| guests.insert(rank, handle)) else {
            return;
        };
        if earlier.is_some() {
            // Two processes of one rank knocked at once; neither is to be trusted.
            self.fail(rank, "two processes have the same RANK");
            return;
        }
        let outcome = self.serve(member);
        // A process that ends before all are connected would leave the others waiting.
        if !self.values.contains(&format!("ready/{rank}")) {
            let reason = outcome.err().map_or_else(String::new, |error| error.to_string());
            self.fail(rank, &format!("its process ended or was cut off ({reason})"));
        }
    }
}

impl Counter {
    fn fail(&self, rank: u32, reason: &str) {
        self.values.fail(rank as usize, reason);
    }
}
