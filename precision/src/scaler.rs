//! Loss scales: what keeps small `f16` gradients from becoming zero.
//!
//! The loss is multiplied by a scale, and so is every gradient; the optimizer divides by the scale that the
//! backward pass had. Where a gradient overflows, the step is skipped and the scale lowered; where none has
//! for a while, it is raised.

use serde::{Deserialize, Serialize};

/// How a loss scale changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// It is 1, and gradients that are not finite end the run.
    Off,
    /// It stays as it is; steps whose gradients overflow are skipped.
    Static(f64),
    /// As `torch.amp.GradScaler` does.
    Torch(TorchScale),
    /// As DeepSpeed's `DynamicLossScaler` does.
    DeepSpeed(DeepSpeedScale),
}

/// Settings of `torch.amp.GradScaler`, and a floor, which that has not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TorchScale {
    /// The first scale.
    pub init_scale: f64,
    /// Multiplies the scale after `growth_interval` steps without overflow.
    pub growth_factor: f64,
    /// Multiplies it after an overflow.
    pub backoff_factor: f64,
    /// Steps without overflow, in a row, until the scale grows.
    pub growth_interval: u64,
    /// The smallest scale: an overflow there is an error.
    pub min_loss_scale: f64,
}

impl Default for TorchScale {
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            min_loss_scale: 1.0,
        }
    }
}

/// Settings of DeepSpeed's `DynamicLossScaler`, by the names that they have in its file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeepSpeedScale {
    /// The first scale is 2 to the power of this.
    pub initial_scale_power: u32,
    /// Steps without overflow until the scale is doubled.
    pub loss_scale_window: u64,
    /// Overflows until the scale is halved.
    pub hysteresis: u64,
    /// Whether a step without overflow makes the count of overflows start again; otherwise a doubling does.
    pub consecutive_hysteresis: bool,
    /// The smallest scale: an overflow there is an error.
    pub min_loss_scale: f64,
}

impl Default for DeepSpeedScale {
    fn default() -> Self {
        Self {
            initial_scale_power: 16,
            loss_scale_window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
            min_loss_scale: 1.0,
        }
    }
}

/// What changes of a loss scale, for whoever saves it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScalerState {
    /// The scale.
    pub scale: f64,
    /// Steps, skipped ones included.
    pub steps: u64,
    /// Steps since the last overflow, or since the scale grew (torch's rule).
    pub good_steps: u64,
    /// The step of the last overflow, counted from 0 (DeepSpeed's rule).
    pub last_overflow: Option<u64>,
    /// Overflows until the scale is halved (DeepSpeed's rule).
    pub hysteresis: u64,
}

/// A scale that overflows although it may not become smaller.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("gradients overflow although the loss scale is at its minimum, {0}")]
pub struct AtMinimum(pub f64);

/// A loss scale and its rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaler {
    rule: LossScale,
    state: ScalerState,
}

impl Scaler {
    /// A scale before its first step.
    #[must_use]
    pub fn new(rule: LossScale) -> Self {
        let (scale, hysteresis) = match rule {
            LossScale::Off => (1.0, 0),
            LossScale::Static(scale) => (scale, 0),
            LossScale::Torch(torch) => (torch.init_scale, 0),
            LossScale::DeepSpeed(deepspeed) => {
                (f64::from(deepspeed.initial_scale_power).exp2(), deepspeed.hysteresis)
            }
        };
        let state = ScalerState { scale, steps: 0, good_steps: 0, last_overflow: None, hysteresis };
        Self { rule, state }
    }

    /// Whether steps whose gradients overflow are skipped.
    #[must_use]
    pub fn skips(&self) -> bool {
        self.rule != LossScale::Off
    }

    /// What the loss of the next step is multiplied by.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// What is to be saved.
    #[must_use]
    pub fn state(&self) -> ScalerState {
        self.state
    }

    /// Continues from what was saved.
    pub fn restore(&mut self, state: ScalerState) {
        self.state = state;
    }

    /// Takes note of a step.
    ///
    /// # Errors
    ///
    /// [`AtMinimum`] where the scale would have to become smaller than it may.
    pub fn update(&mut self, overflowed: bool) -> Result<(), AtMinimum> {
        let step = self.state.steps;
        self.state.steps += 1;
        match self.rule {
            LossScale::Off | LossScale::Static(_) => Ok(()),
            LossScale::Torch(rule) => self.update_torch(rule, overflowed),
            LossScale::DeepSpeed(rule) if overflowed => self.overflow_deepspeed(rule, step),
            LossScale::DeepSpeed(rule) => {
                self.good_deepspeed(rule, step);
                Ok(())
            }
        }
    }

    fn update_torch(&mut self, rule: TorchScale, overflowed: bool) -> Result<(), AtMinimum> {
        let state = &mut self.state;
        if overflowed {
            state.good_steps = 0;
            return lower(&mut state.scale, rule.backoff_factor, rule.min_loss_scale);
        }
        state.good_steps += 1;
        if state.good_steps == rule.growth_interval {
            state.good_steps = 0;
            let grown = state.scale * rule.growth_factor;
            // torch's is an `f32`, which it does not let become infinite.
            if grown <= f64::from(f32::MAX) {
                state.scale = grown;
            }
        }
        Ok(())
    }

    fn overflow_deepspeed(&mut self, rule: DeepSpeedScale, step: u64) -> Result<(), AtMinimum> {
        let state = &mut self.state;
        state.last_overflow = Some(step);
        if rule.hysteresis == 1 || state.hysteresis == 1 {
            return lower(&mut state.scale, 0.5, rule.min_loss_scale);
        }
        state.hysteresis -= 1;
        Ok(())
    }

    fn good_deepspeed(&mut self, rule: DeepSpeedScale, step: u64) {
        let state = &mut self.state;
        if rule.consecutive_hysteresis {
            state.hysteresis = rule.hysteresis;
        }
        // Its first overflow, so to speak, was one step before the first.
        let stable = state.last_overflow.map_or(step, |last| step - last - 1);
        if stable > 0 && stable.is_multiple_of(rule.loss_scale_window) {
            if !rule.consecutive_hysteresis {
                state.hysteresis = rule.hysteresis;
            }
            state.scale *= 2.0;
        }
    }
}

fn lower(scale: &mut f64, factor: f64, least: f64) -> Result<(), AtMinimum> {
    if *scale <= least {
        return Err(AtMinimum(*scale));
    }
    *scale = (*scale * factor).max(least);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scales after each of some steps, each of which overflows (`!`) or not.
    fn scales(rule: LossScale, steps: &str) -> Vec<f64> {
        let mut scaler = Scaler::new(rule);
        let update = |step: char| {
            scaler.update(step == '!').expect("a scale above its minimum");
            scaler.scale()
        };
        steps.chars().map(update).collect()
    }

    #[test]
    fn torchs_rule_halves_at_once_and_grows_after_an_interval() {
        let torch = LossScale::Torch(TorchScale { growth_interval: 3, ..TorchScale::default() });
        let seen = scales(torch, "..!...!.....");
        let k = 1024.0;
        let expected = [64.0, 64.0, 32.0, 32.0, 32.0, 64.0, 32.0, 32.0, 32.0, 64.0, 64.0, 64.0];
        assert_eq!(seen, expected.map(|scale: f64| scale * k));

        let mut scaler = Scaler::new(LossScale::Torch(TorchScale::default()));
        let growth = (1..=4001).filter(|step| {
            let before = scaler.scale();
            scaler.update(false).expect("no overflow");
            assert!(*step <= 4000 || scaler.scale() == 262_144.0);
            scaler.scale() > before
        });
        assert_eq!(growth.collect::<Vec<_>>(), [2000, 4000]);
    }

    #[test]
    fn torchs_scale_stays_finite_as_an_f32() {
        let init_scale = f64::from(f32::MAX) / 1.5;
        let rule = TorchScale { growth_interval: 1, init_scale, ..TorchScale::default() };
        assert_eq!(scales(LossScale::Torch(rule), ".."), [init_scale; 2]);
    }

    /// Steps until the scale reaches a size, where all but the first few are good.
    fn first_growth(overflows: u64) -> u64 {
        let mut scaler = Scaler::new(LossScale::DeepSpeed(DeepSpeedScale::default()));
        for step in 0..2000 {
            let before = scaler.scale();
            scaler.update(step < overflows).expect("a scale above its minimum");
            if scaler.scale() > before {
                return step;
            }
        }
        panic!("the scale does not grow");
    }

    #[test]
    fn deepspeeds_rule_waits_for_its_hysteresis() {
        let rule = LossScale::DeepSpeed(DeepSpeedScale::default());
        assert_eq!(scales(rule, "!!!"), [65536.0, 32768.0, 16384.0]);
        // Steps are counted from 0.
        assert_eq!(first_growth(0), 1000);
        assert_eq!(first_growth(3), 1003);
    }

    #[test]
    fn deepspeeds_hysteresis_starts_again_at_a_growth_or_at_every_good_step() {
        let window = |consecutive_hysteresis| {
            LossScale::DeepSpeed(DeepSpeedScale {
                initial_scale_power: 4,
                loss_scale_window: 2,
                consecutive_hysteresis,
                ..DeepSpeedScale::default()
            })
        };
        // Good steps between overflows do not help, but a growth does.
        assert_eq!(scales(window(false), "!.!...!!"), [16.0, 16.0, 8.0, 8.0, 8.0, 16.0, 16.0, 8.0]);
        assert_eq!(scales(window(true), "!.!.!!"), [16.0, 16.0, 16.0, 16.0, 16.0, 8.0]);
    }

    #[test]
    fn an_overflow_at_the_minimum_is_an_error_after_as_many_steps_as_there_are_halvings() {
        let steps = |rule| {
            let mut scaler = Scaler::new(rule);
            let mut steps = 0;
            loop {
                steps += 1;
                if let Err(error) = scaler.update(true) {
                    return (steps, error, scaler.scale());
                }
            }
        };
        let torch = LossScale::Torch(TorchScale::default());
        assert_eq!(steps(torch), (17, AtMinimum(1.0), 1.0));
        let deepspeed = LossScale::DeepSpeed(DeepSpeedScale::default());
        assert_eq!(steps(deepspeed), (18, AtMinimum(1.0), 1.0));
        let least = TorchScale { min_loss_scale: 1000.0, ..TorchScale::default() };
        assert_eq!(steps(LossScale::Torch(least)), (8, AtMinimum(1000.0), 1000.0));
    }

    #[test]
    fn others_do_not_change() {
        for (rule, scale, skips) in
            [(LossScale::Off, 1.0, false), (LossScale::Static(128.0), 128.0, true)]
        {
            assert_eq!(scales(rule, "!.!!!"), [scale; 5]);
            assert_eq!(Scaler::new(rule).skips(), skips);
        }
    }

    #[test]
    fn a_saved_scale_continues_where_it_was() {
        let rule = LossScale::DeepSpeed(DeepSpeedScale {
            loss_scale_window: 3,
            ..DeepSpeedScale::default()
        });
        let steps = [true, false, true, false, false, false, false, true, true];
        let mut whole = Scaler::new(rule);
        let mut resumed = Scaler::new(rule);
        for overflowed in steps {
            whole.update(overflowed).expect("a scale above its minimum");
            let mut next = Scaler::new(rule);
            next.restore(resumed.state());
            next.update(overflowed).expect("a scale above its minimum");
            resumed = next;
            assert_eq!(resumed, whole);
        }
    }
}
