//! `pyroclast bench`.

use std::ffi::OsString;

use clap::{Args, Subcommand};
use pyroclast::bench::{Collective, CopyLimits, Measurement, Repeat, Wire, Workload, size};
use pyroclast::strategies::{Algorithm, Dtype, GroupOptions};
use pyroclast::{Error, Mistake};

use crate::args::Format;
use crate::console::say;
use crate::misuse;

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Debug, Subcommand)]
enum Subject {
    /// Time collectives between ranks on this machine.
    Collectives(CollectivesArgs),
    /// Subjects of later versions.
    #[command(external_subcommand)]
    Other(Vec<OsString>),
}

/// Subjects that later versions have.
const NOT_YET: [&str; 2] = ["kernels", "offload"];

/// Arguments of `bench collectives`.
#[derive(Debug, Args)]
struct CollectivesArgs {
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// memory (ranks are threads).
    #[arg(long, default_value = "memory")]
    transport: String,
    /// all, or some of all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all.
    #[arg(long, value_delimiter = ',', default_value = "all")]
    op: Vec<String>,
    /// Bytes of a rank's buffer, with B, KiB, MiB or GiB.
    #[arg(long, value_delimiter = ',', default_value = "4KiB,64KiB,1MiB,16MiB,64MiB")]
    sizes: Vec<String>,
    /// f32, f64, f16, bf16, i32, i64, u8.
    #[arg(long, default_value = "f32")]
    dtype: String,
    /// How all_reduce runs: auto, ring, doubling.
    #[arg(long, default_value = "auto")]
    algorithm: String,
    /// Times that each line is run.
    #[arg(long)]
    iterations: Option<usize>,
    /// Seconds that each line is run for [default: 1].
    #[arg(long)]
    seconds: Option<f64>,
    /// A table for people, or one JSON object per line for machines.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

impl BenchArgs {
    pub(crate) fn run(&self) -> Result<(), Error> {
        match &self.subject {
            Subject::Collectives(args) => args.run(),
            Subject::Other(words) => {
                let name = words.first().map(|word| word.to_string_lossy()).unwrap_or_default();
                let what = match NOT_YET.contains(&&*name) {
                    true => format!("`bench {name}` is not in this version"),
                    false => format!("unknown subject `{name}`"),
                };
                Err(misuse("bench", format!("{what}; there is collectives")))
            }
        }
    }
}

/// Ranks that one machine is asked for.
const MAX_WORLD: usize = 256;

impl CollectivesArgs {
    fn run(&self) -> Result<(), Error> {
        let (mut workload, options) = self.resolve()?;
        let limits = CopyLimits::measure()?;
        workload.limit = limits.best().cloned();
        self.begin(&limits);
        workload.run_threads(self.world, &options, |row| self.show(&row))
    }

    /// Checks everything, and reports all mistakes together.
    fn resolve(&self) -> Result<(Workload, GroupOptions), Error> {
        let mut mistakes = Vec::new();
        if self.world == 0 || self.world > MAX_WORLD {
            let problem = format!("{} is out of range; it must be 1 to {MAX_WORLD}", self.world);
            mistakes.push(Mistake::new("world", problem));
        }
        let mut choose = |setting: &str, text: &str, known: &[&str]| {
            let found = known.iter().position(|name| *name == text);
            if found.is_none() {
                let known = known.join(", ");
                mistakes
                    .push(Mistake::new(setting, format!("unknown `{text}`; there are {known}")));
            }
            found.unwrap_or_default()
        };
        let wire = WIRES[choose("transport", &self.transport, &WIRES.map(Wire::name))];
        let dtype = DTYPES[choose("dtype", &self.dtype, &DTYPES.map(|(name, _)| name))].1;
        let (_, algorithm) =
            ALGORITHMS[choose("algorithm", &self.algorithm, &ALGORITHMS.map(|(name, _)| name))];
        let names = [&["all"], &Collective::ALL.map(Collective::name)[..]].concat();
        let mut collectives = Vec::new();
        for op in &self.op {
            match choose("op", op, &names) {
                0 => collectives.extend(Collective::ALL),
                n => collectives.push(Collective::ALL[n - 1]),
            }
        }
        if algorithm != Algorithm::Auto && collectives.iter().any(|c| *c != Collective::AllReduce) {
            let problem = "only all_reduce has a choice; use --op all_reduce";
            mistakes.push(Mistake::new("algorithm", problem));
        }
        let mut sizes = Vec::new();
        for text in &self.sizes {
            match size::parse(text) {
                Ok(bytes) => sizes.push(bytes),
                Err(problem) => mistakes.push(Mistake::new("sizes", problem)),
            }
        }
        let repeat = match (self.iterations, self.seconds) {
            (Some(_), Some(_)) => {
                mistakes.push(Mistake::new("iterations", "given with seconds; set one of them"));
                Repeat::Seconds(1.0)
            }
            (Some(iterations), None) => Repeat::Iterations(iterations),
            (None, seconds) => Repeat::Seconds(seconds.unwrap_or(1.0)),
        };
        let workload = Workload { collectives, sizes, dtype, repeat, wire, limit: None };
        mistakes.extend(workload.mistakes(self.world, self.world));
        match mistakes.is_empty() {
            true => Ok((workload, GroupOptions { algorithm, ..GroupOptions::default() })),
            false => Err(Error::Config(mistakes)),
        }
    }

    /// What people are told before the first line of the table.
    fn begin(&self, limits: &CopyLimits) {
        let CollectivesArgs { world, transport, dtype, .. } = self;
        if let Format::Json = self.format {
            return;
        }
        say(&format!("{world} ranks, {transport} transport, {dtype}; median times, slowest rank"));
        let cache = limits.cache_bytes.map_or("unknown".to_owned(), size::show);
        let buffer = size::show(limits.buffer_bytes);
        say(&format!("copies of {buffer} (largest cache: {cache}), a copied byte counted once:"));
        for rate in &limits.rates {
            let threads = if rate.threads == 1 { "thread" } else { "threads" };
            say(&format!(
                "  {:>3} {threads:<7}  {:<22} {:>6.1} GB/s",
                rate.threads, rate.stores, rate.gb_s
            ));
        }
        say("");
        say(&format!(
            "{:<15} {:>9} {:>12} {:>12} {:>12} {:>9}",
            "op", "bytes", "time", "algorithm", "bus", "of limit"
        ));
    }

    fn show(&self, row: &Measurement) {
        match self.format {
            Format::Json => say(&serde_json::to_string(row).unwrap_or_default()),
            Format::Text => say(&format!(
                "{:<15} {:>9} {:>9.1} us {:>7.2} GB/s {:>7.2} GB/s {:>9}",
                row.op,
                size::show(row.bytes),
                row.median_us,
                row.algbw_gb_s,
                row.busbw_gb_s,
                row.fraction_of_limit.map_or("-".to_owned(), |f| format!("{:.0} %", f * 100.0)),
            )),
        }
    }
}

const WIRES: [Wire; 1] = [Wire::Memory];

const DTYPES: [(&str, Dtype); 7] = [
    ("f32", Dtype::F32),
    ("f64", Dtype::F64),
    ("f16", Dtype::F16),
    ("bf16", Dtype::Bf16),
    ("i32", Dtype::I32),
    ("i64", Dtype::I64),
    ("u8", Dtype::U8),
];

const ALGORITHMS: [(&str, Algorithm); 3] =
    [("auto", Algorithm::Auto), ("ring", Algorithm::Ring), ("doubling", Algorithm::Doubling)];
