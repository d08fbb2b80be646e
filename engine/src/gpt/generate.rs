//! Continuing a text.

use burn::tensor::{Device, Int, Tensor, TensorData};
use pyroclast_kernels::interop;
use rand::distr::weighted::WeightedIndex;
use rand::prelude::*;
use rand_chacha::ChaCha8Rng;

use super::config::VOCABULARY;
use super::model::Gpt;
use crate::error::{Error, Mistake};

/// How the next byte is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// Divides the logits: 0 always takes the likeliest byte, 1 samples the model's distribution.
    pub temperature: f64,
    /// Only the likeliest so many bytes; none for all.
    pub top_k: Option<usize>,
    /// Only the likeliest bytes that together reach this probability (Holtzman et al., 2020); none
    /// for all.
    pub top_p: Option<f64>,
}

impl Default for Sampler {
    fn default() -> Self {
        Self { temperature: 0.8, top_k: None, top_p: Some(0.95) }
    }
}

impl Sampler {
    /// Everything that is wrong with the settings.
    #[must_use]
    pub fn mistakes(&self) -> Vec<Mistake> {
        let mut mistakes = Vec::new();
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            let problem = format!("{} is out of range; it must be 0 or more", self.temperature);
            mistakes.push(Mistake::new("temperature", problem));
        }
        if self.top_k == Some(0) {
            mistakes.push(Mistake::new("top_k", "0 leaves nothing to choose; use 1 or more"));
        }
        if let Some(p) = self.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
            let problem = format!("{p} is out of range; it must be above 0 and at most 1");
            mistakes.push(Mistake::new("top_p", problem));
        }
        mistakes
    }

    /// Chooses a byte by its logit.
    fn choose(&self, logits: &[f32], rng: &mut impl Rng) -> u8 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        if self.temperature == 0.0 {
            return order[0] as u8;
        }
        order.truncate(self.top_k.unwrap_or(VOCABULARY));
        let highest = f64::from(logits[order[0]]);
        let weight = |&byte: &usize| ((f64::from(logits[byte]) - highest) / self.temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(weight).collect();
        if let Some(p) = self.top_p {
            let enough = p * weights.iter().sum::<f64>();
            let mut reached = 0.0;
            let below = |weight: &&f64| {
                let was_below = reached < enough;
                reached += **weight;
                was_below
            };
            let kept = weights.iter().take_while(below).count();
            weights.truncate(kept.max(1));
        }
        // The likeliest byte has weight 1, so the distribution is never empty.
        let chosen =
            WeightedIndex::new(&weights).map_or(0, |distribution| distribution.sample(rng));
        order[chosen] as u8
    }
}

/// What to generate.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Text to continue.
    pub prompt: &'a [u8],
    /// Bytes to generate.
    pub length: usize,
    /// How each byte is chosen.
    pub sampler: Sampler,
    /// Seed of the choice.
    pub seed: u64,
}

/// Continues a text and returns only the continuation. `context` is the model's, `device` the plain
/// device that it is on.
///
/// # Errors
///
/// [`Error::Config`] for wrong settings, or [`Error::Strategy`] if the device fails.
pub fn generate(
    model: &Gpt,
    context: usize,
    request: &Request<'_>,
    device: &Device,
) -> Result<Vec<u8>, Error> {
    let Request { prompt, length, sampler, seed } = *request;
    let mistakes = sampler.mistakes();
    if !mistakes.is_empty() {
        return Err(Error::Config(mistakes));
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // A model continues something: without a prompt, a new line.
    let mut text = if prompt.is_empty() { b"\n".to_vec() } else { prompt.to_vec() };
    let start = text.len();
    for _ in 0..length {
        let window = &text[text.len().saturating_sub(context)..];
        let last = window.len() - 1;
        // One shape for all windows: GPU kernels are compiled per shape. What follows the last byte
        // does not reach it.
        let mut tokens: Vec<i32> = window.iter().map(|byte| i32::from(*byte)).collect();
        tokens.resize(context, 0);
        let tokens = TensorData::new(tokens, [1, context]);
        let logits = model.forward(Tensor::<2, Int>::from_data(tokens, device));
        let last = logits.narrow(1, last, 1).reshape([VOCABULARY]);
        let mut next = 0;
        interop::read_all(vec![last], |_, logits| {
            next = sampler.choose(&logits.to_f32(), &mut rng)
        })
        .map_err(|source| {
            let what = "logits".to_owned();
            Error::Strategy(pyroclast_strategies::Error::Read { what, source })
        })?;
        text.push(next);
    }
    Ok(text.split_off(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(sampler: Sampler, logits: &[f32]) -> Vec<usize> {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut counts = vec![0; logits.len()];
        for _ in 0..4000 {
            counts[usize::from(sampler.choose(logits, &mut rng))] += 1;
        }
        counts
    }

    #[test]
    fn bytes_are_drawn_as_the_settings_say() {
        // Probabilities 1/2, 1/4, 1/8, 1/8.
        let logits = [0.0, -(2.0f32.ln()), -(8.0f32.ln()) + 2.0f32.ln(), -(4.0f32.ln())];
        let all = Sampler { temperature: 1.0, top_k: None, top_p: None };
        let counts = frequencies(all, &logits);
        assert!((1900..2100).contains(&counts[0]), "{counts:?}");
        let none_of = |sampler, absent: &[usize]| {
            let counts = frequencies(sampler, &logits);
            absent.iter().all(|byte| counts[*byte] == 0)
        };
        assert!(none_of(Sampler { temperature: 0.0, ..all }, &[1, 2, 3]));
        assert!(none_of(Sampler { top_k: Some(2), ..all }, &[2, 3]));
        assert!(none_of(Sampler { top_p: Some(0.5), ..all }, &[1, 2, 3]));
        assert!(none_of(Sampler { top_p: Some(0.75), ..all }, &[2, 3]));
        assert!(none_of(Sampler { top_p: Some(1e-9), ..all }, &[1, 2, 3]));
    }

    #[test]
    fn wrong_settings_are_refused() {
        let wrong = Sampler { temperature: -1.0, top_k: Some(0), top_p: Some(1.5) };
        assert_eq!(wrong.mistakes().len(), 3);
        assert_eq!(Sampler::default().mistakes(), []);
    }
}
