//! How ranks that share a store connect to each other: each listens for the ranks above it, and calls
//! the ranks below.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::lane::Lane;
use super::pulse::{Control, Pulse, Rhythm};
use super::{Endpoint, Link, MAX_SOCKETS, TcpOptions};
use crate::abort::AbortSignal;
use crate::deadline;
use crate::error::Error;
use crate::membership::JobSecret;
use crate::membership::dial::Dial;
use crate::membership::door::{Door, Host, Member};
use crate::membership::handshake::{Claim, Keys, Purpose, Refusal, Settings};
use crate::store::Store;
use crate::transport::Pool;
use crate::transport::integrity::{Integrity, Seal};
use crate::transport::wire::Stream;

/// Most ranks of a job: each has a few connections and threads for every other.
pub const MAX_WORLD: usize = 1024;

/// Shortest time after which a silent rank counts as stopped.
pub const MIN_HEARTBEAT: Duration = Duration::from_millis(100);

/// How often a rank that waits for others looks whether one of them has failed.
const LOOK: Duration = Duration::from_millis(200);

/// This rank, and where it is reached.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) ip: IpAddr,
    /// When all must have joined.
    pub(super) deadline: Instant,
}

/// A connection that both ends have agreed on.
#[derive(Debug)]
struct Made {
    stream: TcpStream,
    keys: Keys,
}

/// By peer and purpose.
type Connections = BTreeMap<(usize, Purpose), Made>;

/// Refuses settings that cannot work.
pub(super) fn check(rank: usize, world: usize, options: &TcpOptions) -> Result<(), Error> {
    let refuse = |problem: String| Err(Error::Setting(problem));
    if world == 0 || world > MAX_WORLD {
        return refuse(format!("WORLD_SIZE is {world}; it must be 1 to {MAX_WORLD}"));
    }
    if rank >= world {
        return refuse(format!("RANK is {rank}; with WORLD_SIZE {world} it must be below {world}"));
    }
    let sockets = options.sockets_per_peer;
    if sockets == 0 || sockets > MAX_SOCKETS {
        return refuse(format!("{sockets} sockets per peer; it must be 1 to {MAX_SOCKETS}"));
    }
    if options.heartbeat < MIN_HEARTBEAT {
        let heartbeat = options.heartbeat;
        return refuse(format!("a heartbeat of {heartbeat:?}; use {MIN_HEARTBEAT:?} or more"));
    }
    Ok(())
}

/// Connects to all other ranks. A rank that cannot tells the others why.
pub(super) fn join(
    place: &Place,
    store: &dyn Store,
    options: &TcpOptions,
) -> Result<Endpoint, Error> {
    let rank = place.rank;
    let endpoint =
        connect(place, store, options).inspect_err(|error| store.fail(rank, &error.to_string()))?;
    // From here on the control connections tell the others.
    wait_until_all_are_ready(place, store)
        .inspect_err(|error| endpoint.abort.raise(rank, error))
        .map(|()| endpoint)
}

fn connect(place: &Place, store: &dyn Store, options: &TcpOptions) -> Result<Endpoint, Error> {
    let Place { rank, world, ip, deadline } = *place;
    let secret = options.secret.clone().unwrap_or_else(JobSecret::open);
    let integrity = agree_on_integrity(place, store, options.integrity)?;
    let settings = Settings {
        sockets: options.sockets_per_peer as u16,
        integrity: integrity as u8,
        heartbeat: u32::try_from(options.heartbeat.as_millis()).unwrap_or(u32::MAX),
    };
    let claim = Claim {
        purpose: Purpose::Control,
        rank: rank as u32,
        peer: rank as u32,
        world: world as u32,
        job: agree_on_job(rank, store, deadline)?,
        settings,
    };
    let (arrivals, arrived) = unbounded();
    let reception = Arc::new(Reception { own: claim, arrivals });
    let advice = "PYROCLAST_INTERFACE must be an interface or address of this machine";
    let door = Door::open(SocketAddr::new(ip, 0), advice, &secret, reception)?;
    store.set(&format!("address/{rank}"), door.address().to_string().as_bytes())?;

    let mut connections = Connections::new();
    // A connection that leaves from a given address needs a port of its own there.
    let from = options.interface.as_ref().map(|_| ip);
    let may_go_on = || failure_of_others(store);
    for peer in 0..rank {
        let address = address_of(peer, store, deadline)?;
        let dial = Dial { address, from, secret: &secret, deadline, may_go_on: &may_go_on };
        for purpose in purposes(options) {
            let (stream, keys) = dial.connect(&Claim { purpose, peer: peer as u32, ..claim })?;
            connections.insert((peer, purpose), Made { stream, keys });
        }
    }
    let expected = (world - 1) * (1 + options.sockets_per_peer);
    receive(&mut connections, expected, &arrived, place, store)?;
    assemble(place, connections, integrity, options)
}

/// Rank 0 hosts the store, and must not leave while others still need it.
fn wait_until_all_are_ready(place: &Place, store: &dyn Store) -> Result<(), Error> {
    store.set(&format!("ready/{}", place.rank), &[])?;
    let others = if place.rank == 0 { 1..place.world } else { 0..0 };
    for peer in others {
        store.get(&format!("ready/{peer}"), place.deadline)?;
    }
    Ok(())
}

/// An error if a rank has given up, or the store is gone.
fn failure_of_others(store: &dyn Store) -> Result<(), Error> {
    store.failure()?.map_or(Ok(()), |reason| Err(Error::Membership(reason)))
}

fn purposes(options: &TcpOptions) -> impl Iterator<Item = Purpose> + use<> {
    let frames = (0..options.sockets_per_peer as u16).map(Purpose::Frames);
    std::iter::once(Purpose::Control).chain(frames)
}

/// Rank 0 chooses for all that leave it to the addresses: on a machine of its own a rank cannot know
/// where the others are. Ranks that choose otherwise do not get along with those.
fn agree_on_integrity(
    place: &Place,
    store: &dyn Store,
    wanted: Integrity,
) -> Result<Integrity, Error> {
    let name = "integrity";
    let chosen = wanted.resolve(place.ip.is_loopback());
    if place.rank == 0 {
        store.set(name, &[chosen as u8])?;
    }
    if place.rank == 0 || wanted != Integrity::Auto {
        return Ok(chosen);
    }
    let chosen = store.get(name, place.deadline)?;
    Ok(if chosen == [Integrity::Crc as u8] { Integrity::Crc } else { Integrity::Keyed })
}

/// A number that only this attempt at the job has.
fn agree_on_job(rank: usize, store: &dyn Store, deadline: Instant) -> Result<[u8; 16], Error> {
    if rank == 0 {
        let mut job = [0; 16];
        getrandom::fill(&mut job).map_err(|error| Error::Membership(error.to_string()))?;
        store.set("job", &job)?;
        return Ok(job);
    }
    let job = store.get("job", deadline)?;
    job.try_into().map_err(|_| Error::Membership("the store's `job` is damaged".to_owned()))
}

fn address_of(peer: usize, store: &dyn Store, deadline: Instant) -> Result<SocketAddr, Error> {
    let text = store.get(&format!("address/{peer}"), deadline)?;
    let parsed = std::str::from_utf8(&text).ok().and_then(|text| text.parse().ok());
    parsed.ok_or_else(|| Error::Membership(format!("the address of rank {peer} is none")))
}

/// Waits for the ranks above to call.
fn receive(
    connections: &mut Connections,
    expected: usize,
    arrived: &Receiver<Member>,
    place: &Place,
    store: &dyn Store,
) -> Result<(), Error> {
    let started = Instant::now();
    while connections.len() < expected {
        let left = place.deadline.saturating_duration_since(Instant::now());
        match arrived.recv_timeout(left.min(LOOK)) {
            Ok(Member { claim, keys, stream }) => {
                // No two ranks have one address, so a second one is the first one's second attempt.
                let at = (claim.rank as usize, claim.purpose);
                connections.insert(at, Made { stream, keys });
            }
            Err(_) if left.is_zero() => {
                let Place { rank, world, .. } = place;
                let is_missing =
                    |peer: &usize| !connections.contains_key(&(*peer, Purpose::Control));
                let missing: Vec<usize> = (rank + 1..*world).filter(is_missing).collect();
                return Err(Error::Membership(format!(
                    "rank {rank} waited {:.0?} for ranks {missing:?} of {world} to join",
                    started.elapsed()
                )));
            }
            Err(_) => failure_of_others(store)?,
        }
    }
    Ok(())
}

/// Starts the threads of all connections.
fn assemble(
    place: &Place,
    connections: Connections,
    integrity: Integrity,
    options: &TcpOptions,
) -> Result<Endpoint, Error> {
    let cannot = |error: std::io::Error| {
        Error::Membership(format!("starting the threads of a connection: {error}"))
    };
    let Place { rank, world, .. } = *place;
    let seal = |key| match integrity {
        Integrity::Crc => Seal::crc(),
        _ => Seal::keyed(key),
    };
    let pool = Pool::default();
    let mut links: Vec<Link> = (0..world).map(|_| Link::default()).collect();
    let mut controls = vec![];
    // In the order of their names, so that a link's sockets are numbered alike on both sides.
    for ((peer, purpose), Made { stream, keys }) in connections {
        if purpose == Purpose::Control {
            controls.push(Control { peer, stream, keys });
            continue;
        }
        let outgoing = Stream::new(seal(keys.outgoing), &pool);
        let incoming = Stream::new(seal(keys.incoming), &pool);
        let lane = Lane::start(stream, outgoing, incoming, &format!("peer-{peer}"));
        links[peer].lanes.push(lane.map_err(cannot)?);
    }
    let abort = AbortSignal::default();
    let heartbeat = options.heartbeat;
    let patience = deadline::capped(options.join_timeout.saturating_add(heartbeat));
    let rhythm = Rhythm { rank, heartbeat: deadline::capped(heartbeat), patience };
    let pulse = Pulse::start(controls, world, rhythm, &abort).map_err(cannot)?;
    let linger = options.linger;
    Ok(Endpoint { rank, links, pulse, pool, abort, heartbeat, linger })
}

/// Lets in the ranks above this one.
struct Reception {
    own: Claim,
    arrivals: Sender<Member>,
}

impl Host for Reception {
    fn admit(&self, claim: &Claim) -> Result<(), Refusal> {
        let own = &self.own;
        if claim.world != own.world {
            return Err(Refusal::OtherWorld(own.world));
        }
        if claim.job != own.job {
            return Err(Refusal::OtherJob);
        }
        if claim.peer != own.rank || claim.rank <= own.rank || claim.rank >= own.world {
            return Err(Refusal::OtherRank(own.rank));
        }
        let is_known = match claim.purpose {
            Purpose::Control => true,
            Purpose::Frames(socket) => socket < own.settings.sockets,
            Purpose::Store => false,
        };
        if claim.settings != own.settings || !is_known {
            return Err(Refusal::OtherSettings);
        }
        Ok(())
    }

    fn welcome(&self, member: Member) {
        // Nobody takes it if the rank has given up meanwhile, and dropping it closes it.
        let _ = self.arrivals.send(member);
    }
}
