//! Sizes of the model.

use serde::{Deserialize, Serialize};

use crate::error::Mistake;

/// Sizes of a [`Gpt`](super::Gpt).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GptConfig {
    /// Transformer blocks.
    pub layers: usize,
    /// Attention heads; they divide the width.
    pub heads: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Longest text that the model sees, in bytes.
    pub context: usize,
}

/// Values of a byte.
pub const VOCABULARY: usize = 256;

/// Named sizes: layers, heads, width, context.
const PRESETS: [(&str, [usize; 4]); 6] = [
    ("gpt-nano", [4, 4, 128, 64]),
    ("gpt-mini", [6, 6, 384, 256]),
    ("gpt2", [12, 12, 768, 1024]),
    ("gpt2-medium", [24, 16, 1024, 1024]),
    ("gpt2-large", [36, 20, 1280, 1024]),
    ("gpt2-xl", [48, 25, 1600, 1024]),
];

impl GptConfig {
    /// The preset called `name`.
    ///
    /// # Errors
    ///
    /// A [`Mistake`] that lists the presets there are.
    pub fn preset(name: &str) -> Result<Self, Mistake> {
        let known = PRESETS.iter().find(|(preset, _)| *preset == name);
        let Some((_, [layers, heads, width, context])) = known else {
            let names: Vec<&str> = PRESETS.iter().map(|(preset, _)| *preset).collect();
            let problem = format!("unknown preset `{name}`; there are {}", names.join(", "));
            return Err(Mistake::new("model", problem));
        };
        Ok(Self { layers: *layers, heads: *heads, width: *width, context: *context })
    }

    /// Number of parameters.
    #[must_use]
    pub fn num_params(&self) -> u64 {
        let [layers, width, context] = [self.layers, self.width, self.context].map(|n| n as u64);
        let block = 12 * width * width + 13 * width;
        (2 * VOCABULARY as u64 + context + 2) * width + layers * block
    }

    /// Everything that is wrong with the sizes.
    #[must_use]
    pub fn mistakes(&self) -> Vec<Mistake> {
        let sizes = [
            ("layers", self.layers, 1000),
            ("heads", self.heads, 1 << 16),
            ("width", self.width, 1 << 16),
            ("context", self.context, 1 << 20),
        ];
        let mut mistakes: Vec<Mistake> = sizes
            .into_iter()
            .filter(|(_, size, limit)| !(1..=*limit).contains(size))
            .map(|(name, size, limit)| {
                Mistake::new(name, format!("{size} is out of range; it must be 1 to {limit}"))
            })
            .collect();
        if self.heads > 0 && !self.width.is_multiple_of(self.heads) {
            let (width, heads) = (self.width, self.heads);
            let problem = format!("{heads} heads do not divide a width of {width}");
            mistakes.push(Mistake::new("heads", problem));
        }
        mistakes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_valid_and_unknown_names_are_refused() {
        for (name, _) in PRESETS {
            assert_eq!(GptConfig::preset(name).map(|config| config.mistakes()), Ok(vec![]));
        }
        let refused = GptConfig::preset("gpt-nan").expect_err("no such preset");
        assert!(refused.problem.contains("gpt-nano, gpt-mini"), "{refused}");
    }

    #[test]
    fn sizes_that_make_no_model_are_mistakes() {
        let config = GptConfig { layers: 0, heads: 3, width: 128, context: 64 };
        let settings: Vec<String> = config.mistakes().into_iter().map(|m| m.setting).collect();
        assert_eq!(settings, ["layers", "heads"]);
    }
}
