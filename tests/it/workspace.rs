use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The crates, lowest first. Each may use only those before it.
const LADDER: [&str; 4] =
    ["pyroclast-kernels", "pyroclast-precision", "pyroclast-strategies", "pyroclast"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Direct dependencies of each package of the workspace, without those of its tests.
fn dependencies() -> BTreeMap<String, Vec<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo should run");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo's own format");
    let name = |value: &Value| value["name"].as_str().unwrap_or_default().to_owned();
    let packages = metadata["packages"].as_array().expect("packages");
    packages
        .iter()
        .map(|package| {
            let all = package["dependencies"].as_array().expect("dependencies");
            let normal = all.iter().filter(|dependency| dependency["kind"].is_null());
            (name(package), normal.map(name).collect())
        })
        .collect()
}

#[test]
fn dependencies_run_one_way() {
    let dependencies = dependencies();
    assert_eq!(dependencies.len(), 6, "{:?}", dependencies.keys());
    for (level, package) in LADDER.iter().enumerate() {
        let used = &dependencies[*package];
        for above in &LADDER[level..] {
            assert!(!used.contains(&(*above).to_owned()), "{package} must not use {above}");
        }
    }
    for (package, used) in &dependencies {
        for helper in ["pyroclast-tests", "pyroclast-examples"] {
            assert!(!used.contains(&helper.to_owned()), "{package} must not use {helper}");
        }
    }
}

#[test]
fn crates_do_not_know_what_they_must_not() {
    let dependencies = dependencies();
    let forbidden: [(&str, &[&str]); 3] = [
        ("pyroclast-kernels", &["crossbeam-channel", "clap", "safetensors", "serde"]),
        ("pyroclast-precision", &["crossbeam-channel", "clap", "safetensors"]),
        ("pyroclast-strategies", &["clap", "indicatif", "safetensors", "serde_json", "toml"]),
    ];
    for (package, names) in forbidden {
        for name in names {
            assert!(!dependencies[package].contains(&(*name).to_owned()), "{package} uses {name}");
        }
    }
    for (package, used) in &dependencies {
        let is_library = LADDER.contains(&package.as_str());
        assert!(!(is_library && used.contains(&"anyhow".to_owned())), "{package} uses anyhow");
    }
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !path.ends_with("target") {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn source_files_are_short_and_speak_for_themselves() {
    let mut files = Vec::new();
    for folder in ["kernels", "precision", "strategies", "engine", "tests", "examples"] {
        sources(&root().join(folder), &mut files);
    }
    assert!(files.len() > 40);
    for path in files {
        let text = std::fs::read_to_string(&path).expect("a source file");
        let lines = text.lines().count();
        assert!(lines <= 500, "{} has {lines} lines; split it by noun", path.display());
        for name in ["utils", "common", "helpers", "base"] {
            assert_ne!(path.file_stem().and_then(|s| s.to_str()), Some(name), "{}", path.display());
        }
        // Written in two parts, so that this file does not find itself.
        for unfinished in
            [concat!("to", "do!("), concat!("unimple", "mented!("), concat!("FIX", "ME")]
        {
            assert!(!text.contains(unfinished), "{} holds {unfinished}", path.display());
        }
        for (number, line) in text.lines().enumerate() {
            let is_unsafe =
                line.contains(concat!("uns", "afe {")) || line.contains(concat!("uns", "afe impl"));
            let said =
                number > 0 && text.lines().nth(number - 1).is_some_and(|l| l.contains("SAFETY:"));
            assert!(!is_unsafe || said, "{}:{} lacks a SAFETY note", path.display(), number + 1);
        }
    }
}
