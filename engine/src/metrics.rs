//! What a run says about each step, and the file that it is appended to.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::memory::MemoryByRank;

/// Which data a row speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// An optimizer step.
    Train,
    /// A validation after that step.
    Val,
}

/// One row of `metrics.jsonl`. What does not apply to a row is null.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Metrics {
    /// Optimizer step, counted from 1.
    pub step: u64,
    /// Epoch of the step's last sample, counted from 0.
    pub epoch: u64,
    /// Training or validation.
    pub split: Split,
    /// Mean over all samples of all ranks.
    pub loss: Option<f64>,
    /// Global norm of the averaged gradient, before clipping.
    pub grad_norm: Option<f64>,
    /// Learning rate of the step.
    pub lr: Option<f64>,
    /// Loss scale; null where the precision has none.
    pub loss_scale: Option<f64>,
    /// Whether the step was skipped because gradients overflowed.
    pub skipped: bool,
    /// Tokens trained on since the run began, on all ranks.
    pub tokens: u64,
    /// Tokens per second of this step, on all ranks, without validation and saving.
    pub tokens_per_s: Option<f64>,
    /// Duration of the step in milliseconds.
    pub step_ms: Option<f64>,
    /// Largest resident set of this process so far.
    pub peak_rss_bytes: Option<u64>,
    /// Largest device memory in use at the end of a step so far; null on the CPU.
    pub peak_device_bytes: Option<u64>,
    /// Bytes that the engine holds on each rank, by what they are for; null in rows of validation.
    pub memory: Option<MemoryByRank>,
    /// Metrics named by the task; null where one is not finite.
    #[serde(flatten)]
    pub named: BTreeMap<String, Option<f64>>,
}

impl Metrics {
    /// Keys of a row, apart from the task's own.
    pub(crate) const KEYS: [&str; 14] = [
        "step",
        "epoch",
        "split",
        "loss",
        "grad_norm",
        "lr",
        "loss_scale",
        "skipped",
        "tokens",
        "tokens_per_s",
        "step_ms",
        "peak_rss_bytes",
        "peak_device_bytes",
        "memory",
    ];
}

/// `metrics.jsonl`, open for appending.
#[derive(Debug)]
pub(crate) struct MetricsFile {
    path: PathBuf,
    file: File,
}

impl MetricsFile {
    /// Opens the file and cuts off what was logged after `step`, which a resumed run will log again.
    pub(crate) fn open(path: &Path, step: u64) -> Result<Self, Error> {
        let kept: u64 = read_lines(path)?
            .iter()
            .take_while(|line| line.row.step <= step)
            .map(|line| line.len)
            .sum();
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(Error::io("opening", path))?;
        file.set_len(kept).map_err(Error::io("cutting back", path))?;
        Ok(Self { path: path.to_owned(), file })
    }

    pub(crate) fn append(&mut self, row: &Metrics) -> Result<(), Error> {
        write_row(&mut self.file, row).map_err(Error::io("writing", &self.path))
    }
}

/// A row, and the bytes of its line.
struct Line {
    row: Metrics,
    len: u64,
}

/// Rows of a metrics file; none if it does not exist. A last line that a crash cut short is left out.
pub(crate) fn read(path: &Path) -> Result<Vec<Metrics>, Error> {
    Ok(read_lines(path)?.into_iter().map(|line| line.row).collect())
}

fn read_lines(path: &Path) -> Result<Vec<Line>, Error> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("reading", path)(error)),
    };
    // The last line may have been cut short by a crash.
    let whole = text.split_inclusive('\n').take_while(|line| line.ends_with('\n'));
    let parse = |(number, line): (usize, &str)| {
        let row = serde_json::from_str(line)
            .map_err(|error| Error::bad_file(path, format!("line {}: {error}", number + 1)))?;
        Ok(Line { row, len: line.len() as u64 })
    };
    whole.enumerate().map(parse).collect()
}

fn write_row(file: &mut File, row: &Metrics) -> std::io::Result<()> {
    let mut line = serde_json::to_string(row)?;
    line.push('\n');
    // One write per row: a reader sees whole lines.
    file.write_all(line.as_bytes())
}

/// Largest resident set of this process, in bytes; `None` where the system does not tell.
#[must_use]
pub fn peak_rss_bytes() -> Option<u64> {
    #[cfg(unix)]
    {
        use nix::sys::resource::{UsageWho, getrusage};
        let max = u64::try_from(getrusage(UsageWho::RUSAGE_SELF).ok()?.max_rss()).ok()?;
        // Apple counts bytes, everybody else KiB.
        Some(if cfg!(target_vendor = "apple") { max } else { max * 1024 })
    }
    #[cfg(not(unix))]
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: u64) -> Metrics {
        Metrics {
            step,
            epoch: 0,
            split: Split::Train,
            loss: Some(1.5),
            grad_norm: None,
            lr: Some(1e-3),
            loss_scale: None,
            skipped: false,
            tokens: step * 10,
            tokens_per_s: None,
            step_ms: None,
            peak_rss_bytes: Some(1 << 20),
            peak_device_bytes: None,
            memory: None,
            named: [("accuracy".to_owned(), Some(0.5)), ("perplexity".to_owned(), None)].into(),
        }
    }

    #[test]
    fn a_resumed_file_keeps_rows_up_to_its_step() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::open(&path, 0).expect("a new file");
        for step in 1..=5 {
            file.append(&row(step)).expect("a row");
        }
        OpenOptions::new()
            .append(true)
            .open(&path)
            .and_then(|mut f| f.write_all(b"{\"step\":6,\"ep"))
            .expect("a torn row");
        let mut file = MetricsFile::open(&path, 3).expect("the file again");
        file.append(&row(4)).expect("a row");
        let steps: Vec<u64> = read(&path).expect("rows").iter().map(|r| r.step).collect();
        assert_eq!(steps, [1, 2, 3, 4]);
        assert_eq!(read(&path).expect("rows")[0], row(1));
    }
}
