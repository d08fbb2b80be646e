//! The command line, as typed.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand, ValueEnum};
use pyroclast::{Error, doctor::Doctor};

use crate::bench::BenchArgs;
use crate::checkpoint::CheckpointArgs;
use crate::settings::Settings;
use crate::{console, misuse};

/// Sharded training for Burn models.
#[derive(Debug, Parser)]
#[command(name = "pyroclast", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Subcommands,
}

#[derive(Debug, Subcommand)]
enum Subcommands {
    /// Train a GPT on text.
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Train(Box<TrainArgs>),
    /// Continue a text with a trained model.
    #[command(args_override_self = true)]
    Generate(GenerateArgs),
    /// List devices, what they can do, and what is missing.
    Doctor(DoctorArgs),
    /// Measure how fast the parts are, after verifying what they compute.
    #[command(args_override_self = true)]
    Bench(BenchArgs),
    /// Look into checkpoints, verify them, and give their weights to others.
    #[command(args_override_self = true)]
    Checkpoint(CheckpointArgs),
    /// Commands of later versions.
    #[command(external_subcommand)]
    Other(Vec<OsString>),
}

/// What to do.
#[derive(Debug)]
pub(crate) enum Command {
    /// Show this text.
    Help(String),
    Train(Box<TrainArgs>),
    Generate(GenerateArgs),
    Doctor(DoctorArgs),
    Bench(BenchArgs),
    Checkpoint(CheckpointArgs),
}

/// Arguments of `train`.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// Settings from a TOML, JSON or YAML file, under the flags' names; flags win.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Settings from a DeepSpeed JSON file, as it is; flags win.
    #[arg(long, value_name = "FILE")]
    pub(crate) deepspeed: Option<PathBuf>,
    /// Print the resolved settings as JSON, with where each was set, and end.
    #[arg(long)]
    pub(crate) print_config: bool,
}

/// Arguments of `generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// Folder of a run, or of one checkpoint.
    #[arg(long, value_name = "DIR")]
    pub(crate) from: PathBuf,
    /// Text to continue.
    #[arg(long, default_value = "")]
    pub(crate) prompt: String,
    /// Bytes to generate.
    #[arg(long, default_value_t = 400)]
    pub(crate) length: usize,
    /// 0 always takes the likeliest byte, 1 samples the model's distribution.
    #[arg(long, default_value_t = 0.8)]
    pub(crate) temperature: f64,
    /// Choose among so many likeliest bytes only.
    #[arg(long)]
    pub(crate) top_k: Option<usize>,
    /// Choose among the likeliest bytes that together reach this probability.
    #[arg(long)]
    pub(crate) top_p: Option<f64>,
    /// Seed of the choice.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// cpu, gpu, wgpu, vulkan, cuda, auto.
    #[arg(long, default_value = "cpu")]
    pub(crate) accelerator: String,
}

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// For people, or for machines.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

/// Who reads the output.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Format {
    /// People.
    Text,
    /// Machines.
    Json,
}

impl DoctorArgs {
    pub(crate) fn run(&self) -> Result<(), Error> {
        let doctor = Doctor::examine();
        console::say(&match self.format {
            Format::Text => doctor.to_text(),
            Format::Json => serde_json::to_string(&doctor).unwrap_or_default(),
        });
        Ok(())
    }
}

/// Commands that later versions have.
const NOT_YET: [&str; 2] = ["launch", "estimate"];

/// Reads the command line. Underscores in flags' names are as good as dashes.
pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Command, Error> {
    let cli = match Cli::try_parse_from(args.into_iter().map(dashed)) {
        Ok(cli) => cli,
        Err(error) => return explain(&error),
    };
    match cli.command {
        Subcommands::Train(args) => Ok(Command::Train(args)),
        Subcommands::Generate(args) => Ok(Command::Generate(args)),
        Subcommands::Doctor(args) => Ok(Command::Doctor(args)),
        Subcommands::Bench(args) => Ok(Command::Bench(args)),
        Subcommands::Checkpoint(args) => Ok(Command::Checkpoint(args)),
        Subcommands::Other(words) => {
            let name = words.first().map(|word| word.to_string_lossy()).unwrap_or_default();
            Err(match NOT_YET.contains(&&*name) {
                true => misuse("command", format!("`{name}` is not in this version")),
                false => misuse(
                    "command",
                    format!(
                        "unknown command `{name}`; there are train, generate, doctor, bench, checkpoint"
                    ),
                ),
            })
        }
    }
}

fn dashed(arg: OsString) -> OsString {
    let Some(text) = arg.to_str().filter(|text| text.starts_with("--")) else { return arg };
    match text.split_once('=') {
        Some((name, value)) => format!("{}={value}", name.replace('_', "-")).into(),
        None => text.replace('_', "-").into(),
    }
}

/// Help and version are answers; anything else is one line that says what is wrong.
fn explain(error: &clap::Error) -> Result<Command, Error> {
    let text = error.render().to_string();
    let is_answer = matches!(
        error.kind(),
        ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    );
    if is_answer {
        return Ok(Command::Help(text));
    }
    let said = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:"))
        .filter(|line| !line.is_empty())
        .map(|line| line.trim_start_matches("error: "));
    Err(misuse("command line", said.collect::<Vec<_>>().join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_words(words: &str) -> Result<Command, Error> {
        parse(words.split(' ').map(OsString::from))
    }

    #[test]
    fn underscores_are_as_good_as_dashes() {
        for words in ["pyroclast train --max_steps 5", "pyroclast train --max-steps=5"] {
            match parse_words(words) {
                Ok(Command::Train(args)) => assert_eq!(args.settings.max_steps, Some(5)),
                other => panic!("{words}: {other:?}"),
            }
        }
    }

    #[test]
    fn mistakes_are_one_line_of_misuse() {
        for (words, expected) in [
            ("pyroclast train --max-stepz 5", "--max-stepz"),
            ("pyroclast train --max-steps five", "five"),
            ("pyroclast trian", "unknown command `trian`"),
            ("pyroclast launch", "`launch` is not in this version"),
            ("pyroclast bench collectives --world two", "two"),
            ("pyroclast generate", "--from"),
        ] {
            let error = parse_words(words).expect_err(words);
            let message = error.to_string();
            assert!(error.is_misuse() && message.contains(expected), "{words}: {message}");
            assert!(!message.contains('\n'), "{words}: {message}");
        }
    }

    #[test]
    fn help_is_no_mistake() {
        for words in [
            "pyroclast",
            "pyroclast --help",
            "pyroclast train --help",
            "pyroclast bench",
            "pyroclast -V",
        ] {
            assert!(matches!(parse_words(words), Ok(Command::Help(_))), "{words}");
        }
    }
}
