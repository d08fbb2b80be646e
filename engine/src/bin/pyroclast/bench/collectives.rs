//! `pyroclast bench collectives`.

use clap::Args;
use pyroclast::bench::{
    Collective, CopyLimits, CopyRate, Measurement, Repeat, Wire, Workload, size,
};
use pyroclast::strategies::transport::tcp::MAX_SOCKETS;
use pyroclast::strategies::{Algorithm, Dtype, GroupOptions};
use pyroclast::{Environment, Error, Mistake, ProcessRank, environment};

use crate::args::Format;
use crate::console::say;
use crate::processes;

/// Arguments of `bench collectives`.
#[derive(Debug, Args)]
pub(super) struct CollectivesArgs {
    /// Ranks [default: WORLD_SIZE, or 2].
    #[arg(long)]
    world: Option<usize>,
    /// memory (ranks are threads; the default) or tcp (processes). tcp starts its ranks itself,
    /// unless this is one of several that were started with RANK and WORLD_SIZE.
    #[arg(long)]
    transport: Option<String>,
    /// all, or some of all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all.
    #[arg(long, value_delimiter = ',', default_value = "all")]
    op: Vec<String>,
    /// Bytes of a rank's buffer, with B, KiB, MiB or GiB.
    #[arg(long, value_delimiter = ',', default_value = "4KiB,64KiB,1MiB,16MiB,64MiB")]
    sizes: Vec<String>,
    /// f32, f64, f16, bf16, i32, i64, u8.
    #[arg(long, default_value = "f32")]
    dtype: String,
    /// How all_reduce runs: auto, ring, doubling, direct, or hierarchical:S with rows of S ranks.
    /// Ring and direct also say how reduce_scatter does.
    #[arg(long, default_value = "auto")]
    algorithm: String,
    /// Times that each line is run.
    #[arg(long)]
    iterations: Option<usize>,
    /// Seconds that each line is run for, 5 times at least [default: 1].
    #[arg(long)]
    seconds: Option<f64>,
    /// Connections between two ranks with tcp [default: PYROCLAST_SOCKETS, or 1].
    #[arg(long)]
    sockets: Option<usize>,
    /// A table for people, or one JSON object per line for machines.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

/// What was asked for, checked.
struct Bench {
    workload: Workload,
    options: GroupOptions,
    world: usize,
    /// The rank that this process is.
    process: Option<ProcessRank>,
    format: Format,
}

/// Ranks that one machine is asked for.
const MAX_WORLD: usize = 256;

impl CollectivesArgs {
    pub(super) fn run(&self) -> Result<(), Error> {
        self.resolve()?.run()
    }

    /// Checks everything, and reports all mistakes together.
    fn resolve(&self) -> Result<Bench, Error> {
        let mut mistakes = Vec::new();
        let environment = Environment::read(environment::variable).unwrap_or_else(|more| {
            mistakes.extend(more);
            Environment::default()
        });
        let options = environment.group_options();
        let mut process = environment.process;
        let world = self.world(process.as_ref(), &mut mistakes);
        let wire = self.wire(process.as_mut(), &mut mistakes);
        let dtype = choose("dtype", &self.dtype, &DTYPES, &mut mistakes);
        let collectives = self.collectives(&mut mistakes);
        let algorithm = self.algorithm(&collectives, world, &mut mistakes);
        let sizes = self.sizes(&mut mistakes);
        let repeat = match (self.iterations, self.seconds) {
            (Some(iterations), None) => Repeat::Iterations(iterations),
            (None, seconds) => Repeat::Seconds(seconds.unwrap_or(1.0)),
            (Some(_), Some(seconds)) => {
                mistakes.push(Mistake::new("iterations", "given with seconds; set one of them"));
                Repeat::Seconds(seconds)
            }
        };
        let workload = Workload { collectives, sizes, dtype, repeat, wire, limit: None };
        let local_world = process.as_ref().map_or(world, |process| process.local_world);
        mistakes.extend(workload.mistakes(world, local_world));
        let options = GroupOptions { algorithm, ..options };
        match mistakes.is_empty() {
            true => Ok(Bench { workload, options, world, process, format: self.format }),
            false => Err(Error::Config(mistakes)),
        }
    }

    fn world(&self, process: Option<&ProcessRank>, mistakes: &mut Vec<Mistake>) -> usize {
        let given = process.map(|process| process.world);
        let world = self.world.or(given).unwrap_or(2);
        let problem = match given {
            Some(given) if given != world => format!("{world}, but WORLD_SIZE is {given}"),
            None if world == 0 || world > MAX_WORLD => {
                format!("{world} is out of range; it must be 1 to {MAX_WORLD}")
            }
            _ => return world,
        };
        mistakes.push(Mistake::new("world", problem));
        world
    }

    fn wire(&self, process: Option<&mut ProcessRank>, mistakes: &mut Vec<Mistake>) -> Wire {
        let default = if process.is_some() { "tcp" } else { "memory" };
        let name = self.transport.as_deref().unwrap_or(default);
        let wire = choose("transport", name, &WIRES, mistakes);
        if wire == Wire::Memory && process.is_some() {
            let problem = "`memory` connects threads, but RANK says that this process is a rank";
            mistakes.push(Mistake::new("transport", problem));
        }
        let Some(sockets) = self.sockets else { return wire };
        let problem = match wire {
            Wire::Memory => "means nothing to the memory transport; use --transport tcp".to_owned(),
            Wire::Tcp if (1..=MAX_SOCKETS).contains(&sockets) => {
                process.into_iter().for_each(|process| process.tcp.sockets_per_peer = sockets);
                return wire;
            }
            Wire::Tcp => format!("{sockets} is out of range; it must be 1 to {MAX_SOCKETS}"),
        };
        mistakes.push(Mistake::new("sockets", problem));
        wire
    }

    fn collectives(&self, mistakes: &mut Vec<Mistake>) -> Vec<Collective> {
        let mut known = vec![("all", Collective::ALL.to_vec())];
        known.extend(Collective::ALL.map(|collective| (collective.name(), vec![collective])));
        self.op.iter().flat_map(|name| choose("op", name, &known, mistakes)).collect()
    }

    fn algorithm(
        &self,
        collectives: &[Collective],
        world: usize,
        mistakes: &mut Vec<Mistake>,
    ) -> Algorithm {
        let name = &self.algorithm;
        let row = name.strip_prefix("hierarchical:").and_then(|row| row.parse().ok());
        let named = || ALGORITHMS.iter().find(|(known, _)| known == name).map(|(_, found)| *found);
        let mesh = row.map(|shard| Algorithm::Hierarchical { shard });
        let algorithm = mesh.or_else(named).unwrap_or_else(|| {
            let known = ALGORITHMS.map(|(known, _)| known).join(", ");
            let problem = format!("unknown `{name}`; there are {known}, hierarchical:S");
            mistakes.push(Mistake::new("algorithm", problem));
            Algorithm::Auto
        });
        let can_choose = match algorithm {
            Algorithm::Auto => &Collective::ALL[..],
            Algorithm::Ring | Algorithm::Direct => {
                &[Collective::AllReduce, Collective::ReduceScatter]
            }
            _ => &[Collective::AllReduce],
        };
        if let Some(other) = collectives.iter().find(|other| !can_choose.contains(other)) {
            let names: Vec<&str> = can_choose.iter().map(|collective| collective.name()).collect();
            let (other, names) = (other.name(), names.join(","));
            let problem = format!("{other} cannot run by `{name}`; use --op {names}");
            mistakes.push(Mistake::new("algorithm", problem));
        }
        if let Some(shard) = row.filter(|shard| *shard == 0 || !world.is_multiple_of(*shard)) {
            let problem = format!("rows of {shard} ranks do not divide {world} ranks");
            mistakes.push(Mistake::new("algorithm", problem));
        }
        algorithm
    }

    fn sizes(&self, mistakes: &mut Vec<Mistake>) -> Vec<usize> {
        let mut keep = |size: Result<usize, String>| {
            size.map_err(|problem| mistakes.push(Mistake::new("sizes", problem))).ok()
        };
        self.sizes.iter().filter_map(|text| keep(size::parse(text))).collect()
    }
}

/// What `text` names; the first of what is `known` if it names nothing.
fn choose<T: Clone>(
    setting: &str,
    text: &str,
    known: &[(&str, T)],
    mistakes: &mut Vec<Mistake>,
) -> T {
    let found = known.iter().find(|(name, _)| *name == text);
    if found.is_none() {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        let problem = format!("unknown `{text}`; there are {}", names.join(", "));
        mistakes.push(Mistake::new(setting, problem));
    }
    found.unwrap_or(&known[0]).1.clone()
}

impl Bench {
    fn run(mut self) -> Result<(), Error> {
        match self.process.take() {
            None if self.workload.wire == Wire::Tcp => processes::run_ranks(self.world),
            None => {
                self.measure_limits(true)?;
                let show = |row: Measurement| self.show(&row);
                self.workload.run_threads(self.world, &self.options, show)
            }
            Some(process) => {
                processes::end_with_parent();
                if process.rank == 0 {
                    self.measure_limits(process.local_world == process.world)?;
                }
                let show = |row: Measurement| self.show(&row);
                self.workload.run_process(&process, &self.options, show)
            }
        }
    }

    /// Measures how fast memory is copied, which limits ranks that share it.
    fn measure_limits(&mut self, ranks_share_memory: bool) -> Result<(), Error> {
        let limits = CopyLimits::measure()?;
        self.workload.limit = limits.best().filter(|_| ranks_share_memory).cloned();
        if let Format::Text = self.format {
            self.introduce(&limits);
        }
        Ok(())
    }

    /// What people are told before the first line.
    fn introduce(&self, limits: &CopyLimits) {
        let (world, wire, dtype) = (self.world, self.workload.wire.name(), self.workload.dtype);
        say(&format!("{world} ranks, {wire} transport, {dtype}; median times of the slowest rank"));
        let cache = limits.cache_bytes.map_or("unknown".to_owned(), size::show);
        let buffer = size::show(limits.buffer_bytes);
        say(&format!("copies of {buffer} (largest cache: {cache}), a copied byte counted once:"));
        for CopyRate { threads, stores, gb_s, .. } in &limits.rates {
            let noun = if *threads == 1 { "thread" } else { "threads" };
            say(&format!("  {threads:>3} {noun:<7}  {stores:<22} {gb_s:>6.1} GB/s"));
        }
        if limits.non_temporal.is_none() {
            say("  this processor has no non-temporal stores that are known here");
        }
        let (op, bytes, time, limit) = ("op", "bytes", "time", "of limit");
        say(&format!(
            "\n{op:<15} {bytes:>9} {time:>12} {:>12} {:>12} {limit:>9}",
            "S / time", "bus"
        ));
    }

    fn show(&self, row: &Measurement) {
        if let Format::Json = self.format {
            return say(&serde_json::to_string(row).unwrap_or_default());
        }
        let Measurement { op, median_us, algbw_gb_s, busbw_gb_s, .. } = row;
        let bytes = size::show(row.bytes);
        let limit = row.fraction_of_limit.map_or("-".to_owned(), |f| format!("{:.0} %", f * 100.0));
        say(&format!(
            "{op:<15} {bytes:>9} {median_us:>9.1} us {algbw_gb_s:>7.2} GB/s {busbw_gb_s:>7.2} GB/s {limit:>9}"
        ));
    }
}

const WIRES: [(&str, Wire); 2] = [("memory", Wire::Memory), ("tcp", Wire::Tcp)];

const DTYPES: [(&str, Dtype); 7] = [
    ("f32", Dtype::F32),
    ("f64", Dtype::F64),
    ("f16", Dtype::F16),
    ("bf16", Dtype::Bf16),
    ("i32", Dtype::I32),
    ("i64", Dtype::I64),
    ("u8", Dtype::U8),
];

const ALGORITHMS: [(&str, Algorithm); 4] = [
    ("auto", Algorithm::Auto),
    ("ring", Algorithm::Ring),
    ("doubling", Algorithm::Doubling),
    ("direct", Algorithm::Direct),
];
