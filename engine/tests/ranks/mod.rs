//! What the tests of jobs of several processes share.
#![allow(unreachable_pub, reason = "a module of each test")]

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

pub const TINY: [&str; 9] = [
    "train",
    "--layers=1",
    "--heads=2",
    "--width=16",
    "--context=8",
    "--batch-size=2",
    "--max-steps=3",
    "--limit-val-batches=1",
    "--seed=1",
];

/// A port that was free a moment ago.
pub fn port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port().to_string()
}

pub fn pyroclast(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pyroclast"));
    command.args(args).current_dir(folder).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub fn train<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&TINY[..], args].concat()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What a run computed in each step, without what depends on the machine's mood.
pub fn rows(run: &Path) -> Vec<Value> {
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let row = |line: &str| {
        let row: Value = serde_json::from_str(line).expect("a row");
        ["step", "split", "loss", "grad_norm", "tokens"].map(|key| row[key].clone()).into()
    };
    metrics.lines().map(row).collect()
}
