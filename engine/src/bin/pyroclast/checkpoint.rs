//! `pyroclast checkpoint`: what is inside of one, whether it is whole, and its weights for others.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use pyroclast::checkpoint::{self, Checkpoint, Manifest, Tensors};
use pyroclast::gpt::{GptConfig, weights};
use pyroclast::output::RunFolder;
use pyroclast::{Error, precision};
use serde_json::json;

use crate::args::Format;
use crate::console::{grouped, say};
use crate::misuse;

/// Arguments of `checkpoint`.
#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    #[command(subcommand)]
    command: CheckpointCommand,
}

#[derive(Debug, Subcommand)]
enum CheckpointCommand {
    /// Show what is inside.
    Inspect {
        /// Folder of a run, or of one checkpoint.
        #[arg(long, value_name = "DIR")]
        from: PathBuf,
        /// For people, or for machines.
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// Read every byte, and compare it with what was written.
    Verify {
        /// Folder of a run, or of one checkpoint.
        #[arg(long, value_name = "DIR")]
        from: PathBuf,
    },
    /// Write the weights as one safetensors file.
    Export {
        /// Folder of a run, or of one checkpoint.
        #[arg(long, value_name = "DIR")]
        from: PathBuf,
        /// The file.
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
        /// Names and layout of matrices.
        #[arg(long, value_enum, default_value_t = Layout::Torch)]
        layout: Layout,
        /// f32, f64, f16, bf16 [default: as they are].
        #[arg(long, value_name = "TYPE")]
        dtype: Option<String>,
    },
    /// Write the checkpoint as another number of ranks would have. Not needed to continue a run.
    Reshard {
        /// Folder of a run, or of one checkpoint.
        #[arg(long, value_name = "DIR")]
        from: PathBuf,
        /// The new folder.
        #[arg(long, value_name = "DIR")]
        to: PathBuf,
        /// Ranks.
        #[arg(long)]
        world: usize,
    },
    /// Make a checkpoint of weights from elsewhere: safetensors, or a file that torch.save wrote, of which nothing is
    /// executed. Train from it with --init-from.
    Import {
        /// The file.
        #[arg(long, value_name = "FILE")]
        from: PathBuf,
        /// The new folder.
        #[arg(long, value_name = "DIR")]
        to: PathBuf,
        /// Names and layout of matrices.
        #[arg(long, value_enum, default_value_t = Layout::Torch)]
        layout: Layout,
        /// Attention heads of the GPT, which its weights do not tell. Without it, in Burn's layout, of any model.
        #[arg(long, value_name = "HEADS")]
        heads: Option<usize>,
        /// The dictionary in a torch file that holds the weights, such as state_dict [default: the outermost].
        #[arg(long, value_name = "NAME")]
        key: Option<String>,
    },
}

/// Whose names and layout.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Layout {
    /// PyTorch's; for the GPT alone, whose layers are known.
    Torch,
    /// Burn's.
    Burn,
}

/// Most ranks that a checkpoint is written for.
const MAX_WORLD: usize = 4096;

impl CheckpointArgs {
    /// Runs the command.
    pub(crate) fn run(&self) -> Result<(), Error> {
        match &self.command {
            CheckpointCommand::Inspect { from, format } => inspect(&open(from)?, *format),
            CheckpointCommand::Verify { from } => verify(&open(from)?),
            CheckpointCommand::Export { from, to, layout, dtype } => {
                let float = dtype.as_deref().map(precision::type_named).transpose();
                let float = float.map_err(|error| misuse("dtype", error.to_string()))?;
                let checkpoint = open(from)?;
                let config = checkpoint.manifest.config.clone();
                let is_gpt = serde_json::from_value::<GptConfig>(config).is_ok();
                if let (Layout::Torch, false) = (layout, is_gpt) {
                    let problem = "torch is for the GPT, whose layers are known; use burn";
                    return Err(misuse("layout", problem));
                }
                weights::export(&checkpoint, to, layout.of_weights(), float)?;
                say(&format!("wrote {}", to.display()));
                Ok(())
            }
            CheckpointCommand::Reshard { from, to, world } => {
                if !(1..=MAX_WORLD).contains(world) {
                    let problem = format!("{world} is out of range; it must be 1 to {MAX_WORLD}");
                    return Err(misuse("world", problem));
                }
                if to.exists() {
                    return Err(misuse("to", format!("{} exists already", to.display())));
                }
                checkpoint::reshard(&open(from)?, to, *world)?;
                say(&format!("wrote {}", to.display()));
                Ok(())
            }
            CheckpointCommand::Import { from, to, layout, heads, key } => {
                if to.exists() {
                    return Err(misuse("to", format!("{} exists already", to.display())));
                }
                let tensors = Tensors::open(from, key.as_deref())?;
                match (layout, heads) {
                    (_, Some(heads)) => {
                        weights::import(&tensors, layout.of_weights(), *heads, to)?;
                    }
                    (Layout::Burn, None) => weights::import_burn(&tensors, to)?,
                    (Layout::Torch, None) => {
                        let problem =
                            "a GPT's weights do not tell how many it has; give their number";
                        return Err(misuse("heads", problem));
                    }
                }
                say(&format!("wrote {}", to.display()));
                Ok(())
            }
        }
    }
}

impl Layout {
    fn of_weights(self) -> weights::Layout {
        match self {
            Self::Torch => weights::Layout::Torch,
            Self::Burn => weights::Layout::Burn,
        }
    }
}

/// The checkpoint that a path means: itself, or the newest of a run.
fn open(from: &Path) -> Result<Checkpoint, Error> {
    let newest = checkpoint::newest(&RunFolder::at(from).checkpoints())?;
    Checkpoint::open(&newest.unwrap_or_else(|| from.to_owned()))
}

fn verify(checkpoint: &Checkpoint) -> Result<(), Error> {
    checkpoint.verify()?;
    let bytes: u64 = checkpoint.manifest.files.values().map(|file| file.bytes).sum();
    let files = checkpoint.manifest.files.len();
    let path = checkpoint.path().display();
    let elsewhere = checkpoint.elsewhere();
    if elsewhere.is_empty() {
        say(&format!("{path}: {files} files, {} bytes, all as they were written", grouped(bytes)));
    } else {
        let (here, names) = (files - elsewhere.len(), elsewhere.join(", "));
        say(&format!("{path}: {here} of {files} files are here, all as they were written"));
        say(&format!("  other machines have {names}"));
    }
    Ok(())
}

/// Elements by what they are and of which type.
fn totals(manifest: &Manifest) -> BTreeMap<(&str, &str), u64> {
    let mut totals = BTreeMap::new();
    for tensor in manifest.tensors.values() {
        let elements = tensor.num_elements().unwrap_or_default() as u64;
        let states = tensor.states.iter().map(|(name, dtype)| (name.as_str(), dtype.as_str()));
        for key in [("weights", tensor.dtype.as_str())].into_iter().chain(states) {
            *totals.entry(key).or_default() += elements;
        }
    }
    totals
}

fn inspect(checkpoint: &Checkpoint, format: Format) -> Result<(), Error> {
    let manifest = &checkpoint.manifest;
    let totals = totals(manifest);
    if let Format::Json = format {
        let totals: Vec<_> = totals
            .iter()
            .map(
                |((of, dtype), elements)| json!({ "of": of, "dtype": dtype, "elements": elements }),
            )
            .collect();
        let mut shown = serde_json::to_value(manifest).unwrap_or_default();
        shown["path"] = json!(checkpoint.path());
        shown["totals"] = json!(totals);
        say(&shown.to_string());
        return Ok(());
    }
    let text = |key: &str| match &manifest.config[key] {
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    say(&format!("{}", checkpoint.path().display()));
    say(&format!("  step        {} ({} skipped)", grouped(manifest.step), manifest.skipped));
    say(&format!("  trained on  {} samples", grouped(manifest.samples)));
    match manifest.config.get("strategy") {
        Some(_) => say(&format!(
            "  written by  {} ranks, {}, {}",
            manifest.world,
            text("strategy"),
            text("precision")
        )),
        None => say("  written by  checkpoint import"),
    }
    if !checkpoint.elsewhere().is_empty() {
        say(&format!("  elsewhere   {}", checkpoint.elsewhere().join(", ")));
    }
    for ((of, dtype), elements) in totals {
        say(&format!("  {of:<11} {} {dtype}", grouped(elements)));
    }
    for (name, file) in &manifest.files {
        say(&format!("  {name}  {} bytes", grouped(file.bytes)));
    }
    for (path, tensor) in &manifest.tensors {
        let shape = tensor.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(" x ");
        say(&format!("  {path:<40} {} {shape}", tensor.dtype));
    }
    Ok(())
}
