//! Whether ranks that are processes were started with the same settings. Where they are threads, there
//! is only one configuration.

use pyroclast_strategies::ProcessGroup;
use serde_json::Value;

use crate::error::{Error, Mistake};

/// Settings that concern one rank alone, or are agreed on elsewhere.
const OWN: [&str; 10] = [
    "accelerator",
    "data",
    "devices",
    "init_from",
    "log_every_n_steps",
    "num_nodes",
    "out",
    "resume",
    "save_weights",
    "spawn",
];

/// Refuses to train where a rank has other settings or other data than rank 0: the ranks would each
/// train a model of their own, and nothing would show it.
pub(super) fn agree_on_settings(
    config: &Value,
    dataset_len: u64,
    group: &ProcessGroup,
) -> Result<(), Error> {
    let mut mine = config.clone();
    mine["samples"] = Value::from(dataset_len);
    let text = mine.to_string().into_bytes();
    // The length goes first: a broadcast needs buffers of one length.
    let len = group.broadcast(vec![text.len() as i64], 0).wait()?[0];
    let mut theirs = text;
    theirs.resize(usize::try_from(len).unwrap_or_default(), 0);
    let theirs = group.broadcast(theirs, 0).wait()?;
    let theirs: Value = serde_json::from_slice(&theirs).unwrap_or_default();
    let mistakes = differences(&mine, &theirs);
    if !mistakes.is_empty() {
        return Err(Error::Config(mistakes));
    }
    // A rank that differs raises its own error, which ends this wait.
    Ok(group.barrier()?)
}

fn differences(mine: &Value, rank_0: &Value) -> Vec<Mistake> {
    let keys = |value: &Value| -> Vec<String> {
        value.as_object().map(|map| map.keys().cloned().collect()).unwrap_or_default()
    };
    let mut all = [keys(mine), keys(rank_0)].concat();
    all.sort();
    all.dedup();
    let differs = |key: &String| !OWN.contains(&key.as_str()) && mine.get(key) != rank_0.get(key);
    all.iter()
        .filter(|key| differs(key))
        .map(|key| {
            let shown = |value: Option<&Value>| value.unwrap_or(&Value::Null).to_string();
            let (mine, rank_0) = (shown(mine.get(key)), shown(rank_0.get(key)));
            let problem = format!("is {mine}, but {rank_0} on rank 0; give all ranks the same");
            Mistake::new(key.clone(), problem)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_setting_that_changes_the_training_must_agree() {
        let rank_0 = json!({ "lr": 1e-3, "seed": 0, "out": "runs/a", "devices": 1, "samples": 5 });
        assert_eq!(differences(&rank_0, &rank_0), []);
        let own = json!({ "lr": 1e-3, "seed": 0, "out": null, "devices": 2, "samples": 5 });
        assert_eq!(differences(&own, &rank_0), []);
        let other = json!({ "lr": 1e-2, "seed": 0, "samples": 4, "model": "gpt2" });
        let shown: Vec<String> =
            differences(&other, &rank_0).iter().map(ToString::to_string).collect();
        assert_eq!(shown.len(), 3, "{shown:?}");
        assert!(shown[0].contains("lr") && shown[0].contains("0.01"), "{shown:?}");
        assert!(shown[0].contains("0.001 on rank 0"), "{shown:?}");
    }
}
