//! Measurements behind `pyroclast bench`. A result is verified before it is timed.

mod collective;
pub mod collectives;
pub mod limit;
mod reference;
pub mod size;

use serde::Serialize;

pub use collective::Collective;
pub use collectives::{Repeat, Wire, Workload};
pub use limit::{CopyLimits, CopyRate};

/// One line of results. What does not apply is null.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Measurement {
    /// What was run.
    pub op: &'static str,
    /// Where it ran.
    pub device: &'static str,
    /// Type of the numbers.
    pub dtype: String,
    /// Bytes of the whole buffer of one rank: for reduce-scatter and all-gather the total.
    pub bytes: usize,
    /// Ranks.
    pub world: usize,
    /// What connected them.
    pub transport: &'static str,
    /// Median time in microseconds; each time is that of the slowest rank.
    pub median_us: f64,
    /// Buffer over time, in GB/s.
    pub algbw_gb_s: f64,
    /// What one link between ranks carries, in GB/s: comparable across operations and worlds.
    pub busbw_gb_s: f64,
    /// What `busbw_gb_s` could be at most, in GB/s.
    pub limit: Option<f64>,
    /// What that limit is and how it was found.
    pub limit_source: Option<String>,
    /// `busbw_gb_s` over `limit`. Above 1 where everything stays in caches and the limit does not.
    pub fraction_of_limit: Option<f64>,
    /// Whether the result was compared with the scalar reference before anything was timed.
    pub verified: bool,
    /// What it was compared with.
    pub rival: Option<String>,
    /// The rival's bus bandwidth in GB/s.
    pub rival_value: Option<f64>,
    /// `busbw_gb_s` over `rival_value`.
    pub ratio_to_rival: Option<f64>,
}
