//! Learning-rate schedules.

/// How the learning rate changes over a run, after a linear warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Stays where it is.
    Constant,
    /// Falls linearly to 0 at the last step.
    Linear,
    /// Falls to 0 at the last step along half a cosine (Loshchilov and Hutter, SGDR, 2017).
    Cosine,
}

/// The learning rate of every step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Highest rate.
    pub lr: f64,
    /// Steps over which the rate rises from 0; the step after them is the first at `lr`.
    pub warmup_steps: u64,
    /// What follows the warm-up.
    pub shape: Shape,
}

impl Schedule {
    /// The rate of step `step`, counted from 1, of `total` steps.
    #[must_use]
    pub fn lr(&self, step: u64, total: u64) -> f64 {
        // The first step's rate is not 0, so that it is not wasted.
        if step <= self.warmup_steps {
            return self.lr * step as f64 / (self.warmup_steps + 1) as f64;
        }
        let falling = total.saturating_sub(self.warmup_steps).max(1);
        let progress = (step - self.warmup_steps - 1) as f64 / falling as f64;
        let factor = match self.shape {
            Shape::Constant => 1.0,
            Shape::Linear => 1.0 - progress,
            Shape::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.lr * factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_rise_then_follow_the_shape() {
        let rates = |shape| {
            let schedule = Schedule { lr: 1.0, warmup_steps: 3, shape };
            (1..=7).map(|step| (schedule.lr(step, 7) * 1e4).round() / 1e4).collect::<Vec<_>>()
        };
        assert_eq!(rates(Shape::Constant), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(rates(Shape::Linear), [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]);
        assert_eq!(rates(Shape::Cosine), [0.25, 0.5, 0.75, 1.0, 0.8536, 0.5, 0.1464]);
    }

    #[test]
    fn without_warm_up_the_first_step_has_the_full_rate() {
        for shape in [Shape::Constant, Shape::Linear, Shape::Cosine] {
            assert_eq!(Schedule { lr: 0.1, warmup_steps: 0, shape }.lr(1, 10), 0.1);
        }
    }
}
