//! A network between two ranks that misbehaves on demand.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;
use crate::membership::door::close;
use crate::store::{MemoryStore, Store};

/// What happens to the connections for frames, once some bytes have passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Everything comes late.
    Delay,
    /// Nothing more comes, and nothing is closed.
    Stall,
    /// Some bytes are missing.
    Drop,
    /// A bit is flipped.
    Corrupt,
    /// The connection for frames is closed.
    CloseFrames,
    /// All connections are closed, as if the process had been killed.
    CloseAll,
    /// Nothing comes on any connection, as if the process were stopped or a cable pulled.
    StallAll,
}

impl Fault {
    /// Whether heartbeats still pass.
    fn spares_control(self) -> bool {
        !matches!(self, Self::CloseAll | Self::StallAll)
    }
}

/// Sends the connections of rank 1 to rank 0 through a relay.
#[derive(Debug)]
pub(crate) struct Detour {
    pub(crate) store: MemoryStore,
    pub(crate) fault: Fault,
    pub(crate) after: usize,
}

impl Store for Detour {
    fn set(&self, name: &str, value: &[u8]) -> Result<(), Error> {
        self.store.set(name, value)
    }

    fn failure(&self) -> Result<Option<String>, Error> {
        self.store.failure()
    }

    fn get(&self, name: &str, deadline: Instant) -> Result<Vec<u8>, Error> {
        let value = self.store.get(name, deadline)?;
        if name != "address/0" {
            return Ok(value);
        }
        let text = std::str::from_utf8(&value).expect("an address is text");
        let relay = start(text.parse().expect("an address"), self.fault, self.after);
        Ok(relay.to_string().into_bytes())
    }
}

/// Listens for connections and passes them on to `target`. The first is the one for control.
fn start(target: SocketAddr, fault: Fault, after: usize) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    // Bytes on connections for frames, both directions together.
    let passed = Arc::new(AtomicUsize::new(0));
    thread::spawn(move || {
        for (number, near) in listener.incoming().enumerate() {
            let (Ok(near), Ok(far)) = (near, TcpStream::connect(target)) else { return };
            for (from, to) in [(&near, &far), (&far, &near)] {
                let direction = Direction {
                    from: from.try_clone().expect("a handle"),
                    to: to.try_clone().expect("a handle"),
                    fault,
                    is_control: number == 0,
                    passed: Arc::clone(&passed),
                    after,
                };
                thread::spawn(move || direction.pass());
            }
        }
    });
    address
}

struct Direction {
    from: TcpStream,
    to: TcpStream,
    fault: Fault,
    is_control: bool,
    passed: Arc<AtomicUsize>,
    after: usize,
}

impl Direction {
    fn pass(mut self) {
        // Short, so that the other connections' progress is seen.
        self.from.set_read_timeout(Some(Duration::from_millis(5))).expect("a timeout");
        let mut bytes = [0; 4096];
        loop {
            let len = match self.from.read(&mut bytes) {
                Ok(0) => break,
                Ok(len) => len,
                Err(error) if is_timeout(&error) => 0,
                Err(_) => break,
            };
            let is_due = self.passed.load(Ordering::SeqCst) >= self.after;
            let outcome = match self.fault {
                _ if !is_due || (self.is_control && self.fault.spares_control()) => {
                    self.forward(&mut bytes[..len])
                }
                Fault::CloseFrames | Fault::CloseAll => break,
                // Reads on, so that it sees when it is no longer needed.
                Fault::Stall | Fault::StallAll => Ok(()),
                _ => self.forward(&mut bytes[..len]),
            };
            if outcome.is_err() {
                break;
            }
        }
        close(&self.from);
        close(&self.to);
    }

    fn forward(&mut self, bytes: &mut [u8]) -> std::io::Result<()> {
        if self.is_control {
            return self.to.write_all(bytes);
        }
        let before = self.passed.fetch_add(bytes.len(), Ordering::SeqCst);
        let is_now = (before..before + bytes.len()).contains(&self.after);
        match self.fault {
            Fault::Delay => thread::park_timeout(Duration::from_millis(2)),
            Fault::Corrupt if is_now => bytes[self.after - before] ^= 0x10,
            Fault::Drop if is_now => return self.to.write_all(&bytes[..self.after - before]),
            _ => {}
        }
        self.to.write_all(bytes)
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
}
