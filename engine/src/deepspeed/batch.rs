//! The three batch sizes: `train_batch_size = micro x accumulate x ranks`.

use super::section::Section;
use crate::error::Mistake;

const TRAIN: &str = "train_batch_size";
const MICRO: &str = "train_micro_batch_size_per_gpu";
const ACCUMULATE: &str = "gradient_accumulation_steps";

/// The batch sizes that are given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Samples of one optimizer step on all ranks.
    pub train: Option<usize>,
    /// Samples of one forward pass on one rank.
    pub micro: Option<usize>,
    /// Forward passes of one optimizer step.
    pub accumulate: Option<usize>,
}

/// A batch size and where it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The size.
    pub value: usize,
    /// Where it comes from.
    pub origin: Origin,
}

/// Where a batch size comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It is given.
    File,
    /// It follows from the others.
    Inferred,
}

/// The batch sizes that agree. Those that neither are given nor follow are left open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resolved {
    /// Samples of one optimizer step on all ranks.
    pub train: Option<Part>,
    /// Samples of one forward pass on one rank.
    pub micro: Option<Part>,
    /// Forward passes of one optimizer step.
    pub accumulate: Option<Part>,
}

/// Completes the batch sizes as DeepSpeed does: the third follows from two, and gradients are not
/// accumulated where only one is given.
///
/// # Errors
///
/// A size of 0, or `train` that is not `micro x accumulate x world`.
pub fn resolve(given: Batch, world: usize) -> Result<Resolved, Mistake> {
    let named = [(TRAIN, given.train), (MICRO, given.micro), (ACCUMULATE, given.accumulate)];
    if let Some((name, _)) = named.into_iter().find(|(_, value)| *value == Some(0)) {
        return Err(Mistake::new(name, "0 is too small; the least is 1"));
    }
    let world = world.max(1);
    let [train, micro, accumulate] = match (given.train, given.micro, given.accumulate) {
        (Some(train), Some(micro), Some(accumulate)) => {
            [file(train), file(micro), file(accumulate)]
        }
        (Some(train), Some(micro), None) => {
            [file(train), file(micro), inferred(train / micro / world)]
        }
        (Some(train), None, Some(accumulate)) => {
            [file(train), inferred(train / world / accumulate), file(accumulate)]
        }
        (Some(train), None, None) => [file(train), inferred(train / world), inferred(1)],
        (None, Some(micro), accumulate) => {
            let accumulate = accumulate.map_or(inferred(1), file);
            let train = product(micro, accumulate.value, world).ok_or_else(|| {
                let problem = format!("{micro} samples on each of {world} ranks are too many");
                Mistake::new(MICRO, problem)
            })?;
            [inferred(train), file(micro), accumulate]
        }
        (None, None, accumulate) => {
            return Ok(Resolved { accumulate: accumulate.map(file), ..Resolved::default() });
        }
    };
    if product(micro.value, accumulate.value, world) != Some(train.value) {
        return Err(unequal(train, micro, accumulate, world));
    }
    Ok(Resolved { train: Some(train), micro: Some(micro), accumulate: Some(accumulate) })
}

fn file(value: usize) -> Part {
    Part { value, origin: Origin::File }
}

fn inferred(value: usize) -> Part {
    Part { value, origin: Origin::Inferred }
}

fn product(micro: usize, accumulate: usize, world: usize) -> Option<usize> {
    micro.checked_mul(accumulate)?.checked_mul(world)
}

fn unequal(train: Part, micro: Part, accumulate: Part, world: usize) -> Mistake {
    let whence = |part: Part| match part.origin {
        Origin::File => "file",
        Origin::Inferred => "inferred",
    };
    let problem = format!(
        "{TRAIN} {} ({}) is not {} ({MICRO}, {}) x {} ({ACCUMULATE}, {}) x {world} (ranks); \
         change one of them, or leave one out",
        train.value,
        whence(train),
        micro.value,
        whence(micro),
        accumulate.value,
        whence(accumulate),
    );
    Mistake::new(TRAIN, problem)
}

/// Reads the batch sizes of the file. `"auto"` counts as not given.
pub(super) fn read(file: &mut Section<'_, '_>, world: usize) {
    let mistakes = file.mistakes();
    let mut size = |key| {
        let given = file.integer(key, 1..=i64::MAX)?;
        usize::try_from(given).ok()
    };
    let given = Batch { train: size(TRAIN), micro: size(MICRO), accumulate: size(ACCUMULATE) };
    if file.mistakes() > mistakes {
        return;
    }
    match resolve(given, world) {
        Ok(resolved) => emit(file, given, resolved),
        Err(mistake) => file.mistake_at(mistake.setting, mistake.problem),
    }
}

fn emit(file: &mut Section<'_, '_>, given: Batch, resolved: Resolved) {
    if let Some(train) = given.train {
        file.emit(TRAIN, train, TRAIN);
    }
    let mut part = |native: &str, key: &'static str, part: Option<Part>| match part {
        Some(Part { value, origin: Origin::File }) => file.emit(native, value, key),
        Some(Part { value, origin: Origin::Inferred }) => {
            file.emit_from(native, value, format!("{key} (inferred)"));
        }
        None => {
            let how = if file.is_auto(key) { "is \"auto\"" } else { "is not given" };
            file.note(format!("`{key}` {how} and does not follow; `{native}` of the run applies"));
        }
    };
    part("batch_size", MICRO, resolved.micro);
    part("accumulate_grad_batches", ACCUMULATE, resolved.accumulate);
}
