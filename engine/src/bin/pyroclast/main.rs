//! The `pyroclast` command.
//!
//! Exit codes: 0 for success, 2 for what other input would avoid, 1 for any other failure.

mod args;
mod bench;
mod checkpoint;
mod console;
mod generate;
mod processes;
mod progress;
mod settings;
mod train;

use std::process::ExitCode;

/// A training step allocates and frees the same large buffers over and over. The system's allocator
/// hands them back to the kernel each time, which then has to clear and map them again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

use args::Command;
use pyroclast::{Error, environment};

fn main() -> ExitCode {
    let outcome = args::parse(std::env::args_os()).and_then(|command| match command {
        Command::Help(text) => {
            console::say(text.trim_end());
            Ok(())
        }
        Command::Train(args) => train::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Doctor(args) => args.run(),
        Command::Bench(args) => args.run(),
        Command::Checkpoint(args) => args.run(),
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            console::complain(&error, environment::variable("RANK").as_deref());
            ExitCode::from(if error.is_misuse() { 2 } else { 1 })
        }
    }
}

/// A mistake in the command line.
fn misuse(setting: &str, problem: impl Into<String>) -> Error {
    Error::setting(setting, problem)
}
