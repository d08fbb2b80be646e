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

/// Tensors of a safetensors file: name, type, shape, bytes.
fn tensors(path: &Path) -> Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(path).expect("a file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let all = file.iter().map(|(name, view)| {
        (name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec())
    });
    let mut all: Vec<_> = all.collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn the_import_of_an_export_is_the_same_bit_by_bit() {
    let folder = trained(&["--precision=bf16-mixed"]);
    let here = folder.path();
    for (layout, dtype, heads) in [
        ("torch", None, Some("--heads=2")),
        ("burn", None, Some("--heads=2")),
        ("burn", None, None),
        ("torch", Some("--dtype=bf16"), Some("--heads=2")),
        ("burn", Some("--dtype=f64"), Some("--heads=2")),
    ] {
        let name = format!("{layout}{}{}", dtype.unwrap_or_default(), heads.unwrap_or_default());
        let [exported, imported, again] =
            ["exported", "imported", "again"].map(|what| format!("{what}{name}"));
        let layout = format!("--layout={layout}");
        let command = |command: &str, from: &str, to: &str, more: &[&str]| {
            let (from, to) = (format!("--from={from}"), format!("--to={to}"));
            run(here, &[&["checkpoint", command, &from, &to, &layout], more].concat());
        };
        command("export", "run", &exported, dtype.as_slice());
        command("import", &exported, &imported, heads.as_slice());
        let verified = run(here, &["checkpoint", "verify", &format!("--from={imported}")]);
        assert!(verified.contains("1 files"), "{verified}");
        command("export", &imported, &again, &[]);
        assert_eq!(tensors(&here.join(&again)), tensors(&here.join(&exported)), "{name}");
    }
    // It is begun from like any weights, generated with, and not continued.
    let sizes = ["--layers=1", "--heads=2", "--width=16", "--context=8", "--batch-size=2"];
    let begun = ["--lr=1e-30", "--weight-decay=0", "--val-check-interval=0", "--max-steps=1"];
    let more = ["--init-from=importedtorch--heads=2", "--save-weights=w.safetensors", "--out=new"];
    run(here, &[&["train"], &sizes[..], &begun, &more].concat());
    assert_eq!(tensors(&here.join("w.safetensors")), tensors(&here.join("exportedtorch--heads=2")));
    let inspected = run(here, &["checkpoint", "inspect", "--from=importedtorch--heads=2"]);
    assert!(inspected.contains("checkpoint import"), "{inspected}");
    let resumed = ["--resume=importedtorch--heads=2", "--out=other", "--max-steps=1"];
    let output = pyroclast(here, &[&["train"], &sizes[..], &resumed].concat());
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("begin with them: init_from"), "{}", said(&output));
}

#[test]
fn torch_files_are_imported_bit_by_bit() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let from = format!("--from={}", golden.join("small.pt").display());
    let import = ["checkpoint", "import", &from, "--heads=2"];
    run(here, &[&import[..], &["--key=state_dict", "--to=new"]].concat());
    run(here, &["checkpoint", "export", "--from=new", "--to=w.safetensors"]);
    assert_eq!(tensors(&here.join("w.safetensors")), tensors(&golden.join("small.safetensors")));
    fs::write(here.join("bad.pt"), b"no pickle").expect("a file");
    let table: [(&[&str], &str); 7] = [
        (&[&from, "--heads=2"], "but `state_dict.pos.weight`; name the dictionary"),
        (&[&from, "--heads=2", "--key=model"], "[\"epoch\", \"state_dict\"]"),
        (&[&from, "--heads=3", "--key=state_dict"], "heads"),
        (&[&from, "--key=state_dict"], "heads"),
        (&["--from=bad.pt", "--heads=2"], "bad.pt"),
        (&["--from=nowhere.pt", "--heads=2"], "nowhere.pt"),
        (&[&from, "--heads=2", "--key=state_dict", "--layout=burn"], "missing"),
    ];
    for (args, expected) in table {
        let output = pyroclast(here, &[&["checkpoint", "import", "--to=other"], args].concat());
        let said = said(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{args:?}: {said}");
        assert!(said.contains(expected), "{args:?}: {said}");
        assert!(!here.join("other").exists() && !here.join(".other").exists(), "{args:?}");
    }
}
