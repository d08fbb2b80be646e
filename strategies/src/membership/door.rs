//! Where members of a job knock: a listener that lets in whoever completes the handshake in time.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::JobSecret;
use super::handshake::{self, Claim, Keys, Refusal};
use crate::error::Error;

/// How long a peer may take for its handshake.
const PATIENCE: Duration = Duration::from_secs(10);
/// Unproven connections at a time. One more, and the oldest is dropped: strangers that say nothing
/// cannot keep members out, whose handshake takes milliseconds.
const MAX_STRANGERS: usize = 256;

/// A member that has been let in.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) claim: Claim,
    pub(crate) keys: Keys,
    pub(crate) stream: TcpStream,
}

/// What to do with members.
pub(crate) trait Host: Send + Sync + 'static {
    /// Whether to let a member in.
    fn admit(&self, claim: &Claim) -> Result<(), Refusal>;

    /// Takes a member, on a thread of its own.
    fn welcome(&self, member: Member);
}

/// An open door. Closed when dropped.
#[derive(Debug)]
pub(crate) struct Door {
    address: SocketAddr,
    strangers: Arc<Strangers>,
    thread: Option<JoinHandle<()>>,
}

/// Connections that have not proved themselves yet, oldest first.
#[derive(Debug, Default)]
struct Strangers {
    is_closing: AtomicBool,
    streams: Mutex<VecDeque<(u64, TcpStream)>>,
}

impl Door {
    /// Listens on `address`. `advice` says what to set where it is no address of this machine.
    pub(crate) fn open(
        address: SocketAddr,
        advice: &str,
        secret: &JobSecret,
        host: Arc<impl Host>,
    ) -> Result<Self, Error> {
        if secret.is_open() && !address.ip().is_loopback() {
            return Err(Error::Setting(format!(
                "listening on {address} without a secret would let anybody join; set the same \
                 PYROCLAST_JOB_SECRET on all ranks, made by `head -c 32 /dev/urandom | base64`"
            )));
        }
        let cannot = |error: io::Error| {
            let advice = match error.kind() {
                io::ErrorKind::AddrInUse => "; another job uses this port, set another MASTER_PORT",
                io::ErrorKind::AddrNotAvailable => &format!("; {advice}"),
                _ => "",
            };
            Error::Setting(format!("listening on {address}: {error}{advice}"))
        };
        let listener = TcpListener::bind(address).map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        let strangers = Arc::<Strangers>::default();
        let (shared, secret) = (Arc::clone(&strangers), secret.clone());
        let thread = thread::Builder::new()
            .name("door".to_owned())
            .spawn(move || answer(&listener, &shared, &secret, &host))
            .map_err(cannot)?;
        Ok(Self { address, strangers, thread: Some(thread) })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.strangers.is_closing.store(true, Ordering::SeqCst);
        // Wakes the thread from its wait for the next connection.
        let ip = match self.address.ip() {
            ip if !ip.is_unspecified() => ip,
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        };
        let woken = TcpStream::connect_timeout(&(ip, self.address.port()).into(), PATIENCE);
        if let Some(thread) = self.thread.take().filter(|_| woken.is_ok()) {
            // Its only panics would be those of the host.
            let _ = thread.join();
        }
        self.strangers.streams().drain(..).for_each(|(_, stream)| close(&stream));
    }
}

fn answer(
    listener: &TcpListener,
    strangers: &Arc<Strangers>,
    secret: &JobSecret,
    host: &Arc<impl Host>,
) {
    for number in 0.. {
        let accepted = listener.accept();
        if strangers.is_closing.load(Ordering::SeqCst) {
            return;
        }
        let Ok((stream, _)) = accepted else {
            // No descriptors left, say: drop somebody, and give the rest time to finish.
            strangers.drop_oldest();
            thread::park_timeout(Duration::from_millis(10));
            continue;
        };
        if !strangers.add(number, &stream) {
            continue;
        }
        let (known, secret, host) = (Arc::clone(strangers), secret.clone(), Arc::clone(host));
        let handshake = thread::Builder::new().name("handshake".to_owned()).spawn(move || {
            let mut timed = Timed { stream: &stream, deadline: Instant::now() + PATIENCE };
            let outcome = handshake::accept(&mut timed, &secret, |claim| host.admit(claim));
            known.remove(number);
            if let Ok((claim, keys)) = outcome
                && stream.set_read_timeout(None).is_ok()
                && stream.set_write_timeout(None).is_ok()
            {
                host.welcome(Member { claim, keys, stream });
            }
        });
        // A thread that cannot be started is a connection that is closed; its rank tries again.
        if handshake.is_err() {
            strangers.remove(number);
        }
    }
}

impl Strangers {
    fn streams(&self) -> MutexGuard<'_, VecDeque<(u64, TcpStream)>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, number: u64, stream: &TcpStream) -> bool {
        let Ok(handle) = stream.try_clone() else { return false };
        if stream.set_nodelay(true).is_err() {
            return false;
        }
        self.streams().push_back((number, handle));
        if self.streams().len() > MAX_STRANGERS {
            self.drop_oldest();
        }
        true
    }

    fn remove(&self, number: u64) {
        self.streams().retain(|(other, _)| *other != number);
    }

    fn drop_oldest(&self) {
        if let Some((_, stream)) = self.streams().pop_front() {
            close(&stream);
        }
    }
}

/// Ends whatever thread waits on the connection. It may be closed already.
pub(crate) fn close(stream: &TcpStream) {
    let _ = stream.shutdown(std::net::Shutdown::Both);
}

/// A stream all of whose reads and writes together end at a deadline.
#[derive(Debug)]
pub(crate) struct Timed<'a> {
    pub(crate) stream: &'a TcpStream,
    pub(crate) deadline: Instant,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(bytes)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
