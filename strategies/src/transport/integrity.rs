//! How a damaged frame is noticed.

/// How frames between processes are checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Integrity {
    /// [`Integrity::Crc`] between addresses of this machine, [`Integrity::Keyed`] beyond it.
    #[default]
    Auto,
    /// CRC-32: against accidents. What the network changes on purpose is not noticed.
    Crc,
    /// BLAKE3 with a key that only the two ends of a connection know: against anybody.
    Keyed,
}

impl Integrity {
    /// The choice for a connection.
    #[must_use]
    pub fn resolve(self, is_local: bool) -> Self {
        match self {
            Self::Auto if is_local => Self::Crc,
            Self::Auto => Self::Keyed,
            chosen => chosen,
        }
    }
}

/// Makes and checks the tags of one direction of a connection.
#[derive(Clone)]
pub struct Seal(Kind);

#[derive(Clone)]
enum Kind {
    Crc,
    /// A key for each part, so that no part can pass for the other.
    Keyed {
        header: [u8; 32],
        payload: [u8; 32],
    },
}

/// What is tagged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Header,
    Payload,
}

/// Bytes of a tag.
pub const TAG_BYTES: usize = 32;

impl Seal {
    /// CRC-32.
    #[must_use]
    pub fn crc() -> Self {
        Self(Kind::Crc)
    }

    /// BLAKE3 with a key.
    #[must_use]
    pub fn keyed(key: [u8; 32]) -> Self {
        let of = |part: &[u8]| *blake3::keyed_hash(&key, part).as_bytes();
        Self(Kind::Keyed { header: of(b"header"), payload: of(b"payload") })
    }

    /// The tag of a part's bytes. Tags compare in constant time.
    pub(crate) fn tag(&self, part: Part, bytes: &[u8]) -> blake3::Hash {
        match (&self.0, part) {
            (Kind::Keyed { header, .. }, Part::Header) => blake3::keyed_hash(header, bytes),
            (Kind::Keyed { payload, .. }, Part::Payload) => blake3::keyed_hash(payload, bytes),
            (Kind::Crc, _) => {
                let mut tag = [0; TAG_BYTES];
                tag[..4].copy_from_slice(&crc32fast::hash(bytes).to_le_bytes());
                blake3::Hash::from_bytes(tag)
            }
        }
    }
}

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0 {
            Kind::Crc => "Seal(crc)",
            Kind::Keyed { .. } => "Seal(keyed)",
        })
    }
}
