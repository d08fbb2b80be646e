//! Where ranks find each other: a few small values under names, each written once.

pub mod file;
pub mod memory;
pub mod tcp;

use std::time::{Duration, Instant};

use crate::error::Error;

pub use file::FileStore;
pub use memory::MemoryStore;
pub use tcp::TcpStore;

/// Longest name in bytes.
pub const MAX_NAME: usize = 256;
/// Longest value in bytes.
pub const MAX_VALUE: usize = 16 << 10;

/// A rank that cannot join leaves its reason under this name, so that no other waits for it.
pub(crate) const FAILURE: &str = "failure";

/// Values that ranks leave for each other while they join. All ranks of a job use one store.
pub trait Store: Send + Sync + std::fmt::Debug {
    /// Writes a value.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if the name has one already, [`Error::Membership`] if the store is gone.
    fn set(&self, name: &str, value: &[u8]) -> Result<(), Error>;

    /// Reads a value, and waits for it until the deadline.
    ///
    /// # Errors
    ///
    /// [`Error::Membership`] if there is none at the deadline, a rank has [failed](Store::fail), or the
    /// store is gone.
    fn get(&self, name: &str, deadline: Instant) -> Result<Vec<u8>, Error>;

    /// Why a rank cannot join, if one has [failed](Store::fail).
    ///
    /// # Errors
    ///
    /// [`Error::Membership`] if the store is gone.
    fn failure(&self) -> Result<Option<String>, Error>;

    /// Ends the wait of all ranks with the reason why this one cannot join.
    fn fail(&self, rank: usize, reason: &str) {
        let mut reason = format!("rank {rank} failed while joining: {reason}");
        let end = (0..=MAX_VALUE.min(reason.len())).rev().find(|end| reason.is_char_boundary(*end));
        reason.truncate(end.unwrap_or(0));
        // Only the first reason counts, and a store that is gone has no readers.
        let _ = self.set(FAILURE, reason.as_bytes());
    }
}

fn check(name: &str, value: &[u8]) -> Result<(), Error> {
    let legal = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '/';
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(legal) {
        let rule = format!("1 to {MAX_NAME} letters, digits, dashes and slashes");
        return Err(Error::Membership(format!("`{name}` is no name for a value, it takes {rule}")));
    }
    if value.len() > MAX_VALUE {
        let len = value.len();
        let problem = format!("`{name}` has {len} bytes, the store takes {MAX_VALUE} or fewer");
        return Err(Error::Membership(problem));
    }
    Ok(())
}

fn taken(name: &str) -> Error {
    Error::Setting(match name.strip_prefix("address/") {
        Some(rank) => {
            format!("rank {rank} has joined already; RANK must be different on each process")
        }
        None => format!("`{name}` has a value already"),
    })
}

fn absent(name: &str, waited: Duration) -> Error {
    let what = match name.strip_prefix("address/").or(name.strip_prefix("ready/")) {
        Some(rank) => format!("rank {rank} did not join"),
        None => format!("nobody set `{name}`"),
    };
    Error::Membership(format!("{what} within {waited:.0?}"))
}

fn failed(reason: &[u8]) -> Error {
    Error::Membership(text(reason))
}

fn text(reason: &[u8]) -> String {
    String::from_utf8_lossy(reason).into_owned()
}

#[cfg(test)]
mod tests;
