//! The findings as aligned lines.

use std::fmt::Write;

use super::{Doctor, Kind};

/// Columns: names of devices, labels, values, and the end of the line.
const LABEL: usize = 12;
const VALUE: usize = 25;
const END: usize = 92;

pub(super) fn render(doctor: &Doctor) -> String {
    let mut out = String::from("CPU\n");
    let cpu = &doctor.cpu;
    row(&mut out, "model", "", [cpu.model.as_str()], " ");
    row(&mut out, "cores", "", [cpu.cores.to_string().as_str()], " ");
    row(&mut out, "threads", "", [cpu.threads.to_string().as_str()], " ");
    let memory = cpu.total_memory_bytes.map(bytes).unwrap_or_default();
    row(&mut out, "memory", "", [memory.as_str()], " ");
    row(&mut out, "features", "", cpu.features.iter().copied(), " ");

    out.push_str("\nDevices\n");
    for device in &doctor.devices {
        let id = format!("{} {}", device.accelerator, device.index);
        let kind = match device.kind {
            Kind::Software => "software",
            Kind::Integrated => "integrated",
            Kind::Discrete => "discrete",
            Kind::Virtual => "virtual",
            Kind::Host => "host",
            Kind::Unknown => "unknown",
        };
        row(&mut out, &id, kind, [device.name.as_str()], " ");
        let problem = device.problem.as_deref().unwrap_or_default();
        row(&mut out, "", "problem", problem.split_whitespace(), " ");
        let driver = [device.api.as_str(), device.driver.as_str()];
        row(&mut out, "", "driver", driver.into_iter().filter(|part| !part.is_empty()), ", ");
        row(&mut out, "", "compiler", [device.compiler.as_str()], " ");
        row(&mut out, "", "dtypes", device.dtypes.iter().copied(), " ");
        let of = |size: Option<u64>, what| size.map(|size| format!("{}{what}", bytes(size)));
        let shared = device.shared_memory_bytes.map(|size| size as u64);
        let sizes = [
            of(device.memory_bytes, ""),
            of(device.max_allocation_bytes, " in one allocation"),
            of(shared, " shared in a cube"),
        ];
        row(&mut out, "", "memory", sizes.iter().flatten().map(String::as_str), ", ");
        if let Some((fewest, most)) = device.plane_size {
            let least = if fewest == most { String::new() } else { format!("{fewest} to ") };
            let ops = if device.plane_ops { "with" } else { "without" };
            let plane = format!("{least}{most} units, {ops} plane operations");
            row(&mut out, "", "plane", [plane.as_str()], " ");
            let matrices = device.cooperative_matrix.iter().map(String::as_str);
            let none = device.cooperative_matrix.is_empty().then_some("none");
            row(&mut out, "", "matrices", matrices.chain(none), ", ");
        }
        out.push('\n');
    }

    out.push_str("Missing\n");
    for missing in &doctor.missing {
        let _ = writeln!(out, "  {}", missing.what);
        row(&mut out, "", "", missing.why.split_whitespace(), " ");
        if !missing.command.is_empty() {
            let _ = writeln!(out, "{:LABEL$}$ {}", "", missing.command);
        }
    }
    if doctor.missing.is_empty() {
        out.push_str("  nothing\n");
    }
    out
}

/// One labelled value, broken between its parts where the line ends. Nothing if there is no value.
fn row<'a>(
    out: &mut String,
    id: &str,
    label: &str,
    parts: impl IntoIterator<Item = &'a str>,
    separator: &str,
) {
    let start = if label.is_empty() { LABEL } else { VALUE };
    let mut lines: Vec<String> = Vec::new();
    for part in parts.into_iter().filter(|part| !part.is_empty()) {
        match lines.last_mut() {
            Some(line) if start + line.len() + separator.len() + part.len() <= END => {
                line.push_str(separator);
                line.push_str(part);
            }
            _ => lines.push(part.to_owned()),
        }
    }
    for (index, line) in lines.iter().enumerate() {
        let head = if index == 0 { format!("  {id:<10}{label}") } else { String::new() };
        let end = if index + 1 < lines.len() { separator.trim_end() } else { "" };
        let _ = writeln!(out, "{head:<start$}{line}{end}");
    }
}

fn bytes(size: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let exponent = ((size.max(1).ilog2() / 10) as usize).min(units.len() - 1);
    let value = size as f64 / 1024_f64.powi(exponent as i32);
    let digits = usize::from(value.fract() >= 0.05);
    format!("{value:.digits$} {}", units[exponent])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_long_values_are_readable() {
        assert_eq!([0, 32_768, 1 << 27].map(bytes), ["0 B", "32 KiB", "128 MiB"]);
        assert_eq!(bytes(24_684_096 * 1024), "23.5 GiB");

        let mut text = String::new();
        row(&mut text, "cuda 0", "matrices", ["16x16x16 f16 f16 -> f32"; 9], ", ");
        assert!(text.starts_with("  cuda 0    matrices     16x16x16 f16 f16 -> f32, 16x16x16"));
        assert!(text.lines().count() > 1 && text.lines().all(|line| line.len() <= END + 1));
        row(&mut text, "", "driver", [""], ", ");
        assert!(!text.contains("driver"));
    }
}
