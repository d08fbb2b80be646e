//! Comments, commas, duplicates and text that is not JSON.

use super::super::parse::parse;
use super::{assert_mistakes, mistakes, setting};

#[test]
fn comments_and_trailing_commas_are_no_part_of_the_file() {
    let text =
        "\u{feff}// first\n# second\n{ /* a\n \"b\": 1 */ \"steps_per_print\": 5, // third\n}\n";
    assert_eq!(setting(text, "log_every_n_steps"), 5);
}

#[test]
fn what_looks_like_a_comment_in_text_stays() {
    let text = r#"{"csv_monitor": {"enabled": true, "output_path": "a//b#c/*d*/\",}"}}"#;
    assert_eq!(setting(text, "csv_monitor")["output_path"], "a//b#c/*d*/\",}");
}

#[test]
fn a_comma_without_a_value_is_refused() {
    for text in ["{,}", r#"{"a": [,]}"#, r#"{"a": 1,,}"#, r#"{"a":,}"#] {
        assert_mistakes(text, &["deepspeed: "]);
    }
}

#[test]
fn lines_stay_where_they_are() {
    let found = mistakes("{ /* one\n two */ // three\n  \"fp16\": {,\n}");
    assert!(found[0].contains("line 3"), "{found:?}");
    let open = mistakes("{\n\n/* open");
    assert!(open[0].contains("line 3"), "{open:?}");
}

#[test]
fn duplicates_are_reported_with_all_other_mistakes() {
    let text = r#"{"fp16": {"enabled": true, "enabled": false}, "zero_optimization": {"stage": 7},
        "steps_per_print": 1, "steps_per_print": 2}"#;
    assert_mistakes(
        text,
        &[
            "fp16.enabled: stands twice, as true and as false",
            "steps_per_print: stands twice",
            "zero_optimization.stage: 7 is out of range; choose 0 to 3",
        ],
    );
}

#[test]
fn other_forms_than_json_say_what_is_expected() {
    for text in ["eyJhIjogMX0=", "", "[1]", "null", "train_batch_size: 4", "/* {} */"] {
        assert_mistakes(text, &["deepspeed: the file does not begin with `{`"]);
    }
}

#[test]
fn depth_is_limited() {
    let deep = format!("{{\"a\": {}", "[".repeat(100_000));
    assert!(mistakes(&deep)[0].contains("recursion limit"));
}

#[test]
fn whole_numbers_may_have_an_exponent() {
    let text = r#"{"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}}"#;
    assert_eq!(setting(text, "strategy")["zero"]["reduce_bucket_size"], 500_000_000);
    assert_eq!(parse(r#"{"a": 5e8}"#).expect("it is JSON").settings["a"], 5e8);
}
