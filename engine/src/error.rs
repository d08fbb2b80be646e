//! Errors of the engine, and which of them are the user's to mend.

use std::path::PathBuf;

use pyroclast_strategies::Culprit;

/// An error of user code, such as a training step.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// One thing wrong with what the user asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The setting, as the configuration names it.
    pub setting: String,
    /// What is wrong, with the value and the limit, and what to do instead.
    pub problem: String,
}

impl Mistake {
    /// A mistake in `setting`.
    pub fn new(setting: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { setting: setting.into(), problem: problem.into() }
    }
}

impl std::fmt::Display for Mistake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.setting, self.problem)
    }
}

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Settings that cannot be honoured, all of them at once.
    #[error("{}", list(.0))]
    Config(Vec<Mistake>),
    /// Data that cannot be trained on.
    #[error("data: {0}")]
    Data(String),
    /// User code failed on a rank.
    #[error("rank {rank}: {stage}: {source}")]
    Task {
        /// The rank.
        rank: usize,
        /// What was running.
        stage: &'static str,
        /// The user's error.
        source: BoxError,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panic {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },
    /// A collective or a model's layout failed.
    #[error(transparent)]
    Strategy(#[from] pyroclast_strategies::Error),
    /// A gradient is NaN or infinite, or no sample of the step had a weight.
    #[error(
        "step {step}: the gradient norm is {norm} and the loss {loss}{}; nothing was updated, and the \
         state before it is saved where there is an `out`. Lower lr or set gradient_clip_val; \
         detect_anomaly looks for where it begins",
        first(.culprit)
    )]
    NotFinite {
        /// The step that was not taken.
        step: u64,
        /// Mean loss over all ranks.
        loss: f64,
        /// Global gradient norm.
        norm: f64,
        /// Which gradient it is, if one is not finite.
        culprit: Option<Culprit>,
    },
    /// Gradients overflow however small the loss scale is.
    #[error(
        "step {step}: gradients overflow although the loss scale is at its minimum, {scale}{}; the state \
         before it is saved where there is an `out`. Lower lr, or use bf16-mixed; detect_anomaly looks for \
         where it begins",
        first(.culprit)
    )]
    LossScaleAtMinimum {
        /// The step that was not taken.
        step: u64,
        /// The loss scale.
        scale: f64,
        /// Which gradient it is.
        culprit: Option<Culprit>,
    },
    /// Training made a weight NaN or infinite.
    #[error("step {step} made `{path}` NaN or infinite; nothing was saved. Lower lr")]
    WeightsNotFinite {
        /// The last step.
        step: u64,
        /// Path of the first such parameter.
        path: String,
    },
    /// A collective returned something else than its definition says.
    #[error(
        "rank {rank}: {collective} of {elements} returned {found} at {index}, but the reference is \
         {expected}; nothing was timed"
    )]
    WrongResult {
        /// The rank that noticed.
        rank: usize,
        /// The collective.
        collective: &'static str,
        /// How many elements of which type.
        elements: String,
        /// The first wrong element.
        index: usize,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// The process of a rank has failed. It has said itself why, unless it was killed.
    #[error("the process of rank {rank} ended with {status}")]
    RankEnded {
        /// The rank.
        rank: usize,
        /// How it ended.
        status: std::process::ExitStatus,
    },
    /// Another rank could not save its part of a checkpoint. There is none.
    #[error("rank {rank} could not save: {problem}")]
    Saving {
        /// The rank.
        rank: usize,
        /// Its error.
        problem: String,
    },
    /// The file system refused.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A checkpoint or weights file that is not what it should be.
    #[error("{}: {problem}", path.display())]
    BadFile {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

impl Error {
    /// A single wrong setting.
    pub fn setting(setting: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Config(vec![Mistake::new(setting, problem)])
    }

    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    pub(crate) fn bad_file(path: impl Into<PathBuf>, problem: impl ToString) -> Self {
        Self::BadFile { path: path.into(), problem: problem.to_string() }
    }

    /// Whether other input would avoid the error (exit code 2), rather than luck (exit code 1).
    #[must_use]
    pub fn is_misuse(&self) -> bool {
        use pyroclast_strategies::Error::Setting;
        match self {
            Self::Config(_) | Self::Data(_) | Self::BadFile { .. } => true,
            Self::Strategy(error) => matches!(error, Setting(_)),
            Self::RankEnded { status, .. } => status.code() == Some(2),
            _ => false,
        }
    }
}

fn first(culprit: &Option<Culprit>) -> String {
    culprit.as_ref().map(|culprit| format!("; first {culprit}")).unwrap_or_default()
}

fn list(mistakes: &[Mistake]) -> String {
    mistakes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
