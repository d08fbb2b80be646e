//! Memory in the report: what a rank held over one step, and what each rank held in the last one.

use std::collections::BTreeMap;

use pyroclast_strategies::memory::Category;

use super::page::{Axis, Scale, concat, escape, figure, ticks};
use crate::memory::{MemoryByRank, MemorySample, StepMemory, TOTAL};

/// The areas of the chart, the lowest first. What changes least lies lowest, so that what lies on it
/// stays level.
const STACK: [Category; Category::ALL.len()] = [
    Category::ParametersSharded,
    Category::Optimizer,
    Category::Gradients,
    Category::Activations,
    Category::ParametersFull,
    Category::Communication,
];

/// Most samples that are drawn one by one: more than there are pixels to tell them apart.
const MAX_SAMPLES: usize = 800;

/// Most ranks that get a column each.
const MAX_RANKS: usize = 8;

/// A chart of one step, each category an area that lies on the one before; nothing if there are too
/// few samples for an area.
pub(super) fn chart(memory: &StepMemory) -> String {
    let samples = thin(&memory.samples);
    let [first, .., last] = &samples[..] else { return String::new() };
    let highest = memory.samples.iter().map(total).fold(0.0, f64::max);
    let (size, unit) = unit(highest);
    let milliseconds = |sample: &MemorySample| sample.seconds * 1e3;
    let ends = [first, last].map(milliseconds);
    let x = Axis::new(ends.into_iter(), Scale::Linear, (58.0, 578.0));
    let y = Axis::new([0.0, (highest / size).max(1.0)].into_iter(), Scale::Linear, (246.0, 28.0));
    // Column `k` has the bottom of area `k`, the last column the top of all.
    let levels: Vec<_> = samples.iter().map(|s| levels(s).map(|at| y.pixel(at / size))).collect();
    let border = |level: usize| -> Vec<(f64, f64)> {
        let moments = samples.iter().zip(&levels);
        moments.map(|(sample, at)| (x.pixel(milliseconds(sample)), at[level])).collect()
    };
    let (mut plot, mut legend) = (ticks(&x, &y), String::new());
    for (hue, category) in STACK.into_iter().enumerate() {
        let (name, path) = (label(category.name()), area(&border(hue), &border(hue + 1)));
        let peak = memory.samples.iter().map(|sample| sample.bytes[category as usize]).max();
        let peak = readable(peak.unwrap_or(0) as f64);
        let hint = format!("<title>{name}: at most {peak}</title>");
        plot += &format!("<path class='area c{hue}' d='{path}'>{hint}</path>");
        legend += &format!("<li class='area c{hue}'><i></i>{name}<b>{peak}</b></li>");
    }
    // However short a peak is, its line can be seen.
    plot += &format!("<path class='total' d='{}'/>", stairs(&border(STACK.len())));
    legend += &format!("<li class='total'><i></i>total<b>{}</b></li>", readable(highest));
    let y_label = format!("{unit} on rank {}, step {} (legend: peaks)", memory.rank, memory.step);
    figure(
        "Memory of the engine over one step",
        &legend,
        &plot,
        ["milliseconds since the step began", &y_label],
    )
}

/// What each rank held at most in a step, and what at its end.
pub(super) fn tables(memory: &MemoryByRank) -> String {
    table("Peak memory in the last step", &memory.peak)
        + &table("Memory at the end of the last step", &memory.live)
}

/// A row for each category and a column for each rank; of many ranks only the smallest, the median
/// and the largest number of each row.
fn table(title: &str, bytes: &BTreeMap<String, Vec<u64>>) -> String {
    let ranks = bytes.values().map(Vec::len).max().unwrap_or(0);
    let heads = match ranks {
        0 => return String::new(),
        1..=MAX_RANKS => (0..ranks).map(|rank| format!("rank {rank}")).collect(),
        _ => ["smallest", "median", "largest"].map(str::to_owned).to_vec(),
    };
    let place = |name: &str| {
        let category = Category::ALL.iter().position(|category| category.name() == name);
        (name == TOTAL, category.unwrap_or(Category::ALL.len()))
    };
    let mut rows: Vec<_> = bytes.iter().collect();
    rows.sort_by_key(|(name, _)| place(name));
    let rows = concat(rows, |(name, bytes)| {
        let class = if name == TOTAL { " class='total'" } else { "" };
        let cells =
            concat(cells(bytes, ranks), |cell| format!("<td>{}</td>", readable(cell as f64)));
        format!("<tr{class}><th scope='row'>{}</th>{cells}</tr>", label(name))
    });
    let heads = concat(heads, |head| format!("<th scope='col'>{head}</th>"));
    let of = if ranks > MAX_RANKS { format!("of {ranks} ranks") } else { String::new() };
    format!(
        "<figure class='table'><figcaption><h2>{title}</h2></figcaption>\
         <table><thead><tr><td>{of}</td>{heads}</tr></thead><tbody>{rows}</tbody></table></figure>\n"
    )
}

/// The numbers of a row that are shown.
fn cells(bytes: &[u64], ranks: usize) -> Vec<u64> {
    if ranks <= MAX_RANKS {
        return bytes.to_vec();
    }
    let mut sorted = bytes.to_vec();
    sorted.sort_unstable();
    let shown = [0, sorted.len() / 2, sorted.len().saturating_sub(1)];
    shown.into_iter().filter_map(|at| sorted.get(at).copied()).collect()
}

/// Cuts the step into [`MAX_SAMPLES`] equal times, and keeps for each the most that was held in it.
/// Few samples stay as they are.
fn thin(samples: &[MemorySample]) -> Vec<MemorySample> {
    let [first, .., last] = samples else { return samples.to_vec() };
    if samples.len() <= MAX_SAMPLES {
        return samples.to_vec();
    }
    let moment = |bin: usize| {
        first.seconds + (last.seconds - first.seconds) * (bin as f64 / MAX_SAMPLES as f64)
    };
    // Begins with what is held when a bin begins. The last sample only says where the step ends.
    let mut rest = &samples[..samples.len() - 1];
    let highest = |bin: usize| {
        let end = if bin + 1 < MAX_SAMPLES { moment(bin + 1) } else { f64::INFINITY };
        let count = rest.partition_point(|sample| sample.seconds < end).max(1);
        let within = &rest[..count];
        rest = &rest[count - 1..];
        let most = within.iter().max_by(|a, b| total(a).total_cmp(&total(b)));
        MemorySample { seconds: moment(bin), ..*most.unwrap_or(last) }
    };
    (0..MAX_SAMPLES).map(highest).chain([*last]).collect()
}

/// Bytes of all categories. No sum of such numbers is too large for it.
fn total(sample: &MemorySample) -> f64 {
    sample.bytes.iter().map(|&bytes| bytes as f64).sum()
}

/// Where the areas of a sample begin, in bytes, and where the last one ends.
fn levels(sample: &MemorySample) -> [f64; STACK.len() + 1] {
    let mut levels = [0.0; STACK.len() + 1];
    for (at, category) in STACK.into_iter().enumerate() {
        levels[at + 1] = levels[at] + sample.bytes[category as usize] as f64;
    }
    levels
}

/// The outline of an area between two borders with the same abscissas.
fn area(bottom: &[(f64, f64)], top: &[(f64, f64)]) -> String {
    let back = concat(bottom.iter().rev(), |(x, y)| format!("V{y:.1}H{x:.1}"));
    stairs(top) + &back + "Z"
}

/// A line on which each height holds until the next point.
fn stairs(points: &[(f64, f64)]) -> String {
    let [(x, y), rest @ ..] = points else { return String::new() };
    format!("M{x:.1} {y:.1}") + &concat(rest, |(x, y)| format!("H{x:.1}V{y:.1}"))
}

/// A category's name as the content of an element.
fn label(name: &str) -> String {
    escape(&name.replace('_', " "))
}

/// The largest unit of which there is one in `bytes`, and its size.
fn unit(bytes: f64) -> (f64, &'static str) {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let sizes = units.map(|(power, unit)| (f64::from(1u32 << power), unit));
    sizes.into_iter().find(|(size, _)| *size <= bytes).unwrap_or((1.0, "B"))
}

/// `bytes` for people, to about three digits: `12 B`, `1.50 MiB`, `300 GiB`.
fn readable(bytes: f64) -> String {
    let (size, unit) = unit(bytes);
    let value = bytes / size;
    let decimals = match value {
        _ if unit == "B" => 0,
        ..10.0 => 2,
        10.0..100.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn step(samples: &[(f64, [u64; 6])]) -> StepMemory {
        let samples = samples.iter().map(|&(seconds, bytes)| MemorySample { seconds, bytes });
        StepMemory { step: 7, rank: 0, samples: samples.collect() }
    }

    fn ranks(name: &str, bytes: &[u64]) -> BTreeMap<String, Vec<u64>> {
        [("gradients", vec![1; bytes.len()]), (name, bytes.to_vec()), (TOTAL, bytes.to_vec())]
            .map(|(name, bytes)| (name.to_owned(), bytes))
            .into()
    }

    #[test]
    fn heights_hold_until_the_next_point() {
        let top = [(0.0, 5.0), (2.0, 4.0), (3.0, 6.0)];
        assert_eq!(stairs(&top), "M0.0 5.0H2.0V4.0H3.0V6.0");
        assert_eq!(
            area(&top.map(|(x, _)| (x, x + 10.0)), &top),
            "M0.0 5.0H2.0V4.0H3.0V6.0V13.0H3.0V12.0H2.0V10.0H0.0Z"
        );
        assert_eq!(stairs(&[]), "");
    }

    #[test]
    fn areas_lie_on_each_other() {
        let page = chart(&step(&[
            (0.0, [0, 2 * MIB, 0, 0, 0, 0]),
            (0.5, [2 * MIB, 2 * MIB, 0, 0, 0, 0]),
            (1.0, [0, 2 * MIB, 0, 0, 0, 0]),
        ]));
        // A pixel of 218 is 4 MiB / 218, one of 520 a second / 520.
        let shards = "M58.0 137.0H318.0V137.0H578.0V137.0V246.0H578.0V246.0H318.0V246.0H58.0Z";
        let whole = "M58.0 137.0H318.0V28.0H578.0V137.0V137.0H578.0V137.0H318.0V137.0H58.0Z";
        assert!(page.contains(&format!("<path class='area c0' d='{shards}'>")), "{page}");
        assert!(page.contains(&format!("<path class='area c4' d='{whole}'>")), "{page}");
        assert!(page.contains("parameters full<b>2.00 MiB</b>"), "{page}");
        assert!(page.contains("total<b>4.00 MiB</b>"), "{page}");
        assert!(page.contains("MiB on rank 0, step 7"), "{page}");
        assert_eq!(page.matches("class='area c").count(), 12, "a path and a name each");
    }

    #[test]
    fn any_step_is_drawn() {
        let (none, most) = ([0; 6], [u64::MAX; 6]);
        assert_eq!(chart(&step(&[])) + &chart(&step(&[(0.0, most)])), "");
        for samples in [[(0.0, none), (0.0, none)], [(0.0, most), (1e9, none)]] {
            let page = chart(&step(&samples));
            assert!(page.contains("total<b>") && !page.contains("NaN") && !page.contains("inf"));
        }
        let at_once = vec![(0.5, most); 2 * MAX_SAMPLES];
        assert!(!chart(&step(&at_once)).contains("NaN"));
    }

    #[test]
    fn thinning_keeps_peaks_and_how_long_they_are() {
        let mut samples: Vec<_> = (0..100_000).map(|i| (f64::from(i) * 1e-6, [3; 6])).collect();
        samples[31_416].1 = [0, 0, 0, 0, 0, 90];
        samples[61_803].1 = [0; 6];
        samples.extend([(1.0, [8; 6]), (1.0, [7; 6])]);
        let (all, thinned) = (step(&samples), thin(&step(&samples).samples));
        assert_eq!(thinned.len(), MAX_SAMPLES + 1);
        assert_eq!(thinned.iter().map(total).fold(0.0, f64::max), 90.0);
        assert_eq!(thinned.iter().filter(|sample| sample.bytes[5] == 90).count(), 1);
        assert!(thinned.iter().all(|sample| total(sample) >= 18.0), "each bin's most");
        assert!(thinned.is_sorted_by(|a, b| a.seconds < b.seconds));
        assert_eq!(thinned.first(), all.samples.first());
        assert_eq!(thinned.last(), all.samples.last());
        assert_eq!(thinned[MAX_SAMPLES - 2].bytes, [3; 6], "held until the end");
        assert_eq!(thinned[MAX_SAMPLES - 1].bytes, [8; 6], "however short");
        assert_eq!(thin(&all.samples[..MAX_SAMPLES]), all.samples[..MAX_SAMPLES]);
    }

    #[test]
    fn few_ranks_have_a_column_each() {
        let page = table("Peak", &ranks("<b>", &[MIB, 3 * MIB / 2]));
        assert!(page.contains("<th scope='col'>rank 0</th><th scope='col'>rank 1</th></tr>"));
        let gradients = "<tr><th scope='row'>gradients</th><td>1 B</td><td>1 B</td></tr>";
        let other = "<tr><th scope='row'>&lt;b&gt;</th><td>1.00 MiB</td><td>1.50 MiB</td></tr>";
        let total = "<tr class='total'><th scope='row'>total</th><td>1.00 MiB</td>";
        assert!(page.contains(&[gradients, other, total].concat()), "{page}");
        assert_eq!(table("Peak", &BTreeMap::new()), "");
    }

    #[test]
    fn many_ranks_are_summed_up() {
        let page = table("Peak", &ranks("optimizer", &[9, 2, 3, 4, 1, 6, 7, 8, 5]));
        assert!(page.contains("<td>of 9 ranks</td><th scope='col'>smallest</th>"), "{page}");
        let row = "<th scope='row'>optimizer</th><td>1 B</td><td>5 B</td><td>9 B</td></tr>";
        assert!(page.contains(row) && !page.contains("rank 0"), "{page}");
    }

    #[test]
    fn bytes_have_a_readable_unit() {
        let expected =
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (12 * MIB + MIB / 2, "12.5 MiB")];
        for (bytes, text) in expected {
            assert_eq!(readable(bytes as f64), text);
        }
        assert_eq!(readable(300.0 * f64::powi(2.0, 30)), "300 GiB");
    }
}
