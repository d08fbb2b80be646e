//! A training run as one self-contained HTML page: facts, curves drawn as inline SVG, samples and
//! configuration. It runs no script, loads nothing, follows the reader's colour scheme, and draws
//! what can be drawn whatever the numbers are.

use super::memory;
use crate::memory::{MemoryByRank, StepMemory};

/// Everything one page shows.
#[derive(Debug, Clone)]
pub struct Report {
    /// Heading of the page, usually the name of the run.
    pub title: String,
    /// Short facts as label and value, such as `("parameters", "10.7 M")`.
    pub facts: Vec<(String, String)>,
    /// Charts, in reading order.
    pub charts: Vec<Chart>,
    /// What a rank held over one step, if that was recorded.
    pub step_memory: Option<StepMemory>,
    /// What each rank held in the last step, if that is known.
    pub memory_by_rank: Option<MemoryByRank>,
    /// Generated texts, each under its heading.
    pub samples: Vec<(String, String)>,
    /// Configuration of the run as pretty JSON, folded away until the reader opens it.
    pub config: String,
}

/// One set of axes and the curves on it.
#[derive(Debug, Clone)]
pub struct Chart {
    /// Heading of the chart.
    pub title: String,
    /// What the horizontal axis counts.
    pub x_label: String,
    /// What the vertical axis measures, with its unit.
    pub y_label: String,
    /// Scale of the vertical axis; the horizontal one is always linear.
    pub scale: Scale,
    /// The curves, drawn first to last.
    pub series: Vec<Series>,
}

/// How values map to heights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Equal differences take equal heights.
    Linear,
    /// Equal ratios take equal heights. Values that are not positive are left out.
    Log,
}

/// One curve.
#[derive(Debug, Clone)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Abscissa and value. A point that is not finite interrupts the curve.
    pub points: Vec<(f64, f64)>,
    /// How the curve is drawn.
    pub style: Style,
}

/// How a curve is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// A solid line that ends in a marker.
    Line,
    /// Markers joined by a hairline, for sparse measurements such as validation losses.
    Dots,
    /// A thin translucent line in the colour of the next curve, to lie under a smoothed one.
    Faint,
}

/// Centred moving mean over `window` points, cut where the data end.
///
/// A point that is not finite counts in no mean and becomes NaN, so that a gap remains a gap.
pub fn smooth(points: &[(f64, f64)], window: usize) -> Vec<(f64, f64)> {
    let (before, after) = (window / 2, window.saturating_sub(1) / 2);
    let mean = |(i, &(x, y)): (usize, &(f64, f64))| {
        let near = &points[i.saturating_sub(before)..points.len().min(i + after + 1)];
        let finite = near.iter().map(|p| p.1).filter(|y| y.is_finite());
        let (sum, count) = finite.fold((0.0, 0.0), |(sum, n), y| (sum + y, n + 1.0));
        (x, if y.is_finite() { sum / count } else { f64::NAN })
    };
    points.iter().enumerate().map(mean).collect()
}

impl Report {
    /// The page, a complete HTML document.
    pub fn render(&self) -> String {
        let (title, config) = (escape(&self.title), escape(&self.config));
        let facts = concat(&self.facts, |(label, value)| {
            let (label, value) = (escape(label), escape(value));
            format!("<div><dt>{label}</dt><dd>{value}</dd></div>")
        });
        let charts = concat(&self.charts, Chart::render)
            + &concat(&self.step_memory, memory::chart)
            + &concat(&self.memory_by_rank, memory::tables);
        let samples = concat(&self.samples, |(heading, text)| {
            let (heading, text) = (escape(heading), escape(text));
            format!("<figure><figcaption><h2>{heading}</h2></figcaption><pre>{text}</pre></figure>")
        });
        const CSS: &str = include_str!("page.css");
        format!(
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>\
             <meta name='viewport' content='width=device-width,initial-scale=1'>\
             <title>{title}</title><style>{CSS}</style></head>\n\
             <body><header><p>Pyroclast training report</p><h1>{title}</h1></header>\n\
             <dl>{facts}</dl>\n<div>{charts}</div>\n<div>{samples}</div>\n\
             <details><summary>Configuration</summary><pre>{config}</pre></details></body></html>\n"
        )
    }
}

impl Chart {
    /// The plot spans 58 to 578 and 28 to 246 of 600 by 290 units.
    fn render(&self) -> String {
        let curves: Vec<_> = self.series.iter().map(|s| s.project(self.scale)).collect();
        let drawn = || curves.iter().flatten().filter(|p| p.1.is_finite());
        let x = Axis::new(drawn().map(|p| p.0), Scale::Linear, (58.0, 578.0));
        let y = Axis::new(drawn().map(|p| p.1), self.scale, (246.0, 28.0));
        let (mut plot, mut legend, mut hue) = (ticks(&x, &y), String::new(), 0);
        for (series, curve) in self.series.iter().zip(&curves) {
            let (name, (kind, _)) = (escape(&series.name), series.style.look());
            let last = curve.iter().rfind(|p| p.1.is_finite());
            let value = last.map_or("no data".into(), |p| y.label(p.1, 4));
            let marks = series.style.render(&thin(curve), &x, &y);
            plot += &format!("<g class='c{hue}'>{marks}</g>");
            legend += &format!("<li class='c{hue} {kind}'><i></i>{name}<b>{value}</b></li>");
            // The style sheet has six colours; a faint curve shares that of the next.
            hue = (hue + usize::from(series.style != Style::Faint)) % 6;
        }
        figure(&self.title, &legend, &plot, [&self.x_label, &self.y_label])
    }
}

/// The ticks of both axes with their labels, and a rule at each height.
pub(super) fn ticks(x: &Axis, y: &Axis) -> String {
    let heights = concat(y.ticks(), |tick| {
        let (at, label) = (y.pixel(tick), y.label(tick, 6));
        let text = format!("<text class='tick' x='50' y='{at:.1}'>{label}</text>");
        format!("<path class='rule' d='M58 {at:.1}H578'/>{text}")
    });
    let abscissas = concat(x.ticks(), |tick| {
        let (at, label) = (x.pixel(tick), x.label(tick, 6));
        format!("<path d='M{at:.1} 246v5'/><text x='{at:.1}' y='260'>{label}</text>")
    });
    heights + &abscissas
}

/// A plot with its title, its legend, and the labels of its axes, the horizontal one first.
pub(super) fn figure(title: &str, legend: &str, plot: &str, labels: [&str; 2]) -> String {
    let (title, [x_label, y_label]) = (escape(title), labels.map(escape));
    format!(
        "<figure><figcaption><h2>{title}</h2><ul>{legend}</ul></figcaption>\
         <svg viewBox='0 0 600 290' role='img'>{plot}<path d='M58 246H578'/>\
         <text class='name' x='0' y='9'>{y_label}</text>\
         <text x='318' y='280'>{x_label}</text></svg></figure>\n"
    )
}

impl Style {
    /// The class in the style sheet, and how many points, counted from the last, get a marker.
    fn look(self) -> (&'static str, usize) {
        match self {
            Self::Line => ("line", 1),
            Self::Dots => ("dots", usize::MAX),
            Self::Faint => ("faint", 0),
        }
    }

    /// The marks of a curve, which NaN interrupts.
    fn render(self, curve: &[(f64, f64)], x: &Axis, y: &Axis) -> String {
        let place = |p: &(f64, f64)| (x.pixel(p.0), y.pixel(p.1));
        let runs = curve.split(|p| p.1.is_nan()).filter(|run| !run.is_empty());
        let path = concat(runs, |run| {
            // The empty stroke makes a point alone between two gaps a dot.
            let ((x, y), rest) = (place(&run[0]), run[1..].iter().map(place));
            let rest = concat(rest, |(x, y)| format!("L{x:.1} {y:.1}"));
            format!("M{x:.1} {y:.1}h0{rest}")
        });
        let (class, markers) = self.look();
        let drawn = curve.iter().rev().filter(|p| p.1.is_finite());
        let dots = concat(drawn.take(markers), |p| {
            let ((cx, cy), at, value) = (place(p), x.label(p.0, 6), y.label(p.1, 4));
            format!("<circle cx='{cx:.1}' cy='{cy:.1}' r='4'><title>{at}: {value}</title></circle>")
        });
        format!("<path class='{class}' d='{path}'/>{dots}")
    }
}

impl Series {
    /// Turns differences into distances, and what cannot be drawn, or nearly overflows, into NaN.
    fn project(&self, scale: Scale) -> Vec<(f64, f64)> {
        let project = |&(x, y): &(f64, f64)| match scale {
            Scale::Linear if x.abs() < 1e300 && y.abs() < 1e300 => (x, y),
            Scale::Log if x.abs() < 1e300 && y > 1e-300 && y < 1e300 => (x, y.log10()),
            _ => (f64::NAN, f64::NAN),
        };
        self.points.iter().map(project).collect()
    }
}

/// Maps projected values to pixels and knows where its ticks are.
pub(super) struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    pixels: (f64, f64),
}

impl Axis {
    /// An axis over `values`, its bounds slightly rounded outwards.
    pub(super) fn new(
        values: impl Iterator<Item = f64> + Clone,
        scale: Scale,
        pixels: (f64, f64),
    ) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = match low.abs().max(high.abs()) {
            f64::INFINITY => (0.0, 1.0),
            ..1e-250 => (-1.0, 1.0),
            size if high - low < size * 1e-9 => (low - size * 0.1, high + size * 0.1),
            _ => (low, high),
        };
        let grain = step(low, high) / 4.0;
        Self {
            scale,
            low: (low / grain).floor() * grain,
            high: (high / grain).ceil() * grain,
            pixels,
        }
    }

    pub(super) fn pixel(&self, value: f64) -> f64 {
        let (start, end) = self.pixels;
        start + (end - start) * (value - self.low) / (self.high - self.low)
    }

    fn label(&self, value: f64, digits: usize) -> String {
        let log = self.scale == Scale::Log;
        number(if log { 10f64.powf(value) } else { value }, digits)
    }

    /// Round values. On a logarithmic axis these are powers of ten, or 1, 2 and 5 times those over
    /// a few decades, or equally spaced over less than one.
    fn ticks(&self) -> Vec<f64> {
        let (low, high) = (self.low, self.high);
        if self.scale == Scale::Linear || step(low, high) >= 1.0 {
            return multiples(low, high);
        }
        if high - low < 0.8 {
            let even = multiples(10f64.powf(low), 10f64.powf(high));
            return even.into_iter().map(f64::log10).collect();
        }
        let decades = low.floor() as i32..=high.floor() as i32;
        let round = decades.flat_map(|e| [1f64, 2.0, 5.0].map(|f| f64::from(e) + f.log10()));
        round.filter(|tick| (low..=high).contains(tick)).collect()
    }
}

/// The 1, 2 or 5 times a power of ten that cuts `low..high` in three to six.
fn step(low: f64, high: f64) -> f64 {
    let raw = (high - low) / 6.0;
    let decade = 10f64.powf(raw.log10().floor());
    let enough = |factor: &f64| factor * decade > raw * 0.999;
    decade * [1.0, 2.0, 5.0].into_iter().find(enough).unwrap_or(10.0)
}

/// The multiples of their [`step`] between `low` and `high`.
fn multiples(low: f64, high: f64) -> Vec<f64> {
    let step = step(low, high);
    let indices = (low / step - 1e-6).ceil() as i64..=(high / step + 1e-6).floor() as i64;
    indices.map(|k| k as f64 * step).collect()
}

/// Most points a curve draws: more than there are pixels to tell them apart.
const MAX_POINTS: usize = 1500;

/// At most [`MAX_POINTS`] points: the lowest and highest of each bucket, so that spikes remain.
fn thin(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= MAX_POINTS {
        return points.to_vec();
    }
    let size = points.len().div_ceil(MAX_POINTS / 2);
    let extremes = |bucket: &[(f64, f64)]| {
        let find = |y: f64| bucket.iter().position(|p| p.1 == y).unwrap_or(0);
        let low = find(bucket.iter().map(|p| p.1).fold(f64::INFINITY, f64::min));
        let high = find(bucket.iter().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max));
        [low.min(high), low.max(high)].map(|i| bucket[i])
    };
    points.chunks(size).flat_map(extremes).collect()
}

/// `value` for people, to `digits` significant digits: `0.25`, `12.5k`, `3M`, `4e-5`.
fn number(value: f64, digits: usize) -> String {
    let round = |v: f64| -> f64 { format!("{v:.*e}", digits - 1).parse().unwrap_or(v) };
    match value.abs() {
        1e6..1e9 => format!("{}M", round(value / 1e6)),
        1e3..1e6 => format!("{}k", round(value / 1e3)),
        0.0 | 0.01..1e3 => round(value).to_string(),
        _ => format!("{:e}", round(value)),
    }
}

/// `text` as the content of an element; control characters become U+FFFD.
pub(super) fn escape(text: &str) -> String {
    let hidden = |c: char| c.is_control() && c != '\n' && c != '\t';
    let text = text.replace(hidden, "\u{fffd}").replace('&', "&amp;");
    text.replace('<', "&lt;").replace('>', "&gt;")
}

pub(super) fn concat<T>(
    items: impl IntoIterator<Item = T>,
    render: impl Fn(T) -> String,
) -> String {
    items.into_iter().map(render).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(text: &str, scale: Scale, points: &[(f64, f64)]) -> String {
        let text = || text.to_owned();
        let series = |style| Series { name: text(), points: points.to_vec(), style };
        let chart = Chart {
            title: text(),
            x_label: text(),
            y_label: text(),
            scale,
            series: [Style::Line, Style::Dots, Style::Faint].map(series).into(),
        };
        Report {
            title: text(),
            facts: vec![(text(), text())],
            charts: vec![chart],
            step_memory: None,
            memory_by_rank: None,
            samples: vec![(text(), text())],
            config: text(),
        }
        .render()
    }

    #[test]
    fn texts_are_escaped() {
        let page = page("<b>&\0", Scale::Linear, &[]);
        assert_eq!(page.matches("&lt;b&gt;&amp;\u{fffd}").count(), 13);
        assert!(!page.contains("<b>&") && !page.contains('\0'));
    }

    #[test]
    fn ticks_are_round() {
        for (scale, low, high, expected) in [
            (Scale::Linear, 0.0, 1000.0, "0 200 400 600 800 1k"),
            (Scale::Linear, -0.2, 0.2, "-0.2 -0.1 0 0.1 0.2"),
            (Scale::Linear, 0.0, 2.5e-4, "0 5e-5 1e-4 1.5e-4 2e-4 2.5e-4"),
            (Scale::Log, -0.8, 0.8, "0.2 0.5 1 2 5"),
            (Scale::Log, -4.0, 5.0, "1e-4 0.01 1 100 10k"),
            (Scale::Log, 0.1, 0.6, "1.5 2 2.5 3 3.5"),
        ] {
            let axis = Axis::new([low, high].into_iter(), scale, (0.0, 1.0));
            let labels: Vec<_> = axis.ticks().iter().map(|&t| axis.label(t, 6)).collect();
            assert_eq!(labels.join(" "), expected);
        }
    }

    #[test]
    fn thinning_keeps_extremes_and_smoothing_keeps_gaps() {
        let mut points: Vec<_> = (0..100_000).map(|x| (f64::from(x), 1.0)).collect();
        (points[31_416].1, points[61_803].1) = (9.0, -9.0);
        points[..500].fill((f64::NAN, f64::NAN));
        let thinned = thin(&points);
        assert!(thinned.len() <= MAX_POINTS && thinned[0].1.is_nan());
        assert!(thinned.contains(&points[31_416]) && thinned.contains(&points[61_803]));
        let smoothed = smooth(&[1.0, 6.0, f64::NAN, 4.0].map(|y| (0.0, y)), 3);
        assert_eq!(smoothed[..2], [(0.0, 3.5), (0.0, 3.5)]);
        assert!(smoothed[2].1.is_nan() && smoothed[3] == (0.0, 4.0));
    }

    #[test]
    fn degenerate_series_are_drawn() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let table: [(usize, &[(f64, f64)]); 7] = [
            (0, &[]),
            (1, &[(3.0, 7.0)]),
            (1, &[(0.0, 0.0), (0.0, 5e-324)]),
            (1, &[(0.0, 1e16), (1.0, 1e16 + 2.0)]),
            (0, &[(1.0, nan), (nan, 1.0), (inf, -inf), (0.0, f64::MAX)]),
            (2, &[(1.0, 1.0), (2.0, nan), (3.0, 3.0), (4.0, inf)]),
            (1, &[(1.0, 9e299), (2.0, 1e-299), (3.0, -9e299)]),
        ];
        for (runs, points) in table {
            let linear = page("", Scale::Linear, points);
            let log = page("", Scale::Log, points);
            assert_eq!(linear.matches("h0").count(), 3 * runs, "{points:?}");
            assert!(!(linear + &log).contains("NaN"), "{points:?}");
        }
    }
}
