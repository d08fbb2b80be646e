//! `report.html`: what a run's metrics look like.

mod memory;
pub mod page;

use std::fs;

use serde_json::Value;

use crate::error::Error;
use crate::metrics::{self, Metrics, Split};
use crate::output::RunFolder;
use crate::strategy::StrategyConfig;
use page::{Chart, Report, Scale, Series, Style, smooth};

/// Texts that the report shows, one file each, in name order.
const SAMPLES: &str = "samples";

/// Writes the report of the run in `folder` from its metrics, and from its `memory.json` and the
/// generated texts in its `samples` folder if there are any.
///
/// # Errors
///
/// [`Error::Io`] or [`Error::BadFile`] if files of the run cannot be read or written.
pub fn write(folder: &RunFolder, config: &Value) -> Result<(), Error> {
    let rows = metrics::read(&folder.metrics())?;
    let report = Report {
        title: title(folder, config),
        facts: facts(&rows, config),
        charts: charts(&rows),
        // A report without it is better than none.
        step_memory: crate::memory::read(folder).unwrap_or_default(),
        memory_by_rank: last(&rows).and_then(|row| row.memory.clone()),
        samples: samples(folder)?,
        config: format!("{config:#}"),
    };
    let path = folder.report();
    fs::write(&path, report.render()).map_err(Error::io("writing", path))
}

fn title(folder: &RunFolder, config: &Value) -> String {
    let name = folder.path().file_name().map(|n| n.to_string_lossy().into_owned());
    let name = name.unwrap_or_else(|| "run".to_owned());
    match config["model"].as_str() {
        Some(model) if !name.starts_with(model) => format!("{model} · {name}"),
        _ => name,
    }
}

/// The last row of training.
fn last(rows: &[Metrics]) -> Option<&Metrics> {
    rows.iter().rfind(|row| row.split == Split::Train)
}

fn facts(rows: &[Metrics], config: &Value) -> Vec<(String, String)> {
    let split = |split| rows.iter().filter(move |row| row.split == split);
    let loss = |row: &Metrics| row.loss.map(|loss| format!("{loss:.3}"));
    let best = split(Split::Val)
        .filter_map(|row| Some((row.loss?, row.step)))
        .min_by(|(a, _), (b, _)| a.total_cmp(b));
    let mut rates: Vec<f64> = split(Split::Train).filter_map(|row| row.tokens_per_s).collect();
    rates.sort_by(f64::total_cmp);
    let text = |key: &str| match &config[key] {
        Value::String(text) => Some(text.clone()),
        Value::Null => None,
        other => Some(other.to_string()),
    };
    let strategy = serde_json::from_value::<StrategyConfig>(config["strategy"].clone()).ok();
    let strategy = strategy.map(|strategy| match strategy {
        StrategyConfig::Name(name) => name,
        StrategyConfig::Settings(strategy) => strategy.describe(),
    });
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / f64::powi(2.0, 30));
    let last = last(rows);
    let facts = [
        ("Model", text("model")),
        ("Strategy", strategy.zip(text("world")).map(|(s, w)| format!("{s}, world {w}"))),
        ("Activation checkpointing", text("activation_checkpointing").filter(|a| a != "none")),
        ("Accelerator", text("accelerator")),
        ("Precision", text("precision")),
        ("Optimizer", text("optimizer").zip(text("lr")).map(|(o, lr)| format!("{o}, lr {lr}"))),
        ("Steps", last.map(|row| row.step.to_string())),
        ("Tokens", last.map(|row| row.tokens.to_string())),
        ("Final training loss", last.and_then(loss)),
        ("Best validation loss", best.map(|(loss, step)| format!("{loss:.3} at step {step}"))),
        ("Median tokens/s", rates.get(rates.len() / 2).map(|rate| format!("{rate:.0}"))),
        ("Peak memory", last.and_then(|row| row.peak_rss_bytes).map(gib)),
        ("Seed", text("seed")),
    ];
    facts.into_iter().filter_map(|(name, fact)| Some((name.to_owned(), fact?))).collect()
}

fn charts(rows: &[Metrics]) -> Vec<Chart> {
    let points = |split: Split, value: &dyn Fn(&Metrics) -> Option<f64>| -> Vec<(f64, f64)> {
        rows.iter()
            .filter(|row| row.split == split)
            .filter_map(|row| Some((row.step as f64, value(row)?)))
            .collect()
    };
    let smoothed = |name: &str, value: &dyn Fn(&Metrics) -> Option<f64>| {
        let raw = points(Split::Train, value);
        let window = (raw.len() / 40).max(1);
        let mean = smooth(&raw, window);
        let series = |name: String, points, style| Series { name, points, style };
        match window {
            1 => vec![series(name.to_owned(), raw, Style::Line)],
            _ => vec![
                series("each step".to_owned(), raw, Style::Faint),
                series(format!("{name}, mean of {window}"), mean, Style::Line),
            ],
        }
    };
    let chart = |title: &str, y_label: &str, scale, series| Chart {
        title: title.to_owned(),
        x_label: "step".to_owned(),
        y_label: y_label.to_owned(),
        scale,
        series,
    };
    let mut loss = smoothed("training", &|row| row.loss);
    let validation = points(Split::Val, &|row| row.loss);
    if !validation.is_empty() {
        let name = "validation".to_owned();
        loss.push(Series { name, points: validation, style: Style::Dots });
    }
    let mib = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64 / f64::powi(2.0, 20));
    let mut memory = smoothed("process", &|row| mib(row.peak_rss_bytes));
    memory.retain(|series| series.style != Style::Faint);
    let device = points(Split::Train, &|row| mib(row.peak_device_bytes));
    if !device.is_empty() {
        memory.push(Series { name: "device".to_owned(), points: device, style: Style::Line });
    }
    let rate = points(Split::Train, &|row| row.lr);
    let rate = vec![Series { name: "rate".to_owned(), points: rate, style: Style::Line }];
    vec![
        chart("Loss", "nats per token", Scale::Linear, loss),
        chart(
            "Gradient norm",
            "global, before clipping (logarithmic)",
            Scale::Log,
            smoothed("norm", &|row| row.grad_norm),
        ),
        chart(
            "Throughput",
            "tokens per second, all ranks",
            Scale::Linear,
            smoothed("tokens/s", &|row| row.tokens_per_s),
        ),
        chart("Learning rate", "rate", Scale::Linear, rate),
        chart("Memory", "peak MiB so far", Scale::Linear, memory),
    ]
}

fn samples(folder: &RunFolder) -> Result<Vec<(String, String)>, Error> {
    let folder = folder.path().join(SAMPLES);
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut samples = Vec::new();
    for entry in fs::read_dir(&folder).map_err(Error::io("reading", &folder))? {
        let path = entry.map_err(Error::io("reading", &folder))?.path();
        if !path.is_file() || path.extension().is_none_or(|extension| extension != "txt") {
            continue;
        }
        let text = fs::read_to_string(&path).map_err(Error::io("reading", &path))?;
        let heading = path.file_stem().map(|stem| stem.to_string_lossy().replace('-', " "));
        samples.push((heading.unwrap_or_default(), text));
    }
    samples.sort();
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADINGS: [&str; 3] = [
        "<h2>Memory of the engine over one step</h2>",
        "<h2>Peak memory in the last step</h2>",
        "<h2>Memory at the end of the last step</h2>",
    ];

    fn page(rows: &str, step: Option<&str>) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let run = RunFolder::at(folder.path());
        fs::write(run.metrics(), rows).expect("metrics");
        if let Some(step) = step {
            fs::write(run.memory(), step).expect("a step");
        }
        write(&run, &Value::Null).expect("a report");
        fs::read_to_string(run.report()).expect("the report")
    }

    #[test]
    fn memory_is_shown_if_it_is_known() {
        let row = |split: &str, memory: &str| {
            let counts = r#""step":1,"epoch":0,"skipped":false,"tokens":8"#;
            format!("{{{counts},\"split\":\"{split}\",\"memory\":{memory}}}\n")
        };
        let known = r#"{"live":{"gradients":[1,2]},"peak":{"gradients":[3,4],"total":[5,6]}}"#;
        let step = r#"{"step":1,"rank":0,"samples":[
            {"seconds":0,"bytes":[1,2,3,4,5,6]},{"seconds":0.5,"bytes":[0,0,0,0,0,0]}]}"#;
        let rows = row("train", known) + &row("val", "null");
        let full = page(&rows, Some(step));
        assert!(HEADINGS.iter().all(|heading| full.contains(heading)), "{full}");
        assert!(full.contains("<td>5 B</td><td>6 B</td>"), "{full}");
        let empty = page(&row("train", "null"), None);
        assert!(!HEADINGS.iter().any(|heading| empty.contains(heading)), "{empty}");
    }
}
