//! How two ranks prove to each other that they know the job's secret.
//!
//! ```text
//! initiator                                              acceptor
//!     magic, version, nonce_i  ------------------------->
//!                              <-------------------------  nonce_a
//!     claim, H(initiator, ..)  ------------------------->  closes without a word if the proof is wrong
//!                              <-------------------------  verdict, H(acceptor, ..)
//! ```
//!
//! `H` is BLAKE3 keyed with the secret over everything said so far, so a proof holds for one
//! connection, one direction and one claim only. Every message has a fixed size: nothing is allocated
//! from what an unknown peer says, and it gets nothing but a random number.

use std::io::{self, Read, Write};

use super::{JobSecret, keyed};

const MAGIC: &[u8; 8] = b"pyroclst";
const VERSION: u16 = 1;
const HELLO: usize = 8 + 2 + 32;
const CLAIM: usize = 1 + 1 + 2 + 2 + 4 + 4 + 4 + 4 + 16;
const VERDICT: usize = 1 + 4;

/// What a connection is for, as its initiator says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// What will be said.
    pub purpose: Purpose,
    /// The rank that connects.
    pub rank: u32,
    /// The rank that it wants.
    pub peer: u32,
    /// How many ranks it believes there are.
    pub world: u32,
    /// Which attempt at the job: a rank that an earlier one left behind is refused.
    pub job: [u8; 16],
    /// Settings that both must share.
    pub settings: Settings,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// Requests to the store.
    Store,
    /// Heartbeats, aborts and goodbyes.
    Control,
    /// Frames, on this socket of several.
    Frames(u16),
}

/// Settings of a transport that two ranks must share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Sockets for frames.
    pub sockets: u16,
    /// How frames are checked, as a number.
    pub integrity: u8,
    /// Milliseconds of silence after which a rank has failed.
    pub heartbeat: u32,
}

/// Why a member is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The acceptor counts other ranks.
    #[error("it was started with WORLD_SIZE={0}")]
    OtherWorld(u32),
    /// It is of another attempt at the job.
    #[error("it belongs to another run of the job")]
    OtherJob,
    /// The rank that was wanted is not the one that answered.
    #[error("it is rank {0}")]
    OtherRank(u32),
    /// That rank has connected before.
    #[error("another process has joined under the same rank; RANK must be different on each")]
    Taken,
    /// Sockets per peer, integrity or heartbeat differ.
    #[error(
        "it has other settings for sockets per peer, integrity or heartbeat; they must be equal on all \
         ranks"
    )]
    OtherSettings,
}

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// Bytes that no rank of this version sends.
    #[error("it does not speak this protocol")]
    NotAMember,
    /// A wrong proof.
    #[error("it does not know the job's secret")]
    WrongSecret,
    /// The acceptor closed the connection where it would have answered.
    #[error(
        "it closed the connection during the handshake; the job's secret and the version of the \
         program must be the same on all ranks, and it must be allowed enough open files"
    )]
    Closed,
    /// A member that the acceptor does not let in.
    #[error("{0}")]
    Refused(Refusal),
    /// The connection failed, or the other side was too slow.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Keys that only the two ends of a connection know.
#[derive(Clone, PartialEq, Eq)]
pub struct Keys {
    pub(crate) outgoing: [u8; 32],
    pub(crate) incoming: [u8; 32],
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys")
    }
}

/// Opens a connection as the member that `claim` says.
///
/// # Errors
///
/// [`HandshakeError`].
pub fn initiate(
    stream: &mut (impl Read + Write),
    secret: &JobSecret,
    claim: &Claim,
) -> Result<Keys, HandshakeError> {
    let mut hello = [0; HELLO];
    hello[..8].copy_from_slice(MAGIC);
    hello[8..10].copy_from_slice(&VERSION.to_le_bytes());
    hello[10..].copy_from_slice(&nonce()?);
    stream.write_all(&hello)?;

    let nonce_a: [u8; 32] = read_answer(stream)?;
    let claim = claim.encode();
    let proof = secret.hash("initiator", &[&hello, &nonce_a, &claim]);
    // One write, so that it is one packet.
    let mut message = [0; CLAIM + 32];
    message[..CLAIM].copy_from_slice(&claim);
    message[CLAIM..].copy_from_slice(proof.as_bytes());
    stream.write_all(&message)?;

    let answer: [u8; VERDICT + 32] = read_answer(stream)?;
    let (verdict, proof) = answer.split_at(VERDICT);
    let transcript: [&[u8]; 4] = [&hello, &nonce_a, &claim, verdict];
    if !proves(secret, "acceptor", &transcript, proof) {
        return Err(HandshakeError::WrongSecret);
    }
    match decode_verdict(verdict)? {
        Some(refusal) => Err(HandshakeError::Refused(refusal)),
        None => {
            let (to_acceptor, to_initiator) = session_keys(secret, &transcript);
            Ok(Keys { outgoing: to_acceptor, incoming: to_initiator })
        }
    }
}

/// Answers a connection. `admit` decides about a member that has proved itself.
///
/// # Errors
///
/// [`HandshakeError`]; the connection is to be closed without a word.
pub fn accept(
    stream: &mut (impl Read + Write),
    secret: &JobSecret,
    admit: impl FnOnce(&Claim) -> Result<(), Refusal>,
) -> Result<(Claim, Keys), HandshakeError> {
    let mut hello = [0; HELLO];
    stream.read_exact(&mut hello)?;
    if &hello[..8] != MAGIC || hello[8..10] != VERSION.to_le_bytes() {
        return Err(HandshakeError::NotAMember);
    }
    let nonce_a = nonce()?;
    stream.write_all(&nonce_a)?;

    let mut message = [0; CLAIM + 32];
    stream.read_exact(&mut message)?;
    let (claim, proof) = message.split_at(CLAIM);
    if !proves(secret, "initiator", &[&hello, &nonce_a, claim], proof) {
        return Err(HandshakeError::WrongSecret);
    }
    let decoded = Claim::decode(claim).ok_or(HandshakeError::NotAMember)?;
    let outcome = admit(&decoded);
    let verdict = encode_verdict(outcome.err());
    let transcript: [&[u8]; 4] = [&hello, &nonce_a, claim, &verdict];
    let proof = secret.hash("acceptor", &transcript);
    let mut answer = [0; VERDICT + 32];
    answer[..VERDICT].copy_from_slice(&verdict);
    answer[VERDICT..].copy_from_slice(proof.as_bytes());
    stream.write_all(&answer)?;
    outcome.map_err(HandshakeError::Refused)?;
    let (to_acceptor, to_initiator) = session_keys(secret, &transcript);
    Ok((decoded, Keys { outgoing: to_initiator, incoming: to_acceptor }))
}

fn nonce() -> io::Result<[u8; 32]> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(nonce)
}

fn read_answer<const N: usize>(stream: &mut impl Read) -> Result<[u8; N], HandshakeError> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted => HandshakeError::Closed,
        _ => HandshakeError::Io(error),
    })?;
    Ok(bytes)
}

/// Compares in constant time.
fn proves(secret: &JobSecret, purpose: &str, transcript: &[&[u8]], proof: &[u8]) -> bool {
    let expected = secret.hash(purpose, transcript);
    proof.try_into().is_ok_and(|proof: [u8; 32]| expected == blake3::Hash::from_bytes(proof))
}

fn session_keys(secret: &JobSecret, transcript: &[&[u8]]) -> ([u8; 32], [u8; 32]) {
    let session = secret.hash("session", transcript);
    let key = |direction| *keyed(session.as_bytes(), direction, &[]).as_bytes();
    (key("to acceptor"), key("to initiator"))
}

impl Claim {
    fn encode(&self) -> [u8; CLAIM] {
        let (purpose, socket) = match self.purpose {
            Purpose::Store => (1, 0),
            Purpose::Control => (2, 0),
            Purpose::Frames(socket) => (3, socket),
        };
        let mut bytes = [0; CLAIM];
        bytes[0] = purpose;
        bytes[1] = self.settings.integrity;
        bytes[2..4].copy_from_slice(&socket.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.settings.sockets.to_le_bytes());
        bytes[6..10].copy_from_slice(&self.rank.to_le_bytes());
        bytes[10..14].copy_from_slice(&self.peer.to_le_bytes());
        bytes[14..18].copy_from_slice(&self.world.to_le_bytes());
        bytes[18..22].copy_from_slice(&self.settings.heartbeat.to_le_bytes());
        bytes[22..].copy_from_slice(&self.job);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let half = |at: usize| Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let purpose = match (bytes.first()?, half(2)?) {
            (1, 0) => Purpose::Store,
            (2, 0) => Purpose::Control,
            (3, socket) => Purpose::Frames(socket),
            _ => return None,
        };
        Some(Self {
            purpose,
            settings: Settings { sockets: half(4)?, integrity: bytes[1], heartbeat: word(18)? },
            rank: word(6)?,
            peer: word(10)?,
            world: word(14)?,
            job: bytes.get(22..)?.try_into().ok()?,
        })
    }
}

fn encode_verdict(refusal: Option<Refusal>) -> [u8; VERDICT] {
    let (code, detail) = match refusal {
        None => (0, 0),
        Some(Refusal::OtherWorld(world)) => (1, world),
        Some(Refusal::OtherJob) => (2, 0),
        Some(Refusal::OtherRank(rank)) => (3, rank),
        Some(Refusal::Taken) => (4, 0),
        Some(Refusal::OtherSettings) => (5, 0),
    };
    let mut bytes = [code, 0, 0, 0, 0];
    bytes[1..].copy_from_slice(&u32::to_le_bytes(detail));
    bytes
}

fn decode_verdict(bytes: &[u8]) -> Result<Option<Refusal>, HandshakeError> {
    let detail = bytes.get(1..VERDICT).and_then(|bytes| bytes.try_into().ok());
    match (bytes.first(), detail.map(u32::from_le_bytes)) {
        (Some(0), _) => Ok(None),
        (Some(1), Some(world)) => Ok(Some(Refusal::OtherWorld(world))),
        (Some(2), _) => Ok(Some(Refusal::OtherJob)),
        (Some(3), Some(rank)) => Ok(Some(Refusal::OtherRank(rank))),
        (Some(4), _) => Ok(Some(Refusal::Taken)),
        (Some(5), _) => Ok(Some(Refusal::OtherSettings)),
        _ => Err(HandshakeError::NotAMember),
    }
}

#[cfg(test)]
mod tests;
