//! This command once more, as several ranks on this machine: each a process that this one starts and
//! watches.

use std::env;
use std::fmt::Write;
use std::io;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;

use pyroclast::{Error, environment};

/// Set for ranks whose standard input is held by the process that started them.
const SUPERVISED: &str = "PYROCLAST_SUPERVISED";

/// How long ranks may go on once one of them has failed.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// The ranks' processes. Dropping this ends them, so that none outlives a failure.
#[derive(Debug)]
struct Ranks(Vec<Child>);

/// Runs this command, arguments and all, as `world` ranks, and shows what rank 0 says. The first rank
/// that fails ends the others.
///
/// # Errors
///
/// [`Error::RankEnded`] for a rank that fails, after its own message has been shown, and
/// [`Error::Io`] if the processes cannot be started.
pub(crate) fn run_ranks(world: usize) -> Result<(), Error> {
    let mut ranks = start(world).map_err(cannot("starting"))?;
    let (ended, ends) = unbounded();
    thread::scope(|scope| {
        for (rank, child) in ranks.0.iter_mut().enumerate() {
            let (said, ended) = (child.stderr.take(), ended.clone());
            scope.spawn(move || {
                // A process's errors end when it does.
                said.map(|mut said| io::copy(&mut said, &mut io::stderr()));
                ended.send(rank)
            });
        }
        drop(ended);
        let failed = ends.iter().find_map(|rank| ranks.failure(rank));
        // Others that fail with it have something to say, too.
        let deadline = Instant::now() + LAST_WORDS;
        while failed.is_some() && ends.recv_deadline(deadline).is_ok() {}
        drop(ranks);
        failed.map_or(Ok(()), Err)
    })
}

impl Ranks {
    /// How a rank that has ended has failed, if it has.
    fn failure(&mut self, rank: usize) -> Option<Error> {
        match self.0[rank].wait() {
            Ok(status) if status.success() => None,
            Ok(status) => Some(Error::RankEnded { rank, status }),
            Err(error) => Some(cannot("waiting for")(error)),
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Fails only for those that have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn start(world: usize) -> io::Result<Ranks> {
    let program = env::current_exe()?;
    // Free now. Should another program take it before rank 0 does, rank 0 says so.
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let secret = rand::random::<[u8; 32]>().iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    });
    let mut ranks = Ranks(vec![]);
    for rank in 0..world {
        let output = if rank == 0 { Stdio::inherit() } else { Stdio::null() };
        let child = Command::new(&program)
            .args(env::args_os().skip(1))
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", world.to_string())
            .env("LOCAL_WORLD_SIZE", world.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("PYROCLAST_JOB_SECRET", &secret)
            .env_remove("PYROCLAST_JOB_SECRET_FILE")
            .env_remove("PYROCLAST_INTERFACE")
            .env(SUPERVISED, "stdin")
            .stdin(Stdio::piped())
            .stdout(output)
            .stderr(Stdio::piped())
            .spawn()?;
        ranks.0.push(child);
    }
    Ok(ranks)
}

fn cannot(action: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { action, path: "the ranks' processes".into(), source }
}

/// Ends this process when the one that started it as a rank has ended, however that came about.
pub(crate) fn end_with_parent() {
    if environment::variable(SUPERVISED).is_none() {
        return;
    }
    thread::spawn(|| {
        // The parent never writes: reading ends when it is gone.
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        #[cfg(unix)]
        let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
    });
}
