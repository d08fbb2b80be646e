//! Every key that DeepSpeed has is honoured or refused.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::super::refused::{REFUSED, Source};
use super::super::{Context, translate};

const DOCUMENTED: &str = include_str!("../documented.txt");

/// A path, and the `type` of one of its sections.
fn paths() -> impl Iterator<Item = (Source, &'static str)> {
    let lines = DOCUMENTED.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines.map(|line| match line.strip_prefix("code: ") {
        Some(path) => (Source::CodeOnly, path),
        None => (Source::Documented, line),
    })
}

/// A file with nothing but `value` at `path`, in which `optimizer(Adam)` is a section of that type.
fn file_with(path: &str, value: Value) -> Value {
    path.rsplit('.').fold(value, |value, name| {
        let (name, kind) = match name.split_once('(') {
            Some((name, kind)) => (name, Some(kind.trim_end_matches(')'))),
            None => (name, None),
        };
        let mut inside = value;
        if let (Some(kind), Some(section)) = (kind, inside.as_object_mut()) {
            section.insert("type".to_owned(), kind.into());
        }
        Value::Object(Map::from_iter([(name.to_owned(), inside)]))
    })
}

fn plain(path: &str) -> String {
    let Some((section, rest)) = path.split_once('(') else {
        return path.to_owned();
    };
    let (_, rest) = rest.split_once(')').expect("the type ends");
    format!("{section}{rest}")
}

fn unknown_keys(file: &Value) -> Vec<String> {
    let mistakes = translate(&file.to_string(), &Context { world: 1, hidden_size: None });
    let mistakes = mistakes.err().unwrap_or_default().into_iter();
    mistakes.filter(|m| m.problem.starts_with("unknown key")).map(|m| m.setting).collect()
}

#[test]
fn every_documented_key_is_honoured_or_refused() {
    for (_, path) in paths() {
        let file = file_with(path, Value::Null);
        assert_eq!(unknown_keys(&file), Vec::<String>::new(), "{path}");
    }
}

#[test]
fn a_slip_in_any_section_is_found() {
    let sections = ["amp", "pipeline", "curriculum_metrics", "different_groups"];
    let parents: BTreeSet<&str> =
        paths().filter_map(|(_, path)| Some(path.rsplit_once('.')?.0)).collect();
    let is_open = |path: &&&str| sections.iter().any(|open| path.ends_with(open));
    // The parameters of optimizers that are not in this version are not looked at.
    let is_later =
        |path: &str| ["Muon", "OneBit", "ZeroOne"].iter().any(|name| path.contains(name));
    for parent in parents.iter().filter(|path| !is_open(path) && !is_later(path)) {
        let path = format!("{parent}.mispelled");
        assert_eq!(unknown_keys(&file_with(&path, json!(1))), [plain(&path)], "{parent}");
    }
    assert_eq!(unknown_keys(&json!({"mispelled": 1})), ["mispelled"]);
}

#[test]
fn the_table_and_the_documentation_agree() {
    let documented: BTreeSet<(&str, bool)> =
        paths().map(|(source, path)| (path, source == Source::CodeOnly)).collect();
    for row in REFUSED {
        let key = (row.path, row.source == Source::CodeOnly);
        assert!(
            documented.contains(&key),
            "{} is not in documented.txt as {:?}",
            row.path,
            row.source
        );
    }
    let rows: BTreeSet<&str> = REFUSED.iter().map(|row| row.path).collect();
    assert_eq!(rows.len(), REFUSED.len(), "no key has two rows");
}

#[test]
fn every_row_refuses_something_and_says_what_to_do() {
    let on = [
        json!(true),
        json!(false),
        json!(7),
        json!({"enabled": true}),
        json!({"deepcompile": true, "autotp_size": 4}),
    ];
    for row in REFUSED {
        let refusal = |value: &Value| {
            let file = file_with(row.path, value.clone()).to_string();
            let mistakes = translate(&file, &Context { world: 1, hidden_size: None }).err()?;
            mistakes
                .into_iter()
                .find(|m| m.setting == row.path && !m.problem.starts_with("unknown"))
        };
        let mistake = on.iter().find_map(refusal);
        assert!(mistake.is_some(), "{} accepts everything", row.path);
    }
}

#[test]
fn values_that_are_off_are_accepted() {
    let text = json!({
        "amp": {"enabled": false, "opt_level": "O1"},
        "elasticity": {"enabled": false, "micro_batch_sizes": [2, 4]},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": false}}},
        "tensor_parallel": {"autotp_size": 0, "preset_model": "llama"},
        "compile": {"deepcompile": false},
        "weight_quantization": {"enabled": false},
        "wall_clock_breakdown": false,
        "sequence_parallel_size": 1,
        "zero_allow_untested_optimizer": true,
        "zero_optimization": {"stage": 2, "allgather_partitions": true, "reduce_scatter": true,
            "stage3_model_persistence_threshold": 9_223_372_036_854_775_807_i64},
    });
    let context = Context { world: 1, hidden_size: None };
    let translation = translate(&text.to_string(), &context).expect("all of it is off");
    assert!(translation.notes.iter().any(|note| note.contains("tested with ZeRO")));
}

/// The documentation's table is this one. `PYROCLAST_BLESS=1` writes it anew.
#[test]
fn the_documentation_has_the_table_and_every_key_that_is_honoured() {
    const BEGIN: &str = "<!-- refused keys: begin -->\n";
    const END: &str = "<!-- refused keys: end -->";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/deepspeed.md");
    let text = std::fs::read_to_string(path).expect("the documentation");
    let (before, rest) = text.split_once(BEGIN).expect("where the table begins");
    let (_, after) = rest.split_once(END).expect("where the table ends");
    let rows: String = REFUSED.iter().map(|row| row.documentation() + "\n").collect();
    let table =
        format!("\n| key | accepted | why other values are refused |\n|---|---|---|\n{rows}\n");
    let expected = format!("{before}{BEGIN}{table}{END}{after}");
    if std::env::var_os("PYROCLAST_BLESS").is_some() {
        std::fs::write(path, &expected).expect("the documentation");
    } else {
        assert!(text == expected, "docs/deepspeed.md has another table; bless it");
    }
    let refused = |path: &str| REFUSED.iter().any(|row| path.starts_with(row.path));
    let is_missing = |path: &&str| {
        let is_named = |name: &str| expected.contains(&format!("`{name}"));
        !expected.contains(path) && !path.split('.').any(is_named)
    };
    let honoured =
        paths().map(|(_, path)| path).filter(|path| !refused(path) && !path.contains('('));
    let missing: Vec<&str> = honoured.filter(is_missing).collect();
    assert_eq!(missing, [""; 0], "not in docs/deepspeed.md");
}
