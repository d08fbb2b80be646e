//! TensorBoard's event files: records framed as TensorFlow's TFRecord, each a protocol buffer `Event`.
//!
//! There is no maintained crate for them, and what scalars need of the format is little:
//!
//! ```text
//! record   length u64 | masked CRC-32C of it u32 | event | masked CRC-32C of that u32
//! Event    1: wall_time double | 2: step int64 | 3: file_version string | 5: Summary
//! Summary  1: Value { 1: tag string | 2: simple_value float }
//! ```

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::{Monitor, Point};

/// An event file.
pub(super) struct EventFile {
    file: File,
    path: PathBuf,
}

impl EventFile {
    /// Creates a file of a name that no other run has.
    pub(super) fn create(folder: &Path) -> io::Result<Self> {
        let now = since_epoch();
        let process = std::process::id();
        let (path, file) = (0..)
            .map(|number| {
                folder.join(format!("events.out.tfevents.{:010}.{process}.{number}", now as u64))
            })
            .find_map(|path| match File::create_new(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
                created => Some(created.map(|file| (path, file))),
            })
            .expect("some number should be free")?;
        let mut this = Self { file, path };
        let version = bytes_field(3, b"brain.Event:2");
        this.append(&[double_field(1, now), version].concat())?;
        Ok(this)
    }

    fn append(&mut self, event: &[u8]) -> io::Result<()> {
        let length = (event.len() as u64).to_le_bytes();
        let record = [&length[..], &masked_crc(&length), event, &masked_crc(event)].concat();
        self.file.write_all(&record)
    }
}

impl Monitor for EventFile {
    fn write(&mut self, points: &[Point]) -> io::Result<()> {
        let now = since_epoch();
        for Point { name, samples, value } in points {
            let scalar = [bytes_field(1, name.as_bytes()), float_field(2, *value as f32)].concat();
            let summary = bytes_field(5, &bytes_field(1, &scalar));
            let step = [tag(2, 0), varint(*samples)].concat();
            self.append(&[double_field(1, now), step, summary].concat())?;
        }
        Ok(())
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

fn since_epoch() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A checksum that may itself lie in data that is checked.
fn masked_crc(data: &[u8]) -> [u8; 4] {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// A field's number and how its value is encoded.
fn tag(field: u64, wire: u64) -> Vec<u8> {
    varint(field << 3 | wire)
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = vec![];
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn double_field(field: u64, value: f64) -> Vec<u8> {
    [tag(field, 1), value.to_le_bytes().to_vec()].concat()
}

fn float_field(field: u64, value: f32) -> Vec<u8> {
    [tag(field, 5), value.to_le_bytes().to_vec()].concat()
}

fn bytes_field(field: u64, bytes: &[u8]) -> Vec<u8> {
    [tag(field, 2), varint(bytes.len() as u64), bytes.to_vec()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The payloads of a file's records, checked.
    fn records(bytes: &[u8]) -> Vec<Vec<u8>> {
        let (mut rest, mut records) = (bytes, vec![]);
        while !rest.is_empty() {
            let (head, after) = rest.split_at(12);
            assert_eq!(head[8..], masked_crc(&head[..8]));
            let length = u64::from_le_bytes(head[..8].try_into().expect("8 bytes")) as usize;
            assert_eq!(after[length..length + 4], masked_crc(&after[..length]));
            records.push(after[..length].to_vec());
            rest = &after[length + 4..];
        }
        records
    }

    #[test]
    fn numbers_are_encoded_as_protocol_buffers_are() {
        assert_eq!(varint(300), [0xac, 0x02]);
        assert_eq!(bytes_field(2, b"testing"), b"\x12\x07testing");
        // The check value of CRC-32C.
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_file_begins_with_its_version_and_holds_every_point() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut file = EventFile::create(folder.path()).expect("a file");
        let other = EventFile::create(folder.path()).expect("another file");
        assert_ne!(file.path, other.path);
        file.write(&[Point { name: "a", samples: 300, value: 0.5 }]).expect("writing");
        let records = records(&std::fs::read(&file.path).expect("the file"));
        assert_eq!(records.len(), 2);
        assert_eq!(records[0][9..], *b"\x1a\x0dbrain.Event:2");
        let expected = b"\x10\xac\x02\x2a\x0a\x0a\x08\x0a\x01a\x15\x00\x00\x00\x3f";
        assert_eq!(records[1][9..], *expected);
    }
}
