//! Learning-rate schedules.

/// How the learning rate changes over a run, after a linear warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// Stays where it is.
    Constant,
    /// Falls linearly, to reach 0 after the last step.
    Linear,
    /// Falls along half a cosine, to reach 0 after the last step (Loshchilov and Hutter, SGDR, 2017).
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
    pub decay: Decay,
}

impl Schedule {
    /// The rate of step `step`, counted from 1, of `total` steps.
    #[must_use]
    pub fn lr(&self, step: u64, total: u64) -> f64 {
        // The first step's rate is not 0, so that it is not wasted.
        if step <= self.warmup_steps {
            return self.lr * step as f64 / (self.warmup_steps as f64 + 1.0);
        }
        let falling = total.saturating_sub(self.warmup_steps).max(1);
        let progress = (step - self.warmup_steps - 1) as f64 / falling as f64;
        let factor = match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - progress,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.lr * factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_rise_then_decay() {
        let rates = |decay| {
            let schedule = Schedule { lr: 1.0, warmup_steps: 3, decay };
            (1..=7).map(|step| (schedule.lr(step, 7) * 1e4).round() / 1e4).collect::<Vec<_>>()
        };
        assert_eq!(rates(Decay::Constant), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(rates(Decay::Linear), [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]);
        assert_eq!(rates(Decay::Cosine), [0.25, 0.5, 0.75, 1.0, 0.8536, 0.5, 0.1464]);
    }

    #[test]
    fn without_warm_up_the_first_step_has_the_full_rate() {
        for decay in [Decay::Constant, Decay::Linear, Decay::Cosine] {
            assert_eq!(Schedule { lr: 0.1, warmup_steps: 0, decay }.lr(1, 10), 0.1);
        }
    }
}
