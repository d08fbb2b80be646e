//! How long collectives take: each is verified, warmed up, and timed with all ranks in lockstep.

use std::time::Instant;

use burn::tensor::{bf16, f16};
use pyroclast_strategies::{Dtype, GroupOptions, ProcessGroup, ReduceOp};

use super::limit::CopyRate;
use super::reference::{Number, Place, fill};
use super::{Collective, Measurement, size};
use crate::doctor::Cpu;
use crate::environment::ProcessRank;
use crate::error::{Error, Mistake};
use crate::ranks;

/// Runs that are not timed.
const WARM_UP: usize = 3;

/// Fewest and most runs that a time limit stands for.
const RUNS: (f64, f64) = (5.0, 20_000.0);

/// Most runs of one line.
const MAX_ITERATIONS: usize = 1_000_000;

/// Buffers that a rank may need at once: its own, one in flight, and partial results of twice the
/// size.
const BUFFERS: usize = 4;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Each of these,
    pub collectives: Vec<Collective>,
    /// with a buffer of each of these sizes in bytes.
    pub sizes: Vec<usize>,
    /// Type of the numbers.
    pub dtype: Dtype,
    /// How often.
    pub repeat: Repeat,
    /// What connects the ranks.
    pub wire: Wire,
    /// How fast memory is copied, where all ranks share one memory.
    pub limit: Option<CopyRate>,
}

/// How often a collective is timed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Repeat {
    /// So many times.
    Iterations(usize),
    /// For about so many seconds, 5 times at least.
    Seconds(f64),
}

/// What connects the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Channels within one process.
    Memory,
    /// Sockets between processes.
    Tcp,
}

impl Wire {
    /// The name on the command line and in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Tcp => "tcp",
        }
    }
}

impl Workload {
    /// What is wrong with it on `world` ranks, of which `local_world` are on this machine.
    #[must_use]
    pub fn mistakes(&self, world: usize, local_world: usize) -> Vec<Mistake> {
        let mut mistakes = Vec::new();
        let mut wrong = |setting: &str, problem| mistakes.push(Mistake::new(setting, problem));
        match self.repeat {
            Repeat::Iterations(n) if n == 0 || n > MAX_ITERATIONS => {
                wrong(
                    "iterations",
                    format!("{n} is out of range; it must be 1 to {MAX_ITERATIONS}"),
                );
            }
            Repeat::Seconds(s) if !(s > 0.0 && s <= 3600.0) => {
                wrong("seconds", format!("{s} is out of range; it must be above 0, at most 3600"));
            }
            _ => {}
        }
        let memory = Cpu::examine().total_memory_bytes.map_or(usize::MAX, |bytes| bytes as usize);
        let most = memory / (BUFFERS * local_world.max(1));
        for &bytes in &self.sizes {
            let shown = size::show(bytes);
            let width = self.dtype.size();
            if !bytes.is_multiple_of(width) {
                let dtype = self.dtype;
                wrong("sizes", format!("{shown} is no multiple of the {width} bytes of {dtype}"));
            } else if bytes > most {
                let limit = format!("for {local_world} ranks in this memory at most {most} B");
                wrong("sizes", format!("{shown} is too large; {limit}"));
            } else if self.collectives.contains(&Collective::AllToAll)
                && !(bytes / width).is_multiple_of(world.max(1))
            {
                let step = size::show(width * world);
                let problem = format!("{shown} cannot be dealt to {world} ranks by all_to_all");
                wrong("sizes", format!("{problem}; use a multiple of {step}"));
            }
        }
        mistakes
    }

    /// Measures on `world` threads of this process.
    ///
    /// # Errors
    ///
    /// [`Error::WrongResult`] if a collective does not return what it must, and whatever ends one.
    pub fn run_threads(
        &self,
        world: usize,
        options: &GroupOptions,
        mut report: impl FnMut(Measurement) + Send,
    ) -> Result<(), Error> {
        let mut report: Option<&mut (dyn FnMut(Measurement) + Send)> = Some(&mut report);
        let state = |rank| report.take_if(|_| rank == 0);
        ranks::run(world, options, state, |group, report| match report {
            Some(report) => self.run_rank(&group, report),
            None => self.run_rank(&group, &mut |_| ()),
        })
        .map(drop)
    }

    /// Measures as the one rank that this process is; rank 0 reports.
    ///
    /// # Errors
    ///
    /// As [`Self::run_threads`].
    pub fn run_process(
        &self,
        process: &ProcessRank,
        options: &GroupOptions,
        mut report: impl FnMut(Measurement) + Send,
    ) -> Result<(), Error> {
        let group = process.join(options)?;
        ranks::run_one(&group, process.threads(), |group| self.run_rank(&group, &mut report))
    }

    fn run_rank(
        &self,
        group: &ProcessGroup,
        report: &mut dyn FnMut(Measurement),
    ) -> Result<(), Error> {
        match self.dtype {
            Dtype::F32 => self.run_typed::<f32>(group, report),
            Dtype::F64 => self.run_typed::<f64>(group, report),
            Dtype::F16 => self.run_typed::<f16>(group, report),
            Dtype::Bf16 => self.run_typed::<bf16>(group, report),
            Dtype::I32 => self.run_typed::<i32>(group, report),
            Dtype::I64 => self.run_typed::<i64>(group, report),
            Dtype::U8 => self.run_typed::<u8>(group, report),
            other => Err(Error::setting("dtype", format!("{other} cannot be measured"))),
        }
    }

    fn run_typed<T: Number>(
        &self,
        group: &ProcessGroup,
        report: &mut dyn FnMut(Measurement),
    ) -> Result<(), Error> {
        for &collective in &self.collectives {
            for &bytes in &self.sizes {
                let mut buffer = vec![T::ZERO; bytes / T::DTYPE.size()];
                buffer = self.verify(collective, group, buffer)?;
                let seconds = self.time(collective, group, buffer)?;
                if group.rank() == 0 {
                    let measured = self.measurement(collective, bytes, group.world(), seconds);
                    report(measured.with_limit(collective, self.limit.as_ref()));
                }
            }
        }
        Ok(())
    }

    /// Runs `collective` once and compares its result with the scalar reference.
    fn verify<T: Number>(
        &self,
        collective: Collective,
        group: &ProcessGroup,
        mut buffer: Vec<T>,
    ) -> Result<Vec<T>, Error> {
        let place = Place { rank: group.rank(), world: group.world(), len: buffer.len() };
        fill(&mut buffer, place.rank);
        let buffer = collective.launch(group, buffer).wait()?;
        let Some((index, expected)) = collective.first_wrong(&buffer, place) else {
            return Ok(buffer);
        };
        Err(Error::WrongResult {
            rank: place.rank,
            collective: collective.name(),
            elements: format!("{} {}", place.len, self.dtype),
            index,
            expected: format!("{expected:?}"),
            found: format!("{:?}", buffer[index]),
        })
    }

    /// The median time of `collective` in seconds.
    fn time<T: Number>(
        &self,
        collective: Collective,
        group: &ProcessGroup,
        mut buffer: Vec<T>,
    ) -> Result<f64, Error> {
        // Sums of zeros stay zeros: no run meets infinities that the one before left behind.
        buffer.fill(T::ZERO);
        let mut run = || -> Result<f64, Error> {
            group.barrier()?;
            let started = Instant::now();
            // The buffer itself travels to the communication thread and back.
            buffer = collective.launch(group, std::mem::take(&mut buffer)).wait()?;
            Ok(started.elapsed().as_secs_f64())
        };
        let mut warm = (0..WARM_UP).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
        let runs = match self.repeat {
            Repeat::Iterations(runs) => runs,
            Repeat::Seconds(seconds) => {
                let slowest = group.all_reduce(vec![median(&mut warm)], ReduceOp::Max).wait()?[0];
                (seconds / slowest).clamp(RUNS.0, RUNS.1) as usize
            }
        };
        let times = (0..runs).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
        // A root that only sends is done long before the others: the slowest rank's time counts.
        let mut slowest = group.all_reduce(times, ReduceOp::Max).wait()?;
        Ok(median(&mut slowest))
    }

    fn measurement(
        &self,
        collective: Collective,
        bytes: usize,
        world: usize,
        seconds: f64,
    ) -> Measurement {
        let algbw_gb_s = bytes as f64 / seconds / 1e9;
        Measurement {
            op: collective.name(),
            device: "cpu",
            dtype: self.dtype.to_string(),
            bytes,
            world,
            transport: self.wire.name(),
            median_us: seconds * 1e6,
            algbw_gb_s,
            busbw_gb_s: algbw_gb_s * collective.bus_factor(world),
            limit: None,
            limit_source: None,
            fraction_of_limit: None,
            verified: true,
            rival: None,
            rival_value: None,
            ratio_to_rival: None,
        }
    }
}

impl Measurement {
    /// Adds the limit that copying sets: each byte that gets from one rank's memory to another's is
    /// copied at least once, and all ranks share one memory.
    fn with_limit(mut self, collective: Collective, rate: Option<&CopyRate>) -> Self {
        if let Some(CopyRate { threads, stores, gb_s }) = rate.filter(|_| self.world > 1) {
            let moved = collective.buffers_moved(self.world);
            let limit = gb_s * collective.bus_factor(self.world) / moved;
            let noun = if *threads == 1 { "thread" } else { "threads" };
            let copy = format!("memory copy by {threads} {noun}, {stores} stores, {gb_s:.1} GB/s");
            self.limit = Some(limit);
            self.limit_source = Some(format!("{copy}, shared by all ranks"));
            self.fraction_of_limit = Some(self.busbw_gb_s / limit);
        }
        self
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(dtype: Dtype, sizes: &[usize]) -> Workload {
        Workload {
            collectives: Collective::ALL.to_vec(),
            sizes: sizes.to_vec(),
            dtype,
            repeat: Repeat::Iterations(2),
            wire: Wire::Memory,
            limit: Some(CopyRate { threads: 2, stores: "normal".to_owned(), gb_s: 10.0 }),
        }
    }

    fn run(workload: &Workload, world: usize) -> Vec<Measurement> {
        let mut rows = Vec::new();
        workload
            .run_threads(world, &GroupOptions::default(), |row| rows.push(row))
            .expect("every collective should be right");
        rows
    }

    #[test]
    fn every_collective_of_every_type_is_verified_and_measured() {
        use Dtype::{Bf16, F16, F32, F64, I32, I64, U8};
        for dtype in [F32, F64, F16, Bf16, I32, I64, U8] {
            for world in 1..=3 {
                let rows = run(&workload(dtype, &[24 * 8, 24 * 1000]), world);
                assert_eq!(rows.len(), 2 * Collective::ALL.len());
                assert!(rows.iter().all(|row| row.verified && row.median_us > 0.0));
                assert!(rows.iter().all(|row| row.limit.is_some() == (world > 1)));
            }
        }
    }

    #[test]
    fn bandwidths_follow_from_the_time() {
        let row = &run(&workload(Dtype::F32, &[24_000]), 3)[0];
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9 * b;
        assert!(close(row.algbw_gb_s, 24.0 / row.median_us));
        assert!(close(row.busbw_gb_s, row.algbw_gb_s * 4.0 / 3.0));
        assert!(
            row.limit.is_some_and(|limit| close(limit, 10.0 / 3.0)),
            "3 ranks share the copies"
        );
        assert!(row.fraction_of_limit.is_some_and(|f| close(f, row.busbw_gb_s * 3.0 / 10.0)));
    }

    #[test]
    fn a_row_has_the_keys_of_the_contract() {
        let row = serde_json::to_string(&run(&workload(Dtype::U8, &[6]), 2)[0]).expect("JSON");
        let keys = "op device dtype bytes world transport median_us algbw_gb_s busbw_gb_s limit \
                    limit_source fraction_of_limit verified rival rival_value ratio_to_rival";
        let places = keys.split(' ').map(|key| row.find(&format!("\"{key}\":")));
        let places: Vec<usize> = places.map(|place| place.expect("the key")).collect();
        assert!(places.is_sorted(), "{row}");
        assert_eq!(row.matches("\":").count(), 16, "{row}");
    }

    #[test]
    fn what_cannot_be_measured_is_refused_by_name() {
        type Change = fn(&mut Workload);
        let table: [(&str, &str, Change); 6] = [
            ("sizes", "no multiple of the 4 bytes", |w| w.sizes = vec![6]),
            ("sizes", "use a multiple of 12 B", |w| w.sizes = vec![8]),
            ("sizes", "too large", |w| w.sizes = vec![12 << 50]),
            ("iterations", "0 is out of range", |w| w.repeat = Repeat::Iterations(0)),
            ("seconds", "NaN is out of range", |w| w.repeat = Repeat::Seconds(f64::NAN)),
            ("seconds", "at most 3600", |w| w.repeat = Repeat::Seconds(4000.0)),
        ];
        for (setting, problem, change) in table {
            let mut workload = workload(Dtype::F32, &[12]);
            assert_eq!(workload.mistakes(3, 3), []);
            change(&mut workload);
            let mistakes = workload.mistakes(3, 3);
            assert_eq!(mistakes.len(), 1, "{mistakes:?}");
            assert_eq!(mistakes[0].setting, setting);
            assert!(mistakes[0].problem.contains(problem), "{mistakes:?}");
        }
    }
}
