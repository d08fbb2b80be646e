//! Curves for other programs to draw: CSV files and TensorBoard event files, under DeepSpeed's names.

mod csv;
mod tensorboard;

use std::fs;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use self::csv::CsvFiles;
use self::tensorboard::EventFile;
use crate::config::TrainerConfig;
use crate::error::Error;
use crate::metrics::{Metrics, Split};

/// Where a monitor writes: the folder `job_name` in `output_path`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MonitorConfig {
    /// A folder. Default: where the run was started.
    pub output_path: PathBuf,
    /// A folder in it. Default `DeepSpeedJobName`.
    pub job_name: String,
}

impl Default for MonitorConfig {
    fn default() -> Self {
        Self { output_path: PathBuf::new(), job_name: "DeepSpeedJobName".to_owned() }
    }
}

impl MonitorConfig {
    /// The folder, which is made if it does not exist.
    fn folder(&self) -> Result<PathBuf, Error> {
        let folder = self.output_path.join(&self.job_name);
        fs::create_dir_all(&folder).map_err(Error::io("creating", &folder))?;
        Ok(folder)
    }
}

/// A number of a curve.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    /// Such as `Train/Samples/train_loss`.
    name: &'static str,
    /// Samples that all ranks have trained on.
    samples: u64,
    value: f64,
}

/// Whatever takes points, and keeps them before it returns.
trait Monitor: Send {
    fn write(&mut self, points: &[Point]) -> std::io::Result<()>;

    fn path(&self) -> &Path;
}

/// All monitors of a run.
pub(crate) struct Monitors(Vec<Box<dyn Monitor>>);

impl Monitors {
    /// Of a rank that writes nothing.
    pub(crate) fn none() -> Self {
        Self(vec![])
    }

    /// Opens those that the configuration names.
    pub(crate) fn open(config: &TrainerConfig) -> Result<Self, Error> {
        let mut monitors: Vec<Box<dyn Monitor>> = vec![];
        if let Some(csv) = &config.csv_monitor {
            monitors.push(Box::new(CsvFiles::new(csv.folder()?)));
        }
        if let Some(tensorboard) = &config.tensorboard {
            let folder = tensorboard.folder()?;
            let file =
                EventFile::create(&folder).map_err(Error::io("creating a file in", &folder))?;
            monitors.push(Box::new(file));
        }
        Ok(Self(monitors))
    }

    /// Writes a row of metrics after so many samples.
    pub(crate) fn record(&mut self, row: &Metrics, samples: u64) -> Result<(), Error> {
        let points = points(row, samples);
        for monitor in &mut self.0 {
            let written = monitor.write(&points);
            written.map_err(Error::io("writing", monitor.path()))?;
        }
        Ok(())
    }
}

fn points(row: &Metrics, samples: u64) -> Vec<Point> {
    let values = match row.split {
        Split::Train => vec![
            ("Train/Samples/train_loss", row.loss),
            ("Train/Samples/lr", row.lr),
            ("Train/Samples/loss_scale", row.loss_scale),
            ("Train/Samples/grad_norm", row.grad_norm),
        ],
        Split::Val => vec![("Validation/Samples/loss", row.loss)],
    };
    let point =
        |(name, value): (&'static str, Option<f64>)| Some(Point { name, samples, value: value? });
    values.into_iter().filter_map(point).collect()
}
