//! Ranks as processes, killed, stopped, slow, lying, and cut off from each other.

#![cfg(unix)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use half::bf16;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pyroclast_strategies::membership::JobSecret;
use pyroclast_strategies::transport::tcp::{self, TcpOptions};
use pyroclast_strategies::{Element, Error, GroupOptions, ProcessGroup, ReduceOp};

const WORLD: usize = 3;
const SECRET: &str = "a secret of the tests";

/// Ranks that run, and what they say.
struct Ranks(Vec<(Child, BufReader<ChildStdout>)>);

/// How ranks are started.
struct Start<'a> {
    scenario: &'a str,
    world: usize,
    master: String,
    heartbeat_s: f64,
    /// By rank: a command that runs the rank's command.
    within: Vec<Vec<String>>,
}

impl Start<'_> {
    fn new(scenario: &str) -> Start<'_> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let master = listener.local_addr().expect("an address").to_string();
        Start { scenario, world: WORLD, master, heartbeat_s: 30.0, within: vec![vec![]; WORLD] }
    }

    fn run(self) -> Ranks {
        let start = |rank: usize| {
            let program = std::env::current_exe().expect("this program");
            let mut words = self.within[rank].clone();
            words.push(program.to_str().expect("a path in UTF-8").to_owned());
            let mut child = Command::new(&words[0])
                .args(&words[1..])
                .args(["--exact", "network::rank", "--ignored", "--nocapture"])
                .env("TEST_SCENARIO", self.scenario)
                .env("TEST_RANK", rank.to_string())
                .env("TEST_WORLD", self.world.to_string())
                .env("TEST_MASTER", &self.master)
                .env("TEST_HEARTBEAT", self.heartbeat_s.to_string())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("a process");
            let said = BufReader::new(child.stdout.take().expect("its output"));
            (child, said)
        };
        Ranks((0..self.world).map(start).collect())
    }
}

impl Ranks {
    /// The next word of a rank, which stands behind "TEST ".
    fn next(&mut self, rank: usize) -> Option<String> {
        let lines = self.0[rank].1.by_ref().lines().map_while(Result::ok);
        lines.filter_map(|line| Some(line.split_once("TEST ")?.1.to_owned())).next()
    }

    fn wait_until_all_are_ready(&mut self) {
        for rank in 0..self.0.len() {
            assert_eq!(self.next(rank).as_deref(), Some("ready"), "rank {rank}");
        }
        // A rank that failed now would stop others that are still getting ready.
        for (child, _) in &mut self.0 {
            drop(child.stdin.take());
        }
    }

    /// How a rank ended.
    fn end(&mut self, rank: usize) -> String {
        self.next(rank).unwrap_or_else(|| format!("rank {rank} said nothing"))
    }

    fn signal(&self, rank: usize, signal: Signal) {
        let pid = i32::try_from(self.0[rank].0.id()).expect("a process id");
        kill(Pid::from_raw(pid), signal).expect("a running process");
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn setting<T: FromStr<Err: std::fmt::Debug>>(name: &str) -> T {
    std::env::var(name).expect("a setting").parse().expect("a valid setting")
}

fn say(word: &str) {
    // Straight to the pipe, past the test harness.
    writeln!(std::io::stdout(), "TEST {word}").expect("somebody listens");
}

#[test]
#[ignore = "one rank of the other tests, in a process of its own"]
fn rank() {
    let (rank, world): (usize, usize) = (setting("TEST_RANK"), setting("TEST_WORLD"));
    let options = TcpOptions {
        secret: Some(JobSecret::new(SECRET).expect("long enough")),
        heartbeat: Duration::from_secs_f64(setting("TEST_HEARTBEAT")),
        ..TcpOptions::default()
    };
    let endpoint = tcp::join(rank, world, &setting::<String>("TEST_MASTER"), &options);
    let group = ProcessGroup::new(endpoint.expect("all ranks join"), GroupOptions::default());
    group.barrier().expect("all ranks are there");
    say("ready");
    std::io::stdin().read_to_end(&mut vec![]).expect("the end of the input");
    let outcome = match setting::<String>("TEST_SCENARIO").as_str() {
        "grid" => grid(&group),
        "loop" => (0..).try_for_each(|_| sum(&group, 100_000).map(drop)),
        "slow" => slow(&group),
        "other operation" if rank == 1 => group.all_gather(vec![1.0f32; 6]).wait().map(drop),
        "other dtype" if rank == 1 => {
            group.all_reduce(vec![1i32; 6], ReduceOp::Sum).wait().map(drop)
        }
        "other size" if rank == 1 => sum(&group, 7).map(drop),
        "other reduction" if rank == 1 => {
            group.all_reduce(vec![1.0f32; 6], ReduceOp::Max).wait().map(drop)
        }
        "fewer calls" if rank == 1 => Ok(()),
        _ => sum(&group, 6).map(drop),
    };
    // Before it says how it ended, so that nobody stops waiting for it too soon.
    drop(group);
    say(&outcome.map_or_else(|error| error.to_string(), |()| "done".to_owned()));
}

fn sum(group: &ProcessGroup, len: usize) -> Result<Vec<f32>, Error> {
    group.all_reduce(vec![1.0; len], ReduceOp::Sum).wait()
}

/// Rank 1 computes for longer than the others would wait for a sign of life.
fn slow(group: &ProcessGroup) -> Result<(), Error> {
    if group.rank() == 1 {
        thread::park_timeout(Duration::from_secs(17));
    }
    sum(group, 10).map(drop)
}

fn grid(group: &ProcessGroup) -> Result<(), Error> {
    let world = group.world();
    for len in [0, 1, world - 1, world, world + 1, 1009, 1 << 18] {
        check(group, len, |v| v as f32)?;
        check(group, len, |v| v as f64)?;
        check(group, len, |v| bf16::from_f32(f32::from(v)))?;
        check(group, len, i32::from)?;
        check(group, len, i64::from)?;
        check(group, len, |v| v)?;
    }
    group.barrier()
}

/// Sums, gathers and exchanges numbers that no sum rounds.
fn check<T: Element>(group: &ProcessGroup, len: usize, number: fn(u8) -> T) -> Result<(), Error> {
    let (world, rank) = (group.world(), group.rank());
    let mine = |rank: usize, len: usize| -> Vec<T> {
        (0..len).map(|i| number(((i * 31 + rank * 17) % 5) as u8)).collect()
    };
    let total = |i: usize| (0..world).map(|r| ((i * 31 + r * 17) % 5) as u8).sum();
    let sum = group.all_reduce(mine(rank, len), ReduceOp::Sum);
    let parts = group.all_gather_uneven(mine(rank, len + rank));
    let root = group.broadcast(mine(rank, len), world - 1);
    assert!(sum.wait()? == (0..len).map(|i| number(total(i))).collect::<Vec<T>>());
    for (from, part) in parts.wait()?.iter().enumerate() {
        assert!(*part == mine(from, len + from), "what rank {from} brought");
    }
    assert!(root.wait()? == mine(world - 1, len));
    Ok(())
}

#[test]
fn collectives_between_processes_equal_the_scalar_reference() {
    for world in [2, 3, 4] {
        let mut ranks = Start { world, within: vec![vec![]; world], ..Start::new("grid") }.run();
        ranks.wait_until_all_are_ready();
        for rank in 0..world {
            assert_eq!(ranks.end(rank), "done", "rank {rank} of {world}");
        }
    }
}

#[test]
fn a_killed_rank_ends_all_others_at_once() {
    let mut ranks = Start::new("loop").run();
    ranks.wait_until_all_are_ready();
    ranks.signal(1, Signal::SIGKILL);
    for rank in [0, 2] {
        let end = ranks.end(rank);
        assert!(end.starts_with("rank 1 failed: its connection to rank"), "{end}");
        assert!(end.contains("all_reduce(sum) #") && end.contains("100000 f32"), "{end}");
    }
}

#[test]
fn a_stopped_rank_is_noticed_by_its_silence() {
    let mut ranks = Start { heartbeat_s: 10.0, ..Start::new("loop") }.run();
    ranks.wait_until_all_are_ready();
    ranks.signal(1, Signal::SIGSTOP);
    for rank in [0, 2] {
        let end = ranks.end(rank);
        assert!(end.starts_with("rank 1 failed: rank"), "{end}");
        assert!(end.contains("heard nothing from it for 10s"), "{end}");
    }
    // Woken up again, it learns that the others have given it up.
    ranks.signal(1, Signal::SIGCONT);
    let end = ranks.end(1);
    assert!(end.contains("failed:"), "{end}");
}

#[test]
fn a_slow_rank_is_waited_for() {
    let mut ranks = Start { heartbeat_s: 8.0, ..Start::new("slow") }.run();
    ranks.wait_until_all_are_ready();
    for rank in 0..WORLD {
        assert_eq!(ranks.end(rank), "done");
    }
}

#[test]
fn ranks_in_different_collectives_all_get_both_descriptions() {
    for (scenario, mine, theirs) in [
        ("other operation", "all_reduce(sum) #1 of 6 f32", "all_gather #1 of 6 f32"),
        ("other dtype", "all_reduce(sum) #1 of 6 f32", "all_reduce(sum) #1 of 6 i32"),
        ("other size", "all_reduce(sum) #1 of 6 f32", "all_reduce(sum) #1 of 7 f32"),
        ("other reduction", "all_reduce(sum) #1 of 6 f32", "all_reduce(max) #1 of 6 f32"),
    ] {
        let mut ranks = Start::new(scenario).run();
        ranks.wait_until_all_are_ready();
        for rank in 0..WORLD {
            let end = ranks.end(rank);
            assert!(end.contains(mine) && end.contains(theirs), "{scenario}, rank {rank}: {end}");
        }
    }
}

#[test]
fn a_rank_that_calls_fewer_collectives_is_named_when_it_leaves() {
    let mut ranks = Start::new("fewer calls").run();
    ranks.wait_until_all_are_ready();
    assert_eq!(ranks.end(1), "done");
    for rank in [0, 2] {
        let end = ranks.end(rank);
        assert!(end.contains("rank 1 has left the group"), "{end}");
        assert!(end.contains("all_reduce(sum) #1 of 6 f32"), "{end}");
    }
}

/// Two hosts of their own, with a cable between them.
struct Hosts {
    names: [String; 2],
}

impl Hosts {
    const ADDRESSES: [&str; 2] = ["10.99.0.1", "10.99.0.2"];

    /// What is missing, where there can be none.
    fn new() -> Result<Self, String> {
        let pid = std::process::id();
        let hosts = Self { names: [0, 1].map(|host| format!("pyroclast-{pid}-{host}")) };
        let [a, b] = &hosts.names;
        let [first, second] = Self::ADDRESSES;
        let (here, there) = (format!("pa{pid}"), format!("pb{pid}"));
        for command in [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add {here} type veth peer name {there}"),
            format!("link set {here} netns {a} name cable"),
            format!("link set {there} netns {b} name cable"),
            format!("-n {a} address add {first}/24 dev cable"),
            format!("-n {b} address add {second}/24 dev cable"),
            format!("-n {a} link set cable up"),
            format!("-n {b} link set cable up"),
        ] {
            ip(&command)?;
        }
        Ok(hosts)
    }

    fn unplug(&self) {
        ip(&format!("-n {} link set cable down", self.names[1])).expect("a cable");
    }

    /// The command that runs another on one of the hosts.
    fn on(&self, host: usize) -> Vec<String> {
        ["ip", "netns", "exec", &self.names[host]].map(str::to_owned).to_vec()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&format!("netns delete {name}"));
        }
    }
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip")
        .args(arguments.split(' '))
        .output()
        .map_err(|error| format!("the command `ip`: {error}"))?;
    let problem = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(format!("`ip {arguments}`: {problem}")) }
}

#[test]
fn ranks_on_two_hosts_notice_that_the_cable_is_out() {
    let hosts = match Hosts::new() {
        Ok(hosts) => hosts,
        Err(reason) => {
            let test = "ranks_on_two_hosts_notice_that_the_cable_is_out";
            let _ = writeln!(std::io::stderr(), "SKIP {test}: {reason}");
            return;
        }
    };
    let mut ranks = Start {
        scenario: "loop",
        world: 2,
        master: format!("{}:29511", Hosts::ADDRESSES[0]),
        heartbeat_s: 10.0,
        within: vec![hosts.on(0), hosts.on(1)],
    }
    .run();
    ranks.wait_until_all_are_ready();
    hosts.unplug();
    for (rank, other) in [(0, 1), (1, 0)] {
        let end = ranks.end(rank);
        assert!(
            end.starts_with(&format!("rank {other} failed: rank {rank} heard nothing")),
            "{end}"
        );
    }
}
