//! `pyroclast bench`.

mod collectives;

use std::ffi::OsString;

use clap::{Args, Subcommand};
use pyroclast::Error;

use crate::misuse;

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Debug, Subcommand)]
enum Subject {
    /// Time collectives between ranks, on this machine or several.
    Collectives(collectives::CollectivesArgs),
    /// Subjects of later versions.
    #[command(external_subcommand)]
    Other(Vec<OsString>),
}

/// Subjects that later versions have.
const NOT_YET: [&str; 2] = ["kernels", "offload"];

impl BenchArgs {
    pub(crate) fn run(&self) -> Result<(), Error> {
        match &self.subject {
            Subject::Collectives(args) => args.run(),
            Subject::Other(words) => {
                let name = words.first().map(|word| word.to_string_lossy()).unwrap_or_default();
                let what = match NOT_YET.contains(&&*name) {
                    true => format!("`bench {name}` is not in this version"),
                    false => format!("unknown subject `{name}`"),
                };
                Err(misuse("bench", format!("{what}; there is collectives")))
            }
        }
    }
}
