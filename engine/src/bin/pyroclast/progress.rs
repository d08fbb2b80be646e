//! The progress bar, and the lines that stand in for it where nobody watches.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pyroclast::{Action, Callback, Metrics, RunInfo, StopReason};

use crate::console::{grouped, say};

/// Shows a run's progress.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    every: u64,
    last_step: u64,
    is_watched: bool,
    /// Moving averages, so that the figures can be read: tokens per second, and seconds per step.
    rate: Option<f64>,
    step_seconds: Option<f64>,
    /// Steps of this run whose gradients overflowed.
    skipped: u64,
}

impl Progress {
    /// Redraws, or prints a line, every so many steps.
    pub(crate) fn new(every: u64) -> Self {
        let is_watched = std::io::stderr().is_terminal();
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        Self {
            bar,
            every: every.max(1),
            last_step: 0,
            is_watched,
            rate: None,
            step_seconds: None,
            skipped: 0,
        }
    }

    fn line(&self, metrics: &Metrics) -> String {
        let loss = metrics.loss.unwrap_or(f64::NAN);
        let rate = grouped(self.rate.unwrap_or(0.0) as u64);
        let left = self.step_seconds.unwrap_or(0.0) * (self.last_step - metrics.step) as f64;
        let (minutes, seconds) = (left as u64 / 60, left as u64 % 60);
        let scale = self.scale(metrics);
        let norm = metrics.grad_norm.map(|norm| format!("   norm {norm:.2}")).unwrap_or_default();
        format!("loss {loss:.4}{norm}{scale}   {rate} tokens/s   {minutes}:{seconds:02} left")
    }

    /// The loss scale, and how many steps it has cost, where there is one.
    fn scale(&self, metrics: &Metrics) -> String {
        let Some(scale) = metrics.loss_scale else { return String::new() };
        let skipped = match self.skipped {
            0 => String::new(),
            count => format!(", {count} skipped"),
        };
        format!("   scale {scale}{skipped}")
    }
}

impl Callback for Progress {
    fn on_fit_start(&mut self, run: &RunInfo) {
        self.last_step = run.last_step;
        if run.first_step > 0 {
            say(&format!("continuing after step {}", run.first_step));
        }
        if self.is_watched {
            let style = ProgressStyle::with_template("{bar:18.208/238} {pos}/{len}   {msg}");
            let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
            self.bar = ProgressBar::new(run.last_step)
                .with_position(run.first_step)
                .with_style(style.progress_chars("━━─"));
        }
    }

    fn on_step_end(&mut self, metrics: &Metrics) -> Action {
        let average = |known: &mut Option<f64>, new: Option<f64>| {
            let mixed = new.map(|new| known.map_or(new, |known| 0.95 * known + 0.05 * new));
            *known = mixed.or(*known);
        };
        average(&mut self.rate, metrics.tokens_per_s);
        average(&mut self.step_seconds, metrics.step_ms.map(|ms| ms / 1e3));
        self.skipped += u64::from(metrics.skipped);
        let is_due = metrics.step.is_multiple_of(self.every) || metrics.step == self.last_step;
        if self.is_watched {
            self.bar.set_position(metrics.step);
            if is_due || metrics.step == 1 {
                self.bar.set_message(self.line(metrics));
            }
        } else if is_due {
            say(&format!("step {}/{}   {}", metrics.step, self.last_step, self.line(metrics)));
        }
        Action::Continue
    }

    fn on_validation_end(&mut self, metrics: &Metrics) -> Action {
        let loss = metrics.loss.unwrap_or(f64::NAN);
        let line = format!("step {:>5}   validation loss {loss:.4}", metrics.step);
        if self.is_watched {
            self.bar.suspend(|| say(&line));
        } else {
            say(&line);
        }
        Action::Continue
    }

    fn on_fit_end(&mut self, _reason: StopReason) {
        // Leaves the bar as it is, also where the run ended early.
        self.bar.abandon();
        if self.is_watched {
            say("");
        }
    }
}
