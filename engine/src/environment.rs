//! What a process's environment says: whether it is one rank of a job, which, and how to reach the
//! others.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `RANK`, `WORLD_SIZE` | this rank, and how many there are; set together | ranks are threads |
//! | `LOCAL_WORLD_SIZE` | ranks on this machine | all if `MASTER_ADDR` is this machine, else 1 |
//! | `LOCAL_RANK` | this rank's number among them | `RANK` modulo `LOCAL_WORLD_SIZE` |
//! | `MASTER_ADDR`, `MASTER_PORT` | where rank 0 listens | 127.0.0.1, 29500 |
//! | `PYROCLAST_JOB_SECRET` | 16 bytes or more that only this job's ranks know | none, on one machine |
//! | `PYROCLAST_JOB_SECRET_FILE` | a file that holds the secret instead | |
//! | `PYROCLAST_INTERFACE` | network interface, by name or address | the route to rank 0 |
//! | `PYROCLAST_SOCKETS` | sockets between two ranks | 1 |
//! | `PYROCLAST_INTEGRITY` | `auto`, `crc` or `keyed`: how payloads are checked | `auto` |
//! | `PYROCLAST_HEARTBEAT` | seconds after which a silent rank counts as stopped | 30 |
//! | `PYROCLAST_TIMEOUT` | seconds that a rank waits for another | 600 within one collective, 300 to join |

use std::fs::File;
use std::io::Read;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pyroclast_strategies::membership::JobSecret;
use pyroclast_strategies::transport::Integrity;
use pyroclast_strategies::transport::tcp::{
    self, MAX_SOCKETS, MAX_WORLD, MIN_HEARTBEAT, TcpOptions,
};
use pyroclast_strategies::{GroupOptions, ProcessGroup};

use crate::error::{Error, Mistake};

/// How ranks on several machines, or in several processes, are started.
pub const SET_RANKS: &str = "start one process per rank, with RANK and WORLD_SIZE set, and \
                             MASTER_ADDR naming rank 0's machine";

/// Shortest time that a rank waits for another.
const MIN_TIMEOUT: Duration = Duration::from_millis(1);

/// Variables that other launchers set, too.
const RANK_VARIABLES: [&str; 6] =
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

/// What a process finds in its environment.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// The rank that this process is; none if its ranks are threads.
    pub process: Option<ProcessRank>,
    /// How long a rank waits for another; none for the defaults.
    pub timeout: Option<Duration>,
}

/// One rank of a job in which each rank is a process.
#[derive(Clone, Debug)]
pub struct ProcessRank {
    /// This rank.
    pub rank: usize,
    /// Ranks of the job.
    pub world: usize,
    /// This rank's number among those on this machine.
    pub local_rank: usize,
    /// Ranks on this machine.
    pub local_world: usize,
    /// Where rank 0 listens, as `host:port`.
    pub master: String,
    /// How the ranks are connected.
    pub tcp: TcpOptions,
}

impl Environment {
    /// Reads this process's environment.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] with every mistake in it.
    pub fn of_process() -> Result<Self, Error> {
        // Read as if it were text, a binary secret would lose most of itself.
        let unreadable = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok()?;
            let is_ours = name.starts_with("PYROCLAST_") || RANK_VARIABLES.contains(&&*name);
            (is_ours && value.to_str().is_none())
                .then(|| Mistake::new(name, "is not UTF-8 text; encode it, as base64 does"))
        });
        let unreadable: Vec<Mistake> = unreadable.collect();
        if !unreadable.is_empty() {
            return Err(Error::Config(unreadable));
        }
        Self::read(variable).map_err(Error::Config)
    }

    /// Reads the variables that `lookup` finds.
    ///
    /// # Errors
    ///
    /// Every mistake, under its variable's name.
    pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, Vec<Mistake>> {
        let mut reader = Reader { lookup: &lookup, mistakes: vec![] };
        let timeout = reader.seconds("PYROCLAST_TIMEOUT", MIN_TIMEOUT);
        let mut process = reader.process();
        if let (Some(process), Some(timeout)) = (&mut process, timeout) {
            (process.tcp.join_timeout, process.tcp.linger) = (timeout, timeout);
        }
        let environment = Self { process, timeout };
        match reader.mistakes.is_empty() {
            true => Ok(environment),
            false => Err(reader.mistakes),
        }
    }

    /// Settings of the group of all ranks.
    #[must_use]
    pub fn group_options(&self) -> GroupOptions {
        let default = GroupOptions::default();
        GroupOptions { timeout: self.timeout.unwrap_or(default.timeout), ..default }
    }
}

impl ProcessRank {
    /// Joins the group of all ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Strategy`] if they cannot be reached or are not of this job.
    pub fn join(&self, options: &GroupOptions) -> Result<Arc<ProcessGroup>, Error> {
        let endpoint = tcp::join(self.rank, self.world, &self.master, &self.tcp)?;
        Ok(Arc::new(ProcessGroup::new(endpoint, options.clone())))
    }

    /// Threads that this rank computes with: its share of the machine's, or `RAYON_NUM_THREADS`.
    #[must_use]
    pub fn threads(&self) -> usize {
        if variable("RAYON_NUM_THREADS").is_some() {
            return rayon::current_num_threads();
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        (threads / self.local_world).max(1)
    }
}

/// A variable of this process.
#[must_use]
pub fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Reads variables and collects mistakes.
struct Reader<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
    mistakes: Vec<Mistake>,
}

impl Reader<'_> {
    fn process(&mut self) -> Option<ProcessRank> {
        if !self.is_complete() {
            return None;
        }
        let world = self.number("WORLD_SIZE", 1, MAX_WORLD);
        let most = world.map_or(usize::MAX, |world| world - 1);
        let rank = self.number("RANK", 0, most);
        let address = self.text("MASTER_ADDR").unwrap_or_else(|| "127.0.0.1".to_owned());
        let port = self.number("MASTER_PORT", 1, 65535).unwrap_or(29500);
        let is_here = is_this_machine(&address);
        let local_world = self.number("LOCAL_WORLD_SIZE", 1, world.unwrap_or(MAX_WORLD));
        let local_world = local_world.unwrap_or(if is_here { world.unwrap_or(1) } else { 1 });
        let local_rank = self.number("LOCAL_RANK", 0, local_world - 1);
        let tcp = self.tcp();
        let (rank, world) = (rank?, world?);
        if world > 1 && !is_here && tcp.secret.is_none() {
            self.mistake(
                "PYROCLAST_JOB_SECRET",
                format!(
                    "is not set, but MASTER_ADDR {address} can be reached by others; give all ranks \
                     the same secret, made by `head -c 32 /dev/urandom | base64`"
                ),
            );
        }
        Some(ProcessRank {
            rank,
            world,
            local_rank: local_rank.unwrap_or(rank % local_world),
            local_world,
            master: host_and_port(&address, port),
            tcp,
        })
    }

    /// Whether this process is a rank. Half of what it takes to be one is a mistake.
    fn is_complete(&mut self) -> bool {
        let is_set = |name: &&str| (self.lookup)(name).is_some();
        if ["RANK", "WORLD_SIZE"].iter().all(is_set) {
            return true;
        }
        let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
        if let Some(name) = names.into_iter().find(|name| is_set(name)) {
            let problem = "is set, but a process that is a rank needs RANK and WORLD_SIZE; \
                           set both, or unset this one";
            self.mistake(name, problem);
        }
        false
    }

    fn tcp(&mut self) -> TcpOptions {
        let default = TcpOptions::default();
        let integrity = self.text("PYROCLAST_INTEGRITY").and_then(|name| match &*name {
            "auto" => Some(Integrity::Auto),
            "crc" => Some(Integrity::Crc),
            "keyed" => Some(Integrity::Keyed),
            _ => {
                let problem = format!("unknown `{name}`; there are auto, crc, keyed");
                self.mistake("PYROCLAST_INTEGRITY", problem);
                None
            }
        });
        TcpOptions {
            secret: self.secret(),
            interface: self.text("PYROCLAST_INTERFACE"),
            sockets_per_peer: self
                .number("PYROCLAST_SOCKETS", 1, MAX_SOCKETS)
                .unwrap_or(default.sockets_per_peer),
            integrity: integrity.unwrap_or(default.integrity),
            heartbeat: self
                .seconds("PYROCLAST_HEARTBEAT", MIN_HEARTBEAT)
                .unwrap_or(default.heartbeat),
            ..default
        }
    }

    fn secret(&mut self) -> Option<JobSecret> {
        const DIRECT: &str = "PYROCLAST_JOB_SECRET";
        const FILE: &str = "PYROCLAST_JOB_SECRET_FILE";
        let (name, bytes) = match ((self.lookup)(DIRECT), self.text(FILE)) {
            (Some(_), Some(_)) => {
                self.mistake(FILE, format!("is set together with {DIRECT}; unset one of them"));
                return None;
            }
            (Some(secret), None) => (DIRECT, secret.into_bytes()),
            (None, Some(path)) => (FILE, self.secret_in(Path::new(&path))?),
            (None, None) => return None,
        };
        JobSecret::new(bytes).map_err(|error| self.mistake(name, error.to_string())).ok()
    }

    /// The bytes of a secret's file, without the end of its last line.
    fn secret_in(&mut self, path: &Path) -> Option<Vec<u8>> {
        // More is no secret but a wrong path, and devices have no end.
        const MOST: u64 = 4096;
        let read = File::open(path).and_then(|file| {
            let mut bytes = vec![];
            file.take(MOST + 1).read_to_end(&mut bytes)?;
            match bytes.len() as u64 > MOST {
                true => Err(std::io::Error::other(format!("more than {MOST} bytes, the limit"))),
                false => Ok(bytes),
            }
        });
        let unreadable = |error| format!("{}: {error}", path.display());
        let mut bytes = read
            .map_err(|error| self.mistake("PYROCLAST_JOB_SECRET_FILE", unreadable(error)))
            .ok()?;
        bytes.truncate(bytes.trim_ascii_end().len());
        Some(bytes)
    }

    fn mistake(&mut self, name: &str, problem: impl Into<String>) {
        self.mistakes.push(Mistake::new(name, problem));
    }

    fn text(&mut self, name: &str) -> Option<String> {
        let text = (self.lookup)(name)?;
        if text.is_empty() {
            self.mistake(name, "is empty; give it a value, or unset it");
            return None;
        }
        Some(text)
    }

    /// A whole number from `least` to `most`.
    fn number(&mut self, name: &str, least: usize, most: usize) -> Option<usize> {
        let text = (self.lookup)(name)?;
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        if number.is_none() {
            let limit = match most {
                usize::MAX => format!("{least} or more"),
                _ => format!("{least} to {most}"),
            };
            self.mistake(name, format!("`{text}` is out of range; it must be {limit}"));
        }
        number
    }

    /// A number of seconds, `least` or more.
    fn seconds(&mut self, name: &str, least: Duration) -> Option<Duration> {
        let text = (self.lookup)(name)?;
        let seconds = text.parse().ok();
        let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let duration = duration.filter(|duration| *duration >= least);
        if duration.is_none() {
            let least = least.as_secs_f64();
            self.mistake(name, format!("`{text}` is no number of seconds from {least} on"));
        }
        duration
    }
}

fn is_this_machine(address: &str) -> bool {
    let ip = address.parse::<IpAddr>();
    address == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
}

fn host_and_port(address: &str, port: usize) -> String {
    match address.parse::<IpAddr>() {
        Ok(IpAddr::V6(ip)) => format!("[{ip}]:{port}"),
        _ => format!("{address}:{port}"),
    }
}

#[cfg(test)]
mod tests;
