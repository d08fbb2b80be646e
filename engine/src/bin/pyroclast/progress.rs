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
    /// Moving average of tokens per second, so that the figure can be read.
    rate: Option<f64>,
}

impl Progress {
    /// Redraws, or prints a line, every so many steps.
    pub(crate) fn new(every: u64) -> Self {
        let is_watched = std::io::stderr().is_terminal();
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        Self { bar, every: every.max(1), last_step: 0, is_watched, rate: None }
    }

    fn line(&self, metrics: &Metrics) -> String {
        let (loss, rate) = (metrics.loss.unwrap_or(f64::NAN), self.rate.unwrap_or(0.0));
        format!("loss {loss:.4}   {} tokens/s", grouped(rate as u64))
    }
}

impl Callback for Progress {
    fn on_fit_start(&mut self, run: &RunInfo) {
        self.last_step = run.last_step;
        if self.is_watched {
            let style = ProgressStyle::with_template(
                "{bar:32.208/238} step {pos}/{len}   {msg}   {elapsed} + {eta} left",
            );
            let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
            self.bar = ProgressBar::new(run.last_step)
                .with_position(run.first_step)
                .with_style(style.progress_chars("━━─"));
            self.bar.reset_eta();
        }
    }

    fn on_step_end(&mut self, metrics: &Metrics) -> Action {
        if let Some(rate) = metrics.tokens_per_s {
            self.rate = Some(self.rate.map_or(rate, |known| 0.95 * known + 0.05 * rate));
        }
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
        self.bar.finish();
    }
}
