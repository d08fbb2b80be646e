//! `pyroclast generate`.

use burn::module::Module;
use pyroclast::checkpoint;
use pyroclast::gpt::{Gpt, GptConfig, generate};
use pyroclast::output::RunFolder;
use pyroclast::strategies::parameters;
use pyroclast::{Accelerator, Error};

use crate::args::GenerateArgs;
use crate::console::{printable, say};
use crate::misuse;

/// Runs the command.
pub(crate) fn run(args: &GenerateArgs) -> Result<(), Error> {
    let sampler =
        generate::Sampler { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p };
    let mistakes = sampler.mistakes();
    if !mistakes.is_empty() {
        return Err(Error::Config(mistakes));
    }
    let device = args.accelerator.parse::<Accelerator>()?.device()?;
    let run = RunFolder::at(&args.from);
    let path = match checkpoint::newest(&run.checkpoints())? {
        Some(path) => path,
        None if args.from.join("checkpoint.json").is_file() => args.from.clone(),
        None => {
            let problem = format!("{}: holds no checkpoint", args.from.display());
            return Err(misuse("from", problem));
        }
    };
    let mut checkpoint = checkpoint::load(&path)?;
    let config: GptConfig = serde_json::from_value(checkpoint.manifest.config.clone())
        .map_err(|error| misuse("from", format!("{}: is not of a GPT: {error}", path.display())))?;
    let mut missing = None;
    let model = parameters::write(Gpt::new(&config, &device), |info| {
        let found = checkpoint.model.remove(&info.path);
        if found.is_none() {
            missing.get_or_insert_with(|| info.path.clone());
        }
        found.map(|(_, values)| values)
    })?;
    if let Some(missing) = missing {
        return Err(misuse("from", format!("{}: has no `{missing}`", path.display())));
    }
    let settings = (args.length, sampler, args.seed);
    let prompt = args.prompt.as_bytes();
    let text = generate::generate((&model.valid(), config.context), prompt, settings, &device)?;
    say(&printable(&[prompt, &text].concat()));
    Ok(())
}
