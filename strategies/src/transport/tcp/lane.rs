//! One connection for frames, with a thread for each direction.

use std::io::{self, BufReader};
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, bounded, never, select_biased, unbounded};

use crate::abort::AbortSignal;
use crate::membership::door::close;
use crate::transport::Frame;
use crate::transport::wire::{Stream, WireError};

/// Frames that are read before the rank asks for them. When so many wait, the peer's writes do too. More
/// would leave the cache before they are combined.
const READ_AHEAD: usize = 8;
/// Takes a header and a small payload in one read. Larger payloads are read straight to their place.
const BUFFER_BYTES: usize = 16 << 10;

/// A connection whose frames are written and read on threads of their own.
#[derive(Debug)]
pub(super) struct Lane {
    stream: TcpStream,
    /// `None` once nothing more will be sent.
    outgoing: Mutex<Option<Sender<Frame>>>,
    incoming: Receiver<Result<Frame, WireError>>,
    /// Disconnects when all has been written, or writing has failed.
    written: Receiver<()>,
    threads: Vec<JoinHandle<()>>,
}

impl Lane {
    /// Starts the threads. `name` is what debuggers show.
    pub(super) fn start(
        stream: TcpStream,
        outgoing: Stream,
        incoming: Stream,
        name: &str,
    ) -> io::Result<Self> {
        let (to_writer, frames) = unbounded();
        let (done, written) = bounded(0);
        let writing = stream.try_clone()?;
        let writer = thread::Builder::new()
            .name(format!("{name}-out"))
            .spawn(move || write(writing, outgoing, &frames, done))?;
        let (to_rank, read_frames) = bounded(READ_AHEAD);
        let reading = stream.try_clone()?;
        let reader = thread::Builder::new()
            .name(format!("{name}-in"))
            .spawn(move || read(reading, incoming, &to_rank))?;
        let outgoing = Mutex::new(Some(to_writer));
        Ok(Self { stream, outgoing, incoming: read_frames, written, threads: vec![writer, reader] })
    }

    /// Queues a frame. Whether the connection still takes one.
    pub(super) fn send(&self, frame: Frame) -> bool {
        let outgoing = self.outgoing.lock().unwrap_or_else(PoisonError::into_inner);
        outgoing.as_ref().is_some_and(|outgoing| outgoing.send(frame).is_ok())
    }

    /// Frames, and in the end why there are no more.
    pub(super) fn incoming(&self) -> &Receiver<Result<Frame, WireError>> {
        &self.incoming
    }

    /// Nothing more will be sent.
    pub(super) fn finish(&self) {
        *self.outgoing.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Waits until all that was queued has been written, or a rank has failed: then nobody may be
    /// reading it.
    pub(super) fn wait_until_written(&self, abort: &AbortSignal) {
        select_biased! {
            recv(self.written) -> _ => {}
            recv(abort.raised()) -> _ => close(&self.stream),
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.finish();
        close(&self.stream);
        // Wakes a reader whose frames nobody took.
        self.incoming = never();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Ends when all senders are gone, or on the first error: what went wrong is seen by the reader and on
/// the control connection.
fn write(mut stream: TcpStream, mut wire: Stream, frames: &Receiver<Frame>, done: Sender<()>) {
    let is_sent = frames.iter().all(|frame| wire.write(&mut stream, frame).is_ok());
    if is_sent {
        let _ = stream.shutdown(Shutdown::Write);
    }
    drop(done);
}

fn read(stream: TcpStream, mut wire: Stream, frames: &Sender<Result<Frame, WireError>>) {
    let mut reader = BufReader::with_capacity(BUFFER_BYTES, stream);
    loop {
        let frame = wire.read(&mut reader);
        let is_last = frame.is_err();
        if frames.send(frame).is_err() || is_last {
            return;
        }
    }
}
