//! What the user writes about the loss scale.

use std::fmt;

use pyroclast_precision::{DeepSpeedScale, LossScale, TorchScale};
use schemars::JsonSchema;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// What the user wrote: `dynamic`, a number, or a rule with its settings.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum LossScaleConfig {
    /// `dynamic` (the default): torch's rule with its own settings. Text that starts with a brace is read as
    /// the JSON of a [`LossScaleRule`].
    Name(String),
    /// A scale that stays as it is.
    Static(f64),
    /// A rule with its settings: `{"deepspeed": {"loss_scale_window": 500}}`.
    Rule(LossScaleRule),
}

/// How a dynamic loss scale changes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LossScaleRule {
    /// As `torch.amp.GradScaler` does.
    Torch(TorchScaleConfig),
    /// As DeepSpeed does.
    DeepSpeed(DeepSpeedScaleConfig),
}

/// Settings of `torch.amp.GradScaler`, by the names that they have there, and a floor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TorchScaleConfig {
    /// The first scale. Default 65536.
    pub init_scale: f64,
    /// Multiplies the scale after `growth_interval` steps without overflow. Default 2.
    pub growth_factor: f64,
    /// Multiplies it after an overflow. Default 0.5.
    pub backoff_factor: f64,
    /// Steps without overflow, in a row, until the scale grows. Default 2000.
    pub growth_interval: u64,
    /// The smallest scale: an overflow there ends the run. Default 1.
    pub min_loss_scale: f64,
}

impl Default for TorchScaleConfig {
    fn default() -> Self {
        let TorchScale {
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            min_loss_scale,
        } = TorchScale::default();
        Self { init_scale, growth_factor, backoff_factor, growth_interval, min_loss_scale }
    }
}

/// Settings of DeepSpeed's dynamic loss scale, by the names that they have in its file.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DeepSpeedScaleConfig {
    /// The first scale is 2 to the power of this. Default 16.
    pub initial_scale_power: u32,
    /// Steps without overflow until the scale is doubled. Default 1000.
    pub loss_scale_window: u64,
    /// Overflows until the scale is halved. Default 2.
    pub hysteresis: u64,
    /// Whether a step without overflow makes the count of overflows start again. Default false.
    pub consecutive_hysteresis: bool,
    /// The smallest scale: an overflow there ends the run. Default 1.
    pub min_loss_scale: f64,
}

impl Default for DeepSpeedScaleConfig {
    fn default() -> Self {
        let DeepSpeedScale {
            initial_scale_power,
            loss_scale_window,
            hysteresis,
            consecutive_hysteresis,
            min_loss_scale,
        } = DeepSpeedScale::default();
        Self {
            initial_scale_power,
            loss_scale_window,
            hysteresis,
            consecutive_hysteresis,
            min_loss_scale,
        }
    }
}

impl Default for LossScaleConfig {
    fn default() -> Self {
        Self::Name("dynamic".to_owned())
    }
}

impl From<LossScaleRule> for LossScaleConfig {
    fn from(rule: LossScaleRule) -> Self {
        Self::Rule(rule)
    }
}

impl<'de> Deserialize<'de> for LossScaleConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ReadConfig)
    }
}

/// Reads text as a name and everything else as settings, so that errors speak of the settings.
struct ReadConfig;

impl<'de> Visitor<'de> for ReadConfig {
    type Value = LossScaleConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`dynamic`, a number, or a rule with its settings")
    }

    fn visit_str<E>(self, name: &str) -> Result<LossScaleConfig, E> {
        Ok(LossScaleConfig::Name(name.to_owned()))
    }

    fn visit_f64<E>(self, scale: f64) -> Result<LossScaleConfig, E> {
        Ok(LossScaleConfig::Static(scale))
    }

    fn visit_u64<E>(self, scale: u64) -> Result<LossScaleConfig, E> {
        Ok(LossScaleConfig::Static(scale as f64))
    }

    fn visit_i64<E>(self, scale: i64) -> Result<LossScaleConfig, E> {
        Ok(LossScaleConfig::Static(scale as f64))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LossScaleConfig, A::Error> {
        LossScaleRule::deserialize(MapAccessDeserializer::new(map)).map(LossScaleConfig::Rule)
    }
}

/// A setting's name within the rule, and what is wrong with it.
pub(crate) type RuleMistake = (&'static str, String);

impl LossScaleConfig {
    /// What was meant.
    ///
    /// # Errors
    ///
    /// Every mistake in it, with the names of settings within the rule.
    pub(crate) fn rule(&self) -> Result<LossScale, Vec<RuleMistake>> {
        let scale = match self {
            Self::Name(name) if name == "dynamic" => LossScale::Torch(TorchScale::default()),
            Self::Name(text) if text.starts_with('{') => {
                let rule = serde_json::from_str::<LossScaleRule>(text)
                    .map_err(|error| vec![("", format!("`{text}`: {error}"))])?;
                return Self::Rule(rule).rule();
            }
            Self::Name(text) => match text.parse::<f64>() {
                Ok(scale) => LossScale::Static(scale),
                Err(_) => {
                    let there = "dynamic, a number, and rules such as {\"deepspeed\": {}}";
                    return Err(vec![("", format!("unknown `{text}`; there are {there}"))]);
                }
            },
            Self::Static(scale) => LossScale::Static(*scale),
            Self::Rule(LossScaleRule::Torch(torch)) => LossScale::Torch(torch.scale()),
            Self::Rule(LossScaleRule::DeepSpeed(deepspeed)) => {
                LossScale::DeepSpeed(deepspeed.scale())
            }
        };
        let mistakes = mistakes(&scale);
        if mistakes.is_empty() { Ok(scale) } else { Err(mistakes) }
    }
}

impl TorchScaleConfig {
    fn scale(&self) -> TorchScale {
        let Self { init_scale, growth_factor, backoff_factor, growth_interval, min_loss_scale } =
            *self;
        TorchScale { init_scale, growth_factor, backoff_factor, growth_interval, min_loss_scale }
    }
}

impl DeepSpeedScaleConfig {
    fn scale(&self) -> DeepSpeedScale {
        let Self {
            initial_scale_power,
            loss_scale_window,
            hysteresis,
            consecutive_hysteresis,
            min_loss_scale,
        } = *self;
        DeepSpeedScale {
            initial_scale_power,
            loss_scale_window,
            hysteresis,
            consecutive_hysteresis,
            min_loss_scale,
        }
    }
}

/// Greatest power of 2 that an `f32` holds, in which the loss is scaled.
const MAX_POWER: u32 = 127;

fn mistakes(scale: &LossScale) -> Vec<RuleMistake> {
    let is_scale = |value: f64| value > 0.0 && value <= f64::from(f32::MAX);
    let positive = "above 0, and an f32 must hold it";
    let checks: Vec<(&'static str, f64, bool, &str)> = match *scale {
        LossScale::Off => vec![],
        LossScale::Static(scale) => vec![("", scale, is_scale(scale), positive)],
        LossScale::Torch(torch) => vec![
            ("torch.init_scale", torch.init_scale, is_scale(torch.init_scale), positive),
            ("torch.growth_factor", torch.growth_factor, torch.growth_factor > 1.0, "above 1"),
            (
                "torch.backoff_factor",
                torch.backoff_factor,
                torch.backoff_factor > 0.0 && torch.backoff_factor < 1.0,
                "above 0 and below 1",
            ),
            (
                "torch.growth_interval",
                torch.growth_interval as f64,
                torch.growth_interval > 0,
                "1 or more",
            ),
            (
                "torch.min_loss_scale",
                torch.min_loss_scale,
                torch.min_loss_scale > 0.0 && torch.min_loss_scale <= torch.init_scale,
                "above 0, and at most init_scale",
            ),
        ],
        LossScale::DeepSpeed(deepspeed) => vec![
            (
                "deepspeed.initial_scale_power",
                f64::from(deepspeed.initial_scale_power),
                deepspeed.initial_scale_power <= MAX_POWER,
                "at most 127: an f32 must hold the scale",
            ),
            (
                "deepspeed.loss_scale_window",
                deepspeed.loss_scale_window as f64,
                deepspeed.loss_scale_window > 0,
                "1 or more",
            ),
            (
                "deepspeed.hysteresis",
                deepspeed.hysteresis as f64,
                deepspeed.hysteresis > 0,
                "1 or more",
            ),
            (
                "deepspeed.min_loss_scale",
                deepspeed.min_loss_scale,
                is_scale(deepspeed.min_loss_scale),
                positive,
            ),
        ],
    };
    let wrong = checks.into_iter().filter(|(_, _, holds, _)| !holds);
    wrong
        .map(|(name, value, _, limit)| {
            (name, format!("{value} is out of range; it must be {limit}"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<LossScale, String> {
        let config: LossScaleConfig =
            serde_json::from_str(json).map_err(|error| error.to_string())?;
        config.rule().map_err(|mistakes| format!("{mistakes:?}"))
    }

    #[test]
    fn scales_are_written_as_names_numbers_or_rules() {
        assert_eq!(read(r#""dynamic""#), Ok(LossScale::Torch(TorchScale::default())));
        assert_eq!(read("128"), Ok(LossScale::Static(128.0)));
        assert_eq!(read(r#""128.5""#), Ok(LossScale::Static(128.5)));
        let torch = TorchScale { growth_interval: 5, ..TorchScale::default() };
        for json in
            [r#"{"torch": {"growth_interval": 5}}"#, r#""{\"torch\": {\"growth_interval\": 5}}""#]
        {
            assert_eq!(read(json), Ok(LossScale::Torch(torch)));
        }
        let deepspeed = DeepSpeedScale { hysteresis: 1, ..DeepSpeedScale::default() };
        assert_eq!(
            read(r#"{"deepspeed": {"hysteresis": 1}}"#),
            Ok(LossScale::DeepSpeed(deepspeed))
        );
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (json, expected) in [
            ("0", "0 is out of range"),
            ("-3.5", "-3.5 is out of range"),
            (r#""auto""#, "unknown `auto`"),
            (r#"{"torch": {"growth": 5}}"#, "unknown field `growth`"),
            (r#"{"torch": {"growth_factor": 1, "backoff_factor": 1.5}}"#, "torch.backoff_factor"),
            (r#"{"torch": {"init_scale": 0.5}}"#, "torch.min_loss_scale"),
            (r#"{"deepspeed": {"hysteresis": 0}}"#, "deepspeed.hysteresis"),
            (r#"{"deepspeed": {"initial_scale_power": 128}}"#, "at most 127"),
        ] {
            let error = read(json).expect_err(json);
            assert!(error.contains(expected), "{json}: {error}");
        }
    }
}
