//! `pyroclast train`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn::module::Module;
use pyroclast::gpt::generate::{self, Request};
use pyroclast::gpt::task::Decay;
use pyroclast::gpt::weights::{self, InitialWeights};
use pyroclast::gpt::{Gpt, GptConfig, GptTask, TextData, text};
use pyroclast::output::RunFolder;
use pyroclast::plan::Resume;
use pyroclast::{Accelerator, Error, Mistake, Plan, Sampling, StopReason, Trainer, report};
use serde_json::{Value, json};

use crate::args::TrainArgs;
use crate::console::{grouped, printable, say};
use crate::misuse;
use crate::progress::Progress;
use crate::settings::{Given, Settings};

/// Bytes of the sample texts.
const SAMPLE_LENGTH: usize = 240;

/// Everything that a run needs, checked.
struct Run {
    settings: Settings,
    model: GptConfig,
    sampling: Sampling,
    trainer: Trainer,
    recorded: Value,
}

/// Runs the command.
pub(crate) fn run(args: &TrainArgs) -> Result<(), Error> {
    let settings = args.settings.clone();
    let Given { settings, sources, notes } =
        settings.over_files(args.config.as_deref(), args.deepspeed.as_deref())?;
    let mut run = resolve(settings)?;
    if args.print_config {
        if run.trainer.plan().is_first() {
            let mut shown = run.recorded;
            shown["sources"] = json!(sources);
            shown["notes"] = json!([&notes[..], &run.trainer.plan().notes].concat());
            say(&format!("{shown:#}"));
        }
        return Ok(());
    }
    if run.trainer.plan().is_first() {
        notes.iter().for_each(|note| say(&format!("note        {note}")));
    }
    // Before any input is read: a rank that cannot read its own ends the others.
    run.trainer.join()?;
    train(&mut run).inspect_err(|error| run.trainer.fail(error))
}

/// Checks all settings, and reports all mistakes together.
fn resolve(mut settings: Settings) -> Result<Run, Error> {
    let mut mistakes = vec![];
    let environment = settings.environment(&mut mistakes);
    mistakes.extend(settings.wrong_spawn(&environment));
    let is_first = environment.process.as_ref().is_none_or(|process| process.rank == 0);
    let model = settings.model(&mut mistakes);
    let sampling = sampling(&settings, &mut mistakes);
    let is_trial = settings.fast_dev_run == Some(true);
    if is_trial && settings.save_weights.is_some() {
        mistakes.push(Mistake::new("save_weights", "fast_dev_run writes nothing; set one of them"));
    }
    // Without a folder, `auto` has nowhere to look; the plan says so. Only rank 0 writes.
    let names_folder = settings.out.is_some() || settings.resume.as_deref() == Some("auto");
    if is_first && !is_trial && !names_folder {
        settings.out = Some(free_folder(settings.model_name()));
    }
    let trainer = Trainer::in_environment(settings.trainer(), &environment);
    match (trainer, model, sampling) {
        (Ok(trainer), Some(model), Some(sampling)) if mistakes.is_empty() => {
            let recorded = record(&settings, &model, trainer.plan());
            let trainer = trainer.with_recorded_config(recorded.clone());
            Ok(Run { settings, model, sampling, trainer, recorded })
        }
        (Err(Error::Config(more)), ..) => {
            mistakes.extend(more);
            Err(Error::Config(mistakes))
        }
        (Err(error), ..) => Err(error),
        _ => Err(Error::Config(mistakes)),
    }
}

fn sampling(settings: &Settings, mistakes: &mut Vec<Mistake>) -> Option<Sampling> {
    match settings.sampling.as_deref() {
        None | Some("random") => Some(Sampling::Random),
        Some("sequential") => Some(Sampling::Sequential),
        Some(name) => {
            let problem = format!("unknown sampling `{name}`; there are random, sequential");
            mistakes.push(Mistake::new("sampling", problem));
            None
        }
    }
}

/// The first folder of this model's runs that is not taken.
fn free_folder(model: &str) -> PathBuf {
    let folder = |number| Path::new("runs").join(format!("{model}-{number}"));
    (1..).map(folder).find(|path| !path.exists()).unwrap_or_else(|| folder(0))
}

/// What tells one file of initial weights from another. One that cannot be read is refused later.
fn checksum(path: &Path) -> Option<String> {
    pyroclast::checkpoint::checksum(path).ok()
}

/// The settings of a run, resolved.
fn record(settings: &Settings, model: &GptConfig, plan: &Plan) -> Value {
    let mut recorded = plan.to_json();
    let own = json!({
        "model": settings.model_name(),
        "layers": model.layers,
        "heads": model.heads,
        "width": model.width,
        "context": model.context,
        "data": settings.data,
        "val_split": val_split(settings),
        "sampling": settings.sampling.as_deref().unwrap_or("random"),
        "batch_size": batch_size(settings),
        "decay_all": settings.decay_all.unwrap_or(false),
        "init_from": settings.init_from,
        "save_weights": settings.save_weights,
        "initial_weights": settings.init_from.as_deref().and_then(checksum),
        "spawn": if plan.process.is_some() { "process" } else { "thread" },
    });
    if let (Value::Object(recorded), Value::Object(own)) = (&mut recorded, own) {
        recorded.extend(own);
    }
    recorded
}

fn val_split(settings: &Settings) -> f64 {
    settings.val_split.unwrap_or(0.1)
}

fn batch_size(settings: &Settings) -> usize {
    settings.batch_size.unwrap_or(12)
}

fn train(run: &mut Run) -> Result<(), Error> {
    let bytes = match &run.settings.data {
        Some(path) => text::read(path)?,
        None => text::shipped(),
    };
    let checksum = text::checksum(&bytes);
    run.trainer.record("data_sha256", checksum.clone());
    run.recorded["data_sha256"] = checksum.into();
    let Run { settings, model: config, sampling, trainer, .. } = run;
    let data = TextData::new(&bytes, config.context, val_split(settings))?
        .with_batch_size(batch_size(settings))
        .with_sampling(sampling.clone());
    let mut task = GptTask::new(*config);
    if let Some(path) = &settings.init_from {
        task.initial = Some(InitialWeights::open(path)?);
    }
    if settings.decay_all == Some(true) {
        task.decay = Decay::All;
    }
    listen_to_signals(&trainer.stop_flag())?;
    match trainer.plan().is_first() {
        true => train_and_show(run, &task, &data, bytes.len()),
        false => trainer.fit(&task, &data).map(drop),
    }
}

/// Rank 0's part: it alone prints and writes.
fn train_and_show(
    run: &mut Run,
    task: &GptTask,
    data: &TextData,
    bytes: usize,
) -> Result<(), Error> {
    let Run { settings, model: config, trainer, recorded, .. } = run;
    let plan = trainer.plan().clone();
    if let Some(path) = settings.save_weights.as_deref() {
        check_writable(path)?;
    }
    let sample = Sample { prompt: prompt(data.train_bytes()), config: *config, plan: &plan };
    introduce(settings, config, bytes, &plan);
    if let Some(out) = &plan.resolved.out {
        RunFolder::at(out).refuse_taken(&plan.resume)?;
    }
    let before = match plan.resume {
        Resume::Never => Some(sample.untrained(task)?),
        _ => None,
    };
    if let Some(text) = &before {
        show("before training", text);
    }

    trainer.add_callback(Progress::new(plan.resolved.log_every_n_steps));
    let fitted = trainer.fit(task, data)?;

    let model = fitted.model.valid();
    if let Some(path) = &settings.save_weights {
        weights::save_torch(&model, path)?;
    }
    let after = sample.draw(&model)?;
    show("after training", &after);
    if fitted.reason == StopReason::Stopped {
        say(&format!("stopped after step {}", fitted.steps));
    }
    if let Some(out) = settings.out.as_deref().filter(|_| settings.fast_dev_run != Some(true)) {
        let folder = RunFolder::at(out);
        keep_samples(&folder, before.as_deref(), &after)?;
        report::write(&folder, recorded)?;
        say(&format!("report      {}", folder.report().display()));
        say(&format!("generate    pyroclast generate --from {} --prompt \"...\"", out.display()));
    }
    Ok(())
}

/// Refuses a place where a file could not be written later, after the training.
fn check_writable(path: &Path) -> Result<(), Error> {
    let refuse =
        |problem: &str| Err(misuse("save_weights", format!("{}: {problem}", path.display())));
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if path.is_dir() {
        return refuse("is a folder");
    }
    match fs::metadata(parent.unwrap_or(Path::new("."))) {
        Ok(folder) if folder.is_dir() && !folder.permissions().readonly() => Ok(()),
        Ok(folder) if folder.is_dir() => refuse("its folder cannot be written"),
        _ => refuse("its folder does not exist"),
    }
}

fn introduce(settings: &Settings, model: &GptConfig, bytes: usize, plan: &Plan) {
    let GptConfig { layers, heads, width, context } = model;
    let sizes = format!("{layers} layers, {heads} heads, width {width}, context {context}");
    let parameters = grouped(model.num_params());
    say(&format!("{:<11} {sizes}, {parameters} parameters", settings.model_name()));
    let source =
        settings.data.as_deref().map_or("the project's own text".into(), Path::to_string_lossy);
    say(&format!("data        {source}, {} bytes", grouped(bytes as u64)));
    let ranks = if plan.world == 1 { "rank" } else { "ranks" };
    let shared = match plan.accelerator {
        _ if plan.process.is_some() => ", each a process",
        _ if plan.world == 1 => "",
        Accelerator::Cpu => "",
        _ => ", which they share",
    };
    let (strategy, accelerator) = (plan.describe_strategy(), plan.accelerator);
    plan.notes.iter().for_each(|note| say(&format!("note        {note}")));
    say(&format!("training    {strategy}, {} {ranks} on {accelerator}{shared}", plan.world));
}

/// Texts that show what the model has learned.
struct Sample<'a> {
    prompt: Vec<u8>,
    config: GptConfig,
    plan: &'a Plan,
}

impl Sample<'_> {
    /// From the weights that training will start with.
    fn untrained(&self, task: &GptTask) -> Result<String, Error> {
        let device = self.plan.device()?;
        device.seed(self.plan.resolved.seed);
        let model = task.model(&device)?;
        self.draw(&model.valid())
    }

    fn draw(&self, model: &Gpt) -> Result<String, Error> {
        let device = self.plan.device()?;
        let sampler = generate::Sampler::default();
        let seed = self.plan.resolved.seed;
        let request = Request { prompt: &self.prompt, length: SAMPLE_LENGTH, sampler, seed };
        let text = generate::generate(model, self.config.context, &request, &device)?;
        Ok(printable(&[&self.prompt[..], &text].concat()))
    }
}

/// The beginning of the training text, up to the end of its first line.
fn prompt(text: &[u8]) -> Vec<u8> {
    let line = text.split(|byte| *byte == b'\n').find(|line| line.len() > 2).unwrap_or(text);
    line[..line.len().min(32)].to_vec()
}

fn show(when: &str, text: &str) {
    let indented: Vec<String> = text.lines().map(|line| format!("    {line}")).collect();
    say(&format!("\n{when}:\n{}\n", indented.join("\n")));
}

fn keep_samples(folder: &RunFolder, before: Option<&str>, after: &str) -> Result<(), Error> {
    let samples = folder.path().join("samples");
    let write = |name: &str, text: &str| fs::write(samples.join(name), text);
    fs::create_dir_all(&samples)
        .and_then(|()| before.map_or(Ok(()), |text| write("1-before-training.txt", text)))
        .and_then(|()| write("2-after-training.txt", after))
        .map_err(|source| Error::Io { action: "writing", path: samples.clone(), source })
}

/// The first signal ends the run after its step, with a checkpoint; a second one ends it at once.
fn listen_to_signals(stop: &Arc<AtomicBool>) -> Result<(), Error> {
    use signal_hook::{consts, flag};
    for signal in [consts::SIGINT, consts::SIGTERM, consts::SIGUSR1] {
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(stop))
            .and_then(|_| flag::register(signal, Arc::clone(stop)))
            .map_err(|source| Error::Io {
                action: "listening to",
                path: "signals".into(),
                source,
            })?;
    }
    Ok(())
}
