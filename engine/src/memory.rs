//! What ranks hold, by category: all of them at one moment, and one of them over one step.

use std::collections::BTreeMap;
use std::fs;

use pyroclast_strategies::ProcessGroup;
use pyroclast_strategies::memory::{Category, Ledger, Sample};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::output::RunFolder;

/// Key of [`MemoryByRank::peak`] for all categories together.
pub(crate) const TOTAL: &str = "total";

/// Number of categories.
const CATEGORIES: usize = Category::ALL.len();

/// What a rank brings to [`gather`]: live bytes, their peaks, and the peak of their sum.
const NUMBERS: usize = 2 * CATEGORIES + 1;

/// Seconds that no step lasts.
const NEVER: f64 = 1e9;

/// Bytes by category, one number per rank in rank order. Categories have the names of [`Category`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryByRank {
    /// What is held.
    pub live: BTreeMap<String, Vec<u64>>,
    /// The most that was held since the step began, each category at a moment of its own; and as
    /// `total` the largest sum of all categories at one moment.
    pub peak: BTreeMap<String, Vec<u64>>,
}

/// What one rank held over one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMemory {
    /// The optimizer step, counted from 1.
    pub step: u64,
    /// The rank.
    pub rank: usize,
    /// What was held, from moment to moment, in order of time.
    pub samples: Vec<MemorySample>,
}

/// What a rank held from one moment on, until the next sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemorySample {
    /// Seconds since the step began.
    pub seconds: f64,
    /// Bytes of each category, in the order of [`Category::ALL`].
    pub bytes: [u64; CATEGORIES],
}

impl From<Sample> for MemorySample {
    fn from(sample: Sample) -> Self {
        Self { seconds: sample.seconds, bytes: sample.live.into() }
    }
}

/// Tells every rank what each of them holds, and held at most since its step began. All ranks of the
/// group call this at the same place.
///
/// # Errors
///
/// [`Error::Strategy`].
pub(crate) fn gather(ledger: &Ledger, group: &ProcessGroup) -> Result<MemoryByRank, Error> {
    let (live, peak) = (ledger.live(), ledger.peak());
    let live: [u64; CATEGORIES] = live.into();
    let by_category: [u64; CATEGORIES] = peak.by_category.into();
    let own = live.into_iter().chain(by_category).chain([peak.total]);
    let mut buffer = vec![0; group.world() * NUMBERS];
    for (place, bytes) in buffer[group.rank() * NUMBERS..].iter_mut().zip(own) {
        *place = bytes as i64;
    }
    let all = group.all_gather(buffer).wait()?;
    let mut peak = by_name(&all, CATEGORIES);
    peak.insert(TOTAL.to_owned(), column(&all, 2 * CATEGORIES));
    Ok(MemoryByRank { live: by_name(&all, 0), peak })
}

/// The columns of the categories, of which the first is column `first`.
fn by_name(all: &[i64], first: usize) -> BTreeMap<String, Vec<u64>> {
    let named =
        |(at, category): (usize, Category)| (category.name().to_owned(), column(all, first + at));
    Category::ALL.into_iter().enumerate().map(named).collect()
}

/// Every rank's number at one place.
fn column(all: &[i64], place: usize) -> Vec<u64> {
    all.iter().skip(place).step_by(NUMBERS).map(|&bytes| bytes as u64).collect()
}

/// Writes `memory.json` into a run's folder.
///
/// # Errors
///
/// [`Error::Io`].
pub(crate) fn write(folder: &RunFolder, memory: &StepMemory) -> Result<(), Error> {
    let path = folder.memory();
    serde_json::to_string(memory)
        .map_err(std::io::Error::from)
        .and_then(|text| fs::write(&path, text + "\n"))
        .map_err(Error::io("writing", path))
}

/// Reads `memory.json` of a run's folder, if there is one.
///
/// # Errors
///
/// [`Error::Io`]; [`Error::BadFile`] if it is not what [`write`] writes.
pub(crate) fn read(folder: &RunFolder) -> Result<Option<StepMemory>, Error> {
    let path = folder.memory();
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("reading", path)(error)),
    };
    let memory: StepMemory =
        serde_json::from_str(&text).map_err(|error| Error::bad_file(&path, error))?;
    let samples = &memory.samples;
    if !samples.iter().all(|sample| (0.0..NEVER).contains(&sample.seconds))
        || !samples.is_sorted_by(|a, b| a.seconds <= b.seconds)
    {
        return Err(Error::bad_file(path, "its samples are not in order of time"));
    }
    Ok(Some(memory))
}

#[cfg(test)]
mod tests {
    use pyroclast_strategies::GroupOptions;

    use super::*;
    use crate::ranks;

    fn folder() -> (tempfile::TempDir, RunFolder) {
        let folder = tempfile::tempdir().expect("a folder");
        let run = RunFolder::at(folder.path());
        (folder, run)
    }

    #[test]
    fn a_step_survives_its_file() {
        let (_folder, run) = folder();
        assert_eq!(read(&run).expect("no file is no error"), None);
        let sample = |seconds, bytes| MemorySample { seconds, bytes };
        let samples =
            vec![sample(0.0, [0, 1, 2, 3, 4, u64::MAX]), sample(0.1, [5; 6]), sample(0.1, [6; 6])];
        let memory = StepMemory { step: 3, rank: 0, samples };
        write(&run, &memory).expect("a file");
        assert_eq!(read(&run).expect("the file"), Some(memory));
    }

    #[test]
    fn a_damaged_file_is_refused() {
        let (_folder, run) = folder();
        let sample = |seconds: &str| format!(r#"{{"seconds":{seconds},"bytes":[1,2,3,4,5,6]}}"#);
        let file = |first: &str, second: &str| {
            let samples = [first, second].map(sample).join(",");
            format!(r#"{{"step":1,"rank":0,"samples":[{samples}]}}"#)
        };
        let whole = file("1", "2");
        fs::write(run.memory(), &whole).expect("a file");
        assert!(read(&run).is_ok());
        let torn = whole[..whole.len() - 9].to_owned();
        for damaged in [torn, file("2", "1"), file("-1", "2"), file("1", "1e300")] {
            fs::write(run.memory(), &damaged).expect("a file");
            let outcome = read(&run);
            assert!(matches!(outcome, Err(Error::BadFile { .. })), "{damaged}: {outcome:?}");
        }
    }

    #[test]
    fn every_rank_learns_what_each_holds() {
        let hold = |group: std::sync::Arc<ProcessGroup>, rank: usize| {
            let ledger = Ledger::default();
            let _state = ledger.hold(Category::Optimizer, 100 * (rank + 1));
            drop(ledger.hold(Category::Communication, 10 * rank));
            gather(&ledger, &group)
        };
        let ranks = ranks::run(3, &GroupOptions::default(), |rank| rank, hold);
        for memory in ranks.expect("no rank fails") {
            assert_eq!(memory.live.len(), CATEGORIES);
            assert_eq!(memory.live["optimizer"], [100, 200, 300]);
            assert_eq!(memory.live["communication"], [0, 0, 0]);
            assert_eq!(memory.peak.len(), CATEGORIES + 1);
            assert_eq!(memory.peak["optimizer"], [100, 200, 300]);
            assert_eq!(memory.peak["communication"], [0, 10, 20]);
            assert_eq!(memory.peak[TOTAL], [100, 210, 320]);
        }
    }
}
