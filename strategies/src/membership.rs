//! Who belongs to a job: ranks that know its secret.
//!
//! A connection begins with a [`handshake`] in which both sides prove that they know the
//! secret without sending it; what follows on control connections is a channel whose
//! messages are keyed by that handshake. All hashing is BLAKE3's keyed mode and key derivation.

pub(crate) mod channel;
pub(crate) mod dial;
pub(crate) mod door;
pub mod handshake;

use std::fmt;
use std::sync::Arc;

use crate::error::Error;

/// What all ranks of a job know and nobody else does.
#[derive(Clone, PartialEq, Eq)]
pub struct JobSecret {
    key: Arc<[u8; 32]>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Secret,
    Open,
}

impl JobSecret {
    /// Fewest bytes of a secret.
    pub const MIN_BYTES: usize = 16;

    /// The secret that these bytes are.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if there are fewer than [`Self::MIN_BYTES`].
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self, Error> {
        let bytes = bytes.as_ref();
        if bytes.len() < Self::MIN_BYTES {
            return Err(Error::Setting(format!(
                "a job secret of {} bytes is too short, it needs {} or more; one is made by \
                 `head -c 32 /dev/urandom | base64`",
                bytes.len(),
                Self::MIN_BYTES
            )));
        }
        let key = blake3::derive_key("pyroclast 2026-11 job secret", bytes);
        Ok(Self { key: Arc::new(key), kind: Kind::Secret })
    }

    /// No secret: whoever reaches the address may join. Only for addresses of this machine.
    #[must_use]
    pub fn open() -> Self {
        let key = blake3::derive_key("pyroclast 2026-11 job without a secret", &[]);
        Self { key: Arc::new(key), kind: Kind::Open }
    }

    /// Whether anybody may join.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.kind == Kind::Open
    }

    fn hash(&self, purpose: &str, parts: &[&[u8]]) -> blake3::Hash {
        keyed(&self.key, purpose, parts)
    }
}

/// A keyed hash of parts of fixed length.
fn keyed(key: &[u8; 32], purpose: &str, parts: &[&[u8]]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(purpose.as_bytes());
    parts.iter().for_each(|part| {
        hasher.update(part);
    });
    hasher.finalize()
}

impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobSecret({:?})", self.kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_secrets_are_refused_and_none_is_shown() {
        let error = JobSecret::new("fifteen letters").expect_err("too short").to_string();
        assert!(error.contains("15 bytes") && error.contains("16 or more"), "{error}");
        let secret = JobSecret::new("sixteen letters!").expect("long enough");
        assert_eq!(format!("{secret:?}"), "JobSecret(Secret)");
        assert_ne!(secret, JobSecret::open());
    }
}
