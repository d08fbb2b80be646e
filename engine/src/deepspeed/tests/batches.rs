//! The batch sizes.

use super::super::batch::{Batch, Origin, Part, resolve};
use super::{assert_note, mistakes, setting};

fn given(train: usize, micro: usize, accumulate: usize) -> Batch {
    let some = |value: usize| (value > 0).then_some(value);
    Batch { train: some(train), micro: some(micro), accumulate: some(accumulate) }
}

fn values(batch: Batch, world: usize) -> [usize; 3] {
    let resolved = resolve(batch, world).expect("the sizes agree");
    let value = |part: Option<Part>| part.map_or(0, |part| part.value);
    [value(resolved.train), value(resolved.micro), value(resolved.accumulate)]
}

#[test]
fn what_is_not_given_follows_as_in_deepspeed() {
    assert_eq!(values(given(24, 4, 3), 2), [24, 4, 3]);
    assert_eq!(values(given(24, 4, 0), 2), [24, 4, 3]);
    assert_eq!(values(given(24, 0, 3), 2), [24, 4, 3]);
    assert_eq!(values(given(0, 4, 3), 2), [24, 4, 3]);
    assert_eq!(values(given(24, 0, 0), 2), [24, 12, 1]);
    assert_eq!(values(given(0, 4, 0), 2), [8, 4, 1]);
    assert_eq!(values(given(0, 0, 3), 2), [0, 0, 3]);
    assert_eq!(values(given(0, 0, 0), 2), [0, 0, 0]);
}

#[test]
fn origins_tell_given_from_inferred() {
    let resolved = resolve(given(24, 4, 0), 2).expect("the sizes agree");
    assert_eq!(resolved.micro, Some(Part { value: 4, origin: Origin::File }));
    assert_eq!(resolved.accumulate, Some(Part { value: 3, origin: Origin::Inferred }));
}

#[test]
fn a_failing_equation_is_shown_with_all_its_numbers() {
    let mistake = resolve(given(32, 4, 0), 3).expect_err("32 is not a multiple of 12");
    assert_eq!(mistake.setting, "train_batch_size");
    let equation = "train_batch_size 32 (file) is not 4 (train_micro_batch_size_per_gpu, file) x 2 \
                    (gradient_accumulation_steps, inferred) x 3 (ranks)";
    assert!(mistake.problem.starts_with(equation), "{mistake}");
}

#[test]
fn sizes_that_no_equation_allows_are_refused() {
    for (batch, world) in [
        (given(1, 0, 0), 2),
        (given(2, 4, 0), 1),
        (given(7, 0, 2), 1),
        (given(0, usize::MAX, 2), 2),
        (given(usize::MAX, usize::MAX, 2), 2),
    ] {
        assert!(resolve(batch, world).is_err(), "{batch:?} on {world}");
    }
    let none = resolve(Batch { micro: Some(0), ..Batch::default() }, 1).expect_err("0 samples");
    assert_eq!(none.setting, "train_micro_batch_size_per_gpu");
}

#[test]
fn sizes_of_the_file_become_native_settings() {
    let text = r#"{"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}"#;
    assert_eq!(setting(text, "train_batch_size"), 24);
    assert_eq!(setting(text, "batch_size"), 4);
    assert_eq!(setting(text, "accumulate_grad_batches"), 3);
    let open = r#"{"train_batch_size": "auto", "gradient_accumulation_steps": 2}"#;
    assert!(setting(open, "train_batch_size").is_null());
    assert_note(open, "`batch_size` of the run applies");
}

#[test]
fn a_size_that_is_no_size_is_reported_once() {
    let text = r#"{"train_batch_size": 7.5, "train_micro_batch_size_per_gpu": -1}"#;
    assert_eq!(mistakes(text).len(), 2);
}
