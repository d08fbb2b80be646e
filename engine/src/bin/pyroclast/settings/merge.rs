//! Settings from all sources: flags over files over defaults, and where each comes from.

use std::collections::BTreeMap;
use std::path::Path;

use pyroclast::deepspeed::batch::{self, Batch};
use pyroclast::deepspeed::{Context, Translation, translate};
use pyroclast::gpt::GptConfig;
use pyroclast::{Error, Mistake, environment};
use serde_json::{Map, Value};

use super::{Settings, file};
use crate::misuse;

/// Where settings come from, by name: a flag, a file, or a variable. Others have their defaults.
pub(crate) type Sources = BTreeMap<String, String>;

/// What was given, from all sources.
#[derive(Debug, Default)]
pub(crate) struct Given {
    pub(crate) settings: Settings,
    pub(crate) sources: Sources,
    /// For the user to read.
    pub(crate) notes: Vec<String>,
}

/// How the translation of a DeepSpeed file marks what it did not find there.
const INFERRED: &str = "(inferred)";

impl Settings {
    /// These settings, completed by those of a file of the engine's own and of a DeepSpeed file.
    ///
    /// # Errors
    ///
    /// All mistakes of both files, and where they contradict each other.
    pub(crate) fn over_files(
        self,
        config: Option<&Path>,
        deepspeed: Option<&Path>,
    ) -> Result<Given, Error> {
        let mut mistakes = vec![];
        let mut sources = Sources::default();
        let mut merged = Map::new();
        if let Some(path) = config {
            merged = collect(file::read(path), &mut mistakes)?;
            let keys = merged.keys().map(|key| (key.clone(), path.display().to_string()));
            sources.extend(keys);
        }
        let flags = self.given()?;
        let mut notes = vec![];
        if let Some(path) = deepspeed {
            let context = context(&over(&merged, &flags));
            let translated = collect(read_deepspeed(path, &context), &mut mistakes)?;
            for (key, value) in &translated.settings {
                match merged.get(key) {
                    Some(other) if other != value => {
                        mistakes.push(contradiction((key, other, value), config, path));
                    }
                    _ => drop(merged.insert(key.clone(), value.clone())),
                }
                let place = translated.sources.get(key).map_or("", String::as_str);
                sources.insert(key.clone(), format!("{}: {place}", path.display()));
            }
            notes = translated.notes;
        }
        if !mistakes.is_empty() {
            return Err(Error::Config(mistakes));
        }
        for (key, _) in &flags {
            sources.insert(key.clone(), format!("--{}", key.replace('_', "-")));
        }
        if environment::variable("WORLD_SIZE").is_some() {
            sources.insert("world".to_owned(), "WORLD_SIZE".to_owned());
        }
        let merged = over(&merged, &flags);
        let refuse = |error: serde_json::Error| misuse("config", error.to_string());
        let mut settings: Self = serde_json::from_value(Value::Object(merged)).map_err(refuse)?;
        settings.infer_batch(&mut sources)?;
        Ok(Given { settings, sources, notes })
    }

    /// What is set here, by name.
    fn given(&self) -> Result<Map<String, Value>, Error> {
        let refuse = |error: serde_json::Error| misuse("config", error.to_string());
        let Value::Object(given) = serde_json::to_value(self).map_err(refuse)? else {
            return Ok(Map::new());
        };
        Ok(given.into_iter().filter(|(_, value)| !value.is_null()).collect())
    }

    /// Completes the batch sizes where that of all ranks is given.
    fn infer_batch(&mut self, sources: &mut Sources) -> Result<(), Error> {
        let Some(train) = self.train_batch_size else { return Ok(()) };
        let given = Batch {
            train: Some(train),
            micro: self.batch_size,
            accumulate: self.accumulate_grad_batches,
        };
        let world = self.world();
        let resolved = batch::resolve(given, world).map_err(|_| {
            let from = |key: &str| sources.get(key).map_or("default", String::as_str);
            let size = |key: &str, size: Option<usize>| match size {
                Some(size) => format!("{size} ({key}, {})", from(key)),
                None => format!("({key}, not given)"),
            };
            misuse(
                "train_batch_size",
                format!(
                    "{train} ({}) is not {} x {} x {world} (ranks, {}); change one of them, or leave one \
                     out",
                    from("train_batch_size"),
                    size("batch_size", self.batch_size),
                    size("accumulate_grad_batches", self.accumulate_grad_batches),
                    from(if sources.contains_key("world") { "world" } else { "devices" }),
                ),
            )
        })?;
        let mut complete = |key: &str, size: &mut Option<usize>, found: Option<batch::Part>| {
            if size.is_none() {
                *size = found.map(|part| part.value);
                sources.insert(key.to_owned(), "inferred from train_batch_size".to_owned());
            }
        };
        complete("batch_size", &mut self.batch_size, resolved.micro);
        complete("accumulate_grad_batches", &mut self.accumulate_grad_batches, resolved.accumulate);
        Ok(())
    }

    /// How many ranks there will be. What is wrong with it is said later.
    fn world(&self) -> usize {
        let size = environment::variable("WORLD_SIZE").and_then(|size| size.parse().ok());
        size.or(self.devices).unwrap_or(1).max(1)
    }
}

/// What a file gave, or nothing, with its mistakes added to the others.
fn collect<T: Default>(read: Result<T, Error>, mistakes: &mut Vec<Mistake>) -> Result<T, Error> {
    match read {
        Err(Error::Config(more)) => {
            mistakes.extend(more);
            Ok(T::default())
        }
        read => read,
    }
}

fn over(lower: &Map<String, Value>, upper: &Map<String, Value>) -> Map<String, Value> {
    lower.iter().chain(upper).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// What a DeepSpeed file's numbers depend on.
fn context(settings: &Map<String, Value>) -> Context {
    let settings: Settings =
        serde_json::from_value(Value::Object(settings.clone())).unwrap_or_default();
    let preset = GptConfig::preset(settings.model_name()).ok();
    let hidden_size = settings.width.or(preset.map(|preset| preset.width));
    Context { world: settings.world(), hidden_size }
}

fn read_deepspeed(path: &Path, context: &Context) -> Result<Translation, Error> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| misuse("deepspeed", format!("{}: {error}", path.display())))?;
    let mut translated = translate(&text, context).map_err(|mut mistakes| {
        for mistake in &mut mistakes {
            mistake.problem = format!("{} (in {})", mistake.problem, path.display());
        }
        Error::Config(mistakes)
    })?;
    // Flags may give other batch sizes than those from which these follow.
    let inferred = translated.sources.iter().filter(|(_, source)| source.ends_with(INFERRED));
    let left_out: Vec<String> = inferred.map(|(key, _)| key.clone()).collect();
    left_out.iter().for_each(|key| drop(translated.settings.remove(key)));
    Ok(translated)
}

fn contradiction(
    (key, ours, theirs): (&str, &Value, &Value),
    config: Option<&Path>,
    deepspeed: &Path,
) -> Mistake {
    let config = config.map(|path| path.display().to_string()).unwrap_or_default();
    let problem =
        format!("{ours} in {config}, but {theirs} by {}; keep one of them", deepspeed.display());
    Mistake::new(key, problem)
}

#[cfg(test)]
mod tests {
    use pyroclast::{Environment, Plan};

    use super::*;

    /// The settings of a DeepSpeed file and one of ours, with flags over them.
    fn merged(deepspeed: &str, config: Option<&str>, flags: Settings) -> Result<Given, Error> {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("a file");
            path
        };
        let config = config.map(|text| write("run.toml", text));
        let deepspeed = write("ds.json", deepspeed);
        flags.over_files(config.as_deref(), Some(&deepspeed))
    }

    /// What a file of settings leads to, up to the plan.
    fn mistakes(path: &Path) -> Vec<String> {
        let planned = Settings::default()
            .over_files(Some(path), None)
            .and_then(|given| Plan::new(&given.settings.trainer(), &Environment::default()));
        match planned {
            Ok(plan) => {
                // What is resolved says the same again.
                let again = Plan::new(&plan.resolved, &Environment::default()).expect("the same");
                assert_eq!(again.resolved, plan.resolved, "{}", path.display());
                vec![]
            }
            Err(Error::Config(mistakes)) => mistakes.iter().map(ToString::to_string).collect(),
            Err(other) => panic!("{}: {other}", path.display()),
        }
    }

    /// Every file is as it says: its first lines, or those of a file beside it, name its mistakes.
    #[test]
    fn files_of_settings_are_right_or_wrong_as_they_say() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/settings");
        let mut seen = 0;
        for entry in std::fs::read_dir(&folder).expect("the folder") {
            let path = entry.expect("a file").path();
            if path.extension().is_some_and(|extension| extension == "expect") {
                continue;
            }
            let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
            let text = read(&path) + &read(&path.with_extension("expect"));
            let expected: Vec<&str> =
                text.lines().filter_map(|line| line.strip_prefix("# expect: ")).collect();
            let mistakes = mistakes(&path);
            assert_eq!(mistakes.len(), expected.len(), "{}: {mistakes:?}", path.display());
            assert_eq!(path.to_string_lossy().contains(".wrong-"), !expected.is_empty());
            for expected in expected {
                let found = mistakes.iter().any(|mistake| mistake.contains(expected));
                assert!(found, "{}: {expected}: {mistakes:?}", path.display());
            }
            seen += 1;
        }
        assert!(seen >= 14 * 4, "{seen} files");
    }

    #[test]
    fn a_deepspeed_file_is_a_source_of_settings_like_others() {
        let text = r#"{
            // A comment, as DeepSpeed's parser takes it.
            "train_batch_size": 24, "gradient_accumulation_steps": 3,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.8, 0.9]}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}
        }"#;
        let flags = Settings { devices: Some(2), lr: Some(0.5), ..Settings::default() };
        let Given { settings, sources, notes } = merged(text, None, flags).expect("settings");
        assert_eq!((settings.lr, settings.beta1), (Some(0.5), Some(0.8)));
        assert_eq!((settings.batch_size, settings.accumulate_grad_batches), (Some(4), Some(3)));
        assert_eq!(settings.gradient_clip_val, Some(1.0));
        assert_eq!(sources["lr"], "--lr");
        assert!(sources["beta1"].ends_with("ds.json: optimizer.params.betas"), "{sources:?}");
        assert_eq!(sources["batch_size"], "inferred from train_batch_size");
        assert!(notes.iter().any(|note| note.contains("gradient_clipping")), "{notes:?}");
        let trainer = settings.trainer();
        let plan = Plan::new(&trainer, &Environment::default());
        assert_eq!(plan.expect("a plan").strategy.name(), "zero2");
    }

    #[test]
    fn mistakes_of_all_files_come_together_and_contradictions_are_told() {
        let expect = |deepspeed: &str, config: &str, flags: Settings, expected: &[&str]| {
            let Err(Error::Config(mistakes)) = merged(deepspeed, Some(config), flags) else {
                panic!("{deepspeed}: no mistake");
            };
            assert_eq!(mistakes.len(), expected.len(), "{mistakes:?}");
            for (mistake, expected) in mistakes.iter().zip(expected) {
                assert!(mistake.to_string().contains(expected), "{mistake}");
            }
        };
        let optimizer = r#"{"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "stepz": 1}"#;
        let both = ["did you mean `lr`?", "stepz: unknown key"];
        expect(optimizer, "lrr = 1", Settings::default(), &both);
        let optimizer = r#"{"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}"#;
        expect(optimizer, "lr = 0.2", Settings::default(), &["lr: 0.2 in "]);
        let flags = Settings { batch_size: Some(5), devices: Some(3), ..Settings::default() };
        let of_file = "train_batch_size: train_batch_size 32 (file) is not 10 (";
        expect(r#"{"train_batch_size": 32}"#, "seed = 1", flags.clone(), &[of_file]);
        let with_flags = "is not 5 (batch_size, --batch-size) x (accumulate_grad_batches, not given) x 3 \
                          (ranks, --devices)";
        expect(r#"{"train_batch_size": 33}"#, "seed = 1", flags, &[with_flags]);
    }
}
