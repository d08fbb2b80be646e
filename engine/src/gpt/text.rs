//! Text as windows of bytes.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::data::sampler::Sampling;
use crate::data::{DataModule, Dataset, Loader};
use crate::error::{BoxError, Error};

/// The project's own documentation and sources: a text that needs no download.
const SHIPPED: &[&str] = &[
    include_str!("../../../README.md"),
    include_str!("../../../ARCHITECTURE.md"),
    include_str!("../../../CONTRIBUTING.md"),
    include_str!("../../../strategies/src/lib.rs"),
    include_str!("../../../strategies/src/shard.rs"),
    include_str!("../../../strategies/src/layout.rs"),
    include_str!("../../../strategies/src/unit.rs"),
    include_str!("../../../strategies/src/unit/tape.rs"),
    include_str!("../../../strategies/src/buckets.rs"),
    include_str!("../../../strategies/src/optimizer.rs"),
    include_str!("../../../strategies/src/data_parallel.rs"),
    include_str!("../../../strategies/src/group.rs"),
    include_str!("../../../strategies/src/collectives/plan.rs"),
    include_str!("../../../strategies/src/collectives/executor.rs"),
    include_str!("../../../strategies/src/transport/memory.rs"),
    include_str!("../../../kernels/src/lib.rs"),
    include_str!("../../../kernels/src/gradient.rs"),
    include_str!("../../../kernels/src/optimizer/adamw.rs"),
    include_str!("../../../kernels/src/optimizer/sgd.rs"),
    include_str!("../../../precision/src/verdict.rs"),
    include_str!("../checkpoint.rs"),
    include_str!("../config.rs"),
    include_str!("../data.rs"),
    include_str!("../data/loader.rs"),
    include_str!("../data/sampler.rs"),
    include_str!("../device.rs"),
    include_str!("../error.rs"),
    include_str!("../metrics.rs"),
    include_str!("../output.rs"),
    include_str!("../plan.rs"),
    include_str!("../ranks.rs"),
    include_str!("../report.rs"),
    include_str!("../schedule.rs"),
    include_str!("../step.rs"),
    include_str!("../task.rs"),
    include_str!("../trainer.rs"),
    include_str!("../trainer/rank.rs"),
    include_str!("model.rs"),
    include_str!("task.rs"),
    include_str!("generate.rs"),
];

/// Windows of a text, of which the tail is held out.
#[derive(Clone, Debug)]
pub struct TextData {
    train: TextWindows,
    validation: Option<TextWindows>,
    batch_size: usize,
    sampling: Sampling,
}

/// A text cut into windows of `context` bytes, each with the bytes that follow.
#[derive(Clone, Debug)]
struct TextWindows {
    bytes: Arc<[u8]>,
    context: usize,
}

/// Windows of one batch: rows of `context + 1` bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    bytes: Vec<u8>,
    context: usize,
}

impl TextData {
    /// Cuts `bytes` into a training part and, with `val_split` above 0, a held-out tail.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if `val_split` is not in `0..1`, [`Error::Data`] if a part is shorter than
    /// one window.
    pub fn new(bytes: &[u8], context: usize, val_split: f64) -> Result<Self, Error> {
        if !(0.0..1.0).contains(&val_split) {
            let problem = format!("{val_split} is out of range; it must be at least 0 and below 1");
            return Err(Error::setting("val_split", problem));
        }
        let val_len = (bytes.len() as f64 * val_split).floor() as usize;
        let (train, validation) = bytes.split_at(bytes.len() - val_len);
        let windows = |part: &[u8], name: &str, advice: &str| {
            if part.len() > context {
                return Ok(TextWindows { bytes: part.into(), context });
            }
            let (len, need) = (part.len(), context + 1);
            Err(Error::Data(format!(
                "the {name} text has {len} bytes, but a context of {context} needs at least {need}; \
                 give more text, {advice}"
            )))
        };
        Ok(Self {
            train: windows(train, "training", "or lower --context")?,
            validation: match val_len {
                0 => None,
                _ => Some(windows(validation, "validation", "or change --val-split (0 for none)")?),
            },
            batch_size: 12,
            sampling: Sampling::Random,
        })
    }

    /// Sets the micro-batch per rank. 12 by default.
    #[must_use]
    pub fn with_batch_size(mut self, batch_size: usize) -> Self {
        self.batch_size = batch_size;
        self
    }

    /// Sets the order of the training windows. Random by default.
    #[must_use]
    pub fn with_sampling(mut self, sampling: Sampling) -> Self {
        self.sampling = sampling;
        self
    }

    /// Bytes of the training part.
    #[must_use]
    pub fn train_bytes(&self) -> &[u8] {
        &self.train.bytes
    }
}

/// The text that ships with the crate.
#[must_use]
pub fn shipped() -> Vec<u8> {
    SHIPPED.concat().into_bytes()
}

/// SHA-256 of a text, in hexadecimal digits.
#[must_use]
pub fn checksum(text: &[u8]) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a file, or the files of a folder in name order. Folders inside it are left out.
///
/// # Errors
///
/// [`Error::Config`] if something cannot be read, [`Error::Data`] if there is nothing in it.
pub fn read(path: &Path) -> Result<Vec<u8>, Error> {
    read_files(path).map_err(|error| match error {
        Error::Io { path, source, .. } => {
            Error::setting("data", format!("{}: {source}", path.display()))
        }
        other => other,
    })
}

fn read_files(path: &Path) -> Result<Vec<u8>, Error> {
    let bytes = if path.is_dir() {
        let entries = fs::read_dir(path).map_err(Error::io("reading", path))?;
        let mut files: Vec<PathBuf> = entries
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<_, _>>()
            .map_err(Error::io("reading", path))?;
        files.retain(|file| file.is_file());
        files.sort();
        let mut bytes = Vec::new();
        for file in files {
            bytes.extend(fs::read(&file).map_err(Error::io("reading", file))?);
        }
        bytes
    } else {
        fs::read(path).map_err(Error::io("reading", path))?
    };
    if bytes.is_empty() {
        let subfolders = if path.is_dir() { " (its subfolders are not read)" } else { "" };
        return Err(Error::Data(format!("{} holds no text{subfolders}", path.display())));
    }
    Ok(bytes)
}

impl Dataset for TextWindows {
    type Batch = Windows;

    fn len(&self) -> usize {
        (self.bytes.len() - 1) / self.context
    }

    fn batch(&self, indices: &[usize]) -> Result<Windows, BoxError> {
        let window = |&index: &usize| &self.bytes[index * self.context..][..self.context + 1];
        let rows: Vec<&[u8]> = indices.iter().map(window).collect();
        Ok(Windows { bytes: rows.concat(), context: self.context })
    }

    fn tokens_per_sample(&self) -> usize {
        self.context
    }
}

impl DataModule for TextData {
    type Batch = Windows;

    fn train(&self) -> Loader<Windows> {
        Loader::new(self.train.clone(), self.batch_size).with_sampling(self.sampling.clone())
    }

    fn validation(&self) -> Option<Loader<Windows>> {
        self.validation.clone().map(|windows| Loader::new(windows, self.batch_size))
    }
}

impl Windows {
    /// Number of windows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.bytes.len() / (self.context + 1)
    }

    /// Bytes of a window, without the last target.
    #[must_use]
    pub fn context(&self) -> usize {
        self.context
    }

    /// The bytes of all windows, and the bytes that follow each of them.
    #[must_use]
    pub fn split(&self) -> (Vec<i32>, Vec<i32>) {
        let rows = || self.bytes.chunks_exact(self.context + 1);
        let tokens = |row: &[u8]| row.iter().map(|byte| i32::from(*byte)).collect::<Vec<_>>();
        (
            rows().flat_map(|row| tokens(&row[..self.context])).collect(),
            rows().flat_map(|row| tokens(&row[1..])).collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_follow_each_other_and_targets_are_one_byte_later() {
        let text: Vec<u8> = (0..11).collect();
        let data = TextData::new(&text, 3, 0.0).expect("enough text");
        assert_eq!(data.train.len(), 3);
        let (inputs, targets) = data.train.batch(&[2, 0]).expect("a batch").split();
        assert_eq!(inputs, [6, 7, 8, 0, 1, 2]);
        assert_eq!(targets, [7, 8, 9, 1, 2, 3]);
    }

    #[test]
    fn the_last_target_must_exist() {
        for (len, windows) in [(4, 1), (6, 1), (7, 2), (9, 2), (10, 3)] {
            let data = TextData::new(&vec![0; len], 3, 0.0).expect("enough text");
            assert_eq!(data.train.len(), windows, "{len} bytes");
        }
        assert!(matches!(TextData::new(&[0; 3], 3, 0.0), Err(Error::Data(_))));
    }

    #[test]
    fn the_tail_is_held_out() {
        let text: Vec<u8> = (0..100).collect();
        let data = TextData::new(&text, 4, 0.155).expect("enough text");
        assert_eq!(data.train_bytes(), &text[..85]);
        assert_eq!(&*data.validation.expect("a held-out part").bytes, &text[85..]);
        assert!(TextData::new(&text, 4, 0.02).is_err(), "2 bytes hold no window");
        assert!(TextData::new(&text, 4, 1.0).is_err());
        assert!(TextData::new(&text, 4, 0.0).is_ok_and(|data| data.validation().is_none()));
    }
}
