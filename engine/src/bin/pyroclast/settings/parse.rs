//! What a flag's text means.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pyroclast::{CheckpointConfig, LossScaleConfig, MonitorConfig, ScheduleConfig, StrategyConfig};

/// A path that can be recorded. Others are refused by name.
pub(super) fn path(text: &str) -> Result<PathBuf, std::convert::Infallible> {
    Ok(PathBuf::from(text))
}

/// Two numbers of ranks.
pub(super) fn mesh(text: &str) -> Result<(usize, usize), String> {
    let numbers = text.split_once(',').and_then(|(replicate, shard)| {
        Some((replicate.trim().parse().ok()?, shard.trim().parse().ok()?))
    });
    numbers.ok_or_else(|| "write it as REPLICATE,SHARD, such as 2,4".to_owned())
}

/// A strategy's name or settings. What they mean is checked with all other settings.
pub(super) fn strategy(text: &str) -> Result<StrategyConfig, std::convert::Infallible> {
    Ok(text.into())
}

/// A monitor's folder, with no folder of the job's own in it.
pub(super) fn monitor(text: &str) -> Result<MonitorConfig, std::convert::Infallible> {
    Ok(MonitorConfig { output_path: text.into(), job_name: String::new() })
}

/// Units and the names of their precisions, as JSON.
pub(super) fn overrides(text: &str) -> Result<BTreeMap<String, String>, String> {
    serde_json::from_str(text).map_err(|error| {
        format!(r#"`{text}`: {error}; write it as {{"types=LayerNorm": "32-true"}}"#)
    })
}

/// When checkpoints are saved, as JSON.
pub(super) fn checkpoint(text: &str) -> Result<CheckpointConfig, String> {
    serde_json::from_str(text).map_err(|error| {
        format!(r#"`{text}`: {error}; write it as {{"every_n_train_steps": 100}}"#)
    })
}

/// A loss scale by name, number, or rule.
pub(super) fn loss_scale(text: &str) -> Result<LossScaleConfig, std::convert::Infallible> {
    let number = text.parse().map(LossScaleConfig::Static);
    Ok(number.unwrap_or_else(|_| LossScaleConfig::Name(text.to_owned())))
}

/// A schedule's name or settings.
pub(super) fn schedule(text: &str) -> Result<ScheduleConfig, std::convert::Infallible> {
    Ok(text.into())
}
