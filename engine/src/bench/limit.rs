//! How fast this machine copies memory: what no collective on it can exceed.

use std::time::Instant;

use pyroclast_kernels::copy::{NonTemporal, Stores, copy, copy_on_all_threads};

use crate::doctor::Cpu;
use crate::error::Error;

/// Copies of each kind that are timed, after one that is not.
const REPEATS: usize = 5;

/// Where the system does not tell how large the caches are.
const ASSUMED_CACHE: usize = 64 << 20;

/// What copies of memory reach on this machine. A copied byte counts once, though it is read and
/// written.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CopyLimits {
    /// Bytes of the buffer that was copied.
    pub buffer_bytes: usize,
    /// Bytes of the largest cache; `None` where the system does not tell.
    pub cache_bytes: Option<usize>,
    /// The instruction set of the non-temporal stores; `None` where the processor has none that are
    /// known, and such copies were not measured.
    pub non_temporal: Option<&'static str>,
    /// Each kind of copy.
    pub rates: Vec<CopyRate>,
}

/// How fast one kind of copy is.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CopyRate {
    /// Threads that copied.
    pub threads: usize,
    /// How they wrote: `normal`, or `non-temporal` and the instruction set.
    pub stores: String,
    /// Bytes copied per second over 1e9.
    pub gb_s: f64,
}

impl CopyLimits {
    /// Measures it, with buffers that together have twice the size of the largest cache or more,
    /// unless that would take a quarter of the machine's memory.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the threads cannot be started.
    pub fn measure() -> Result<Self, Error> {
        let cache_bytes = largest_cache();
        let cpu = Cpu::examine();
        let memory = cpu.total_memory_bytes.map_or(usize::MAX, |bytes| bytes as usize);
        let wanted = 2 * cache_bytes.unwrap_or(ASSUMED_CACHE).max(ASSUMED_CACHE);
        let len = wanted.min(memory / 8) / size_of::<f32>();
        let threads = cpu.threads;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .map_err(|e| Error::io("starting", "the copying threads")(std::io::Error::other(e)))?;
        let (source, mut target) = (vec![1.0; len], vec![0.0; len]);
        let non_temporal = NonTemporal::detect();
        let kinds = [Some(Stores::Normal), non_temporal.map(Stores::NonTemporal)];
        let mut rates = Vec::new();
        for stores in kinds.into_iter().flatten() {
            let one = median_seconds(|| copy(&mut target, &source, stores));
            let all = median_seconds(|| {
                pool.install(|| copy_on_all_threads(&mut target, &source, stores));
            });
            for (threads, seconds) in [(1, one), (threads, all)] {
                let gb_s = size_of_val(&source[..]) as f64 / seconds / 1e9;
                rates.push(CopyRate { threads, stores: name(stores), gb_s });
            }
        }
        let buffer_bytes = size_of_val(&source[..]);
        let non_temporal = non_temporal.map(NonTemporal::name);
        Ok(Self { buffer_bytes, cache_bytes, non_temporal, rates })
    }

    /// The fastest kind of copy.
    #[must_use]
    pub fn best(&self) -> Option<&CopyRate> {
        self.rates.iter().max_by(|a, b| a.gb_s.total_cmp(&b.gb_s))
    }
}

fn name(stores: Stores) -> String {
    match stores {
        Stores::Normal => "normal".to_owned(),
        Stores::NonTemporal(streaming) => format!("non-temporal ({})", streaming.name()),
    }
}

fn median_seconds(mut copy: impl FnMut()) -> f64 {
    copy();
    let mut time = || {
        let started = Instant::now();
        copy();
        started.elapsed().as_secs_f64()
    };
    let mut seconds: Vec<f64> = (0..REPEATS).map(|_| time()).collect();
    seconds.sort_by(f64::total_cmp);
    seconds[REPEATS / 2]
}

/// Bytes of the largest cache that the first processor uses, as Linux tells.
fn largest_cache() -> Option<usize> {
    let caches = std::fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let size = |entry: std::fs::DirEntry| {
        let text = std::fs::read_to_string(entry.path().join("size")).ok()?;
        text.trim().strip_suffix('K')?.parse::<usize>().ok()?.checked_mul(1024)
    };
    caches.filter_map(Result::ok).filter_map(size).max()
}
