//! Connecting to a member that may not have started yet.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::JobSecret;
use super::door::Timed;
use super::handshake::{self, Claim, HandshakeError, Keys};
use crate::error::Error;

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(50);
/// Longest attempt: a packet to a machine that is off gets no answer at all.
const ATTEMPT: Duration = Duration::from_secs(10);
/// How long a member that hangs up is tried again. It may be short of descriptors, or besieged.
const HANG_UPS: Duration = Duration::from_secs(2);

/// Whom to connect to, and how.
pub(crate) struct Dial<'a> {
    pub(crate) address: SocketAddr,
    /// Own address to connect from.
    pub(crate) from: Option<IpAddr>,
    pub(crate) secret: &'a JobSecret,
    pub(crate) deadline: Instant,
    /// Asked between two attempts.
    pub(crate) may_go_on: &'a dyn Fn() -> Result<(), Error>,
}

impl Dial<'_> {
    /// Connects as the member that `claim` says. Tries until the deadline while nobody listens.
    pub(crate) fn connect(&self, claim: &Claim) -> Result<(TcpStream, Keys), Error> {
        let started = Instant::now();
        let mut hung_up = None;
        loop {
            let error = match self.attempt(claim) {
                Ok(connected) => return Ok(connected),
                Err(error) => error,
            };
            let may_pass = match &error {
                HandshakeError::Io(error) => !is_out_of_files(error) && !is_no_way(error),
                HandshakeError::Closed => {
                    hung_up.get_or_insert_with(Instant::now).elapsed() < HANG_UPS
                }
                _ => false,
            };
            if !may_pass || Instant::now() + PAUSE >= self.deadline {
                return Err(self.failure(claim, &error, started.elapsed()));
            }
            (self.may_go_on)()?;
            thread::park_timeout(PAUSE);
        }
    }

    fn attempt(&self, claim: &Claim) -> Result<(TcpStream, Keys), HandshakeError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let domain = Domain::for_address(self.address);
        let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
        if let Some(ip) = self.from {
            socket.bind(&SocketAddr::new(ip, 0).into())?;
        }
        socket.connect_timeout(&self.address.into(), left.clamp(PAUSE, ATTEMPT))?;
        let stream = TcpStream::from(socket);
        if stream.local_addr()? == stream.peer_addr()? {
            // While nobody listens on a port of the ephemeral range, a connection to it from this
            // machine may get that very port and meet itself.
            return Err(io::Error::from(io::ErrorKind::ConnectionRefused).into());
        }
        stream.set_nodelay(true)?;
        let deadline = Instant::now() + left.clamp(PAUSE, ATTEMPT);
        let keys =
            handshake::initiate(&mut Timed { stream: &stream, deadline }, self.secret, claim)?;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        Ok((stream, keys))
    }

    fn failure(&self, claim: &Claim, error: &HandshakeError, waited: Duration) -> Error {
        let Claim { rank, peer, .. } = claim;
        let reached = match error {
            HandshakeError::Io(error) if is_out_of_files(error) => {
                "needs more open files than this process may have (raise it with `ulimit -n`)"
                    .into()
            }
            HandshakeError::Io(error) if is_timeout(error) => {
                "accepted the connection, but never answered".into()
            }
            HandshakeError::Io(_) => format!("could not be reached within {waited:.0?}"),
            _ => "did not let it in".to_owned(),
        };
        let address = self.address;
        let problem = format!("rank {rank}: rank {peer} at {address} {reached}: {error}");
        match error {
            HandshakeError::Io(error) if !is_no_way(error) => Error::Membership(problem),
            _ => Error::Setting(problem),
        }
    }
}

/// Whether the process or the system has no descriptor left.
fn is_out_of_files(error: &io::Error) -> bool {
    // EMFILE and ENFILE, the same numbers on all Unix systems.
    cfg!(unix) && matches!(error.raw_os_error(), Some(23 | 24))
}

/// Whether no attempt from this address to that one can succeed.
fn is_no_way(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::InvalidInput | io::ErrorKind::AddrNotAvailable | io::ErrorKind::Unsupported
    )
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock)
}
