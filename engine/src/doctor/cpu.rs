//! The host, as the standard library and `/proc` describe it.

use std::collections::HashSet;
use std::fs;
use std::thread;

use super::Cpu;

impl Cpu {
    pub(crate) fn examine() -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let threads = thread::available_parallelism().map_or(1, usize::from);
        Self {
            model: field(&info, "model name").unwrap_or(std::env::consts::ARCH).to_owned(),
            cores: cores(&info).unwrap_or(threads),
            threads,
            features: features(&info),
            total_memory_bytes: fs::read_to_string("/proc/meminfo").ok().and_then(|s| memory(&s)),
        }
    }
}

/// The first value of a key in `key : value` lines.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim())
}

fn memory(meminfo: &str) -> Option<u64> {
    let kib: u64 = field(meminfo, "MemTotal")?.strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Threads of one core share its package's and its own number.
fn cores(cpuinfo: &str) -> Option<usize> {
    let each = cpuinfo.split("\n\n").filter_map(|thread| {
        Some((field(thread, "physical id")?.to_owned(), field(thread, "core id")?.to_owned()))
    });
    Some(each.collect::<HashSet<_>>().len()).filter(|&cores| cores > 0)
}

#[cfg(target_arch = "x86_64")]
fn features(cpuinfo: &str) -> Vec<&'static str> {
    use std::arch::is_x86_feature_detected as has;
    // The standard library detects AMX in nightly only.
    let amx = field(cpuinfo, "flags").is_some_and(|flags| flags.contains("amx_bf16"));
    present(&[
        ("sse4.2", has!("sse4.2")),
        ("avx", has!("avx")),
        ("avx2", has!("avx2")),
        ("fma", has!("fma")),
        ("f16c", has!("f16c")),
        ("avx512f", has!("avx512f")),
        ("avx512bw", has!("avx512bw")),
        ("avx512_vnni", has!("avx512vnni")),
        ("avx512_bf16", has!("avx512bf16")),
        ("avx512_fp16", has!("avx512fp16")),
        ("amx-bf16", amx),
    ])
}

#[cfg(target_arch = "aarch64")]
fn features(_cpuinfo: &str) -> Vec<&'static str> {
    use std::arch::is_aarch64_feature_detected as has;
    present(&[
        ("neon", has!("neon")),
        ("fp16", has!("fp16")),
        ("dotprod", has!("dotprod")),
        ("bf16", has!("bf16")),
        ("i8mm", has!("i8mm")),
        ("sve", has!("sve")),
    ])
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features(_cpuinfo: &str) -> Vec<&'static str> {
    Vec::new()
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn present(all: &[(&'static str, bool)]) -> Vec<&'static str> {
    all.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_read() {
        let meminfo = "MemTotal:       24684096 kB\nMemFree:        21820460 kB\nHugePages: 0\n";
        assert_eq!(memory(meminfo), Some(24_684_096 * 1024));
        assert_eq!(memory("MemFree: 1 kB\n"), None);
        assert_eq!(memory("MemTotal: lots kB\n"), None);

        let thread =
            |core| format!("model name\t: AMD EPYC\nphysical id\t: 0\ncore id\t: {core}\n\n");
        let cpuinfo = [0, 1, 0, 1].map(thread).concat();
        assert_eq!(field(&cpuinfo, "model name"), Some("AMD EPYC"));
        assert_eq!(cores(&cpuinfo), Some(2));
        assert_eq!(cores("processor\t: 0\nBogoMIPS\t: 50.00\n"), None);
    }
}
