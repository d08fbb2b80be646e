//! `pyroclast checkpoint`, as a user types it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn pyroclast(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pyroclast"))
        .args(args)
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .expect("the command should start")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

/// Runs a command that succeeds, and returns what it says.
fn run(folder: &Path, args: &[&str]) -> String {
    let output = pyroclast(folder, args);
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    said(&output)
}

/// A folder with a run of two ranks that hold shards, and the weights that it saved itself.
fn trained(more: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let args = [
        "train",
        "--layers=1",
        "--heads=2",
        "--width=16",
        "--context=8",
        "--batch-size=2",
        "--max-steps=3",
        "--limit-val-batches=1",
        "--devices=2",
        "--strategy=zero3",
        "--out=run",
        "--save-weights=saved.safetensors",
    ];
    run(folder.path(), &[&args[..], more].concat());
    folder
}

#[test]
fn what_is_inside_is_shown_to_people_and_machines() {
    let folder = trained(&["--precision=bf16-mixed"]);
    let text = run(folder.path(), &["checkpoint", "inspect", "--from=run"]);
    for expected in
        ["step        3 (0 skipped)", "2 ranks, zero3, bf16-mixed", "head.weight", "16 x 256"]
    {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let json = run(folder.path(), &["checkpoint", "inspect", "--from=run", "--format=json"]);
    let shown: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((shown["step"].as_u64(), shown["world"].as_u64()), (Some(3), Some(2)));
    let weights = &shown["totals"].as_array().expect("totals")[2];
    assert_eq!((weights["of"].as_str(), weights["dtype"].as_str()), (Some("weights"), Some("f32")));
}

#[test]
fn exported_weights_are_those_of_the_run() {
    let folder = trained(&[]);
    let here = folder.path();
    run(here, &["checkpoint", "export", "--from=run", "--to=exported.safetensors"]);
    let read = |name: &str| fs::read(here.join(name)).expect("a file");
    let (saved, exported) = (read("saved.safetensors"), read("exported.safetensors"));
    let parse = |bytes: &[u8]| -> Vec<(String, Vec<usize>, Vec<u8>)> {
        let file = safetensors::SafeTensors::deserialize(bytes).expect("safetensors");
        let mut tensors: Vec<_> = file
            .iter()
            .map(|(name, view)| (name.to_owned(), view.shape().to_vec(), view.data().to_vec()))
            .collect();
        tensors.sort();
        tensors
    };
    assert_eq!(parse(&exported), parse(&saved), "bit for bit");

    // Read again, they are what a run starts from.
    let args = ["train", "--layers=1", "--heads=2", "--width=16", "--context=8", "--max-steps=1"];
    let more = ["--batch-size=2", "--lr=1e-30", "--weight-decay=0", "--val-check-interval=0"];
    let again = ["--init-from=exported.safetensors", "--out=again", "--save-weights=w.safetensors"];
    run(here, &[&args[..], &more, &again].concat());
    assert_eq!(parse(&read("w.safetensors")), parse(&saved));

    let half = ["checkpoint", "export", "--from=run", "--to=half.safetensors", "--dtype=bf16"];
    run(here, &[&half[..], &["--layout=burn"]].concat());
    let bytes = read("half.safetensors");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let weight = file.tensor("blocks.0.ln1.gamma").expect("Burn's path");
    assert_eq!(weight.dtype(), safetensors::Dtype::BF16);
    assert_eq!(file.tensor("head.weight").expect("a tensor").shape(), [16, 256]);
}

#[test]
fn a_checkpoint_for_other_ranks_continues_alike() {
    let folder = trained(&[]);
    let here = folder.path();
    run(here, &["checkpoint", "reshard", "--from=run", "--to=three", "--world=3"]);
    let verified = run(here, &["checkpoint", "verify", "--from=three"]);
    assert!(
        verified.contains("3 files") && verified.contains("as they were written"),
        "{verified}"
    );
    let losses = |from: &str, out: &str| {
        let args =
            ["train", "--layers=1", "--heads=2", "--width=16", "--context=8", "--max-steps=5"];
        let more = ["--batch-size=4", "--limit-val-batches=1", "--val-check-interval=0"];
        let (resume, out_flag) = (format!("--resume={from}"), format!("--out={out}"));
        run(here, &[&args[..], &more, &[&resume, &out_flag]].concat());
        let rows = fs::read_to_string(here.join(out).join("metrics.jsonl")).expect("metrics");
        let loss = |line: &str| {
            let row: serde_json::Value = serde_json::from_str(line).expect("a row");
            row["loss"].to_string()
        };
        rows.lines().map(loss).collect::<Vec<_>>()
    };
    assert_eq!(losses("three", "a"), losses("run/checkpoints/step-00000003", "b"));
}

#[test]
fn damage_and_wrong_input_are_one_line_and_exit_code_2() {
    let folder = trained(&[]);
    let here = folder.path();
    let file = here.join("run/checkpoints/step-00000003/rank-00001.safetensors");
    let mut bytes = fs::read(&file).expect("the file");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).expect("damage");
    let table: [(&[&str], &str); 8] = [
        (&["verify", "--from=run"], "rank-00001.safetensors: bytes 0 to"),
        (&["verify", "--from=nowhere"], "nowhere/checkpoint.json"),
        (&["export", "--from=run", "--to=x.safetensors"], "damaged"),
        (&["export", "--from=run", "--to=x", "--dtype=f12"], "there are f64, f32, f16, bf16"),
        (&["reshard", "--from=run", "--to=run", "--world=2"], "exists already"),
        (&["reshard", "--from=run", "--to=new", "--world=0"], "0 is out of range"),
        (&["import"], "--from <FILE>; --to <DIR>"),
        (&["mend"], "mend"),
    ];
    for (args, expected) in table {
        let output = pyroclast(here, &[&["checkpoint"], args].concat());
        let said = said(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{args:?}: {said}");
        assert!(said.contains(expected), "{args:?}: {said}");
    }
    for left in ["x.safetensors", "x.safetensors.partial", "new", ".new"] {
        assert!(!here.join(left).exists(), "{left}");
    }
}
