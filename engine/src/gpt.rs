//! A GPT on bytes: the model that `pyroclast train` trains.
//!
//! * [`model`]: the network, as any Burn module would be written.
//! * [`config`]: its sizes and presets.
//! * [`text`]: windows of text as a dataset.
//! * [`task`]: what a training step computes.
//! * [`weights`]: exchange with PyTorch.
//! * [`generate`]: continuing a text.

pub mod config;
pub mod generate;
pub mod model;
pub mod task;
pub mod text;
pub mod weights;

pub use config::GptConfig;
pub use model::Gpt;
pub use task::GptTask;
pub use text::TextData;
