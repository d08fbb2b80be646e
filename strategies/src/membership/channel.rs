//! Small messages between two members. Each is keyed and numbered by its place in the stream, so none
//! can be forged, changed, repeated, left out or reordered unnoticed.
//!
//! ```text
//! length u32 | tag = H(key, number u64, length, body), 32 bytes | body
//! ```

use std::io::{self, Read, Write};

use super::keyed;

/// Longest body in bytes.
pub(crate) const MAX_BODY: usize = 1 << 16;
const TAG: usize = 32;
const HEAD: usize = 4 + TAG;

/// One direction of a channel: the key, and how many messages have passed.
#[derive(Clone)]
pub(crate) struct Direction {
    key: [u8; 32],
    number: u64,
}

impl std::fmt::Debug for Direction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Direction(message {})", self.number)
    }
}

impl Direction {
    pub(crate) fn new(key: [u8; 32]) -> Self {
        Self { key, number: 0 }
    }

    /// Writes a message.
    pub(crate) fn write(&mut self, stream: &mut impl Write, body: &[u8]) -> io::Result<()> {
        if body.len() > MAX_BODY {
            let problem = format!("a message of {} bytes; the limit is {MAX_BODY}", body.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        let length = (body.len() as u32).to_le_bytes();
        // One write, so that it is one packet.
        let mut message = Vec::with_capacity(HEAD + body.len());
        message.extend_from_slice(&length);
        message.extend_from_slice(self.tag(&length, body).as_bytes());
        message.extend_from_slice(body);
        self.number += 1;
        stream.write_all(&message)
    }

    /// Reads a message. A stream that ends between two messages is [`io::ErrorKind::UnexpectedEof`].
    pub(crate) fn read(&mut self, stream: &mut impl Read) -> io::Result<Vec<u8>> {
        let mut head = [0; HEAD];
        stream.read_exact(&mut head)?;
        let (length, tag) = head.split_at(4);
        let len = length.try_into().map_or(usize::MAX, |bytes| u32::from_le_bytes(bytes) as usize);
        if len > MAX_BODY {
            return Err(damaged("its length is out of range"));
        }
        let mut body = vec![0; len];
        stream.read_exact(&mut body)?;
        let tag: [u8; TAG] = tag.try_into().unwrap_or_default();
        // Compares in constant time.
        if self.tag(length, &body) != blake3::Hash::from_bytes(tag) {
            return Err(damaged("its tag is wrong"));
        }
        self.number += 1;
        Ok(body)
    }

    fn tag(&self, length: &[u8], body: &[u8]) -> blake3::Hash {
        keyed(&self.key, "message", &[&self.number.to_le_bytes(), length, body])
    }
}

fn damaged(problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a damaged control message: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directions() -> (Direction, Direction) {
        (Direction::new([7; 32]), Direction::new([7; 32]))
    }

    fn written(bodies: &[&[u8]]) -> Vec<u8> {
        let (mut writer, _) = directions();
        let mut wire = Vec::new();
        bodies.iter().for_each(|body| writer.write(&mut wire, body).expect("a message"));
        wire
    }

    #[test]
    fn messages_arrive_in_order() {
        let wire = written(&[b"one", b"", b"three"]);
        let (_, mut reader) = directions();
        let mut wire = &wire[..];
        for expected in [&b"one"[..], b"", b"three"] {
            assert_eq!(reader.read(&mut wire).expect("a message"), expected);
        }
        let end = reader.read(&mut wire).expect_err("the end");
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn every_flipped_bit_and_every_repeated_message_is_noticed() {
        let wire = written(&[b"body"]);
        for bit in 0..wire.len() * 8 {
            let mut damaged = wire.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let (_, mut reader) = directions();
            assert!(reader.read(&mut &damaged[..]).is_err(), "bit {bit}");
        }
        let twice = [&wire[..], &wire[..]].concat();
        let (_, mut reader) = directions();
        let mut twice = &twice[..];
        reader.read(&mut twice).expect("the first");
        assert!(reader.read(&mut twice).is_err(), "a repetition");
    }

    #[test]
    fn a_length_out_of_range_is_refused_before_anything_is_read() {
        let mut wire = written(&[b"body"]);
        wire[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        let (_, mut reader) = directions();
        let error = reader.read(&mut &wire[..]).expect_err("4 GiB").to_string();
        assert!(error.contains("out of range"), "{error}");
    }
}
