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
use crate::error::Error;
use crate::membership::JobSecret;
use crate::membership::dial::Dial;
use crate::membership::door::{Door, Host, Member};
use crate::membership::handshake::{Claim, Keys, Purpose, Refusal, Settings};
use crate::store::{FAILURE, Store};
use crate::transport::Pool;
use crate::transport::integrity::{Integrity, Seal};
use crate::transport::wire::Stream;

/// Most ranks of a job: each has a few connections and threads for every other.
pub(super) const MAX_WORLD: usize = 1024;

/// How often a rank that waits for others looks whether one of them has failed.
const LOOK: Duration = Duration::from_millis(200);

/// This rank, and where it is reached.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) ip: IpAddr,
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
    let refuse = |problem: String| Err(Error::Membership(problem));
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
    if options.heartbeat < Duration::from_millis(100) {
        let heartbeat = options.heartbeat;
        return refuse(format!("a heartbeat of {heartbeat:?} is too short; use 0.1 s or more"));
    }
    Ok(())
}

/// Connects to all other ranks.
pub(super) fn connect(
    place: &Place,
    store: &Arc<dyn Store>,
    options: &TcpOptions,
) -> Result<Endpoint, Error> {
    let deadline = Instant::now() + options.join_timeout;
    let Place { rank, world, ip } = *place;
    let secret = options.secret.clone().unwrap_or_else(JobSecret::open);
    let integrity = agree_on_integrity(place, store, options, deadline)?;
    let settings =
        Settings { sockets: options.sockets_per_peer as u16, integrity: integrity as u8 };
    let job = agree_on_job(rank, store.as_ref(), deadline)?;
    let claim = Claim {
        purpose: Purpose::Control,
        rank: rank as u32,
        peer: rank as u32,
        world: world as u32,
        job,
        settings,
    };
    let (arrivals, arrived) = unbounded();
    let reception = Arc::new(Reception { own: claim, arrivals });
    let door = Door::open(SocketAddr::new(ip, 0), &secret, reception)?;
    store.set(&format!("address/{rank}"), door.address().to_string().as_bytes())?;

    let mut connections = Connections::new();
    for peer in 0..rank {
        let address = address_of(peer, store.as_ref(), deadline)?;
        for purpose in purposes(options) {
            let dial = Dial { address, from: Some(ip), secret: &secret, deadline };
            let (stream, keys) = dial.connect(&Claim { purpose, peer: peer as u32, ..claim })?;
            connections.insert((peer, purpose), Made { stream, keys });
        }
    }
    let expected = (world - 1) * (1 + options.sockets_per_peer);
    receive(&mut connections, expected, &arrived, place, store.as_ref(), deadline)?;
    let endpoint = assemble(place, connections, integrity, options)?;
    let told = store.set(&format!("ready/{rank}"), &[]);
    // Rank 0 leaves once it has heard that from all, perhaps before the last one has its answer. What
    // else ends rank 0 is seen on the control connection to it.
    if rank == 0 {
        told?;
        // The host of the store must not leave while others still need it.
        for peer in 1..world {
            store.get(&format!("ready/{peer}"), deadline)?;
        }
    }
    Ok(endpoint)
}

fn purposes(options: &TcpOptions) -> impl Iterator<Item = Purpose> + use<> {
    let frames = (0..options.sockets_per_peer as u16).map(Purpose::Frames);
    std::iter::once(Purpose::Control).chain(frames)
}

/// Rank 0 chooses for all: on a machine of its own a rank cannot know where the others are.
fn agree_on_integrity(
    place: &Place,
    store: &Arc<dyn Store>,
    options: &TcpOptions,
    deadline: Instant,
) -> Result<Integrity, Error> {
    if options.integrity != Integrity::Auto {
        return Ok(options.integrity);
    }
    let name = "integrity";
    if place.rank == 0 {
        let chosen = Integrity::Auto.resolve(place.ip.is_loopback());
        store.set(name, &[chosen as u8])?;
        return Ok(chosen);
    }
    let chosen = store.get(name, deadline)?;
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
    deadline: Instant,
) -> Result<(), Error> {
    let started = Instant::now();
    while connections.len() < expected {
        let left = deadline.saturating_duration_since(Instant::now());
        match arrived.recv_timeout(left.min(LOOK)) {
            Ok(Member { claim, keys, stream }) => {
                // The first to come under a name keeps it.
                let at = (claim.rank as usize, claim.purpose);
                connections.entry(at).or_insert(Made { stream, keys });
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
            Err(_) => {
                if let Ok(reason) = store.get(FAILURE, Instant::now()) {
                    return Err(Error::Membership(String::from_utf8_lossy(&reason).into_owned()));
                }
            }
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
    let rhythm = Rhythm { rank, heartbeat, patience: options.join_timeout + heartbeat };
    let pulse = Pulse::start(controls, world, rhythm, &abort).map_err(cannot)?;
    Ok(Endpoint { rank, links, pulse, pool, abort, heartbeat })
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
