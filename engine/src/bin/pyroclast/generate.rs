//! `pyroclast generate`.

use burn::module::Module;
use pyroclast::checkpoint::{self, Checkpoint};
use pyroclast::gpt::generate::{self, Request};
use pyroclast::gpt::{Gpt, GptConfig};
use pyroclast::output::RunFolder;
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
    let checkpoint = Checkpoint::open(&path)?;
    let wrong = |problem: String| misuse("from", format!("{}: {problem}", path.display()));
    let config: GptConfig = serde_json::from_value(checkpoint.manifest.config.clone())
        .map_err(|error| wrong(format!("is not of a GPT: {error}")))?;
    if let Some(mistake) = config.mistakes().first() {
        return Err(wrong(format!("its configuration: {mistake}")));
    }
    let model = checkpoint.fill(Gpt::new(&config, &device)).map_err(wrong)?;
    let prompt = args.prompt.as_bytes();
    let request = Request { prompt, length: args.length, sampler, seed: args.seed };
    let text = generate::generate(&model.valid(), config.context, &request, &device)?;
    say(&printable(&[prompt, &text].concat()));
    Ok(())
}
