//! One CSV file a curve, as DeepSpeed's `csv_monitor` writes them.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{Monitor, Point};

/// Files such as `Train_Samples_train_loss.csv`, of the columns `step` (samples) and the curve's name. Runs
/// that continue append to them.
pub(super) struct CsvFiles {
    folder: PathBuf,
}

impl CsvFiles {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }
}

impl Monitor for CsvFiles {
    fn write(&mut self, points: &[Point]) -> io::Result<()> {
        for Point { name, samples, value } in points {
            let path = self.folder.join(format!("{}.csv", name.replace('/', "_")));
            let mut file = OpenOptions::new().create(true).append(true).open(path)?;
            let header = name.rsplit('/').next().unwrap_or(name);
            let is_new = file.metadata()?.len() == 0;
            let header = if is_new { format!("step,{header}\n") } else { String::new() };
            file.write_all(format!("{header}{samples},{value}\n").as_bytes())?;
        }
        Ok(())
    }

    fn path(&self) -> &Path {
        &self.folder
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_a_file_with_one_header() {
        let folder = tempfile::tempdir().expect("a folder");
        for samples in [8, 16] {
            let mut files = CsvFiles::new(folder.path().to_owned());
            let point = Point { name: "Train/Samples/lr", samples, value: 0.5 };
            files.write(&[point]).expect("writing");
        }
        let text = std::fs::read_to_string(folder.path().join("Train_Samples_lr.csv"));
        assert_eq!(text.expect("a file"), "step,lr\n8,0.5\n16,0.5\n");
    }
}
