//! Which checkpoints are made and which are kept: Lightning's `ModelCheckpoint`.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// When checkpoints are saved and which are kept, by the names of Lightning's `ModelCheckpoint`. One more is saved
/// when a run ends or is stopped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// The metric that says which are the best: `val_loss` and `train_loss`, or one of the task's with `val_` or
    /// `train_` before it. None for the newest.
    pub monitor: Option<String>,
    /// `min` (the default) or `max`: which scores are better. A tie does not replace what there is.
    pub mode: String,
    /// How many of the best are kept: -1 for all, 0 for none. Default 1. Without `monitor` -1, 0 or 1.
    pub save_top_k: i64,
    /// Whether the newest is kept, beside the best, and named by the link `last`. Default false.
    pub save_last: bool,
    /// Steps between two checkpoints, in place of epochs.
    pub every_n_train_steps: Option<u64>,
    /// Epochs between two checkpoints. Default 1, if nothing else is set; 0 for none.
    pub every_n_epochs: Option<u64>,
    /// Seconds between two checkpoints, in place of epochs.
    pub train_time_interval: Option<f64>,
    /// Whether epochs are counted when training has ended them (the default), or at the validation that follows.
    pub save_on_train_epoch_end: bool,
    /// Whether training goes on while a checkpoint is written, from a copy that each rank makes of its own part in
    /// host memory. The next checkpoint waits for it, and so does the end of the run. Default false.
    pub async_save: bool,
    /// The folder's name: `{epoch}`, `{step}` and metrics in braces, with a number of digits where wanted, such
    /// as `{epoch}-{val_loss:.2}`, which becomes `epoch=3-val_loss=1.25`. Default `step-00001000`.
    pub filename: Option<String>,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self {
            monitor: None,
            mode: "min".to_owned(),
            save_top_k: 1,
            save_last: false,
            every_n_train_steps: None,
            every_n_epochs: None,
            train_time_interval: None,
            save_on_train_epoch_end: true,
            async_save: false,
            filename: None,
        }
    }
}

impl CheckpointConfig {
    /// What is wrong with it: setting and problem.
    pub(crate) fn mistakes(&self) -> Vec<(&'static str, String)> {
        let mut mistakes = vec![];
        let k = self.save_top_k;
        if k < -1 {
            mistakes.push(("save_top_k", format!("{k} is out of range; -1 keeps all, 0 none")));
        } else if self.monitor.is_none() && k > 1 {
            let problem = format!("{k} of the best need a `monitor`; without one -1, 0 or 1");
            mistakes.push(("save_top_k", problem));
        }
        if !["min", "max"].contains(&self.mode.as_str()) {
            mistakes.push(("mode", format!("unknown `{}`; there are min, max", self.mode)));
        }
        let given = [
            ("every_n_train_steps", self.every_n_train_steps.is_some()),
            ("every_n_epochs", self.every_n_epochs.is_some()),
            ("train_time_interval", self.train_time_interval.is_some()),
        ];
        let mut given = given.into_iter().filter(|(_, is_given)| *is_given);
        if let (Some((first, _)), Some((second, _))) = (given.next(), given.next()) {
            mistakes.push((second, format!("beside {first}; set one of them")));
        }
        if self.every_n_train_steps == Some(0) {
            mistakes.push(("every_n_train_steps", "0 is no interval; leave it out".to_owned()));
        }
        if let Some(seconds) = self.train_time_interval.filter(|s| !(s.is_finite() && *s > 0.0)) {
            let problem = format!("{seconds} is out of range; it must be above 0 seconds");
            mistakes.push(("train_time_interval", problem));
        }
        if let Some(problem) = self.filename.as_deref().and_then(|name| wrong_name(name).err()) {
            mistakes.push(("filename", problem));
        }
        mistakes
    }

    /// Whether a checkpoint is due at the end of a step.
    pub(crate) fn is_due(&self, moment: &Moment) -> bool {
        if let Some(steps) = self.every_n_train_steps {
            return moment.step.is_multiple_of(steps);
        }
        if let Some(seconds) = self.train_time_interval {
            return moment.seconds >= seconds;
        }
        let epochs = self.every_n_epochs.unwrap_or(1);
        let is_counted = self.save_on_train_epoch_end || moment.validated;
        epochs > 0 && is_counted && moment.epochs / epochs > moment.saved_epochs / epochs
    }
}

/// What is known at the end of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) step: u64,
    /// Epochs that have ended.
    pub(crate) epochs: u64,
    /// Epochs that had ended at the last checkpoint.
    pub(crate) saved_epochs: u64,
    /// Whether the step was followed by a validation.
    pub(crate) validated: bool,
    /// Seconds since the last checkpoint.
    pub(crate) seconds: f64,
}

/// Metrics by name.
pub(crate) type Scores = BTreeMap<String, f64>;

/// Something in braces, or text.
enum Part<'a> {
    Text(&'a str),
    Field { name: &'a str, digits: Option<usize> },
}

fn parts(template: &str) -> Result<Vec<Part<'_>>, String> {
    let mut parts = vec![];
    let mut rest = template;
    while let Some((text, after)) = rest.split_once('{') {
        let (field, after) =
            after.split_once('}').ok_or_else(|| format!("`{template}`: a brace is not closed"))?;
        let (name, format) = field.split_once(':').unwrap_or((field, ""));
        let digits = format.trim_start_matches("0").trim_start_matches('.').trim_end_matches('f');
        let digits = match (format, digits.parse()) {
            ("", _) => None,
            (_, Ok(digits)) => Some(digits),
            _ => {
                return Err(format!("`{template}`: `{format}` is no number of digits, such as .2"));
            }
        };
        parts.extend([Part::Text(text), Part::Field { name, digits }]);
        rest = after;
    }
    parts.push(Part::Text(rest));
    Ok(parts)
}

fn wrong_name(template: &str) -> Result<(), String> {
    let parts = parts(template)?;
    let is_path = |part: &Part<'_>| matches!(part, Part::Text(text) if text.contains(['/', '\\']));
    match template.is_empty() || template.starts_with('.') || parts.iter().any(is_path) {
        true => Err(format!("`{template}` is no name of a folder")),
        false => Ok(()),
    }
}

/// The name of a checkpoint: a metric that there is not counts as 0.
pub(crate) fn name(config: &CheckpointConfig, step: u64, epoch: u64, scores: &Scores) -> String {
    let Some(template) = &config.filename else { return format!("step-{step:08}") };
    let fill = |part: Part<'_>| match part {
        Part::Text(text) => text.to_owned(),
        Part::Field { name: "step", .. } => format!("step={step}"),
        Part::Field { name: "epoch", .. } => format!("epoch={epoch}"),
        Part::Field { name, digits } => {
            let score = scores.get(name).copied().unwrap_or_default();
            match digits {
                Some(digits) => format!("{name}={score:.digits$}"),
                None => format!("{name}={score}"),
            }
        }
    };
    parts(template).unwrap_or_default().into_iter().map(fill).collect()
}

/// A checkpoint that is kept, and how good it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    /// The folder's name.
    pub name: String,
    /// The monitored metric; null where nothing is monitored, or where it was not a number.
    pub score: Option<f64>,
}

/// The checkpoints of a run.
#[derive(Clone, Debug)]
pub(crate) struct Keeper {
    config: CheckpointConfig,
    /// In the order in which they were saved.
    kept: Vec<Kept>,
}

impl Keeper {
    /// With those that a run that is continued has kept.
    pub(crate) fn new(config: CheckpointConfig, kept: Vec<Kept>) -> Self {
        Self { config, kept }
    }

    pub(crate) fn kept(&self) -> &[Kept] {
        &self.kept
    }

    /// Whether a checkpoint with this score would be kept.
    pub(crate) fn wants(&self, score: Option<f64>) -> bool {
        if self.config.save_last {
            return true;
        }
        match usize::try_from(self.config.save_top_k) {
            Err(_) => true,
            Ok(0) => false,
            Ok(_) if self.config.monitor.is_none() => true,
            Ok(k) if self.kept.len() < k => true,
            Ok(_) => {
                self.worst().is_some_and(|worst| self.is_better(score, self.kept[worst].score))
            }
        }
    }

    /// Takes note of a checkpoint that has been saved; returns those that are to be removed.
    pub(crate) fn saved(&mut self, name: String, score: Option<f64>) -> Vec<String> {
        self.kept.retain(|kept| kept.name != name);
        self.kept.push(Kept { name, score });
        let Ok(k) = usize::try_from(self.config.save_top_k) else { return vec![] };
        let newest = self.kept.len() - 1;
        let mut order: Vec<usize> = (0..self.kept.len()).collect();
        match self.config.monitor {
            None => order.reverse(),
            // Of equals the older one is better: a tie does not replace.
            Some(_) => order.sort_by(|a, b| {
                let (a, b) = (self.kept[*a].score, self.kept[*b].score);
                self.is_better(b, a).cmp(&self.is_better(a, b))
            }),
        }
        let best: Vec<usize> = order.into_iter().take(k).collect();
        let stays = |at: usize| best.contains(&at) || (self.config.save_last && at == newest);
        let (stay, go): (Vec<_>, Vec<_>) =
            self.kept.drain(..).enumerate().partition(|(at, _)| stays(*at));
        self.kept = stay.into_iter().map(|(_, kept)| kept).collect();
        go.into_iter().map(|(_, kept)| kept.name).collect()
    }

    fn worst(&self) -> Option<usize> {
        let mut worst = 0;
        for at in 1..self.kept.len() {
            if self.is_better(self.kept[worst].score, self.kept[at].score) {
                worst = at;
            }
        }
        (!self.kept.is_empty()).then_some(worst)
    }

    /// Whether a score is better than another; what is no number is the worst.
    fn is_better(&self, a: Option<f64>, b: Option<f64>) -> bool {
        match (a, b) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(a), Some(b)) if self.config.mode == "max" => a > b,
            (Some(a), Some(b)) => a < b,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(change: impl FnOnce(&mut CheckpointConfig)) -> CheckpointConfig {
        let mut config = CheckpointConfig::default();
        change(&mut config);
        config
    }

    /// What is kept after checkpoints with these scores.
    fn kept(config: CheckpointConfig, scores: &[Option<f64>]) -> Vec<String> {
        assert_eq!(config.mistakes(), []);
        let mut keeper = Keeper::new(config, vec![]);
        let mut folder: Vec<String> = vec![];
        for (at, score) in scores.iter().enumerate() {
            if keeper.wants(*score) {
                let name = at.to_string();
                folder.push(name.clone());
                let removed = keeper.saved(name, *score);
                folder.retain(|name| !removed.contains(name));
            }
        }
        assert!(keeper.kept().iter().map(|kept| &kept.name).eq(&folder));
        folder
    }

    #[test]
    fn the_best_are_kept_by_lightnings_rules() {
        let best = |k, mode: &str| {
            let (monitor, mode) = (Some("val_loss".to_owned()), mode.to_owned());
            config(|c| (c.monitor, c.save_top_k, c.mode) = (monitor, k, mode))
        };
        let scores = [3.0, 1.0, 2.0, 1.0, 0.5].map(Some);
        assert_eq!(kept(best(1, "min"), &scores), ["4"]);
        assert_eq!(kept(best(1, "min"), &scores[..4]), ["1"], "a tie does not replace");
        assert_eq!(kept(best(2, "min"), &scores), ["1", "4"]);
        assert_eq!(kept(best(3, "min"), &scores), ["1", "3", "4"]);
        assert_eq!(kept(best(2, "max"), &scores), ["0", "2"]);
        assert_eq!(kept(best(-1, "min"), &scores).len(), 5);
        assert_eq!(kept(best(0, "min"), &scores), [""; 0]);
        // What is no number is kept for want of a better one.
        assert_eq!(kept(best(2, "min"), &[None, Some(2.0)]), ["0", "1"]);
        assert_eq!(kept(best(2, "min"), &[None, Some(2.0), Some(3.0), None]), ["1", "2"]);
    }

    #[test]
    fn without_a_monitor_the_newest_is_kept_and_the_last_beside_the_best() {
        let scores = [None; 4];
        assert_eq!(kept(CheckpointConfig::default(), &scores), ["3"]);
        assert_eq!(kept(config(|c| c.save_top_k = -1), &scores).len(), 4);
        assert_eq!(kept(config(|c| c.save_top_k = 0), &scores), [""; 0]);
        assert_eq!(kept(config(|c| (c.save_top_k, c.save_last) = (0, true)), &scores), ["3"]);
        let monitored = config(|c| (c.monitor, c.save_last) = (Some("val_loss".into()), true));
        assert_eq!(kept(monitored, &[2.0, 1.0, 3.0, 4.0].map(Some)), ["1", "3"]);
    }

    #[test]
    fn checkpoints_are_due_by_steps_epochs_or_time() {
        let moment = Moment { step: 6, epochs: 2, saved_epochs: 1, validated: false, seconds: 5.0 };
        assert!(CheckpointConfig::default().is_due(&moment));
        assert!(!CheckpointConfig::default().is_due(&Moment { epochs: 1, ..moment }));
        assert!(config(|c| c.every_n_epochs = Some(2)).is_due(&moment));
        assert!(!config(|c| c.every_n_epochs = Some(3)).is_due(&moment));
        assert!(!config(|c| c.every_n_epochs = Some(0)).is_due(&moment));
        assert!(!config(|c| c.save_on_train_epoch_end = false).is_due(&moment));
        let validated = Moment { validated: true, ..moment };
        assert!(config(|c| c.save_on_train_epoch_end = false).is_due(&validated));
        assert!(config(|c| c.every_n_train_steps = Some(3)).is_due(&moment));
        assert!(!config(|c| c.every_n_train_steps = Some(4)).is_due(&moment));
        assert!(config(|c| c.train_time_interval = Some(5.0)).is_due(&moment));
        assert!(!config(|c| c.train_time_interval = Some(6.0)).is_due(&moment));
    }

    #[test]
    fn names_are_made_of_templates() {
        let scores = Scores::from([("val_loss".to_owned(), 1.2468)]);
        let named = |template: Option<&str>| {
            let config = config(|c| c.filename = template.map(str::to_owned));
            assert_eq!(config.mistakes(), []);
            name(&config, 300, 2, &scores)
        };
        assert_eq!(named(None), "step-00000300");
        assert_eq!(named(Some("{epoch}-{step}")), "epoch=2-step=300");
        assert_eq!(named(Some("gpt-{val_loss:.2f}")), "gpt-val_loss=1.25");
        assert_eq!(named(Some("{val_loss:.1}-{other}")), "val_loss=1.2-other=0");
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        type Change = fn(&mut CheckpointConfig);
        let table: [(Change, &str); 9] = [
            (|c| c.save_top_k = -2, "save_top_k"),
            (|c| c.save_top_k = 2, "save_top_k"),
            (|c| c.mode = "best".into(), "mode"),
            (|c| (c.every_n_epochs, c.every_n_train_steps) = (Some(1), Some(5)), "every_n_epochs"),
            (|c| c.every_n_train_steps = Some(0), "every_n_train_steps"),
            (|c| c.train_time_interval = Some(0.0), "train_time_interval"),
            (|c| c.filename = Some("a/b".into()), "filename"),
            (|c| c.filename = Some("{epoch".into()), "filename"),
            (|c| c.filename = Some("{val_loss:x}".into()), "filename"),
        ];
        for (change, setting) in table {
            let mistakes = config(change).mistakes();
            assert_eq!(mistakes.len(), 1, "{mistakes:?}");
            assert_eq!(mistakes[0].0, setting);
        }
    }
}
