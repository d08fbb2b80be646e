//! The control connections: who is alive, who failed, who left.
//!
//! A rank that leaves says goodbye; one that has failed, or learned of a failure, says so to all. The
//! receiver of either answers by closing its side, so that the sender knows that it was heard and may
//! close the connection. A connection that closes otherwise, or is silent for too long, is a failure of
//! the rank at its other end.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, never, select_biased};

use crate::abort::{AbortSignal, Failure};
use crate::deadline;
use crate::membership::channel::Direction;
use crate::membership::door::close;
use crate::membership::handshake::Keys;

/// Longest reason that is passed on, in bytes.
const MAX_REASON: usize = 16 << 10;
/// Heartbeats within the time after which a silent rank has failed.
const BEATS: u32 = 4;

/// What is said on a control connection.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Message {
    Heartbeat,
    Abort(Failure),
    Goodbye,
}

/// A control connection that has been made.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) peer: usize,
    pub(super) stream: TcpStream,
    pub(super) keys: Keys,
}

/// This rank, and how long others may be silent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rhythm {
    pub(super) rank: usize,
    /// Longest silence.
    pub(super) heartbeat: Duration,
    /// Longest silence before the first word: a peer speaks once it has connected to all ranks.
    pub(super) patience: Duration,
}

/// All control connections of a rank.
#[derive(Debug)]
pub(super) struct Pulse {
    streams: Vec<Arc<TcpStream>>,
    /// By peer: disconnects when the peer has said goodbye or failed.
    departures: Vec<Receiver<()>>,
    is_leaving: Arc<AtomicBool>,
    /// Dropped to end the sender.
    stop: Option<Sender<()>>,
    sender: Option<JoinHandle<()>>,
    readers: Vec<(JoinHandle<()>, Receiver<()>)>,
}

impl Pulse {
    /// Starts the threads.
    pub(super) fn start(
        controls: Vec<Control>,
        world: usize,
        rhythm: Rhythm,
        abort: &AbortSignal,
    ) -> io::Result<Self> {
        let is_leaving = Arc::new(AtomicBool::new(false));
        let mut departures: Vec<Receiver<()>> = (0..world).map(|_| never()).collect();
        let (mut streams, mut voices, mut readers) = (vec![], vec![], vec![]);
        for Control { peer, stream, keys } in controls {
            stream.set_write_timeout(Some(rhythm.heartbeat))?;
            let stream = Arc::new(stream);
            streams.push(Arc::clone(&stream));
            voices.push((Arc::clone(&stream), Direction::new(keys.outgoing)));
            let (present, departure) = bounded::<()>(0);
            departures[peer] = departure.clone();
            let listener = Listener {
                peer,
                stream,
                incoming: Direction::new(keys.incoming),
                rhythm,
                abort: abort.clone(),
                is_leaving: Arc::clone(&is_leaving),
            };
            let thread = thread::Builder::new()
                .name(format!("control-{peer}"))
                .spawn(move || listener.listen(present))?;
            readers.push((thread, departure));
        }
        let (stop, stopped) = bounded(0);
        let abort = abort.clone();
        let interval = rhythm.heartbeat / BEATS;
        let sender = thread::Builder::new()
            .name("heartbeat".to_owned())
            .spawn(move || speak(&mut voices, interval, &abort, &stopped))?;
        let (stop, sender) = (Some(stop), Some(sender));
        Ok(Self { streams, departures, is_leaving, stop, sender, readers })
    }

    /// Disconnects when the peer has said goodbye or failed.
    pub(super) fn departure(&self, peer: usize) -> &Receiver<()> {
        &self.departures[peer]
    }

    /// Says goodbye, or what has failed, and waits until it was heard, but not for a stopped peer.
    pub(super) fn leave(&mut self, limit: Duration) {
        self.is_leaving.store(true, Ordering::SeqCst);
        self.stop = None;
        if let Some(sender) = self.sender.take() {
            let _ = sender.join();
        }
        for stream in &self.streams {
            let _ = stream.shutdown(Shutdown::Write);
        }
        let deadline = deadline::after(limit);
        for (_, departure) in &self.readers {
            let _ = departure.recv_deadline(deadline);
        }
        self.streams.iter().for_each(|stream| close(stream));
        for (reader, _) in self.readers.drain(..) {
            let _ = reader.join();
        }
    }
}

/// Beats until the rank leaves or some rank fails, and then says so. A peer that cannot be told has a
/// connection that has failed, which its listener reports.
fn speak(
    voices: &mut [(Arc<TcpStream>, Direction)],
    interval: Duration,
    abort: &AbortSignal,
    stopped: &Receiver<()>,
) {
    let mut tell = |message: &Message| {
        for (stream, outgoing) in voices.iter_mut() {
            let _ = outgoing.write(&mut &**stream, &message.encode());
        }
    };
    tell(&Message::Heartbeat);
    loop {
        select_biased! {
            recv(abort.raised()) -> _ => break,
            recv(stopped) -> _ => break,
            default(interval) => tell(&Message::Heartbeat),
        }
    }
    tell(&abort.failure().map_or(Message::Goodbye, Message::Abort));
}

/// Listens to one peer.
struct Listener {
    peer: usize,
    stream: Arc<TcpStream>,
    incoming: Direction,
    rhythm: Rhythm,
    abort: AbortSignal,
    is_leaving: Arc<AtomicBool>,
}

impl Listener {
    /// Ends when the peer leaves or fails, or this rank has left. A failure is raised before `present`
    /// is dropped.
    fn listen(mut self, present: Sender<()>) {
        let mut patience = self.rhythm.patience;
        loop {
            let message = self
                .stream
                .set_read_timeout(Some(patience))
                .and_then(|()| self.incoming.read(&mut &*self.stream));
            match message.map(|body| Message::decode(&body)) {
                Ok(Some(Message::Heartbeat)) => patience = self.rhythm.heartbeat,
                Ok(Some(Message::Goodbye)) => {
                    self.acknowledge();
                    break;
                }
                Ok(Some(Message::Abort(failure))) => {
                    self.abort.raise(failure.rank, failure.reason);
                    self.acknowledge();
                    break;
                }
                Ok(None) => {
                    self.blame("it sent a control message that is none");
                    break;
                }
                // This rank has said its last word and was heard.
                Err(_) if self.is_leaving.load(Ordering::SeqCst) => break,
                Err(error) => {
                    self.blame(&self.explain(&error, patience));
                    break;
                }
            }
        }
        drop(present);
    }

    /// Tells the peer that its last word was heard. A rank that is blamed still has to be told so.
    fn acknowledge(&self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    fn blame(&self, reason: &str) {
        self.abort.raise(self.peer, reason);
    }

    fn explain(&self, error: &io::Error, patience: Duration) -> String {
        let rank = self.rhythm.rank;
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => format!(
                "rank {rank} heard nothing from it for {patience:?}: its process is stopped or cut \
                 off; the limit is set by PYROCLAST_HEARTBEAT"
            ),
            io::ErrorKind::InvalidData => format!("rank {rank} received {error}"),
            _ => format!(
                "its connection to rank {rank} closed without a goodbye: its process was killed or \
                 crashed, or the network failed"
            ),
        }
    }
}

impl Message {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Heartbeat => vec![1],
            Self::Goodbye => vec![2],
            Self::Abort(Failure { rank, reason }) => {
                let end = reason.floor_char_boundary(MAX_REASON);
                let rank = (*rank as u32).to_le_bytes();
                [&[3], &rank[..], &reason.as_bytes()[..end]].concat()
            }
        }
    }

    fn decode(body: &[u8]) -> Option<Self> {
        match body.split_first()? {
            (1, []) => Some(Self::Heartbeat),
            (2, []) => Some(Self::Goodbye),
            (3, rest) => {
                let (rank, reason) = rest.split_at_checked(4)?;
                let rank = u32::from_le_bytes(rank.try_into().ok()?) as usize;
                let reason = String::from_utf8_lossy(reason).into_owned();
                Some(Self::Abort(Failure { rank, reason }))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_wire_and_others_are_refused() {
        let failure = Failure { rank: 3, reason: "out of cheese".to_owned() };
        for message in [Message::Heartbeat, Message::Goodbye, Message::Abort(failure)] {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
        for body in [&[][..], &[0], &[1, 1], &[3, 0, 0], &[4]] {
            assert_eq!(Message::decode(body), None, "{body:?}");
        }
        let long = Failure { rank: 0, reason: "ä".repeat(MAX_REASON) };
        assert!(Message::Abort(long).encode().len() <= MAX_REASON + 5);
    }
}
