//! DeepSpeed's schedulers, under its names. Rates are those that its optimizer steps with: its scheduler
//! moves after each step, so the first step has what the scheduler begins with, and step `s` the rate of
//! its iteration `s - 2`.

use std::f64::consts::PI;

use pyroclast_strategies::Rate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A scheduler with its settings: `{"WarmupLR": {"warmup_num_steps": 100}}`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub enum Scheduler {
    /// Rises, and stays.
    WarmupLR(WarmupLr),
    /// Rises, and falls linearly to 0.
    WarmupDecayLR(WarmupLr),
    /// Rises, and falls along half a cosine.
    WarmupCosineLR(WarmupCosineLr),
    /// One cycle (Smith, A disciplined approach to neural network hyper-parameters, 2018), then a decay.
    OneCycle(OneCycle),
    /// Rises without end, to find the largest rate that trains.
    LRRangeTest(LrRangeTest),
}

/// How a rate rises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WarmupType {
    /// As the logarithm of the iteration.
    #[default]
    Log,
    /// Linearly.
    Linear,
}

impl WarmupType {
    /// The part of the rise that is done at an iteration.
    fn at(self, iteration: f64, steps: f64) -> f64 {
        match self {
            Self::Log => (iteration + 1.0).ln() / steps.ln(),
            Self::Linear => iteration / steps,
        }
    }
}

/// Settings of `WarmupLR` and `WarmupDecayLR`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WarmupLr {
    /// Rate at the beginning. Default 0.
    pub warmup_min_lr: f64,
    /// Rate after the rise. Default: `lr` for `WarmupLR`, 0.001 for `WarmupDecayLR`.
    pub warmup_max_lr: Option<f64>,
    /// Iterations of the rise, at least 2 of them. Default 1000.
    pub warmup_num_steps: u64,
    /// How it rises. Default `log`.
    pub warmup_type: WarmupType,
    /// Iterations until 0, for `WarmupDecayLR` alone. Default: the run's steps.
    pub total_num_steps: Option<u64>,
}

impl Default for WarmupLr {
    fn default() -> Self {
        Self {
            warmup_min_lr: 0.0,
            warmup_max_lr: None,
            warmup_num_steps: 1000,
            warmup_type: WarmupType::Log,
            total_num_steps: None,
        }
    }
}

/// Settings of `WarmupCosineLR`. Ratios are of `lr`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WarmupCosineLr {
    /// Iterations until the end of the fall. Default: the run's steps.
    pub total_num_steps: Option<u64>,
    /// Ratio at the beginning. Default 0.
    pub warmup_min_ratio: f64,
    /// Iterations of the rise, at least 2 of them. Default 1000.
    pub warmup_num_steps: u64,
    /// Ratio at the end. Default 0.0001.
    pub cos_min_ratio: f64,
    /// How it rises. Default `log`.
    pub warmup_type: WarmupType,
}

impl Default for WarmupCosineLr {
    fn default() -> Self {
        Self {
            total_num_steps: None,
            warmup_min_ratio: 0.0,
            warmup_num_steps: 1000,
            cos_min_ratio: 0.0001,
            warmup_type: WarmupType::Log,
        }
    }
}

/// Settings of `OneCycle`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OneCycle {
    /// Lowest rate of the cycle.
    pub cycle_min_lr: f64,
    /// Highest rate of the cycle.
    pub cycle_max_lr: f64,
    /// How fast the rate decays after the cycle. Default 0.
    #[serde(default)]
    pub decay_lr_rate: f64,
    /// Iterations of the rise. Default 2000.
    #[serde(default = "two_thousand")]
    pub cycle_first_step_size: u64,
    /// Iterations of the fall. Default: as many as the rise has.
    #[serde(default)]
    pub cycle_second_step_size: Option<u64>,
    /// Stairs of the rise; 0, the default, for none.
    #[serde(default)]
    pub cycle_first_stair_count: u64,
    /// Stairs of the fall. Default: as many as the rise has.
    #[serde(default)]
    pub cycle_second_stair_count: Option<u64>,
    /// Iterations over which `decay_lr_rate` counts once; 0, the default, for no decay.
    #[serde(default)]
    pub decay_step_size: u64,
    /// Whether AdamW's first beta goes the other way meanwhile, with a second one of 0.99. Default true.
    #[serde(default = "yes")]
    pub cycle_momentum: bool,
    /// Lowest first beta. Default 0.8.
    #[serde(default = "min_momentum")]
    pub cycle_min_mom: f64,
    /// Highest first beta. Default 0.9.
    #[serde(default = "max_momentum")]
    pub cycle_max_mom: f64,
    /// How fast it changes after the cycle. Default 0.
    #[serde(default)]
    pub decay_mom_rate: f64,
}

fn two_thousand() -> u64 {
    2000
}

fn yes() -> bool {
    true
}

fn min_momentum() -> f64 {
    0.8
}

fn max_momentum() -> f64 {
    0.9
}

/// The second beta of a cycle.
const CYCLE_BETA2: f64 = 0.99;

/// Settings of `LRRangeTest`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LrRangeTest {
    /// Rate at the beginning. Default 0.001.
    pub lr_range_test_min_lr: f64,
    /// Iterations over which the step rate counts once. Default 2000.
    pub lr_range_test_step_size: u64,
    /// What is added to the rate per step size, in its multiples. Default 1.
    pub lr_range_test_step_rate: f64,
    /// Whether it rises in stairs. Default false.
    pub lr_range_test_staircase: bool,
}

impl Default for LrRangeTest {
    fn default() -> Self {
        Self {
            lr_range_test_min_lr: 1e-3,
            lr_range_test_step_size: 2000,
            lr_range_test_step_rate: 1.0,
            lr_range_test_staircase: false,
        }
    }
}

impl Scheduler {
    /// The rate of step `step`, counted from 1, of `total` steps, where the optimizer's own is `lr`.
    #[must_use]
    pub fn rate(&self, lr: f64, step: u64, total: u64) -> Rate {
        let iteration = step.checked_sub(2).map(|iteration| iteration as f64);
        match self {
            Self::WarmupLR(warmup) => {
                warmup.lr(warmup.warmup_max_lr.unwrap_or(lr), iteration, None).into()
            }
            Self::WarmupDecayLR(warmup) => {
                let total = warmup.total_num_steps.unwrap_or(total) as f64;
                warmup.lr(warmup.warmup_max_lr.unwrap_or(1e-3), iteration, Some(total)).into()
            }
            Self::WarmupCosineLR(cosine) => (lr * cosine.ratio(iteration, total)).into(),
            Self::OneCycle(cycle) => cycle.rate(iteration),
            Self::LRRangeTest(test) => test.lr(iteration).into(),
        }
    }

    /// The name under which it is written.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::WarmupLR(_) => "WarmupLR",
            Self::WarmupDecayLR(_) => "WarmupDecayLR",
            Self::WarmupCosineLR(_) => "WarmupCosineLR",
            Self::OneCycle(_) => "OneCycle",
            Self::LRRangeTest(_) => "LRRangeTest",
        }
    }

    /// Whether it takes its rates from `lr`, and not from settings of its own.
    #[must_use]
    pub fn scales_lr(&self) -> bool {
        match self {
            Self::WarmupLR(warmup) => warmup.warmup_max_lr.is_none(),
            Self::WarmupCosineLR(_) => true,
            _ => false,
        }
    }

    /// Settings that are out of range: their names, and what they must be.
    #[must_use]
    pub fn mistakes(&self) -> Vec<(&'static str, String)> {
        let mut mistakes = vec![];
        let mut must = |name: &'static str, value: f64, holds: bool, limit: &str| {
            if !holds {
                mistakes.push((name, format!("{value} is out of range; it must be {limit}")));
            }
        };
        let not_negative = |value: f64| value.is_finite() && value >= 0.0;
        match *self {
            Self::WarmupLR(warmup) | Self::WarmupDecayLR(warmup) => {
                let WarmupLr { warmup_min_lr: min, warmup_num_steps: steps, .. } = warmup;
                let max = warmup.warmup_max_lr.unwrap_or(1.0);
                must("warmup_num_steps", steps as f64, steps > 0, "1 or more");
                must("warmup_min_lr", min, not_negative(min), "0 or more");
                must("warmup_max_lr", max, max.is_finite() && max > 0.0, "above 0");
                if let (Self::WarmupLR(_), Some(total)) = (self, warmup.total_num_steps) {
                    must("total_num_steps", total as f64, false, "left out: it is WarmupDecayLR's");
                }
            }
            Self::WarmupCosineLR(cosine) => {
                let WarmupCosineLr { warmup_min_ratio: min, cos_min_ratio: end, .. } = cosine;
                let steps = cosine.warmup_num_steps;
                must("warmup_num_steps", steps as f64, steps > 0, "1 or more");
                must("warmup_min_ratio", min, (0.0..=1.0).contains(&min), "0 to 1");
                must("cos_min_ratio", end, (0.0..=1.0).contains(&end), "0 to 1");
            }
            Self::OneCycle(cycle) => {
                let OneCycle { cycle_min_lr: min, cycle_max_lr: max, .. } = cycle;
                let (first, decay) = (cycle.cycle_first_step_size, cycle.decay_lr_rate);
                must("cycle_first_step_size", first as f64, first > 0, "1 or more");
                must("cycle_min_lr", min, not_negative(min), "0 or more");
                must("cycle_max_lr", max, max.is_finite() && max >= min, "cycle_min_lr or more");
                must("decay_lr_rate", decay, not_negative(decay), "0 or more");
                for (name, value) in
                    [("cycle_min_mom", cycle.cycle_min_mom), ("cycle_max_mom", cycle.cycle_max_mom)]
                {
                    must(name, value, (0.0..1.0).contains(&value), "at least 0 and below 1");
                }
                let rate = cycle.decay_mom_rate;
                must("decay_mom_rate", rate, rate == 0.0, "0: a beta that grows gets to 1");
            }
            Self::LRRangeTest(test) => {
                let LrRangeTest {
                    lr_range_test_min_lr: min, lr_range_test_step_rate: rate, ..
                } = test;
                let size = test.lr_range_test_step_size;
                must("lr_range_test_step_size", size as f64, size > 0, "1 or more");
                must("lr_range_test_min_lr", min, min.is_finite() && min > 0.0, "above 0");
                must("lr_range_test_step_rate", rate, not_negative(rate), "0 or more");
            }
        }
        mistakes
    }
}

impl WarmupLr {
    /// The rate at an iteration, or before the first; `total` where it falls again.
    fn lr(&self, max: f64, iteration: Option<f64>, total: Option<f64>) -> f64 {
        let min = self.warmup_min_lr;
        let steps = self.warmup_num_steps.max(2) as f64;
        let Some(iteration) = iteration else { return min };
        let gamma = match total {
            _ if iteration < steps => self.warmup_type.at(iteration, steps),
            None => 1.0,
            Some(total) => ((total - iteration) / (total - steps).max(1.0)).max(0.0),
        };
        min + (max - min) * gamma
    }
}

impl WarmupCosineLr {
    fn ratio(&self, iteration: Option<f64>, total: u64) -> f64 {
        let steps = self.warmup_num_steps.max(2) as f64;
        let Some(iteration) = iteration else { return 0.0 };
        if iteration < steps {
            let min = self.warmup_min_ratio;
            return min + self.warmup_type.at(iteration, steps) * (1.0 - min);
        }
        let total = self.total_num_steps.unwrap_or(total) as f64;
        let progress = ((iteration - steps + 1.0) / (total - steps).max(1.0)).min(1.0);
        let cosine = (1.0 + (PI * progress).cos()) / 2.0;
        (self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine).max(0.0)
    }
}

impl OneCycle {
    fn rate(&self, iteration: Option<f64>) -> Rate {
        let Self { cycle_min_lr: min, cycle_max_lr: max, .. } = *self;
        let beta1_of =
            |height: f64| self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * height;
        let (first, second) = self.halves();
        let (lr, beta1) = match iteration {
            // It begins with the lowest of both.
            None => (min, self.cycle_min_mom),
            Some(iteration) if iteration < first + second => {
                let height = self.height(iteration + 1.0);
                (min + (max - min) * height, beta1_of(height))
            }
            Some(iteration) => {
                let after = iteration - (first + second) + 1.0;
                let decay = match self.decay_step_size {
                    0 => 1.0,
                    size => 1.0 + self.decay_lr_rate * after / size as f64,
                };
                (min / decay, self.cycle_max_mom)
            }
        };
        Rate { lr, betas: self.cycle_momentum.then_some((beta1, CYCLE_BETA2)) }
    }

    /// Iterations of the rise and of the fall.
    fn halves(&self) -> (f64, f64) {
        let first = self.cycle_first_step_size as f64;
        (first, self.cycle_second_step_size.map_or(first, |second| second as f64))
    }

    /// Where in the cycle an iteration is, from 0 at its ends to 1 in its middle.
    fn height(&self, iteration: f64) -> f64 {
        let (first, second) = self.halves();
        let within = iteration % (first + second);
        let first_stairs = self.cycle_first_stair_count;
        let is_rising = within <= first;
        let (height, stairs) = match is_rising {
            true => (within / first, first_stairs),
            false => {
                let stairs = self.cycle_second_stair_count.unwrap_or(first_stairs);
                ((first + second - within) / second, stairs)
            }
        };
        match stairs {
            0 => height,
            stairs => {
                let stairs = stairs as f64;
                let position = match is_rising {
                    true => within * stairs / first,
                    false => (first + second - within) * stairs / second,
                };
                position.floor() / stairs
            }
        }
    }
}

impl LrRangeTest {
    fn lr(&self, iteration: Option<f64>) -> f64 {
        let Some(iteration) = iteration else { return self.lr_range_test_min_lr };
        let interval = (iteration + 1.0) / self.lr_range_test_step_size as f64;
        let interval = if self.lr_range_test_staircase { interval.floor() } else { interval };
        self.lr_range_test_min_lr * (1.0 + self.lr_range_test_step_rate * interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rates that DeepSpeed 0.19's own schedulers gave to an optimizer.
    const GOLDEN: &str = include_str!("golden.json");

    #[derive(Deserialize)]
    struct Case {
        scheduler: serde_json::Value,
        base_lr: f64,
        lr: Vec<f64>,
        beta1: Vec<f64>,
    }

    #[test]
    fn every_rate_is_deepspeeds() {
        let cases: Vec<Case> = serde_json::from_str(GOLDEN).expect("golden rates");
        assert!(cases.len() >= 20);
        for Case { scheduler, base_lr, lr, beta1 } in cases {
            let parsed: Scheduler = serde_json::from_value(scheduler.clone()).expect("a scheduler");
            assert_eq!(parsed.mistakes(), []);
            for (index, expected) in lr.iter().enumerate() {
                let rate = parsed.rate(base_lr, index as u64 + 1, 40);
                let close = |a: f64, b: f64| (a - b).abs() <= 1e-12 * b.abs().max(1e-3);
                assert!(close(rate.lr, *expected), "{scheduler} {index}: {} {expected}", rate.lr);
                let expected = beta1.get(index).copied();
                assert_eq!(rate.betas.is_some(), expected.is_some(), "{scheduler}");
                if let (Some((got, beta2)), Some(expected)) = (rate.betas, expected) {
                    assert!(close(got, expected) && beta2 == 0.99, "{scheduler} {index}");
                }
            }
        }
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let mistakes = |json: &str| {
            let parsed: Scheduler = serde_json::from_str(json).expect("a scheduler");
            parsed.mistakes().into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        for (json, names) in [
            (
                r#"{"WarmupLR": {"warmup_num_steps": 0, "total_num_steps": 3}}"#,
                &["warmup_num_steps", "total_num_steps"][..],
            ),
            (
                r#"{"WarmupDecayLR": {"warmup_max_lr": 0, "total_num_steps": 3}}"#,
                &["warmup_max_lr"],
            ),
            (r#"{"WarmupCosineLR": {"cos_min_ratio": 2}}"#, &["cos_min_ratio"]),
            (r#"{"OneCycle": {"cycle_min_lr": 2, "cycle_max_lr": 1}}"#, &["cycle_max_lr"]),
            (r#"{"LRRangeTest": {"lr_range_test_step_size": 0}}"#, &["lr_range_test_step_size"]),
        ] {
            assert_eq!(mistakes(json), names);
        }
    }
}
