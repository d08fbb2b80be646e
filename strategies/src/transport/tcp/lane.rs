//! One connection for frames, with a thread for each direction.

use std::io::{self, BufReader};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

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
    stream: Arc<TcpStream>,
    /// `None` once nothing more will be sent.
    outgoing: Option<Sender<Frame>>,
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
        let stream = Arc::new(stream);
        let (to_writer, frames) = unbounded();
        let (done, written) = bounded(0);
        let writing = Arc::clone(&stream);
        let writer = thread::Builder::new()
            .name(format!("{name}-out"))
            .spawn(move || write(&writing, outgoing, &frames, done))?;
        let (to_rank, read_frames) = bounded(READ_AHEAD);
        let reading = Arc::clone(&stream);
        let reader = thread::Builder::new()
            .name(format!("{name}-in"))
            .spawn(move || read(&reading, incoming, &to_rank))?;
        let (outgoing, incoming) = (Some(to_writer), read_frames);
        Ok(Self { stream, outgoing, incoming, written, threads: vec![writer, reader] })
    }

    /// Queues a frame. Whether the connection still takes one.
    pub(super) fn send(&self, frame: Frame) -> bool {
        self.outgoing.as_ref().is_some_and(|outgoing| outgoing.send(frame).is_ok())
    }

    /// Frames that have been queued and not written.
    pub(super) fn backlog(&self) -> usize {
        self.outgoing.as_ref().map_or(0, Sender::len)
    }

    /// Frames, and in the end why there are no more.
    pub(super) fn incoming(&self) -> &Receiver<Result<Frame, WireError>> {
        &self.incoming
    }

    /// Nothing more will be sent, and what still comes is thrown away: a peer that waits for this rank
    /// to read could not leave either.
    pub(super) fn finish(&mut self) {
        self.outgoing = None;
        self.incoming = never();
    }

    /// Waits until all that was queued has been written, but not beyond the deadline, and not when a
    /// rank has failed: then nobody may be reading it.
    pub(super) fn wait_until_written(&self, abort: &AbortSignal, deadline: Instant) {
        select_biased! {
            recv(self.written) -> _ => {}
            recv(abort.raised()) -> _ => close(&self.stream),
            default(deadline.saturating_duration_since(Instant::now())) => close(&self.stream),
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.finish();
        close(&self.stream);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Ends when all senders are gone, or on the first error, which the peer then sees as well.
fn write(stream: &TcpStream, mut wire: Stream, frames: &Receiver<Frame>, done: Sender<()>) {
    let mut writer = stream;
    match frames.iter().try_for_each(|frame| wire.write(&mut writer, frame)) {
        Ok(()) => drop(stream.shutdown(Shutdown::Write)),
        Err(_) => close(stream),
    }
    drop(done);
}

/// Ends with the connection, or at the first damaged frame.
fn read(stream: &TcpStream, mut wire: Stream, frames: &Sender<Result<Frame, WireError>>) {
    let mut reader = BufReader::with_capacity(BUFFER_BYTES, stream);
    loop {
        let frame = wire.read(&mut reader);
        let is_last = frame.is_err();
        // A rank that has left takes no more.
        let _ = frames.send(frame);
        if is_last {
            return;
        }
    }
}
